"""From logits to tokens: bias, penalties, temperature, truncation, and one draw by (seed, position).

A row's token depends on that row, its sequence and nothing else. The steps are those of vLLM, in its order: bias and
``min_tokens`` mask, repetition then frequency and presence penalties, temperature, min-p, top-k, top-p.
Log-probabilities are those of the raw logits. No step sorts the vocabulary.

Truncation keeps every token at or above a threshold, so that ties are all kept. The draw inverts the cumulative
distribution in the order of token ids, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch

from mooncake.engine.randomness import uniforms
from mooncake.engine.sequence import Sequence
from mooncake.errors import InternalError
from mooncake.types import SamplingParams, TokenLogprob

Row = npt.NDArray[np.float32]  # [V]

FIRST_CANDIDATES = (
    256  # how many of the most likely tokens top-p looks at first; eight times as many each time it fails
)


class Sampler:
    """Without state of its own: what it needs to remember of a sequence stays with the sequence."""

    def sample(self, logits: torch.Tensor, sequences: Rows[Sequence]) -> list[tuple[int, TokenLogprob | None]]:
        """The next token of each sequence, from ``logits`` [R, V] float32, which stay as they are."""
        tokens: list[int] = logits.argmax(dim=-1).tolist()  # right for all rows that are greedy and nothing else
        logprobs: list[TokenLogprob | None] = [None] * len(tokens)
        special = [row for row, sequence in enumerate(sequences) if not _is_plain(sequence)]
        if special:
            raw = logits.numpy()
            draws = _draws([sequences[row] for row in special])
            for row, draw in zip(special, draws, strict=True):
                sequence = sequences[row]
                tokens[row] = _choose(raw[row], sequence, draw)
                if sequence.sampling.logprobs is not None:
                    logprobs[row] = token_logprob(raw[row], tokens[row], sequence.sampling.logprobs)
        return list(zip(tokens, logprobs, strict=True))


def _is_plain(sequence: Sequence) -> bool:
    """Whether its token is the most likely one of the raw logits, and no more is asked."""
    sampling = sequence.sampling
    return sampling.is_greedy and sampling.logprobs is None and not _is_edited(sequence)


def _is_edited(sequence: Sequence) -> bool:
    sampling = sequence.sampling
    return bool(sampling.logit_bias) or sampling.needs_history or (sequence.must_go_on and bool(sequence.stop_ids))


def _draws(sequences: Rows[Sequence]) -> npt.NDArray[np.float64]:
    """One uniform number a sequence, for the position that its next token will have."""
    seeds = np.array([sequence.sampling.seed for sequence in sequences], np.uint64)
    positions = np.array([sequence.num_tokens for sequence in sequences], np.uint64)
    return uniforms(seeds, positions)


def _choose(raw: Row, sequence: Sequence, draw: float) -> int:
    logits = edit_logits(raw, sequence) if _is_edited(sequence) else raw
    if sequence.sampling.is_greedy:
        return int(logits.argmax())
    token_ids, weights = distribution(logits, sequence.sampling)
    cumulative = np.cumsum(weights)
    place = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
    return int(token_ids[min(place, len(token_ids) - 1)])


# Edits: what the request adds to the model's opinion


def edit_logits(raw: Row, sequence: Sequence) -> Row:
    """A copy of ``raw`` with bias, ``min_tokens`` mask and penalties applied."""
    sampling = sequence.sampling
    logits = raw.copy()
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    if sequence.must_go_on and sequence.stop_ids:
        logits[[token_id for token_id in sequence.stop_ids if token_id < len(logits)]] = -np.inf
    if sampling.needs_history:
        _penalise(logits, sampling, _history(sequence, len(logits)))
    return logits


class _History:
    """Which tokens came before (prompt and answer), and how often each came in the answer."""

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
    history = sequence.sampler_memory
    if not isinstance(history, _History):
        history = sequence.sampler_memory = _History(vocab_size)
    history.update(sequence)
    return history


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
    if not np.isfinite(best):
        raise InternalError("the model's logits are not finite")
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
    """The logit of the last token of the smallest set whose share reaches ``top_p``, most likely first.

    Almost always a few hundred tokens hold that share, so only they are sorted.
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
    """Of ``token_id`` and of the ``num_top`` most likely tokens, from the raw logits; equals go by their ids."""
    best = float(raw.max())
    total = best + float(np.log(_weights(raw, best, 1.0).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        least = np.partition(raw, -num_top)[-num_top]
        ids = np.flatnonzero(raw >= least)
        ids = ids[np.argsort(-raw[ids], kind="stable")][:num_top]
        top = tuple((int(i), float(raw[i]) - total) for i in ids)
    return TokenLogprob(float(raw[token_id]) - total, top)
