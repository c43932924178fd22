"""Policies made of FIFO or LRU queues: S3-FIFO, SIEVE, ARC. Calls are O(1) amortised."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.eviction.policy import Block, Key, LeafFirst

Queue = OrderedDict[Key, None]


class S3FIFO(LeafFirst):
    """Three queues (Yang et al., SOSP'23): new blocks prove themselves in a small one before they enter the main one.

    Blocks that leave the small queue unproven are remembered for a while, and enter the main one if they return.
    """

    SMALL = 0.1  # share of the capacity
    MAX_READS = 3
    PROVEN = 1  # reads in the small queue that promote a block to the main one

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__()
        self._small_target = max(1, round(self.SMALL * capacity_blocks))
        self._ghost_target = max(1, capacity_blocks - self._small_target)
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghost: Queue = OrderedDict()
        self._reads: dict[Key, int] = {}
        self._unproven: set[Key] = set()  # condemned, or about to be evicted, from the small queue

    def _enter(self, block: Block, now: float) -> None:
        key = block.key
        self._reads[key] = 0
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = None
        else:
            self._small[key] = None

    def _touch(self, block: Block, now: float) -> None:
        reads = self._reads[block.key]
        if reads < self.MAX_READS:
            self._reads[block.key] = reads + 1

    def _rescue(self, block: Block, now: float) -> None:
        self._unproven.discard(block.key)
        self._main[block.key] = None

    def _leave(self, block: Block) -> None:
        self._small.pop(block.key, None)
        self._main.pop(block.key, None)

    def _next(self, now: float) -> Key | None:
        small, main, reads = self._small, self._main, self._reads
        while small or main:
            if small and (len(small) >= self._small_target or not main):
                key, _ = small.popitem(last=False)
                if reads[key] < self.PROVEN:
                    self._unproven.add(key)
                    return key
                main[key] = None
                reads[key] = 0
            else:
                key, _ = main.popitem(last=False)
                if not reads[key]:
                    return key
                main[key] = None
                reads[key] -= 1
        return None

    def _evicted(self, block: Block, now: float) -> None:
        if block.key in self._unproven:
            self._ghost[block.key] = None
            if len(self._ghost) > self._ghost_target:
                self._ghost.popitem(last=False)

    def _forget(self, block: Block) -> None:
        self._unproven.discard(block.key)
        del self._reads[block.key]
        super()._forget(block)


class SIEVE(LeafFirst):
    """One queue and a hand (Zhang et al., NSDI'24): the hand moves from old to new, spares blocks read since its
    last visit, without moving them, and evicts the first that was not."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: Queue = OrderedDict()  # older than the hand
        self._ahead: Queue = OrderedDict()  # from the hand to the newest
        self._read: set[Key] = set()

    def _enter(self, block: Block, now: float) -> None:
        self._ahead[block.key] = None

    def _touch(self, block: Block, now: float) -> None:
        self._read.add(block.key)

    def _rescue(self, block: Block, now: float) -> None:
        self._passed[block.key] = None  # the hand has just been there

    def _leave(self, block: Block) -> None:
        self._passed.pop(block.key, None)
        self._ahead.pop(block.key, None)

    def _next(self, now: float) -> Key | None:
        while self._ahead or self._passed:
            self._turn()
            key, _ = self._ahead.popitem(last=False)
            was_read = key in self._read
            if was_read:
                self._read.discard(key)
                self._passed[key] = None
            self._turn()  # now, because later arrivals are newer than everything the hand has still to visit
            if not was_read:
                return key
        return None

    def _turn(self) -> None:
        """If the hand has passed the newest block, move it back to the oldest."""
        if not self._ahead:
            self._ahead, self._passed = self._passed, self._ahead

    def _forget(self, block: Block) -> None:
        self._read.discard(block.key)
        super()._forget(block)


class ARC(LeafFirst):
    """Two LRU queues, of blocks seen once and more often, whose balance follows which of the two it would have been
    better to keep (Megiddo and Modha, FAST'03)."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__()
        self._capacity = capacity_blocks
        self._once: Queue = OrderedDict()
        self._often: Queue = OrderedDict()
        self._once_ghost: Queue = OrderedDict()
        self._often_ghost: Queue = OrderedDict()
        self._once_target = 0.0
        self._from_often: set[Key] = set()  # condemned, or about to be evicted, from the queue of blocks read often

    def _enter(self, block: Block, now: float) -> None:
        key, once_ghost, often_ghost = block.key, self._once_ghost, self._often_ghost
        if key in once_ghost:
            step = max(1.0, len(often_ghost) / len(once_ghost))
            self._once_target = min(float(self._capacity), self._once_target + step)
            del once_ghost[key]
            self._often[key] = None
        elif key in often_ghost:
            step = max(1.0, len(once_ghost) / len(often_ghost))
            self._once_target = max(0.0, self._once_target - step)
            del often_ghost[key]
            self._often[key] = None
        else:
            self._once[key] = None

    def _touch(self, block: Block, now: float) -> None:
        self._once.pop(block.key, None)
        self._often[block.key] = None
        self._often.move_to_end(block.key)

    def _rescue(self, block: Block, now: float) -> None:
        self._from_often.discard(block.key)
        self._often[block.key] = None

    def _leave(self, block: Block) -> None:
        self._once.pop(block.key, None)
        self._often.pop(block.key, None)

    def _next(self, now: float) -> Key | None:
        if self._once and (len(self._once) > self._once_target or not self._often):
            return self._once.popitem(last=False)[0]
        if not self._often:
            return None
        key, _ = self._often.popitem(last=False)
        self._from_often.add(key)
        return key

    def _evicted(self, block: Block, now: float) -> None:
        ghost = self._often_ghost if block.key in self._from_often else self._once_ghost
        ghost[block.key] = None
        while self._once_ghost and len(self._once) + len(self._once_ghost) > self._capacity:
            self._once_ghost.popitem(last=False)
        while len(self) + len(self._once_ghost) + len(self._often_ghost) > 2 * self._capacity and self._often_ghost:
            self._often_ghost.popitem(last=False)

    def _forget(self, block: Block) -> None:
        self._from_often.discard(block.key)
        super()._forget(block)
