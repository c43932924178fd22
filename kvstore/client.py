"""The client of a store: blocks of bytes by key, put and got without a copy too many, verified on the way.

    async with await StoreClient.connect("127.0.0.1:50060") as store:
        await store.put(key, data)
        assert await store.get(key) == data

Control goes over gRPC; bytes go by one-sided transfers between the caller's memory and the store's segment. What a
store does not have is None or a shorter list, not an error; everything that is an error is one of ``mooncake.errors``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import grpc
from typing_extensions import Buffer

from kvstore.board import BoardReader, Outcome
from kvstore.checksum import (
    Checksums,
    checksums_from_wire,
    checksums_of,
    checksums_to_wire,
    first_mismatch,
    verify,
)
from kvstore.lane import Lane
from kvstore.transfer.engine import ReadRange, TransferEngine, TransferReport, WriteRange
from mooncake.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    InvalidRequest,
    LeaseExpired,
    MooncakeError,
    NodeUnavailable,
    OutOfBlocks,
)
from mooncake.rpc import store_pb2 as pb
from mooncake.rpc import store_pb2_grpc
from mooncake.rpc.convert import segment_from_wire
from mooncake.rpc.errors import error_from_rpc
from mooncake.rpc.server import Channels, split_address
from mooncake.types import BlockKey, SegmentAddress

DEFAULT_TIMEOUT_S = 5.0
MAX_OWED = 4096
END_LEASES_AFTER_S = 0.02
INLINE_BYTES = 2 << 20  # a copy of so much within this host takes less time than a trip to another thread
RETURN_AHEAD_AFTER_S = 1.0  # a slot had in advance goes back when nothing has been put for so long
ASK_AHEAD_AGAIN_S = 1.0
WAIT_SHARE = 0.8  # of a call's time that may go by waiting for room, so that what follows has some too

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot to write one block into. ``epoch`` goes with every write and fences late ones."""

    segment: SegmentAddress
    index: int
    epoch: int


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that may be read: its slot, its length in bytes, and a checksum for each equal range of it."""

    slot: int
    length: int
    checksums: Checksums


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read ``blocks`` until ``expires_s`` (monotonic clock of this process, on the safe side)."""

    segment: SegmentAddress
    lease_id: int
    expires_s: float
    blocks: tuple[StoredBlock, ...]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's accounts: ``free + reserved + sealed + quarantined == total``, always."""

    total: int
    free: int
    reserved: int
    sealed: int
    quarantined: int
    leases: int
    counters: Mapping[str, int]
    ssd_blocks: int = 0
    ssd_bytes: int = 0
    ssd_capacity_bytes: int = 0
    pins: int = 0
    tenant_bytes: Mapping[str, int] = field(default_factory=dict)  # in DRAM


class StoreClient:
    """Talks to one store. Belongs to one event loop.

    Every call takes ``timeout_s`` and ends within it. Beside the errors named at each method, all may raise
    NodeUnavailable (the store is gone), DeadlineExceeded, and InvalidRequest.
    """

    def __init__(
        self,
        address: str,
        transfer: TransferEngine,
        channels: Channels,
        tenant: str = "",
        copies_inline: bool = False,
    ) -> None:
        """``address`` is the store's gRPC address. The engine and the channels are shared, and closed by their owner;
        ``connect`` makes a client that has its own. What it stores counts against the quota of ``tenant``. With
        ``copies_inline``, blocks of a store of this host are read where they lie, and short copies are made on the
        event loop; not for an engine that is paced, or that is to leave shared memory alone."""
        self.address = address
        self.tenant = tenant
        self._copies_inline = copies_inline
        self.writer_id = transfer.writer_id  # reservations are held by whoever's data connections are gone with them
        self._transfer = transfer
        self._stub: store_pb2_grpc.StoreAsyncStub = store_pb2_grpc.StoreStub(channels.get(address))
        self._owned: contextlib.AsyncExitStack = contextlib.AsyncExitStack()
        self._lane: Lane | None = None
        self._board: BoardReader | None = None
        self._has_ssd = True
        self._ahead: pb.Slot | None = None  # to be written next
        self._ahead_timer: asyncio.TimerHandle | None = None
        self._ask_ahead_after_s = 0.0
        self._ended: list[int] = []  # leases
        self._ending: asyncio.TimerHandle | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._owed: list[Reservation] = []  # ended on our side, while the store may not know it

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        name: str = "client",
        transports: tuple[str, ...] = ("shm", "tcp"),
        streams: int = 2,
        max_mb_per_s: float = 0.0,
        tenant: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> StoreClient:
        """A client with its own transfer engine, once the store answers. Raises NodeUnavailable when it does not."""
        transfer = TransferEngine(name, transports, streams, max_mb_per_s)
        channels = Channels()
        client = cls(address, transfer, channels, tenant, copies_inline=max_mb_per_s == 0 and "shm" in transports)
        client._owned.push_async_callback(channels.close)
        client._owned.callback(transfer.close)
        try:
            await client.stats(timeout_s=timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """Ends what runs in the background, and what ``connect`` opened."""
        self._end_leases()
        self._return_ahead()
        if self._background:
            await asyncio.wait(self._background, timeout=DEFAULT_TIMEOUT_S)
        if self._lane is not None:
            self._lane.close()
        self._close_board()
        await self._owned.aclose()

    async def __aenter__(self) -> StoreClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # Whole blocks

    async def put(
        self,
        key: bytes,
        data: Buffer,
        parent: bytes = b"",
        *,
        durable: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> bool:
        """Store ``data`` (contiguous, at most a slot long). True when it is stored afterwards, also when it was
        before; False when another writer is at it or the store did not accept the bytes.

        ``parent`` is the key of the block it builds on: a store evicts it before its parent. With ``durable`` it
        returns once the block would survive a crash of the store, and raises OutOfBlocks when it was stored but the
        store's SSD did not take it (there is none, it is full, it fails). Raises OutOfBlocks when there is no room.
        """
        view = memoryview(data).cast("B")
        deadline = time.monotonic() + timeout_s
        [slot], [stored] = await self._reserve([(key, parent)], view.nbytes, 1, deadline)
        if slot is None:
            return stored
        sums = checksums_of([view])
        return await self._write_and_seal([slot], [view], [sums], deadline, durable) == 1

    async def put_blocks(
        self,
        names: Sequence[tuple[bytes, bytes]],
        blocks: Sequence[Buffer],
        checksums: Sequence[Checksums],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """Store several blocks of one length, given (key, parent) and the checksums of each one's equal ranges.

        Returns how many of them were newly stored. Raises OutOfBlocks when there was room for none.
        """
        if not (len(names) == len(blocks) == len(checksums)):
            raise InvalidRequest("put_blocks needs a name, bytes and checksums for each block")
        if not names:
            return 0
        views = [memoryview(block).cast("B") for block in blocks]
        deadline = time.monotonic() + timeout_s
        if len({view.nbytes for view in views}) != 1 or len({len(sums) for sums in checksums}) != 1:
            raise InvalidRequest("put_blocks needs blocks of one length and one number of ranges")
        slots, _ = await self._reserve(names, views[0].nbytes, len(checksums[0]), deadline)
        mine = [index for index, slot in enumerate(slots) if slot is not None]
        return await self._write_and_seal(
            [slot for slot in slots if slot is not None],
            [views[index] for index in mine],
            [checksums[index] for index in mine],
            deadline,
        )

    async def get(self, key: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes | None:
        """The bytes stored under ``key``, or None. Raises KVLoadFailed: LeaseExpired, or ChecksumMismatch (the block
        has then been dropped from the store)."""
        deadline = time.monotonic() + timeout_s
        lease = await self.acquire([key], timeout_s=timeout_s)
        if not lease.blocks:
            return None
        data = bytearray(lease.blocks[0].length)
        await self._get(key, lease, memoryview(data), deadline)
        return bytes(data)

    async def get_into(self, key: bytes, into: Buffer, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int | None:
        """Like ``get``, straight into the caller's memory (contiguous, writable). Returns the length, or None.

        Raises InvalidRequest when the block is longer than ``into``. After any error ``into`` holds rubbish.
        """
        deadline = time.monotonic() + timeout_s
        lease = await self.acquire([key], timeout_s=timeout_s)
        if not lease.blocks:
            return None
        length, view = lease.blocks[0].length, memoryview(into).cast("B")
        if view.nbytes < length:
            self._release_later(lease)
            raise InvalidRequest(f"the block has {length} bytes, and there is room for {view.nbytes}", "into")
        await self._get(key, lease, view[:length], deadline)
        return length

    # Batches, for ``kvstore.pool``

    async def put_all(
        self,
        names: Sequence[tuple[bytes, bytes]],
        views: Sequence[memoryview],
        checksums: Sequence[Checksums],
        *,
        durable: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[bool]:
        """``put`` for several blocks of one length. Says for each whether it is stored afterwards."""
        deadline = time.monotonic() + timeout_s
        slots, stored = await self._reserve(names, views[0].nbytes, len(checksums[0]), deadline)
        mine = [index for index, slot in enumerate(slots) if slot is not None]
        held = [slot for slot in slots if slot is not None]
        if held:
            mine_views, mine_sums = [views[index] for index in mine], [checksums[index] for index in mine]
            sealed = await self._write_then_seal(held, mine_views, mine_sums, deadline, durable)
            for index, is_sealed in zip(mine, sealed, strict=True):
                stored[index] = is_sealed
        return stored

    async def put_in_place(
        self, name: tuple[bytes, bytes], view: memoryview, ranges: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bool | None:
        """``put`` into a slot of this host that was had in advance: one pass over the bytes, then one message. None
        when there is none, or it has run out: then it has to be reserved first."""
        board, deadline = self._board, time.monotonic() + timeout_s
        if board is None or not board.takes(view.nbytes, ranges):
            return None
        slot = self._take_ahead() or await self._ask_ahead(board.lane, timeout_s)
        if slot is None:
            return None
        reservation = Reservation(_NOWHERE, slot.index, slot.epoch)
        try:
            copy = functools.partial(board.write, slot.index, view, ranges)
            sums = copy() if view.nbytes <= INLINE_BYTES else await _in_thread(copy)
            left_s = _left_s(deadline)
        except BaseException:
            self._later(self.abort([reservation]))
            raise
        key, parent = name
        request = pb.CommitRequest(
            lane=board.lane,
            slot=slot,
            block=pb.BlockName(key=key, parent=parent),
            length=view.nbytes,
            checksums=checksums_to_wire(sums),
            tenant=self.tenant,
        )
        with self._owing([reservation]):
            response = await self._call(self._fast.Commit(request, timeout=left_s))
        self._keep_ahead(response)
        return None if response.outcome == pb.CommitResponse.OVER else response.outcome == pb.CommitResponse.STORED

    async def get_all(
        self,
        keys: Sequence[bytes],
        room: Callable[[int, int], memoryview],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[int | None]:
        """Read what is stored of ``keys`` into the memory that ``room(index, length)`` gives for each.

        Returns the lengths; None for what is not stored, and for what came back wrong, which has then been dropped.
        """
        deadline = time.monotonic() + timeout_s
        lengths = await self._read_listed(keys, room)
        missing = [index for index, length in enumerate(lengths) if length is None]
        if missing:
            wanted = [keys[index] for index in missing]
            asked = await self._get_leased(wanted, lambda index, length: room(missing[index], length), deadline)
            for index, length in zip(missing, asked, strict=True):
                lengths[index] = length
        return lengths

    async def _read_listed(self, keys: Sequence[bytes], room: Callable[[int, int], memoryview]) -> list[int | None]:
        """What the board lists, without a word to the store. None for the rest, also for what changed meanwhile."""
        lengths: list[int | None] = [None] * len(keys)
        for index, key in enumerate(keys):
            board = self._board
            length = board.length(key) if board is not None else None
            if board is None or not length:
                continue
            into = room(index, length)
            is_short = length <= INLINE_BYTES
            outcome = board.read(key, into) if is_short else await _in_thread(functools.partial(board.read, key, into))
            if outcome is Outcome.READ:
                lengths[index] = length
            elif outcome is Outcome.GONE:
                self._close_board()
            elif outcome is Outcome.CORRUPT:
                await self._report_corrupt([key])
        return lengths

    async def _get_leased(
        self, keys: Sequence[bytes], room: Callable[[int, int], memoryview], deadline: float
    ) -> list[int | None]:
        lease = await self.acquire(keys, scattered=len(keys) > 1, timeout_s=_left_s(deadline))
        lengths: list[int | None] = [None] * len(keys)
        corrupt: list[bytes] = []
        try:
            found = [(index, block) for index, block in enumerate(lease.blocks) if block.length]
            views = [room(index, block.length) for index, block in found]
            ranges = [ReadRange(block.slot, 0, view) for (_, block), view in zip(found, views, strict=True)]
            if ranges:
                await self.read_ranges(lease, ranges, timeout_s=_left_s(deadline))
            for (index, block), view in zip(found, views, strict=True):
                if first_mismatch(view, block.checksums) is None:
                    lengths[index] = block.length
                else:
                    corrupt.append(keys[index])
        finally:
            await self.finish(lease, corrupt)
        return lengths

    async def finish(self, lease: Lease, corrupt_keys: Sequence[bytes] = ()) -> None:
        """End a lease without waiting for it, unless blocks were corrupt: nobody shall find those after this returns.
        When the store does not hear of it, the lease ends by itself."""
        if corrupt_keys:
            await self._report_corrupt(corrupt_keys, [lease])
        elif lease.lease_id:
            self._release_soon(lease)

    # Writing in ranges: reserve, write_ranges as often as needed, then seal or abort

    async def reserve(
        self, names: Sequence[tuple[bytes, bytes]], length: int, ranges: int, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Reservation | None]:
        """A slot for each (key, parent) that is neither stored nor being written; None for the others.

        ``length`` is the bytes of each block, which seal checks as ``ranges`` equal parts. Raises OutOfBlocks.
        """
        slots, _ = await self._reserve(names, length, ranges, time.monotonic() + timeout_s)
        return slots

    async def write_ranges(
        self, segment: SegmentAddress, ranges: Sequence[WriteRange], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> TransferReport:
        """Write into reserved slots. Raises StaleEpoch when a reservation is over."""
        return await self._transfer.write_async(segment, ranges, time.monotonic() + timeout_s)

    async def seal(
        self,
        sealings: Sequence[tuple[Reservation, Checksums]],
        *,
        durable: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[bool]:
        """End reservations: the store verifies the bytes and makes them readable. False where it did not accept them:
        the reservation was over, or the checksums differ. The writer must not write into these slots any more.

        With ``durable`` it returns once they are on the SSD too, and raises OutOfBlocks when one of them is not."""
        blocks = [pb.Sealing(slot=_slot_to_wire(slot), checksums=checksums_to_wire(sums)) for slot, sums in sealings]
        request = pb.SealRequest(blocks=blocks, durable=durable)
        with self._owing([slot for slot, _ in sealings]):
            response = await self._call(self._fast.Seal(request, timeout=timeout_s))
        if durable and any(sealed and not safe for sealed, safe in zip(response.sealed, response.durable, strict=True)):
            raise OutOfBlocks("stored, but not durable: the store's SSD did not take the block")
        return list(response.sealed)

    async def abort(self, reservations: Iterable[Reservation], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Give reservations up. The writer must have stopped writing into them. When this does not get through, it is
        said again before the next ``reserve``."""
        slots = list(reservations)
        with self._owing(slots):
            request = pb.AbortRequest(slots=map(_slot_to_wire, slots))
            await self._call(self._fast.Abort(request, timeout=timeout_s))

    # Reading in ranges: acquire, read_ranges as often as needed, then release

    async def acquire(
        self,
        keys: Sequence[bytes],
        *,
        recompute_ms: float = 0.0,
        scattered: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Lease:
        """Lease the longest stored leading run of ``keys``; perhaps none of them. With ``scattered``, lease what is
        stored of them, run or not: there is then one block a key, of length 0 where there is none.

        What only the SSD has is loaded first, but no further than that takes less time than computing the run anew,
        which costs the caller ``recompute_ms`` a block (0: it cannot be computed)."""
        ended, self._ended = self._ended, []
        request = pb.AcquireRequest(keys=keys, recompute_ms=recompute_ms, scattered=scattered, ended_lease_ids=ended)
        asked_s = time.monotonic()  # the store's clock starts later, so ours ends earlier
        response = await self._call(self._fast.Acquire(request, timeout=timeout_s))
        blocks = tuple(
            StoredBlock(block.slot, block.length, checksums_from_wire(block.checksums)) for block in response.blocks
        )
        return Lease(segment_from_wire(response.segment), response.lease_id, asked_s + response.lease_s, blocks)

    async def read_ranges(
        self, lease: Lease, ranges: Sequence[ReadRange], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> TransferReport:
        """Read from leased slots. Raises LeaseExpired when the lease ran out before the read had ended; the bytes are
        rubbish then. The caller checks them against the lease's checksums."""
        deadline = time.monotonic() + timeout_s
        try:
            report = await self._read(lease.segment, ranges, min(deadline, lease.expires_s))
        except DeadlineExceeded:
            if lease.expires_s < deadline:
                raise LeaseExpired("the lease ran out before the read had ended") from None
            raise
        if time.monotonic() >= lease.expires_s:
            raise LeaseExpired("the lease ran out before the read had ended")
        return report

    async def release(
        self, leases: Iterable[Lease], *, corrupt_keys: Iterable[bytes] = (), timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """End leases; harmless for those that have expired. ``corrupt_keys`` names blocks whose bytes were wrong: the
        store drops them at once."""
        ids = [lease.lease_id for lease in leases if lease.lease_id]
        await self.release_ids(ids, corrupt_keys=corrupt_keys, timeout_s=timeout_s)

    async def release_ids(
        self, lease_ids: Iterable[int], *, corrupt_keys: Iterable[bytes] = (), timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """``release`` by number."""
        request = pb.ReleaseRequest(lease_ids=lease_ids, corrupt_keys=corrupt_keys)
        if request.lease_ids or request.corrupt_keys:
            await self._call(self._fast.Release(request, timeout=timeout_s))

    # Asking

    async def exists(self, keys: Sequence[bytes], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[bool]:
        """Whether each key is stored now. Protects nothing: it may be gone by the time of the answer."""
        here = self._board.exists(keys) if self._board is not None else None
        if here is None:  # no board, or nobody behind it
            self._close_board()
            here = [False] * len(keys)
        elif not self._has_ssd:
            return here
        missing = [index for index, is_here in enumerate(here) if not is_here]
        if missing:
            request = pb.ExistsRequest(keys=[keys[index] for index in missing])
            response = await self._call(self._fast.Exists(request, timeout=timeout_s))
            for index, is_stored in zip(missing, response.stored, strict=True):
                here[index] = is_stored
        return here

    async def remove(self, keys: Sequence[bytes], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Make blocks unreadable. Those being read keep their room until then. Returns how many there were."""
        response = await self._call(self._stub.Remove(pb.RemoveRequest(keys=keys), timeout=timeout_s))
        return response.removed

    async def pin(
        self, keys: Sequence[bytes], *, hard: bool = False, ttl_s: float = 600.0, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> int:
        """Keep blocks in the store's DRAM for ``ttl_s``: not evicted at all when ``hard``, else as long as anything
        else can go. Those that only the SSD has are loaded. Returns how many are pinned. Raises OutOfBlocks when hard
        pins would hold more than half of the store."""
        level = pb.PinRequest.HARD if hard else pb.PinRequest.SOFT
        request = pb.PinRequest(keys=keys, level=level, ttl_s=ttl_s)
        return (await self._call(self._stub.Pin(request, timeout=timeout_s))).pinned

    async def unpin(self, keys: Sequence[bytes], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Returns how many were pinned."""
        request = pb.PinRequest(keys=keys, level=pb.PinRequest.NONE)
        return (await self._call(self._stub.Pin(request, timeout=timeout_s))).pinned

    async def stats(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> StoreStats:
        response = await self._call(self._stub.Stats(pb.StatsRequest(), timeout=timeout_s))
        await self._open_lane(response.lane_port)
        await self._open_board(response)
        return StoreStats(
            total=response.blocks_total,
            free=response.blocks_free,
            reserved=response.blocks_reserved,
            sealed=response.blocks_sealed,
            quarantined=response.blocks_quarantined,
            leases=response.leases,
            counters=dict(response.counters),
            ssd_blocks=response.ssd_blocks,
            ssd_bytes=response.ssd_bytes,
            ssd_capacity_bytes=response.ssd_capacity_bytes,
            pins=response.pins,
            tenant_bytes=dict(response.tenant_bytes),
        )

    async def _read(self, segment: SegmentAddress, ranges: Sequence[ReadRange], deadline: float) -> TransferReport:
        if self._is_quick(segment, sum(memoryview(part.into).nbytes for part in ranges)):
            return self._transfer.read(segment, ranges, deadline)
        return await self._transfer.read_async(segment, ranges, deadline)

    async def _write(self, segment: SegmentAddress, ranges: Sequence[WriteRange], deadline: float) -> TransferReport:
        if self._is_quick(segment, sum(memoryview(part.data).nbytes for part in ranges)):
            return self._transfer.write(segment, ranges, deadline)
        return await self._transfer.write_async(segment, ranges, deadline)

    def _is_quick(self, segment: SegmentAddress, nbytes: int) -> bool:
        """Whether moving these bytes is a short copy, which may as well be made here and now."""
        return self._copies_inline and nbytes <= INLINE_BYTES and self._transfer.transport_of(segment.node_id) == "shm"

    @property
    def _fast(self) -> store_pb2_grpc.StoreAsyncStub | Lane:
        """The short way, while it stands; ``stats`` opens it."""
        return self._lane if self._lane is not None and self._lane.is_open else self._stub

    async def _open_lane(self, port: int) -> None:
        if not port or (self._lane is not None and self._lane.is_open):
            return
        with contextlib.suppress(NodeUnavailable):  # then there is gRPC
            self._lane = await Lane.open(self.address, split_address(self.address)[0], port)

    async def _open_board(self, stats: pb.StatsResponse) -> None:
        """Where the store is on this host and copies need not be paced."""
        self._has_ssd = stats.ssd_capacity_bytes > 0
        if stats.board_path and self._board is None and self._copies_inline:
            self._board = await asyncio.to_thread(BoardReader.open, stats.board_path)

    async def _ask_ahead(self, lane: str, timeout_s: float) -> pb.Slot | None:
        if time.monotonic() < self._ask_ahead_after_s:
            return None
        self._keep_ahead(await self._call(self._fast.Commit(pb.CommitRequest(lane=lane), timeout=timeout_s)))
        return self._take_ahead()

    def _take_ahead(self) -> pb.Slot | None:
        slot, self._ahead = self._ahead, None
        return slot

    def _keep_ahead(self, response: pb.CommitResponse) -> None:
        """For the next put, if that comes soon."""
        if not response.HasField("next"):
            self._ask_ahead_after_s = time.monotonic() + ASK_AHEAD_AGAIN_S
            return
        self._ahead = response.next
        if self._ahead_timer is not None:
            self._ahead_timer.cancel()
        self._ahead_timer = asyncio.get_running_loop().call_later(RETURN_AHEAD_AFTER_S, self._return_ahead)

    def _return_ahead(self) -> None:
        if self._ahead_timer is not None:
            self._ahead_timer.cancel()
        self._ahead_timer = None
        if (slot := self._take_ahead()) is not None:
            self._later(self.abort([Reservation(_NOWHERE, slot.index, slot.epoch)]))

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None

    async def _report_corrupt(self, keys: Sequence[bytes], leases: Sequence[Lease] = ()) -> None:
        """So that nobody finds them after this returns."""
        with contextlib.suppress(MooncakeError):
            await self.release(leases, corrupt_keys=keys)

    async def _reserve(
        self, names: Sequence[tuple[bytes, bytes]], length: int, ranges: int, deadline: float
    ) -> tuple[list[Reservation | None], list[bool]]:
        """The slots, and whether each block is stored already."""
        if self._owed:
            owed, self._owed = self._owed, []
            self._later(self.abort(owed))
        request = pb.ReserveRequest(
            writer_id=self.writer_id,
            blocks=[pb.BlockName(key=key, parent=parent) for key, parent in names],
            length=length,
            ranges=ranges,
            tenant=self.tenant,
            wait_ms=int(_left_s(deadline) * 1e3 * WAIT_SHARE),
        )
        response = await self._call(self._fast.Reserve(request, timeout=_left_s(deadline)))
        segment = segment_from_wire(response.segment)
        slots = [
            Reservation(segment, slot.slot.index, slot.slot.epoch) if slot.HasField("slot") else None
            for slot in response.slots
        ]
        return slots, [slot.stored for slot in response.slots]

    @contextlib.contextmanager
    def _owing(self, slots: list[Reservation]) -> Iterator[None]:
        """Without an answer the store may hold these slots for us until our connections end. Ending a reservation twice
        is harmless: its epoch is never used again."""
        try:
            yield
        except BaseException:
            self._owed = (self._owed + slots)[-MAX_OWED:]
            raise

    async def _write_and_seal(
        self,
        slots: list[Reservation],
        views: list[memoryview],
        checksums: list[Checksums],
        deadline: float,
        durable: bool = False,
    ) -> int:
        """How many were sealed. On any error the reservations are given up."""
        if not slots:
            return 0
        return sum(await self._write_then_seal(slots, views, checksums, deadline, durable))

    async def _write_then_seal(
        self,
        slots: list[Reservation],
        views: list[memoryview],
        checksums: list[Checksums],
        deadline: float,
        durable: bool,
    ) -> list[bool]:
        """On any error the reservations are given up."""
        ranges = [WriteRange(slot.index, 0, view, slot.epoch) for slot, view in zip(slots, views, strict=True)]
        try:
            await self._write(slots[0].segment, ranges, deadline)
            left_s = _left_s(deadline)
        except BaseException:
            self._later(self.abort(slots))  # the transfer has ended: nothing is written any more
            raise
        return await self.seal(list(zip(slots, checksums, strict=True)), durable=durable, timeout_s=left_s)

    async def _get(self, key: bytes, lease: Lease, into: memoryview, deadline: float) -> None:
        corrupt: list[BlockKey] = []
        block = lease.blocks[0]
        try:
            await self.read_ranges(lease, [ReadRange(block.slot, 0, into)], timeout_s=_left_s(deadline))
            verify(into, block.checksums, f"block {key.hex()[:16]} of {self.address}")
        except ChecksumMismatch:
            corrupt.append(BlockKey(key))
            raise
        finally:
            if corrupt:  # wait: whoever asks next must not find it
                with contextlib.suppress(MooncakeError):
                    await self.release([lease], corrupt_keys=corrupt)
            else:
                self._release_later(lease)

    def _release_soon(self, lease: Lease) -> None:
        """With the next ``acquire``, or after a moment."""
        self._ended.append(lease.lease_id)
        if self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(END_LEASES_AFTER_S, self._end_leases)

    def _end_leases(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        ended, self._ended, self._ending = self._ended, [], None
        if ended:
            self._later(self.release_ids(ended))

    def _release_later(self, lease: Lease) -> None:
        self._later(self.release([lease]))

    def _later(self, work: Coroutine[object, object, None]) -> None:
        """Something that a store would find out by itself in time: tell it, but let nobody wait for that."""

        async def run() -> None:
            with contextlib.suppress(MooncakeError):
                await work

        task = asyncio.get_running_loop().create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"store {self.address}") from None


_NOWHERE = SegmentAddress("", 0, "", "", "", 1, 1)  # where a slot is that is written in place


async def _in_thread(work: Callable[[], T]) -> T:
    """Does not return before the work has ended, also when it is cancelled: it writes into memory of the caller's."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _left_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the time for this call to the store is over")
    return left


def _slot_to_wire(slot: Reservation) -> pb.Slot:
    return pb.Slot(index=slot.index, epoch=slot.epoch)


__all__: Sequence[str] = (
    "Lease",
    "ReadRange",
    "Reservation",
    "StoreClient",
    "StoreStats",
    "StoredBlock",
    "WriteRange",
)
