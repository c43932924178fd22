"""The gRPC calls to an attempt's two nodes: their messages in order of arrival, and how each call ended.

It knows neither what the messages mean nor which attempt they belong to.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from conductor.registry import NodeInfo
from mooncake import errors
from mooncake.errors import DeadlineExceeded, HandoffFailed, InternalError, MooncakeError, NodeUnavailable
from mooncake.rpc import decode_pb2, prefill_pb2
from mooncake.rpc.errors import CODE_KEY, error_from_rpc
from mooncake.rpc.server import TAKEN_KEY
from mooncake.types import Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallEnded:
    """One side's call has ended. ``error`` is None on success; ``is_lost`` means that its node could not be reached."""

    error: MooncakeError | None = None
    is_lost: bool = False
    is_retryable: bool = True


@dataclass(frozen=True, slots=True)
class ReportIsLate:
    pass


# gRPC puts None in the place of bytes that are no message
Message = prefill_pb2.PrefillResponse | decode_pb2.DecodeResponse | CallEnded | ReportIsLate | None


class Inbox:
    """Messages of both sides in order of arrival. An error set by ``fail`` is delivered after what came before it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[tuple[Role, Message]] = deque()
        self._error: MooncakeError | None = None
        self._filled = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def wait_for_room(self) -> None:
        await self._has_room.wait()

    def post(self, role: Role, message: Message) -> None:
        self._items.append((role, message))
        self._filled.set()
        if len(self._items) >= self._limit:
            self._has_room.clear()

    def fail(self, error: MooncakeError) -> None:
        self._error = self._error or error
        self._filled.set()

    async def get(self) -> tuple[Role, Message]:
        while not self._items:
            if self._error is not None:
                raise self._error
            self._filled.clear()
            await self._filled.wait()
        self._has_room.set()
        return self._items.popleft()


Call = (
    grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]
    | grpc.aio.UnaryStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]
)


class NodeCall:
    """One node's call, from now on until it ends or is closed. Its messages go into the inbox.

    A decode node's messages wait for ``may_decode``, which the prefill node's first message or end sets.
    ``is_time_over`` says whether the request's own deadline explains a call that ran out of time. ``on_lost`` is called
    as soon as the node cannot be reached.
    """

    def __init__(
        self,
        role: Role,
        info: NodeInfo,
        call: Call,
        inbox: Inbox,
        may_decode: asyncio.Event,
        is_time_over: Callable[[], bool],
        on_lost: Callable[[NodeInfo], None],
    ) -> None:
        self.role = role
        self.info = info
        self.was_accepted = False  # by the node
        self._call = call
        self._inbox = inbox
        self._may_decode = may_decode
        self._is_time_over = is_time_over
        self._on_lost = on_lost
        self._closed = False
        self._task = asyncio.create_task(self._listen())

    def close(self) -> None:
        """Cancel it: the node stops working for it."""
        self._closed = True
        self._call.cancel()
        self._task.cancel()

    async def end_within(self, timeout_s: float) -> CallEnded | None:
        """How the call ended; None if it has not after ``timeout_s``."""
        await asyncio.wait([self._task], timeout=timeout_s)
        return self._task.result() if self._task.done() and not self._task.cancelled() else None

    async def _listen(self) -> CallEnded:
        ended = await self._forward()
        if ended.is_lost and not self._closed:
            self._on_lost(self.info)
        self._inbox.post(self.role, ended)
        if self.role is Role.PREFILL:
            self._may_decode.set()
        return ended

    async def _forward(self) -> CallEnded:
        """Put all messages into the inbox. Returns how the call ended."""
        peer = f"{self.role} node {self.info.node_id}"
        try:
            self.was_accepted = bool((await self._call.initial_metadata()).get(TAKEN_KEY))
            async for message in self._call:
                if self.role is Role.DECODE:
                    await self._may_decode.wait()
                await self._inbox.wait_for_room()
                self._inbox.post(self.role, message)
                if self.role is Role.PREFILL:
                    self._may_decode.set()
        except grpc.RpcError as error:
            return _call_ended(error, peer, self._is_time_over)
        except asyncio.CancelledError:
            if self._closed:
                raise
            # grpc.aio reports this when the other side cancelled: its server is stopping
            return CallEnded(NodeUnavailable(f"{peer} stopped"), is_lost=True)
        except Exception:  # our bug, or gRPC's: otherwise the request would wait for this call until its deadline
            log.exception("unexpected error in the call to %s", peer)
            return CallEnded(InternalError(f"the call to {peer} failed; the conductor's log has the details"))
        return CallEnded()


def _call_ended(failure: grpc.RpcError, peer: str, is_time_over: Callable[[], bool]) -> CallEnded:
    error = error_from_rpc(failure, peer)
    has_code = isinstance(failure, grpc.aio.AioRpcError) and CODE_KEY in {
        str(key) for key, _ in failure.trailing_metadata() or ()
    }
    if isinstance(error, DeadlineExceeded):
        if is_time_over():
            return CallEnded(error, is_retryable=False)
        return CallEnded(HandoffFailed(f"{peer}: {error.message}"))
    if not has_code and isinstance(error, NodeUnavailable):
        return CallEnded(error, is_lost=True)
    if not has_code and isinstance(error, InternalError):
        return CallEnded(error)  # a crash in the node's handler, or a broken stream
    return CallEnded(error, is_retryable=isinstance(error, (errors.RetryElsewhere, errors.TryLater)))
