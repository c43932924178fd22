"""How a pipeline of stages splits a step: into pieces of equal duration, as many as are predicted to finish first.

A token at position t of its sequence costs c1 + c2 (2 t + 1), so the tokens s ≤ t < e of one cost c1 (e - s) + c2 (e² -
s²), plus c0 per piece. Later pieces attend to more, so pieces of equal cost get shorter along a prompt (Mooncake,
FAST'25, section 3.3; TeraPipe, arXiv 2102.07988). Each stage's coefficients are fitted to the times of its pieces;
before there are any, they are estimated from floating-point operations.

Pure: spans and measurements in, cuts and predictions out. It knows neither processes, tensors nor clocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from mooncake.model_config import ModelConfig

LEAST_TOKENS = 32  # of a piece: with fewer, reading the weights dominates
PIECE_COUNTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32)
_WINDOW = 192  # pieces that a fit remembers
_PRIOR_WEIGHT = 0.5  # of the estimate, in pieces
_GUESSED_FLOP_PER_MS = 4e7  # per thread
_GUESSED_BYTES_PER_MS = 2e7


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence in a step: ``count`` of them from position ``first`` on."""

    first: int
    count: int

    @property
    def squares(self) -> int:
        return self.count * (2 * self.first + self.count)


@dataclass(frozen=True, slots=True)
class PieceCost:
    """Milliseconds of one stage: per piece, per token, and per unit of e² - s²."""

    piece_ms: float
    token_ms: float
    square_ms: float

    def of(self, spans: Sequence[Span]) -> float:
        tokens, squares = sum(span.count for span in spans), sum(span.squares for span in spans)
        return self.piece_ms + self.token_ms * tokens + self.square_ms * squares


Cutter = Callable[[Sequence[Span], Sequence[PieceCost]], list[int]]
"""From a step's spans and the costs of all stages to the tokens at which its pieces begin, and the end of the last."""


def fastest(spans: Sequence[Span], costs: Sequence[PieceCost]) -> list[int]:
    """Pieces of equal cost; their number is the one that finishes first by these costs."""
    tokens = sum(span.count for span in spans)
    if tokens < 2 * LEAST_TOKENS or not _has_prompt(spans):
        return [0, tokens]
    options = [equal_cost(spans, costs, count) for count in PIECE_COUNTS if count * LEAST_TOKENS <= tokens]
    return min(options, key=lambda cuts: timetable(predicted_ms(spans, cuts, costs))[-1, -1, 1])


def _has_prompt(spans: Sequence[Span]) -> bool:
    """Otherwise the step, or piece, has only decodes: reading the weights dominates, so splitting would make it
    longer, and its time says nothing about prompts."""
    return any(span.count >= LEAST_TOKENS for span in spans)


def equal_cost(spans: Sequence[Span], costs: Sequence[PieceCost], count: int) -> list[int]:
    """This many pieces, or fewer if there are too few tokens. The cost per piece does not matter."""
    token_ms, square_ms = sum(cost.token_ms for cost in costs), sum(cost.square_ms for cost in costs)
    whole = [token_ms * span.count + square_ms * span.squares for span in spans]
    before, starts = [0.0, *accumulate(whole)], [0, *accumulate(span.count for span in spans)]
    total, cuts, index = before[-1], [0], 0
    for piece in range(1, count):
        wanted = total * piece / count
        while index + 1 < len(spans) and before[index + 1] <= wanted:
            index += 1
        cuts.append(starts[index] + round(_tokens_worth(wanted - before[index], spans[index], token_ms, square_ms)))
    cuts.append(starts[-1])
    return sorted(set(cuts))


def equal_length(spans: Sequence[Span], count: int) -> list[int]:
    tokens = sum(span.count for span in spans)
    return sorted({round(tokens * piece / count) for piece in range(count + 1)})


def _tokens_worth(cost_ms: float, span: Span, token_ms: float, square_ms: float) -> float:
    """The n with token_ms n + square_ms ((first + n)² - first²) = cost_ms, in the form that takes square_ms = 0."""
    slope = token_ms + 2 * square_ms * span.first
    root = math.sqrt(slope * slope + 4 * square_ms * cost_ms)
    return min(2 * cost_ms / (slope + root), span.count) if cost_ms > 0 else 0.0


def cut_spans(spans: Sequence[Span], cuts: Sequence[int]) -> list[list[Span]]:
    """Each piece's part of each sequence."""
    starts = [0, *accumulate(span.count for span in spans)]
    pieces = []
    for begin, end in pairwise(cuts):
        piece = []
        for span, start in zip(spans, starts, strict=False):
            low, high = max(begin, start), min(end, start + span.count)
            if low < high:
                piece.append(Span(span.first + low - start, high - low))
        pieces.append(piece)
    return pieces


def predicted_ms(spans: Sequence[Span], cuts: Sequence[int], costs: Sequence[PieceCost]) -> npt.NDArray[np.float64]:
    """``[stages, pieces]``."""
    pieces = cut_spans(spans, cuts)
    return np.array([[cost.of(piece) for piece in pieces] for cost in costs])


def timetable(times_ms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """When each stage starts and ends each piece, ``[stages, pieces, 2]``: it takes them in order, one at a time, as
    soon as the previous stage has passed them on. The last end is the makespan."""
    table = np.zeros((*times_ms.shape, 2))
    for stage, row in enumerate(times_ms):
        free = 0.0
        for piece, time in enumerate(row):
            begin = max(free, table[stage - 1, piece, 1] if stage else 0.0)
            free = begin + time
            table[stage, piece] = begin, free
    return table


def guessed_cost(config: ModelConfig, num_layers: int, threads: int) -> PieceCost:
    """For a stage with this many layers, from its floating-point operations, and from reading its weights once per
    piece. The rates are rough; until there are measurements, the ratio of attention to products is what counts."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = config.hidden_size * (2 * query + 2 * kv + 3 * config.intermediate_size)
    rate = _GUESSED_FLOP_PER_MS * threads
    piece_ms = 4 * num_layers * products / _GUESSED_BYTES_PER_MS
    return PieceCost(piece_ms, 2 * num_layers * products / rate, 2 * num_layers * query / rate)


class CostFit:
    """One stage's costs, from an estimate and the last pieces that it computed.

    Least squares of relative errors, with the estimate, brought to the measured scale, as one more piece: so
    coefficients that the measurements do not determine (attention, if all prompts are short) stay in proportion.
    """

    def __init__(self, guess: PieceCost) -> None:
        self.cost = guess
        self._guess = np.array([guess.piece_ms, guess.token_ms, guess.square_ms])
        self._measured: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW)  # tokens, squares, milliseconds

    def note(self, pieces: Sequence[Sequence[Span]], times_ms: Sequence[float]) -> None:
        """Pieces of decodes are ignored."""
        of_prompts = [
            (float(sum(span.count for span in piece)), float(sum(span.squares for span in piece)), time)
            for piece, time in zip(pieces, times_ms, strict=True)
            if time > 0 and _has_prompt(piece)
        ]
        if of_prompts:
            self._measured.extend(of_prompts)
            self.cost = self._fitted()

    def _fitted(self) -> PieceCost:
        measured = np.array(self._measured)
        times = measured[:, 2]
        rows = np.column_stack([np.ones(len(times)), measured[:, :2]]) / times[:, None]
        scale = 1 / float(np.median(rows @ self._guess))
        weight = math.sqrt(_PRIOR_WEIGHT)
        prior = np.diag(weight / (scale * self._guess))
        system, wanted = np.vstack([rows, prior]), np.append(np.ones(len(times)), np.full(3, weight))
        kept = np.ones(3, bool)
        found = np.zeros(3)
        while kept.any():  # a negative cost is dropped, and the others are fitted without it
            found[:] = 0
            found[kept] = np.linalg.lstsq(system[:, kept], wanted, rcond=None)[0]
            if (found >= 0).all():
                break
            kept &= found > 0
        return PieceCost(*found.tolist())
