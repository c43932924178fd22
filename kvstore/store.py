"""One store: keeps the DRAM index, the SSD under it, the grants on the segment's slots, and the events in step.

Blocks get in by ``writing`` and ``slots_ahead``, and to the SSD and back by ``saving`` and ``promoting``; this module
combines them. Everything runs on one event loop, except what takes long (checksums of large seals, and the disk), which
runs in threads. It knows nothing of gRPC, sockets or nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.board.board import Board
from kvstore.eviction import EvictionPolicy
from kvstore.index.store_index import StoreIndex
from kvstore.index.types import OWN, BlockName, Counts, Grant, Lease, Offer
from kvstore.segment import Segment
from kvstore.slots_ahead import NEAR_AHEAD, WIRE, SlotsAhead
from kvstore.ssd.record import PAGE, padded
from kvstore.ssd.tier import CLOSE_TIMEOUT_S, SsdTier
from kvstore.tiers.decisions import Demotion, TierRules, Worth, tier_events
from kvstore.tiers.promoting import Promoting
from kvstore.tiers.recomputed import Recomputed
from kvstore.tiers.saving import Saving
from kvstore.transfer.owner.server import SegmentServer
from kvstore.writing import Sealing, Wanted, Writing
from mooncake.errors import InvalidRequest, NodeUnavailable
from mooncake.events import EventLog
from mooncake.types import BlockEvent, BlockKey, Tier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sealed:
    """The result of a ``Sealing``. ``is_durable`` only if that was requested."""

    is_sealed: bool
    is_durable: bool = False


class Store:
    """What the service offers, without the wire. Errors are those of the index."""

    def __init__(
        self,
        segment: Segment,
        server: SegmentServer,
        events: EventLog,
        lease_s: float,
        reserve_timeout_s: float,
        *,
        policy: EvictionPolicy | None = None,
        ssd: SsdTier | None = None,
        rules: TierRules = TierRules(),
        tenant_bytes: int = 0,
        board: Board | None = None,
        ahead_slots: int = 0,
    ) -> None:
        """Blocks readable in DRAM are listed on the ``board`` too, and reads that its readers note count as reads.
        Writers may hold ``ahead_slots`` slots in advance: pass 0 where there are quotas, which could not count them."""
        self.lease_s = lease_s
        self.block_bytes = segment.block_bytes
        self._segment = segment
        self._board = board
        self._server = server
        self._events = events
        self._ssd = ssd
        self._worth = Worth(ssd, rules, segment.num_blocks)
        self.num_heard = 0  # reads noted on the board, in total
        self._index = StoreIndex(
            segment.num_blocks,
            lease_s,
            reserve_timeout_s,
            first_id=segment.incarnation >> 1,  # 62 random bits: room to count, and a range of our own
            policy=policy,
            tenant_bytes=tenant_bytes,
            must_save=self._worth.must_save,
            is_elsewhere=self._worth.is_saved,
            listing=board,
            can_wait=lambda: self._worth.can_save,
        )
        demotion = Demotion(self._worth, self._index, segment.num_blocks)
        self._saving = Saving(ssd, demotion, self._pages, self._publish)
        self.ahead = SlotsAhead(
            self._index, server, board, segment.block_bytes, ahead_slots, self._worth.is_saved, self._on_stored
        )
        recomputed = Recomputed(self._index) if not tenant_bytes else None  # quotas count only named blocks
        self._writing = Writing(
            segment, server, self._index, self.ahead, self._worth, self._saving, recomputed, self._publish
        )
        self._promoting: Promoting | None = None
        if ssd is not None:
            _forget_larger(ssd, self.block_bytes)
            self._promoting = Promoting(
                ssd, self._index, self.ahead, self._saving, self._pages, self._publish, self.block_bytes, lease_s
            )
            ssd.index.lie_under(self._index.is_built_on, board.mark if board is not None else None)
            events.append(BlockEvent(True, h.key, h.parent, Tier.SSD) for h in ssd.headers())

    # Writing

    async def reserve(self, wanted: Wanted, wait_s: float = 0.0) -> list[Offer]:
        """As the index does, except that blocks on the SSD count as stored, unless they are wanted in DRAM too and
        there is room. While blocks are being saved, waits up to ``wait_s`` for their slots. Raises InvalidRequest when
        such blocks do not fit a slot, and OutOfBlocks."""
        length, ranges = wanted.length, wanted.ranges
        if not 1 <= length <= self.block_bytes:
            raise InvalidRequest(f"blocks of {length} bytes do not fit slots of {self.block_bytes} bytes", "length")
        if not 1 <= ranges <= length or length % ranges:
            raise InvalidRequest(f"{length} bytes do not divide into {ranges} equal ranges", "ranges")
        self._count_reads()
        return await self._writing.reserve(wanted, wait_s)

    async def seal(self, sealings: Sequence[Sealing], durable: bool = False) -> list[Sealed]:
        """Close the slots to their writers, verify their content, and make it readable if correct. With ``durable``,
        return once it is on the SSD too, or cannot be."""
        sealed = await self._writing.seal(sealings)
        saves = [self._saving.write_through(name, durable) if name else None for name in sealed]
        self._make_room()
        if not durable:
            return [Sealed(name is not None) for name in sealed]
        safe = await asyncio.gather(*(save if save is not None else _nothing() for save in saves))
        return [Sealed(name is not None, is_safe) for name, is_safe in zip(sealed, safe, strict=True)]

    def give_ahead(self, writer: str, count: int = NEAR_AHEAD) -> None:
        """Top up this writer's slots; other blocks may be evicted for that."""
        self.ahead.fill_up(writer, count)
        self._saving.save_leaving()
        self._publish()

    def settle(self) -> None:
        """Work that no put waits for: process arrivals and reads, make room, publish changes."""
        self.ahead.catch_up()
        self._count_reads()
        self.ahead.fill_short()
        self._saving.save_leaving()
        self._make_room()

    def hear_readers(self) -> None:
        """Process the reads noted on the board since the last call."""
        self.ahead.catch_up()
        self._count_reads()

    def near_writer_gone(self, writer: str) -> None:
        """A client on this host is gone, and no longer maps the segment."""
        self.ahead.close(writer)
        self._saving.room_came()

    def abort(self, grants: Iterable[Grant]) -> None:
        """The writers are done with these slots for good."""
        self._writing.abort(grants)

    def abort_numbers(self, writer: str, numbers: Iterable[int]) -> None:
        """The writer never learned what it was given by its calls with these numbers."""
        self._writing.abort(self._index.reservations.numbered(writer, numbers))

    # Reading

    async def acquire(self, keys: Sequence[BlockKey], recompute_ms: float = 0.0, scattered: bool = False) -> Lease:
        """Lease the leading run of ``keys`` that is stored, or with ``scattered`` every stored block of them.

        Blocks that are only on the SSD are loaded first, as far as reading them is faster than computing them
        (``recompute_ms`` each; 0: impossible).
        """
        self.ahead.catch_up()
        self._count_reads()
        self._saving.count_sights(keys)
        if self._ssd is None or self._promoting is None:
            return self._index.acquire(keys, time.monotonic(), scattered)
        self._ssd.touch(reversed(keys))
        with contextlib.ExitStack() as held:
            await self._promoting.bring(keys, recompute_ms, scattered, held)
            lease = self._index.acquire(keys, time.monotonic(), scattered)
        self._make_room()
        return lease

    def release(self, lease_ids: Iterable[int], corrupt_keys: Iterable[BlockKey] = ()) -> None:
        corrupt = list(corrupt_keys)
        if corrupt:
            self.ahead.catch_up()
            self._drop_everywhere(corrupt)
            self._index.drop_corrupt(corrupt, time.monotonic())
        for lease_id in lease_ids:
            self._index.release(lease_id)
        self._saving.room_came()
        self._publish()

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each can be read from DRAM or the SSD. Does not count as a use."""
        self.ahead.catch_up()
        stored = self._index.exists(keys)
        if self._ssd is None:
            return stored
        return [here or key in self._ssd for here, key in zip(stored, keys, strict=True)]

    # Dropping and keeping

    async def remove(self, keys: Sequence[BlockKey]) -> int:
        """Make blocks unreadable, also after a restart. Returns how many there were.

        Raises NodeUnavailable when the SSD refuses to record that: they are unreadable until a restart.
        """
        count = sum(self.exists(list(dict.fromkeys(keys))))
        dropped = self._drop_everywhere(keys)
        self._index.remove(keys, time.monotonic())
        self._saving.room_came()
        self._publish()
        ssd, names = self._ssd, set(keys)
        must_commit = ssd is not None and (count or dropped or ssd.is_dropping(names))
        if ssd is not None and must_commit and not await ssd.committed() and ssd.is_dropping(names):
            raise NodeUnavailable("the SSD does not take the removal: after a restart the blocks may be back")
        return count

    def give_up(self, keys: Sequence[BlockKey]) -> int:
        """Free the DRAM of a chain from its last block backwards, as far as nothing here builds on a block, nobody
        reads it and it is not pinned. Its blocks on the SSD stay. Returns how many blocks went."""
        self.ahead.catch_up()
        self._count_reads()
        count = self._index.give_up(keys, time.monotonic())
        self._saving.room_came()
        self._publish()
        return count

    def _drop_everywhere(self, keys: Iterable[BlockKey]) -> int:
        return self._ssd.drop(keys) if self._ssd is not None else 0

    async def pin(self, keys: Sequence[BlockKey], is_hard: bool, ttl_s: float) -> int:
        """Keep blocks in DRAM, loading them from the SSD. Returns how many are pinned. Raises OutOfBlocks."""
        lease = await self.acquire(keys, scattered=True)
        try:
            now = time.monotonic()
            return self._index.pin(keys, is_hard, now + ttl_s, now)
        finally:
            self.release([lease.lease_id])

    def unpin(self, keys: Iterable[BlockKey]) -> int:
        return self._index.unpin(keys)

    def sweep(self) -> None:
        """End everything that has timed out. A late writer that maps the segment may still be copying: its slots
        stay in quarantine until it says that it is done, or is gone."""
        with self.ahead.alone():
            for reserved in self._index.sweep(time.monotonic()):
                self._server.revoke([reserved.grant.slot])
                if reserved.writer == WIRE:
                    self.ahead.take_back(reserved.grant)
                elif not (reserved.writer.startswith(OWN) or self._maps_memory(reserved.writer)):
                    self._index.reservations.abort(reserved.grant)
        self._count_reads()
        self._saving.room_came()
        self._make_room()

    def _maps_memory(self, writer: str) -> bool:
        return writer in self.ahead or self._server.maps_memory(writer)

    def writer_gone(self, writer: str) -> None:
        """Its last connection ended: it writes no more, unless it is back."""
        if self._server.is_connected(writer):
            return
        self._server.revoke(grant.slot for grant in self._index.reservations.writer_gone(writer))
        self._saving.room_came()

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Save what is only in DRAM and would have been saved on leaving, then close the SSD. Either step ends when
        the SSD makes no progress for this long; the interpreter's own exit still waits for a hanging write."""
        self.ahead.catch_up()
        if self._ssd is None or self._promoting is None:
            return
        await self._saving.finish(timeout_s)
        await self._ssd.close(timeout_s)
        await self._promoting.close()

    # Accounts

    @property
    def counts(self) -> Counts:
        return self._index.counts

    @property
    def counters(self) -> dict[str, int]:
        mine = self._index.counters
        if self._ssd is None:
            return dict(mine)
        return {**(mine + self._ssd.counters), "ssd_in_trouble": int(self._ssd.is_in_trouble)}

    @property
    def ssd(self) -> SsdTier | None:
        return self._ssd

    @property
    def num_pinned(self) -> int:
        return self._index.num_pinned

    @property
    def tenant_bytes(self) -> dict[str, int]:
        return self._index.usage

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping is inconsistent."""
        self._index.check()
        if self._ssd is not None:
            self._ssd.index.check()

    # Publishing

    def _on_stored(self, name: BlockName, is_new: bool) -> None:
        """A writer has put this block into a slot granted in advance."""
        self._worth.saw(name.key)
        if is_new:
            self._saving.copy_if_due(name)

    def _count_reads(self) -> None:
        """Blocks read through the board count as used, for eviction and for the SSD."""
        if self._board is not None and (slots := self._board.take_notes()):
            self.num_heard += len(slots)
            keys = self._index.was_read(slots, time.monotonic())
            if self._ssd is not None:
                self._saving.count_sights(keys)
                self._ssd.touch(reversed(keys))

    def _make_room(self) -> None:
        """Make room before it is needed, and publish what changed."""
        self._saving.prepare(time.monotonic())
        self._publish()

    def _pages(self, slot: int, length: int) -> memoryview:
        """A block's bytes, up to a whole page if the slot has that: the disk can then read or write it in place."""
        room = padded(length)
        return self._segment.range(slot, 0, room if self.block_bytes % PAGE == 0 else length)

    def _publish(self) -> None:
        """Publish what changed. A block that the SSD lost is still here if DRAM has it."""
        ssd = self._ssd
        lost = ssd.take_left() if ssd is not None else ()
        self._events.append(tier_events(self._index, lost, lambda key: ssd is not None and key in ssd))


def _forget_larger(ssd: SsdTier, block_bytes: int) -> None:
    """Blocks of an earlier run with larger slots: nobody could read them here, or put them again."""
    if num_large := ssd.drop([header.key for header in ssd.headers() if header.length > block_bytes]):
        ssd.take_left()  # nobody was told that they were there
        ssd.counters["ssd_too_large"] += num_large
        log.warning("%d blocks on the SSD do not fit slots of %d bytes, and are dropped", num_large, block_bytes)


async def _nothing() -> bool:
    return False
