"""Which block to evict when there is no room: pure policies behind one protocol, always leaves before their parents."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.eviction.lru import FIFO, LRU
from kvstore.eviction.policy import Block, EvictionPolicy, Key
from kvstore.eviction.queues import ARC, S3FIFO, SIEVE
from kvstore.eviction.ranked import ATTENTION_PER_TOKEN, GDSF, LFU, LengthAware
from kvstore.eviction.workload_aware import WorkloadAware

__all__ = ["POLICIES", "Block", "EvictionPolicy", "Key", "make_policy"]

_POLICIES: dict[str, Callable[[int, int], EvictionPolicy]] = {
    "lru": lambda capacity, tokens: LRU(),
    "fifo": lambda capacity, tokens: FIFO(),
    "lfu": lambda capacity, tokens: LFU(),
    "length-aware": lambda capacity, tokens: LengthAware(),
    "gdsf": lambda capacity, tokens: GDSF(ATTENTION_PER_TOKEN * tokens),
    "gdsf-flat": lambda capacity, tokens: GDSF(0.0),
    "s3-fifo": lambda capacity, tokens: S3FIFO(capacity),
    "sieve": lambda capacity, tokens: SIEVE(),
    "arc": lambda capacity, tokens: ARC(capacity),
    "workload-aware": lambda capacity, tokens: WorkloadAware(),
}

POLICIES = tuple(_POLICIES)


def make_policy(name: str, capacity_blocks: int, block_tokens: int = 64) -> EvictionPolicy:
    """The policy of that name, for a cache of this many blocks. Raises KeyError for a name that is not in
    ``POLICIES``."""
    return _POLICIES[name](capacity_blocks, block_tokens)
