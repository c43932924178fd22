"""One store: the index of blocks in DRAM, the SSD under it, the grants on the segment's slots and the events, in step.

How blocks get in is in ``writing`` and ``ahead``, how they go to the SSD and come back in ``saving`` and ``promoting``;
here they are put together. Everything happens on one event loop, except what takes long: checksums of large seals and
the disk, which threads do. It must not know about gRPC, sockets or nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.ahead import NEAR_AHEAD, WIRE, SlotsAhead
from kvstore.anew import Anew
from kvstore.board import Board
from kvstore.eviction import EvictionPolicy
from kvstore.index import StoreIndex
from kvstore.index_types import OWN, BlockName, Counts, Grant, Lease, Offer
from kvstore.promoting import Promoting
from kvstore.saving import Saving
from kvstore.segment import Segment
from kvstore.ssd_record import PAGE, padded
from kvstore.ssd_tier import CLOSE_TIMEOUT_S, SsdTier
from kvstore.tiers import Demotion, TierRules, Worth, tier_events
from kvstore.transfer.server import SegmentServer
from kvstore.writing import Sealing, Wanted, Writing
from mooncake.errors import InvalidRequest
from mooncake.events import EventLog
from mooncake.types import BlockEvent, BlockKey, Tier


@dataclass(frozen=True, slots=True)
class Sealed:
    """What became of a ``Sealing``. ``is_durable`` only where that was asked for."""

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
        """What is readable in DRAM is listed on the ``board`` too, and what its readers note counts as read. Writers
        may have ``ahead_slots`` slots ahead: give none where quotas are kept, which could not count them."""
        self.lease_s = lease_s
        self.block_bytes = segment.block_bytes
        self._segment = segment
        self._board = board
        self._server = server
        self._events = events
        self._ssd = ssd
        self._worth = Worth(ssd, rules, segment.num_blocks)
        self.num_heard = 0  # times that somebody of the board has read, ever
        self._index = StoreIndex(
            segment.num_blocks,
            lease_s,
            reserve_timeout_s,
            first_id=segment.incarnation >> 1,  # 62 random bits: room to count, and nobody else's range
            policy=policy,
            tenant_bytes=tenant_bytes,
            must_save=self._worth.must_save,
            is_elsewhere=self._worth.is_saved,
            listing=board,
        )
        demotion = Demotion(self._worth, self._index, segment.num_blocks)
        self._saving = Saving(ssd, demotion, self._pages, self._publish)
        self.ahead = SlotsAhead(
            self._index, server, board, segment.block_bytes, ahead_slots, self._worth.is_saved, self._on_stored
        )
        anew = Anew(self._index) if not tenant_bytes else None  # quotas count what has a name
        self._writing = Writing(
            segment, server, self._index, self.ahead, self._worth, self._saving, anew, self._publish
        )
        self._promoting: Promoting | None = None
        if ssd is not None:
            self._promoting = Promoting(
                ssd, self._index, self.ahead, self._saving, self._pages, self._publish, self.block_bytes, lease_s
            )
            ssd.index.is_built_on = self._index.is_built_on
            if board is not None:
                ssd.index.mark = board.mark
                for header in ssd.headers():
                    board.mark(header.key, True)
            events.append(BlockEvent(True, h.key, h.parent, Tier.SSD) for h in ssd.headers())

    # Writing

    async def reserve(
        self,
        names: Sequence[BlockName],
        writer: str,
        length: int,
        ranges: int,
        tenant: str = "",
        wait_s: float = 0.0,
        into_dram: bool = False,
        number: int = 0,
    ) -> list[Offer]:
        """As the index does, and blocks on the SSD are stored too; with ``into_dram`` they get a slot as well where
        there is room. While blocks are being saved, waits up to ``wait_s`` for theirs. ``number`` is for
        ``abort_numbers``. Raises InvalidRequest when such blocks do not fit a slot, and OutOfBlocks."""
        if not 1 <= length <= self.block_bytes:
            raise InvalidRequest(f"blocks of {length} bytes do not fit slots of {self.block_bytes} bytes", "length")
        if not 1 <= ranges <= length or length % ranges:
            raise InvalidRequest(f"{length} bytes do not divide into {ranges} equal ranges", "ranges")
        self._hear_readers()
        return await self._writing.reserve(Wanted(names, writer, length, ranges, tenant, into_dram, number), wait_s)

    async def seal(self, sealings: Sequence[Sealing], durable: bool = False) -> list[Sealed]:
        """Close the slots to their writers, check what is in them, and make readable what is right. With ``durable``,
        return once it is on the SSD too, or cannot be."""
        sealed = await self._writing.seal(sealings)
        saves = [self._saving.write_through(name, durable) if name else None for name in sealed]
        self._make_room()
        if not durable:
            return [Sealed(name is not None) for name in sealed]
        safe = await asyncio.gather(*(save if save is not None else _nothing() for save in saves))
        return [Sealed(name is not None, is_safe) for name, is_safe in zip(sealed, safe, strict=True)]

    def give_ahead(self, writer: str, count: int = NEAR_AHEAD) -> None:
        """Fill this writer up; others may leave for that."""
        self.ahead.fill_up(writer, count)
        self._saving.save_leaving()
        self._publish()

    def settle(self) -> None:
        """What nobody who has put a block waits for: learn of what came and what has been read, make room, tell."""
        self.ahead.catch_up()
        self._hear_readers()
        self.ahead.fill_short()
        self._saving.save_leaving()
        self._make_room()

    def hear_readers(self) -> None:
        """Learn of what has been read since."""
        self.ahead.catch_up()
        self._hear_readers()

    def near_writer_gone(self, writer: str) -> None:
        """It was a client of this host, and holds the segment no more."""
        self.ahead.close(writer)
        self._saving.room_came()

    def abort(self, grants: Iterable[Grant]) -> None:
        """The writers are done with these slots for good."""
        self._writing.abort(grants)

    def abort_numbers(self, writer: str, numbers: Iterable[int]) -> None:
        """The writer never heard what it was given by the calls of these numbers."""
        self._writing.abort(self._index.numbered(writer, numbers))

    # Reading

    async def acquire(self, keys: Sequence[BlockKey], recompute_ms: float = 0.0, scattered: bool = False) -> Lease:
        """Lease the leading run of ``keys`` that is stored, or with ``scattered`` whatever is stored of them.

        Blocks that are on the SSD alone are loaded first, as far as reading them takes less time than computing them
        does (``recompute_ms`` each; 0: it cannot be done)."""
        self.ahead.catch_up()
        self._hear_readers()
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
        """Whether each can be read from DRAM or the SSD. Touches nothing."""
        self.ahead.catch_up()
        stored = self._index.exists(keys)
        if self._ssd is None:
            return stored
        return [here or key in self._ssd for here, key in zip(stored, keys, strict=True)]

    # Dropping and keeping

    async def remove(self, keys: Sequence[BlockKey]) -> int:
        """Make blocks unreadable, also after a restart. Returns how many there were."""
        count = sum(self.exists(list(dict.fromkeys(keys))))
        dropped = self._drop_everywhere(keys)
        self._index.remove(keys, time.monotonic())
        self._saving.room_came()
        self._publish()
        if self._ssd is not None and (count or dropped):
            await self._ssd.committed()
        return count

    def give_up(self, keys: Sequence[BlockKey]) -> int:
        """Free DRAM of a chain from its last block on, as far as nothing here builds on a block, nobody reads it and it
        is not pinned. What the SSD has of it stays there. Returns how many blocks went."""
        self.ahead.catch_up()
        self._hear_readers()
        count = self._index.give_up(keys, time.monotonic())
        self._saving.room_came()
        self._publish()
        return count

    def _drop_everywhere(self, keys: Iterable[BlockKey]) -> int:
        return self._ssd.drop(keys) if self._ssd is not None else 0

    async def pin(self, keys: Sequence[BlockKey], is_hard: bool, ttl_s: float) -> int:
        """Keep blocks in DRAM, from the SSD too. Returns how many of them are kept. Raises OutOfBlocks."""
        lease = await self.acquire(keys, scattered=True)
        try:
            now = time.monotonic()
            return self._index.pin(keys, is_hard, now + ttl_s, now)
        finally:
            self.release([lease.lease_id])

    def unpin(self, keys: Iterable[BlockKey]) -> int:
        return self._index.unpin(keys)

    def sweep(self) -> None:
        """End what has run out of time. A late writer that maps the segment may still be copying: its slots wait in
        quarantine for it to say that it is done, or to be gone."""
        with self.ahead.alone():
            for reserved in self._index.sweep(time.monotonic()):
                self._server.revoke([reserved.grant.slot])
                if reserved.writer == WIRE:
                    self.ahead.take_back(reserved.grant)
                elif not (reserved.writer.startswith(OWN) or self._maps_memory(reserved.writer)):
                    self._index.abort(reserved.grant)
        self._hear_readers()
        self._saving.room_came()
        self._make_room()

    def _maps_memory(self, writer: str) -> bool:
        return writer in self.ahead or self._server.maps_memory(writer)

    def writer_gone(self, writer: str) -> None:
        """Its last connection ended: it writes no more."""
        self._server.revoke(grant.slot for grant in self._index.writer_gone(writer))
        self._saving.room_came()

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Save what is only in DRAM and would have been saved when it left, then let go of the SSD. Either ends when
        the SSD takes nothing for so long; the interpreter, at its own end, still waits for a write that hangs there."""
        self.ahead.catch_up()
        if self._ssd is None:
            return
        await self._saving.finish(timeout_s)
        await self._ssd.close(timeout_s)

    # Accounts

    @property
    def counts(self) -> Counts:
        return self._index.counts

    @property
    def counters(self) -> dict[str, int]:
        mine = self._index.counters
        return dict(mine + self._ssd.counters) if self._ssd else dict(mine)

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
        """Raises AssertionError when the accounts do not add up."""
        self._index.check()
        if self._ssd is not None:
            self._ssd.index.check()

    # What others learn of

    def _on_stored(self, name: BlockName, is_new: bool) -> None:
        """Somebody has put this block into a slot given ahead."""
        self._worth.saw(name.key)
        if is_new:
            self._saving.copy_if_due(name)

    def _hear_readers(self) -> None:
        """Of the board: what they have read has been used, for eviction and for the SSD."""
        if self._board is not None and (slots := self._board.take_notes()):
            self.num_heard += len(slots)
            keys = self._index.was_read(slots, time.monotonic())
            if self._ssd is not None:
                self._saving.count_sights(keys)
                self._ssd.touch(reversed(keys))

    def _make_room(self) -> None:
        """Ahead of those who will want it; and tell what changed."""
        self._saving.prepare(time.monotonic())
        self._publish()

    def _pages(self, slot: int, length: int) -> memoryview:
        """A block's bytes, up to a whole page where the slot has it: the disk can then take or fill them in place."""
        room = padded(length)
        return self._segment.range(slot, 0, room if self.block_bytes % PAGE == 0 else length)

    def _publish(self) -> None:
        """Tell what changed. A block that the SSD lost is still here when DRAM has it."""
        ssd = self._ssd
        lost = ssd.take_left() if ssd is not None else ()
        self._events.append(tier_events(self._index, lost, lambda key: ssd is not None and key in ssd))


async def _nothing() -> bool:
    return False
