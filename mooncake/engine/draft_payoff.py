"""Whether draft tokens pay, by the clock: tokens per second of steps with drafts against steps without.

Pure: measured steps in, a verdict out. It knows neither sequences nor how drafts are made.
"""

from __future__ import annotations

from collections import Counter


class DraftPayoff:
    """Steps are compared with others of as many sequences; if there was none recently, one is run without drafts. When
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
