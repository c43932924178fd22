"""A store reached over TCP: whole blocks are fetched and put by key, with one message each way.

A fetch takes no lease. The store's data plane sends the checksums it has listed, then the bytes from their slot; a
block that leaves its slot meanwhile arrives corrupt, which the checksums show, and is then requested with a lease. So
is everything else that cannot be done this way: none of it is an error here.

A call waits on the event loop for as long as a nearby store takes (``PROMPT_S``, plus the time of the bytes), because
yielding and switching threads cost more than the answer. What takes longer continues in a thread, and while answers are
late, further calls start there. Each call has a connection to itself; there are a few, opened on demand. The threads
belong to this store alone, so one that hangs affects nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence

from kvstore.checksum import Checksums
from kvstore.client.calls import left_s
from kvstore.client.types import Reservation, room_in
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.keyed import MAX_KEYS, KeyedWire, Step, can_put
from kvstore.transfer.protocol import MAX_NAME_BYTES, ProtocolViolation, Status
from kvstore.transfer.sockets import PeerClosed
from kvstore.transfer.transport import NotAllowed, PathFailed
from kvstore.waiting import to_its_end
from mooncake.errors import DeadlineExceeded, InvalidRequest, StaleEpoch
from mooncake.threads import Threads
from mooncake.types import SegmentAddress

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4
PROMPT_S = 0.002  # how long a nearby store may take to answer, besides the bytes,
PROMPT_BYTES_PER_S = 2e9  # which come at least at this rate
PROMPT_BYTES = 4 << 20  # more is moved in a thread: at that rate these take 2 ms of the event loop
OPEN_TIMEOUT_S = 2.0  # for a connection: nobody can stop its thread meanwhile, for which a program's exit waits, too
AGAIN_AFTER_S = 1.0  # after a connection failed, or two puts in a row found no slot


class FarStore:
    """Belongs to the client's event loop. Does nothing until ``open``."""

    def __init__(self, transfer: TransferEngine, tenant: str) -> None:
        self._transfer = transfer
        self._tenant = tenant
        self._segment: SegmentAddress | None = None
        self._idle: list[KeyedWire] = []
        self._turn = asyncio.Semaphore(MAX_CONNECTIONS)
        self._threads = Threads(MAX_CONNECTIONS, "store")  # one per turn: nobody queues
        self._is_prompt = True
        self._not_before_s = 0.0
        self._refusal = ""
        self._takes_puts = True
        self._num_refused = 0  # consecutive puts without a slot
        self._no_puts_before_s = 0.0

    def open(self, segment: SegmentAddress) -> None:
        """The store's segment. Another incarnation needs new connections."""
        if segment != self._segment:
            self._close_idle()
            self._segment, self._takes_puts, self._not_before_s, self._refusal = segment, True, 0.0, ""

    def close(self) -> None:
        self._segment = None
        self._close_idle()
        self._threads.shutdown(wait=False)

    async def knock(self, deadline: float) -> None:
        """Open a connection in advance. Raises InvalidRequest when the store refuses us."""
        with contextlib.suppress(DeadlineExceeded):
            async with self._exchange(deadline):
                pass
        if self._refusal:
            raise InvalidRequest(self._refusal, "secret")

    @property
    def is_open(self) -> bool:
        return self._segment is not None and time.monotonic() >= self._not_before_s

    async def get(self, key: bytes, into: memoryview, deadline: float) -> int | None:
        """``read`` for one block. ``into`` has at most PROMPT_BYTES; raises InvalidRequest when it is too short."""
        async with self._exchange(deadline) as connection:
            if connection is not None:
                get = connection.get(key, into)
                await self._go(connection, get.go, deadline, into.nbytes)
                room_in(into, get.length)
                return get.length if get.length and get.is_right else None
        return None

    async def read(
        self, keys: Sequence[bytes], room: Callable[[int, int], memoryview], deadline: float
    ) -> list[int | None]:
        """The lengths of blocks that arrived intact. None for the rest: not listed, changed on the way, or no
        answer."""
        lengths: list[int | None] = [None] * len(keys)
        for start in range(0, len(keys), MAX_KEYS):
            async with self._exchange(deadline) as connection:
                if connection is None:
                    break
                fetch = connection.fetch(keys[start : start + MAX_KEYS])
                await self._go(connection, fetch.ask, deadline)
                here = [(start + index, *found) for index, found in enumerate(fetch.found()) if found[0]]
                into = [(room(index, length), ranges) for index, length, ranges in here]
                nbytes = sum(length for _, length, _ in here)
                await self._go(connection, fetch.receive(into), deadline, nbytes)
                for (index, length, _), is_right in zip(here, fetch.is_right, strict=True):
                    lengths[index] = length if is_right else None
        return lengths

    async def exists(self, keys: Sequence[bytes], deadline: float) -> list[bool | None]:
        """Whether each is stored. None for what only the store itself can say, or without an answer."""
        known: list[bool | None] = [None] * len(keys)
        for start in range(0, len(keys), MAX_KEYS):
            async with self._exchange(deadline) as connection:
                if connection is None:
                    break
                ask = connection.ask(keys[start : start + MAX_KEYS])
                await self._go(connection, ask.send, deadline)
                known[start : start + MAX_KEYS] = ask.known()
        return known

    async def put(self, name: tuple[bytes, bytes], view: memoryview, ranges: int, deadline: float) -> bool | None:
        """True when it is stored, False when another writer is writing it. None when it must be reserved first."""
        segment = self._segment
        if segment is None or not self._can_put(segment, name, view.nbytes, ranges):
            return None
        async with self._exchange(deadline) as connection:
            if connection is not None:
                put = connection.put(*name, self._tenant, view, ranges)
                await self._go(connection, put.send, deadline, view.nbytes)
                return self._outcome(put.status())
        return None

    async def commit(
        self, name: tuple[bytes, bytes], slot: Reservation, length: int, sums: Checksums, deadline: float
    ) -> Status | None:
        """Name a block that is in one of our slots. None without an answer; the store may have received it."""
        async with self._exchange(deadline) as connection:
            if connection is not None:
                commit = connection.commit(*name, self._tenant, slot.index, slot.epoch, length, sums)
                await self._go(connection, commit.send, deadline)
                return commit.status()
        return None

    def _can_put(self, segment: SegmentAddress, name: tuple[bytes, bytes], nbytes: int, ranges: int) -> bool:
        is_open = self._takes_puts and time.monotonic() >= self._no_puts_before_s
        is_short = sum(map(len, name)) + len(self._tenant.encode()) + 6 <= MAX_NAME_BYTES
        return is_open and is_short and nbytes <= segment.block_bytes and can_put(nbytes, ranges)

    def _outcome(self, status: Status) -> bool | None:
        self._takes_puts = status is not Status.NOT_OFFERED
        self._num_refused = self._num_refused + 1 if status is Status.NO_SLOT else 0
        if self._num_refused > 1:
            self._num_refused, self._no_puts_before_s = 0, time.monotonic() + AGAIN_AFTER_S
        return {Status.OK: True, Status.REFUSED: False}.get(status)

    @contextlib.asynccontextmanager
    async def _exchange(self, deadline: float) -> AsyncIterator[KeyedWire | None]:
        """A connection for one exchange; None when none is available. An owner that disconnects or violates the
        protocol ends the exchange without an error, and is not used for a while. Raises DeadlineExceeded."""
        connection = await self._take(deadline)
        is_whole = False
        try:
            yield connection
            is_whole = True
        except (OSError, ProtocolViolation) as error:
            self._forsake(error)
        finally:
            if connection is not None and is_whole and self._segment is not None:
                self._idle.append(connection)
            elif connection is not None:  # a message was interrupted, so the stream is out of step
                connection.close()
            self._turn.release()

    async def _take(self, deadline: float) -> KeyedWire | None:
        """A turn, which lasts until the exchange ends, and a connection if there is one. Raises DeadlineExceeded."""
        await self._take_turn(deadline)
        segment = self._segment
        if self._idle:
            return self._idle.pop()
        if segment is None or not self.is_open:
            return None
        loop, soon = asyncio.get_running_loop(), min(deadline, time.monotonic() + OPEN_TIMEOUT_S)
        connecting = loop.run_in_executor(self._threads, self._transfer.connect_keyed, segment, soon)
        try:
            return await asyncio.shield(connecting)
        except NotAllowed as error:
            log.warning("blocks are not requested by key: %s", error)
            self._refusal, self._not_before_s = str(error), math.inf
            return None
        except (PathFailed, StaleEpoch) as error:
            self._forsake(error)
            return None
        except DeadlineExceeded as error:
            if soon < deadline:
                self._forsake(error)
                return None
            self._turn.release()
            raise
        except asyncio.CancelledError:
            connecting.add_done_callback(self._end_late)  # until then one thread is missing
            raise
        except BaseException:
            self._turn.release()
            raise

    async def _take_turn(self, deadline: float) -> None:
        if not self._turn.locked():
            await self._turn.acquire()
            return
        try:
            async with asyncio.timeout(left_s(deadline)):
                await self._turn.acquire()
        except TimeoutError:
            raise DeadlineExceeded("this call timed out waiting for others to the same store") from None

    def _end_late(self, connecting: asyncio.Future[KeyedWire]) -> None:
        self._turn.release()
        if not connecting.cancelled() and connecting.exception() is None:
            connecting.result().close()

    def _forsake(self, error: Exception) -> None:
        log.debug("no requests by key to %s: %s", self._segment and self._segment.node_id, error)
        self._not_before_s = time.monotonic() + AGAIN_AFTER_S
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _go(self, connection: KeyedWire, step: Step, deadline: float, nbytes: int = 0) -> None:
        """Run it here, or in a thread. Does not return while bytes move, even when cancelled."""
        prompt_s, is_short = PROMPT_S + nbytes / PROMPT_BYTES_PER_S, nbytes <= PROMPT_BYTES
        if is_short and self._is_prompt:
            try:
                step(min(deadline, time.monotonic() + prompt_s))
                return
            except DeadlineExceeded:
                self._is_prompt = False
                left_s(deadline)
        if self._segment is None:
            raise PeerClosed("this client of the store has been closed")
        started = time.monotonic()
        running = asyncio.get_running_loop().run_in_executor(self._threads, step, deadline)
        await to_its_end(running, connection.shut)
        if is_short:
            self._is_prompt = time.monotonic() - started < prompt_s
