"""One store: the index of blocks in DRAM, the SSD under it, the grants on the segment's slots and the events, in step.

Everything here happens on one event loop, except what takes long: checksums of large seals and the disk, which threads
do. It must not know about gRPC, sockets or nodes.
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
from kvstore.checksum import Checksums, first_mismatch
from kvstore.eviction import EvictionPolicy
from kvstore.index import StoreIndex
from kvstore.index_types import OWN, BlockName, Counts, Grant, Lease, Offer, Reserved
from kvstore.saving import Saving
from kvstore.segment import Segment
from kvstore.ssd_record import PAGE, padded
from kvstore.ssd_tier import CLOSE_TIMEOUT_S, SsdTier
from kvstore.tiers import Demotion, TierRules, Worth, promotion, tier_events
from kvstore.transfer.server import SegmentServer
from mooncake.errors import InvalidRequest, KVLoadFailed, OutOfBlocks
from mooncake.events import EventLog
from mooncake.types import BlockEvent, BlockKey, Tier

_INLINE_VERIFY_BYTES = 256 << 10  # less is checked faster than a thread is woken
PROMOTER = f"{OWN}ssd"  # the writer of blocks that come back from the SSD


@dataclass(frozen=True, slots=True)
class Sealing:
    """A writer's claim: these bytes are in this slot."""

    grant: Grant
    checksums: Checksums


@dataclass(frozen=True, slots=True)
class Sealed:
    """What became of it. ``is_durable`` only where that was asked for."""

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
        self._promotions: dict[BlockKey, asyncio.Future[bool]] = {}
        self.num_heard = 0  # times that somebody of the board has read, ever
        self._room = asyncio.Event()  # set whenever a slot may have come free
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
        self._anew = Anew(self._index) if not tenant_bytes else None  # quotas count what has a name
        demotion = Demotion(self._worth, self._index, segment.num_blocks)
        self._saving = Saving(ssd, demotion, self._pages, self._on_saved)
        self.ahead = SlotsAhead(
            self._index, server, board, segment.block_bytes, ahead_slots, self._worth.is_saved, self._on_stored
        )
        if ssd is not None:
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
    ) -> list[Offer]:
        """As the index does, and blocks on the SSD are stored too; with ``into_dram`` they get a slot as well where
        there is room. While blocks are being saved, waits up to ``wait_s`` for theirs. Raises InvalidRequest when such
        blocks do not fit a slot, and OutOfBlocks."""
        if not 1 <= length <= self.block_bytes:
            raise InvalidRequest(f"blocks of {length} bytes do not fit slots of {self.block_bytes} bytes", "length")
        if not 1 <= ranges <= length or length % ranges:
            raise InvalidRequest(f"{length} bytes do not divide into {ranges} equal ranges", "ranges")
        self._hear_readers()
        for name in names:
            self._worth.saw(name.key)
        deadline = time.monotonic() + wait_s
        offers = [Offer(is_stored=self._worth.is_saved(name)) for name in names]
        try:
            while True:
                self._room.clear()
                full = self._fill(offers, names, writer, length, ranges, tenant)
                is_short = any(
                    not (offer.grant or offer.is_stored or self._index.is_reserved(name.key))
                    for offer, name in zip(offers, names, strict=True)
                )
                if into_dram and self._anew is not None:
                    is_short |= self._offer_anew(self._anew, offers, names, writer, length, ranges, tenant)
                if is_short and await self._wait_for_room(deadline):
                    continue
                if full is not None and not any(offer.grant for offer in offers):
                    self._index.counters["refused_full"] += 1
                    raise full
                return offers
        except BaseException:  # the writer will never hear of these
            self.abort(offer.grant for offer in offers if offer.grant)
            raise

    async def seal(self, sealings: Sequence[Sealing], durable: bool = False) -> list[Sealed]:
        """Close the slots to their writers, check what is in them, and make readable what is right. With ``durable``,
        return once it is on the SSD too, or cannot be."""
        with self.ahead.alone():
            jobs = [(sealing, self._index.reservation(sealing.grant)) for sealing in sealings]
            self._server.revoke(reserved.grant.slot for _, reserved in jobs if reserved)
        total = sum(reserved.length for _, reserved in jobs if reserved)
        if total <= _INLINE_VERIFY_BYTES:
            verdicts = self._verify(jobs)
        else:
            verdicts = await asyncio.to_thread(self._verify, jobs)
        with self.ahead.alone():  # what is made anew has a name only now
            sealed = [
                self._finish(sealing, is_wrong=reserved is not None and not is_right)
                for (sealing, reserved), is_right in zip(jobs, verdicts, strict=True)
            ]
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
        self._room.set()

    def abort(self, grants: Iterable[Grant]) -> None:
        with self.ahead.alone():
            for grant in grants:
                self.ahead.take_back(grant)
        self._room.set()

    # Reading

    async def acquire(self, keys: Sequence[BlockKey], recompute_ms: float = 0.0, scattered: bool = False) -> Lease:
        """Lease the leading run of ``keys`` that is stored, or with ``scattered`` whatever is stored of them.

        Blocks that are on the SSD alone are loaded first, as far as reading them takes less time than computing them
        does (``recompute_ms`` each; 0: it cannot be done)."""
        self.ahead.catch_up()
        self._hear_readers()
        self._saving.count_sights(keys)
        if self._ssd is None:
            return self._index.acquire(keys, time.monotonic(), scattered)
        self._ssd.touch(reversed(keys))
        with contextlib.ExitStack() as held:
            for key in self._worth_loading(keys, recompute_ms, scattered):
                if not await self._have(key):
                    if scattered:
                        continue
                    break
                if (block := self._index.hold(key)) is not None:  # so that the next ones do not push it out
                    held.callback(self._index.let_go, block)
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
        self._room.set()
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
        self._room.set()
        self._publish()
        if self._ssd is not None and (count or dropped):
            await self._ssd.committed()
        return count

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
        self._room.set()
        self._make_room()

    def _maps_memory(self, writer: str) -> bool:
        return writer in self.ahead or self._server.maps_memory(writer)

    def writer_gone(self, writer: str) -> None:
        """Its last connection ended: it writes no more."""
        self._server.revoke(grant.slot for grant in self._index.writer_gone(writer))
        self._room.set()

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Save what is only in DRAM and would have been saved when it left, then let go of the SSD. Either ends when
        the SSD takes nothing for so long."""
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

    # Sealing

    def _fill(
        self, offers: list[Offer], names: Sequence[BlockName], writer: str, length: int, ranges: int, tenant: str
    ) -> OutOfBlocks | None:
        """Ask the index for the offers that say nothing yet. Returns why there was no room for any of them."""
        waiting = [index for index, offer in enumerate(offers) if not (offer.grant or offer.is_stored)]
        asked = [names[index] for index in waiting]
        try:
            with self.ahead.alone():
                answers = self._index.reserve(asked, writer, length, ranges, time.monotonic(), tenant)
        except OutOfBlocks as error:
            return error
        finally:
            self._saving.save_leaving()
            self._publish()
        for index, offer in zip(waiting, answers, strict=True):
            offers[index] = offer
            if offer.grant is not None:
                self._server.grant([offer.grant.slot], offer.grant.epoch)
        return None

    def _offer_anew(
        self,
        anew: Anew,
        offers: list[Offer],
        names: Sequence[BlockName],
        writer: str,
        length: int,
        ranges: int,
        tenant: str,
    ) -> bool:
        """Slots also for what only the SSD has. Whether there were too few."""
        here = self._index.exists([name.key for name in names])
        lacking = [at for at, offer in enumerate(offers) if offer.is_stored and not here[at]]
        with self.ahead.alone():
            grants = anew.reserve([names[at] for at in lacking], writer, length, ranges, tenant, time.monotonic())
        for at, grant in zip(lacking, grants, strict=False):
            offers[at] = Offer(grant)
            self._server.grant([grant.slot], grant.epoch)
        self._saving.save_leaving()
        self._publish()
        return len(grants) < len(lacking)

    async def _wait_for_room(self, deadline: float) -> bool:
        """Whether it is worth asking again: something that was being saved has left, or may leave now."""
        left = deadline - time.monotonic()
        if left <= 0 or not self._saving.is_busy:
            return False
        try:
            await asyncio.wait_for(self._room.wait(), left)
        except TimeoutError:
            return False
        return True

    def _verify(self, jobs: Sequence[tuple[Sealing, Reserved | None]]) -> list[bool]:
        """Whether each slot holds what its writer says. Of a reservation that is over nobody knows."""
        return [reserved is not None and self._is_right(sealing, reserved) for sealing, reserved in jobs]

    def _is_right(self, sealing: Sealing, reserved: Reserved) -> bool:
        if len(sealing.checksums) != reserved.ranges:
            return False
        data = self._segment.range(reserved.grant.slot, 0, reserved.length)
        return first_mismatch(data, sealing.checksums) is None

    def _finish(self, sealing: Sealing, is_wrong: bool) -> BlockName | None:
        """The block, when it has been sealed. Whatever comes of it, its writer is done: what came too late, or ran out
        while it was verified, leaves a free slot."""
        if not is_wrong and self._anew is not None and sealing.grant in self._anew:
            return self._anew.seal(sealing.grant, sealing.checksums, time.monotonic())
        name = self._index.reserved_name(sealing.grant)
        if not is_wrong and self._index.seal(sealing.grant, sealing.checksums, time.monotonic()):
            return name
        if self._index.abort(sealing.grant) and is_wrong:
            self._index.counters["checksum_mismatches"] += 1
        return None

    # What others learn of

    def _on_stored(self, name: BlockName, is_new: bool) -> None:
        """Somebody has put this block into a slot given ahead."""
        self._worth.saw(name.key)
        if is_new:
            self._saving.copy_if_due(name)

    def _on_saved(self) -> None:
        self._room.set()
        self._publish()

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

    # From the SSD

    def _worth_loading(self, keys: Sequence[BlockKey], recompute_ms: float, scattered: bool) -> list[BlockKey]:
        """What is stored of ``keys`` (of their leading run), as far as what has to be loaded is worth it."""
        assert self._ssd is not None
        ssd, here = self._ssd, self._index.exists(keys)
        found = promotion(keys, here, ssd.length, ssd.load_s, recompute_ms, scattered)
        self._index.counters["promotions_not_worth_it"] += found.was_cut
        return found.run if found.lacking else []

    async def _have(self, key: BlockKey) -> bool:
        """Whether the block is in DRAM, after loading it if need be."""
        if self._index.exists([key])[0]:
            return True
        waiting = self._promotions.get(key)
        if waiting is None:
            waiting = asyncio.ensure_future(self._promote(key))
            self._promotions[key] = waiting
            waiting.add_done_callback(lambda _: self._promotions.pop(key, None))
        return await asyncio.shield(waiting)

    async def _promote(self, key: BlockKey) -> bool:
        """Load a block from the SSD into a slot. False when it cannot be had; it may have been lost then."""
        assert self._ssd is not None
        header = self._ssd.get(key)
        if header is None or header.length > self.block_bytes:
            return False
        name = BlockName(key, header.parent)
        deadline = time.monotonic() + self.lease_s
        grant: Grant | None = None
        while grant is None:
            self._room.clear()
            try:
                with self.ahead.alone():
                    [offer] = self._index.reserve(
                        [name], PROMOTER, header.length, len(header.checksums), time.monotonic(), header.tenant
                    )
                if offer.grant is None:
                    return offer.is_stored
                grant = offer.grant
            except OutOfBlocks:
                self._saving.save_leaving()
                if not await self._wait_for_room(deadline):
                    return False
        self._saving.save_leaving()
        try:
            await self._ssd.load(key, self._pages(grant.slot, header.length))
        except KVLoadFailed:
            self._index.abort(grant)
            self._publish()
            return False
        except BaseException:
            self._index.abort(grant)
            raise
        is_wanted = self._ssd.get(key) is header  # it may have been removed meanwhile
        if not is_wanted or not self._index.seal(grant, header.checksums, time.monotonic()):
            self._index.abort(grant)  # … or the disk took so long that the reservation ran out
            return False
        self._index.counters["promotions"] += 1
        return True

    def _drop_everywhere(self, keys: Iterable[BlockKey]) -> int:
        return self._ssd.drop(keys) if self._ssd is not None else 0

    def _publish(self) -> None:
        """Tell what changed. A block that the SSD lost is still here when DRAM has it."""
        self._events.append(tier_events(self._index, self._ssd.take_left() if self._ssd is not None else ()))


async def _nothing() -> bool:
    return False
