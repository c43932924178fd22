"""One store: the index of blocks, the grants on the segment's slots and the events, kept in step.

Everything here happens on one event loop, except the checksums of large seals, which a thread computes. It must not
know about gRPC, sockets or nodes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.checksum import Checksums, first_mismatch
from kvstore.index import BlockName, Counts, Grant, Lease, Offer, Reserved, StoreIndex
from kvstore.segment import Segment
from kvstore.transfer.server import SegmentServer
from mooncake.errors import InvalidRequest
from mooncake.events import EventLog
from mooncake.types import BlockKey

_INLINE_VERIFY_BYTES = 256 << 10  # less is checked faster than a thread is woken


@dataclass(frozen=True, slots=True)
class Sealing:
    """A writer's claim: these bytes are in this slot."""

    grant: Grant
    checksums: Checksums


class Store:
    """What the service offers, without the wire. Errors are those of the index."""

    def __init__(
        self, segment: Segment, server: SegmentServer, events: EventLog, lease_s: float, reserve_timeout_s: float
    ) -> None:
        self.lease_s = lease_s
        self.block_bytes = segment.block_bytes
        self._segment = segment
        self._server = server
        self._events = events
        first_id = segment.incarnation >> 1  # 62 random bits: room to count, and nobody else's range
        self._index = StoreIndex(segment.num_blocks, lease_s, reserve_timeout_s, first_id)

    def reserve(self, names: Sequence[BlockName], writer: str, length: int, ranges: int) -> list[Offer]:
        """Raises InvalidRequest when such blocks do not fit a slot, and OutOfBlocks."""
        if not 1 <= length <= self.block_bytes:
            raise InvalidRequest(f"blocks of {length} bytes do not fit slots of {self.block_bytes} bytes", "length")
        if not 1 <= ranges <= length or length % ranges:
            raise InvalidRequest(f"{length} bytes do not divide into {ranges} equal ranges", "ranges")
        try:
            offers = self._index.reserve(names, writer, length, ranges, time.monotonic())
        finally:
            self._publish()
        for offer in offers:
            if offer.grant is not None:
                self._server.grant([offer.grant.slot], offer.grant.epoch)
        return offers

    async def seal(self, sealings: Sequence[Sealing]) -> list[bool]:
        """Close the slots to their writers, check what is in them, and make readable what is right."""
        jobs = [(sealing, self._index.reservation(sealing.grant)) for sealing in sealings]
        self._server.revoke(reserved.grant.slot for _, reserved in jobs if reserved)
        total = sum(reserved.length for _, reserved in jobs if reserved)
        if total <= _INLINE_VERIFY_BYTES:
            verdicts = self._verify(jobs)
        else:
            verdicts = await asyncio.to_thread(self._verify, jobs)
        sealed = [self._finish(sealing, verdict) for sealing, verdict in zip(sealings, verdicts, strict=True)]
        self._publish()
        return sealed

    def abort(self, grants: Iterable[Grant]) -> None:
        for grant in grants:
            if self._index.abort(grant):
                self._server.revoke([grant.slot])

    def acquire(self, keys: Sequence[BlockKey]) -> Lease:
        return self._index.acquire(keys, time.monotonic())

    def release(self, lease_ids: Iterable[int], corrupt_keys: Iterable[BlockKey] = ()) -> None:
        self._index.drop_corrupt(corrupt_keys)
        for lease_id in lease_ids:
            self._index.release(lease_id)
        self._publish()

    def exists(self, keys: Iterable[BlockKey]) -> list[bool]:
        return self._index.exists(keys)

    def remove(self, keys: Iterable[BlockKey]) -> int:
        removed = self._index.remove(keys, time.monotonic())
        self._publish()
        return removed

    def sweep(self) -> None:
        """End what has run out of time. A late writer that maps the segment may still be copying: its slots wait in
        quarantine for it to say that it is done, or to be gone."""
        for reserved in self._index.sweep(time.monotonic()):
            self._server.revoke([reserved.grant.slot])
            if not self._server.maps_memory(reserved.writer):
                self._index.abort(reserved.grant)
        self._publish()

    def writer_gone(self, writer: str) -> None:
        """Its last connection ended: it writes no more."""
        self._server.revoke(grant.slot for grant in self._index.writer_gone(writer))

    @property
    def counts(self) -> Counts:
        return self._index.counts

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._index.counters)

    def check(self) -> None:
        """Raises AssertionError when the accounts do not add up."""
        self._index.check()

    def _verify(self, jobs: Sequence[tuple[Sealing, Reserved | None]]) -> list[bool]:
        """Whether each slot holds what its writer says. A reservation that is over is wrong."""
        return [reserved is not None and self._is_right(sealing, reserved) for sealing, reserved in jobs]

    def _is_right(self, sealing: Sealing, reserved: Reserved) -> bool:
        if len(sealing.checksums) != reserved.ranges:
            return False
        data = self._segment.range(reserved.grant.slot, 0, reserved.length)
        return first_mismatch(data, sealing.checksums) is None

    def _finish(self, sealing: Sealing, is_right: bool) -> bool:
        if is_right:
            return self._index.seal(sealing.grant, sealing.checksums)
        if self._index.abort(sealing.grant):
            self._index.counters["checksum_mismatches"] += 1
        return False

    def _publish(self) -> None:
        self._events.append(self._index.take_events())
