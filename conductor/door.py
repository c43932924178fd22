"""The entrance: asks admission, and delays or refuses what does not fit. The only place where a request waits for room.

It knows loads and limits but calls no node. ``admission`` and ``fairness`` decide; here are the futures of those who
wait, and the moments at which the next one is considered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from conductor.admission import ADMISSIONS, Admission, Limits, Mode, Verdict
from conductor.bookings import Booking
from conductor.fairness import Band, Waiting, WaitingRoom
from conductor.scheduler import Placement, Scheduler
from conductor.view import RequestFacts
from mooncake.config import ConductorSection
from mooncake.errors import ConfigError, DeadlineExceeded, NodeUnavailable, Overloaded

LOOK_S = 0.05  # how often waiting requests are reconsidered, besides after every end of a prefill or request
BATCH_LOAD = 0.5  # the batch class enters below this load


@dataclass(eq=False, slots=True)
class _Guest:
    facts: RequestFacts
    max_tokens: int
    is_in: asyncio.Future[None]


class Door:
    """One owner, one event loop. Without limits everyone enters at once."""

    def __init__(self, scheduler: Scheduler, section: ConductorSection, clock: Callable[[], float]) -> None:
        """Raises ConfigError for an unknown rule or mode."""
        if section.admission not in ADMISSIONS:
            raise ConfigError(f"conductor.admission must be one of {', '.join(ADMISSIONS)}, got {section.admission!r}")
        if section.admission_mode not in tuple(Mode):
            modes = ", ".join(Mode)
            raise ConfigError(f"conductor.admission_mode must be one of {modes}, got {section.admission_mode!r}")
        limits = Limits(section.ttft_limit_ms or float("inf"), section.tbt_limit_ms or float("inf"))
        self.is_open = limits == Limits()
        self.admission = Admission(ADMISSIONS[section.admission], limits, Mode(section.admission_mode))
        self._scheduler = scheduler
        self._clock = clock
        self._room = WaitingRoom[_Guest](section.max_waiting)
        self._looking: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._room)

    async def enter(
        self, facts: RequestFacts, max_tokens: int, deadline: float, tenant: str = "", band: Band = Band.NORMAL
    ) -> None:
        """Return when the request may proceed.

        Raises Overloaded with a retry time, DeadlineExceeded when its time runs out while it waits, or NodeUnavailable.
        """
        if self.is_open:
            return
        verdict = self._ask(facts, max_tokens, band)
        if self._fits(verdict) and self._goes_before_others(band, verdict):
            return
        if self.admission.mode is Mode.HARD and band is not Band.BATCH:
            raise Overloaded(_why(verdict), verdict.retry_after_s)
        guest = _Guest(facts, max_tokens, asyncio.get_running_loop().create_future())
        await self._wait(guest, deadline, tenant, band)

    def booked(self, booking: Booking, facts: RequestFacts, placement: Placement, max_tokens: int) -> None:
        if not self.is_open:
            self.admission.admitted(booking, facts, max_tokens, placement, self._clock())
            self._look()

    def joined(self, booking: Booking) -> None:
        """The request's prompt is computed."""
        if not self.is_open:
            self.admission.prefill_ended(booking, None, self._clock())
            self._look()

    @property
    def looks_late(self) -> bool:
        return self.admission.looks_late and not self.is_open

    def look_late(self, booking: Booking, facts: RequestFacts) -> None:
        """The first token is there. Raises Overloaded when decoding has no room for it after all."""
        now, admission = self._clock(), self.admission
        keeps = admission.prefill_ended(booking, self._scheduler.ask(facts, now), now)
        if not keeps and admission.mode is Mode.HARD:
            raise Overloaded("the time between tokens is past its limit", admission.decode_s)

    def ended(self, booking: Booking, output_tokens: int) -> None:
        """``output_tokens`` is the length of a complete answer, or 0 for one that was cut short."""
        if not self.is_open:
            self.admission.finished(booking, self._clock(), output_tokens)
            self._look()

    def _ask(self, facts: RequestFacts, max_tokens: int, band: Band) -> Verdict:
        now = self._clock()
        question = self._scheduler.ask(facts, now)
        return self.admission.decide(question, self._scheduler.answer(question), now, max_tokens, band)

    def _fits(self, verdict: Verdict) -> bool:
        """Nobody waits for room that even an empty cluster would not have."""
        return verdict.is_admitted or (self.admission.mode is Mode.SOFT and not len(self.admission.flights))

    def _goes_before_others(self, band: Band, verdict: Verdict) -> bool:
        ahead = self._room.peek(is_idle=False)
        return (ahead is None or band < ahead.band) and self._has_capacity(band, verdict)

    def _has_capacity(self, band: Band, verdict: Verdict) -> bool:
        """The batch class only gets what nobody else uses."""
        return band is not Band.BATCH or verdict.load <= BATCH_LOAD or not len(self.admission.flights)

    async def _wait(self, guest: _Guest, deadline: float, tenant: str, band: Band) -> None:
        now = self._clock()
        displaced = self._room.push(Waiting(guest, tenant, band, float(guest.facts.num_tokens), deadline, now))
        if displaced is not None and not displaced.item.is_in.done():
            displaced.item.is_in.set_exception(Overloaded("too many requests wait already", 1.0))
        self._look_later()
        try:
            async with asyncio.timeout(max(deadline - now, 0.0)):
                await guest.is_in
        except TimeoutError:
            raise DeadlineExceeded("the request's time ran out while it waited for room") from None
        finally:
            self._room.remove(guest)

    def _look(self) -> None:
        """Whether the next request fits now. One at a time: the next check comes when this one is booked. A request
        that finds no node is released to wait for one like all others; one with too little time left no longer
        blocks the queue."""
        while (waiting := self._room.peek(is_idle=True)) is not None:
            guest = waiting.item
            facts = guest.facts._replace(budget_ms=(waiting.deadline - self._clock()) * 1e3)
            try:
                verdict = self._ask(facts, guest.max_tokens, waiting.band)
            except (NodeUnavailable, Overloaded) as error:
                self._room.remove(guest)
                if not guest.is_in.done():
                    guest.is_in.set_exception(error)
                continue
            if not (self._fits(verdict) and self._has_capacity(waiting.band, verdict)):
                return
            self._room.pop(is_idle=True)
            if not guest.is_in.done():
                guest.is_in.set_result(None)
            return

    def _look_later(self) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = None
        self._look()
        if len(self._room):
            self._look_later()


def _why(verdict: Verdict) -> str:
    if verdict.is_kept:
        return "the free room is reserved for requests that were told to come now"
    what = "the first token" if verdict.prefill_load >= verdict.decode_load else "the time between tokens"
    return f"{what} is predicted at {verdict.load:.1f} times its limit"
