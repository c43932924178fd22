"""Blocks that clients keep in a store's DRAM for a while: hard for certain, soft as long as anything else can go.

The policy is told of every pin, so it never gives up a pinned block by itself. Pure. It must not know about slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass

from kvstore.eviction import EvictionPolicy
from mooncake.errors import OutOfBlocks
from mooncake.types import BlockKey

CHECK_S = 0.25  # between two looks for pins that ran out
MAX_HARD_SHARE = 0.5  # of the slots: more hard pins would leave nothing to work with


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
        """Raises OutOfBlocks when hard pins of these too would leave too little room."""
        more = sum(not (key in self._pins and self._pins[key].is_hard) for key in keys)
        if self._num_hard + more > self._num_slots * MAX_HARD_SHARE:
            raise OutOfBlocks(f"hard pins may hold {MAX_HARD_SHARE:.0%} of the store's blocks")

    def pin(self, key: BlockKey, is_hard: bool, expires_s: float) -> None:
        """Instead of the pin that there was, if any."""
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
        """Unpin the block whose soft pin is the oldest. False when there is none."""
        return bool(self._soft) and self.unpin([next(iter(self._soft))]) > 0

    def expire(self, now: float) -> None:
        """End pins that ran out."""
        if self._pins and now >= self._next_check:
            self._next_check = now + CHECK_S
            self.unpin([key for key, pin in self._pins.items() if pin.expires_s <= now])

    def check(self, readable: Container[BlockKey]) -> None:
        """Raises AssertionError when the accounts are wrong, or a block that is not ``readable`` is pinned."""
        assert self._num_hard == sum(pin.is_hard for pin in self._pins.values())
        assert self._soft.keys() == {key for key, pin in self._pins.items() if not pin.is_hard}
        assert all(key in readable for key in self._pins)
