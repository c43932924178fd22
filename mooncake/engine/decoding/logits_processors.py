"""What a request changes in the logits before sampling, on the host: bias, penalties, and tokens that are forbidden.

The order is vLLM's: bias; repetition, then frequency and presence penalties; tokens forbidden by the guide,
``allowed_token_ids``, ``min_tokens`` and ``bad_words``; last, all but the end of a reasoning whose budget is used up.
Constraints that would forbid every remaining token forbid none: an answer that cannot continue would be our error.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mooncake.engine.sequence import Sequence
from mooncake.errors import InternalError, InvalidRequest
from mooncake.guides import Guides, GuideState
from mooncake.sampling import SamplingParams, ThinkingBudget
from mooncake.types import TokenIds

Row = npt.NDArray[np.float32]  # logits [V]


class LogitsProcessors:
    """Stateless: what it remembers of a sequence is kept in the sequence."""

    def __init__(self, guides: Guides | None) -> None:
        self._guides = guides

    def process(self, raw: Row, sequence: Sequence) -> Row:
        """The row with the request's modifications; ``raw`` itself if there are none at this position."""
        sampling = sequence.sampling
        logits = bias_and_penalise(raw, sequence) if sampling.logit_bias or sampling.needs_history else raw
        if sampling.guide is not None:
            logits = self._guided(logits, sequence)
        if sampling.allowed_token_ids:
            logits = _mask_others(logits, _allowed(sequence))
        if sampling.min_tokens and sequence.is_below_min_tokens:
            logits = _mask(logits, [token_id for token_id in sequence.stop_ids if 0 <= token_id < len(logits)])
        if sampling.bad_words:
            logits = _mask(logits, _ends_of_bad_words(sequence))
        return logits if sampling.thinking_budget is None else _budgeted(logits, sequence, sampling.thinking_budget)

    def _guided(self, logits: Row, sequence: Sequence) -> Row:
        """Mask what the guide does not allow after the answer so far."""
        assert sequence.sampling.guide is not None
        if self._guides is None:
            raise InternalError("this engine does not know the vocabulary that a guide needs")
        try:
            state = _state(sequence)
            if state.guide_state is None:
                state.guide_state = self._guides.state(sequence.sampling.guide)
            state.guide_state.follow(sequence.tokens[sequence.num_prompt :])
            allowed = state.guide_state.allowed()
        except InvalidRequest as error:  # must not affect the other sequences of the step
            sequence.failure = error
            return logits
        return np.where(allowed, logits, np.float32(-np.inf))


def bias_and_penalise(raw: Row, sequence: Sequence) -> Row:
    """A copy of ``raw`` with bias and penalties applied."""
    sampling = sequence.sampling
    logits = raw.copy()
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    if sampling.needs_history:
        _penalise(logits, sampling, _history(sequence, len(logits)))
    return logits


def _mask_others(logits: Row, token_ids: npt.NDArray[np.int64]) -> Row:
    narrowed = np.full_like(logits, -np.inf)
    narrowed[token_ids] = logits[token_ids]
    return narrowed if narrowed.max() > -np.inf else logits


def _mask(logits: Row, token_ids: list[int]) -> Row:
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


def _budgeted(logits: Row, sequence: Sequence, budget: ThinkingBudget) -> Row:
    """Only the end of the reasoning may follow once its tokens are used up, unless something else forbids it."""
    state = _state(sequence)
    if state.thinking is None:
        state.thinking = _Thinking(budget)
    state.thinking.follow(sequence.tokens[sequence.num_prompt :])
    return _mask_others(logits, np.array([budget.end])) if state.thinking.is_used_up else logits


class _Thinking:
    """Where the reasoning of one answer is."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._left: int | None = budget.num_tokens if budget.begin is None else None  # None: not begun
        self._is_over = False
        self._num_seen = 0

    @property
    def is_used_up(self) -> bool:
        return not self._is_over and self._left is not None and self._left <= 0

    def follow(self, answer: TokenIds) -> None:
        """``answer``: all its tokens so far."""
        for token_id in answer[self._num_seen :].tolist():
            if token_id == self._budget.end:
                self._is_over = True
            elif self._left is not None:
                self._left -= 1
            elif token_id == self._budget.begin:
                self._left = self._budget.num_tokens
        self._num_seen = len(answer)


class _State:
    """What is kept of a sequence between steps."""

    def __init__(self) -> None:
        self.history: _History | None = None
        self.allowed: npt.NDArray[np.int64] | None = None
        self.guide_state: GuideState | None = None
        self.thinking: _Thinking | None = None


def _state(sequence: Sequence) -> _State:
    state = sequence.sampler_state
    if not isinstance(state, _State):
        state = sequence.sampler_state = _State()
    return state


def _allowed(sequence: Sequence) -> npt.NDArray[np.int64]:
    state = _state(sequence)
    if state.allowed is None:
        state.allowed = np.array(sequence.sampling.allowed_token_ids, np.int64)
    return state.allowed


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
    state = _state(sequence)
    if state.history is None:
        state.history = _History(vocab_size)
    state.history.update(sequence)
    return state.history


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
