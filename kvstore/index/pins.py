"""Blocks that clients keep in a store's DRAM for a while: hard pins without exception, soft ones until nothing else is
left.

The policy is told of every pin, so it never chooses a pinned block itself. Pure. It knows nothing of slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass

from kvstore.eviction import EvictionPolicy
from mooncake.errors import OutOfBlocks
from mooncake.types import BlockKey

CHECK_S = 0.25  # between two checks for expired pins
MAX_HARD_SHARE = 0.5  # of the slots: more hard pins would leave too little to work with


@dataclass(frozen=True, slots=True)
class _Pin:
    expires_s: float
    is_hard: bool


class Pins:
    def __init__(self, policy: EvictionPolicy, num_slots: int) -> None:
        self._policy = policy
        self._num_slots = num_slots
        self._pins: dict[BlockKey, _Pin] = {}
        self._soft: OrderedDict[BlockKey, None] = OrderedDict()  # oldest first
        self._num_hard = 0
        self._next_check = 0.0

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._pins

    def check_share(self, keys: Iterable[BlockKey]) -> None:
        """Raises OutOfBlocks when hard pins on these too would leave too little room."""
        more = sum(not (key in self._pins and self._pins[key].is_hard) for key in keys)
        if self._num_hard + more > self._num_slots * MAX_HARD_SHARE:
            raise OutOfBlocks(f"hard pins may hold {MAX_HARD_SHARE:.0%} of the store's blocks")

    def pin(self, key: BlockKey, is_hard: bool, expires_s: float) -> None:
        """Replaces the block's previous pin, if any."""
        self.unpin([key])
        self._pins[key] = _Pin(expires_s, is_hard)
        self._policy.pin(key)
        self._num_hard += is_hard
        if not is_hard:
            self._soft[key] = None

    def unpin(self, keys: Iterable[BlockKey]) -> int:
        """Returns how many were pinned."""
        count = 0
        for key in keys:
            pin = self._pins.pop(key, None)
            if pin is not None:
                self._policy.unpin(key)
                self._num_hard -= pin.is_hard
                self._soft.pop(key, None)
                count += 1
        return count

    def give_up_soft(self) -> bool:
        """Unpin the block with the oldest soft pin. False when there is none."""
        return bool(self._soft) and self.unpin([next(iter(self._soft))]) > 0

    def expire(self, now: float) -> None:
        """End expired pins."""
        if self._pins and now >= self._next_check:
            self._next_check = now + CHECK_S
            self.unpin([key for key, pin in self._pins.items() if pin.expires_s <= now])

    def check(self, readable: Container[BlockKey]) -> None:
        """Raises AssertionError when the accounts are wrong, or a pinned block is not ``readable``."""
        assert self._num_hard == sum(pin.is_hard for pin in self._pins.values())
        assert self._soft.keys() == {key for key, pin in self._pins.items() if not pin.is_hard}
        assert all(key in readable for key in self._pins)
