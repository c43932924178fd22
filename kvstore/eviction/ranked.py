"""Policies that rank every block when it is stored or read, and evict the lowest: LFU, LengthAware, GDSF, Belady.

Blocks are in a heap whose entries may be stale: one that turns out to be too low is put back where it belongs, so a
read, which usually raises the rank, costs O(1). A victim costs O(log n). The heap is rebuilt before it grows to more
than twice its necessary size.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from kvstore.eviction.policy import Block, Key, LeafFirst

Rank: TypeAlias = tuple[float, float]

ATTENTION_PER_TOKEN = 3.75e-5
"""What each token before a block adds to the cost of computing it, as a share of its cost at the beginning: 2 * 262
kFLOP of attention against 14 GFLOP of matrices a token, the shape of Llama-3-8B."""


class Ranked(LeafFirst):
    """Evicts the lowest rank; among equals the one whose rank was set first."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[Key, tuple[float, float, int]] = {}  # of blocks in the order, with a sequence number
        self._heap: list[tuple[float, float, int, Key]] = []
        self._settings = 0
        self._last_rank: Rank = (0.0, 0.0)  # of the last block taken out of the order

    @abstractmethod
    def _rank(self, block: Block, is_new: bool, now: float) -> Rank:
        """The rank of a block that was stored or read just now."""

    def _enter(self, block: Block, now: float) -> None:
        rank = self._set_rank(block, True, now)
        heapq.heappush(self._heap, (*rank, block.key))

    def _touch(self, block: Block, now: float) -> None:
        before = self._ranks[block.key]
        rank = self._set_rank(block, False, now)
        if rank < before:
            heapq.heappush(self._heap, (*rank, block.key))
            self._tidy()

    def _rescue(self, block: Block, now: float) -> None:
        rank = self._set_rank(block, False, now)
        heapq.heappush(self._heap, (*rank, block.key))

    def _leave(self, block: Block) -> None:
        del self._ranks[block.key]
        self._tidy()

    def _next(self, now: float) -> Key | None:
        heap, ranks = self._heap, self._ranks
        while heap:
            entry = heap[0]
            key = entry[3]
            rank = ranks.get(key)
            if rank == entry[:3]:
                heapq.heappop(heap)
                del ranks[key]
                self._last_rank = entry[:2]
                return key
            if rank is None or rank < entry[:3]:  # left, perhaps to return with another entry
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (*rank, key))
        return None

    def _tidy(self) -> None:
        """Rebuild the heap when most of it is stale; amortised over as many calls."""
        if len(self._heap) > 2 * len(self._ranks):
            self._heap = [(*rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def _set_rank(self, block: Block, is_new: bool, now: float) -> tuple[float, float, int]:
        self._settings += 1
        first, second = self._rank(block, is_new, now)
        rank = self._ranks[block.key] = (first, second, self._settings)
        return rank


class LFU(Ranked):
    """Evicts the block read least often since it was stored, and among those the least recently read."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[Key, int] = {}

    def _rank(self, block: Block, is_new: bool, now: float) -> Rank:
        count = self._counts[block.key] = 1 if is_new else self._counts[block.key] + 1
        return count, 0.0

    def _forget(self, block: Block) -> None:
        del self._counts[block.key]
        super()._forget(block)


class LengthAware(LFU):
    """LFU, with ties broken by the greatest distance from the prompt's beginning (arXiv 2407.00079, section 4.2)."""

    def _rank(self, block: Block, is_new: bool, now: float) -> Rank:
        count, _ = super()._rank(block, is_new, now)
        return count, -block.position


class GDSF(LFU):
    """Greedy-Dual-Size-Frequency (Cherkasova, HP Labs 1998): reads times cost over size, plus the last victim's rank.

    The cost of a block is the time to recompute it at its position: ``1 + attention * position``, in units of the part
    that does not grow with the position.
    """

    def __init__(self, attention: float) -> None:
        super().__init__()
        self._attention = attention
        self._age = 0.0

    def _rank(self, block: Block, is_new: bool, now: float) -> Rank:
        count, _ = super()._rank(block, is_new, now)
        return self._age + count * (1.0 + self._attention * block.position) / block.size, 0.0

    def _next(self, now: float) -> Key | None:
        key = super()._next(now)
        if key is not None:
            self._age = self._last_rank[0]
        return key


class Belady(Ranked):
    """The optimum: knows when each block is read next, and evicts the one for which that is furthest away.

    ``reads`` gives for each key the ascending numbers of the requests that read it. ``now`` must be the number of the
    request being served. A parent is read whenever its child is, so among equals the deeper one goes.
    """

    def __init__(self, reads: Mapping[Key, Sequence[int]]) -> None:
        super().__init__()
        self._reads = reads

    def _rank(self, block: Block, is_new: bool, now: float) -> Rank:
        reads = self._reads.get(block.key, ())
        index = bisect_right(reads, now)
        return -(reads[index] if index < len(reads) else math.inf), -block.position


def reads_of(requests: Iterable[Iterable[Key]]) -> dict[Key, list[int]]:
    """The ``reads`` of ``Belady``, from the blocks of each request in order."""
    reads: dict[Key, list[int]] = {}
    for number, keys in enumerate(requests):
        for key in keys:
            reads.setdefault(key, []).append(number)
    return reads
