"""The gRPC calls to an attempt's two nodes: their messages in order of arrival, and how each call ended.

It knows neither what the messages mean nor which attempt they belong to.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc

from conductor.dispatch.call_end import CallEnded, call_ended
from conductor.dispatch.output_stream import OutputStream, Said
from conductor.registry import NodeInfo
from mooncake.errors import InternalError, MooncakeError, NodeUnavailable
from mooncake.rpc import decode_pb2, prefill_pb2
from mooncake.rpc.server import LAST_BATCH_KEY, TAKEN_KEY
from mooncake.types import Role

log = logging.getLogger(__name__)

MOST_MESSAGES = 16384  # of one attempt, waiting for its client: no node sends as many after it was asked to hold
MOST_DIGITS = 19  # of a batch's number


@dataclass(frozen=True, slots=True)
class ReportIsLate:
    pass


# gRPC puts None in the place of bytes that are no message
Message = Said | CallEnded | ReportIsLate | None


class Inbox:
    """Messages of both sides in order of arrival. An error set by ``fail`` is delivered after what came before it.

    Unless ``admits_decode``, what the decode node says waits for ``admit_decode``; how a side ended does not.
    """

    def __init__(self, limit: int, admits_decode: bool = True) -> None:
        self._limit = limit
        self._items: deque[tuple[Role, Message]] = deque()
        self._early: list[Message] = []  # of the decode node
        self._error: MooncakeError | None = None
        self._reader: asyncio.Future[None] | None = None  # whoever waits in ``get``
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._admits_decode = asyncio.Event()
        if admits_decode:
            self._admits_decode.set()

    def __len__(self) -> int:
        return len(self._items) + len(self._early)

    @property
    def is_full(self) -> bool:
        return not self._has_room.is_set()

    async def wait_for_room(self) -> None:
        await self._has_room.wait()

    def say(self, role: Role, message: Said | None) -> None:
        if role is Role.DECODE and not self._admits_decode.is_set():
            self._early.append(message)
            self._check_room()
        else:
            self.post(role, message)

    def post(self, role: Role, message: Message) -> None:
        self._items.append((role, message))
        self._wake()
        self._check_room()

    def admit_decode(self) -> None:
        if not self._admits_decode.is_set():
            self._admits_decode.set()
            early, self._early = self._early, []
            for message in early:
                self.post(Role.DECODE, message)

    async def wait_for_decode(self) -> None:
        await self._admits_decode.wait()

    def fail(self, error: MooncakeError) -> None:
        self._error = self._error or error
        self._wake()

    async def get(self) -> tuple[Role, Message]:
        while not self._items:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        item = self._items.popleft()
        if len(self) <= self._limit // 2:
            self._has_room.set()
        return item

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _check_room(self) -> None:
        if len(self) >= self._limit:
            self._has_room.clear()


Call = (
    grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]
    | grpc.aio.UnaryStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]
)


class NodeCall:
    """One node's call, from now on until it ends or is closed. Its messages go into the inbox, those that the node puts
    into its ``stream`` of outputs, too.

    The decode node's are admitted with the prefill node's first message or end. ``is_time_over`` says whether the
    request's own deadline explains a call that ran out of time. ``on_lost`` is called as soon as the node cannot be
    reached.
    """

    def __init__(
        self,
        role: Role,
        info: NodeInfo,
        call: Call,
        inbox: Inbox,
        is_time_over: Callable[[], bool],
        on_lost: Callable[[NodeInfo], None],
        stream: OutputStream | None = None,
        handoff_id: str = "",
    ) -> None:
        self.role = role
        self.info = info
        self.was_accepted = False  # by the node
        self._call = call
        self._inbox = inbox
        self._is_time_over = is_time_over
        self._on_lost = on_lost
        self._stream = stream
        self._handoff_id = handoff_id
        self._holding: asyncio.Task[None] | None = None  # the stream, while the inbox is full
        self._closed = False
        if stream is not None:
            stream.listen(handoff_id, self._hear)
        self._task = asyncio.create_task(self._listen())

    def close(self) -> None:
        """Cancel it: the node stops working for it."""
        self._closed = True
        self._call.cancel()
        self._task.cancel()
        if self._stream is not None:
            self._stream.leave(self._handoff_id)
        if self._holding is not None:
            self._holding.cancel()

    async def end_within(self, timeout_s: float) -> CallEnded | None:
        """How the call ended; None if it has not after ``timeout_s``."""
        await asyncio.wait([self._task], timeout=timeout_s)
        return self._task.result() if self._task.done() and not self._task.cancelled() else None

    def _hear(self, said: Said | CallEnded | None) -> None:
        """What came in the node's stream of outputs."""
        assert self._stream is not None
        if isinstance(said, CallEnded):
            self._ended(said)
            return
        if len(self._inbox) >= MOST_MESSAGES:
            self._stream.leave(self._handoff_id)
            self._inbox.post(self.role, None)
            return
        if said is not None and len(self._inbox):  # it will wait
            said = copied(said)
        self._inbox.say(self.role, said)
        if self.role is Role.PREFILL:
            self._inbox.admit_decode()
        if self._inbox.is_full and self._holding is None:
            self._holding = asyncio.create_task(self._hold(self._stream))

    async def _hold(self, stream: OutputStream) -> None:
        """Have the node send nothing until there is room."""
        stream.hold(self._handoff_id)
        try:
            await self._inbox.wait_for_room()
        finally:
            stream.release(self._handoff_id)
            self._holding = None

    async def _listen(self) -> CallEnded:
        ended = await self._forward()
        self._ended(ended)
        return ended

    def _ended(self, ended: CallEnded) -> None:
        if ended.is_lost and not self._closed:
            self._on_lost(self.info)
        self._inbox.post(self.role, ended)
        if self.role is Role.PREFILL:
            self._inbox.admit_decode()

    async def _forward(self) -> CallEnded:
        """Put all messages into the inbox. Returns how the call ended."""
        peer = f"{self.role} node {self.info.node_id}"
        try:
            self.was_accepted = bool((await self._call.initial_metadata()).get(TAKEN_KEY))
            async for message in self._call:
                if self.role is Role.DECODE:
                    await self._inbox.wait_for_decode()
                await self._inbox.wait_for_room()
                self._inbox.post(self.role, message)
                if self.role is Role.PREFILL:
                    self._inbox.admit_decode()
            if self._stream is not None:
                await self._hear_to_the_end(self._stream, await self._call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            if self._stream is not None:
                await self._hear_to_the_end(self._stream, error.trailing_metadata())
            return call_ended(error, peer, self._is_time_over())
        except grpc.RpcError as error:
            return call_ended(error, peer, self._is_time_over())
        except asyncio.CancelledError:
            if self._closed:
                raise
            # grpc.aio reports this when the other side cancelled: its server is stopping
            return CallEnded(NodeUnavailable(f"{peer} stopped"), is_lost=True)
        except Exception:  # our bug, or gRPC's: otherwise the request would wait for this call until its deadline
            log.exception("unexpected error in the call to %s", peer)
            return CallEnded(InternalError(f"the call to {peer} failed; the conductor's log has the details"))
        return CallEnded()

    async def _hear_to_the_end(self, stream: OutputStream, told: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Return once everything has come that the node put into its stream before it ended the call."""
        last = str(dict(told or ()).get(LAST_BATCH_KEY))
        if not last.isdecimal() or len(last) > MOST_DIGITS:  # it did not come so far, or makes no sense
            return
        await stream.read_up_to(int(last))
        if self.role is Role.DECODE:
            await self._inbox.wait_for_decode()


def copied(said: Said) -> Said:
    """A message apart from its batch, all of which would stay in memory with it."""
    copy = type(said)()
    copy.CopyFrom(said)  # type: ignore[arg-type]
    return copy
