"""Which block goes when there is no room: pure policies behind one protocol, leaves before their parents always."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.eviction.lru import FIFO, LRU
from kvstore.eviction.policy import Block, EvictionPolicy, Key
from kvstore.eviction.queues import ARC, S3FIFO, SIEVE
from kvstore.eviction.ranked import GDSF, LFU, LengthAware
from kvstore.eviction.workload_aware import WorkloadAware

__all__ = ["POLICIES", "Block", "EvictionPolicy", "Key", "make_policy"]

_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda capacity: LRU(),
    "fifo": lambda capacity: FIFO(),
    "lfu": lambda capacity: LFU(),
    "length-aware": lambda capacity: LengthAware(),
    "gdsf": lambda capacity: GDSF(),
    "s3-fifo": S3FIFO,
    "sieve": lambda capacity: SIEVE(),
    "arc": ARC,
    "workload-aware": lambda capacity: WorkloadAware(),
}

POLICIES = tuple(_POLICIES)


def make_policy(name: str, capacity_blocks: int) -> EvictionPolicy:
    """A policy by its name, for a cache of so many blocks. Raises KeyError for one that is not in ``POLICIES``."""
    return _POLICIES[name](capacity_blocks)
