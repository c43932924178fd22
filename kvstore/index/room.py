"""Eviction from a store's DRAM: which blocks stay, which leave when there is no room, which must be saved first, and
which are held in place.

A sealed block that the policy chooses may have to be saved elsewhere first: it is then *leaving*, still readable, and
*clean* once saved; a read rescues it. Pure. It names the blocks that may go; the index drops them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from kvstore.eviction import Block, EvictionPolicy
from kvstore.index.pins import Pins
from kvstore.index.slots import SlotState, SlotTable
from kvstore.index.tenants import Tenants
from kvstore.index.types import BlockName, Grant, Held
from mooncake.types import BlockKey


class Room:
    """``must_save`` says whether a block has to be saved before its slot is reused, ``is_elsewhere`` whether it can
    be read without this slot; both return immediately."""

    def __init__(
        self,
        table: SlotTable,
        policy: EvictionPolicy,
        pins: Pins,
        tenants: Tenants,
        must_save: Callable[[BlockName], bool],
        is_elsewhere: Callable[[BlockName], bool],
    ) -> None:
        self._table = table
        self._policy = policy
        self._pins = pins
        self._tenants = tenants
        self._must_save = must_save
        self._is_elsewhere = is_elsewhere
        self._leaving: list[Held] = []  # not yet handed out
        self._clean: OrderedDict[int, None] = OrderedDict()  # slots
        self._num_held = 0
        self.kept: set[bytes] = set()  # beginning of the chain for whose end room is being made
        self.num_saving = 0  # blocks that will leave once they have been saved

    # Staying

    def enter(self, index: int, now: float) -> None:
        """The block became readable, or stays after all."""
        slot = self._table.slots[index]
        self._policy.insert(Block(slot.name.key, slot.parent or None, slot.position), now)

    def touch(self, index: int, now: float) -> None:
        """The block was used."""
        slot = self._table.slots[index]
        if slot.is_leaving:
            self.rescue(index, now)
        else:
            self._policy.hit(slot.name.key, now)
        self._tenants.use(slot.tenant, slot.name.key)

    def rescue(self, index: int, now: float) -> None:
        """A block that was about to leave is wanted after all."""
        slot = self._table.slots[index]
        if slot.is_leaving:
            slot.is_leaving = slot.is_clean = False
            self._clean.pop(index, None)
            self.enter(index, now)

    def forget(self, index: int, now: float) -> None:
        """The block is no longer readable."""
        self._policy.remove(self._table.slots[index].name.key, now)
        self._clean.pop(index, None)

    # Held in place

    def lease(self, index: int) -> None:
        """The slot's bytes stay until ``end_lease`` has been called as often."""
        self._table.slots[index].leases += 1
        self._policy.pin(self._table.slots[index].name.key)

    def end_lease(self, grant: Grant, key: BlockKey) -> None:
        self._policy.unpin(key)
        slot = self._table.find(grant)
        if slot is None or slot.state is not SlotState.SEALED:
            return  # dropped as corrupt meanwhile, and perhaps reused
        slot.leases -= 1
        if slot.leases == 0 and slot.is_hidden:
            self._table.set_free(grant.slot)

    def hold(self, index: int) -> Held:
        """Keep a block's bytes in place for a while."""
        self.lease(index)
        self._num_held += 1
        return self._table.held(index, must_go=False)

    def let_go(self, held: Held) -> None:
        """It was saved, or could not be: if it had to leave, its slot may be reused unless it has been read
        meanwhile."""
        if held.must_go:
            self.num_saving -= 1
        else:
            self._num_held -= 1
        slot = self._table.find(held.grant)
        if held.must_go and slot is not None and slot.is_leaving and not slot.is_hidden:
            slot.is_clean = True
            self._clean[held.grant.slot] = None
        self.end_lease(held.grant, held.name.key)

    # Leaving

    def prepare(self, num_slots: int, now: float) -> None:
        """Make this many slots free, clean or about to be."""
        while len(self._table.free) + len(self._clean) + self.num_saving < num_slots:
            if not self.give_up_one(now):
                return

    def take_leaving(self) -> list[Held]:
        leaving, self._leaving = self._leaving, []
        return leaving

    def next_clean(self) -> int | None:
        """A block that may go, with no block still being saved that builds on it."""
        slots, is_built_on = self._table.slots, self._table.is_built_on
        leaf = next((index for index in self._clean if not is_built_on(slots[index].name.key)), None)
        return leaf if leaf is not None or self.num_saving else next(iter(self._clean), None)

    def give_up_one(self, now: float) -> bool:
        """Let the policy choose a block, and make it clean or have it saved. False when there is none to choose."""
        key = self._policy.victim(now)
        while key is None and self._pins.give_up_soft():
            key = self._policy.victim(now)
        if key is None and (key := self._below_others()) is not None:
            self._policy.remove(key, now)
        if key is None:
            return False
        assert isinstance(key, bytes)
        index = self._table.sealed[BlockKey(key)]
        slot = self._table.slots[index]
        slot.is_leaving = True
        if not self._must_save(slot.name):
            slot.is_clean = True
            self._clean[index] = None
            return True
        self.lease(index)
        self.num_saving += 1
        self._leaving.append(self._table.held(index, must_go=True))
        return True

    def _below_others(self) -> BlockKey | None:
        """When a single chain fills the store: a block that others build on, but that stays readable elsewhere."""
        for key in self._tenants.blocks():
            slot = self._table.slots[self._table.sealed[key]]
            is_idle = slot.leases == 0 and not slot.is_leaving and key not in self._pins and key not in self.kept
            if is_idle and (self._is_elsewhere(slot.name) or self._must_save(slot.name)):
                return key
        return None

    def check(self, leases: Counter[Grant]) -> None:
        """Raises AssertionError when this, the table and the policy disagree; ``leases`` are those of readers."""
        extra = 0
        for index, slot in enumerate(self._table.slots):
            expected = leases[Grant(index, slot.epoch)] if slot.state is SlotState.SEALED else 0
            extra += slot.leases - expected
            assert slot.leases >= expected, (index, slot.leases, expected)
            in_policy = slot.state is SlotState.SEALED and not slot.is_hidden and not slot.is_leaving
            assert not in_policy or slot.name.key in self._policy
            assert slot.is_clean == (index in self._clean) and (slot.is_leaving or not slot.is_clean)
        assert extra <= self.num_saving + self._num_held
        assert len(self._policy) == sum(not self._table.slots[i].is_leaving for i in self._table.sealed.values())
