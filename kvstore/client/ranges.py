"""A store's blocks part by part: slots are reserved and written in ranges, blocks are leased and read in ranges.

Bytes move between the caller's memory and the store's segment by one-sided transfers. This module does not know what
the parts of a block mean.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvstore.checksum import Checksums, checksum, checksums_to_wire
from kvstore.client.calls import DEFAULT_TIMEOUT_S, StoreCalls, check_whole, left_s
from kvstore.client.near import INLINE_BYTES
from kvstore.client.shortcuts import Shortcuts
from kvstore.client.types import (
    Lease,
    Reservation,
    StoredBlock,
    in_batches,
    joined,
    lease_from_wire,
    reservations_from_wire,
    slot_to_wire,
)
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.requests import ReadRange, TransferReport, WriteRange
from mooncake.errors import ChecksumMismatch, DeadlineExceeded, InvalidRequest, KVLoadFailed, LeaseExpired, OutOfBlocks
from mooncake.rpc import store_pb2 as pb
from mooncake.types import SegmentAddress

WAIT_SHARE = 0.8  # share of a call's time to spend waiting for room, so that time is left for the rest


class Leased(Protocol):
    """What has leases: a ``Lease``, or what was made of some."""

    @property
    def lease_ids(self) -> Sequence[int]: ...


class StoreRanges:
    """Every call takes ``timeout_s``, and raises the same, as those of ``StoreClient``, which has one."""

    def __init__(
        self, transfer: TransferEngine, calls: StoreCalls, shortcuts: Shortcuts, tenant: str, copies_inline: bool
    ) -> None:
        """``shortcuts`` hears of the store's incarnations; for the rest see ``StoreClient``."""
        self._transfer = transfer
        self._writer_id = transfer.writer_id  # a reservation is released when this engine's data connections are gone
        self._calls = calls
        self._shortcuts = shortcuts
        self._tenant = tenant
        self._copies_inline = copies_inline

    # Writing in ranges: reserve, write_ranges as often as needed, then seal or abort

    async def reserve(
        self,
        names: Sequence[tuple[bytes, bytes]],
        length: int,
        ranges: int,
        *,
        into_dram: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[Reservation | None]:
        """A slot for each (key, parent) that is neither stored nor being written; None for the others. With
        ``into_dram``, blocks that are only on the SSD get one too, to be in both tiers.

        ``length`` is the bytes of each block, which seal verifies as ``ranges`` equal parts. Raises OutOfBlocks when
        there is room for none of them.
        """
        deadline = time.monotonic() + timeout_s
        slots: list[Reservation | None] = []
        full: OutOfBlocks | None = None
        try:
            for part in in_batches(names):
                found: list[Reservation | None] = [None] * len(part)
                try:
                    found, _ = await self.reserve_batch(part, length, ranges, deadline, into_dram)
                except OutOfBlocks as error:
                    full = error
                slots += found
        except BaseException:  # the caller will never learn of these
            self.abort_later(slots)
            raise
        if full is not None and not any(slots):
            raise full
        return slots

    async def reserve_batch(
        self,
        names: Sequence[tuple[bytes, bytes]],
        length: int,
        ranges: int,
        deadline: float,
        into_dram: bool = False,
    ) -> tuple[list[Reservation | None], list[bool]]:
        """``reserve`` for at most MAX_BATCH blocks: the slots, and whether each block is stored already."""
        request = pb.ReserveRequest(
            writer_id=self._writer_id,
            blocks=[pb.BlockName(key=key, parent=parent) for key, parent in names],
            length=length,
            ranges=ranges,
            tenant=self._tenant,
            wait_ms=int(left_s(deadline) * 1e3 * WAIT_SHARE),
            into_dram=into_dram,
        )
        response = await self._calls.reserve(request, left_s(deadline))
        try:
            self._shortcuts.heard_from(response.segment.incarnation)
            return reservations_from_wire(response), [slot.stored for slot in response.slots]
        except Exception:  # there is no memory for what was reserved
            self._calls.give_back(request.number)
            raise

    async def write_ranges(
        self, segment: SegmentAddress, ranges: Sequence[WriteRange], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> TransferReport:
        """Write into reserved slots. Raises StaleEpoch when a reservation is over."""
        deadline = time.monotonic() + timeout_s
        if self._is_quick(segment, sum(memoryview(part.data).nbytes for part in ranges)):
            return self._transfer.write(segment, ranges, deadline)
        return await self._transfer.write_async(segment, ranges, deadline)

    async def seal(
        self,
        sealings: Sequence[tuple[Reservation, Checksums]],
        *,
        durable: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[bool]:
        """End reservations: the store verifies the bytes and makes them readable. False where it did not accept them:
        the reservation was over, or the checksums differ. The writer must not write into these slots any more.

        With ``durable`` it returns once they are on the SSD too, and raises OutOfBlocks when one of them is not.
        """
        deadline = time.monotonic() + timeout_s
        blocks = [pb.Sealing(slot=slot_to_wire(slot), checksums=checksums_to_wire(sums)) for slot, sums in sealings]
        sealed: list[bool] = []
        is_safe: list[bool] = []
        with self._calls.owing([slot for slot, _ in sealings]):
            for part in in_batches(blocks):
                request = pb.SealRequest(blocks=part, durable=durable)
                response = await self._calls.call(self._calls.fast.Seal(request, timeout=left_s(deadline)))
                check_whole(response.sealed, part)
                sealed += response.sealed
                is_safe += response.durable
        if durable and any(here and not safe for here, safe in zip(sealed, is_safe, strict=True)):
            raise OutOfBlocks("stored, but not durable: the store has no SSD, or it did not take the block")
        return sealed

    async def abort(self, reservations: Iterable[Reservation], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Abort reservations. The writer must have stopped writing into them. Repeated until it gets through."""
        await self._calls.abort(reservations, timeout_s)

    def abort_later(self, slots: Iterable[Reservation | None]) -> None:
        """``abort`` without anyone waiting for it."""
        if mine := [slot for slot in slots if slot is not None]:
            self._calls.later(self._calls.abort(mine))

    # Reading in ranges: acquire (or acquire_all), read_ranges as often as needed, then release

    async def acquire(
        self,
        keys: Sequence[bytes],
        *,
        recompute_ms: float = 0.0,
        scattered: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Lease:
        """Lease the longest stored leading run of ``keys``, which may be empty. With ``scattered``, lease every stored
        block: the lease then has one block per key, of length 0 where there is none.

        Blocks only on the SSD are loaded first, but only as far as that is faster than recomputing the run, which costs
        the caller ``recompute_ms`` per block (0: it cannot be computed). Raises KVLoadFailed when the store was
        restarted between two batches of keys.
        """
        deadline = time.monotonic() + timeout_s
        leases: list[Lease] = []
        try:
            for part in list(in_batches(keys)) or [keys]:
                leases.append(lease := await self._acquire(part, recompute_ms, scattered, left_s(deadline)))
                if lease.segment != leases[0].segment:
                    raise KVLoadFailed("the store was restarted while its blocks were leased")
                if len(lease.blocks) < len(part):
                    break
        except BaseException:
            self._calls.later(self.release(leases))
            raise
        return joined(leases)

    async def acquire_all(self, keys: Sequence[bytes], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Lease:
        """Lease all of a chain's blocks. Raises KVLoadFailed, and leaves no lease, when a block is missing or the store
        was restarted meanwhile."""
        lease = await self.acquire(keys, timeout_s=timeout_s)
        if len(lease.blocks) < len(keys):
            self._calls.release_soon(lease)
            raise KVLoadFailed(f"not all of {len(keys)} stored blocks are still there")
        return lease

    async def read_ranges(
        self, lease: Lease, ranges: Sequence[ReadRange], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> TransferReport:
        """Read from leased slots. Raises LeaseExpired when the lease expired before the read ended; the bytes are
        then undefined. The caller verifies them against the lease's checksums."""
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
        self, leases: Iterable[Leased], *, corrupt_keys: Iterable[bytes] = (), timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """End leases; harmless for expired ones. ``corrupt_keys`` names blocks whose bytes were wrong: the store
        drops them at once."""
        ids = [lease_id for lease in leases for lease_id in lease.lease_ids]
        await self._calls.release(ids, corrupt_keys, timeout_s)

    async def finish(self, lease: Lease, corrupt_keys: Sequence[bytes] = ()) -> None:
        """End a lease without waiting, unless blocks were corrupt: then nobody finds those after this returns. If
        the store misses the message, the lease expires."""
        if corrupt_keys:
            await self._calls.report_corrupt(corrupt_keys, lease.lease_ids)
        elif lease.lease_ids:
            self._calls.release_soon(lease)

    async def get_range_into(
        self, key: bytes, offset: int, into: memoryview, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bool:
        """Read part of a block, together with the checksummed ranges around it. False when the block is not there.
        Raises InvalidRequest when it is shorter, and ChecksumMismatch (it has then been dropped from the store)."""
        deadline = time.monotonic() + timeout_s
        lease = await self.acquire([key], timeout_s=timeout_s)
        if not lease.blocks:
            return False
        [block] = lease.blocks
        corrupt: list[bytes] = []
        try:
            if offset + into.nbytes > block.length:
                raise InvalidRequest(f"{offset} + {into.nbytes} is beyond the block's {block.length} bytes", "offset")
            first, last, size = _covering(block, offset, into.nbytes)
            is_whole = first * size == offset and last * size == offset + into.nbytes
            target = into if is_whole else memoryview(bytearray((last - first) * size))
            await self.read_ranges(lease, [ReadRange(block.slot, first * size, target)], timeout_s=left_s(deadline))
            for number in range(first, last):
                part = target[(number - first) * size : (number - first + 1) * size]
                if checksum(part) != int(block.checksums[number]):
                    corrupt.append(key)
                    raise ChecksumMismatch(f"range {number} of {len(block.checksums)} differs from what was sealed")
            if not is_whole:
                into[:] = target[offset - first * size :][: into.nbytes]
            return True
        finally:
            await self.finish(lease, corrupt)

    async def _read(self, segment: SegmentAddress, ranges: Sequence[ReadRange], deadline: float) -> TransferReport:
        if self._is_quick(segment, sum(memoryview(part.into).nbytes for part in ranges)):
            return self._transfer.read(segment, ranges, deadline)
        return await self._transfer.read_async(segment, ranges, deadline)

    def _is_quick(self, segment: SegmentAddress, nbytes: int) -> bool:
        """Whether moving these bytes is a short local copy, best made right here."""
        return self._copies_inline and nbytes <= INLINE_BYTES and self._transfer.transport_of(segment.node_id) == "shm"

    async def _acquire(self, keys: Sequence[bytes], recompute_ms: float, scattered: bool, timeout_s: float) -> Lease:
        """``acquire`` for one batch."""
        ended = self._calls.take_ended()
        request = pb.AcquireRequest(keys=keys, recompute_ms=recompute_ms, scattered=scattered, ended_lease_ids=ended)
        asked_s = time.monotonic()
        response = await self._calls.acquire(request, timeout_s)
        self._shortcuts.heard_from(response.segment.incarnation)
        return lease_from_wire(response, asked_s)


def _covering(block: StoredBlock, offset: int, length: int) -> tuple[int, int, int]:
    """(first, end, bytes per range) of the checksummed ranges that contain these bytes."""
    size = block.length // len(block.checksums)
    return offset // size, -(-(offset + length) // size), size
