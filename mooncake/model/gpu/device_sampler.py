"""From logits to tokens on the GPU: what ``mooncake.engine.decoding.sampler`` defines, in torch operations.

Nothing here waits for the device, and no logits cross the bus. Edits (bias, penalties, guides) and log-probabilities
need the host and are not supported here. Sums are float64, as in the definition, but in another order: the two agree
unless a draw or a share is within float64 rounding of a border.

Greedy sampling is one reduction, a draw a few passes over the row; only rows with a ``top_k`` or a ``top_p`` are
sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

RUN = 256  # tokens; a draw searches the sums of such runs first
ROWS_AT_ONCE = 32  # limits memory: some 30 bytes per row and token of the vocabulary


@dataclass(frozen=True, slots=True)
class Draws:
    """How a step's tokens are drawn, on the host. ``R`` rows of logits."""

    values: npt.NDArray[np.float64]  # [5, R]: temperature (0: greedy), top_k (0: all), top_p, min_p, uniform
    cut_rows: npt.NDArray[np.int64]  # rows with a top_k or a top_p


def choose(
    logits: torch.Tensor, values: torch.Tensor | None = None, cut_rows: torch.Tensor | None = None
) -> torch.Tensor:
    """The next token after each row of ``logits`` ``[R, V]`` float32: int64 ``[R]``, -1 where they are not finite.

    ``values`` and ``cut_rows`` are those of ``Draws``, on the device; without them greedy, with the first of equals.
    """
    best, tokens = logits.max(-1)
    if values is not None:
        thresholds = _min_p_thresholds(best, values)
        if cut_rows is not None:
            for rows in torch.split(cut_rows, ROWS_AT_ONCE):
                thresholds[rows] = _cut_thresholds(logits[rows], best[rows], values[:, rows], thresholds[rows])
        each = [torch.split(given, ROWS_AT_ONCE) for given in (logits, best, values.T, thresholds)]
        drawn = [_drawn(*part) for part in zip(*each, strict=True)]
        tokens = torch.where(values[0] > 0, torch.cat(drawn), tokens)
    return torch.where(torch.isfinite(best), tokens, -1)


def _min_p_thresholds(best: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The least logit that is kept, float32 ``[R]``; log(0) means no threshold."""
    return (best + values[0] * torch.log(values[3])).float()


def _cut_thresholds(
    logits: torch.Tensor, best: torch.Tensor, values: torch.Tensor, thresholds: torch.Tensor
) -> torch.Tensor:
    """With top_k and then top_p: the smallest set whose share of the rest reaches it, most likely first."""
    vocab = logits.shape[1]
    top_k, top_p = values[1].long(), values[2]
    ranked = torch.sort(logits, dim=-1, descending=True).values
    kth = _at(ranked, (top_k - 1).clamp(0, vocab - 1))
    thresholds = torch.where((top_k > 0) & (top_k < vocab), torch.maximum(thresholds, kth), thresholds)
    is_kept = ranked >= thresholds[:, None]
    reached = _weights(ranked, best, values[0]).mul_(is_kept).cumsum(-1)
    place = (reached < top_p[:, None] * reached[:, -1:]).sum(-1)
    last = _at(ranked, torch.minimum(place, is_kept.sum(-1) - 1).clamp(min=0))
    return torch.where(top_p < 1, torch.maximum(thresholds, last), thresholds)


def _drawn(logits: torch.Tensor, best: torch.Tensor, values: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Where the cumulative weight in the order of ids passes the draw, in two levels. ``values`` is ``[R, 5]``."""
    rows, vocab = logits.shape
    num_runs = -(-vocab // RUN)
    weights = torch.zeros((rows, num_runs * RUN), dtype=torch.float64, device=logits.device)
    inside = weights[:, :vocab]
    inside.copy_(_weights(logits, best, values[:, 0]))
    inside.masked_fill_(logits < thresholds[:, None], 0.0)
    runs = weights.view(rows, num_runs, RUN)
    sums = runs.sum(-1)
    run, left = _passes(sums, values[:, 4] * sums.sum(-1))
    chosen = runs.gather(1, run[:, None, None].expand(-1, 1, RUN)).squeeze(1)
    place, _ = _passes(chosen, left)
    return run * RUN + place


def _passes(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first place of each row where the cumulative weight exceeds ``target``, and the part of ``target`` left
    there.

    Rounding can put the target beyond the end; then it is the last place with any weight.
    """
    cumulative = weights.cumsum(-1)
    places = torch.arange(weights.shape[1], device=weights.device)
    last = (places * (weights > 0)).amax(-1)
    place = torch.minimum((cumulative <= target[:, None]).sum(-1), last)
    return place, target - torch.where(place > 0, _at(cumulative, (place - 1).clamp(min=0)), 0.0)


def _weights(logits: torch.Tensor, best: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Float64. Rows with a temperature of 0 are not used, and computed as with 1."""
    temperatures = torch.where(temperatures > 0, temperatures, 1.0)
    return logits.double().sub_(best[:, None]).div_(temperatures[:, None]).exp_()


def _at(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return rows.gather(1, places[:, None]).squeeze(1)
