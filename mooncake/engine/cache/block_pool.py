"""The blocks of a paged cache: reference counts, prefix hits by chained keys, and eviction.

Pure bookkeeping over block numbers. It knows nothing of torch, bytes, sequences or time.

A block is in exactly one of three places:

    free      contains nothing
    in use    one or more block tables refer to it; it may already have a key
    cached    nobody refers to it, but its key is known: a later request can take it, or it is evicted

Cached blocks form one queue, least recently used first, with every cached block before its cached parent. So the head
of the queue is always a leaf: a prefix is never evicted before what builds on it. Pages of layers with a sliding window
and last blocks that are not full are sealed on their own: nothing builds on them, and no events are published for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile

from mooncake.errors import InternalError, OutOfBlocks
from mooncake.types import BlockEvent, BlockKey

_ALONE = b"alone"  # stands for a parent's key


class BlockPool:
    """``num_blocks`` blocks of ``block_tokens`` tokens. One owner: only ``match`` may be called from other threads."""

    def __init__(self, num_blocks: int, block_tokens: int, *, keep_events: bool = True) -> None:
        """``keep_events``: whether someone calls ``take_events``; otherwise events would accumulate."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._keep_events = keep_events
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last one freed is still in the caches
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_in_use = 0
        self._references = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._parents = [b""] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._events: list[BlockEvent] = []
        self.on_forgotten: Callable[[BlockKey], object] | None = None  # called with each key that is not here any more

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_in_use(self) -> int:
        return self._num_in_use

    @property
    def num_available(self) -> int:
        """How many blocks ``allocate`` can give."""
        return len(self._free) + len(self._cached)

    def match(self, keys: Sequence[BlockKey]) -> int:
        """Length of the leading run of ``keys`` that is here. From another thread it is only a hint."""
        return sum(takewhile(bool, map(self._by_key.__contains__, keys)))

    def has(self, key: BlockKey) -> bool:
        return key in self._by_key

    def find(self, key: BlockKey) -> int:
        """The block with this key, which is here."""
        return self._by_key[key]

    def touch(self, key: BlockKey) -> None:
        """The block, which is here, was used; whoever did holds what it builds on."""
        block_id = self._by_key[key]
        if block_id in self._cached:
            self._cached.move_to_end(block_id)

    def is_private(self, block_id: int) -> bool:
        """Whether one table alone refers to the block, and nobody can find it."""
        return self._references[block_id] == 1 and self._keys[block_id] is None

    def parents(self) -> Iterator[bytes]:
        """For each block that can be found here, the key of its parent."""
        return (self._parents[block_id] for block_id in self._by_key.values())

    def num_idle(self, keys: Sequence[BlockKey]) -> int:
        """How many of these blocks, all of which are here, are in no block table."""
        return sum(self._references[self._by_key[key]] == 0 for key in keys)

    def take_prefix(self, keys: Sequence[BlockKey], count: int) -> list[int]:
        """One more reference to each of the first ``count`` blocks, which ``match`` has just found."""
        try:
            block_ids = [self._by_key[key] for key in keys[:count]]
        except KeyError:
            raise InternalError("a prefix was taken that is not in the pool") from None
        references, cached = self._references, self._cached
        for block_id in block_ids:
            if references[block_id] == 0:
                del cached[block_id]
                self._num_in_use += 1
            references[block_id] += 1
        return block_ids

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks without a key, evicting cached ones as needed. Raises OutOfBlocks, changing nothing."""
        if count > self.num_available:
            raise OutOfBlocks(
                f"{count} blocks are needed, {self.num_available} of {self.num_blocks} are free or can be evicted"
            )
        free, references = self._free, self._references
        self._evict(count - len(free))
        kept = len(free) - count
        block_ids = free[kept:]
        del free[kept:]
        block_ids.reverse()  # from the top of the stack
        for block_id in block_ids:
            references[block_id] = 1
        self._num_in_use += count
        return block_ids

    def seal(self, table: Sequence[int], keys: Sequence[BlockKey], first: int, end: int) -> None:
        """A table's blocks ``first`` ≤ i < ``end`` are full and will not change: others may share them as ``keys``.

        If another block already has a key, that one keeps it and this one stays anonymous.
        """
        references, sealed, parents, known = self._references, self._keys, self._parents, self._by_key
        parent = keys[first - 1] if first else b""
        for block_id, key in zip(table[first:end], keys[first:end], strict=True):
            if references[block_id] == 0:
                raise InternalError(f"block {block_id} was sealed while nobody held it")
            if key not in known:
                if sealed[block_id] is not None:
                    raise InternalError(f"block {block_id} was sealed twice, with different keys")
                sealed[block_id] = key
                parents[block_id] = parent
                known[key] = block_id
                if self._keep_events:
                    self._events.append(BlockEvent(True, key, parent))
            parent = key

    def seal_alone(self, block_ids: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Like ``seal``, for pages that others need not know of: of windows, and last blocks that are not full."""
        for block_id, key in zip(block_ids, keys, strict=True):
            if self._references[block_id] == 0 or self._keys[block_id] not in (None, key):
                raise InternalError(f"page {block_id} was sealed while nobody held it, or with another key")
            if key not in self._by_key:
                self._keys[block_id] = key
                self._parents[block_id] = _ALONE
                self._by_key[key] = block_id

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a table, given in the table's order.

        The last block enters the queue first, so that tails are evicted before what they build on.
        """
        self._check_in_use(block_ids)
        references, keys, parents, cached, known = (
            self._references,
            self._keys,
            self._parents,
            self._cached,
            self._by_key,
        )
        for block_id in reversed(block_ids):
            references[block_id] -= 1
            if references[block_id]:
                continue
            self._num_in_use -= 1
            if keys[block_id] is None:
                self._free.append(block_id)
                continue
            # To the end of the queue, with its cached ancestors after it. Ancestors are cached at this point only if
            # the table held copies of them, so the walk is no longer than the table.
            cached[block_id] = None
            ancestor = known.get(parents[block_id])
            while ancestor is not None and ancestor in cached:
                cached.move_to_end(ancestor)
                ancestor = known.get(parents[ancestor])

    def retain(self, block_ids: Sequence[int]) -> None:
        """One more reference to each block, to be dropped by ``release``. Writers ask ``needs_copy`` first."""
        self._check_in_use(block_ids)
        for block_id in block_ids:
            self._references[block_id] += 1

    def needs_copy(self, block_id: int) -> bool:
        """Whether a write into the block would be visible to others."""
        return self._references[block_id] > 1 or self._keys[block_id] is not None

    def discard(self, key: BlockKey) -> bool:
        """The block's bytes were found corrupt: it must not be found again. Returns whether it was here."""
        block_id = self._by_key.get(key)
        if block_id is None:
            return False
        self._forget_key(block_id)
        if self._references[block_id] == 0:
            del self._cached[block_id]
            self._free.append(block_id)
        return True

    def drop_cached(self) -> None:
        """Forget every block that is in no block table."""
        self._evict(len(self._cached))

    def take_events(self) -> list[BlockEvent]:
        """What became readable or was evicted since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Recount everything. Raises InternalError on an inconsistency; for tests and idle moments."""
        in_use = {block_id for block_id, count in enumerate(self._references) if count > 0}
        places = (set(self._free), set(self._cached), in_use)
        if sum(map(len, places)) != self.num_blocks or len(set().union(*places)) != self.num_blocks:
            raise InternalError("a block is in two places, or in none")
        if (len(self._free), len(in_use)) != (len(places[0]), self._num_in_use):
            raise InternalError("counts do not match the blocks")
        if min(self._references, default=0) < 0:
            raise InternalError("a block has fewer than no references")
        keyed = {key: block_id for block_id, key in enumerate(self._keys) if key is not None}
        if keyed != self._by_key or any(self._keys[block_id] is None for block_id in self._cached):
            raise InternalError("keys do not match the blocks")
        if any(self._keys[block_id] is not None for block_id in self._free):
            raise InternalError("a free block has a key")
        order = {block_id: place for place, block_id in enumerate(self._cached)}
        for block_id, place in order.items():
            parent = self._by_key.get(self._parents[block_id])
            if parent in order and order[parent] < place:
                raise InternalError("a prefix would be evicted before what builds on it")

    def _evict(self, count: int) -> None:
        """Evict this many from the head of the queue."""
        for _ in range(count):
            block_id, _ = self._cached.popitem(last=False)
            self._forget_key(block_id)
            self._free.append(block_id)

    def _forget_key(self, block_id: int) -> None:
        key = self._keys[block_id]
        assert key is not None
        del self._by_key[key]
        if self._keep_events and self._parents[block_id] is not _ALONE:
            self._events.append(BlockEvent(False, key, self._parents[block_id]))
        self._keys[block_id] = None
        self._parents[block_id] = b""
        if self.on_forgotten is not None:
            self.on_forgotten(key)

    def _check_in_use(self, block_ids: Iterable[int]) -> None:
        references = self._references
        for block_id in block_ids:
            if references[block_id] <= 0:
                raise InternalError(f"block {block_id} was released or retained by someone who does not hold it")
