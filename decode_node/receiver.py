"""The receiving end of hand-offs: reserves blocks of the engine, lets one writer write them, verifies, starts.

The table of hand-offs lives on the event loop; the engine's blocks belong to the engine's thread. Between the two there
is always a question whether a hand-off is still wanted, and it is asked again after every await. Bytes come to host
memory, and go on to a cache on a GPU once they are verified, while other sequences decode.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import insort
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Rows
from itertools import count

import numpy as np

from decode_node.handoff import Handoff, HandoffState
from kvstore.checksum import Checksums, checksums_from_wire, range_checksums
from kvstore.transfer.server import SegmentServer
from mooncake.engine.engine import Engine, Reservation, StepOutput
from mooncake.engine.kv_cache import Mirror
from mooncake.engine.loop import EngineThread
from mooncake.engine.sequence import Sequence
from mooncake.errors import ChecksumMismatch, HandoffFailed, InvalidRequest, MooncakeError, OutOfBlocks
from mooncake.types import KVLayout, SampledToken

log = logging.getLogger(__name__)

ANNOUNCE_WAIT_S = 10.0  # how long a writer may be ahead of the conductor's announcement
RESERVE_RETRY_S = 0.02  # between looks for room while running sequences free theirs
MAX_HANDOFFS = 1024

OnOutput = Callable[[StepOutput | MooncakeError], None]


class Receiver:
    """Hand-offs of one decode node, by id."""

    def __init__(
        self,
        thread: EngineThread,
        server: SegmentServer,
        mirror: Mirror,
        layout: KVLayout,
    ) -> None:
        """``server`` exports the memory of ``mirror``."""
        self._thread = thread
        self._server = server
        self._mirror = mirror
        self._layout = layout
        self._handoffs: dict[str, tuple[Handoff, Sequence, OnOutput]] = {}
        self._announced = asyncio.Condition()
        self._places = count()
        self._line: list[tuple[int, int]] = []  # who waits for room: priority, place
        self._background: set[asyncio.Task[None]] = set()
        self._taking_in: dict[str, asyncio.Task[bool]] = {}  # blocks that are being verified and copied, by hand-off
        self.checksum_mismatches = 0
        self.committed = 0  # hand-offs

    @property
    def num_open(self) -> int:
        return len(self._handoffs)

    @property
    def num_waiting(self) -> int:
        """Hand-offs that wait for room."""
        return len(self._line)

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(len(handoff.block_ids) for handoff, _, _ in self._handoffs.values() if handoff.is_quarantined)

    async def announce(self, handoff: Handoff, sequence: Sequence, on_output: OnOutput) -> None:
        """The conductor wants this hand-off. Raises InvalidRequest for a second one of the same id, OutOfBlocks when
        too many are open."""
        if handoff.handoff_id in self._handoffs:
            raise InvalidRequest(f"hand-off {handoff.handoff_id} exists already", "handoff_id")
        if len(self._handoffs) >= MAX_HANDOFFS:
            raise OutOfBlocks(f"{MAX_HANDOFFS} hand-offs are open on this node")
        self._handoffs[handoff.handoff_id] = (handoff, sequence, on_output)
        async with self._announced:
            self._announced.notify_all()

    async def open(self, handoff_id: str, epoch: int, writer_id: str, wait_s: float) -> Handoff:
        """Reserve the blocks. Waits for the announcement, then for room, ``wait_s`` in all.

        Raises HandoffFailed when it was given up or never announced, OutOfBlocks when there is no room in time.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        handoff, sequence = await self._wait_announced(handoff_id, min(wait_s, ANNOUNCE_WAIT_S))
        handoff.check_epoch(epoch)
        if handoff.state is not HandoffState.ANNOUNCED:
            raise HandoffFailed(f"hand-off {handoff_id} is {handoff.state}")
        handoff.writer_id = writer_id
        reservation = await self._reserve(handoff, sequence, deadline)
        if handoff.is_over:  # given up while the engine was reserving
            await self._free(handoff)
            raise HandoffFailed(f"hand-off {handoff_id} is {handoff.state}")
        handoff.first_block, handoff.block_ids = reservation.first_block, list(reservation.block_ids)
        handoff.move(HandoffState.RESERVED)
        self._server.grant(handoff.block_ids, epoch)
        return handoff

    async def commit(self, handoff_id: str, epoch: int, first_tokens: Rows[SampledToken], checksums: bytes) -> None:
        """All ranges are written: verify them and let the sequence run, one answer for each of ``first_tokens``.

        Raises HandoffFailed, StaleEpoch, or ChecksumMismatch (the hand-off has failed then).
        """
        handoff, _, on_output = self._get(handoff_id)
        handoff.check_epoch(epoch)
        if handoff.state is not HandoffState.RESERVED or handoff_id in self._taking_in:
            raise HandoffFailed(f"hand-off {handoff_id} is {handoff.state}, it cannot be committed")
        self._server.revoke(handoff.block_ids)
        expected = checksums_from_wire(checksums)
        if expected.size != len(handoff.block_ids) * self._layout.num_layers:
            await self._fail(handoff, HandoffState.FAILED, writer_stopped=True)
            raise InvalidRequest("checksums do not fit the blocks of the hand-off", "checksums")
        work = asyncio.create_task(asyncio.to_thread(self._take_in, handoff.block_ids, expected))
        self._taking_in[handoff_id] = work
        work.add_done_callback(lambda _: self._taking_in.pop(handoff_id))
        is_right = await asyncio.shield(work)
        if handoff.is_over:  # given up meanwhile, and freed by whoever gave it up
            raise HandoffFailed(f"hand-off {handoff_id} is {handoff.state}")
        if not is_right:
            self.checksum_mismatches += 1
            await self._fail(handoff, HandoffState.FAILED, writer_stopped=True)
            raise ChecksumMismatch(f"hand-off {handoff_id}: bytes differ from what prefill computed")
        handoff.move(HandoffState.COMMITTED)
        del self._handoffs[handoff_id]

        def start(engine: Engine) -> None:
            engine.start_reserved(handoff.request_id, first_tokens)

        self._thread.listen(handoff.request_id, on_output)
        # It is nobody's to give up any more: who stops waiting now must not keep it from starting, to be aborted then.
        await asyncio.shield(asyncio.wrap_future(self._thread.call(start)))
        self.committed += 1

    async def close(self, handoff_id: str, epoch: int, reason: str) -> None:
        """The writer has stopped for good. Idempotent: the hand-off may be over already."""
        entry = self._handoffs.get(handoff_id)
        if entry is None or entry[0].epoch != epoch:
            return
        handoff, _, on_output = entry
        if handoff.is_over:
            await self._free(handoff)
            return
        await self._fail(handoff, HandoffState.FAILED, writer_stopped=True)
        on_output(HandoffFailed(f"the prefill node gave up the hand-off: {reason}"))

    async def abandon(self, handoff: Handoff, is_late: bool) -> None:
        """This side gives up: the client is gone, or the request ``is_late``. Idempotent."""
        if not handoff.is_over:
            state = HandoffState.EXPIRED if is_late else HandoffState.FAILED
            await self._fail(handoff, state, writer_stopped=False)

    def peer_gone(self, writer_id: str) -> None:
        """A writer's last connection ended: what it held can neither be written nor committed any more."""
        for handoff, _, on_output in list(self._handoffs.values()):
            if handoff.writer_id != writer_id:
                continue
            if handoff.is_quarantined:
                self._later(self._free(handoff))
            elif handoff.state is HandoffState.RESERVED:
                self._later(self._fail(handoff, HandoffState.FAILED, writer_stopped=True))
                on_output(HandoffFailed("the prefill node went away during the hand-off"))

    async def _reserve(self, handoff: Handoff, sequence: Sequence, deadline: float) -> Reservation:
        """Once there is no room, first come is first served: short prompts would overtake a long one for ever."""
        place = (sequence.priority, next(self._places))
        refusal = OutOfBlocks("others wait for room before it")
        try:
            while True:
                if not self._line or place <= self._line[0]:
                    try:
                        return await asyncio.wrap_future(self._thread.call(lambda engine: engine.reserve(sequence)))
                    except OutOfBlocks as error:
                        refusal = error
                if place not in self._line:
                    insort(self._line, place)
                if asyncio.get_running_loop().time() + RESERVE_RETRY_S > deadline:
                    raise refusal
                await asyncio.sleep(RESERVE_RETRY_S)
                if handoff.is_over:
                    raise HandoffFailed(f"hand-off {handoff.handoff_id} is {handoff.state}")
        finally:
            if place in self._line:
                self._line.remove(place)

    async def _wait_announced(self, handoff_id: str, wait_s: float) -> tuple[Handoff, Sequence]:
        try:
            async with asyncio.timeout(wait_s), self._announced:
                await self._announced.wait_for(lambda: handoff_id in self._handoffs)
        except TimeoutError:
            raise HandoffFailed(f"hand-off {handoff_id} was not announced within {wait_s:.1f} s") from None
        handoff, sequence, _ = self._handoffs[handoff_id]
        return handoff, sequence

    def _get(self, handoff_id: str) -> tuple[Handoff, Sequence, OnOutput]:
        try:
            return self._handoffs[handoff_id]
        except KeyError:
            raise HandoffFailed(f"hand-off {handoff_id} is not known here (any more)") from None

    async def _fail(self, handoff: Handoff, state: HandoffState, *, writer_stopped: bool) -> None:
        """End without a commit. Blocks that may still be written to are quarantined until the writer has stopped."""
        was_reserved = handoff.state is HandoffState.RESERVED
        handoff.move(state)
        await asyncio.shield(self._later(self._give_up(handoff, was_reserved, writer_stopped)))

    async def _give_up(self, handoff: Handoff, was_reserved: bool, writer_stopped: bool) -> None:
        if was_reserved:
            await asyncio.to_thread(self._server.revoke, handoff.block_ids)
        if was_reserved and not writer_stopped and self._server.maps_memory(handoff.writer_id):
            handoff.is_quarantined = True
            log.debug("hand-off %s: %d blocks quarantined", handoff.handoff_id, len(handoff.block_ids))
        else:
            await self._free(handoff)

    def _take_in(self, block_ids: list[int], expected: Checksums) -> bool:
        """On a thread: whether the bytes are those that were sent. They are in the cache then."""
        memory, num_layers = self._mirror.memory, self._layout.num_layers
        parts = [range_checksums(memory[block].data, num_layers) for block in block_ids]
        if parts and not np.array_equal(np.concatenate(parts), expected):
            return False
        self._mirror.to_device(block_ids).wait()
        return True

    async def _free(self, handoff: Handoff) -> None:
        """Also when whoever waits for it stops waiting: nobody else would do it."""
        await asyncio.shield(self._later(self._let_go(handoff)))

    async def _let_go(self, handoff: Handoff) -> None:
        if work := self._taking_in.get(handoff.handoff_id):  # still writing into the cache
            await asyncio.wait([work])
        handoff.is_quarantined = False
        self._handoffs.pop(handoff.handoff_id, None)
        await asyncio.wrap_future(self._thread.call(lambda engine: engine.cancel_reserved(handoff.request_id)))

    def _later(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
