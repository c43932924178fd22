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
    FIRST_PAUSE, MAX_PAUSE = 64, 4096  # steps
    MAX_AGE = 64  # steps with drafts that are compared with an earlier measurement without
    DECAY, PLAIN_DECAY = 0.9, 0.7

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # by number of sequences: ms of a step without drafts
        self._ages: Counter[int] = Counter()  # how many steps were compared with it since
        self._needs_plain_step = False  # the next step must be without drafts
        self._worth_ms = self._cost_ms = 0.0  # time recent tokens would have taken without drafts, and took with them
        self._num_compared = 0
        self._pause = 0
        self._next_pause = self.FIRST_PAUSE

    @property
    def allows_drafts(self) -> bool:
        return self._pause == 0 and not self._needs_plain_step

    def note(self, num_sequences: int, num_tokens: int, has_drafts: bool, elapsed_ms: float) -> None:
        """A step of only decodes that produced ``num_tokens`` tokens; ``elapsed_ms`` includes the drafting."""
        self._pause = max(self._pause - 1, 0)
        if not has_drafts:
            known = self._plain.get(num_sequences, elapsed_ms)
            self._plain[num_sequences] = self.PLAIN_DECAY * known + (1 - self.PLAIN_DECAY) * elapsed_ms
            self._ages[num_sequences] = 0
            self._needs_plain_step = False
            return
        plain_ms = self._plain.get(num_sequences)
        self._ages[num_sequences] += 1
        self._needs_plain_step = plain_ms is None or self._ages[num_sequences] >= self.MAX_AGE
        if plain_ms is not None:
            self._compare(num_tokens / num_sequences * plain_ms, elapsed_ms)

    def _compare(self, worth_ms: float, cost_ms: float) -> None:
        self._worth_ms = self.DECAY * self._worth_ms + worth_ms
        self._cost_ms = self.DECAY * self._cost_ms + cost_ms
        self._num_compared += 1
        if self._num_compared >= self.MIN_STEPS and self._worth_ms < self._cost_ms:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, self.MAX_PAUSE)
            self._worth_ms, self._cost_ms, self._num_compared = 0.0, 0.0, 0
        elif self._worth_ms > 1.1 * self._cost_ms:
            self._next_pause = self.FIRST_PAUSE
