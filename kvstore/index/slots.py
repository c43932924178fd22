"""The slots of a store's DRAM: the state of each, the block in it, its writer, and which block builds on which.

    free ──reserve──▶ reserved ──seal──▶ sealed ──evict, remove, corrupt──▶ free
                       │     │
                       │     └──time-out──▶ quarantined ──the writer is done or gone──▶ free
                       └──abort, the writer is gone──▶ free

Pure, and without a clock. It must not know why a slot moves: about leases' ends, pins, quotas and policies.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from kvstore.checksum import Checksums
from kvstore.index.types import NO_NAME, BlockName, Grant, Held, LeasedBlock, Reserved
from mooncake.types import BlockKey


class SlotState(StrEnum):
    FREE = "free"
    RESERVED = "reserved"
    SEALED = "sealed"
    QUARANTINED = "quarantined"


_MOVES = frozenset(
    {
        (SlotState.FREE, SlotState.RESERVED),
        (SlotState.RESERVED, SlotState.SEALED),
        (SlotState.RESERVED, SlotState.FREE),
        (SlotState.RESERVED, SlotState.QUARANTINED),
        (SlotState.QUARANTINED, SlotState.FREE),
        (SlotState.SEALED, SlotState.FREE),
    }
)


@dataclass(slots=True)
class Slot:
    state: SlotState = SlotState.FREE
    name: BlockName = NO_NAME
    epoch: int = 0
    writer: str = ""
    tenant: str = ""
    length: int = 0
    ranges: int = 0
    number: int = 0  # of the call that reserved it; 0: none
    parent: bytes = b""  # the block it builds on, if that was here first: so no two blocks can wait for each other
    position: int = 0  # number of blocks before it in its chain, as far as they were here
    checksums: Checksums | None = None
    leases: int = 0  # of readers, and of those saving it elsewhere
    is_hidden: bool = False  # sealed and removed, but still leased: freed when the last lease ends
    is_leaving: bool = False  # chosen by the policy
    is_clean: bool = False  # … and may go at once


class SlotTable:
    """``slots``, ``free``, ``sealed`` and ``reserved`` are for others to read; only this class changes them, except
    for the leases and flags of sealed slots. Epochs count from ``first_id``."""

    def __init__(self, num_slots: int, first_id: int) -> None:
        self.slots = [Slot() for _ in range(num_slots)]
        self.free = list(range(num_slots - 1, -1, -1))  # a stack: slots touched before come first
        self.sealed: dict[BlockKey, int] = {}  # readable blocks
        self.reserved: dict[BlockKey, int] = {}  # blocks being written
        self._num = Counter({SlotState.FREE: num_slots})
        self._held_by: dict[str, set[int]] = {}  # by writer: reserved and quarantined slots
        self._children: Counter[bytes] = Counter()  # by key: number of readable and reserved blocks that build on it
        self._epochs = itertools.count(first_id)

    # State changes

    def reserve(self, writer: str, length: int, ranges: int) -> Grant:
        """Give a free slot (there must be one) to a writer. Call ``name`` now, or when its block is known."""
        grant = Grant(self.free.pop(), next(self._epochs))
        slot = self.slots[grant.slot]
        self._move(slot, SlotState.RESERVED)
        slot.writer, slot.epoch, slot.length, slot.ranges = writer, grant.epoch, length, ranges
        slot.number, slot.parent, slot.position = 0, b"", 0
        self._held_by.setdefault(writer, set()).add(grant.slot)
        return grant

    def name(self, index: int, name: BlockName, tenant: str) -> None:
        """Say which block a reserved slot is being filled with."""
        slot = self.slots[index]
        slot.name, slot.tenant = name, tenant
        slot.parent, slot.position = self._link(name.parent)
        if slot.parent:
            self._children[slot.parent] += 1
        self.reserved[name.key] = index

    def unname(self, index: int) -> None:
        """The block is no longer being written; another writer may start on it."""
        slot = self.slots[index]
        del self.reserved[slot.name.key]
        self._unlink(slot)

    def seal(self, index: int, checksums: Checksums) -> None:
        slot = self.slots[index]
        self._let_go(index)
        self._move(slot, SlotState.SEALED)
        del self.reserved[slot.name.key]
        self.sealed[slot.name.key] = index
        slot.checksums = checksums

    def quarantine(self, index: int) -> None:
        """For a slot that has been unnamed."""
        self._move(self.slots[index], SlotState.QUARANTINED)

    def hide(self, index: int) -> None:
        """The block is no longer readable; the slot is unchanged."""
        slot = self.slots[index]
        del self.sealed[slot.name.key]
        slot.is_hidden, slot.is_clean = True, False
        self._unlink(slot)

    def set_free(self, index: int) -> None:
        """For a slot that has been unnamed or hidden."""
        slot = self.slots[index]
        if slot.state is not SlotState.SEALED:
            self._let_go(index)
        self._move(slot, SlotState.FREE)
        slot.name, slot.epoch, slot.writer, slot.tenant = NO_NAME, 0, "", ""
        slot.checksums, slot.leases, slot.is_hidden, slot.is_leaving, slot.is_clean = None, 0, False, False, False
        self.free.append(index)

    # Queries

    def find(self, grant: Grant) -> Slot | None:
        """The slot, as long as it is under this grant or holds what was written under it."""
        slot = self.slots[grant.slot] if 0 <= grant.slot < len(self.slots) else None
        return slot if slot is not None and slot.epoch == grant.epoch else None

    def reservation(self, grant: Grant) -> Reserved | None:
        slot = self.find(grant)
        if slot is None or slot.state is not SlotState.RESERVED:
            return None
        return Reserved(grant, slot.writer, slot.length, slot.ranges)

    def grant_of(self, index: int) -> Grant:
        return Grant(index, self.slots[index].epoch)

    def held_by(self, writer: str) -> list[Grant]:
        """Slots that this writer still holds, reserved or quarantined."""
        return [self.grant_of(index) for index in sorted(self._held_by.get(writer, ()))]

    def num_held(self, writer: str) -> int:
        return len(self._held_by.get(writer, ()))

    def held(self, index: int, must_go: bool) -> Held:
        slot = self.slots[index]
        assert slot.checksums is not None
        return Held(must_go, Grant(index, slot.epoch), slot.name, slot.tenant, slot.length, slot.checksums)

    def leased(self, index: int) -> LeasedBlock:
        slot = self.slots[index]
        assert slot.checksums is not None
        return LeasedBlock(slot.name.key, index, slot.length, slot.checksums)

    def is_built_on(self, key: bytes) -> bool:
        """Whether a block here, readable or being written, directly follows ``key``."""
        return self._children[key] > 0

    def num(self, state: SlotState) -> int:
        return self._num[state]

    def check(self) -> None:
        """Raises AssertionError when the table is inconsistent."""
        by_state = Counter(slot.state for slot in self.slots)
        assert +by_state == +self._num, (by_state, self._num)
        assert len(self.free) == len(set(self.free)) == by_state[SlotState.FREE]
        assert all(self.slots[index].state is SlotState.FREE for index in self.free)
        sealed = {i for i, slot in enumerate(self.slots) if slot.state is SlotState.SEALED and not slot.is_hidden}
        reserved = {i for i, slot in enumerate(self.slots) if slot.state is SlotState.RESERVED}
        quarantined = {i for i, slot in enumerate(self.slots) if slot.state is SlotState.QUARANTINED}
        assert set(self.sealed.values()) == sealed and len(self.sealed) == len(sealed)
        named = {i for i in reserved if self.slots[i].name is not NO_NAME}
        assert set(self.reserved.values()) == named and len(self.reserved) == len(named)
        assert all(self.slots[index].name.key == key for key, index in (*self.sealed.items(), *self.reserved.items()))
        held = [index for slots in self._held_by.values() for index in slots]
        assert sorted(held) == sorted(reserved | quarantined) and all(self._held_by.values())
        parents = [self.slots[index].parent for index in sealed | reserved]
        assert +self._children == Counter(filter(None, parents))
        assert all(slot.leases > 0 for slot in self.slots if slot.is_hidden)

    # Internals

    def _link(self, parent: bytes) -> tuple[bytes, int]:
        """The parent, if it is here, and the position of a block that follows it."""
        index = self.sealed.get(BlockKey(parent), self.reserved.get(BlockKey(parent)))
        return (b"", 0) if index is None else (parent, self.slots[index].position + 1)

    def _unlink(self, slot: Slot) -> None:
        if slot.parent:
            self._children[slot.parent] -= 1
            if not self._children[slot.parent]:
                del self._children[slot.parent]

    def _let_go(self, index: int) -> None:
        """The writer no longer holds this slot."""
        writer = self.slots[index].writer
        self._held_by[writer].discard(index)
        if not self._held_by[writer]:
            del self._held_by[writer]

    def _move(self, slot: Slot, state: SlotState) -> None:
        assert (slot.state, state) in _MOVES, f"{slot.state} -> {state}"
        self._num[slot.state] -= 1
        self._num[state] += 1
        slot.state = state
