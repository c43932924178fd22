"""Recency alone: LRU, and FIFO, which ignores reads."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.eviction.policy import Block, Key, LeafFirst


class LRU(LeafFirst):
    """Evicts the block whose last read is longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self._order: OrderedDict[Key, None] = OrderedDict()

    def _enter(self, block: Block, now: float) -> None:
        self._order[block.key] = None

    def _touch(self, block: Block, now: float) -> None:
        self._order.move_to_end(block.key)

    def _next(self, now: float) -> Key | None:
        return self._order.popitem(last=False)[0] if self._order else None

    def _leave(self, block: Block) -> None:
        del self._order[block.key]

    def _rescue(self, block: Block, now: float) -> None:
        self._order[block.key] = None


class FIFO(LRU):
    """Evicts the block that was stored first, read or not."""

    def hit(self, key: Key, now: float) -> None:
        pass
