"""Admission control: whether a request may enter now, later, or not at all, before anything is spent on it.

Pure: times and the random generator are arguments, and nothing is sent from here. It follows admitted requests from
placement to their end, because they determine how busy decoding will be when a new request gets there. The rules, from
the paper's to ours:

    none        admit everyone
    baseline    TTFT on arrival; decode load once the prefill has ended (a late refusal wastes the prefill)
    early       TTFT and the current decode load, both on arrival; the two loads oscillate against each other
    predicted   TTFT, and the decode load at the time this prefill will end, assuming one decode time for all
    lookahead   as predicted, but for the chosen node and over sampled answer lengths: both TBT and KV room
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from conductor.appointments import Appointments
from conductor.bookings import Booking
from conductor.fairness import Band
from conductor.lengths import Kind, OutputLengths, Turns, sample_beyond
from conductor.scheduler import Placement
from conductor.view import NONE, Bools, Floats, Question, RequestFacts
from conductor.waits import MAX_RETRY_S, RecentRoom

NUM_SAMPLES = 16  # sampled futures
CONFIDENCE = 0.9  # fraction of the futures in which the request must fit
TBT_ROOM = 0.85  # of the limit, for the step a request joins: its longest gaps come later, or before its first step
COMFORT = 0.7  # if all loads are certainly below this fraction of the limits, no future is sampled
MIN_RETRY_S = 0.05
MAX_REFUSED = 1024  # refusals that are re-examined later
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
    is_kept: bool = False  # refused because the room is reserved for clients with an appointment

    @property
    def load(self) -> float:
        return max(self.prefill_load, self.decode_load)


@dataclass(frozen=True, slots=True)
class Limits:
    """Service-level limits in ms. TBT is the mean of the longest tenth of a request's token gaps."""

    ttft_ms: float = float("inf")
    tbt_ms: float = float("inf")


@dataclass(slots=True)
class AdmissionStats:
    admitted: int = 0
    refused: int = 0
    refused_after_prefill: int = 0
    could_have_served: int = 0  # refused, though there was room by the time it would have decoded
    looked_back: int = 0  # refusals for which that is known
    came_as_told: int = 0  # came back at the time an earlier refusal had given
    came_in_vain: int = 0  # of those, refused again


class Coming(NamedTuple):
    """A candidate as a rule sees it: where it would go and when (s) it would begin to decode."""

    question: Question
    placement: Placement
    decode: int  # index into the view; NONE: no decode node needed
    kind: Kind
    max_tokens: int
    now: float
    joins_at: float

    @property
    def prefill_wait_ms(self) -> float:
        """Time in the queue before its prompt is computed."""
        return self.placement.breakdown.queue_ms + self.placement.breakdown.fetch_ms


class Admission:
    """One owner. ``decide`` changes only counters; the methods below it follow an admitted request."""

    def __init__(
        self,
        rule: Rule,
        limits: Limits,
        mode: Mode = Mode.HARD,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.rule = rule
        self.limits = limits
        self.mode = mode
        self.lengths = OutputLengths()
        self.turns = Turns()
        self.flights = Flights()
        self.recent_room = RecentRoom()
        self.appointments = Appointments()
        self.stats = AdmissionStats()
        self.rng = rng if rng is not None else np.random.default_rng(0)
        self.decode_s = FIRST_DECODE_S  # running mean of a request's decode time
        self._refused: deque[tuple[float, float, str]] = deque(maxlen=MAX_REFUSED)
        self._prompts: dict[Booking, bytes] = {}  # the last full block of each prompt

    @property
    def looks_late(self) -> bool:
        """Whether ``prefill_ended`` needs a question."""
        return self.rule is baseline

    def decide(
        self, question: Question, placement: Placement, now: float, max_tokens: int, band: Band = Band.NORMAL
    ) -> Verdict:
        """Whether the request fits where it would be placed without taking the room of a client with an appointment."""
        self._look_back(question, now)
        coming = self._coming(question, placement, now, max_tokens)
        verdict = self._judge(coming)
        self.recent_room.found(coming.prefill_wait_ms, verdict.decode_load, now)
        name = (question.facts.keys[-1] if question.facts.keys else b"", question.facts.num_tokens)
        is_told = self.mode is Mode.HARD and band is not Band.BATCH  # the batch class waits instead of being refused
        comes_as_told = is_told and self.appointments.comes(name, now)
        self.stats.came_as_told += comes_as_told
        if not comes_as_told and band is not Band.URGENT and verdict.is_admitted and self.appointments.is_owed(now):
            verdict = verdict._replace(is_admitted=False, is_kept=True)
        if verdict.is_admitted:
            self.stats.admitted += 1
            self.appointments.let_in(name, now)
            return verdict
        self.stats.refused += 1
        self.stats.came_in_vain += comes_as_told
        if verdict.decode_load > 1.0 and placement.decode is not None:
            self._refused.append((coming.joins_at, verdict.decode_load, placement.decode.node_id))
        wait_s = self._retry_s(coming, verdict)
        if is_told:
            wait_s = self.appointments.make(name, wait_s, now, comes_as_told)
        return verdict._replace(is_admitted=self.mode is Mode.OFF, retry_after_s=wait_s)

    def fits(
        self, question: Question, placement: Placement, now: float, max_tokens: int, rng: np.random.Generator
    ) -> bool:
        """As ``decide``, but without side effects: nothing is counted, and random numbers come from ``rng``, so that
        later decisions are unaffected."""
        own, lengths = self.rng, self.flights.lengths
        self.rng, self.flights.lengths = rng, lengths.copy()
        try:
            is_owed = self.appointments.is_owed(now)
            return not is_owed and self._judge(self._coming(question, placement, now, max_tokens)).is_admitted
        finally:
            self.rng, self.flights.lengths = own, lengths

    def _coming(self, question: Question, placement: Placement, now: float, max_tokens: int) -> Coming:
        decode = question.view.decode_at.get(placement.decode.node_id, NONE) if placement.decode else NONE
        joins_at = now + (placement.predicted_ttft_ms + placement.breakdown.handoff_ms) / 1e3
        kind = self.turns.kind(question.facts.keys, question.facts.num_tokens)
        return Coming(question, placement, decode, kind, max_tokens, now, joins_at)

    def _judge(self, coming: Coming) -> Verdict:
        prefill_load = coming.placement.predicted_ttft_ms / self.limits.ttft_ms
        decode_load = 0.0 if coming.decode == NONE else self.rule(self, coming)
        fits = self.rule is no_rule or max(prefill_load, decode_load) <= 1.0
        return Verdict(fits, prefill_load, decode_load)

    def admitted(
        self, booking: Booking, facts: RequestFacts, max_tokens: int, placement: Placement, now: float
    ) -> None:
        """The request was placed and booked."""
        if facts.keys:
            self._prompts[booking] = facts.keys[-1]
        if not booking.decode_id:
            return
        joins_at = now + (placement.predicted_ttft_ms + placement.breakdown.handoff_ms) / 1e3
        kind = self.turns.kind(facts.keys, facts.num_tokens)
        lengths = self.lengths.sample(kind, max_tokens, NUM_SAMPLES, self.rng)
        self.flights.add(booking, kind, max_tokens, joins_at, lengths)

    def prefill_ended(self, booking: Booking, question: Question | None, now: float) -> bool:
        """The first token is there. Returns False to drop the request. Only a rule that ``looks_late`` gets a
        question."""
        self.flights.joined(booking, now)
        if question is None or not booking.decode_id:
            return True
        decode = question.view.decode_at.get(booking.decode_id, NONE)
        keeps = (
            decode == NONE or _step_load(self, question, decode, self.flights.on(booking.decode_id, now), 0.0) <= 1.0
        )
        if not keeps:
            self.stats.refused_after_prefill += 1
        return keeps or self.mode is Mode.OFF

    def finished(self, booking: Booking, now: float, output_tokens: int = 0) -> None:
        """The request has ended; ``output_tokens`` is the length of a complete answer, or 0 if it was cut short."""
        kind, joined_at = self.flights.remove(booking)
        last = self._prompts.pop(booking, None)
        if last is not None and output_tokens:
            self.turns.observe(last, output_tokens)
        if kind is not None and output_tokens:
            self.lengths.observe(kind, output_tokens)
            if joined_at <= now:
                self.decode_s += DECODE_TIME_RATE * (now - joined_at - self.decode_s)

    def _retry_s(self, coming: Coming, verdict: Verdict) -> float:
        """The wait that recent requests needed. Before anything is known: the later of the two times at which the
        prefill queue and the decode node would have room if nobody else came."""
        wait_s: float = self.recent_room.typical_wait_s(self.limits.ttft_ms - coming.placement.breakdown.prefill_ms)
        if not wait_s:
            wait_s = (coming.placement.predicted_ttft_ms - self.limits.ttft_ms) / 1e3
            if verdict.decode_load > 1.0 and coming.placement.decode is not None:
                wait_s = max(wait_s, self._until_room_s(coming, verdict.decode_load))
        return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)

    def _until_room_s(self, coming: Coming, decode_load: float) -> float:
        """When enough sequences on the node will have ended, by their median sampled lengths. A retry may go to any
        node, so with n nodes equally full the first one has room n times sooner."""
        assert coming.placement.decode is not None
        num_nodes = len(coming.question.view.decode.nodes)
        left_s = np.sort(self.flights.left_s(coming.placement.decode.node_id, coming.now, self._step_s(coming)))
        if not len(left_s):
            return self.decode_s / 2 / num_nodes
        too_many = int(np.ceil((1.0 - 1.0 / decode_load) * (len(left_s) + 1)))
        return float(left_s[min(max(too_many, 1), len(left_s)) - 1]) / num_nodes

    def _step_s(self, coming: Coming) -> float:
        return max(coming.placement.breakdown.step_ms, 0.01) / 1e3

    def _look_back(self, question: Question, now: float) -> None:
        """Check earlier refusals for decode load: would there have been room when they got there?"""
        while self._refused and self._refused[0][0] <= now:
            _, _, node_id = self._refused.popleft()
            decode = question.view.decode_at.get(node_id, NONE)
            if decode == NONE:
                continue
            self.stats.looked_back += 1
            load = _step_load(self, question, decode, self.flights.on(node_id, now), float(question.facts.num_tokens))
            self.stats.could_have_served += load <= 1.0


Rule = Callable[[Admission, Coming], float]
"""The decode load of letting the request in, over the limit."""


def no_rule(admission: Admission, coming: Coming) -> float:
    return 0.0


def baseline(admission: Admission, coming: Coming) -> float:
    """On arrival only the prefill counts; the decode load is checked when the prefill has ended."""
    return 0.0


def early(admission: Admission, coming: Coming) -> float:
    """The current decode load. It ignores requests still in prefill, which is why it oscillates."""
    here = admission.flights.on(_decode_id(coming), coming.now)
    return _step_load(admission, coming.question, coming.decode, here, float(coming.question.facts.num_tokens))


def predicted(admission: Admission, coming: Coming) -> float:
    """The mean decode load of the whole system when this prefill ends: every request whose prefill ends earlier has
    joined, and every request has left after the mean decode time (arXiv 2407.00079 §7.4)."""
    side, flights = coming.question.view.decode, admission.flights
    num_nodes = max(len(side.nodes), 1)
    count, context = flights.decoding_at(coming.joins_at, admission.decode_s)
    batch = count / num_nodes + 1.0
    tokens = context / num_nodes + coming.question.facts.num_tokens
    step = side.step_ms + side.sequence_ms * batch + side.context_ms * tokens
    return float(step.mean()) / admission.limits.tbt_ms


def lookahead(admission: Admission, coming: Coming) -> float:
    """The chosen node in sampled futures: the step this request joins, and the peak KV it will ever need.

    A load above 1 means that the request fits in too few of them.
    """
    side, d, facts = coming.question.view.decode, coming.decode, coming.question.facts
    step_ms, sequence_ms, context_ms = side.step_ms.item(d), side.sequence_ms.item(d), side.context_ms.item(d)
    block_tokens = coming.question.shape.block_tokens
    total_tokens = side.total_blocks.item(d) * block_tokens or np.inf
    flights = admission.flights
    rows = flights.rows(_decode_id(coming))
    most = facts.num_tokens + coming.max_tokens + float((flights.context[rows] + flights.limit[rows]).sum())
    everybody = len(rows) + 1
    worst = step_ms + sequence_ms * everybody + context_ms * most
    limit_ms = TBT_ROOM * admission.limits.tbt_ms
    if worst <= COMFORT * limit_ms and most <= COMFORT * total_tokens:
        return max(worst / limit_ms, most / total_tokens)
    batch, context = flights.on(_decode_id(coming), coming.now)  # decoding now: what sets the pace
    step_s = max(step_ms + sequence_ms * max(batch, 1.0) + context_ms * context, 0.01) / 1e3
    lengths = admission.lengths
    left, held, decodes = flights.futures(rows, coming.now, coming.joins_at, step_s, lengths, admission.rng)
    own = lengths.sample(coming.kind, coming.max_tokens, NUM_SAMPLES, admission.rng)
    left = np.concatenate((left, own[:, None]), axis=1)  # [samples, sequences]: tokens still to generate when it joins
    held = np.concatenate((held, np.full((NUM_SAMPLES, 1), float(facts.num_tokens))), axis=1)
    is_there = left > 0.0
    steps_with = is_there & np.append(decodes, True)
    steps = step_ms + sequence_ms * steps_with.sum(axis=1) + context_ms * (held * steps_with).sum(axis=1)
    loads = np.maximum(steps / limit_ms, peak_tokens(left, held * is_there) / total_tokens)
    return float(np.quantile(loads, CONFIDENCE))


def peak_tokens(left: Floats, held: Floats) -> Floats:
    """[samples]: peak number of KV tokens. Memory only grows between two ends, so it peaks just before an end. With
    sequences sorted by tokens left, all later ones are still there at the i-th end, each grown by what the i-th had
    left."""
    order = np.argsort(left, axis=1)
    left = np.take_along_axis(left, order, axis=1)
    held = np.take_along_axis(held, order, axis=1)
    held_from = held[:, ::-1].cumsum(axis=1)[:, ::-1]
    there = (held > 0.0)[:, ::-1].cumsum(axis=1)[:, ::-1]
    result: Floats = (held_from + there * left).max(axis=1)
    return result


def _step_load(admission: Admission, question: Question, d: int, here: tuple[float, float], new_tokens: float) -> float:
    """Time over limit of one step of ``here`` (sequences, context tokens), plus one sequence if it brings tokens."""
    side = question.view.decode
    batch, context = here
    batch += new_tokens > 0.0
    step = side.step_ms.item(d) + side.sequence_ms.item(d) * batch + side.context_ms.item(d) * (context + new_tokens)
    return step / admission.limits.tbt_ms if batch else 0.0


def _decode_id(coming: Coming) -> str:
    return coming.placement.decode.node_id if coming.placement.decode else ""


class Flights:
    """Admitted requests from placement to end, stored as columns: KV held, time of joining, possible lengths."""

    def __init__(self) -> None:
        self._row: dict[Booking, int] = {}
        self._by_node: dict[str, dict[int, None]] = {}
        self._kinds: dict[int, Kind] = {}
        self._free: list[int] = []
        self.is_open: Bools = np.zeros(0, dtype=bool)
        self.is_decoding: Bools = np.zeros(0, dtype=bool)
        self.joins_at: Floats = np.zeros(0)
        self.context: Floats = np.zeros(0)  # prompt tokens
        self.limit: Floats = np.zeros(0)  # maximum answer tokens
        self.lengths: Floats = np.zeros((0, NUM_SAMPLES))  # sampled answer lengths
        self._grow(64)

    def __len__(self) -> int:
        return len(self._row)

    def add(self, booking: Booking, kind: Kind, max_tokens: int, joins_at: float, lengths: Floats) -> None:
        if not self._free:
            self._grow(2 * len(self.context))
        row = self._row[booking] = self._free.pop()
        self._kinds[row] = kind
        self._by_node.setdefault(booking.decode_id, {})[row] = None
        self.is_open[row], self.is_decoding[row] = True, False
        self.joins_at[row], self.context[row], self.limit[row] = joins_at, booking.context_tokens, max_tokens
        self.lengths[row] = lengths

    def joined(self, booking: Booking, now: float) -> None:
        row = self._row.get(booking)
        if row is not None and not self.is_decoding[row]:
            self.is_decoding[row], self.joins_at[row] = True, now

    def remove(self, booking: Booking) -> tuple[Kind | None, float]:
        """Returns its kind and when it joined (inf: never); None if it is unknown or already removed."""
        row = self._row.pop(booking, None)
        if row is None:
            return None, np.inf
        joined_at = float(self.joins_at[row]) if self.is_decoding[row] else np.inf
        self.is_open[row] = self.is_decoding[row] = False
        rows = self._by_node[booking.decode_id]
        del rows[row]
        if not rows:
            del self._by_node[booking.decode_id]
        self._free.append(row)
        return self._kinds.pop(row), joined_at

    def rows(self, node_id: str) -> list[int]:
        return list(self._by_node.get(node_id, ()))

    def on(self, node_id: str, now: float) -> tuple[float, float]:
        """Sequences decoding on the node now, and their context tokens."""
        rows = self.rows(node_id)
        there = self.is_decoding[rows]
        return float(there.sum()), float((self.context[rows] * there).sum())

    def decoding_at(self, when: float, decode_s: float) -> tuple[float, float]:
        """Over the whole system at a later time: sequences that have joined and have not yet decoded for
        ``decode_s``."""
        there = self.is_open & (self.joins_at <= when) & (self.joins_at + decode_s > when)
        return float(np.count_nonzero(there)), float(self.context[there].sum())

    def left_s(self, node_id: str, now: float, step_s: float) -> Floats:
        """Seconds until each sequence on the node ends, by the median of its sampled lengths."""
        rows = self.rows(node_id)
        generated = self._generated(rows, now, step_s)
        left = np.maximum(np.median(self.lengths[rows], axis=1) - generated, 1.0) if rows else np.zeros(0)
        result: Floats = left * step_s + np.maximum(self.joins_at[rows] - now, 0.0)
        return result

    def futures(
        self, rows: list[int], now: float, when: float, step_s: float, lengths: OutputLengths, rng: np.random.Generator
    ) -> tuple[Floats, Floats, Bools]:
        """[samples, rows]: tokens that each sequence still has to generate at ``when`` (0: it has ended), and the KV
        tokens it holds then; [rows]: whether it is decoding by then. Lengths that a sequence has outgrown are drawn
        again."""
        generated = self._generated(rows, now, step_s)
        sampled = self.lengths[rows]
        for at in np.flatnonzero((sampled <= generated[:, None]).any(axis=1)):
            row, reached = rows[at], generated[at]
            outgrown = sampled[at] <= reached
            share = lengths.distribution(self._kinds[row])
            sampled[at, outgrown] = sample_beyond(
                share, np.full(int(outgrown.sum()), reached), int(self.limit[row]), rng
            )
            self.lengths[row] = sampled[at]
        begins = np.maximum(self.joins_at[rows], now)
        more = np.maximum(when - begins, 0.0) / step_s
        then = np.minimum(generated + more, sampled.T)
        left: Floats = sampled.T - then
        return left, self.context[rows] + then, self.joins_at[rows] <= when

    def _generated(self, rows: list[int], now: float, step_s: float) -> Floats:
        """Tokens generated so far, estimated from the time: one per step."""
        since = np.where(self.is_decoding[rows], np.maximum(now - self.joins_at[rows], 0.0), 0.0)
        result: Floats = np.minimum(since / step_s, self.limit[rows])
        return result

    def _grow(self, size: int) -> None:
        """Grow the columns to ``size`` rows, keeping the existing ones."""
        old = len(self.context)
        more = size - old
        for name in ("is_open", "is_decoding"):
            setattr(self, name, np.append(getattr(self, name), np.zeros(more, dtype=bool)))
        for name in ("joins_at", "context", "limit"):
            setattr(self, name, np.append(getattr(self, name), np.zeros(more)))
        self.lengths = np.concatenate((self.lengths, np.zeros((more, NUM_SAMPLES))))
        self._free += range(size - 1, old - 1, -1)


ADMISSIONS: dict[str, Rule] = {
    "none": no_rule,
    "baseline": baseline,
    "early": early,
    "predicted": predicted,
    "lookahead": lookahead,
}
