"""Which node holds which block: one set of nodes per key, so that a prompt is matched against all nodes at once.

Pure soft state, built from the events of caches, which are authoritative; a wrong entry costs time, never correctness.
Caches evict leaves before their parents, so what a node holds of a chain is a run from its root, and the ends of runs
are found by bisection: a prompt of 250 blocks takes a dozen look-ups, not 250. If a cache does have a hole (a corrupt
block was dropped), the run may be reported too long; the node then computes what it does not find.

This class maps nodes to slots; the blocks are in a table of sets of slots (``table``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from conductor.arrays import Floats
from conductor.prefixes.table import NUM_SHARDS, Slots
from conductor.prefixes.table_native import new_table
from mooncake.types import BlockEvent, Tier

MAX_BLOCKS = 16_000_000  # about 40 bytes each, however many nodes hold it


class PrefixIndex:
    """One owner. A node has one slot, and a tiered node a second one for the blocks in its DRAM. ``version`` changes
    whenever a node's slots do."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, native: bool = True) -> None:
        self.version = 0
        self.longest = 0  # of the runs that were last returned
        self._max_blocks = max_blocks
        self._table = new_table(max_blocks, native)
        self._slots: dict[str, Slots] = {}
        self._counts: dict[str, int] = {}  # blocks each node holds
        self._free: list[int] = []
        self._num_slots = 0
        self._retired = 0  # set of slots that belong to no node any more but are still in the table
        self._sweep: Iterator[None] | None = None

    def __len__(self) -> int:
        """Number of blocks that some node holds, or held until recently."""
        return self._table.num_blocks

    @property
    def dropped(self) -> int:
        """Number of stored events that found the index full."""
        return self._table.num_dropped

    def num_blocks(self, node_id: str) -> int:
        return self._counts.get(node_id, 0)

    def join(self, node_id: str, is_tiered: bool = False) -> None:
        """Give the node its slots; no effect if it has them."""
        if node_id not in self._slots:
            slot = self._take_slot()
            self._slots[node_id] = Slots(slot, self._take_slot() if is_tiered else slot)
            self._counts[node_id] = 0
            self.version += 1

    def slot(self, node_id: str) -> int:
        """The node's index in the arrays that ``runs`` returns, whatever the tier."""
        self.join(node_id)
        return self._slots[node_id].any

    def dram_slot(self, node_id: str) -> int:
        """Like ``slot``, for blocks in its DRAM."""
        self.join(node_id)
        return self._slots[node_id].dram

    def apply(self, node_id: str, events: Iterable[BlockEvent], tier: Tier = Tier.DRAM) -> None:
        """Apply, in order, what became readable in a node's cache and what left it. Idempotent; a block stored in
        another tier has moved there."""
        self.join(node_id)
        events = list(events)
        if self._retired:
            self.sweep(self._shards_to_sweep(len(events)))
        self._counts[node_id] += self._table.apply(events, self._slots[node_id], tier)

    def load(self, node_id: str, keys: Sequence[bytes], tier: Tier = Tier.DRAM) -> None:
        """Like ``apply`` for blocks that a node is known to hold, with keys already truncated, in a fraction of the
        time."""
        self.join(node_id)
        self._counts[node_id] += self._table.load(keys, self._slots[node_id], tier)

    def blocks_of(self, node_id: str) -> Iterator[list[tuple[bytes, Tier]]]:
        """What a node holds, one shard at a time; the index may change in between."""
        for shard in range(NUM_SHARDS):
            slots = self._slots.get(node_id)
            if slots is None:
                return
            yield self._table.blocks_of(shard, slots)

    def clear(self, node_id: str) -> None:
        """Forget what a node holds, because it is about to send a snapshot. Cheap: the node gets new slots, and the
        old ones are swept out little by little."""
        if not self._counts.get(node_id):
            return
        slots = self._slots[node_id]
        self.forget(node_id)
        self.join(node_id, is_tiered=slots.any != slots.dram)

    def forget(self, node_id: str) -> None:
        """The node is gone."""
        slots = self._slots.pop(node_id, None)
        if slots is None:
            return
        self.version += 1
        if self._counts.pop(node_id):
            self._retired |= 1 << slots.any | 1 << slots.dram
        else:
            self._free += sorted(set(slots), reverse=True)

    def sweep(self, max_shards: int = 1) -> None:
        """Remove unowned slots from a few shards. Each ``apply`` sweeps one."""
        for _ in range(max_shards):
            if self._sweep is None:
                if not self._retired:
                    return
                self._sweep = self._sweep_all()
            if next(self._sweep, self) is self:
                self._sweep = None

    def runs(self, keys: Sequence[bytes]) -> Floats:
        """How many leading blocks of ``keys`` every node holds, by slot. Keys may be whole or truncated."""
        runs, self.longest = self._table.match(keys, self._retired, self._num_slots)
        return runs

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Like ``runs``, by node; nodes that hold none are left out."""
        runs = self.runs(keys)
        return {node_id: int(runs[slots.any]) for node_id, slots in self._slots.items() if runs[slots.any]}

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def _shards_to_sweep(self, num_events: int) -> int:
        """One, or all when there might otherwise be no room."""
        return 1 if len(self) + num_events <= self._max_blocks else NUM_SHARDS + 1

    def _sweep_all(self) -> Iterator[None]:
        """Sweep one shard per step; slots are reused once all shards are done."""
        gone = self._retired
        for shard in range(NUM_SHARDS):
            self._table.drop(shard, gone)
            yield
        self._retired &= ~gone
        self._free += [slot for slot in range(self._num_slots) if gone >> slot & 1]
