"""Predicted milliseconds of prefills, decode steps and transfers, fitted online to what nodes measure.

Pure. No coefficient is hard-coded: before the first sample of its kind, or a start value from ``mooncake calibrate``, a
prediction is unknown and counts as 0, which leaves the choice to load. A new node starts from what all nodes together
have shown until it has samples of its own. A sample far from its prediction counts less, so one hiccup changes nothing.

    prefill   a + b·new + c·new·(prefix + new/2)        (FAST'25 Eq. 1: linear layers and causal attention)
    step      a + b·batch + c·context                   (decode)
    transfer  a + b·bytes                               (latency and rate)
"""

from __future__ import annotations

import math
from collections.abc import Callable, KeysView
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import NamedTuple

FORGETTING = 0.98  # a sample's weight decays by this with each newer one: about the last 50 count
NEVER = 1.0  # forgets nothing
PRIOR_SAMPLES = 2.0  # samples of its own that the experience of all nodes is worth to a node
MAX_FITS = 100_000  # pairs of peers remembered
ALL_NODES = ""
HUBER = 2.5  # in typical errors: a sample further off counts less
ERROR_RATE = 0.05  # smoothing factor of the mean error
MIN_ERROR, MAX_ERROR = 0.02, 4.0  # bounds on |ln(measured / predicted)|
LOST = 0.5  # above this typical error, earlier samples no longer apply
WARM_SAMPLES, REFIT_SAMPLES = 16, 16  # at first each sample is judged by a fresh fit, later by a slightly older one
NOISE = 0.05  # of every measurement, at least, however well a few of them agree
ATTENTION_SHARE = 3e-4  # prior: cost of attending to one more token, over a token's own cost
_PAIR = "\x00"
_RIDGE = 1e-9

Coefficients = tuple[float, ...]
_SUBSETS = {n: [s for size in range(n, 0, -1) for s in combinations(range(n), size)] for n in (1, 2, 3)}


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Milliseconds to compute ``new`` tokens after ``prefix`` cached ones, in steps of ``chunk`` tokens (0: one
    step)."""

    step_ms: float = 0.0
    token_ms: float = 0.0
    pair_ms: float = 0.0
    is_known: bool = False

    def ms(self, new_tokens: float, prefix_tokens: float, steps: int = 1) -> float:
        pairs = new_tokens * (prefix_tokens + new_tokens / 2)
        return steps * self.step_ms + self.token_ms * new_tokens + self.pair_ms * pairs


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Milliseconds of one step of ``batch`` sequences with ``context`` KV tokens in total."""

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


class LinearFit:
    """Recursive least squares with forgetting, relative errors, Huber weights and non-negative coefficients.

    Errors are divided by ms to the power ``relative``: at 1 a short sample counts as much as a long one. ``scales``
    bring the features near 1, which keeps the normal equations well conditioned. ``last_share`` is a prior for the last
    coefficient over the one before it (0: no prior): short prompts hardly reveal the quadratic term, and without a
    prior long ones would be predicted from noise. ``error`` is the running mean of |ln(measured / predicted)|, each
    prediction made before its sample was seen.
    """

    __slots__ = (
        "_coefficients",
        "_forgetting",
        "_last_share",
        "_moment",
        "_power",
        "_relative",
        "_scales",
        "_shaped",
        "_target",
        "_weight",
        "error",
        "num_samples",
    )

    def __init__(
        self,
        scales: Coefficients,
        relative: float = 1.0,
        last_share: float = 0.0,
        forgetting: float = FORGETTING,
    ) -> None:
        size = len(scales)
        self._scales = scales
        self._forgetting = forgetting
        self._relative = relative
        self._last_share = last_share
        self._moment = [[0.0] * size for _ in range(size)]
        self._target = [0.0] * size
        self._power = 0.0  # sum of squared measurements, weighted
        self._weight = 0.0  # number of samples, weighted
        self._shaped: tuple[int, list[float]] | None = None
        self._coefficients: Coefficients | None = None  # slightly older, to judge the next sample by
        self.num_samples = 0
        self.error = 0.0

    def observe(self, features: Coefficients, ms: float) -> None:
        """Ignores values that cannot be measurements (zero, negative, NaN, huge): they come from other processes."""
        if not 1e-6 <= ms <= 1e9:
            return
        for value in features:
            if not 0.0 <= value < 1e18:
                return
        weight = self._judge(features, ms)
        # Earlier samples count for less when they are far from what is measured now.
        forgetting = max(self._forgetting - 0.25 * max(self.error - LOST, 0.0), 0.5)
        unit = ms**self._relative
        x = [value / scale / unit for value, scale in zip(features, self._scales, strict=True)]
        y = ms / unit
        target = self._target
        for i, (row, value) in enumerate(zip(self._moment, x, strict=True)):
            weighted = weight * value
            target[i] = forgetting * target[i] + weighted * y
            for j, other in enumerate(x):
                row[j] = forgetting * row[j] + weighted * other
        self._power = forgetting * self._power + weight * y * y
        self._weight = forgetting * self._weight + weight
        self.num_samples += 1

    def coefficients(self, prior: LinearFit | None = None) -> Coefficients | None:
        """The best non-negative coefficients, with ``prior`` worth PRIOR_SAMPLES; None when nothing has been
        measured."""
        moment, target, power, weight = self._moment, self._target, self._power, self._weight
        if prior is not None and prior is not self and prior._weight:
            slower = self._times_slower(prior)
            share = PRIOR_SAMPLES / prior._weight
            of_moment = share * slower ** (-2.0 * self._relative)
            of_target = of_moment * slower
            moment = [
                [a + of_moment * b for a, b in zip(row, other, strict=True)]
                for row, other in zip(moment, prior._moment, strict=True)
            ]
            target = [a + of_target * b for a, b in zip(target, prior._target, strict=True)]
            power, weight = power + of_target * slower * prior._power, weight + PRIOR_SAMPLES
        if not any(target):
            return None
        found = _non_negative(moment, target)
        if self._last_share:
            explained = sum(a * b for a, b in zip(found, target, strict=True))
            noise = max(power - explained, NOISE * NOISE * power) / weight
            found = self._shrink_last(moment, target, noise)
        return tuple(value / scale for value, scale in zip(found, self._scales, strict=True))

    def _shrink_last(self, moment: list[list[float]], target: list[float], noise: float) -> list[float]:
        """The coefficients with the last one shrunk towards 0: a normal prior of width ``last_share``, weighed
        against samples with this ``noise`` (variance)."""
        others = _non_negative([row[:-1] for row in moment[:-1]], target[:-1])
        spread = self._last_share * others[-1] * self._scales[-1] / self._scales[-2]
        if not spread:
            return [*others, 0.0]
        trace = sum(moment[i][i] for i in range(len(target)))
        precision = min(noise / spread**2, trace / _RIDGE**0.5)  # beyond, the last is 0 and solving unstable
        return _non_negative([*moment[:-1], [*moment[-1][:-1], moment[-1][-1] + precision]], target)

    def _times_slower(self, prior: LinearFit) -> float:
        """The factor on ``prior``'s prediction that fits best: a prior lends its shape, not its speed. 1 without
        samples."""
        shape = prior._shape()
        found = sum(a * b for a, b in zip(shape, self._target, strict=True))
        norm = sum(
            a * m * b for a, row in zip(shape, self._moment, strict=True) for m, b in zip(row, shape, strict=True)
        )
        return min(max(found / norm, 1e-9), 1e9) if norm > 0.0 and found > 0.0 else 1.0

    def _shape(self) -> list[float]:
        """The scaled coefficients, slightly out of date: asked for often, and good enough as a shape."""
        if self._shaped is None or self.num_samples >= self._shaped[0] + REFIT_SAMPLES:
            self._shaped = (self.num_samples, _non_negative(self._moment, self._target))
        return self._shaped[1]

    def _judge(self, features: Coefficients, ms: float) -> float:
        """The weight of a sample: lower the further it is from the prediction, in units of the typical error."""
        count = self.num_samples
        if count and (count < WARM_SAMPLES or count % REFIT_SAMPLES == 0):
            self._coefficients = self.coefficients()
        if self._coefficients is None:
            return 1.0
        predicted = sum(c * value for c, value in zip(self._coefficients, features, strict=True))
        error = min(abs(math.log(ms / predicted)), MAX_ERROR) if predicted > 0 else MAX_ERROR
        usual = max(self.error, MIN_ERROR)
        # The typical error adapts slowly: a few wild samples do not become typical, but a lasting change does.
        rate = max(ERROR_RATE, 1.0 / count)
        self.error += rate * (min(error, 4.0 * usual) - self.error)
        return min(1.0, HUBER * usual / error) if error else 1.0


def _non_negative(moment: list[list[float]], target: list[float]) -> list[float]:
    """argmin θᵀMθ − 2θᵀt with θ ≥ 0, by trying every support (7 for three coefficients)."""
    size = len(target)
    ridge = _RIDGE * sum(moment[i][i] for i in range(size))
    best, best_cost = [0.0] * size, 0.0
    for subset in _SUBSETS[size]:
        rows = [[moment[i][j] for j in subset] for i in subset]
        for at, row in enumerate(rows):
            row[at] += ridge
        solve = _solve_three if len(subset) == 3 else _solve
        solution = solve(rows, [target[i] for i in subset])
        if solution is None or min(solution) < 0.0:
            continue
        cost = -sum(value * target[i] for value, i in zip(solution, subset, strict=True))  # at its minimum
        if cost < best_cost:
            best, best_cost = [0.0] * size, cost
            for i, value in zip(subset, solution, strict=True):
                best[i] = value
        if len(subset) == size:
            break  # the unconstrained minimum is feasible, so nothing can be better
    return best


def _solve(rows: list[list[float]], target: list[float]) -> list[float] | None:
    """Solve a small symmetric positive definite system by elimination; None when it is singular."""
    size = len(target)
    rows = [[*row, value] for row, value in zip(rows, target, strict=True)]
    for i in range(size):
        pivot = rows[i][i]
        if not pivot > 0.0:
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / pivot
            for j in range(i, size + 1):
                rows[k][j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        left = rows[i][size] - sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = left / rows[i][i]
    return solution


def _solve_three(rows: list[list[float]], target: list[float]) -> list[float] | None:
    """``_solve`` unrolled for the usual case."""
    (a, b, c), (d, e, f), (g, h, i) = rows
    x, y, z = target
    if not a > 0.0:
        return None
    below, last = d / a, g / a
    e, f, y = e - below * b, f - below * c, y - below * x
    h, i, z = h - last * b, i - last * c, z - last * x
    if not e > 0.0:
        return None
    last = h / e
    i, z = i - last * f, z - last * y
    if not i > 0.0:
        return None
    z = z / i
    y = (y - f * z) / e
    return [(x - (b * y + c * z)) / a, y, z]


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
        own."""
        changed: list[Changed] = []
        for kind, fits in (("prefill", self._prefill), ("decode", self._decode), ("transfer", self._transfer)):
            while fits.changed and len(changed) < limit:
                node_id, _, peer = fits.changed.popitem()[0].partition(_PAIR)
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
