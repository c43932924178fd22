"""Admission control: whether a request may enter now, later, or not at all, before anything is spent on it.

Pure: times and the random generator are arguments, and nothing is sent from here. It follows admitted requests from
placement to their end, because they determine how busy decoding will be when a new request gets there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from conductor.admission.fair_queue import Band
from conductor.admission.inflight_requests import NUM_SAMPLES, InflightRequests
from conductor.admission.lengths import OutputLengths, Turns
from conductor.admission.retry_after import MAX_RETRY_S, RetryAfterEstimator
from conductor.admission.retry_reservations import RetryReservations
from conductor.admission.rules import Candidate, Known, Limits, Rule, baseline, no_rule, step_load
from conductor.placement.bookings import Booking
from conductor.placement.scheduler import Placement
from conductor.placement.view import NONE, PlacementQuery, RequestFacts
from conductor.stats import AdmissionStats

MIN_RETRY_S = 0.05
MAX_REFUSALS = 1024  # that are checked in hindsight
DECODE_TIME_RATE = 0.02  # smoothing factor of the mean decode time
FIRST_DECODE_S = 10.0  # assumed until a decode time has been seen


class Mode(StrEnum):
    OFF = "off"  # admit everyone, but count what would have been refused
    SOFT = "soft"  # let it wait
    HARD = "hard"  # refuse it with a retry time


class Verdict(NamedTuple):
    """Predicted loads over their limits: 1 is exactly at the limit. ``retry_after_s`` is when the request might fit."""

    is_admitted: bool
    prefill_load: float
    decode_load: float
    retry_after_s: float = 0.0
    is_reserved: bool = False  # refused because the room is reserved for a client told to return now

    @property
    def load(self) -> float:
        return max(self.prefill_load, self.decode_load)


class _Refusal(NamedTuple):
    """A request refused for decode load: when and where it would have started to decode."""

    joins_at: float
    decode_id: str


class Admission:
    """One owner. ``decide`` answers, and ``fits`` asks without a trace; the methods below them follow an admitted
    request."""

    def __init__(
        self,
        rule: Rule,
        limits: Limits,
        mode: Mode = Mode.HARD,
        rng: np.random.Generator | None = None,
        stats: AdmissionStats | None = None,
    ) -> None:
        self.rule = rule
        self.limits = limits
        self.mode = mode
        self.lengths = OutputLengths()
        self.turns = Turns()
        self.inflight = InflightRequests()
        self.retry_after = RetryAfterEstimator()
        self.reservations = RetryReservations()
        self.stats = stats or AdmissionStats()
        self._rng = rng if rng is not None else np.random.default_rng(0)
        self.decode_s = FIRST_DECODE_S  # running mean of a request's decode time
        self._refusals: deque[_Refusal] = deque(maxlen=MAX_REFUSALS)
        self._prompts: dict[Booking, bytes] = {}  # the last full block of each prompt

    @property
    def checks_after_prefill(self) -> bool:
        """Whether ``prefill_ended`` needs a query."""
        return self.rule is baseline

    def decide(
        self,
        query: PlacementQuery,
        placement: Placement,
        now: float,
        max_tokens: int,
        band: Band = Band.NORMAL,
        may_enter: Callable[[Verdict], bool] = lambda verdict: True,
    ) -> Verdict:
        """Whether the request fits where it would be placed, without room that is reserved for returning clients.
        One that fits and still has to wait, because it may not ``may_enter``, is not counted: it is decided again."""
        self._check_past_refusals(query, now)
        candidate = self._candidate(query, placement, now, max_tokens)
        verdict = self._predict(candidate, self._known())
        self.retry_after.observe(candidate.prefill_wait_ms, verdict.decode_load, now)
        client = (query.facts.keys[-1] if query.facts.keys else b"", query.facts.num_tokens)
        is_refusable = self.mode is Mode.HARD and band is not Band.BATCH  # others wait in the queue
        is_on_time = is_refusable and self.reservations.claim(client, now)
        self.stats.returned_on_time += is_on_time
        if not is_on_time and band is not Band.URGENT and verdict.is_admitted and self.reservations.is_due(now):
            verdict = verdict._replace(is_admitted=False, is_reserved=True)
        if verdict.is_admitted:
            if may_enter(verdict):
                self.stats.admitted += 1
                self.reservations.admitted(client, now)
            return verdict
        self.stats.refused += 1
        self.stats.refused_again += is_on_time
        if verdict.decode_load > 1.0 and placement.decode is not None:
            self._refusals.append(_Refusal(candidate.joins_at, placement.decode.node_id))
        wait_s = self._retry_after_s(candidate, verdict)
        if is_refusable:
            wait_s = self.reservations.reserve(client, wait_s, now, is_on_time)
        return verdict._replace(is_admitted=self.mode is Mode.OFF, retry_after_s=wait_s)

    def fits(
        self, query: PlacementQuery, placement: Placement, now: float, max_tokens: int, rng: np.random.Generator
    ) -> bool:
        """As ``decide``, but without side effects: nothing is counted, and random numbers come from ``rng``, so that
        later decisions are unaffected."""
        if self.reservations.is_due(now):
            return False
        known = self._known()._replace(inflight=self.inflight.copy(), rng=rng)
        return self._predict(self._candidate(query, placement, now, max_tokens), known).is_admitted

    def placed(self, booking: Booking, facts: RequestFacts, max_tokens: int, placement: Placement, now: float) -> None:
        """An admitted request was placed and booked."""
        if facts.keys:
            self._prompts[booking] = facts.keys[-1]
        if not booking.decode_id:
            return
        kind = self.turns.kind(facts.keys, facts.num_tokens)
        lengths = self.lengths.sample(kind, max_tokens, NUM_SAMPLES, self._rng)
        self.inflight.add(booking, kind, max_tokens, _joins_at(placement, now), lengths)

    def prefill_ended(self, booking: Booking, query: PlacementQuery | None, now: float) -> bool:
        """The first token is there. Returns False to drop the request. Only a rule that ``checks_after_prefill`` gets
        a query."""
        self.inflight.joined(booking, now)
        if query is None or not booking.decode_id:
            return True
        decode = query.view.decode_at.get(booking.decode_id, NONE)
        batch = self.inflight.decoding_on(booking.decode_id)
        keeps = decode == NONE or step_load(self.limits, query, decode, batch) <= 1.0
        if not keeps:
            self.stats.refused_after_prefill += 1
        return keeps or self.mode is Mode.OFF

    def finished(self, booking: Booking, now: float, output_tokens: int = 0) -> None:
        """The request has ended; ``output_tokens`` is the length of a complete answer, or 0 if it was cut short."""
        kind, joined_at = self.inflight.remove(booking)
        last = self._prompts.pop(booking, None)
        if last is not None and output_tokens:
            self.turns.observe(last, output_tokens)
        if kind is not None and output_tokens:
            self.lengths.observe(kind, output_tokens)
            if joined_at <= now:
                self.decode_s += DECODE_TIME_RATE * (now - joined_at - self.decode_s)

    def _candidate(self, query: PlacementQuery, placement: Placement, now: float, max_tokens: int) -> Candidate:
        decode = query.view.decode_at.get(placement.decode.node_id, NONE) if placement.decode else NONE
        kind = self.turns.kind(query.facts.keys, query.facts.num_tokens)
        return Candidate(query, placement, decode, kind, max_tokens, now, _joins_at(placement, now))

    def _known(self) -> Known:
        return Known(self.limits, self.inflight, self.lengths, self.decode_s, self._rng)

    def _predict(self, candidate: Candidate, known: Known) -> Verdict:
        prefill_load = candidate.placement.predicted_ttft_ms / self.limits.ttft_ms
        decode_load = 0.0 if candidate.decode == NONE else self.rule(known, candidate)
        fits = self.rule is no_rule or max(prefill_load, decode_load) <= 1.0
        return Verdict(fits, prefill_load, decode_load)

    def _retry_after_s(self, candidate: Candidate, verdict: Verdict) -> float:
        """The wait that recent requests needed. Before anything is known: the later of the two times at which the
        prefill queue and the decode node would have room if nobody else came."""
        placement = candidate.placement
        wait_s: float = self.retry_after.estimate_s(self.limits.ttft_ms - placement.breakdown.prefill_ms)
        if not wait_s:
            wait_s = (placement.predicted_ttft_ms - self.limits.ttft_ms) / 1e3
            if verdict.decode_load > 1.0 and placement.decode is not None:
                wait_s = max(wait_s, self._until_room_s(candidate, verdict.decode_load))
        return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)

    def _until_room_s(self, candidate: Candidate, decode_load: float) -> float:
        """When enough sequences on the node will have ended, by their median sampled lengths. A retry may go to any
        node, so with n nodes equally full the first one has room n times sooner."""
        num_nodes = len(candidate.query.view.decode.nodes)
        step_s = max(candidate.placement.breakdown.step_ms, 0.01) / 1e3
        left_s = np.sort(self.inflight.left_s(candidate.decode_id, candidate.now, step_s))
        if not len(left_s):
            return self.decode_s / 2 / num_nodes
        too_many = int(np.ceil((1.0 - 1.0 / decode_load) * (len(left_s) + 1)))
        return float(left_s[min(max(too_many, 1), len(left_s)) - 1]) / num_nodes

    def _check_past_refusals(self, query: PlacementQuery, now: float) -> None:
        """Count for how many earlier refusals for decode load there was room when they would have decoded."""
        while self._refusals and self._refusals[0].joins_at <= now:
            decode_id = self._refusals.popleft().decode_id
            decode = query.view.decode_at.get(decode_id, NONE)
            if decode == NONE:
                continue
            self.stats.refusals_checked += 1
            batch, new_tokens = self.inflight.decoding_on(decode_id), float(query.facts.num_tokens)
            self.stats.refusals_unneeded += step_load(self.limits, query, decode, batch, new_tokens) <= 1.0


def _joins_at(placement: Placement, now: float) -> float:
    """When (s) a request placed now is predicted to begin to decode."""
    return now + (placement.predicted_ttft_ms + placement.breakdown.handoff_ms) / 1e3
