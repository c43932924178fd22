"""Predicted milliseconds of prefills, decode steps and transfers, fitted online to what nodes measure.

Pure. No coefficient is hard-coded: before the first sample of its kind, or a start value from ``mooncake calibrate``, a
prediction is unknown and counts as 0, which leaves the choice to load. A new node starts from what all nodes together
have shown until it has samples of its own. A sample far from its prediction counts less, so one hiccup changes nothing.

    prefill   a + b·new + c·new·(prefix + new/2)        (FAST'25 Eq. 1: linear layers and causal attention)
    step      a + b·batch + c·context                   (decode)
    transfer  a + b·bytes                               (latency and rate)
"""

from __future__ import annotations

from collections.abc import Callable, KeysView
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from conductor.placement.linear_fit import FORGETTING, Coefficients, LinearFit

NO_FORGETTING = 1.0  # every sample keeps its weight
MAX_FITS = 100_000  # pairs of peers remembered
ALL_NODES = ""
ATTENTION_SHARE = 3e-4  # prior: cost of attending to one more token, over a token's own cost
_PAIR = "\x00"


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Milliseconds to compute what is not cached of a prompt: of a step, of a new token, and of a pair of one and
    an earlier one."""

    step_ms: float = 0.0
    token_ms: float = 0.0
    pair_ms: float = 0.0
    is_known: bool = False

    def ms(self, new_tokens: float, prefix_tokens: float, steps: int = 1) -> float:
        """To compute ``new_tokens`` after ``prefix_tokens`` cached ones in this many steps."""
        pairs = new_tokens * (prefix_tokens + new_tokens / 2)
        return steps * self.step_ms + self.token_ms * new_tokens + self.pair_ms * pairs


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Milliseconds of a decode step: of itself, each sequence, and each KV token that they attend to together."""

    step_ms: float = 0.0
    sequence_ms: float = 0.0
    context_ms: float = 0.0
    is_known: bool = False

    def ms(self, batch: float, context_tokens: float) -> float:
        return self.step_ms + self.sequence_ms * batch + self.context_ms * context_tokens if batch else 0.0


@dataclass(frozen=True, slots=True)
class TransferCost:
    latency_ms: float = 0.0
    byte_ms: float = 0.0
    is_known: bool = False

    def ms(self, num_bytes: float) -> float:
        return self.latency_ms + self.byte_ms * num_bytes if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class StartCosts:
    """The costs a calibration found. Kinds it did not measure stay unknown."""

    prefill: PrefillCost = PrefillCost()
    decode: DecodeCost = DecodeCost()
    transfer: TransferCost = TransferCost()


class Changed(NamedTuple):
    kind: str  # prefill, decode or transfer
    node_id: str
    peer: str = ""


# Usual sizes of the features, which bring them near 1 (``LinearFit``).
_PREFILL_SCALES = (1.0, 1e3, 1e6)
_DECODE_SCALES = (1.0, 10.0, 1e4)
_TRANSFER_SCALES = (1.0, 1e6)


class CostModel:
    """One owner. Results are cached until the node reports again. ALL_NODES is the name for the fit over all nodes.
    ``take_changed`` lists the costs that have changed since the last call."""

    def __init__(self, start: StartCosts | None = None, forgetting: float = FORGETTING) -> None:
        # Prompts queue behind one another, so the errors of long ones matter in ms as well: a power between 1 (purely
        # relative errors) and the 0.5 that fits a sum of many independent parts.
        self._prefill = _Fits(_PREFILL_SCALES, forgetting, relative=0.7, last_share=ATTENTION_SHARE)
        self._decode = _Fits(_DECODE_SCALES, forgetting)
        self._transfer = _Fits(_TRANSFER_SCALES, forgetting)
        if start is not None:
            self.start_from(start)

    def observe_prefill(self, node_id: str, new_tokens: int, prefix_tokens: int, ms: float) -> None:
        self._prefill.observe(node_id, (1.0, float(new_tokens), new_tokens * (prefix_tokens + new_tokens / 2)), ms)

    def observe_decode(self, node_id: str, batch: int, context_tokens: int, ms: float) -> None:
        self._decode.observe(node_id, (1.0, float(batch), float(context_tokens)), ms)

    def observe_transfer(self, node_id: str, peer: str, num_bytes: int, ms: float) -> None:
        """``node_id`` moved bytes to or from ``peer``."""
        self._transfer.observe(_pair(node_id, peer), (1.0, float(num_bytes)), ms)

    def forget(self, node_id: str) -> None:
        """The node is gone; another process with the same id is measured afresh. The fit over all nodes keeps its
        samples."""
        self._prefill.forget(lambda name: name == node_id)
        self._decode.forget(lambda name: name == node_id)
        self._transfer.forget(lambda name: node_id in name.split(_PAIR))

    def prefill(self, node_id: str) -> PrefillCost:
        found = self._prefill.coefficients(node_id)
        return PrefillCost(found[0], found[1], found[2], True) if found else PrefillCost()

    def decode(self, node_id: str) -> DecodeCost:
        found = self._decode.coefficients(node_id)
        return DecodeCost(found[0], found[1], found[2], True) if found else DecodeCost()

    def transfer(self, node_id: str, peer: str) -> TransferCost:
        found = self._transfer.coefficients(_pair(node_id, peer))
        return TransferCost(found[0], found[1], True) if found else TransferCost()

    def transfer_of_all(self) -> TransferCost:
        """The cost assumed for a pair that has moved nothing yet."""
        found = self._transfer.coefficients(ALL_NODES)
        return TransferCost(found[0], found[1], True) if found else TransferCost()

    def measured_pairs(self) -> list[tuple[str, str]]:
        return [(node_id, peer) for node_id, _, peer in (name.partition(_PAIR) for name in self._transfer.names())]

    def error(self, kind: str, node_id: str = ALL_NODES) -> float:
        """Recent mean |ln(measured / predicted)| for ``kind`` prefill, decode or transfer; 0 when unknown."""
        return {"prefill": self._prefill, "decode": self._decode, "transfer": self._transfer}[kind].error(node_id)

    def take_changed(self, limit: int) -> list[Changed]:
        """Up to ``limit`` changed costs, each reported once. ALL_NODES stands for every node without samples of its
        own. Each kind has its turn, and within a kind the first to change: many nodes change faster than this is asked.
        """
        kinds = (("prefill", self._prefill), ("decode", self._decode), ("transfer", self._transfer))
        changed: list[Changed] = []
        while waiting := [(kind, fits) for kind, fits in kinds if fits.changed][: limit - len(changed)]:
            for kind, fits in waiting:
                name = next(iter(fits.changed))
                del fits.changed[name]
                node_id, _, peer = name.partition(_PAIR)
                changed.append(Changed(kind, node_id, peer))
        return changed

    def has_measured(self, kind: str, node_id: str) -> bool:
        return node_id in (self._prefill if kind == "prefill" else self._decode).names()

    def start_from(self, start: StartCosts) -> None:
        """Use a calibration until nodes report otherwise."""
        for tokens in (64, 512, 4096, 32768):
            for prefix in (0, 8192):
                if start.prefill.is_known:
                    self.observe_prefill(ALL_NODES, tokens, prefix, start.prefill.ms(tokens, prefix))
        for batch in (1, 4, 16, 64):
            for context in (512, 8192):
                if start.decode.is_known:
                    self.observe_decode(ALL_NODES, batch, batch * context, start.decode.ms(batch, batch * context))
        if start.transfer.is_known:
            for size in (10_000, 1_000_000, 100_000_000):
                self._transfer.observe(ALL_NODES, (1.0, float(size)), start.transfer.ms(size))


class _Fits:
    """One fit per name, and one over all of them for names without samples."""

    def __init__(self, scales: Coefficients, forgetting: float, relative: float = 1.0, last_share: float = 0.0) -> None:
        self._make_fit = partial(LinearFit, scales, relative, last_share, forgetting)
        self._all = self._make_fit()
        self._fits: dict[str, LinearFit] = {}
        self._cached: dict[str, Coefficients | None] = {}
        self.changed: dict[str, None] = {}  # an ordered set

    def observe(self, name: str, features: Coefficients, ms: float) -> None:
        self._all.observe(features, ms)
        self._cached.pop(ALL_NODES, None)
        self.changed[ALL_NODES] = None
        if name == ALL_NODES:
            return
        fit = self._fits.get(name)
        if fit is None:
            if len(self._fits) >= MAX_FITS:
                return
            fit = self._fits[name] = self._make_fit()
        fit.observe(features, ms)
        self._cached.pop(name, None)
        self.changed[name] = None

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        for name in [name for name in self._fits if is_gone(name)]:
            del self._fits[name]
            self._cached.pop(name, None)
            self.changed.pop(name, None)

    def names(self) -> KeysView[str]:
        return self._fits.keys()

    def error(self, name: str) -> float:
        return self._fits.get(name, self._all).error

    def coefficients(self, name: str) -> Coefficients | None:
        name = name if name in self._fits else ALL_NODES
        if name not in self._cached:
            self._cached[name] = self._fits.get(name, self._all).coefficients(self._all)
        return self._cached[name]


def _pair(node_id: str, peer: str) -> str:
    return f"{node_id}{_PAIR}{peer}"
