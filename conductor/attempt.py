"""One attempt at a request on one (prefill, decode) pair: the two calls, their timers, and how each may end.

What messages mean is decided by ``merge``; this knows nothing of other attempts, of placement or of the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from conductor.accounts import Ticket
from conductor.api import Delta, InferenceRequest
from conductor.lifecycle import HandoffState
from conductor.merge import Merger
from conductor.registry import NodeInfo
from conductor.scheduler import Placement
from mooncake import errors
from mooncake.errors import DeadlineExceeded, HandoffFailed, InternalError, MooncakeError, NodeUnavailable
from mooncake.rpc import decode_pb2, prefill_pb2
from mooncake.rpc.convert import (
    sampling_to_wire,
    segment_to_wire,
    tokens_to_wire,
)
from mooncake.rpc.decode_pb2_grpc import DecodeStub
from mooncake.rpc.errors import CODE_KEY, error_from_rpc
from mooncake.rpc.prefill_pb2_grpc import PrefillStub
from mooncake.rpc.server import TAKEN_KEY, Channels
from mooncake.types import Role, TokenIds

log = logging.getLogger(__name__)

END_CHOICE_TIMEOUT_S = 5.0
INBOX_LIMIT = 256  # messages buffered for a slow client; beyond that gRPC's flow control holds the nodes back
REPORT_GRACE_S = 0.5  # how long a finished answer waits for the prefill node's report


@dataclass(frozen=True, slots=True)
class WireRequests:
    prefill: prefill_pb2.PrefillRequest
    decode: decode_pb2.DecodeRequest | None


def wire_requests(request: InferenceRequest, tokens: TokenIds, placement: Placement, epoch: int) -> WireRequests:
    """The requests to the two nodes. Ids include the epoch to be unique: a client may reuse one, and a retry may
    meet what is left of the attempt before it."""
    handoff_id = f"{epoch:016x}"
    request_id = f"{request.request_id}/{handoff_id}"
    data = tokens_to_wire(tokens)
    sampling = sampling_to_wire(request.sampling)
    pools = [
        prefill_pb2.PoolTarget(
            control_address=store.control_address,
            segment=segment_to_wire(store.segment) if store.segment else None,
        )
        for store in placement.pools
    ]
    prefill = prefill_pb2.PrefillRequest(
        request_id=request_id,
        handoff_id=handoff_id,
        epoch=epoch,
        tokens=data,
        num_prompt_tokens=len(request.tokens),
        sampling=sampling,
        cache_salt=request.salt,
        priority=request.priority,
        adapter=request.adapter,
        adapter_start=request.adapter_start,
        decode_address=placement.decode.control_address if placement.decode else "",
        pools=pools,
        pool_tokens=placement.pool_tokens,
    )
    if placement.decode is None:
        return WireRequests(prefill, None)
    decode = decode_pb2.DecodeRequest(
        request_id=request_id,
        handoff_id=handoff_id,
        epoch=epoch,
        tokens=data,
        num_prompt_tokens=len(request.tokens),
        sampling=sampling,
        cache_salt=request.salt,
        priority=request.priority,
        adapter=request.adapter,
        adapter_start=request.adapter_start,
        pools=pools,
    )
    return WireRequests(prefill, decode)


class AttemptFailed(Exception):
    """``is_retryable`` says whether another attempt may help."""

    def __init__(self, error: MooncakeError, is_retryable: bool = True) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_retryable = is_retryable


@dataclass(frozen=True, slots=True)
class _Ended:
    """One side's call has ended. ``error`` is None on success; ``is_lost`` means that its node could not be reached."""

    error: MooncakeError | None = None
    is_lost: bool = False
    is_retryable: bool = True


@dataclass(frozen=True, slots=True)
class _ReportIsLate:
    pass


_Message = prefill_pb2.PrefillResponse | decode_pb2.DecodeResponse | _Ended | _ReportIsLate


class _Inbox:
    """Messages of both sides in order of arrival. An error set by ``fail`` is delivered after what came before it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[tuple[Role, _Message]] = deque()
        self._error: MooncakeError | None = None
        self._filled = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def room(self) -> None:
        await self._has_room.wait()

    def post(self, role: Role, message: _Message) -> None:
        self._items.append((role, message))
        self._filled.set()
        if len(self._items) >= self._limit:
            self._has_room.clear()

    def fail(self, error: MooncakeError) -> None:
        self._error = self._error or error
        self._filled.set()

    async def get(self) -> tuple[Role, _Message]:
        while not self._items:
            if self._error is not None:
                raise self._error
            self._filled.clear()
            await self._filled.wait()
        self._has_room.set()
        return self._items.popleft()


_PrefillCall = grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]
_DecodeCall = grpc.aio.UnaryStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]


class Attempt:
    """Building it makes both calls. Call ``next`` until a finish reason or an error, and ``close`` in any case.

    ``on_prefilled`` is called once the prompt is computed, even for a beam search, which emits nothing then.
    ``on_lost`` is called as soon as a node cannot be reached, even if this attempt no longer needs it.
    """

    def __init__(
        self,
        channels: Channels,
        placement: Placement,
        ticket: Ticket,
        requests: WireRequests,
        merger: Merger,
        deadline: float,
        handoff_timeout_s: float,
        clock: Callable[[], float],
        on_prefilled: Callable[[], None],
        on_lost: Callable[[NodeInfo], None],
    ) -> None:
        self.placement = placement
        self.ticket = ticket
        self.merger = merger
        self._deadline = deadline
        self._handoff_timeout_s = handoff_timeout_s
        self._clock = clock
        self._on_prefilled = on_prefilled
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._inbox = _Inbox(INBOX_LIMIT)
        self._may_decode = asyncio.Event()  # say what it says: scores of a prompt come first, and may be megabytes
        if not merger.tells_scores:
            self._may_decode.set()
        self._closed = False
        self._has_expired = False
        self.lost_nodes: list[NodeInfo] = []  # nodes that could not be reached
        self._took: set[Role] = set()  # roles whose node accepted the call
        self._nodes: dict[Role, NodeInfo] = {Role.PREFILL: placement.prefill}
        left_s = max(deadline - clock(), 0.0)
        self._timers = [self._loop.call_later(left_s, self._deadline_is_over)]
        self._handoff_timer: asyncio.TimerHandle | None = None
        self._report_timer: asyncio.TimerHandle | None = None
        prefill = PrefillStub(channels.get(placement.prefill.control_address)).Run(requests.prefill, timeout=left_s)
        self._calls: list[_PrefillCall | _DecodeCall] = [prefill]
        self._channels = channels
        self._handoff_id = requests.prefill.handoff_id
        self._ending: dict[int, asyncio.Task[None]] = {}  # by choice
        self._tasks = [asyncio.create_task(self._listen(Role.PREFILL, prefill))]
        if placement.decode is not None and requests.decode is not None:
            self._nodes[Role.DECODE] = placement.decode
            decode = DecodeStub(channels.get(placement.decode.control_address)).Generate(
                requests.decode, timeout=left_s
            )
            self._calls.append(decode)
            self._tasks.append(asyncio.create_task(self._listen(Role.DECODE, decode)))

    @property
    def nodes(self) -> list[NodeInfo]:
        return list(self._nodes.values())

    @property
    def met_nobody(self) -> bool:
        """Whether a lost node was gone before it accepted the call: then this request did not kill it."""
        return any(info in self.lost_nodes and role not in self._took for role, info in self._nodes.items())

    async def next(self) -> Delta:
        """The next delta (without its summary). Raises AttemptFailed or DeadlineExceeded."""
        while True:
            role, message = await self._inbox.get()
            was_prefilled = self.merger.is_prefilled
            delta = self._take(role, message)
            if self.merger.is_prefilled and not was_prefilled:
                self._on_prefilled()
            self._arm_timers()
            if delta is not None:
                return delta

    def lose(self, lost: NodeInfo, error: MooncakeError) -> None:
        """A node of this attempt is out of the cluster."""
        for role, info in self._nodes.items():
            if info.incarnation == lost.incarnation:
                self._inbox.post(role, _Ended(error, is_lost=True))

    def end_choice(self, choice: int) -> None:
        """Nobody needs more of this answer: tell the decode node, once at a time."""
        self.merger.end_choice(choice)
        decode = self.placement.decode
        if decode is None or choice in self._ending or self._closed:
            return
        request = decode_pb2.EndChoiceRequest(handoff_id=self._handoff_id, choice=choice)
        call = DecodeStub(self._channels.get(decode.control_address)).EndChoice(request, timeout=END_CHOICE_TIMEOUT_S)
        self._ending[choice] = asyncio.ensure_future(self._tell_end(choice, call))

    async def _tell_end(self, choice: int, call: Awaitable[decode_pb2.EndChoiceResponse]) -> None:
        try:
            await call
        except grpc.aio.AioRpcError as error:  # its tokens are dropped here, and it ends by itself
            log.debug("ending choice %d: %s", choice, error.details())
        finally:
            del self._ending[choice]

    def close(self) -> None:
        """Stop the work of both nodes at once (cancelling frees their blocks), and close the hand-off's lifecycle."""
        if self._closed:
            return
        self._closed = True
        for timer in (*self._timers, self._handoff_timer, self._report_timer):
            if timer is not None:
                timer.cancel()
        for call in self._calls:
            call.cancel()
        for task in (*self._tasks, *self._ending.values()):
            task.cancel()
        handoff = self.merger.handoff
        if handoff is not None and not handoff.has_ended:
            handoff.move(HandoffState.EXPIRED if self._has_expired else HandoffState.FAILED)

    def _take(self, role: Role, message: _Message) -> Delta | None:
        ended = message if isinstance(message, _Ended) else None
        if ended is not None and ended.is_lost:
            self.lost_nodes.append(self._nodes[role])
        try:
            match message:
                case prefill_pb2.PrefillResponse():
                    return self.merger.prefill_said(message)
                case decode_pb2.DecodeResponse():
                    if self.merger.is_unwanted(message.choice):
                        self.end_choice(message.choice)  # it had not started when it was told to end
                    return self.merger.decode_said(message)
                case _ReportIsLate():
                    return self.merger.report_is_late()
                case _Ended() if role is Role.PREFILL:
                    return self.merger.prefill_ended(message.error)
                case _Ended():
                    self.merger.decode_ended(message.error)
                    return None
        except DeadlineExceeded:
            raise
        except MooncakeError as error:
            raise AttemptFailed(error, is_retryable=ended is not None and ended.is_retryable) from None

    def _arm_timers(self) -> None:
        if self.merger.waits_for_commit and self._handoff_timer is None:
            self._handoff_timer = self._loop.call_later(self._handoff_timeout_s, self._handoff_is_late)
        if self.merger.waits_for_report and self._report_timer is None:
            self._report_timer = self._loop.call_later(REPORT_GRACE_S, self._inbox.post, Role.PREFILL, _ReportIsLate())

    def _handoff_is_late(self) -> None:
        if self.merger.waits_for_commit:
            self._has_expired = True
            error = HandoffFailed(f"the hand-off was not committed within {self._handoff_timeout_s:g} s")
            self._inbox.post(Role.DECODE, _Ended(error))

    def _deadline_is_over(self) -> None:
        self._has_expired = True
        self._inbox.fail(DeadlineExceeded("the request did not finish within its time"))

    async def _listen(
        self,
        role: Role,
        call: _PrefillCall | _DecodeCall,
    ) -> None:
        peer = f"{role} node {self._nodes[role].node_id}"
        try:
            if (await call.initial_metadata()).get(TAKEN_KEY):
                self._took.add(role)
            async for message in call:
                if role is Role.DECODE:
                    await self._may_decode.wait()
                await self._inbox.room()
                self._inbox.post(role, message)
                if role is Role.PREFILL:
                    self._may_decode.set()
            ended = _Ended()
        except grpc.RpcError as error:
            ended = self._how_it_ended(error, peer)
        except asyncio.CancelledError:
            if self._closed:
                raise
            # grpc.aio reports this when the other side cancelled: its server is stopping
            ended = _Ended(NodeUnavailable(f"{peer} stopped"), is_lost=True)
        if ended.is_lost and not self._closed:
            self._on_lost(self._nodes[role])
        self._inbox.post(role, ended)
        if role is Role.PREFILL:
            self._may_decode.set()

    def _how_it_ended(self, failure: grpc.RpcError, peer: str) -> _Ended:
        error = error_from_rpc(failure, peer)
        has_code = isinstance(failure, grpc.aio.AioRpcError) and CODE_KEY in {
            str(key) for key, _ in failure.trailing_metadata() or ()
        }
        if isinstance(error, DeadlineExceeded):
            if self._clock() >= self._deadline - 0.1:
                return _Ended(error, is_retryable=False)
            return _Ended(HandoffFailed(f"{peer}: {error.message}"))
        if not has_code and isinstance(error, NodeUnavailable):
            return _Ended(error, is_lost=True)
        if not has_code and isinstance(error, InternalError):
            return _Ended(error)  # a crash in the node's handler, or a broken stream
        return _Ended(error, is_retryable=isinstance(error, (errors.RetryElsewhere, errors.TryLater)))
