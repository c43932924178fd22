"""Speculative decoding by prompt lookup: what followed the last tokens when they occurred before is likely to follow
them again.

The engine computes draft tokens in one step together with the newest token, samples at each position as it would have
without them, and accepts those that agree. So every answer, greedy or sampled, is the same with and without
speculation, where kernels give a token the same bits among others as alone (up to rounding where they do not). Pure: it
knows neither blocks, steps nor the model. (Saxena: Prompt Lookup Decoding, 2023; Leviathan et al., ICML 2023.)
"""

from __future__ import annotations

from mooncake.engine.sequence import Sequence

NGRAM = 3  # tokens that must have occurred before
FIRST_DRAFT = 4  # tokens; doubled after each draft that was right, up to the limit
MAX_DRAFT = 256
MAX_PAUSE = 64  # tokens without drafts after several were rejected


class PromptLookup:
    """Proposes draft tokens. What it remembers of a sequence is kept in the sequence."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def propose(self, sequence: Sequence) -> list[int]:
        """Up to ``max_tokens`` tokens that may follow; none without a match, or while drafts keep being rejected."""
        return DraftMemory.of(sequence).propose(sequence, self.max_tokens)


class DraftMemory:
    """What is remembered of one sequence: where each n-gram occurred last, and how its last drafts did."""

    def __init__(self) -> None:
        self._follows: dict[tuple[int, int, int], int] = {}  # n-gram -> the position after its last occurrence
        self._num_seen = 0  # tokens
        self.length = FIRST_DRAFT  # tokens of the next draft
        self._num_rejected = 0  # drafts in a row
        self._pause_until = 0  # tokens

    @classmethod
    def of(cls, sequence: Sequence) -> DraftMemory:
        """Kept in the sequence."""
        if sequence.draft_memory is None:
            sequence.draft_memory = cls()
        return sequence.draft_memory

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        if self.is_paused(sequence.num_tokens) or sequence.num_tokens <= NGRAM:
            return []
        self._learn(sequence)
        a, b, c = sequence.tokens[-NGRAM:].tolist()
        place = self._follows.get((a, b, c))
        if place is None:
            return []
        return list(map(int, sequence.tokens[place : place + min(self.length, max_tokens)]))

    def is_paused(self, num_tokens: int) -> bool:
        """Whether its last drafts were rejected too recently."""
        return num_tokens < self._pause_until

    def note_verified(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """A draft was verified; the sequence has ``num_tokens`` now. Each rejected one makes the pause longer."""
        if 2 * num_accepted >= num_drafted:
            self._num_rejected = 0
            if num_accepted == num_drafted:
                self.length = min(2 * self.length, MAX_DRAFT)
            return
        self.length = FIRST_DRAFT
        self._num_rejected += 1
        self._pause_until = num_tokens + min(2**self._num_rejected, MAX_PAUSE)

    def _learn(self, sequence: Sequence) -> None:
        """All n-grams except the last one, which nothing follows yet."""
        first = max(self._num_seen - NGRAM, 0)
        tokens = sequence.tokens[first:].tolist()
        ngrams = zip(tokens, tokens[1:], tokens[2:-1], strict=False)
        self._follows.update((ngram, first + index + NGRAM) for index, ngram in enumerate(ngrams))
        self._num_seen = sequence.num_tokens
