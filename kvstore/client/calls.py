"""How a client's calls reach its store, by gRPC or by fast RPC where available, and messages it does not wait for.

The ends of reservations and leases are sent from here: a store that missed one must be told again, or times out by
itself. This module does not know how bytes move.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Sequence, Sized
from itertools import zip_longest
from typing import TypeVar

import grpc

from kvstore.client.types import Lease, Reservation, in_batches, reservations_from_wire, slot_to_wire
from kvstore.fast_rpc import FastRpc
from mooncake.addresses import split_address
from mooncake.errors import (
    CallerError,
    DeadlineExceeded,
    MooncakeError,
    NodeUnavailable,
    OutOfMemory,
    TryLater,
)
from mooncake.rpc import store_pb2 as pb
from mooncake.rpc import store_pb2_grpc
from mooncake.rpc.errors import error_from_rpc
from mooncake.rpc.server import Channels

DEFAULT_TIMEOUT_S = 5.0
MAX_OWED = 4096  # beyond that the oldest are held until our connections end
LOOK_AGAIN_S, MAX_LOOK_AGAIN_S = 1.0, 30.0  # before looking for a fast RPC again, doubled while it refuses
REPEAT_OWED_AFTER_S = 1.0
UNHEARD_S = 60.0  # how long after its caller has gone an answer may still arrive
END_LEASES_AFTER_S = 0.02  # so that the ends of many travel in one message, usually the next acquire

T = TypeVar("T")


class StoreCalls:
    """Belongs to one event loop."""

    def __init__(self, address: str, channels: Channels, writer_id: str = "") -> None:
        self.address = address
        self._writer_id = writer_id
        self.stub: store_pb2_grpc.StoreAsyncStub = store_pb2_grpc.StoreStub(channels.get(address))
        self.fast_rpc: FastRpc | None = None
        self._looks_for_fast_rpc = False
        self._opening = asyncio.Lock()
        self._look_after_s = 0.0
        self._look_pause_s = LOOK_AGAIN_S
        self._ended: list[int] = []  # ids of ended leases
        self._ending: asyncio.TimerHandle | None = None
        self._owed: list[Reservation] = []  # ended on our side, though the store may not know it
        self._owed_numbers: list[int] = []  # numbers of calls whose slots we will never learn
        self._repeating: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends background work."""
        self._is_closed = True
        self._end_leases()
        if self._repeating is not None:
            self._repeating.cancel()
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=DEFAULT_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self.fast_rpc is not None:
            self.fast_rpc.close()

    @property
    def fast(self) -> store_pb2_grpc.StoreAsyncStub | FastRpc:
        """The fast RPC, while it is connected. One that broke or refused is looked for again from time to time."""
        if self.fast_rpc is not None and self.fast_rpc.is_open:
            return self.fast_rpc
        if self._looks_for_fast_rpc and time.monotonic() >= self._look_after_s and not self._is_closed:
            self._look_after_s = time.monotonic() + self._look_pause_s
            self._look_pause_s = min(2 * self._look_pause_s, MAX_LOOK_AGAIN_S)
            self.later(self._find_fast_rpc())
        return self.stub

    async def open_fast_rpc(self, port: int) -> None:
        async with self._opening:
            if not port or (self.fast_rpc is not None and self.fast_rpc.is_open):
                return
            self._looks_for_fast_rpc = True
            with contextlib.suppress(NodeUnavailable):  # then there is gRPC
                self.fast_rpc = await FastRpc.open(self.address, split_address(self.address)[0], port)
                self._look_pause_s = LOOK_AGAIN_S
                self._look_after_s = min(self._look_after_s, time.monotonic() + LOOK_AGAIN_S)

    async def _find_fast_rpc(self) -> None:
        """Find its current port: the store may have been restarted."""
        response = await self.call(self.stub.Stats(pb.StatsRequest(), timeout=DEFAULT_TIMEOUT_S))
        await self.open_fast_rpc(response.fast_rpc_port)

    async def call(self, call: Awaitable[T]) -> T:
        """Wait for an answer. Errors are translated to ``mooncake.errors``."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"store {self.address}") from None

    def later(self, work: Coroutine[object, object, None]) -> None:
        """Send something that the store would find out by itself in time, without anyone waiting for it."""

        async def run() -> None:
            with contextlib.suppress(MooncakeError, grpc.aio.UsageError):  # the latter once our channels are closed
                await work

        task = asyncio.get_running_loop().create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # Reservations and their ends

    async def reserve(self, request: pb.ReserveRequest, timeout_s: float) -> pb.ReserveResponse:
        """Slots for a caller that stopped waiting are returned when the answer arrives, or cannot arrive any more:
        the store does not know that nobody will write into them, and would hold them until our connections end. So are
        those of an answer that somebody, here or there, had no memory for."""
        request.number = number = secrets.randbits(63) | 1
        try:
            response = await self._reserve(request, number, timeout_s)
            check_whole(response.slots, request.blocks)
        except (CallerError, DeadlineExceeded, NodeUnavailable, TryLater):  # nothing is reserved, or is given back
            raise
        except Exception:
            self.give_back(number)
            raise
        return response

    async def _reserve(self, request: pb.ReserveRequest, number: int, timeout_s: float) -> pb.ReserveResponse:
        fast = self.fast
        if isinstance(fast, FastRpc):
            return await self.call(fast.Reserve(request, timeout_s, lambda answer: self._give_back(answer, number)))
        asking = asyncio.ensure_future(self.call(fast.Reserve(request, timeout=timeout_s + UNHEARD_S)))
        is_heard = False
        try:
            await asyncio.wait([asking], timeout=timeout_s)
            is_heard = asking.done()
        finally:
            if not is_heard:
                self.later(self._give_back_late(asking, number))
        if not is_heard:
            raise DeadlineExceeded(f"store {self.address}: Deadline Exceeded")
        try:
            return asking.result()
        except NodeUnavailable:
            self.give_back(number)
            raise

    async def _give_back_late(self, asking: Awaitable[pb.ReserveResponse], number: int) -> None:
        try:
            self._give_back(await asking, number)
        except MooncakeError:
            self.give_back(number)

    def give_back(self, number: int) -> None:
        """Whatever the ``reserve`` with this number was given; nobody knows what that is."""
        self._give_back(None, number)

    def _give_back(self, response: pb.ReserveResponse | None, number: int) -> None:
        if self._is_closed:
            return
        if response is None:  # after a moment, so that calls on their way to the store have arrived
            self._owe([], [number])
        elif slots := [slot for slot in reservations_from_wire(response) if slot is not None]:
            self.later(self.abort(slots))

    async def abort(self, reservations: Iterable[Reservation], timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """If this does not get through, it is repeated."""
        await self._abort(list(reservations), [], timeout_s)

    async def _abort(self, slots: list[Reservation], numbers: list[int], timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        with self.owing(slots, numbers):
            for some, few in zip_longest(in_batches(slots), in_batches(numbers), fillvalue=()):
                request = pb.AbortRequest(slots=map(slot_to_wire, some), writer_id=self._writer_id, numbers=few)
                await self.call(self.fast.Abort(request, timeout=left_s(deadline)))

    @contextlib.contextmanager
    def owing(self, slots: list[Reservation], numbers: Sequence[int] = ()) -> Iterator[None]:
        """Without an answer the store may hold these slots until our connections end: tell it that they are over
        until it answers. Ending a reservation twice is harmless: its epoch is never reused."""
        try:
            yield
        except BaseException:
            self._owe(slots, numbers)
            raise

    def _owe(self, slots: Sequence[Reservation], numbers: Sequence[int]) -> None:
        self._owed = [*self._owed, *slots][-MAX_OWED:]
        self._owed_numbers = [*self._owed_numbers, *numbers][-MAX_OWED:]
        if self._repeating is None and not self._is_closed:
            self._repeating = asyncio.get_running_loop().call_later(REPEAT_OWED_AFTER_S, self._repeat_owed)

    def _repeat_owed(self) -> None:
        slots, numbers = self._owed, self._owed_numbers
        self._owed, self._owed_numbers, self._repeating = [], [], None
        self.later(self._abort(slots, numbers))

    # Leases and their ends

    async def acquire(self, request: pb.AcquireRequest, timeout_s: float) -> pb.AcquireResponse:
        """A lease for a caller that stopped waiting is ended when it arrives: otherwise its blocks could not be
        evicted until it expires. (The store ends a gRPC call with its caller, and most of those leave no lease.)"""
        fast = self.fast
        if isinstance(fast, FastRpc):
            return await self.call(fast.Acquire(request, timeout_s, self._end_unheard))
        return await self.call(fast.Acquire(request, timeout=timeout_s))

    def _end_unheard(self, response: pb.AcquireResponse | None) -> None:
        if response is not None and response.lease_id and not self._is_closed:
            self.later(self.release([response.lease_id]))

    async def release(
        self, lease_ids: Iterable[int], corrupt_keys: Iterable[bytes] = (), timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        deadline = time.monotonic() + timeout_s
        for ids, keys in zip_longest(in_batches(list(lease_ids)), in_batches(list(corrupt_keys)), fillvalue=()):
            request = pb.ReleaseRequest(lease_ids=ids, corrupt_keys=keys)
            await self.call(self.fast.Release(request, timeout=left_s(deadline)))

    async def report_corrupt(self, keys: Iterable[bytes], lease_ids: Iterable[int] = ()) -> None:
        """Nobody finds the corrupt blocks after this returns."""
        with contextlib.suppress(MooncakeError):
            await self.release(lease_ids, keys)

    def release_soon(self, lease: Lease) -> None:
        """With the next ``acquire``, or after a moment."""
        self._ended += lease.lease_ids
        if self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(END_LEASES_AFTER_S, self._end_leases)

    def take_ended(self) -> list[int]:
        """Leases that have ended since, to be sent with an ``acquire``."""
        ended, self._ended = self._ended, []
        return ended

    def _end_leases(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        self._ending = None
        if ended := self.take_ended():
            self.later(self.release(ended))


def left_s(deadline: float) -> float:
    """Raises DeadlineExceeded when no time is left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the time for this call to the store is over")
    return left


def check_whole(answers: Sized, asked: Sized) -> None:
    """Raises OutOfMemory when not everything is answered: gRPC sends an empty message where it has no memory for the
    bytes of one."""
    if len(answers) != len(asked):
        raise OutOfMemory("the store sent an empty answer: it may have run out of memory")
