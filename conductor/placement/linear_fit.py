"""A linear model fitted online to measurements: recursive least squares, robust, with non-negative coefficients.

Pure arithmetic on lists of two or three numbers: small enough that numpy would be slower.
"""

from __future__ import annotations

import math
from itertools import combinations

FORGETTING = 0.98  # a sample's weight decays by this with each newer one: about the last 50 count
PRIOR_SAMPLES = 2.0  # what the prior is worth, in samples of its own
HUBER = 2.5  # in typical errors: a sample further off counts less
ERROR_RATE = 0.05  # smoothing factor of the mean error
MIN_ERROR, MAX_ERROR = 0.02, 4.0  # bounds on |ln(measured / predicted)|
LOST = 0.5  # above this typical error, earlier samples no longer apply
WARM_SAMPLES, REFIT_SAMPLES = 16, 16  # at first each sample is weighed by a fresh fit, later by a slightly older one
NOISE = 0.05  # of every measurement, at least, however well a few of them agree
_RIDGE = 1e-9

Coefficients = tuple[float, ...]
_SUBSETS = {n: [s for size in range(n, 0, -1) for s in combinations(range(n), size)] for n in (1, 2, 3)}


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
        self._shaped: tuple[int, list[float]] | None = None  # (samples seen, scaled coefficients)
        self._coefficients: Coefficients | None = None  # slightly older, to weigh the next sample by
        self.num_samples = 0
        self.error = 0.0

    def observe(self, features: Coefficients, ms: float) -> None:
        """Ignores values that cannot be measurements (zero, negative, NaN, huge): they come from other processes."""
        if not 1e-6 <= ms <= 1e9:
            return
        for value in features:
            if not 0.0 <= value < 1e18:
                return
        weight = self._weigh(features, ms)
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
        """The scaled coefficients, slightly out of date: used often, and good enough as a shape."""
        if self._shaped is None or self.num_samples >= self._shaped[0] + REFIT_SAMPLES:
            self._shaped = (self.num_samples, _non_negative(self._moment, self._target))
        return self._shaped[1]

    def _weigh(self, features: Coefficients, ms: float) -> float:
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
