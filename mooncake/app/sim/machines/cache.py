"""One host's KV in memory: the real block pool, used by whole prompts instead of an engine.

It evicts in the same order as an engine's cache: least recently used first, leaves before their parents, never a block
in use. It must not know times or bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from mooncake.app.sim.machines.tiered import TieredCache
from mooncake.engine.cache.block_pool import BlockPool
from mooncake.types import BlockEvent, BlockKey

Keys = Sequence[BlockKey]


class HostCache:
    """A cache of ``num_blocks`` blocks. Held blocks must be released once with ``release``."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.pool = BlockPool(num_blocks, block_tokens)

    def match(self, keys: Keys) -> int:
        return self.pool.match(keys)

    stored = match

    def hold(self, keys: Keys, count: int) -> list[int]:
        """Protect the first ``count`` blocks, which are cached, from eviction."""
        return self.pool.take_prefix(keys, count)

    def add(self, keys: Keys, held: list[int], into_dram: bool = True) -> None:
        """Store the chain as far as there is room; blocks already cached count as used. ``held``, its first blocks, are
        released. ``into_dram`` has no effect: there is only DRAM."""
        pool = self.pool
        lacking = keys[len(held) :]
        table = held + pool.take_prefix(lacking, pool.match(lacking))
        known = len(table)
        table += pool.allocate(min(len(keys) - known, pool.num_available))
        pool.seal(table, keys, known, len(table))
        pool.release(table)

    def release(self, held: list[int]) -> None:
        self.pool.release(held)

    def give_up(self, keys: Keys) -> int:
        """Free a chain from its last block on, up to the first one in use or with other children. Returns the number of
        blocks freed."""
        pool, children, count = self.pool, Counter(self.pool.parents()), 0
        for parent, key in reversed(list(zip((b"", *keys), keys, strict=False))):
            if not pool.has(key):
                continue
            if children[key] or not pool.num_idle([key]):
                break
            pool.discard(key)
            children[parent] -= 1
            count += 1
        return count

    def die(self) -> None:
        """The host has lost its memory; the cache is not used any more."""

    def take_events(self) -> list[BlockEvent]:
        return self.pool.take_events()

    @property
    def num_in_use(self) -> int:
        return self.pool.num_in_use

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping is inconsistent."""
        self.pool.check()


Cache: TypeAlias = HostCache | TieredCache
