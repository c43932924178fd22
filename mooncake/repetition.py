"""Whether an answer loops: its last tokens are the same pattern, as many times in a row as a request allows."""

from __future__ import annotations

import numpy as np

from mooncake.sampling import RepetitionDetection
from mooncake.types import TokenIds


class Repetitions:
    """Follows one answer. For each size of pattern it counts how many of the last tokens are the same as the one a
    pattern before, so a token costs one pass over the sizes, however long patterns and answer are."""

    def __init__(self, wanted: RepetitionDetection, answer: TokenIds) -> None:
        """``answer``: its tokens so far."""
        self._least, self._most = wanted.min_pattern_size, wanted.max_pattern_size
        sizes = range(self._least, self._most + 1)
        self._needed = np.array(sizes) * (wanted.min_count - 1)
        tail = answer[-self._most * wanted.min_count :]
        self._matches = np.array([_matches(tail, size) for size in sizes])

    @property
    def are_enough(self) -> bool:
        return bool((self._matches >= self._needed).any())

    def add_last(self, answer: TokenIds) -> None:
        """``answer`` has one more token."""
        last = len(answer) - 1
        before = answer[max(last - self._most, 0) : last][::-1][self._least - 1 :]
        matches = self._matches[: len(before)]
        matches += 1
        matches *= before == answer[last]


def _matches(tail: TokenIds, size: int) -> int:
    """How many of the last tokens are the same as the one ``size`` before."""
    if len(tail) <= size:
        return 0
    others = np.flatnonzero(tail[size:] != tail[:-size])
    return len(tail) - size - (int(others[-1]) + 1 if len(others) else 0)
