"""One attempt at a request on one (prefill, decode) pair: the two calls, their timeouts, and how they may end.

``merge`` interprets the messages; this knows nothing of other attempts, of placement or of the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc

from conductor.api import TOO_LATE, AttemptRecord, Delta
from conductor.dispatch.call_end import CallEnded
from conductor.dispatch.lifecycle import HandoffPhase
from conductor.dispatch.merge import Merger
from conductor.dispatch.node_call import Call, Inbox, Message, NodeCall, ReportIsLate
from conductor.dispatch.node_requests import NodeRequests
from conductor.dispatch.output_stream import OutputStream
from conductor.placement.bookings import Booking
from conductor.placement.scheduler import Placement
from conductor.registry import NodeInfo
from mooncake.errors import (
    BrokenPeer,
    DeadlineExceeded,
    HandoffFailed,
    MooncakeError,
    NodeUnavailable,
    RetryElsewhere,
)
from mooncake.rpc import decode_pb2, prefill_pb2
from mooncake.rpc.decode_pb2_grpc import DecodeStub
from mooncake.rpc.prefill_pb2_grpc import PrefillStub
from mooncake.rpc.server import Channels
from mooncake.types import Role

log = logging.getLogger(__name__)

END_CHOICE_TIMEOUT_S = 5.0  # nobody waits for it
INBOX_LIMIT = 256  # messages buffered for a slow client; beyond that gRPC's flow control holds the nodes back
REPORT_GRACE_S = 0.5  # how long a finished answer waits for the prefill node's report
LOSS_GRACE_S = 0.25  # how long a failed hand-off waits for the other node's call, which tells whether that node is gone


class AttemptFailed(Exception):
    """``is_retryable`` says whether another attempt may help."""

    def __init__(self, error: MooncakeError, is_retryable: bool = True) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_retryable = is_retryable


class Attempt:
    """Building it makes both calls. Call ``next`` until a finish reason or an error, and ``close`` in any case.

    ``on_prefilled`` is called once the prompt is computed, even for a beam search, which emits nothing then.
    ``on_lost`` is called as soon as a node cannot be reached, even if this attempt no longer needs it.
    """

    def __init__(
        self,
        channels: Channels,
        placement: Placement,
        booking: Booking,
        requests: NodeRequests,
        stream: OutputStream | None,
        merger: Merger,
        deadline: float,
        handoff_timeout_s: float,
        clock: Callable[[], float],
        on_prefilled: Callable[[], None],
        on_lost: Callable[[NodeInfo], None],
    ) -> None:
        self.placement = placement
        self.booking = booking
        self.merger = merger
        self._deadline = deadline
        self._handoff_timeout_s = handoff_timeout_s
        self._clock = clock
        self._on_prefilled = on_prefilled
        self._on_lost = on_lost
        self._channels = channels
        self._handoff_id = requests.prefill.handoff_id
        # log-probabilities of the prompt come before what the decode node says
        self._inbox = Inbox(INBOX_LIMIT, admits_decode=not merger.wants_prompt_logprobs)
        self._stream = stream  # from the node that generates
        self._closed = False
        self._has_expired = False
        self._called_at = clock()
        self._first_token_at = 0.0
        self._lost: set[Role] = set()  # whose nodes could not be reached
        self.broken_node: NodeInfo | None = None  # whose messages made no sense
        self._ending: dict[int, asyncio.Task[None]] = {}  # by choice
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        left_s = max(deadline - self._called_at, 0.0)
        self._arm(left_s, self._deadline_is_over)
        self._calls: dict[Role, NodeCall] = {}
        prefill = PrefillStub(channels.get(placement.prefill.control_address))
        self._listen_to(Role.PREFILL, placement.prefill, prefill.Run(requests.prefill, timeout=left_s))
        if placement.decode is not None and requests.decode is not None:
            decode = DecodeStub(channels.get(placement.decode.control_address))
            self._listen_to(Role.DECODE, placement.decode, decode.Generate(requests.decode, timeout=left_s))

    def _listen_to(self, role: Role, info: NodeInfo, call: Call) -> None:
        is_generating = role is Role.DECODE or self.placement.decode is None
        stream = self._stream if is_generating else None
        self._calls[role] = NodeCall(
            role, info, call, self._inbox, self._is_time_over, self._on_lost, stream, self._handoff_id
        )

    @property
    def nodes(self) -> list[NodeInfo]:
        return [call.info for call in self._calls.values()]

    @property
    def lost_nodes(self) -> list[NodeInfo]:
        """Nodes that could not be reached."""
        return [self._calls[role].info for role in self._lost]

    @property
    def was_never_accepted(self) -> bool:
        """Whether a lost node was gone before it accepted the call: then this request did not kill it."""
        return any(not self._calls[role].was_accepted for role in self._lost)

    async def next(self) -> Delta:
        """The next delta (without its summary). Raises AttemptFailed or DeadlineExceeded."""
        while True:
            role, message = await self._inbox.get()
            was_prefilled = self.merger.is_prefilled
            try:
                delta = self._take(role, message)
            except AttemptFailed as failure:
                raise await self._explained(role, failure) from None
            if self.merger.is_prefilled and not was_prefilled:
                self._first_token_at = self._clock()
                self._on_prefilled()
            self._arm_timers()
            if delta is not None:
                return delta

    def node_lost(self, lost: NodeInfo, error: MooncakeError) -> None:
        """A node of this attempt has left the cluster."""
        for role, call in self._calls.items():
            if call.info.incarnation == lost.incarnation:
                self._inbox.post(role, CallEnded(error, is_lost=True))

    def end_choice(self, choice: int) -> None:
        """The client needs no more of this answer: tell the decode node, one call at a time."""
        self.merger.end_choice(choice)
        decode = self.placement.decode
        if decode is None or choice in self._ending or self._closed:
            return
        request = decode_pb2.EndChoiceRequest(handoff_id=self._handoff_id, choice=choice)
        call = DecodeStub(self._channels.get(decode.control_address)).EndChoice(request, timeout=END_CHOICE_TIMEOUT_S)
        self._ending[choice] = asyncio.ensure_future(self._send_end_choice(choice, call))

    async def _send_end_choice(self, choice: int, call: Awaitable[decode_pb2.EndChoiceResponse]) -> None:
        try:
            await call
        except grpc.aio.AioRpcError as error:  # harmless: its tokens are dropped here, and it ends by itself
            log.debug("ending choice %d: %s", choice, error.details())
        finally:
            del self._ending[choice]

    def close(self) -> None:
        """Stop the work of both nodes at once (cancelling frees their blocks), and close the hand-off's lifecycle."""
        if self._closed:
            return
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        for call in self._calls.values():
            call.close()
        for task in self._ending.values():
            task.cancel()
        handoff = self.merger.handoff
        if handoff is not None and not handoff.has_ended:
            handoff.move(HandoffPhase.EXPIRED if self._has_expired else HandoffPhase.FAILED)

    def record(self, request_id: str, asked_at: float, placing_at: float, error: MooncakeError | None) -> AttemptRecord:
        """Of an attempt that is closed. It knows neither the request nor why the request gave it up."""
        placement, merger = self.placement, self.merger
        return AttemptRecord(
            request_id=request_id,
            asked_at=asked_at,
            placing_at=placing_at,
            called_at=self._called_at,
            first_token_at=self._first_token_at,
            ended_at=self._clock(),
            prefill_node=placement.prefill.node_id,
            decode_node=placement.decode.node_id if placement.decode else "",
            source_node=self.booking.source_id,
            predicted_ms=placement.breakdown._asdict() if placement.is_known else {},
            report=merger.report or merger.early_report,
            handoff=merger.handoff.state if merger.handoff is not None else "",
            decode_ms=merger.decode_ms,
            preemptions=merger.preemptions,
            error=error,
        )

    def _take(self, role: Role, message: Message) -> Delta | None:
        ended = message if isinstance(message, CallEnded) else None
        if ended is not None and ended.is_lost:
            self._lost.add(role)
        try:
            match message:
                case prefill_pb2.PrefillResponse():
                    return self.merger.on_prefill_message(message)
                case decode_pb2.DecodeResponse():
                    if self.merger.is_unwanted(message.choice):
                        self.end_choice(message.choice)  # the first EndChoice came before the decode node knew of it
                    return self.merger.on_decode_message(message)
                case ReportIsLate():
                    return self.merger.release()
                case CallEnded() if role is Role.PREFILL:
                    return self.merger.on_prefill_end(message.error)
                case CallEnded():
                    self.merger.on_decode_end(message.error)
                    return None
                case None:
                    raise BrokenPeer("it is no message of ours")
        except DeadlineExceeded:
            raise
        except MooncakeError as error:
            if ended is not None:
                raise AttemptFailed(error, ended.is_retryable) from None
            if not isinstance(error, BrokenPeer):
                raise AttemptFailed(error, isinstance(error, RetryElsewhere)) from None
            self.broken_node = info = self._calls[role].info
            what = f"what {role} node {info.node_id} says makes no sense: {error.message}"
            raise AttemptFailed(BrokenPeer(what)) from None

    async def _explained(self, role: Role, failure: AttemptFailed) -> AttemptFailed:
        """A node may tell that it cannot go on with the other one before the call to that one ends because it is gone:
        the loss is what is to be learnt from, and told."""
        other = self._calls.get(Role.DECODE if role is Role.PREFILL else Role.PREFILL)
        if other is None or role in self._lost or not isinstance(failure.error, (HandoffFailed, NodeUnavailable)):
            return failure
        ended = await other.end_within(LOSS_GRACE_S)
        if ended is None or ended.error is None or not ended.is_lost:
            return failure
        self._lost.add(other.role)
        return AttemptFailed(ended.error, ended.is_retryable)

    def _arm_timers(self) -> None:
        if self.merger.waits_for_commit:
            self._arm(self._handoff_timeout_s, self._handoff_is_late)
        if self.merger.waits_for_report:
            self._arm(REPORT_GRACE_S, self._report_is_late)

    def _arm(self, after_s: float, due: Callable[[], None]) -> None:
        """Start the timer unless it has been started before."""
        if due not in self._timers:
            self._timers[due] = asyncio.get_running_loop().call_later(after_s, due)

    def _handoff_is_late(self) -> None:
        if self.merger.waits_for_commit:
            self._has_expired = True
            error = HandoffFailed(f"the hand-off was not committed within {self._handoff_timeout_s:g} s")
            self._inbox.post(Role.DECODE, CallEnded(error))

    def _report_is_late(self) -> None:
        self._inbox.post(Role.PREFILL, ReportIsLate())

    def _deadline_is_over(self) -> None:
        self._has_expired = True
        self._inbox.fail(DeadlineExceeded(TOO_LATE))

    def _is_time_over(self) -> bool:
        return self._clock() >= self._deadline - 0.1
