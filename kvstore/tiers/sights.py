"""How often a block has recently been asked for or offered, in bounded memory: most blocks are seen once and never
again.

Two generations of counts: when the young one is full it becomes the old one, and the previous old one is forgotten.
Pure.
"""

from __future__ import annotations

from mooncake.types import BlockKey


class Sights:
    """Remembers between ``keep`` and twice as many blocks."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._young: dict[BlockKey, int] = {}
        self._old: dict[BlockKey, int] = {}

    def see(self, key: BlockKey) -> int:
        """Count one more sight. Returns the block's count."""
        count = self._young.get(key, self._old.get(key, 0)) + 1
        if key not in self._young and len(self._young) >= self._keep:
            self._young, self._old = {}, self._young
        self._young[key] = count
        return count

    def count(self, key: BlockKey) -> int:
        return self._young.get(key, self._old.get(key, 0))
