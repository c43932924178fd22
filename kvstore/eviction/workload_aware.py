"""Eviction that learns from the workload which blocks return, and when.

The idea is that of the workload-aware policy of Wang et al., USENIX ATC'25 (arXiv 2506.02634): blocks fall into classes
with stable reuse, the probability and time of reuse are learnt online per class, and the block worth least for the room
it takes is evicted. Three things differ. Classes use what a pool can see of any request: how often the block was read
before, and whether an unread one ends its prompt. Instead of fitting an exponential, reuse is counted by age (people
think before they reply, so it rises first and falls later), including blocks that left, as long as they are remembered.
And a block's worth at its age is the best ratio, over all times it could still be kept, of expected reads to expected
stay: the Gittins index (1979), which also accounts for waiting through a dead time.

Until enough has been seen, everything is one class in one queue, which is LRU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from kvstore.eviction.policy import Block, Key, LeafFirst

EDGES_S = (
    0.0,
    4.0,
    8.0,
    16.0,
    24.0,
    32.0,
    48.0,
    64.0,
    96.0,
    128.0,
    192.0,
    256.0,
    384.0,
    512.0,
    768.0,
    1024.0,
    1536.0,
    2048.0,
)
"""Where ages fall into bins; the last bin has no end."""

NUM_BINS = len(EDGES_S)
WIDTHS_S = (*(end - start for start, end in pairwise(EDGES_S)), 4 * EDGES_S[-1])
MOST_READS = 4  # larger counts are one class
NUM_CLASSES = MOST_READS + 2
UNKNOWN = NUM_CLASSES  # the queues of blocks that came before anything was known
ENOUGH_READS = 256  # before that nothing is known
PRIOR = 50.0  # blocks of the mean class that every class starts with
MOST_GHOSTS = 131_072  # evicted blocks that are remembered
MOST_WEIGHT = 262_144.0  # blocks counted in a class before old counts fade
WALK_S = 1.0  # between two checks for blocks that have aged
MOST_MOVES = 4096  # per check
LEARN_S = 5.0  # between two estimates of what a block is worth by class and age


@dataclass(slots=True)
class _Life:
    """A block since it was last read."""

    kind: int  # class, for learning
    queue: int  # class of the queue it is in
    age: int  # bin, as far as it has been counted
    since_s: float
    reads: int


_Queue: TypeAlias = OrderedDict[Key, _Life]


class ReuseCurve:
    """How many blocks of a class were read at each age, how many passed it unread, and how many are there now."""

    def __init__(self) -> None:
        self.reads = [0.0] * NUM_BINS
        self.passed = [0.0] * NUM_BINS
        self.inside = [0] * NUM_BINS

    def grow_older(self, age: int, count: int) -> None:
        self.passed[age] += count
        self.inside[age] -= count
        self.inside[age + 1] += count

    def fade(self) -> None:
        """Halve large counts, so that the curve follows the workload."""
        if self.reads[0] + self.passed[0] > MOST_WEIGHT:
            self.reads = [count / 2 for count in self.reads]
            self.passed = [count / 2 for count in self.passed]


def reuse_chances(curve: ReuseCurve, prior: Sequence[float]) -> list[float]:
    """The probability of being read in each bin, given that it is reached, starting from ``PRIOR`` blocks like
    ``prior``.

    Blocks there now count as half: left out, reads would count at once and non-reads never.
    """
    return [
        (read + PRIOR * chance) / (read + passed + inside / 2 + PRIOR)
        for read, passed, inside, chance in zip(curve.reads, curve.passed, curve.inside, prior, strict=True)
    ]


def gittins_index(chances: Sequence[float]) -> list[float]:
    """For a block that has just reached each age: the most reads per second of stay, over all ages to give up at."""
    values = []
    for start in range(NUM_BINS):
        best, alive, stay_s = 0.0, 1.0, 0.0
        for chance, width_s in zip(chances[start:], WIDTHS_S[start:], strict=True):
            stay_s += alive * (1 - chance / 2) * width_s
            alive *= 1 - chance
            best = max(best, (1 - alive) / stay_s)
        values.append(best)
    return values


class WorkloadAware(LeafFirst):
    """One queue per class and age, in order of the last read; the queue worth least gives the victim."""

    def __init__(self) -> None:
        super().__init__()
        self._lives: dict[Key, _Life] = {}
        self._ghosts: OrderedDict[Key, _Life] = OrderedDict()  # evicted ones, the earliest first
        num_queues = (NUM_CLASSES + 1) * NUM_BINS
        self._queues: list[_Queue] = [OrderedDict() for _ in range(num_queues)]
        self._ghost_queues: list[_Queue] = [OrderedDict() for _ in range(num_queues)]
        self._curves = [ReuseCurve() for _ in range(NUM_CLASSES)]
        self._knows = False
        self._reads_seen = 0
        self._walk_at_s = self._learn_at_s = 0.0
        self._order: list[int] = []  # queues, the least valuable first
        self._place: list[int] = []  # by queue: its place in that order
        self._first = 0  # all queues before this place are empty
        self._set_order([0.0] * len(self._queues))

    # Supplied to LeafFirst

    def _enter(self, block: Block, now: float) -> None:
        self._grow_older(now)
        ghost = self._ghosts.pop(block.key, None)
        if ghost is not None:
            del self._ghost_queues[ghost.queue * NUM_BINS + ghost.age][block.key]
            self._read(ghost, now)
            self._start(block.key, ghost.reads + 1, False, now)
        else:
            self._start(block.key, 0, block.position + 1 == block.chain_blocks, now)

    def _touch(self, block: Block, now: float) -> None:
        life = self._lives[block.key]
        del self._queues[life.queue * NUM_BINS + life.age][block.key]
        self._rescue(block, now)

    def _rescue(self, block: Block, now: float) -> None:
        life = self._lives[block.key]
        self._read(life, now)
        self._start(block.key, life.reads + 1, False, now)

    def _next(self, now: float) -> Key | None:
        self._grow_older(now)
        for place in range(self._first, len(self._order)):
            queue = self._queues[self._order[place]]
            if queue:
                self._first = place
                return queue.popitem(last=False)[0]
        return None

    def _leave(self, block: Block) -> None:
        life = self._lives[block.key]
        del self._queues[life.queue * NUM_BINS + life.age][block.key]

    def _evicted(self, block: Block, now: float) -> None:
        life = self._ghosts[block.key] = self._lives[block.key]
        self._ghost_queues[life.queue * NUM_BINS + life.age][block.key] = life
        if len(self._ghosts) > MOST_GHOSTS:
            key, life = self._ghosts.popitem(last=False)
            del self._ghost_queues[life.queue * NUM_BINS + life.age][key]
            self._curves[life.kind].inside[life.age] -= 1

    def _forget(self, block: Block) -> None:
        life = self._lives.pop(block.key)
        if block.key not in self._ghosts:
            self._curves[life.kind].inside[life.age] -= 1
        super()._forget(block)

    # Learning

    def _start(self, key: Key, reads: int, ends_prompt: bool, now: float) -> None:
        kind = 0 if ends_prompt else 1 + min(reads, MOST_READS)
        queue = kind if self._knows else UNKNOWN
        life = self._lives[key] = _Life(kind, queue, 0, now, reads)
        self._curves[kind].inside[0] += 1
        index = queue * NUM_BINS
        self._queues[index][key] = life
        self._first = min(self._first, self._place[index])

    def _read(self, life: _Life, now: float) -> None:
        """Count the read that ends a life."""
        age = bisect_right(EDGES_S, now - life.since_s) - 1
        curve = self._curves[life.kind]
        for passed in range(life.age, age):
            curve.passed[passed] += 1
        curve.inside[life.age] -= 1
        curve.reads[max(age, life.age)] += 1
        self._reads_seen += 1

    def _grow_older(self, now: float) -> None:
        """Move aged blocks to the next queue, a bounded number at a time, and learn from it."""
        if now < self._walk_at_s:
            return
        moves = self._walk(self._queues, now, MOST_MOVES)
        moves = self._walk(self._ghost_queues, now, moves)
        self._first = 0
        if not moves:
            return  # the next call continues
        self._walk_at_s = now + WALK_S
        if self._reads_seen >= ENOUGH_READS and now >= self._learn_at_s:
            self._knows = True
            self._learn_at_s = now + LEARN_S
            self._learn()

    def _walk(self, queues: list[_Queue], now: float, moves: int) -> int:
        """Returns how many moves are left. Old ages first, so that no block moves twice."""
        for age in range(NUM_BINS - 2, -1, -1):
            born_by_s = now - EDGES_S[age + 1]
            for index in range(age, len(queues), NUM_BINS):
                queue = queues[index]
                older: list[tuple[Key, _Life]] = []
                for key, life in queue.items():
                    if life.since_s > born_by_s or len(older) == moves:
                        break
                    life.age = age + 1
                    older.append((key, life))
                if not older:
                    continue
                moves -= len(older)
                for key, _ in older:
                    del queue[key]
                queues[index + 1].update(older)
                for kind, count in Counter(life.kind for _, life in older).items():
                    self._curves[kind].grow_older(age, count)
        return moves

    def _learn(self) -> None:
        for curve in self._curves:
            curve.fade()
        mean = ReuseCurve()
        for curve in self._curves:
            mean.reads = [a + b for a, b in zip(mean.reads, curve.reads, strict=True)]
            mean.passed = [a + b for a, b in zip(mean.passed, curve.passed, strict=True)]
            mean.inside = [a + b for a, b in zip(mean.inside, curve.inside, strict=True)]
        chances = reuse_chances(mean, [0.0] * NUM_BINS)
        values: list[float] = []
        for curve in self._curves:
            values += gittins_index(reuse_chances(curve, chances))
        self._set_order(values + gittins_index(chances))

    def _set_order(self, values: Sequence[float]) -> None:
        """Ties put the oldest first."""
        self._order = sorted(range(len(values)), key=lambda index: (values[index], -(index % NUM_BINS)))
        self._place = [0] * len(values)
        for place, index in enumerate(self._order):
            self._place[index] = place
        self._first = 0
