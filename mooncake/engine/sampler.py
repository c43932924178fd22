"""From logits to tokens: bias, penalties, temperature, truncation, and one draw by (seed, position).

A row's token depends only on that row and its sequence. The steps are those of vLLM: bias, repetition then frequency
and presence penalties; tokens forbidden by the guide, ``allowed_token_ids``, ``min_tokens`` and ``bad_words``;
temperature, min-p, top-k, top-p. Log-probabilities are those of the raw logits. No step sorts the vocabulary.

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

from mooncake.engine.randomness import uniforms
from mooncake.engine.sequence import Sequence
from mooncake.errors import InternalError, InvalidRequest
from mooncake.guides import Guides, GuideState
from mooncake.kernels import Kernels, choose_kernels
from mooncake.kernels.cpu import DRAW, CpuKernels
from mooncake.types import SamplingParams, TokenLogprob

Row = npt.NDArray[np.float32]  # [V]

RUN = 256  # tokens; a draw searches the sums of such runs first
# How many of the most likely tokens top-p looks at first; eight times as many whenever they do not suffice.
FIRST_CANDIDATES = 256

_IS_PLAIN, _NUM_TOKENS = attrgetter("is_plain"), attrgetter("num_tokens")


class Sampler:
    """Stateless: what it remembers of a sequence is kept in the sequence."""

    def __init__(self, guides: Guides | None = None, kernels: Kernels | None = None) -> None:
        """``guides`` knows the vocabulary for guided answers. ``kernels`` affect the speed, not the result."""
        self._guides = guides
        kernels = kernels or choose_kernels()
        self._library = kernels if isinstance(kernels, CpuKernels) else None

    def sample(self, logits: torch.Tensor, sequences: Rows[Sequence]) -> list[tuple[int, TokenLogprob | None]]:
        """The next token of each sequence, from ``logits`` [R, V] float32, which are not modified.

        A sequence whose guide fails, or whose logits are not finite, gets its ``failure`` set; its token is
        meaningless.
        """
        is_plain = all(map(_IS_PLAIN, sequences))
        edited = {} if is_plain else self._edits(logits, sequences)
        if self._library is None:
            rows = [edited.get(place, row) for place, row in enumerate(logits.numpy())]
            tokens = _chosen(rows, sequences)
        elif is_plain:
            tokens = self._library.sample(logits, edited)
        else:
            draws = [sequence.packed_sampling or pack_sampling(sequence) for sequence in sequences]
            tokens = self._library.sample(logits, edited, b"".join(draws), list(map(_NUM_TOKENS, sequences)))
        if -1 in tokens:
            for token, sequence in zip(tokens, sequences, strict=True):
                if token < 0:
                    sequence.fail_not_finite()
        if is_plain:
            return list(zip(tokens, repeat(None), strict=False))
        wanted = [
            (row, top)
            for row, sequence in enumerate(sequences)
            if (top := sequence.sampling.logprobs) is not None and tokens[row] >= 0
        ]
        rows, tops = [row for row, _ in wanted], [top for _, top in wanted]
        logprobs: list[TokenLogprob | None] = [None] * len(tokens)
        for row, logprob in zip(rows, self.score(logits, rows, [tokens[row] for row in rows], tops), strict=True):
            logprobs[row] = logprob
        return list(zip(tokens, logprobs, strict=True))

    def score(
        self, logits: torch.Tensor, rows: Rows[int], token_ids: Rows[int], num_tops: Rows[int]
    ) -> list[TokenLogprob]:
        """``token_logprob`` for each of these rows of ``logits`` [R, V] float32; NaN where a row is not finite."""
        if self._library is None:
            given = zip(rows, token_ids, num_tops, strict=True)
            return [token_logprob(logits[row].numpy(), token_id, num_top) for row, token_id, num_top in given]
        logprobs, ids, tops = self._library.score(logits, rows, token_ids, num_tops)
        return [
            TokenLogprob(logprob, tuple(zip(row_ids[:count], row_tops[:count], strict=True)))
            for logprob, row_ids, row_tops, count in zip(logprobs, ids, tops, num_tops, strict=True)
        ]

    def _edits(self, logits: torch.Tensor, sequences: Rows[Sequence]) -> dict[int, Row]:
        """Rows that a request modifies, by index."""
        return {
            place: self._edited(logits[place].numpy(), sequence)
            for place, sequence in enumerate(sequences)
            if sequence.edits_logits
        }

    def _edited(self, raw: Row, sequence: Sequence) -> Row:
        """The row with the request's modifications; ``raw`` itself if there are none at this position."""
        sampling = sequence.sampling
        logits = edit_logits(raw, sequence) if sampling.logit_bias or sampling.needs_history else raw
        if sampling.guide is not None:
            logits = self._guided(logits, sequence)
        if sampling.allowed_token_ids:
            logits = _only(logits, _allowed(sequence))
        if sampling.min_tokens and sequence.is_below_min_tokens:
            logits = _without(logits, [token_id for token_id in sequence.stop_ids if 0 <= token_id < len(logits)])
        return _without(logits, _ends_of_bad_words(sequence)) if sampling.bad_words else logits

    def _guided(self, logits: Row, sequence: Sequence) -> Row:
        """Mask what the guide does not allow after the answer so far."""
        assert sequence.sampling.guide is not None
        if self._guides is None:
            raise InternalError("this engine does not know the vocabulary that a guide needs")
        try:
            memory = _memory(sequence)
            if memory.guide_state is None:
                memory.guide_state = self._guides.state(sequence.sampling.guide)
            memory.guide_state.follow(sequence.tokens[sequence.num_prompt :])
            allowed = memory.guide_state.allowed()
        except InvalidRequest as error:  # must not affect the other sequences of the step
            sequence.failure = error
            return logits
        return np.where(allowed, logits, np.float32(-np.inf))


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


def _chosen(rows: list[Row], sequences: Rows[Sequence]) -> list[int]:
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
    run, left = _passes(run_weights, draw * float(run_weights.sum()))
    place, _ = _passes(weights[run * RUN : (run + 1) * RUN], left)
    return int(token_ids[run * RUN + place])


def _passes(weights: npt.NDArray[np.float64], target: float) -> tuple[int, float]:
    """The first place where the cumulative weight exceeds ``target``, and the part of ``target`` left there.

    Rounding can put the target beyond the end; then it is the last place with any weight.
    """
    cumulative = np.cumsum(weights)
    place = int(np.searchsorted(cumulative, target, side="right"))
    if place == len(weights):
        place = int(np.flatnonzero(weights)[-1])
    return place, target - (float(cumulative[place - 1]) if place else 0.0)


# Edits: the request's modifications of the logits


def edit_logits(raw: Row, sequence: Sequence) -> Row:
    """A copy of ``raw`` with bias and penalties applied."""
    sampling = sequence.sampling
    logits = raw.copy()
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    if sampling.needs_history:
        _penalise(logits, sampling, _history(sequence, len(logits)))
    return logits


# Constraints that would forbid every remaining token forbid none: an answer that cannot continue would be our error.


def _only(logits: Row, token_ids: npt.NDArray[np.int64]) -> Row:
    narrowed = np.full_like(logits, -np.inf)
    narrowed[token_ids] = logits[token_ids]
    return narrowed if narrowed.max() > -np.inf else logits


def _without(logits: Row, token_ids: list[int]) -> Row:
    if not token_ids:
        return logits
    narrowed = logits.copy()
    narrowed[token_ids] = -np.inf
    return narrowed if narrowed.max() > -np.inf else logits


def _ends_of_bad_words(sequence: Sequence) -> list[int]:
    """The last tokens of those bad words whose other tokens the answer ends with."""
    bad_words = sequence.sampling.bad_words
    longest = max(map(len, bad_words)) - 1
    answer = sequence.tokens[max(sequence.num_prompt, sequence.num_tokens - longest) :].tolist()
    return [
        word[-1]
        for word in bad_words
        if len(word) <= len(answer) + 1 and tuple(answer[len(answer) + 1 - len(word) :]) == word[:-1]
    ]


class _Memory:
    """State of a sequence that is kept between steps."""

    def __init__(self) -> None:
        self.history: _History | None = None
        self.allowed: npt.NDArray[np.int64] | None = None
        self.guide_state: GuideState | None = None


def _memory(sequence: Sequence) -> _Memory:
    memory = sequence.sampler_memory
    if not isinstance(memory, _Memory):
        memory = sequence.sampler_memory = _Memory()
    return memory


def _allowed(sequence: Sequence) -> npt.NDArray[np.int64]:
    memory = _memory(sequence)
    if memory.allowed is None:
        memory.allowed = np.array(sequence.sampling.allowed_token_ids, np.int64)
    return memory.allowed


class _History:
    """Which tokens came before (prompt and answer), and the count of each in the answer."""

    def __init__(self, vocab_size: int) -> None:
        self.seen = np.zeros(vocab_size, np.bool_)
        self.generated = np.zeros(vocab_size, np.float32)
        self.num_tokens = 0

    def update(self, sequence: Sequence) -> None:
        tokens = sequence.tokens
        self.seen[tokens[self.num_tokens :]] = True
        np.add.at(self.generated, tokens[max(self.num_tokens, sequence.num_prompt) :], 1.0)
        self.num_tokens = sequence.num_tokens


def _history(sequence: Sequence, vocab_size: int) -> _History:
    memory = _memory(sequence)
    if memory.history is None:
        memory.history = _History(vocab_size)
    memory.history.update(sequence)
    return memory.history


def _penalise(logits: Row, sampling: SamplingParams, history: _History) -> None:
    if sampling.repetition_penalty != 1.0:
        seen = np.flatnonzero(history.seen)
        values = logits[seen]
        penalty = np.float32(sampling.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        used = np.flatnonzero(history.generated)
        logits[used] -= np.float32(sampling.frequency_penalty) * history.generated[used]
        logits[used] -= np.float32(sampling.presence_penalty)


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
    return TokenLogprob(float(raw[token_id]) - total, top)
