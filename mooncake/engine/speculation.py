"""Speculation by prompt lookup: what followed the last tokens when they came before is likely to follow them again.

A draft is only a guess. The engine computes its tokens in one step together with the newest one, draws at each position
as it would have without, and keeps what agrees. So every answer, greedy or sampled, is the same with and without
speculation, up to rounding: attention sums in another order when a sequence has many tokens in a step. Pure: it knows
neither blocks, steps nor the model. (Saxena: Prompt Lookup Decoding, 2023; Leviathan et al., ICML 2023.)
"""

from __future__ import annotations

from collections import Counter

from mooncake.engine.sequence import Sequence

NGRAM = 3  # tokens that must have occurred before
FIRST_DRAFT = 4  # tokens; doubled after each draft that was right, up to the limit
MAX_DRAFT = 256
MAX_PAUSE = 64  # tokens without drafts after several that failed


class PromptLookup:
    """Drafts for sequences. What it knows of a sequence is kept in the sequence."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def propose(self, sequence: Sequence) -> list[int]:
        """Up to ``max_tokens`` tokens that may follow; none without a match, or while guesses keep failing."""
        memory = sequence.draft_memory
        if memory is None:
            memory = sequence.draft_memory = DraftMemory()
        return memory.propose(sequence, self.max_tokens)


class DraftMemory:
    """Where each run of three tokens was last followed by something, and how the last drafts did."""

    def __init__(self) -> None:
        self._follows: dict[tuple[int, int, int], int] = {}  # the last position after these tokens
        self._num_seen = 0  # tokens
        self.length = FIRST_DRAFT  # tokens of the next draft
        self._num_failures = 0  # consecutive
        self._pause_until = 0  # tokens

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
        """Whether guesses have failed recently."""
        return num_tokens < self._pause_until

    def judge(self, num_drafted: int, num_accepted: int, num_tokens: int) -> None:
        """A draft was checked; the sequence has ``num_tokens`` now. Failed guesses make the next ones rarer."""
        if 2 * num_accepted >= num_drafted:
            self._num_failures = 0
            if num_accepted == num_drafted:
                self.length = min(2 * self.length, MAX_DRAFT)
            return
        self.length = FIRST_DRAFT
        self._num_failures += 1
        self._pause_until = num_tokens + min(2**self._num_failures, MAX_PAUSE)

    def _learn(self, sequence: Sequence) -> None:
        """All runs except the last one, which nothing follows yet."""
        first = max(self._num_seen - NGRAM, 0)
        tokens = sequence.tokens[first:].tolist()
        runs = zip(tokens, tokens[1:], tokens[2:-1], strict=False)
        self._follows.update((run, first + index + NGRAM) for index, run in enumerate(runs))
        self._num_seen = sequence.num_tokens


class Payoff:
    """Whether drafts pay at all here, by the clock: tokens per second of steps with drafts against steps without.

    Steps are compared with others of as many sequences; if there was none recently, one is run without drafts. When
    drafts do not pay, they pause, twice as long each time.
    """

    MIN_STEPS = 8
    FIRST_REST, MAX_REST = 64, 4096  # steps
    FRESH = 64  # steps with drafts that are compared with an earlier measurement without
    DECAY, PLAIN_DECAY = 0.9, 0.7

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # by number of sequences: ms of a step without drafts
        self._ages: Counter[int] = Counter()  # how many steps were compared with it since
        self._owes_plain = False  # the next step must be without drafts
        self._worth_ms = self._cost_ms = 0.0  # time recent tokens would have taken without drafts, and took with them
        self._num_judged = 0
        self._rest = 0
        self._next_rest = self.FIRST_REST

    @property
    def is_open(self) -> bool:
        return self._rest == 0 and not self._owes_plain

    def note(self, num_sequences: int, num_tokens: int, has_drafts: bool, elapsed_ms: float) -> None:
        """A step of only decodes that produced ``num_tokens`` tokens; ``elapsed_ms`` includes the drafting."""
        self._rest = max(self._rest - 1, 0)
        if not has_drafts:
            known = self._plain.get(num_sequences, elapsed_ms)
            self._plain[num_sequences] = self.PLAIN_DECAY * known + (1 - self.PLAIN_DECAY) * elapsed_ms
            self._ages[num_sequences] = 0
            self._owes_plain = False
            return
        plain_ms = self._plain.get(num_sequences)
        self._ages[num_sequences] += 1
        self._owes_plain = plain_ms is None or self._ages[num_sequences] >= self.FRESH
        if plain_ms is not None:
            self._judge(num_tokens / num_sequences * plain_ms, elapsed_ms)

    def _judge(self, worth_ms: float, cost_ms: float) -> None:
        self._worth_ms = self.DECAY * self._worth_ms + worth_ms
        self._cost_ms = self.DECAY * self._cost_ms + cost_ms
        self._num_judged += 1
        if self._num_judged >= self.MIN_STEPS and self._worth_ms < self._cost_ms:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, self.MAX_REST)
            self._worth_ms, self._cost_ms, self._num_judged = 0.0, 0.0, 0
        elif self._worth_ms > 1.1 * self._cost_ms:
            self._next_rest = self.FIRST_REST
