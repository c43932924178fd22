"""Beam search over one prompt: which beams continue, which answers are finished, and when nothing better can follow.

Pure decisions over scores; ``beam_search`` forks and frees the sequences. The rules are those of ``transformers`` (Wolf
et al., EMNLP 2020: generation/utils.py, ``_beam_search``), so that both give the same tokens:

- of the best ``keep`` continuations of all beams, the ``width`` best that do not end continue;
- one that ends is finished if it is among the ``width`` best, with its score divided by length ** length_penalty;
- the search is over when the best running beam, scored at its present length, cannot beat the worst of ``width``
  finished ones, or when no beam can continue.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from mooncake.sampling import BeamSearch
from mooncake.types import FinishReason, SampledToken, TokenLogprob


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam (its index among the running ones) and a token that may follow it; ``score`` is the sum over all its
    tokens. ``told`` is what a request for log-probabilities is told of the token."""

    beam: int
    token_id: int
    score: float
    told: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A running or finished answer (if finished, ``score`` is divided by its length)."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    score: float = 0.0
    finish_reason: FinishReason | None = None

    def extended_by(self, candidate: Candidate) -> Hypothesis:
        return Hypothesis(
            (*self.token_ids, candidate.token_id),
            (*self.logprobs, candidate.told or TokenLogprob(candidate.score - self.score)),
            candidate.score,
        )

    def tokens(self, wants_logprobs: bool) -> list[SampledToken]:
        return [
            SampledToken(index, token_id, logprob if wants_logprobs else None)
            for index, (token_id, logprob) in enumerate(zip(self.token_ids, self.logprobs, strict=True))
        ]


class Beams:
    """The running beams, best first, and up to ``width`` finished answers, best first."""

    def __init__(self, rules: BeamSearch, width: int, stop_ids: frozenset[int], max_tokens: int) -> None:
        self.width = width
        self.running = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self._rules = rules
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens

    @property
    def keep(self) -> int:
        """How many candidates ``advance`` needs: enough that ``width`` of them do not end."""
        return num_candidates(self.width, len(self._stop_ids))

    @property
    def scores(self) -> list[float]:
        return [beam.score for beam in self.running]

    def advance(self, candidates: Rows[Candidate]) -> list[Candidate]:
        """Advance by one token. ``candidates`` are the ``keep`` best, best first. Returns those that continue, best
        first, and nothing when the search is over."""
        length = len(self.running[0].token_ids) + 1
        continuing: list[Candidate] = []
        was_full = len(self.finished) == self.width and self._rules.early_stopping
        for rank, candidate in enumerate(candidates):
            reason = self._reason(candidate, length)
            if reason is None:
                continuing.append(candidate)
            elif rank < self.width and not was_full:
                self._finish(self.running[candidate.beam].extended_by(candidate), reason)
        continuing = continuing[: self.width]
        self.running = [self.running[candidate.beam].extended_by(candidate) for candidate in continuing]
        return continuing if self._may_improve(length) else []

    def _reason(self, candidate: Candidate, length: int) -> FinishReason | None:
        if candidate.token_id in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self._max_tokens else None

    def _finish(self, answer: Hypothesis, reason: FinishReason) -> None:
        score = self._by_length(answer.score, len(answer.token_ids))
        self.finished.append(Hypothesis(answer.token_ids, answer.logprobs, score, reason))
        self.finished.sort(key=lambda finished: -finished.score)  # stable: ties keep their order
        del self.finished[self.width :]

    def _may_improve(self, length: int) -> bool:
        if not self.running:
            return False
        if len(self.finished) < self.width:
            return True
        best = self._by_length(self.running[0].score, length)
        return best > self.finished[-1].score and not self._rules.early_stopping

    def _by_length(self, score: float, length: int) -> float:
        return float(np.float32(score) / np.float32(length**self._rules.length_penalty))


def num_candidates(width: int, num_stop_ids: int) -> int:
    return max(2, 1 + num_stop_ids) * width


def best_candidates(rows: Rows[torch.Tensor], scores: Rows[float], count: int) -> list[Candidate]:
    """The ``count`` best continuations over all beams, best first, from the logits [V] float32 after each beam."""
    logprobs = torch.log_softmax(torch.stack(list(rows)), dim=-1) + torch.tensor(scores)[:, None]
    vocab_size = logprobs.shape[1]
    best = torch.topk(logprobs.flatten(), min(count, logprobs.numel()))
    return [
        Candidate(index // vocab_size, index % vocab_size, score)
        for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
