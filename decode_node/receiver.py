"""The receiving end of hand-offs: reserves blocks of the engine, lets one writer fill them, verifies, starts the
sequence.

Hand-offs live on the event loop; the engine's blocks belong to the engine's thread. Every event moves a hand-off as the
table in ``handoff`` says, and the state it reaches determines the next action. Bytes arrive in host memory, and are
copied to a cache on a GPU once they are verified, while other sequences decode.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

from decode_node.handoff import BEING_COMPUTED, Handoff, HandoffEvent, HandoffState
from decode_node.reservations import ReservationQueue
from kvstore.checksum import digest, range_checksums
from kvstore.transfer.owner.server import SegmentServer
from mooncake.engine.cache.kv_cache import Mirror
from mooncake.engine.engine import Engine
from mooncake.engine.loop import EngineThread, OnOutput
from mooncake.engine.sequence import Sequence
from mooncake.errors import (
    ChecksumMismatch,
    HandoffFailed,
    InvalidRequest,
    NodeUnavailable,
    OutOfBlocks,
    as_ours,
)
from mooncake.types import KVLayout, SampledToken

log = logging.getLogger(__name__)

ANNOUNCE_WAIT_S = 10.0  # how long a writer may be ahead of the conductor's announcement
PATIENCE = 3.0  # times as long as it was predicted to take, a prompt may take and still count as being computed,
PATIENCE_S = 1.0  # and this much longer
MAX_HANDOFFS = 1024  # open at once; further ones are refused

T = TypeVar("T")


@dataclass(slots=True)
class _OpenHandoff:
    """A hand-off that has not ended, or whose blocks are not free yet."""

    handoff: Handoff
    sequence: Sequence
    on_output: OnOutput
    expected_s: float  # for which its prompt was predicted to queue and be computed; 0: nobody knows
    late_at: float = math.inf  # when that takes too long to be believed (monotonic, s)
    work: asyncio.Task[object] | None = None  # a thread working on its blocks, which must end before they are freed
    clean_up: asyncio.Task[None] | None = None  # revoking its writer's access, or freeing its blocks

    def __post_init__(self) -> None:
        self.is_heard()

    def is_heard(self) -> None:
        """Its prompt makes progress."""
        if self.expected_s:
            self.late_at = time.monotonic() + PATIENCE * self.expected_s + PATIENCE_S


class Receiver:
    """Hand-offs of one decode node, by id."""

    def __init__(self, thread: EngineThread, server: SegmentServer, mirror: Mirror, layout: KVLayout) -> None:
        """``server`` exports the memory of ``mirror``."""
        self._thread = thread
        self._server = server
        self._mirror = mirror
        self._layout = layout
        self._handoffs: dict[str, _OpenHandoff] = {}
        self._early_writers: set[tuple[str, asyncio.Event]] = set()  # waiting for an announcement
        self._reservations = ReservationQueue(thread)
        self._background: set[asyncio.Task[object]] = set()
        self.checksum_mismatches = 0
        self.committed = 0  # hand-offs

    @property
    def num_open(self) -> int:
        return len(self._handoffs)

    @property
    def awaits_prompts(self) -> bool:
        """Whether prompts queue or are computed for this node, as far as it can see: one that takes much longer than
        was predicted may be on a node that hangs. May be called from any thread."""
        now, entries = time.monotonic(), list(self._handoffs.values())
        return any(now < entry.late_at and entry.handoff.state in BEING_COMPUTED for entry in entries)

    @property
    def num_waiting(self) -> int:
        """Hand-offs that wait for room."""
        return len(self._reservations)

    @property
    def num_quarantined_blocks(self) -> int:
        handoffs = [entry.handoff for entry in self._handoffs.values()]
        return sum(len(handoff.block_ids) for handoff in handoffs if handoff.state is HandoffState.QUARANTINED)

    # Calls

    def announce(self, handoff: Handoff, sequence: Sequence, on_output: OnOutput, expected_s: float = 0.0) -> None:
        """The conductor announces this hand-off, and how long its prompt takes (0: unknown). Raises InvalidRequest for
        a duplicate id or an epoch of 0, OutOfBlocks when too many are open."""
        if handoff.epoch < 1:  # 0 is what blocks that nobody may write are granted to
            raise InvalidRequest("epochs of hand-offs count from 1", "epoch")
        if handoff.handoff_id in self._handoffs:
            raise InvalidRequest(f"hand-off {handoff.handoff_id} exists already", "handoff_id")
        if len(self._handoffs) >= MAX_HANDOFFS:
            raise OutOfBlocks(f"{MAX_HANDOFFS} hand-offs are open on this node")
        self._handoffs[handoff.handoff_id] = _OpenHandoff(handoff, sequence, on_output, expected_s)
        for awaited, announced in self._early_writers:
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
        handoff.apply(HandoffEvent.OPEN)
        handoff.writer_id = writer_id
        try:
            reservation = await self._reservations.reserve(entry.sequence, deadline, lambda: _check_open(handoff))
        except asyncio.CancelledError:  # the blocks may be reserved all the same; its own call says why it ended
            self._apply(entry, HandoffEvent.CLOSE)
            raise
        except Exception:
            handoff.apply(HandoffEvent.REFUSED)
            raise
        handoff.apply(HandoffEvent.GRANTED)
        entry.is_heard()
        _check_open(handoff)  # it may have been given up while the engine was reserving
        handoff.first_block, handoff.block_ids = reservation.first_block, list(reservation.block_ids)
        self._server.grant(handoff.block_ids, epoch)
        return handoff

    async def commit(
        self,
        handoff_id: str,
        epoch: int,
        first_tokens: list[SampledToken],
        expected_digest: int,
        num_exact: int | None = None,
    ) -> None:
        """Everything is written: verify its checksums by their digest, and start the sequence, with one answer for each
        of ``first_tokens``. Blocks that end after the first ``num_exact`` tokens (None: all) are shared with nobody.

        Raises HandoffFailed, StaleEpoch, or ChecksumMismatch (the hand-off has failed then).
        """
        entry = self._get(handoff_id)
        handoff = entry.handoff
        handoff.check_epoch(epoch)
        handoff.apply(HandoffEvent.COMMIT)
        try:
            is_verified = await self._run_on_thread(entry, lambda: self._verify(handoff.block_ids, expected_digest))
        except asyncio.CancelledError:
            self._apply(entry, HandoffEvent.CLOSE)
            raise
        except Exception:
            await self._apply_and_wait(entry, HandoffEvent.MISMATCHED)
            raise
        _check_open(handoff)
        if not is_verified:
            self.checksum_mismatches += 1
            await self._apply_and_wait(entry, HandoffEvent.MISMATCHED)
            raise ChecksumMismatch(f"hand-off {handoff_id}: bytes differ from what prefill computed")
        handoff.apply(HandoffEvent.VERIFIED)
        del self._handoffs[handoff_id]
        self.committed += 1
        self._thread.listen(handoff.handoff_id, entry.on_output)
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
        self._apply(entry, HandoffEvent.CLOSE)
        try:
            await self._wait_settled(entry)
        finally:
            if not was_over:
                entry.on_output(HandoffFailed(f"the prefill node gave up the hand-off: {reason}"))

    async def cancel(self, handoff: Handoff, is_late: bool) -> None:
        """This side gives up: the client is gone, or the request ``is_late``. Idempotent."""
        entry = self._handoffs.get(handoff.handoff_id)
        if entry is not None and entry.handoff is handoff:
            await self._apply_and_wait(entry, HandoffEvent.CANCEL, is_late=is_late)

    def peer_gone(self, writer_id: str) -> None:
        """A writer's last connection ended: its hand-offs can be neither written nor committed any more, unless it is
        back."""
        if self._server.is_connected(writer_id):
            return
        for entry in list(self._handoffs.values()):
            if entry.handoff.writer_id != writer_id:
                continue
            was_over = entry.handoff.is_over
            self._apply(entry, HandoffEvent.DISCONNECTED)
            if entry.handoff.is_over and not was_over:
                entry.on_output(HandoffFailed("the prefill node went away during the hand-off"))

    # Events: the state reached determines the next action

    def _apply(self, entry: _OpenHandoff, event: HandoffEvent, *, is_late: bool = False) -> None:
        before = entry.handoff.state
        state = entry.handoff.apply(event, is_late=is_late)
        if state is before:
            return
        if state is HandoffState.REVOKING:
            entry.clean_up = self._start_task(self._revoke(entry))
        elif state is HandoffState.FREEING:
            entry.clean_up = self._start_task(self._free(entry))

    async def _apply_and_wait(self, entry: _OpenHandoff, event: HandoffEvent, *, is_late: bool = False) -> None:
        self._apply(entry, event, is_late=is_late)
        await self._wait_settled(entry)

    async def _wait_settled(self, entry: _OpenHandoff) -> None:
        """Return once nothing more is to be done, or only its writer is awaited. Actions run whether or not a caller
        waits."""
        while entry.clean_up is not None and not entry.clean_up.done():
            await asyncio.shield(entry.clean_up)

    async def _revoke(self, entry: _OpenHandoff) -> None:
        await self._run_on_thread(entry, lambda: self._server.revoke(entry.handoff.block_ids))
        if self._server.maps_memory(entry.handoff.writer_id):
            log.debug("hand-off %s: %d blocks quarantined", entry.handoff.handoff_id, len(entry.handoff.block_ids))
            self._apply(entry, HandoffEvent.COPYING)
        else:
            self._apply(entry, HandoffEvent.REVOKED)

    async def _free(self, entry: _OpenHandoff) -> None:
        handoff = entry.handoff
        if entry.work is not None:
            await asyncio.wait([entry.work])
        if handoff.block_ids:  # before they are granted to anybody else
            await asyncio.to_thread(self._server.revoke, handoff.block_ids)
        with contextlib.suppress(NodeUnavailable):  # no engine, no blocks
            await asyncio.wrap_future(self._thread.call(lambda engine: engine.cancel_reserved(handoff.handoff_id)))
        self._apply(entry, HandoffEvent.RELEASED)
        del self._handoffs[handoff.handoff_id]

    # Actions

    async def _wait_announced(self, handoff_id: str, wait_s: float) -> _OpenHandoff:
        if handoff_id not in self._handoffs:
            writer = (handoff_id, asyncio.Event())
            self._early_writers.add(writer)
            try:
                async with asyncio.timeout(wait_s):
                    await writer[1].wait()
            except TimeoutError:
                raise HandoffFailed(f"hand-off {handoff_id} was not announced within {wait_s:.1f} s") from None
            finally:
                self._early_writers.discard(writer)
        return self._get(handoff_id)

    def _get(self, handoff_id: str) -> _OpenHandoff:
        try:
            return self._handoffs[handoff_id]
        except KeyError:
            raise HandoffFailed(f"hand-off {handoff_id} is not known here (any more)") from None

    def _verify(self, block_ids: list[int], expected_digest: int) -> bool:
        """On a thread: whether the bytes are those that were sent. If so they are in the cache afterwards."""
        self._server.revoke(block_ids)
        memory, num_layers = self._mirror.memory, self._layout.num_layers
        if digest(range_checksums(memory[block].data, num_layers) for block in block_ids) != expected_digest:
            return False
        self._mirror.to_device(block_ids).wait()
        return True

    async def _run_on_thread(self, entry: _OpenHandoff, work: Callable[[], T]) -> T:
        """On a thread, always to its end, even when the caller is cancelled."""
        entry.work = task = self._start_task(asyncio.to_thread(work))
        return await asyncio.shield(task)

    def _start_task(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _check_open(handoff: Handoff) -> None:
    """Raises HandoffFailed if it was given up, or has been committed."""
    if handoff.is_over:
        raise HandoffFailed(f"hand-off {handoff.handoff_id} has {handoff.outcome}")


def _start(engine: Engine, entry: _OpenHandoff, first_tokens: list[SampledToken], num_exact: int | None) -> None:
    """On the engine's thread. A sequence that cannot start ends here: nobody else would free its blocks."""
    handoff = entry.handoff
    entry.sequence.reused.num_exact = num_exact
    try:
        engine.start_reserved(handoff.handoff_id, first_tokens)
    except Exception as error:
        entry.on_output(as_ours(error, f"starting hand-off {handoff.handoff_id}"))
        engine.cancel_reserved(handoff.handoff_id)
        engine.abort(handoff.handoff_id)  # if it runs already
        raise
