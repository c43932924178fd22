"""Blocks and the sets of nodes that hold them. ``table.cpp`` is the same in C++; this is the reference, and
serves where that cannot be built.

A set is an integer whose bit ``i`` stands for slot ``i``; who owns a slot is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from conductor.arrays import Floats, Ints
from mooncake.directory import RECORD_KEY_BYTES
from mooncake.types import BlockEvent, Tier

# 15 of 32 bytes: collisions stay impossible in practice, and a bytes object takes 48 bytes instead of 64
INDEX_KEY_BYTES = RECORD_KEY_BYTES
# by a key's first byte: a growing table then stops the process for a millisecond, not for a second
NUM_SHARDS = 256
MAX_SHARED = 1 << 16  # distinct sets kept for sharing
MAX_MEMBERS = 1024  # sets whose slots are kept as an array
FEW_BITS = 8  # up to so many slots are set one by one
FEW_ENDS = 4  # of runs within a prompt: usually some nodes hold its system prompt, and few the conversation


class Slots(NamedTuple):
    """One node's slots: for blocks in any tier, and for those in its DRAM; equal if the node has one tier."""

    any: int
    dram: int


class PrefixTable:
    """One owner. ``num_blocks`` that some node holds; ``num_dropped`` events that found the table full."""

    def __init__(self, max_blocks: int) -> None:
        self.num_blocks = 0
        self.num_dropped = 0
        self._max_blocks = max_blocks
        self._shards: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]
        # one object per set: most blocks are held by the same nodes as their neighbours
        self._shared: dict[int, int] = {}
        self._members: dict[int, Ints] = {}  # slots of large sets requested recently

    def apply(self, events: Sequence[BlockEvent], slots: Slots, tier: Tier) -> int:
        """Apply what became readable in a node's cache and what left it. Returns how many more blocks it holds."""
        gained = 0
        for is_stored, key, _, _ in events:
            gained += self._store(key, slots, tier) if is_stored else self._remove(key, slots)
        return gained

    def load(self, keys: Iterable[bytes], slots: Slots, tier: Tier) -> int:
        """Like ``apply`` for blocks that become readable."""
        return sum(self._store(key, slots, tier) for key in keys)

    def _store(self, whole_key: bytes, slots: Slots, tier: Tier) -> int:
        key, bit, dram_bit = whole_key[:INDEX_KEY_BYTES], 1 << slots.any, 1 << slots.dram
        shard = self._shards[key[0]]
        before = shard.get(key, 0)
        after = before & ~dram_bit | bit if tier is Tier.SSD and bit != dram_bit else before | bit | dram_bit
        if after == before:
            return 0
        if not before:
            if self.num_blocks >= self._max_blocks:
                self.num_dropped += 1
                return 0
            self.num_blocks += 1
        shard[key] = self._share(after)
        return not before & bit

    def _remove(self, whole_key: bytes, slots: Slots) -> int:
        key = whole_key[:INDEX_KEY_BYTES]
        shard = self._shards[key[0]]
        before = shard.get(key, 0)
        if not before >> slots.any & 1:
            return 0
        self._put(shard, key, before & ~(1 << slots.any | 1 << slots.dram))
        return -1

    def blocks_of(self, shard: int, slots: Slots) -> list[tuple[bytes, Tier]]:
        """What one node holds in one shard."""
        bit, dram_bit = 1 << slots.any, 1 << slots.dram
        held = self._shards[shard].items()
        return [(key, Tier.DRAM if nodes & dram_bit else Tier.SSD) for key, nodes in held if nodes & bit]

    def drop(self, shard: int, gone: int) -> None:
        """Remove a set of slots from one shard."""
        blocks = self._shards[shard]
        for key in [key for key, nodes in blocks.items() if nodes & gone]:
            self._put(blocks, key, blocks[key] & ~gone)

    def match(self, keys: Sequence[bytes], retired: int, num_slots: int) -> tuple[Floats, int]:
        """For every slot not in ``retired``, how many leading blocks of ``keys`` it holds; and the longest such run."""
        runs: Floats = np.zeros(num_slots)
        longest = 0
        if not keys:
            return runs, longest
        shards, cut = self._shards, INDEX_KEY_BYTES
        key = keys[0]
        alive = shards[key[0]].get(key[:cut], 0) & ~retired  # slots that hold every block up to ``low``
        low, end = 1, len(keys)
        for _ in range(FEW_ENDS):
            if not alive:
                return runs, longest
            high = end
            while low < high:  # find the first block that one of them lacks
                middle = (low + high) >> 1
                key = keys[middle]
                if shards[key[0]].get(key[:cut], 0) & alive == alive:
                    low = middle + 1
                else:
                    high = middle
            self._assign(alive, low, runs)  # the ones that go on are assigned again
            longest = low
            if low == end:
                return runs, longest
            key = keys[low]
            alive &= shards[key[0]].get(key[:cut], 0)
            low += 1
        return runs, self._find_ends(keys, low - 1, alive, runs) or longest

    def _find_ends(self, keys: Sequence[bytes], low: int, alive: int, runs: Floats) -> int:
        """Many runs end within ``keys``: halve the interval between two look-ups until no slot drops out inside it.
        ``alive`` hold every block up to ``low``. Returns the longest run found; 0: none."""
        shards, cut = self._shards, INDEX_KEY_BYTES
        longest, last = 0, len(keys) - 1
        key = keys[last]
        ahead = [(last, shards[key[0]].get(key[:cut], 0))]  # positions already looked up, the nearest last
        while ahead and alive:
            high, nodes = ahead[-1]
            held = nodes & alive
            if held != alive and high - low > 1:  # some slot dropped out in between
                middle = (low + high) >> 1
                key = keys[middle]
                ahead.append((middle, shards[key[0]].get(key[:cut], 0)))
                continue
            if held != alive and high > low:
                self._assign(alive, high, runs)
                longest, alive = high, held
            low = high
            ahead.pop()
        if alive:
            self._assign(alive, len(keys), runs)
            longest = len(keys)
        return longest

    def _put(self, shard: dict[bytes, int], key: bytes, nodes: int) -> None:
        if nodes:
            shard[key] = self._share(nodes)
        else:
            del shard[key]
            self.num_blocks -= 1

    def _share(self, nodes: int) -> int:
        if len(self._shared) >= MAX_SHARED:
            self._shared.clear()
        return self._shared.setdefault(nodes, nodes)

    def _assign(self, nodes: int, run: int, runs: Floats) -> None:
        """Set ``run`` for every slot of ``nodes``: bit by bit if there are few; large sets recur often (the holders
        of a system prompt) and are cached."""
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


def _slots_of(nodes: int) -> Ints:
    packed = np.frombuffer(nodes.to_bytes((nodes.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, bitorder="little").nonzero()[0]
