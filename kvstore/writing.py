"""Writes into a store's DRAM block by block: slots are reserved, filled by the writer, and sealed or aborted.

Everything here runs on the store's event loop, except the checksums of large seals, which a thread computes. It knows
neither who reads blocks, nor what happens to them once they are readable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.checksum import Checksums, first_mismatch
from kvstore.index.store_index import StoreIndex
from kvstore.index.types import BlockName, Grant, Offer, Reserved
from kvstore.segment import Segment
from kvstore.slots_ahead import SlotsAhead
from kvstore.tiers.decisions import Worth
from kvstore.tiers.recomputed import Recomputed
from kvstore.tiers.saving import Saving
from kvstore.transfer.owner.server import SegmentServer
from mooncake.errors import OutOfBlocks

_INLINE_VERIFY_BYTES = 256 << 10  # below this, verifying is faster than waking a thread


@dataclass(frozen=True, slots=True)
class Sealing:
    """A writer's claim that these bytes are in this slot."""

    grant: Grant
    checksums: Checksums


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks that a writer wants slots for, all of ``length`` bytes in ``ranges`` equal parts. With ``into_dram``
    also for blocks only on the SSD. The writer may choose a ``number``, to refer to them (``Store.abort_numbers``) if
    it never receives the answer."""

    names: Sequence[BlockName]
    writer: str
    length: int
    ranges: int
    tenant: str = ""
    into_dram: bool = False
    number: int = 0


class Writing:
    """Errors are those of the index."""

    def __init__(
        self,
        segment: Segment,
        server: SegmentServer,
        index: StoreIndex,
        ahead: SlotsAhead,
        worth: Worth,
        saving: Saving,
        recomputed: Recomputed | None,
        publish: Callable[[], object],
    ) -> None:
        """Without ``recomputed`` nobody gets a slot for what is on the SSD. ``publish`` is called when something may
        have been evicted."""
        self._segment = segment
        self._server = server
        self._index = index
        self._ahead = ahead
        self._worth = worth
        self._saving = saving
        self._recomputed = recomputed
        self._publish = publish

    async def reserve(self, wanted: Wanted, wait_s: float) -> list[Offer]:
        """See ``Store.reserve``."""
        for name in wanted.names:
            self._worth.saw(name.key)
        deadline = time.monotonic() + wait_s
        offers = [Offer(is_stored=self._worth.is_saved(name)) for name in wanted.names]
        try:
            while True:
                full = self._fill(offers, wanted)
                is_short = self._is_short(offers, wanted)
                if wanted.into_dram and self._recomputed is not None:
                    is_short |= self._offer_recomputed(self._recomputed, offers, wanted)
                if is_short and await self._saving.wait_for_room(deadline):
                    continue
                if full is not None and not any(offer.grant for offer in offers):
                    self._index.counters["refused_full"] += 1
                    raise full
                self._index.reservations.note_number((offer.grant for offer in offers if offer.grant), wanted.number)
                return offers
        except BaseException:  # the writer will never learn of these
            self.abort(offer.grant for offer in offers if offer.grant)
            raise

    def _is_short(self, offers: Sequence[Offer], wanted: Wanted) -> bool:
        """Whether some block is neither stored, nor offered a slot, nor being written by others."""
        return any(
            not (offer.grant or offer.is_stored or self._index.reservations.is_reserved(name.key))
            for offer, name in zip(offers, wanted.names, strict=True)
        )

    async def seal(self, sealings: Sequence[Sealing]) -> list[BlockName | None]:
        """Close the slots to their writers, verify their content, and make it readable if correct. Returns those
        blocks."""
        with self._ahead.alone():
            jobs = [(sealing, self._index.reservations.get(sealing.grant)) for sealing in sealings]
            self._server.revoke(reserved.grant.slot for _, reserved in jobs if reserved)
        total = sum(reserved.length for _, reserved in jobs if reserved)
        if total <= _INLINE_VERIFY_BYTES:
            verdicts = self._verify(jobs)
        else:
            verdicts = await asyncio.to_thread(self._verify, jobs)
        with self._ahead.alone():  # what is recomputed gets its name only now
            return [
                self._finish(sealing, is_wrong=reserved is not None and not is_right)
                for (sealing, reserved), is_right in zip(jobs, verdicts, strict=True)
            ]

    def abort(self, grants: Iterable[Grant]) -> None:
        """The writers are done with these slots for good."""
        with self._ahead.alone():
            for grant in grants:
                self._ahead.take_back(grant)
        self._saving.room_came()

    def _fill(self, offers: list[Offer], wanted: Wanted) -> OutOfBlocks | None:
        """Ask the index about offers still undecided. Returns why there was no room for any of them."""
        waiting = [at for at, offer in enumerate(offers) if not (offer.grant or offer.is_stored)]
        names = [wanted.names[at] for at in waiting]
        try:
            with self._ahead.alone():
                answers = self._index.reserve(
                    names, wanted.writer, wanted.length, wanted.ranges, time.monotonic(), wanted.tenant
                )
        except OutOfBlocks as error:
            return error
        finally:
            self._saving.save_leaving()
            self._publish()
        for at, offer in zip(waiting, answers, strict=True):
            offers[at] = offer
            if offer.grant is not None:
                self._server.grant([offer.grant.slot], offer.grant.epoch)
        return None

    def _offer_recomputed(self, recomputed: Recomputed, offers: list[Offer], wanted: Wanted) -> bool:
        """Slots also for blocks only on the SSD. Returns whether there were too few."""
        here = self._index.exists([name.key for name in wanted.names])
        lacking = [at for at, offer in enumerate(offers) if offer.is_stored and not here[at]]
        names = [wanted.names[at] for at in lacking]
        with self._ahead.alone():
            grants = recomputed.reserve(
                names, wanted.writer, wanted.length, wanted.ranges, wanted.tenant, time.monotonic()
            )
        for at, grant in zip(lacking, grants, strict=False):
            offers[at] = Offer(grant)
            self._server.grant([grant.slot], grant.epoch)
        self._saving.save_leaving()
        self._publish()
        return len(grants) < len(lacking)

    def _verify(self, jobs: Sequence[tuple[Sealing, Reserved | None]]) -> list[bool]:
        """Whether each slot holds what its writer claims; False if its reservation is over."""
        return [reserved is not None and self._is_right(sealing, reserved) for sealing, reserved in jobs]

    def _is_right(self, sealing: Sealing, reserved: Reserved) -> bool:
        if len(sealing.checksums) != reserved.ranges:
            return False
        data = self._segment.range(reserved.grant.slot, 0, reserved.length)
        return first_mismatch(data, sealing.checksums) is None

    def _finish(self, sealing: Sealing, is_wrong: bool) -> BlockName | None:
        """The block, if it has been sealed. Either way its writer is done: a seal that came too late, or expired
        during verification, leaves a free slot."""
        if not is_wrong and self._recomputed is not None and sealing.grant in self._recomputed:
            return self._recomputed.seal(sealing.grant, sealing.checksums, time.monotonic())
        name = self._index.reservations.name_of(sealing.grant)
        if not is_wrong and self._index.seal(sealing.grant, sealing.checksums, time.monotonic()):
            return name
        if self._index.reservations.abort(sealing.grant) and is_wrong:
            self._index.counters["checksum_mismatches"] += 1
        return None
