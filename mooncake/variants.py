"""Profiles of pairs of variants of one base model: which layers a receiver computes itself when it reads a sender's KV.

DroidSpeak (arXiv 2411.02820): fine-tuning changes the KV of only a few, adjacent layers enough to matter. A receiver
takes the sender's KV of all layers but such a group, and computes that group from the hidden states that the sender had
as the input of its first layer, so that the other model's error enters at only one layer. The group is in a profile,
measured once per pair (``mooncake variants profile``) and tied to both by the identities of their KV. Torch-free.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from mooncake.durable import write_whole
from mooncake.errors import ConfigError


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of recomputed layers, and the remaining difference from a full prefill."""

    first: int
    last: int
    kl: float  # nats, mean over the compared tokens
    agreement: float  # share of them with the same most likely token


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sender: str  # identity of its KV (``Precision.identity``)
    receiver: str
    first: int  # first layer that the receiver recomputes
    last: int
    sender_keeps: tuple[int, ...]  # the sender's model.keep_hidden
    inputs_first: bool = True  # read hidden states before KV, which is read while the receiver's layers are computed
    pareto: tuple[Candidate, ...] = ()  # the Pareto-optimal groups, for another choice

    @property
    def layers(self) -> range:
        return range(self.first, self.last + 1)

    def check(self, receiver: str, num_layers: int) -> None:
        """Raises ConfigError if the profile is not for this receiver."""
        if self.receiver != receiver:
            raise ConfigError(
                f"prefill.variant: the profile is for KV {self.receiver:.16}…, this node has {receiver:.16}…: "
                "another model or precision"
            )
        if not 0 <= self.first <= self.last < num_layers:
            raise ConfigError(f"prefill.variant: layers {self.first} to {self.last} are not in a model of {num_layers}")
        if self.first and self.first not in self.sender_keeps:
            raise ConfigError(
                f"prefill.variant: layer {self.first} starts from its input, which the sender must keep "
                f"(model.keep_hidden), but it keeps {list(self.sender_keeps)}"
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
    """Raises ConfigError when there is no room; then ``path`` holds what it held."""
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
