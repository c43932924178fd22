"""Which node holds which block: one set of nodes a key, so that a prompt is matched against all nodes at once.

Pure soft state, built from the events of caches, which are the truth; a wrong entry costs time and never correctness.
Caches drop leaves before their parents, so what a node holds of a chain is a run from its root, and the ends of runs
are found by bisection: a prompt of 250 blocks takes a dozen look-ups, not 250. Where a cache has a hole after all (a
corrupt block was dropped), the run may be told too long; the node then computes what it does not find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from mooncake.directory import RECORD_KEY_BYTES
from mooncake.types import BlockEvent, BlockKey, Tier

INDEX_KEY_BYTES = (
    RECORD_KEY_BYTES  # 15 of 32: still no two chains meet by accident, and a bytes object of 48 bytes instead of 64
)
NUM_SHARDS = (
    256  # by the first byte of a key: a table that grows stops the process for a millisecond and not for one second
)
MAX_SHARED = 1 << 16  # sets kept for sharing
MAX_MEMBERS = 1024
FEW_BITS = 8
FEW_ENDS = 4  # of runs within a prompt: who knows its system prompt, and who the conversation
MAX_BLOCKS = 16_000_000  # about 85 bytes each, however many nodes hold it


def index_keys(keys: Iterable[BlockKey]) -> list[bytes]:
    return [key[:INDEX_KEY_BYTES] for key in keys]


class PrefixIndex:
    """One owner. Bit ``i`` of a set stands for slot ``i``. A node has a slot, and a tiered node a second one for the
    blocks that are in its DRAM. ``version`` changes whenever a node's slots do."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.version = 0
        self.longest = 0  # of the runs that were told last
        self.dropped = 0  # stored events that found the index full
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._shards: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]
        self._shared: dict[
            int, int
        ] = {}  # one object a set: most blocks are held by the same nodes as their neighbours
        self._slots: dict[str, tuple[int, int]] = {}  # of any tier, of DRAM; equal when the node has one tier
        self._counts: dict[str, int] = {}  # blocks of each node
        self._members: dict[int, npt.NDArray[np.int64]] = {}  # slots of large sets that were asked for lately
        self._free: list[int] = []
        self._num_slots = 0
        self._retired = 0  # slots that no node has any more and that still stand in some sets
        self._sweep: Iterator[None] | None = None

    def __len__(self) -> int:
        """How many blocks some node holds, or held until lately."""
        return self._num_blocks

    def num_blocks(self, node_id: str) -> int:
        return self._counts.get(node_id, 0)

    def join(self, node_id: str, is_tiered: bool = False) -> None:
        """Give the node its slots; nothing happens when it has them."""
        if node_id not in self._slots:
            slot = self._take_slot()
            self._slots[node_id] = (slot, self._take_slot() if is_tiered else slot)
            self._counts[node_id] = 0
            self.version += 1

    def slot(self, node_id: str) -> int:
        """Where the node stands in the arrays that ``runs`` returns, whatever the tier."""
        self.join(node_id)
        return self._slots[node_id][0]

    def dram_slot(self, node_id: str) -> int:
        """As ``slot``, for blocks in its DRAM."""
        self.join(node_id)
        return self._slots[node_id][1]

    def apply(self, node_id: str, events: Iterable[BlockEvent], tier: Tier = Tier.DRAM) -> None:
        """Take over what became readable in a node's cache and what left it, in order. Repeats change nothing; a block
        that is stored in another tier has moved there."""
        self.join(node_id)
        self.sweep()
        slot, dram_slot = self._slots[node_id]
        bit, dram_bit = 1 << slot, 1 << dram_slot
        sets, clears = (bit, dram_bit) if tier is Tier.SSD and bit != dram_bit else (bit | dram_bit, 0)
        count, shared, shards = self._counts[node_id], self._shared, self._shards
        for is_stored, whole_key, _, _ in events:
            key = whole_key[:INDEX_KEY_BYTES]
            shard = shards[key[0]]
            before = shard.get(key, 0)
            if is_stored:
                after = (before | sets) & ~clears
                if after == before:
                    continue
                if not before:
                    if self._num_blocks >= self._max_blocks:
                        self.sweep(NUM_SHARDS + 1)
                    if self._num_blocks >= self._max_blocks:
                        self.dropped += 1
                        continue
                    self._num_blocks += 1
                count += not before & bit
                shard[key] = shared.get(after) or self._share(after)
            elif before & bit:
                count -= 1
                after = before & ~(bit | dram_bit)
                if after:
                    shard[key] = shared.get(after) or self._share(after)
                else:
                    del shard[key]
                    self._num_blocks -= 1
        self._counts[node_id] = count

    def load(self, node_id: str, keys: Sequence[bytes], tier: Tier = Tier.DRAM) -> None:
        """As ``apply`` for blocks that a node is known to hold, with keys cut already, in a fraction of the time."""
        self.join(node_id)
        slot, dram_slot = self._slots[node_id]
        bits = self._share(1 << slot if tier is Tier.SSD else 1 << slot | 1 << dram_slot)
        room = max(0, self._max_blocks - self._num_blocks)
        self.dropped += max(0, len(keys) - room)
        fresh = -sum(map(len, self._shards))
        added = 0
        for key in islice(keys, room):
            held = self._shards[key[0]].setdefault(key, bits)
            if held is not bits:
                added += not held >> slot & 1
                self._shards[key[0]][key] = self._share(held | bits)
        fresh += sum(map(len, self._shards))
        self._num_blocks += fresh
        self._counts[node_id] += fresh + added

    def blocks_of(self, node_id: str) -> Iterator[list[tuple[bytes, Tier]]]:
        """What a node holds, a shard at a time; the index may change in between."""
        for shard in self._shards:
            slot, dram_slot = self._slots.get(node_id, (-1, -1))
            if slot < 0:
                return
            bit, dram_bit = 1 << slot, 1 << dram_slot
            yield [(key, Tier.DRAM if nodes & dram_bit else Tier.SSD) for key, nodes in shard.items() if nodes & bit]

    def clear(self, node_id: str) -> None:
        """Forget what a node holds: it is about to tell everything anew. Costs nothing now: the node gets new slots,
        and the old ones are swept out bit by bit."""
        if not self._counts.get(node_id):
            return
        slot, dram_slot = self._slots[node_id]
        self.forget(node_id)
        self.join(node_id, is_tiered=slot != dram_slot)

    def forget(self, node_id: str) -> None:
        """The node is gone."""
        slots = self._slots.pop(node_id, None)
        if slots is None:
            return
        self.version += 1
        if self._counts.pop(node_id):
            self._retired |= 1 << slots[0] | 1 << slots[1]
        else:
            self._free += sorted(set(slots), reverse=True)

    def sweep(self, max_shards: int = 1) -> None:
        """Take slots that nobody has any more out of a few shards' sets. ``apply`` does one each time."""
        for _ in range(max_shards):
            if self._sweep is None:
                if not self._retired:
                    return
                self._sweep = self._sweep_all()
            if next(self._sweep, self) is self:
                self._sweep = None

    def runs(self, keys: Sequence[bytes]) -> npt.NDArray[np.float64]:
        """How many leading blocks of ``keys`` every node holds, by slot. Keys may be whole or cut."""
        runs: npt.NDArray[np.float64] = np.zeros(self._num_slots)
        self.longest = 0
        if not keys:
            return runs
        shards, cut = self._shards, INDEX_KEY_BYTES
        key = keys[0]
        alive = shards[key[0]].get(key[:cut], 0)  # who holds every block up to ``low``
        if self._retired:
            alive &= ~self._retired
        low, end = 1, len(keys)
        for _ in range(FEW_ENDS):
            if not alive:
                return runs
            high = end
            while low < high:  # the first block that one of them lacks
                middle = (low + high) >> 1
                key = keys[middle]
                if shards[key[0]].get(key[:cut], 0) & alive == alive:
                    low = middle + 1
                else:
                    high = middle
            self._assign(alive, low, runs)  # those that go on are assigned again
            self.longest = low
            if low == end:
                return runs
            key = keys[low]
            alive &= shards[key[0]].get(key[:cut], 0)
            low += 1
        self._find_ends(keys, low - 1, alive, runs)
        return runs

    def _find_ends(self, keys: Sequence[bytes], low: int, alive: int, runs: npt.NDArray[np.float64]) -> None:
        """Many runs end in ``keys``: halve what lies between two look-ups until nobody drops out there. ``alive`` hold
        every block up to ``low``."""
        shards, cut = self._shards, INDEX_KEY_BYTES
        last = len(keys) - 1
        key = keys[last]
        ahead = [(last, shards[key[0]].get(key[:cut], 0))]  # positions looked at already, the nearest last
        while ahead and alive:
            high, nodes = ahead[-1]
            held = nodes & alive
            if held != alive and high - low > 1:  # somebody has dropped out between
                middle = (low + high) >> 1
                key = keys[middle]
                ahead.append((middle, shards[key[0]].get(key[:cut], 0)))
                continue
            if held != alive and high > low:
                self._assign(alive, high, runs)
                self.longest, alive = high, held
            low = high
            ahead.pop()
        if alive:
            self._assign(alive, len(keys), runs)
            self.longest = len(keys)

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """As ``runs``, by node; nodes that hold none are left out."""
        runs = self.runs(keys)
        return {node_id: int(runs[slot]) for node_id, (slot, _) in self._slots.items() if runs[slot]}

    def _share(self, nodes: int) -> int:
        if len(self._shared) >= MAX_SHARED:
            self._shared.clear()
        return self._shared.setdefault(nodes, nodes)

    def _assign(self, nodes: int, run: int, runs: npt.NDArray[np.float64]) -> None:
        """Set ``run`` for every slot of ``nodes``: bit by bit when there are few; large sets are often the same ones,
        namely who holds a system prompt."""
        if nodes.bit_count() > FEW_BITS:
            slots = self._members.get(nodes)
            if slots is None:
                if len(self._members) >= MAX_MEMBERS:
                    self._members.clear()
                slots = self._members[nodes] = _slots_of(nodes)
            runs[slots] = run
            return
        while nodes:
            low = nodes & -nodes
            runs[low.bit_length() - 1] = run
            nodes ^= low

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def _sweep_all(self) -> Iterator[None]:
        """One shard at each step; slots are given out again when all are done."""
        gone = self._retired
        for shard in self._shards:
            for key in [key for key, nodes in shard.items() if nodes & gone]:
                left = shard[key] & ~gone
                if left:
                    shard[key] = self._share(left)
                else:
                    del shard[key]
                    self._num_blocks -= 1
            yield
        self._retired &= ~gone
        self._free += [slot for slot in range(self._num_slots) if gone >> slot & 1]


def _slots_of(nodes: int) -> npt.NDArray[np.int64]:
    packed = np.frombuffer(nodes.to_bytes((nodes.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, bitorder="little").nonzero()[0]
