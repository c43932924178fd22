"""Recency alone: LRU, and FIFO, which does not even look at reads."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.eviction.policy import Block, Key, LeafFirst


class LRU(LeafFirst):
    """The block whose last read is longest ago goes first."""

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
    """The block that was stored first goes first, read or not."""

    def hit(self, key: Key, now: float) -> None:
        pass
