"""Which block goes when there is no room: pure policies behind one protocol, leaves before their parents always."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.eviction.lru import FIFO, LRU
from kvstore.eviction.policy import Block, EvictionPolicy, Key

__all__ = ["POLICIES", "Block", "EvictionPolicy", "Key", "make_policy"]

POLICIES = ("lru", "fifo")


def make_policy(name: str, capacity_blocks: int) -> EvictionPolicy:
    """A policy by its name, for a cache of so many blocks. Raises KeyError for one that is not in ``POLICIES``."""
    policies: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU, "fifo": FIFO}
    return policies[name]()
