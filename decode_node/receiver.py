"""The receiving end of hand-offs: reserves blocks of the engine, lets one writer fill them, verifies, starts the
sequence.

The table of hand-offs lives on the event loop; the engine's blocks belong to the engine's thread. Every event moves a
hand-off as ``handoff`` says, and the state it reaches determines the next action. Bytes arrive in host memory, and are
copied to a cache on a GPU once they are verified, while other sequences decode.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import insort
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from decode_node.handoff import Handoff, HandoffState, Heard
from kvstore.checksum import digest, range_checksums
from kvstore.transfer.server import SegmentServer
from mooncake.engine.engine import Engine, Reservation, StepOutput
from mooncake.engine.kv_cache import Mirror
from mooncake.engine.loop import EngineThread
from mooncake.engine.sequence import Sequence
from mooncake.errors import (
    ChecksumMismatch,
    HandoffFailed,
    InvalidRequest,
    MooncakeError,
    NodeUnavailable,
    OutOfBlocks,
)
from mooncake.types import KVLayout, SampledToken

log = logging.getLogger(__name__)

ANNOUNCE_WAIT_S = 10.0  # how long a writer may be ahead of the conductor's announcement
RESERVE_RETRY_S = 0.02  # between checks for room while running sequences free theirs
MAX_HANDOFFS = 1024

OnOutput = Callable[[StepOutput | MooncakeError], None]

T = TypeVar("T")


@dataclass(slots=True)
class _Entry:
    """A hand-off that has not ended, or whose blocks are not free yet."""

    handoff: Handoff
    sequence: Sequence
    on_output: OnOutput
    work: asyncio.Task[object] | None = None  # a thread working on its blocks, which must end before they are freed
    giving_up: asyncio.Task[None] | None = None


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
        self._handoffs: dict[str, _Entry] = {}
        self._early: set[tuple[str, asyncio.Event]] = set()  # writers waiting for an announcement
        self._places = count()
        self._line: list[tuple[int, int]] = []  # waiting for room: priority, place
        self._background: set[asyncio.Task[object]] = set()
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
        handoffs = [entry.handoff for entry in self._handoffs.values()]
        return sum(len(handoff.block_ids) for handoff in handoffs if handoff.state is HandoffState.QUARANTINED)

    # Calls from others

    def announce(self, handoff: Handoff, sequence: Sequence, on_output: OnOutput) -> None:
        """The conductor announces this hand-off. Raises InvalidRequest for a duplicate id or an epoch of 0, OutOfBlocks
        when too many are open."""
        if handoff.epoch < 1:  # 0 is what blocks that nobody may write are granted to
            raise InvalidRequest("epochs of hand-offs count from 1", "epoch")
        if handoff.handoff_id in self._handoffs:
            raise InvalidRequest(f"hand-off {handoff.handoff_id} exists already", "handoff_id")
        if len(self._handoffs) >= MAX_HANDOFFS:
            raise OutOfBlocks(f"{MAX_HANDOFFS} hand-offs are open on this node")
        self._handoffs[handoff.handoff_id] = _Entry(handoff, sequence, on_output)
        for awaited, announced in self._early:
            if awaited == handoff.handoff_id:
                announced.set()

    async def open(self, handoff_id: str, epoch: int, writer_id: str, wait_s: float) -> Handoff:
        """Reserve the blocks. Waits for the announcement, then for room, ``wait_s`` in all.

        Raises HandoffFailed when it was given up or never announced, OutOfBlocks when there is no room in time.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        entry = await self._wait_announced(handoff_id, min(wait_s, ANNOUNCE_WAIT_S))
        handoff = entry.handoff
        handoff.check_epoch(epoch)
        handoff.hear(Heard.OPEN)
        handoff.writer_id = writer_id
        try:
            reservation = await self._reserve(entry, deadline)
        except asyncio.CancelledError:  # the blocks may be reserved all the same; its own call says why it ended
            self._hear(entry, Heard.CLOSE)
            raise
        except Exception:
            handoff.hear(Heard.REFUSED)
            raise
        if handoff.hear(Heard.GRANTED) is not HandoffState.RESERVED:  # given up while the engine was reserving
            raise HandoffFailed(f"hand-off {handoff_id} has {handoff.outcome}")
        handoff.first_block, handoff.block_ids = reservation.first_block, list(reservation.block_ids)
        self._server.grant(handoff.block_ids, epoch)
        return handoff

    async def commit(
        self,
        handoff_id: str,
        epoch: int,
        first_tokens: Rows[SampledToken],
        expected: int,
        num_exact: int | None = None,
    ) -> None:
        """All ranges are written: verify them, whose checksums have the ``expected`` digest, and start the sequence,
        with one answer for each of ``first_tokens``. Blocks after the first ``num_exact`` tokens are not shared, nor
        are those that follow.

        Raises HandoffFailed, StaleEpoch, or ChecksumMismatch (the hand-off has failed then).
        """
        entry = self._get(handoff_id)
        handoff = entry.handoff
        handoff.check_epoch(epoch)
        handoff.hear(Heard.COMMIT)
        try:
            is_right = await self._work_on(entry, lambda: self._take_in(handoff.block_ids, expected))
        except asyncio.CancelledError:
            self._hear(entry, Heard.CLOSE)
            raise
        except Exception:
            await self._give_up(entry, Heard.WRONG)
            raise
        if handoff.is_over:  # given up meanwhile
            raise HandoffFailed(f"hand-off {handoff_id} has {handoff.outcome}")
        if not is_right:
            self.checksum_mismatches += 1
            await self._give_up(entry, Heard.WRONG)
            raise ChecksumMismatch(f"hand-off {handoff_id}: bytes differ from what prefill computed")
        handoff.hear(Heard.RIGHT)
        del self._handoffs[handoff_id]
        self.committed += 1
        self._thread.listen(handoff.request_id, entry.on_output)
        # From here it cannot be given up: a cancelled caller must not keep it from starting, only have it aborted
        # afterwards.
        start = self._thread.call(lambda engine: _start(engine, entry, first_tokens, num_exact))
        await asyncio.shield(asyncio.wrap_future(start))

    async def close(self, handoff_id: str, epoch: int, reason: str) -> None:
        """The writer has stopped for good. Idempotent: the hand-off may be over already."""
        entry = self._handoffs.get(handoff_id)
        if entry is None or entry.handoff.epoch != epoch:
            return
        was_over = entry.handoff.is_over
        self._hear(entry, Heard.CLOSE)
        try:
            await self._at_rest(entry)
        finally:
            if not was_over:
                entry.on_output(HandoffFailed(f"the prefill node gave up the hand-off: {reason}"))

    async def abandon(self, handoff: Handoff, is_late: bool) -> None:
        """This side gives up: the client is gone, or the request ``is_late``. Idempotent."""
        entry = self._handoffs.get(handoff.handoff_id)
        if entry is not None and entry.handoff is handoff:
            await self._give_up(entry, Heard.GIVE_UP, is_late=is_late)

    def peer_gone(self, writer_id: str) -> None:
        """A writer's last connection ended: its hand-offs can be neither written nor committed any more."""
        for entry in list(self._handoffs.values()):
            if entry.handoff.writer_id != writer_id:
                continue
            was_over = entry.handoff.is_over
            self._hear(entry, Heard.GONE)
            if entry.handoff.is_over and not was_over:
                entry.on_output(HandoffFailed("the prefill node went away during the hand-off"))

    # The state reached determines the next action

    def _hear(self, entry: _Entry, what: Heard, *, is_late: bool = False) -> None:
        before = entry.handoff.state
        state = entry.handoff.hear(what, is_late=is_late)
        if state is before:
            return
        if state is HandoffState.REVOKING:
            entry.giving_up = self._later(self._revoke(entry))
        elif state is HandoffState.FREEING:
            entry.giving_up = self._later(self._free(entry))

    async def _give_up(self, entry: _Entry, what: Heard, *, is_late: bool = False) -> None:
        self._hear(entry, what, is_late=is_late)
        await self._at_rest(entry)

    async def _at_rest(self, entry: _Entry) -> None:
        """Return once it needs no further action, or waits for its writer. Actions run whether or not a caller
        waits."""
        while entry.giving_up is not None and not entry.giving_up.done():
            await asyncio.shield(entry.giving_up)

    async def _revoke(self, entry: _Entry) -> None:
        await self._work_on(entry, lambda: self._server.revoke(entry.handoff.block_ids))
        if self._server.maps_memory(entry.handoff.writer_id):
            log.debug("hand-off %s: %d blocks quarantined", entry.handoff.handoff_id, len(entry.handoff.block_ids))
            self._hear(entry, Heard.COPYING)
        else:
            self._hear(entry, Heard.REVOKED)

    async def _free(self, entry: _Entry) -> None:
        handoff = entry.handoff
        if entry.work is not None:
            await asyncio.wait([entry.work])
        if handoff.block_ids:  # whoever gets them next is granted them after this
            await asyncio.to_thread(self._server.revoke, handoff.block_ids)
        with contextlib.suppress(NodeUnavailable):  # no engine, no blocks
            await asyncio.wrap_future(self._thread.call(lambda engine: engine.cancel_reserved(handoff.request_id)))
        self._hear(entry, Heard.EMPTIED)
        del self._handoffs[handoff.handoff_id]

    # Single actions

    async def _reserve(self, entry: _Entry, deadline: float) -> Reservation:
        """Once there is no room, waiting is first come, first served: otherwise short prompts would overtake a long
        one for ever."""
        handoff, sequence = entry.handoff, entry.sequence
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
                    raise HandoffFailed(f"hand-off {handoff.handoff_id} has {handoff.outcome}")
        finally:
            if place in self._line:
                self._line.remove(place)

    async def _wait_announced(self, handoff_id: str, wait_s: float) -> _Entry:
        if handoff_id not in self._handoffs:
            writer = (handoff_id, asyncio.Event())
            self._early.add(writer)
            try:
                async with asyncio.timeout(wait_s):
                    await writer[1].wait()
            except TimeoutError:
                raise HandoffFailed(f"hand-off {handoff_id} was not announced within {wait_s:.1f} s") from None
            finally:
                self._early.discard(writer)
        return self._get(handoff_id)

    def _get(self, handoff_id: str) -> _Entry:
        try:
            return self._handoffs[handoff_id]
        except KeyError:
            raise HandoffFailed(f"hand-off {handoff_id} is not known here (any more)") from None

    def _take_in(self, block_ids: list[int], expected: int) -> bool:
        """On a thread: whether the bytes are those that were sent. If so they are in the cache afterwards."""
        self._server.revoke(block_ids)
        memory, num_layers = self._mirror.memory, self._layout.num_layers
        if digest(range_checksums(memory[block].data, num_layers) for block in block_ids) != expected:
            return False
        self._mirror.to_device(block_ids).wait()
        return True

    async def _work_on(self, entry: _Entry, work: Callable[[], T]) -> T:
        """On a thread, always to its end, even when the caller is cancelled."""
        entry.work = task = self._later(asyncio.to_thread(work))
        return await asyncio.shield(task)

    def _later(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _start(engine: Engine, entry: _Entry, first_tokens: Rows[SampledToken], num_exact: int | None) -> None:
    """On the engine's thread. A sequence that cannot start ends here: nobody else would free its blocks."""
    handoff = entry.handoff
    entry.sequence.borrowed.num_exact = num_exact
    try:
        engine.start_reserved(handoff.request_id, first_tokens)
    except MooncakeError as error:
        entry.on_output(error)
        engine.cancel_reserved(handoff.request_id)
        raise
