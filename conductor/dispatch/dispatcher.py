"""Runs requests: has them placed, calls both nodes at once, merges their messages into one stream.

It owns retries, deadlines and cancellation of running requests; it knows no text and no tensor. Failures are handled
here and nowhere else: a failed attempt is cancelled on both nodes and retried on another pair, from the last token that
the client has seen; sampling keyed by position makes that exact. A request's state is in ``request_progress``, what its
failures have taught in ``retry``, and its nodes are chosen by ``placer``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from conductor.admission.fair_queue import band_of
from conductor.admission.queue import AdmissionQueue
from conductor.api import Delta, InferenceRequest
from conductor.dispatch.attempt import Attempt, AttemptFailed
from conductor.dispatch.lifecycle import HandoffPhase, RequestState, handoff_lifecycle
from conductor.dispatch.merge import Merger
from conductor.dispatch.node_requests import NodeRequests, node_requests
from conductor.dispatch.node_wait import NodeWait
from conductor.dispatch.output_stream import OutputStream, OutputStreams
from conductor.dispatch.placer import NodesLacking, Placer, pair_of
from conductor.dispatch.request_progress import RequestProgress
from conductor.dispatch.retry import Failure, incarnations
from conductor.model_facts import ModelFacts
from conductor.placement.bookings import Booking
from conductor.placement.fleet import Fleet
from conductor.placement.scheduler import Placement
from conductor.placement.view import RequestFacts
from conductor.registry import Fault, NodeInfo
from conductor.stats import DispatchStats
from mooncake.config import Config
from mooncake.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    HandoffFailed,
    InternalError,
    InvalidRequest,
    MooncakeError,
    NodeUnavailable,
    Overloaded,
)
from mooncake.rpc.convert import check_scores
from mooncake.rpc.server import MAX_MESSAGE_BYTES, Channels
from mooncake.types import Role

log = logging.getLogger(__name__)

DEMAND_EVERY_S = 0.05  # between two requests that are read only to be refused: that costs more than refusing them
MAX_QUEUED_DELTAS = 64  # of answers that continue separately, for a client that reads slowly


@dataclass(slots=True)
class _RunningRequest(RequestProgress):
    """With the attempt and the tasks that run for it now."""

    attempt: Attempt | None = None
    asked_at: float = 0.0  # s: when the attempt was to begin
    placing_at: float = 0.0  # s: when it was admitted, and its nodes were there
    choice_tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # of answers that continue separately


class Dispatcher:
    """Implements ``conductor.api.Generator``. One event loop; there is no await between reading and writing shared
    state."""

    def __init__(
        self,
        config: Config,
        model: ModelFacts,
        fleet: Fleet,
        channels: Channels,
        incarnation: int,
        lacking: NodesLacking,
        on_fault: Callable[[Iterable[NodeInfo], Fault], None],
        clock: Callable[[], float],
    ) -> None:
        """``on_fault`` is called with the nodes of which one has it."""
        self._limits = config.conductor
        self._handoff_timeout_s = config.transfer.handoff_timeout_s
        self._model = model
        self._fleet = fleet
        self.stats = DispatchStats()
        self.placer = Placer(config, model, fleet, self.stats, lacking)
        self.admission_queue = AdmissionQueue(self.placer.scheduler, config.conductor, clock, self.stats.admission)
        self.node_wait = NodeWait(config.conductor.node_wait_s, clock)
        self._channels = channels
        self._streams = OutputStreams(channels)
        self._clock = clock
        self._epochs = count((incarnation & 0xFFFF_FFFF) << 32 | 1)
        self._attempts: dict[int, set[Attempt]] = {}  # by node incarnation
        self._running: dict[str, _RunningRequest] = {}  # by request id
        self._demand_heard_at = -math.inf  # when a request that was going to be refused was last read
        self._on_fault = on_fault

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[Delta, None]:
        """See ``conductor.api.Generator``."""
        progress = self._begin(request)
        self._running[request.request_id] = progress
        try:
            async with contextlib.aclosing(self._deltas(progress)) as deltas:
                async for delta in deltas:
                    yield delta
        except Exception as error:
            self._end_failed(progress, error)
            raise
        finally:
            if self._running.get(request.request_id) is progress:
                del self._running[request.request_id]
            self._end(progress)

    def check_room(self) -> None:
        """See ``conductor.api.Generator``."""
        if self._has_room:
            return
        now = self._clock()
        if now - self._demand_heard_at >= DEMAND_EVERY_S:  # its prompt will be reported, and it refused
            self._demand_heard_at = now
            return
        self.stats.requests += 1
        raise self._refusal()

    def end_choice(self, request_id: str, choice: int) -> None:
        """See ``conductor.api.Generator``."""
        progress = self._running.get(request_id)
        if progress is None or choice in progress.ended:
            return
        progress.ended.add(choice)
        if choice in progress.choice_tasks:
            progress.choice_tasks[choice].cancel()
        elif progress.attempt is not None and not progress.is_complete:  # ending the last one ends the attempt
            progress.attempt.end_choice(choice)

    async def _deltas(self, progress: _RunningRequest) -> AsyncGenerator[Delta, None]:
        """Retry until every answer is complete."""
        while True:
            attempt = progress.attempt = await self._next_attempt(progress)
            error: MooncakeError | None = None
            try:
                while True:
                    delta = self._record(progress, attempt, await attempt.next())
                    yield delta
                    if progress.is_complete:
                        return
            except AttemptFailed as failure:
                error = failure.error
                self._prepare_retry(progress, attempt, failure)
            finally:
                progress.attempt = None
                self._end_attempt(progress, attempt, error)
            if len(progress.emitted) > 1 and progress.num_kept:
                async with contextlib.aclosing(self._continue_choices(progress)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            if not progress.is_beam_search and (reason := progress.missing_finish_reason(self._model.eos_ids)):
                progress.ended.add(0)
                yield Delta((), reason, progress.summary)
                return

    async def _continue_choices(self, progress: _RunningRequest) -> AsyncGenerator[Delta, None]:
        """Continue each answer as a request of its own: after a failed attempt they are different prompts."""
        deltas: asyncio.Queue[Delta] = asyncio.Queue(MAX_QUEUED_DELTAS)

        async def continue_choice(choice: int) -> None:
            part = progress.for_choice(choice)
            if reason := part.missing_finish_reason(self._model.eos_ids):
                await deltas.put(Delta((), reason, part.summary, choice))
                return
            async with contextlib.aclosing(self._deltas(part)) as own:
                async for delta in own:
                    await deltas.put(replace(delta, choice=choice))

        wanted = [choice for choice in range(len(progress.emitted)) if choice not in progress.ended]
        progress.choice_tasks = {choice: asyncio.create_task(continue_choice(choice)) for choice in wanted}
        tasks = set(progress.choice_tasks.values())
        getting = asyncio.create_task(deltas.get())
        try:
            while not progress.is_complete:
                await asyncio.wait({getting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task.done()]:
                    tasks.discard(task)
                    if not task.cancelled():  # cancelled: the client ended this answer
                        task.result()
                if not getting.done():
                    continue
                delta = getting.result()
                getting = asyncio.create_task(deltas.get())
                if delta.choice in progress.ended:
                    continue
                progress.add(delta)
                yield delta
        finally:
            getting.cancel()
            for task in progress.choice_tasks.values():
                task.cancel()
            await asyncio.gather(getting, *progress.choice_tasks.values(), return_exceptions=True)

    def node_gone(self, info: NodeInfo, why: str) -> None:
        """A node has left the cluster: whatever runs there fails now and is retried elsewhere."""
        self.placer.broken_pairs.gone(info.incarnation)
        for attempt in list(self._attempts.get(info.incarnation, ())):
            attempt.node_lost(info, NodeUnavailable(f"{info.role} node {info.node_id} {why}"))

    async def close(self) -> None:
        await self._streams.close()

    @property
    def is_idle(self) -> bool:
        """No request runs and nothing is booked on any node."""
        return not (self.stats.running or any(self._attempts.values()) or self._fleet.open_work)

    def uses_adapter(self, digest: str) -> bool:
        """Whether a request that has not ended needs it."""
        return any(progress.request.adapter == digest for progress in self._running.values())

    def has_no_work_on(self, info: NodeInfo) -> bool:
        """Whether nothing placed from here runs on the node."""
        return info.incarnation not in self._attempts

    def _prefilled(self, booking: Booking) -> None:
        self.placer.scheduler.prefill_done(booking, self._clock())
        self.admission_queue.prefill_ended(booking)

    def _lost(self, info: NodeInfo) -> None:
        self._fleet.registry.call_failed(info, self._clock())

    def _begin(self, request: InferenceRequest) -> _RunningRequest:
        """Check and count the request. Raises InvalidRequest, Overloaded or DeadlineExceeded."""
        if not len(request.tokens):
            raise InvalidRequest("the prompt has no token", "prompt")
        if (num_top := request.sampling.prompt_logprobs) is not None:
            check_scores(len(request.tokens), num_top, MAX_MESSAGE_BYTES)
        now = self._clock()
        self.stats.requests += 1
        progress = _RunningRequest.begin(request, now, self._limits.retries)
        if not self._has_room:
            self.placer.report_unplaced(self.placer.facts(progress, now), progress, now)
            raise self._refusal()
        if now >= request.deadline:
            self.stats.failures[DeadlineExceeded.code] += 1
            raise DeadlineExceeded("the request's time was over when it arrived")
        self.stats.running += 1
        return progress

    @property
    def _has_room(self) -> bool:
        return self.stats.running < self._limits.max_requests

    def _refusal(self) -> Overloaded:
        self.stats.failures[Overloaded.code] += 1
        what = f"as many requests are running as conductor.max_requests allows: {self._limits.max_requests}"
        return Overloaded(what, self.stats.retry_after_s())

    async def _next_attempt(self, progress: _RunningRequest) -> Attempt:
        """Admit and place, or wait for a missing node. Raises like ``_wait_for_admission`` and ``_start``."""
        progress.asked_at = self._clock()
        while True:
            try:
                await self._wait_for_admission(progress)
                return self._start(progress)
            except NodeUnavailable as error:
                if not await self.node_wait.change(min(self.node_wait.give_up_at(), progress.request.deadline)):
                    raise progress.error or error from None  # why the last attempt failed says more

    async def _wait_for_admission(self, progress: _RunningRequest) -> None:
        """Only for a new request: a retry was admitted before. Raises like ``AdmissionQueue.admit``."""
        if self.admission_queue.is_unlimited or not progress.is_new:
            return
        request = progress.request
        facts = self.placer.facts(progress, self._clock())
        band = band_of(request.priority)
        try:
            await self.admission_queue.admit(facts, request.sampling.max_tokens, request.deadline, request.salt, band)
        except (Overloaded, DeadlineExceeded, asyncio.CancelledError):
            self.placer.report_unplaced(facts, progress, self._clock())
            raise

    def _start(self, progress: _RunningRequest) -> Attempt:
        """Place the remaining part of the request, book it, and call both nodes. Raises like ``Placer.place``."""
        request = progress.request
        now = progress.placing_at = self._clock()
        facts = self.placer.facts(progress, now)
        placement = self.placer.place(facts, progress, now)
        # before booking: it may exceed the message size
        stream = self._stream(progress, placement)
        stream_id = stream.id if stream is not None else 0
        requests = node_requests(request, progress.tokens, placement, next(self._epochs), stream_id)
        booking = self._book(facts, placement, request.sampling.max_tokens, now)
        progress.placed(placement)
        log.debug("%s placed: %s", request.request_id, placement)
        return self._call(progress, placement, booking, requests, stream)

    def _stream(self, progress: _RunningRequest, placement: Placement) -> OutputStream | None:
        """Where the node that generates tells what it has to say."""
        sampling, info = progress.request.sampling, placement.decode
        if info is None:
            if sampling.max_tokens - progress.num_kept <= 1 or sampling.prompt_logprobs is not None:
                return None  # it says little, or more than should travel with others'
            info = placement.prefill
        return self._streams.of(info.control_address, f"{info.role} node {info.node_id}")

    def _call(
        self,
        progress: _RunningRequest,
        placement: Placement,
        booking: Booking,
        requests: NodeRequests,
        stream: OutputStream | None,
    ) -> Attempt:
        request = progress.request
        merger = Merger(
            expected=[len(answer) for answer in progress.emitted],
            handoff=handoff_lifecycle(requests.prefill.handoff_id) if placement.decode else None,
            passes_first_token=not progress.is_beam_search,
            wants_prompt_logprobs=request.sampling.prompt_logprobs is not None and not progress.has_prompt_logprobs,
            wants_pooled=request.pooling is not None,
            end=request.sampling.max_tokens,
            vocab_size=self._model.vocab_size,
        )
        attempt = Attempt(
            channels=self._channels,
            placement=placement,
            booking=booking,
            requests=requests,
            stream=stream,
            merger=merger,
            deadline=request.deadline,
            handoff_timeout_s=self._handoff_timeout_s,
            clock=self._clock,
            on_prefilled=lambda: self._prefilled(booking),
            on_lost=self._lost,
        )
        for choice in progress.ended:
            attempt.end_choice(choice)
        for info in attempt.nodes:
            self._attempts.setdefault(info.incarnation, set()).add(attempt)
        return attempt

    def _book(self, facts: RequestFacts, placement: Placement, max_tokens: int, now: float) -> Booking:
        is_local = placement.prefill.role is Role.DECODE  # local prefill: its decode steps run there as well
        booked = placement._replace(decode=placement.prefill) if is_local else placement
        booking = self.placer.scheduler.book(facts, booked, now)
        self.stats.local_prefills += is_local
        self.admission_queue.placed(booking, facts, placement, max_tokens)
        return booking

    def _record(self, progress: _RunningRequest, attempt: Attempt, delta: Delta) -> Delta:
        """Count a delta on its way to the client, and add the summary when the prefill node has reported."""
        if (delta.tokens or delta.pooled is not None) and progress.is_new:
            self._record_first_token(progress, attempt)
        self.stats.output_tokens += len(delta.tokens)
        progress.add(delta)
        is_news = self._take_report(progress, attempt.merger)
        return replace(delta, summary=progress.summary) if is_news or delta.finish_reason is not None else delta

    def _take_report(self, progress: _RunningRequest, merger: Merger) -> bool:
        """Whether the prefill node has told something new. An early report counts, too: a client that finds its stop
        string ends the request before the whole one comes."""
        report = merger.report or merger.early_report
        if report is None or progress.has_report or report is progress.early_report:
            return False
        is_first = progress.early_report is None
        told = progress.add_report(report, is_early=merger.report is None)
        if is_first:
            self.stats.count_prompt(told, self._model.shape.block_tokens)
        return True

    def _record_first_token(self, progress: _RunningRequest, attempt: Attempt) -> None:
        """The first token is there. Raises Overloaded like ``AdmissionQueue.check_after_prefill``."""
        now = self._clock()
        if self.admission_queue.checks_after_prefill:
            self.admission_queue.check_after_prefill(attempt.booking, self.placer.facts(progress, now))
        if attempt.placement.is_known:
            self.stats.compare_ttft(attempt.placement.predicted_ttft_ms, (now - progress.started_at) * 1e3)

    def _prepare_retry(self, progress: _RunningRequest, attempt: Attempt, failure: AttemptFailed) -> None:
        """Learn from a failed attempt. Raises its error when there is nothing left to try."""
        self.stats.failed_attempts[failure.error.code] += 1
        progress.error = failure.error
        if isinstance(failure.error, ChecksumMismatch):
            self._on_fault(attempt.nodes, Fault.CHECKSUM)
        if attempt.broken_node is not None:
            self._on_fault([attempt.broken_node], Fault.NONSENSE)
        known = self._failure(attempt)
        if not (known.lost or known.leaving) and isinstance(failure.error, (NodeUnavailable, HandoffFailed)):
            self._handoff_failed(attempt.placement, failure.error)
        may_try = progress.retries.learn(known)
        if not (may_try and failure.is_retryable):
            raise failure.error from None
        self.stats.retries += 1
        request_id = progress.request.request_id
        log.warning("%s is tried elsewhere after %d tokens: %s", request_id, progress.num_emitted, failure.error)

    def _handoff_failed(self, placement: Placement, error: MooncakeError) -> None:
        """Both nodes are there."""
        if placement.decode is None or not self.placer.broken_pairs.failed(pair_of(placement), self._clock()):
            return
        names = f"{placement.prefill.node_id} and {placement.decode.node_id}"
        log.warning("%s are not used together for a while: hand-offs between them fail: %s", names, error)

    def _failure(self, attempt: Attempt) -> Failure:
        """What the attempt's failure says of its nodes."""
        broken = attempt.broken_node
        return Failure(
            nodes=incarnations(attempt.nodes if broken is None else [broken]),
            lost=incarnations(attempt.lost_nodes),
            leaving=incarnations(filter(self._fleet.registry.is_draining, attempt.nodes)),
            was_never_accepted=attempt.was_never_accepted,
        )

    def _end_attempt(self, progress: _RunningRequest, attempt: Attempt, error: MooncakeError | None) -> None:
        attempt.close()
        request = progress.request
        if request.attempts is not None:
            record = attempt.record(request.request_id, progress.asked_at, progress.placing_at, error)
            request.attempts.append(record)
        self.placer.scheduler.close(attempt.booking, self._clock())
        self.admission_queue.finished(attempt.booking, progress.num_emitted if progress.is_complete else 0)
        if attempt.merger.handoff is not None:
            self.stats.handoffs[attempt.merger.handoff.state] += 1
            if attempt.merger.handoff.state is HandoffPhase.COMMITTED:
                self.placer.broken_pairs.worked(pair_of(attempt.placement))
        for info in attempt.nodes:
            attempts = self._attempts[info.incarnation]
            attempts.discard(attempt)
            if not attempts:
                del self._attempts[info.incarnation]

    def _end_failed(self, progress: _RunningRequest, error: Exception) -> None:
        self.stats.failures[error.code if isinstance(error, MooncakeError) else InternalError.code] += 1
        expired = isinstance(error, DeadlineExceeded)
        progress.lifecycle.move(RequestState.EXPIRED if expired else RequestState.FAILED)

    def _end(self, progress: _RunningRequest) -> None:
        self.stats.running -= 1
        if progress.lifecycle.has_ended:  # it failed
            return
        progress.lifecycle.move(RequestState.FINISHED if progress.is_complete else RequestState.CANCELLED)
        num_tokens = progress.num_emitted if progress.request.pooling is None else None
        self.stats.count_end(progress.is_complete, self._clock() - progress.started_at, num_tokens)
