"""The interface of an eviction policy, and the rule that all share: a block is evicted before the one it builds on.

Pure: a policy is told what was stored, read and removed, and names the next victim. It reads no clock, uses no
randomness, and knows nothing of slots, segments, leases or events; their owner pins what must not be evicted now.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Key: TypeAlias = Hashable
"""The pool's 32-byte keys, or a trace's integers: a policy only compares them."""


@dataclass(frozen=True, slots=True)
class Block:
    """What a policy may know about a block.

    ``parent`` is the block before it in its chain, None for a first one; it need not be in the cache. ``position``
    counts the blocks before it. ``size`` is in any one unit (blocks, bytes). ``chain_blocks`` is the length of the
    prompt that brought it, 0 if unknown.
    """

    key: Key
    parent: Key | None = None
    position: int = 0
    size: int = 1
    chain_blocks: int = 0


class EvictionPolicy(Protocol):
    """One owner; not thread-safe. ``now`` is in seconds of any one clock and never decreases.

    Report reads tail first if possible: the ends of chains are worth less than their beginnings.
    """

    def insert(self, block: Block, now: float) -> None:
        """The block became readable. If it is already there, that is a hit."""

    def hit(self, key: Key, now: float) -> None:
        """The block was read. No effect if it is not there."""

    def remove(self, key: Key, now: float) -> None:
        """The block left, other than by eviction. No effect if it is not there."""

    def victim(self, now: float) -> Key | None:
        """Choose the block to evict and forget it: never one that is pinned or that another one here builds on. None
        when there is no other."""

    def pin(self, key: Key) -> None:
        """The block must not be evicted until ``unpin`` has been called as often (it is being read, or built upon)."""

    def unpin(self, key: Key) -> None: ...

    def __len__(self) -> int:
        """Number of blocks present."""

    def __contains__(self, key: Key) -> bool: ...


class LeafFirst(ABC):
    """Turns any eviction order into one that takes leaves before their parents, at O(1) extra per block.

    A subclass supplies only the order. A block whose turn comes while another builds on it, or while it is pinned, is
    *condemned*: it is evicted as soon as possible, unless it is read first.
    """

    def __init__(self) -> None:
        self._blocks: dict[Key, Block] = {}
        self._children: dict[Key, int] = {}  # by key, which may itself be gone: blocks here that build on it
        self._pins: dict[Key, int] = {}
        self._condemned: set[Key] = set()  # not in the subclass's order
        self._ready: list[Key] = []  # condemned ones that may go now; entries may be stale

    # Supplied by the subclass

    @abstractmethod
    def _enter(self, block: Block, now: float) -> None:
        """Add a new block to the order."""

    @abstractmethod
    def _touch(self, block: Block, now: float) -> None:
        """A block of the order was read."""

    @abstractmethod
    def _next(self, now: float) -> Key | None:
        """Remove and return the block that the order would evict first. None when the order is empty."""

    @abstractmethod
    def _leave(self, block: Block) -> None:
        """Remove this block from the order."""

    @abstractmethod
    def _rescue(self, block: Block, now: float) -> None:
        """A condemned block was read: put it back into the order."""

    def _evicted(self, block: Block, now: float) -> None:  # noqa: B027 - most remember nothing
        """A block is evicted. For policies that remember evicted blocks."""

    # Called by the pool

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def insert(self, block: Block, now: float) -> None:
        if block.key in self._blocks:
            self.hit(block.key, now)
            return
        self._blocks[block.key] = block
        parent = block.parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._enter(block, now)

    def hit(self, key: Key, now: float) -> None:
        block = self._blocks.get(key)
        if block is None:
            return
        if key in self._condemned:
            self._condemned.discard(key)
            self._rescue(block, now)
        else:
            self._touch(block, now)

    def remove(self, key: Key, now: float) -> None:
        block = self._blocks.get(key)
        if block is None:
            return
        if key in self._condemned:
            self._condemned.discard(key)
        else:
            self._leave(block)
        self._forget(block)

    def victim(self, now: float) -> Key | None:
        key = self._condemned_victim()
        while key is None:
            key = self._next(now)
            if key is None:
                return None
            if key in self._children or key in self._pins:
                self._condemned.add(key)
                key = None
        block = self._blocks[key]
        self._evicted(block, now)
        self._forget(block)
        return key

    def pin(self, key: Key) -> None:
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: Key) -> None:
        left = self._pins.get(key, 0) - 1
        if left > 0:
            self._pins[key] = left
        elif self._pins.pop(key, None) is not None:
            self._release(key)

    def _condemned_victim(self) -> Key | None:
        while self._ready:
            key = self._ready.pop()
            if key in self._condemned and key not in self._children and key not in self._pins:
                self._condemned.discard(key)
                return key
        return None

    def _forget(self, block: Block) -> None:
        del self._blocks[block.key]
        parent = block.parent
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
        else:
            del self._children[parent]
            self._release(parent)

    def _release(self, key: Key) -> None:
        """Something no longer keeps ``key``; if it was condemned it may now be evictable."""
        if key in self._condemned:
            self._ready.append(key)
