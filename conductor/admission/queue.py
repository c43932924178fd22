"""The queue in front of placement: asks ``Admission`` about each request and holds back or refuses what does not fit.

The only place where a request waits for capacity. It calls no node: ``admission`` and ``fair_queue`` decide; here are
the futures of queued requests, and the moments at which the next one is considered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from conductor.admission.admission import Admission, Mode, Verdict
from conductor.admission.fair_queue import Band, Entry, FairQueue
from conductor.admission.rules import ADMISSIONS, Limits
from conductor.placement.bookings import Booking
from conductor.placement.scheduler import Placement, PlacementScheduler
from conductor.placement.view import RequestFacts
from conductor.stats import AdmissionStats
from mooncake.config import ConductorSection
from mooncake.errors import ConfigError, DeadlineExceeded, NodeUnavailable, Overloaded

POLL_S = 0.05  # how often queued requests are reconsidered, besides after every end of a prefill or request
BATCH_LOAD = 0.5  # the batch class enters below this load


@dataclass(eq=False, slots=True)
class _Queued:
    facts: RequestFacts
    max_tokens: int
    admitted: asyncio.Future[None]

    def refuse(self, error: Exception) -> None:
        if not self.admitted.done():
            self.admitted.set_exception(error)


class AdmissionQueue:
    """One owner, one event loop. Without limits every request is admitted at once."""

    def __init__(
        self,
        scheduler: PlacementScheduler,
        section: ConductorSection,
        clock: Callable[[], float],
        stats: AdmissionStats,
    ) -> None:
        """Raises ConfigError for an unknown rule or mode."""
        if section.admission not in ADMISSIONS:
            raise ConfigError(f"conductor.admission must be one of {', '.join(ADMISSIONS)}, got {section.admission!r}")
        if section.admission_mode not in tuple(Mode):
            modes = ", ".join(Mode)
            raise ConfigError(f"conductor.admission_mode must be one of {modes}, got {section.admission_mode!r}")
        limits = Limits(section.ttft_limit_ms or float("inf"), section.tbt_limit_ms or float("inf"))
        self.is_unlimited = limits == Limits()
        self.admission = Admission(ADMISSIONS[section.admission], limits, Mode(section.admission_mode), stats=stats)
        self._scheduler = scheduler
        self._clock = clock
        self._queue = FairQueue[_Queued](section.max_waiting)
        self._poll_timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def admit(self, facts: RequestFacts, max_tokens: int, deadline: float, tenant: str, band: Band) -> None:
        """Return when the request may proceed.

        Raises Overloaded with a retry time, DeadlineExceeded when its time runs out in the queue, or NodeUnavailable.
        """
        if self.is_unlimited:
            return
        may_enter = partial(self._may_overtake, band)
        verdict = self._decide(facts, max_tokens, band, may_enter)
        if self._fits(verdict) and may_enter(verdict):
            return
        if self.admission.mode is Mode.HARD and band is not Band.BATCH:
            raise Overloaded(_reason(verdict), verdict.retry_after_s)
        queued = _Queued(facts, max_tokens, asyncio.get_running_loop().create_future())
        await self._wait(queued, deadline, tenant, band)

    def placed(self, booking: Booking, facts: RequestFacts, placement: Placement, max_tokens: int) -> None:
        """An admitted request was placed and booked."""
        if not self.is_unlimited:
            self.admission.placed(booking, facts, max_tokens, placement, self._clock())
            self._admit_next()

    def prefill_ended(self, booking: Booking) -> None:
        if not self.is_unlimited:
            self.admission.prefill_ended(booking, None, self._clock())
            self._admit_next()

    @property
    def checks_after_prefill(self) -> bool:
        return self.admission.checks_after_prefill and not self.is_unlimited

    def check_after_prefill(self, booking: Booking, facts: RequestFacts) -> None:
        """The first token is there. Raises Overloaded when decoding has no room for it after all."""
        now, admission = self._clock(), self.admission
        keeps = admission.prefill_ended(booking, self._scheduler.query(facts, now), now)
        if not keeps and admission.mode is Mode.HARD:
            raise Overloaded("the time between tokens is past its limit", admission.decode_s)

    def finished(self, booking: Booking, output_tokens: int) -> None:
        """``output_tokens`` is the length of a complete answer, or 0 for one that was cut short."""
        if not self.is_unlimited:
            self.admission.finished(booking, self._clock(), output_tokens)
            self._admit_next()

    def _decide(
        self, facts: RequestFacts, max_tokens: int, band: Band, may_enter: Callable[[Verdict], bool]
    ) -> Verdict:
        now = self._clock()
        query = self._scheduler.query(facts, now)
        return self.admission.decide(query, self._scheduler.answer(query), now, max_tokens, band, may_enter)

    def _fits(self, verdict: Verdict) -> bool:
        """No request waits for room that even an empty cluster would not have."""
        return verdict.is_admitted or (self.admission.mode is Mode.SOFT and not len(self.admission.inflight))

    def _may_overtake(self, band: Band, verdict: Verdict) -> bool:
        """Whether it may proceed although others are queued: only past lower bands."""
        first = self._queue.peek(is_idle=False)
        return (first is None or band < first.band) and self._has_capacity(band, verdict)

    def _has_capacity(self, band: Band, verdict: Verdict) -> bool:
        """The batch class only gets what nobody else uses."""
        return band is not Band.BATCH or verdict.load <= BATCH_LOAD or not len(self.admission.inflight)

    async def _wait(self, queued: _Queued, deadline: float, tenant: str, band: Band) -> None:
        now = self._clock()
        displaced = self._queue.push(Entry(queued, tenant, band, float(queued.facts.num_tokens), deadline))
        if displaced is not None:
            displaced.item.refuse(Overloaded("too many requests wait already", 1.0))
        self._start_poll_timer()
        try:
            async with asyncio.timeout(max(deadline - now, 0.0)):
                await queued.admitted
        except TimeoutError:
            raise DeadlineExceeded("the request's time ran out while it waited for room") from None
        finally:
            self._queue.remove(queued)

    def _admit_next(self) -> None:
        """Admit the first queued request if it fits now; the next check comes once it is booked. One that finds no node
        leaves the queue, to wait for a node like all others; so does one with too little time left."""
        while (entry := self._queue.peek(is_idle=True)) is not None:
            queued, may_enter = entry.item, partial(self._has_capacity, entry.band)
            facts = queued.facts._replace(budget_ms=(entry.deadline - self._clock()) * 1e3)
            try:
                verdict = self._decide(facts, queued.max_tokens, entry.band, may_enter)
            except (NodeUnavailable, Overloaded) as error:
                self._queue.remove(queued)
                queued.refuse(error)
                continue
            if not (self._fits(verdict) and may_enter(verdict)):
                return
            self._queue.pop(is_idle=True)
            if not queued.admitted.done():
                queued.admitted.set_result(None)
            return

    def _start_poll_timer(self) -> None:
        if self._poll_timer is None:
            self._poll_timer = asyncio.get_running_loop().call_later(POLL_S, self._poll)

    def _poll(self) -> None:
        self._poll_timer = None
        self._admit_next()
        if len(self._queue):
            self._start_poll_timer()


def _reason(verdict: Verdict) -> str:
    if verdict.is_reserved:
        return "the free room is reserved for requests that were told to come now"
    what = "the first token" if verdict.prefill_load >= verdict.decode_load else "the time between tokens"
    return f"{what} is predicted at {verdict.load:.1f} times its limit"
