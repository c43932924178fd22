"""Predicted milliseconds, fitted online to what nodes measure: prefill, decode steps, transfers.

Pure. No coefficient is written here: before the first sample of its kind a prediction is unknown and counts as 0, which
leaves the choice to load. A new node starts from what all nodes together have shown, and soon speaks for itself.

    prefill   a + b·new + c·new·(prefix + new/2)        (FAST'25 Eq. 1: linear layers and causal attention)
    step      a + b·batch + c·context                   (decode)
    transfer  a + b·bytes                               (latency and rate)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

FORGETTING = 0.98  # a sample's weight after one newer sample: about the last 50 count
PRIOR_SAMPLES = 2.0  # how many samples of its own the experience of all nodes is worth to a node
MAX_FITS = 100_000  # pairs of peers remembered
ALL_NODES = ""
_PAIR = "\x00"
_RIDGE = 1e-9

Coefficients = tuple[float, ...]
_SUBSETS = {n: [s for size in range(n, 0, -1) for s in combinations(range(n), size)] for n in (2, 3)}


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """ms of computing ``new`` tokens behind ``prefix`` cached ones, in steps of ``chunk`` tokens (0: one step)."""

    step_ms: float = 0.0
    token_ms: float = 0.0
    pair_ms: float = 0.0
    is_known: bool = False

    def ms(self, new_tokens: float, prefix_tokens: float, steps: int = 1) -> float:
        pairs = new_tokens * (prefix_tokens + new_tokens / 2)
        return steps * self.step_ms + self.token_ms * new_tokens + self.pair_ms * pairs


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """ms of one step of ``batch`` sequences with ``context`` KV tokens in all."""

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


class LinearFit:
    """Recursive least squares in information form, with forgetting, relative errors and non-negative coefficients.

    ``scales`` bring the features near 1, so that the normal equations stay well conditioned.
    """

    def __init__(self, scales: Coefficients) -> None:
        self._scales = np.array(scales)
        size = len(scales)
        self._moment: npt.NDArray[np.float64] = np.zeros((size, size))
        self._target: npt.NDArray[np.float64] = np.zeros(size)
        self._weight = 0.0  # samples that still count
        self.num_samples = 0

    def observe(self, features: Coefficients, ms: float) -> None:
        """Values that cannot be measurements (zero, negative, NaN, huge) are ignored: they come from outside."""
        if not (1e-6 <= ms <= 1e9) or not all(0.0 <= value < 1e18 for value in features):
            return
        x = np.array(features) / self._scales / ms  # dividing by ms makes errors relative: short steps count as much
        self._moment = FORGETTING * self._moment + np.outer(x, x)
        self._target = FORGETTING * self._target + x
        self._weight = FORGETTING * self._weight + 1.0
        self.num_samples += 1

    def coefficients(self, prior: LinearFit | None = None) -> Coefficients | None:
        """The best non-negative coefficients, with ``prior`` worth PRIOR_SAMPLES; None when nothing was measured."""
        moment, target = self._moment, self._target
        if prior is not None and prior._weight:
            share = PRIOR_SAMPLES / prior._weight
            moment, target = moment + share * prior._moment, target + share * prior._target
        if not target.any():
            return None
        return tuple(float(value) for value in _non_negative(moment, target) / self._scales)


def _non_negative(moment: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """argmin θᵀMθ − 2θᵀt with θ ≥ 0, by trying every set of coefficients that are not zero (7 for three)."""
    size = len(target)
    ridge = _RIDGE * float(np.trace(moment)) * np.eye(size)
    best, best_cost = np.zeros(size), 0.0
    for subset in _SUBSETS[size]:
        rows = list(subset)
        part = (moment + ridge)[np.ix_(rows, rows)]
        solution = np.linalg.solve(part, target[rows])
        if (solution < 0).any():
            continue
        cost = float(solution @ part @ solution - 2 * solution @ target[rows])
        if cost < best_cost:
            best, best_cost = np.zeros(size), cost
            best[rows] = solution
    return best


_PREFILL_SCALES = (1.0, 1e3, 1e6)
_DECODE_SCALES = (1.0, 10.0, 1e4)
_TRANSFER_SCALES = (1.0, 1e6)


class CostModel:
    """One owner. ``version`` changes with every sample. Answers are cached until the node itself reports again; what
    all nodes together show is asked for under ALL_NODES."""

    def __init__(self) -> None:
        self.version = 0
        self._prefill = _Fits(_PREFILL_SCALES)
        self._decode = _Fits(_DECODE_SCALES)
        self._transfer = _Fits(_TRANSFER_SCALES)

    def observe_prefill(self, node_id: str, new_tokens: int, prefix_tokens: int, ms: float) -> None:
        self._prefill.observe(node_id, (1.0, float(new_tokens), new_tokens * (prefix_tokens + new_tokens / 2)), ms)
        self.version += 1

    def observe_decode(self, node_id: str, batch: int, context_tokens: int, ms: float) -> None:
        self._decode.observe(node_id, (1.0, float(batch), float(context_tokens)), ms)
        self.version += 1

    def observe_transfer(self, node_id: str, peer: str, num_bytes: int, ms: float) -> None:
        """``node_id`` moved bytes to or from ``peer``."""
        self._transfer.observe(_pair(node_id, peer), (1.0, float(num_bytes)), ms)
        self.version += 1

    def forget(self, node_id: str) -> None:
        """The node is gone; another process of the same id measures anew. What all have shown stays."""
        self._prefill.forget(lambda name: name == node_id)
        self._decode.forget(lambda name: name == node_id)
        self._transfer.forget(lambda name: node_id in name.split(_PAIR))
        self.version += 1

    def prefill(self, node_id: str) -> PrefillCost:
        found = self._prefill.coefficients(node_id)
        return PrefillCost(found[0], found[1], found[2], True) if found else PrefillCost()

    def decode(self, node_id: str) -> DecodeCost:
        found = self._decode.coefficients(node_id)
        return DecodeCost(found[0], found[1], found[2], True) if found else DecodeCost()

    def transfer(self, node_id: str, peer: str) -> TransferCost:
        found = self._transfer.coefficients(_pair(node_id, peer))
        return TransferCost(found[0], found[1], True) if found else TransferCost()


class _Fits:
    """One fit a name, and one over all of them that stands in for names without samples."""

    def __init__(self, scales: Coefficients) -> None:
        self._scales = scales
        self._all = LinearFit(scales)
        self._fits: dict[str, LinearFit] = {}
        self._cached: dict[str, Coefficients | None] = {}

    def observe(self, name: str, features: Coefficients, ms: float) -> None:
        self._all.observe(features, ms)
        self._cached.pop(ALL_NODES, None)
        if name in self._fits or len(self._fits) < MAX_FITS:
            self._fits.setdefault(name, LinearFit(self._scales)).observe(features, ms)
            self._cached.pop(name, None)

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        for name in [name for name in self._fits if is_gone(name)]:
            del self._fits[name]
            self._cached.pop(name, None)

    def coefficients(self, name: str) -> Coefficients | None:
        name = name if name in self._fits else ALL_NODES
        if name not in self._cached:
            self._cached[name] = self._fits.get(name, self._all).coefficients(self._all)
        return self._cached[name]


def _pair(node_id: str, peer: str) -> str:
    return f"{node_id}{_PAIR}{peer}"
