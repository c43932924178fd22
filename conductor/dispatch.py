"""Runs requests: has them placed, calls both nodes at once, merges their messages into one stream.

It owns retries, deadlines and cancellation of running requests; it knows no text and no tensor. Failures are handled
here and nowhere else: a failed attempt is cancelled on both nodes and retried on another pair, from the last token that
the client has seen; sampling keyed by position makes that exact. A request's progress is in its ``journey``, what its
failures have taught in ``retry``, where it goes is the ``placer``'s to say; this module calls, waits and keeps the
books.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count

from conductor.absence import Absence
from conductor.api import Delta, InferenceRequest
from conductor.attempt import Attempt, AttemptFailed
from conductor.bookings import Booking
from conductor.door import Door
from conductor.fairness import band_of
from conductor.fleet import Fleet
from conductor.journey import Journey
from conductor.lifecycle import RequestState, handoff_lifecycle
from conductor.merge import Merger
from conductor.node_requests import NodeRequests, node_requests
from conductor.placer import ModelFacts, Placer
from conductor.registry import NodeInfo
from conductor.retry import Failure, incarnations
from conductor.scheduler import Placement
from conductor.stats import DispatchStats
from conductor.view import RequestFacts
from mooncake.config import Config
from mooncake.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
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

MAX_QUEUED_DELTAS = 64  # of answers that continue separately, for a client that reads slowly


@dataclass(slots=True)
class _Running(Journey):
    """A journey with the attempt and tasks that run for it now."""

    attempt: Attempt | None = None
    parts: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # by choice: answers that continue separately


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = config.conductor
        self._handoff_timeout_s = config.transfer.handoff_timeout_s
        self._model = model
        self._fleet = fleet
        self.stats = DispatchStats()
        self.placer = Placer(config, model, fleet, self.stats)
        self.door = Door(self.placer.scheduler, config.conductor, clock)
        self.absence = Absence(config.conductor.node_wait_s, clock)
        self._channels = channels
        self._clock = clock
        self._epochs = count((incarnation & 0xFFFF_FFFF) << 32 | 1)
        self._attempts: dict[int, set[Attempt]] = {}  # by node incarnation
        self._journeys: dict[str, _Running] = {}  # by request id
        self.on_checksum_error: Callable[[Iterable[NodeInfo]], None] = lambda nodes: (
            None
        )  # told which nodes corrupted bytes

    async def generate(self, request: InferenceRequest) -> AsyncGenerator[Delta, None]:
        """See ``conductor.api.Generator``."""
        journey = self._admit(request)
        self._journeys[request.request_id] = journey
        try:
            async with contextlib.aclosing(self._deltas(journey)) as deltas:
                async for delta in deltas:
                    yield delta
        except Exception as error:
            self._end_failed(journey, error)
            raise
        finally:
            if self._journeys.get(request.request_id) is journey:
                del self._journeys[request.request_id]
            self._end(journey)

    def end_choice(self, request_id: str, choice: int) -> None:
        """See ``conductor.api.Generator``."""
        journey = self._journeys.get(request_id)
        if journey is None or choice in journey.ended:
            return
        journey.ended.add(choice)
        if choice in journey.parts:
            journey.parts[choice].cancel()
        elif journey.attempt is not None and not journey.is_whole:  # ending the last one ends the attempt
            journey.attempt.end_choice(choice)

    async def _deltas(self, journey: _Running) -> AsyncGenerator[Delta, None]:
        """Retry until every answer is complete."""
        while True:
            attempt = journey.attempt = await self._placed(journey)
            try:
                while True:
                    delta = self._note(journey, attempt, await attempt.next())
                    yield delta
                    if journey.is_whole:
                        return
            except AttemptFailed as failure:
                self._prepare_retry(journey, attempt, failure)
            finally:
                journey.attempt = None
                self._end_attempt(journey, attempt)
            if len(journey.emitted) > 1 and journey.num_kept:
                async with contextlib.aclosing(self._each_alone(journey)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            if not journey.is_search and (reason := journey.ended_by(self._model.eos_ids)):
                journey.ended.add(0)
                yield Delta((), reason, journey.summary)
                return

    async def _each_alone(self, journey: _Running) -> AsyncGenerator[Delta, None]:
        """After a failed attempt the answers are different prompts: each continues separately."""
        deltas: asyncio.Queue[Delta] = asyncio.Queue(MAX_QUEUED_DELTAS)

        async def go_on(choice: int) -> None:
            part = journey.part(choice)
            if reason := part.ended_by(self._model.eos_ids):
                await deltas.put(Delta((), reason, part.summary, choice))
                return
            async with contextlib.aclosing(self._deltas(part)) as own:
                async for delta in own:
                    await deltas.put(replace(delta, choice=choice))

        wanted = [choice for choice in range(len(journey.emitted)) if choice not in journey.ended]
        journey.parts = {choice: asyncio.create_task(go_on(choice)) for choice in wanted}
        tasks = set(journey.parts.values())
        getting = asyncio.create_task(deltas.get())
        try:
            while not journey.is_whole:
                await asyncio.wait({getting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task.done()]:
                    tasks.discard(task)
                    if not task.cancelled():  # cancelled: nobody wanted it any more
                        task.result()
                if not getting.done():
                    continue
                delta = getting.result()
                getting = asyncio.create_task(deltas.get())
                if delta.choice in journey.ended:
                    continue
                journey.take(delta)
                yield delta
        finally:
            getting.cancel()
            for task in journey.parts.values():
                task.cancel()
            await asyncio.gather(getting, *journey.parts.values(), return_exceptions=True)

    def node_gone(self, info: NodeInfo, why: str) -> None:
        """A node has left the cluster: whatever runs there fails now and is retried elsewhere."""
        for attempt in list(self._attempts.get(info.incarnation, ())):
            attempt.lose(info, NodeUnavailable(f"{info.role} node {info.node_id} {why}"))

    @property
    def is_idle(self) -> bool:
        """No request runs and nothing is booked on any node."""
        return not (self.stats.running or any(self._attempts.values()) or self._fleet.open_work)

    def has_no_work_on(self, info: NodeInfo) -> bool:
        """Whether nothing placed from here runs on the node."""
        return info.incarnation not in self._attempts

    def _prefilled(self, booking: Booking) -> None:
        self.placer.scheduler.prefill_done(booking, self._clock())
        self.door.joined(booking)

    def _lost(self, info: NodeInfo) -> None:
        self._fleet.registry.call_failed(info, self._clock())

    def _admit(self, request: InferenceRequest) -> _Running:
        """Raises InvalidRequest, Overloaded or DeadlineExceeded, before anything is spent."""
        if not len(request.tokens):
            raise InvalidRequest("the prompt has no token", "prompt")
        if (num_top := request.sampling.prompt_logprobs) is not None:
            check_scores(len(request.tokens), num_top, MAX_MESSAGE_BYTES)
        now = self._clock()
        self.stats.requests += 1
        journey = _Running.begin(request, now, self._limits.retries)
        if self.stats.running >= self._limits.max_requests:
            self.stats.failures[Overloaded.code] += 1
            self.placer.tell_in_vain(self.placer.facts(journey, now), journey, now)
            raise Overloaded(f"{self.stats.running} requests are running already", self.stats.retry_after_s())
        if now >= request.deadline:
            self.stats.failures[DeadlineExceeded.code] += 1
            raise DeadlineExceeded("the request's time was over when it arrived")
        self.stats.running += 1
        return journey

    async def _placed(self, journey: _Running) -> Attempt:
        """Start on a pair, or wait for a node that is coming back. Raises like ``_let_in`` and ``_start``."""
        while True:
            try:
                await self._let_in(journey)
                return self._start(journey)
            except NodeUnavailable as error:
                if not await self.absence.change(min(self.absence.until(), journey.request.deadline)):
                    raise journey.error or error from None  # why the last attempt failed says more

    async def _let_in(self, journey: _Running) -> None:
        """Wait for room where limits are set. A request admitted once may retry freely. Raises like ``Door.enter``."""
        if self.door.is_open or not journey.is_new:
            return
        request = journey.request
        facts = self.placer.facts(journey, self._clock())
        band = band_of(request.priority)
        try:
            await self.door.enter(facts, request.sampling.max_tokens, request.deadline, request.salt, band)
        except (Overloaded, DeadlineExceeded, asyncio.CancelledError):
            self.placer.tell_in_vain(facts, journey, self._clock())
            raise

    def _start(self, journey: _Running) -> Attempt:
        """Place the remaining part of the request, book it, and call both nodes. Raises like ``Placer.place``."""
        request, now = journey.request, self._clock()
        facts = self.placer.facts(journey, now)
        placement = self.placer.place(facts, journey, now)
        # before booking: it may exceed the message size
        requests = node_requests(request, journey.tokens, placement, next(self._epochs))
        booking = self._book(facts, placement, request.sampling.max_tokens, now)
        journey.placed(placement)
        log.debug("%s placed: %s", request.request_id, placement)
        return self._call(journey, placement, booking, requests)

    def _call(self, journey: _Running, placement: Placement, booking: Booking, requests: NodeRequests) -> Attempt:
        request = journey.request
        merger = Merger(
            expected=[len(answer) for answer in journey.emitted],
            handoff=handoff_lifecycle(requests.prefill.handoff_id) if placement.decode else None,
            tells_first=not journey.is_search,
            tells_scores=request.sampling.prompt_logprobs is not None and not journey.has_scores,
        )
        attempt = Attempt(
            channels=self._channels,
            placement=placement,
            booking=booking,
            requests=requests,
            merger=merger,
            deadline=request.deadline,
            handoff_timeout_s=self._handoff_timeout_s,
            clock=self._clock,
            on_prefilled=lambda: self._prefilled(booking),
            on_lost=self._lost,
        )
        for choice in journey.ended:
            attempt.end_choice(choice)
        for info in attempt.nodes:
            self._attempts.setdefault(info.incarnation, set()).add(attempt)
        return attempt

    def _book(self, facts: RequestFacts, placement: Placement, max_tokens: int, now: float) -> Booking:
        stays = placement.prefill.role is Role.DECODE  # its decode steps run there as well
        booked = placement._replace(decode=placement.prefill) if stays else placement
        booking = self.placer.scheduler.book(facts, booked, now)
        self.stats.tails += stays
        self.door.booked(booking, facts, placement, max_tokens)
        return booking

    def _note(self, journey: _Running, attempt: Attempt, delta: Delta) -> Delta:
        """Count a delta on its way to the client, and add the summary once the prefill node has reported."""
        if delta.tokens and journey.is_new:
            self._note_first(journey, attempt)
        self.stats.output_tokens += len(delta.tokens)
        journey.take(delta)
        report = attempt.merger.report
        is_news = report is not None and not journey.has_report
        if report is not None and is_news:
            self.stats.count_prompt(journey.take_report(report), self._model.shape.block_tokens)
        return replace(delta, summary=journey.summary) if is_news or delta.finish_reason is not None else delta

    def _note_first(self, journey: _Running, attempt: Attempt) -> None:
        """The first token is there. Raises Overloaded like ``Door.look_late``."""
        now = self._clock()
        if self.door.looks_late:
            self.door.look_late(attempt.booking, self.placer.facts(journey, now))
        if attempt.placement.is_known:
            self.stats.compare_ttft(attempt.placement.predicted_ttft_ms, (now - journey.started_at) * 1e3)

    def _prepare_retry(self, journey: _Running, attempt: Attempt, failure: AttemptFailed) -> None:
        """Learn from a failed attempt. Raises its error when there is nothing left to try."""
        self.stats.failed_attempts[failure.error.code] += 1
        journey.error = failure.error
        if isinstance(failure.error, ChecksumMismatch):
            self.on_checksum_error(attempt.nodes)
        may_try = journey.retries.learn(self._blame(attempt))
        if not (may_try and failure.is_retryable):
            raise failure.error from None
        self.stats.retries += 1
        request_id = journey.request.request_id
        log.warning("%s is tried elsewhere after %d tokens: %s", request_id, journey.num_emitted, failure.error)

    def _blame(self, attempt: Attempt) -> Failure:
        """What happened to the nodes of a failed attempt."""
        return Failure(
            nodes=incarnations(attempt.nodes),
            lost=incarnations(attempt.lost_nodes),
            leaving=incarnations(filter(self._fleet.registry.is_draining, attempt.nodes)),
            met_nobody=attempt.met_nobody,
        )

    def _end_attempt(self, journey: _Running, attempt: Attempt) -> None:
        attempt.close()
        self.placer.scheduler.close(attempt.booking, self._clock())
        self.door.ended(attempt.booking, journey.num_emitted if journey.is_whole else 0)
        if attempt.merger.handoff is not None:
            self.stats.handoffs[attempt.merger.handoff.state] += 1
        for info in attempt.nodes:
            attempts = self._attempts[info.incarnation]
            attempts.discard(attempt)
            if not attempts:
                del self._attempts[info.incarnation]

    def _end_failed(self, journey: _Running, error: Exception) -> None:
        self.stats.failures[error.code if isinstance(error, MooncakeError) else InternalError.code] += 1
        expired = isinstance(error, DeadlineExceeded)
        journey.lifecycle.move(RequestState.EXPIRED if expired else RequestState.FAILED)

    def _end(self, journey: _Running) -> None:
        self.stats.running -= 1
        if journey.lifecycle.has_ended:  # it failed
            return
        journey.lifecycle.move(RequestState.FINISHED if journey.is_whole else RequestState.CANCELLED)
        self.stats.count_end(journey.is_whole, self._clock() - journey.started_at, journey.num_emitted)
