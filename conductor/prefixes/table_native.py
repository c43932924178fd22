"""The prefix index's table in C++: the same answers as ``table.PrefixTable`` in a fraction of the time and
memory. Built at first use; without a compiler the Python table serves, with one warning."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from conductor.arrays import Floats
from conductor.native import load_or_warn
from conductor.prefixes.table import INDEX_KEY_BYTES, PrefixTable, Slots
from mooncake.types import BlockEvent, Tier

SOURCE = Path(__file__).with_name("table.cpp")
RECORD_BYTES = INDEX_KEY_BYTES + 1


def new_table(max_blocks: int, native: bool = True) -> PrefixTable | NativeTable:
    """The fastest table available on this machine."""
    library = _load() if native else None
    return PrefixTable(max_blocks) if library is None else NativeTable(library, max_blocks)


@functools.cache
def _load() -> ModuleType | None:
    return load_or_warn("prefix_table", SOURCE, "matching prefixes")


class NativeTable:
    """Like ``PrefixTable``. Raises ValueError or TypeError for something that is not a key."""

    def __init__(self, library: ModuleType, max_blocks: int) -> None:
        self._library = library
        self._apply: Callable[..., int] = library.apply
        self._match: Callable[..., int] = library.match
        self._table: int = library.new_table(max_blocks)
        weakref.finalize(self, library.delete_table, self._table)

    @property
    def num_blocks(self) -> int:
        return int(self._library.num_blocks(self._table))

    @property
    def num_dropped(self) -> int:
        return int(self._library.num_dropped(self._table))

    def apply(self, events: Sequence[BlockEvent], slots: Slots, tier: Tier) -> int:
        return self._apply(self._table, events, slots.any, slots.dram, tier is Tier.SSD)

    def load(self, keys: Sequence[bytes], slots: Slots, tier: Tier) -> int:
        return int(self._library.load(self._table, keys, *slots, tier is Tier.SSD))

    def match(self, keys: Sequence[bytes], retired: int, num_slots: int) -> tuple[Floats, int]:
        runs: Floats = np.empty(num_slots)
        return runs, self._match(self._table, keys, _bits(retired) if retired else b"", runs)

    def blocks_of(self, shard: int, slots: Slots) -> list[tuple[bytes, Tier]]:
        found: bytes = self._library.blocks_of(self._table, shard, *slots)
        records = (found[at : at + RECORD_BYTES] for at in range(0, len(found), RECORD_BYTES))
        return [(record[:-1], Tier.DRAM if record[-1] else Tier.SSD) for record in records]

    def drop(self, shard: int, gone: int) -> None:
        self._library.drop(self._table, shard, _bits(gone))


def _bits(slots: int) -> bytes:
    """A bit set as 64-bit words."""
    return slots.to_bytes((slots.bit_length() + 63) // 64 * 8, "little")
