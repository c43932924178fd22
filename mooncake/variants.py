"""What one model may read of another's KV: two variants of one base, and the layers that the reader computes itself.

DroidSpeak (arXiv 2411.02820): fine-tuning changes few layers' KV so much that it matters, and they are neighbours. A
receiver takes a sender's KV of all layers but one group, and computes that group from what the sender's first of these
layers took as its input, so that one place alone carries the other model's error. Which group, a profile says: measured
once a pair (``mooncake variants profile``), bound to both by the names of their KV's content. Pure, and torch-free.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from mooncake.errors import ConfigError


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of layers, computed anew, and what it leaves of the difference to a full prefill."""

    first: int
    last: int
    kl: float  # nats, mean over the places that were compared
    agreement: float  # of them, with the same most likely token


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sender: str  # the content of its KV, as ``Precision.identity`` names it
    receiver: str
    first: int  # of the layers that the receiver computes anew
    last: int
    sender_keeps: tuple[int, ...]  # its model.keep_hidden
    inputs_first: bool = True  # what own layers begin with is read before KV, which follows while they are computed
    pareto: tuple[Candidate, ...] = ()  # groups that no smaller one is as good as, for whoever chooses again

    @property
    def layers(self) -> range:
        return range(self.first, self.last + 1)

    def check(self, receiver: str, num_layers: int) -> None:
        """That it is about this receiver. Raises ConfigError."""
        if self.receiver != receiver:
            raise ConfigError(
                f"prefill.variant: the profile is about KV {self.receiver:.16}…, this node makes {receiver:.16}…: "
                "it is of another model or precision"
            )
        if not 0 <= self.first <= self.last < num_layers:
            raise ConfigError(f"prefill.variant: layers {self.first} to {self.last} are not in a model of {num_layers}")
        if self.first and self.first not in self.sender_keeps:
            raise ConfigError(
                f"prefill.variant: layer {self.first} goes on from its input, which the sender must keep "
                f"(model.keep_hidden), and it keeps {list(self.sender_keeps)}"
            )


def read_profile(path: str) -> Profile:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"prefill.variant: cannot read {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"prefill.variant: {path} is no profile of `mooncake variants profile`: {error}") from None


def write_profile(path: Path, profile: Profile) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
