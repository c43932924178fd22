"""From logits to tokens: ``logits_processors``, temperature, truncation, and one draw by (seed, position).

A row's token depends only on that row and its sequence. Temperature, min-p, top-k and top-p apply in vLLM's order.
Log-probabilities are those of the raw logits. No step sorts the vocabulary.

Truncation keeps every token at or above a threshold, so ties are all kept. The draw inverts the cumulative distribution
in the order of token ids, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from itertools import repeat
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from mooncake.engine.decoding.logits_processors import LogitsProcessors, Row
from mooncake.engine.decoding.randomness import uniforms
from mooncake.engine.sequence import Sequence
from mooncake.guides import Guides
from mooncake.kernels import Kernels, choose_kernels
from mooncake.kernels.cpu import CpuKernels
from mooncake.kernels.cpu_library import DRAW
from mooncake.sampling import SamplingParams
from mooncake.types import TokenLogprob

RUN = 256  # tokens; a draw searches the sums of such runs first
# How many of the most likely tokens top-p looks at first; eight times as many whenever they do not suffice.
FIRST_CANDIDATES = 256

_IS_PLAIN, _NUM_TOKENS = attrgetter("is_plain"), attrgetter("num_tokens")


class Sampler:
    """Stateless: what it remembers of a sequence is kept in the sequence."""

    def __init__(self, guides: Guides | None = None, kernels: Kernels | None = None) -> None:
        """``guides`` knows the vocabulary for guided answers. ``kernels`` affect the speed, not the result."""
        self._processors = LogitsProcessors(guides)
        kernels = kernels or choose_kernels()
        self._library = kernels if isinstance(kernels, CpuKernels) else None

    def sample(
        self, logits: torch.Tensor, sequences: Rows[Sequence], rows: Rows[int] | None = None
    ) -> list[tuple[int, TokenLogprob | None]]:
        """The next token of each sequence, from these ``rows`` of ``logits`` [R, V] float32, which are not modified;
        None: from one row each.

        A sequence whose guide fails, or whose logits are not finite, gets its ``failure`` set; its token is
        meaningless.
        """
        is_plain = all(map(_IS_PLAIN, sequences))
        rows = range(len(sequences)) if rows is None else rows
        tokens = self._tokens(logits, sequences, rows, is_plain)
        if -1 in tokens:
            for token, sequence in zip(tokens, sequences, strict=True):
                if token < 0:
                    sequence.fail_not_finite()
        if is_plain:
            return list(zip(tokens, repeat(None), strict=False))
        return list(zip(tokens, self._wanted_logprobs(logits, sequences, rows, tokens), strict=True))

    def _tokens(self, logits: torch.Tensor, sequences: Rows[Sequence], rows: Rows[int], is_plain: bool) -> Rows[int]:
        """-1 for a row that is not finite."""
        edited = {} if is_plain else self._edited_rows(logits, rows, sequences)
        if self._library is None:
            every = logits.numpy()
            return _choose([edited.get(place, every[row]) for place, row in enumerate(rows)], sequences)
        if is_plain:
            return self._library.sample(logits, rows, edited)
        packed = [sequence.packed_sampling or pack_sampling(sequence) for sequence in sequences]
        return self._library.sample(logits, rows, edited, b"".join(packed), list(map(_NUM_TOKENS, sequences)))

    def _wanted_logprobs(
        self, logits: torch.Tensor, sequences: Rows[Sequence], rows: Rows[int], tokens: Rows[int]
    ) -> list[TokenLogprob | None]:
        """None for sequences that do not ask for any, or have no token."""
        tops = {
            place: top
            for place, sequence in enumerate(sequences)
            if (top := sequence.sampling.logprobs) is not None and tokens[place] >= 0
        }
        scores = self.score(
            logits, [rows[place] for place in tops], [tokens[place] for place in tops], [*tops.values()]
        )
        found = dict(zip(tops, scores, strict=True))
        return [found.get(place) for place in range(len(tokens))]

    def score(
        self, logits: torch.Tensor, rows: Rows[int], token_ids: Rows[int], num_tops: Rows[int]
    ) -> list[TokenLogprob]:
        """``token_logprob`` for each of these rows of ``logits`` [R, V] float32; NaN where a row is not finite."""
        if self._library is None:
            given = zip(rows, token_ids, num_tops, strict=True)
            return [token_logprob(logits[row].numpy(), token_id, num_top) for row, token_id, num_top in given]
        logprobs, ranks, ids, tops = self._library.score(logits, rows, token_ids, num_tops)
        return [
            TokenLogprob(logprob, tuple(zip(row_ids[:count], row_tops[:count], strict=True)), rank)
            for logprob, rank, row_ids, row_tops, count in zip(logprobs, ranks, ids, tops, num_tops, strict=True)
        ]

    def _edited_rows(self, logits: torch.Tensor, rows: Rows[int], sequences: Rows[Sequence]) -> dict[int, Row]:
        """The logits of the sequences that change theirs, by their place."""
        return {
            place: self._processors.process(logits[row].numpy(), sequence)
            for place, (row, sequence) in enumerate(zip(rows, sequences, strict=True))
            if sequence.edits_logits
        }


def _most_likely(logits: Row) -> int:
    """The first maximum, -1 when it is not finite. Two passes that numpy vectorises are faster than its argmax, and
    6 times as fast as torch's."""
    best = logits.max()
    return int((logits == best).argmax()) if np.isfinite(best) else -1


def pack_sampling(sequence: Sequence) -> bytes:
    """Pack a sequence's sampling parameters as the C++ library reads them, once: they do not change between steps."""
    sampling = sequence.sampling
    temperature = 0.0 if sampling.is_greedy else sampling.temperature
    sequence.packed_sampling = DRAW.pack(
        temperature, sampling.top_p, sampling.min_p, max(0, sampling.top_k), sampling.seed
    )
    return sequence.packed_sampling


def _choose(rows: list[Row], sequences: Rows[Sequence]) -> list[int]:
    """Reference implementation of the library's function. A draw uses one uniform number, a function of the seed and
    the token's position."""
    seeds = np.array([sequence.sampling.seed for sequence in sequences], np.uint64)
    draws = uniforms(seeds, np.array([sequence.num_tokens for sequence in sequences], np.uint64))
    return [
        _most_likely(row) if sequence.sampling.is_greedy else _drawn(row, sequence.sampling, float(draw))
        for row, sequence, draw in zip(rows, sequences, draws, strict=True)
    ]


def _drawn(row: Row, sampling: SamplingParams, draw: float) -> int:
    """Where the cumulative weight passes ``draw``, found in two levels: first the run of tokens, then the token. -1
    when the largest logit is not finite."""
    if not np.isfinite(row.max()):
        return -1
    token_ids, weights = distribution(row, sampling)
    run_weights = np.add.reduceat(weights, np.arange(0, len(weights), RUN))
    run, left = _search_sums(run_weights, draw * float(run_weights.sum()))
    place, _ = _search_sums(weights[run * RUN : (run + 1) * RUN], left)
    return int(token_ids[run * RUN + place])


def _search_sums(weights: npt.NDArray[np.float64], target: float) -> tuple[int, float]:
    """The first place where the cumulative weight exceeds ``target``, and the part of ``target`` left there.

    Rounding can put the target beyond the end; then it is the last place with any weight.
    """
    cumulative = np.cumsum(weights)
    place = int(np.searchsorted(cumulative, target, side="right"))
    if place == len(weights):
        place = int(np.flatnonzero(weights)[-1])
    return place, target - (float(cumulative[place - 1]) if place else 0.0)


# The distribution: temperature and truncation


def distribution(logits: Row, sampling: SamplingParams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The tokens that may be drawn, in the order of their ids, and their weights (which need not sum to 1)."""
    threshold = -np.inf
    best = float(logits.max())
    if sampling.min_p > 0.0:
        threshold = best + sampling.temperature * float(np.log(sampling.min_p))
    if 0 < sampling.top_k < len(logits):
        threshold = max(threshold, float(np.partition(logits, -sampling.top_k)[-sampling.top_k]))
    if sampling.top_p < 1.0:
        threshold = max(threshold, _top_p_threshold(logits, threshold, best, sampling))
    if threshold == -np.inf:
        return np.arange(len(logits)), _weights(logits, best, sampling.temperature)
    kept = np.flatnonzero(logits >= threshold)
    return kept, _weights(logits[kept], best, sampling.temperature)


def _top_p_threshold(logits: Row, threshold: float, best: float, sampling: SamplingParams) -> float:
    """The logit of the last token of the smallest set whose probability reaches ``top_p``, most likely first.

    A few hundred tokens almost always suffice, so only they are sorted.
    """
    survivors = logits if threshold == -np.inf else logits[logits >= threshold]
    wanted = sampling.top_p * _weights(survivors, best, sampling.temperature).sum()
    count = FIRST_CANDIDATES
    while True:
        count = min(count, len(survivors))
        head = np.partition(survivors, len(survivors) - count)[len(survivors) - count :]
        head = np.sort(head)[::-1]
        reached = np.cumsum(_weights(head, best, sampling.temperature))
        place = int(np.searchsorted(reached, wanted))
        if place < count or count == len(survivors):
            return float(head[min(place, count - 1)])
        count *= 8


def _weights(logits: Row, best: float, temperature: float) -> npt.NDArray[np.float64]:
    weights = logits.astype(np.float64)
    weights -= best
    weights /= temperature
    return np.exp(weights, out=weights)


# Log-probabilities


def token_logprob(raw: Row, token_id: int, num_top: int) -> TokenLogprob:
    """For ``token_id`` and the ``num_top`` most likely tokens, from the raw logits; ties are ordered by id. NaN and
    none when the largest is not finite."""
    best = float(raw.max())
    if not math.isfinite(best):
        return TokenLogprob(math.nan, ())
    total = best + float(np.log(_weights(raw, best, 1.0).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        least = np.partition(raw, -num_top)[-num_top]
        ids = np.flatnonzero(raw >= least)
        ids = ids[np.argsort(-raw[ids], kind="stable")][:num_top]
        top = tuple((int(i), float(raw[i]) - total) for i in ids)
    rank = 1 + np.count_nonzero(raw > raw[token_id]) + np.count_nonzero(raw[:token_id] == raw[token_id])
    return TokenLogprob(float(raw[token_id]) - total, top, int(rank))
