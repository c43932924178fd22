"""The client of one store: puts and gets blocks of bytes by key, without superfluous copies, and verifies them.

It is part of the pool's client (``pool``), and nodes use it to read and write KV. This module handles whole blocks;
``ranges`` handles parts of blocks, and the reservations and leases that both need. ``calls`` sends the calls;
``shortcuts`` avoid some. What a store does not have is None or a shorter list, not an error; all errors are those of
``mooncake.errors``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import cast

from typing_extensions import Buffer

from kvstore.block_names import checked_key
from kvstore.checksum import Checksums, first_mismatch
from kvstore.client.calls import DEFAULT_TIMEOUT_S, StoreCalls, check_whole, left_s
from kvstore.client.far import PROMPT_BYTES
from kvstore.client.ranges import StoreRanges
from kvstore.client.shortcuts import Shortcuts
from kvstore.client.types import StoreStats, in_batches, renumbered, room_in, stats_from_wire
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.requests import ReadRange, WriteRange
from mooncake.errors import DeadlineExceeded, InvalidRequest, OutOfBlocks, StaleEpoch
from mooncake.rpc import store_pb2 as pb
from mooncake.rpc.server import Channels


class StoreClient:
    """Talks to one store. Belongs to one event loop. Parts of blocks are read and written through ``ranges``; some
    whole ones can be put and read through ``shortcuts`` alone.

    Every call takes ``timeout_s`` and ends within it. Besides the errors listed at each method, all may raise
    NodeUnavailable (the store is gone), DeadlineExceeded, and InvalidRequest.
    """

    def __init__(
        self,
        address: str,
        transfer: TransferEngine,
        channels: Channels,
        tenant: str = "",
        copies_inline: bool = False,
        is_keyed: bool = False,
    ) -> None:
        """``address`` is the store's gRPC address. The engine and the channels are shared and closed by their owner.
        Stored blocks count against the quota of ``tenant``. With ``copies_inline``, blocks of a store on this host are
        read in place, and short copies run on the event loop; not for an engine that must not use shared memory. With
        ``is_keyed``, whole blocks of remote stores are read and put over TCP in one message. Neither is for a
        rate-limited engine."""
        self.address = address
        self._calls = StoreCalls(address, channels, transfer.writer_id)
        self.shortcuts = Shortcuts(transfer, self._calls, tenant, copies_inline, is_keyed)
        self.ranges = StoreRanges(transfer, self._calls, self.shortcuts, tenant, copies_inline)

    async def close(self) -> None:
        """Ends background work."""
        self.shortcuts.return_slots()
        await self._calls.close()
        self.shortcuts.close()

    async def __aenter__(self) -> StoreClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # Whole blocks

    async def put_blocks(
        self,
        names: Sequence[tuple[bytes, bytes]],
        blocks: Sequence[Buffer],
        checksums: Sequence[Checksums],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """``put_all`` of any buffers. Returns how many of them were newly stored."""
        if not (len(names) == len(blocks) == len(checksums)):
            raise InvalidRequest("put_blocks needs a name, bytes and checksums for each block")
        if not names:
            return 0
        views = [memoryview(block).cast("B") for block in blocks]
        deadline = time.monotonic() + timeout_s
        if len({view.nbytes for view in views}) != 1 or len({len(sums) for sums in checksums}) != 1:
            raise InvalidRequest("put_blocks needs blocks of one length and one number of ranges")
        _, sealed = await self._put(names, views, checksums, deadline)
        return sum(sealed.values())

    async def put_all(
        self,
        names: Sequence[tuple[bytes, bytes]],
        views: Sequence[memoryview],
        checksums: Sequence[Checksums],
        *,
        durable: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[bool]:
        """Store several blocks of one length, given (key, parent) and the checksums of each block's equal ranges: a
        store evicts a block before its parent. Returns for each whether it is stored afterwards: not when another
        writer is writing it, or the store did not accept the bytes.

        With ``durable`` it returns once the blocks would survive a crash of the store, and raises OutOfBlocks when one
        was stored but could not be written to the SSD (there is none, it is full, it fails). Raises OutOfBlocks when
        there was room for none.
        """
        stored, sealed = await self._put(names, views, checksums, time.monotonic() + timeout_s, durable)
        return [sealed.get(index, is_stored) for index, is_stored in enumerate(stored)]

    async def get_one(self, key: bytes, into: memoryview, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int | None:
        """``get_all`` for one block, in fewer steps when it is short. Raises InvalidRequest when it is longer."""

        def room(_: int, length: int) -> memoryview:
            return room_in(into, length)

        checked_key(key)
        deadline, far = time.monotonic() + timeout_s, self.shortcuts.far
        if far is not None and 0 < into.nbytes <= PROMPT_BYTES:
            length = await far.get(key, into, deadline)
            if length is None:
                [length] = await self._get_leased([key], room, deadline)
            return length
        length = self.shortcuts.get_here(key, into)
        if length is None:
            [length] = await self.get_all([key], room, timeout_s=timeout_s)
        return length

    async def get_all(
        self,
        keys: Sequence[bytes],
        room: Callable[[int, int], memoryview],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[int | None]:
        """Read the stored blocks of ``keys`` into the memory that ``room(index, length)`` returns for each.

        Returns the lengths; None for blocks that are not stored, and for corrupt ones, which have then been dropped.
        """
        deadline = time.monotonic() + timeout_s
        for key in keys:
            checked_key(key)
        lengths = await self.shortcuts.read(keys, room, deadline)
        for missing in in_batches([index for index, length in enumerate(lengths) if length is None]):
            await self._get_missing(keys, missing, room, lengths, deadline)
        return lengths

    async def _get_missing(
        self,
        keys: Sequence[bytes],
        missing: Sequence[int],
        room: Callable[[int, int], memoryview],
        lengths: list[int | None],
        deadline: float,
    ) -> None:
        """Read one batch under leases. A store with an SSD may have more of it than memory for it: as long as some of
        it comes, the rest is asked for again."""
        has_begun = False
        while missing:
            try:
                asked = await self._get_leased([keys[at] for at in missing], renumbered(room, missing), deadline)
            except DeadlineExceeded:
                if has_begun:
                    return
                raise
            for index, length in zip(missing, asked, strict=True):
                lengths[index] = length
            has_begun = any(asked)
            missing = (
                [index for index in missing if lengths[index] is None] if has_begun and self.shortcuts.has_ssd else []
            )

    async def _get_leased(
        self, keys: Sequence[bytes], room: Callable[[int, int], memoryview], deadline: float
    ) -> list[int | None]:
        """The lengths of blocks that arrived intact. None for the rest; corrupt ones have been dropped."""
        lease = await self.ranges.acquire(keys, scattered=len(keys) > 1, timeout_s=left_s(deadline))
        lengths: list[int | None] = [None] * len(keys)
        corrupt: list[bytes] = []
        try:
            found = [(index, block) for index, block in enumerate(lease.blocks) if block.length]
            views = [room(index, block.length) for index, block in found]
            ranges = [ReadRange(block.slot, 0, view) for (_, block), view in zip(found, views, strict=True)]
            if ranges:
                await self.ranges.read_ranges(lease, ranges, timeout_s=left_s(deadline))
            for (index, block), view in zip(found, views, strict=True):
                if first_mismatch(view, block.checksums) is None:
                    lengths[index] = block.length
                else:
                    corrupt.append(keys[index])
        finally:
            await self.ranges.finish(lease, corrupt)
        return lengths

    # Queries

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """Whether each key is stored now. Protects nothing: it may be gone by the time the answer arrives."""
        deadline = time.monotonic() + timeout_s
        for key in keys:
            checked_key(key)
        known = await self.shortcuts.exists(keys, deadline)
        for missing in in_batches([index for index, is_here in enumerate(known) if is_here is None]):
            request = pb.ExistsRequest(keys=[keys[index] for index in missing])
            response = await self._calls.call(self._calls.fast.Exists(request, timeout=left_s(deadline)))
            check_whole(response.stored, missing)
            for index, is_stored in zip(missing, response.stored, strict=True):
                known[index] = is_stored
        return cast(list[bool], known)

    async def remove(self, keys: Sequence[bytes], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Make blocks unreadable. Those being read keep their slots until then. Returns how many there were."""
        deadline, removed = time.monotonic() + timeout_s, 0
        for part in in_batches(keys):
            request = pb.RemoveRequest(keys=part)
            removed += (await self._calls.call(self._calls.stub.Remove(request, timeout=left_s(deadline)))).removed
        return removed

    async def pin(
        self, keys: Sequence[bytes], *, hard: bool = False, ttl_s: float = 600.0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> int:
        """Keep blocks in the store's DRAM for ``ttl_s``: never evicted when ``hard``, otherwise last of all. Blocks
        that are only on the SSD are loaded. Returns how many are pinned. Raises OutOfBlocks when hard pins would
        hold more than half of the store; what was pinned in batches before stays pinned."""
        return await self._pin(keys, pb.PinRequest.HARD if hard else pb.PinRequest.SOFT, ttl_s, timeout_s)

    async def unpin(self, keys: Sequence[bytes], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Returns how many were pinned."""
        return await self._pin(keys, pb.PinRequest.NONE, 0.0, timeout_s)

    async def _pin(
        self, keys: Sequence[bytes], level: pb.PinRequest.Level.ValueType, ttl_s: float, timeout_s: float
    ) -> int:
        deadline, pinned = time.monotonic() + timeout_s, 0
        for part in in_batches(keys):
            request = pb.PinRequest(keys=part, level=level, ttl_s=ttl_s)
            pinned += (await self._calls.call(self._calls.stub.Pin(request, timeout=left_s(deadline)))).pinned
        return pinned

    async def stats(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreStats:
        return stats_from_wire(await self.shortcuts.look_up(timeout_s))

    async def knock(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Look up the shortcuts. Raises InvalidRequest when the store's data plane refuses us."""
        deadline = time.monotonic() + timeout_s
        await self.shortcuts.look_up(timeout_s)
        await self.shortcuts.knock(deadline)

    async def _put(
        self,
        names: Sequence[tuple[bytes, bytes]],
        views: Sequence[memoryview],
        checksums: Sequence[Checksums],
        deadline: float,
        durable: bool = False,
    ) -> tuple[list[bool], dict[int, bool]]:
        """Returns whether each was stored before, and, by index, whether each reserved one was sealed. Raises
        OutOfBlocks when there was room for none."""
        stored: list[bool] = []
        sealed: dict[int, bool] = {}
        full: OutOfBlocks | None = None
        for at in in_batches(range(len(names))):
            part = slice(at[0], at[-1] + 1)
            try:
                here, new = await self._put_part(names[part], views[part], checksums[part], deadline, durable)
            except OutOfBlocks as error:
                full, here, new = error, [False] * len(at), {}
            stored += here
            sealed.update((at[index], is_sealed) for index, is_sealed in new.items())
        if full is not None and not any(stored) and not any(sealed.values()):
            raise full
        return stored, sealed

    async def _put_part(
        self,
        names: Sequence[tuple[bytes, bytes]],
        views: Sequence[memoryview],
        checksums: Sequence[Checksums],
        deadline: float,
        durable: bool,
        is_second_try: bool = False,
    ) -> tuple[list[bool], dict[int, bool]]:
        """``_put`` for one batch. On any error the reservations are aborted. They are made anew, once, if the store has
        taken them back: it does when our last data connection ends, which may be that of another call, cut short before
        this one has opened its own."""
        slots, stored = await self.ranges.reserve_batch(names, views[0].nbytes, len(checksums[0]), deadline)
        mine = {index: slot for index, slot in enumerate(slots) if slot is not None}
        if not mine:
            return stored, {}
        ranges = [WriteRange(slot.index, 0, views[index], slot.epoch) for index, slot in mine.items()]
        try:
            segment = next(iter(mine.values())).segment
            await self.ranges.write_ranges(segment, ranges, timeout_s=left_s(deadline))
            seal_s = left_s(deadline)
        except BaseException as error:
            self.ranges.abort_later(slots)  # nothing is being written any more
            if isinstance(error, StaleEpoch) and not is_second_try:
                return await self._put_part(names, views, checksums, deadline, durable, is_second_try=True)
            raise
        sealings = [(slot, checksums[index]) for index, slot in mine.items()]
        sealed = await self.ranges.seal(sealings, durable=durable, timeout_s=seal_s)
        return stored, dict(zip(mine, sealed, strict=True))
