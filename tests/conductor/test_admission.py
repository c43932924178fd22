"""Admission: what each rule admits, the retry times it gives, and what it learns about answer lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placing import Cluster

from conductor.admission.admission import Admission, Mode
from conductor.admission.fair_queue import Band
from conductor.admission.lengths import Kind, OutputLengths, Turns, sample_beyond
from conductor.admission.rules import ADMISSIONS, Limits, peak_tokens
from conductor.placement.bookings import Booking
from conductor.placement.view import RequestFacts
from conductor.registry import NodeLoad
from mooncake.config import TBT_ROOM

CHAT = Kind(b"chat", 640)


class Case:
    """A cluster with one prefill and one decode node (10 ms per step plus 1 ms per sequence), and an admission rule."""

    def __init__(self, rule: str, tbt_ms: float = 20.0, ttft_ms: float = 1e6, mode: Mode = Mode.HARD) -> None:
        self.cluster = Cluster(prefill=1, decode=1, measured=False)
        costs = self.cluster.fleet.costs
        for size in (1, 2, 4, 8, 16, 32) * 3:
            costs.observe_prefill("p0", 100 * size, 0, 10.0 * size)
            costs.observe_decode("d0", size, 640 * size, 10.0 + size)
            costs.observe_transfer("p0", "d0", size << 20, 0.01 * size)
        self.admission = Admission(ADMISSIONS[rule], Limits(ttft_ms, tbt_ms), mode)
        self.open: list[Booking] = []

    @property
    def now(self) -> float:
        return self.cluster.now

    def ask(
        self,
        num_tokens: int = 640,
        max_tokens: int = 400,
        enter: bool = True,
        facts: RequestFacts | None = None,
        band: Band = Band.NORMAL,
    ) -> tuple[bool, float, Booking | None]:
        facts = facts or self.cluster.facts(num_tokens)
        scheduler = self.cluster.scheduler
        query = scheduler.query(facts, self.now)
        placement = scheduler.answer(query)
        verdict = self.admission.decide(query, placement, self.now, max_tokens, band)
        if not (verdict.is_admitted and enter):
            return verdict.is_admitted, verdict.retry_after_s, None
        booking = scheduler.book(facts, placement, self.now)
        self.admission.placed(booking, facts, max_tokens, placement, self.now)
        self.open.append(booking)
        return True, 0.0, booking

    def joins(self, booking: Booking | None) -> bool:
        assert booking is not None
        self.cluster.scheduler.prefill_done(booking, self.now)
        late = self.admission.checks_after_prefill
        query = self.cluster.scheduler.query(self.cluster.facts(), self.now) if late else None
        return self.admission.prefill_ended(booking, query, self.now)

    def ends(self, booking: Booking | None, output_tokens: int = 0) -> None:
        assert booking is not None
        self.cluster.scheduler.close(booking, self.now)
        self.admission.finished(booking, self.now, output_tokens)
        self.open.remove(booking)


def test_nobody_is_refused_without_a_rule_or_with_the_mode_off() -> None:
    for case in (Case("none"), Case("early", mode=Mode.OFF)):
        for _ in range(50):
            assert case.ask()[0]
            case.joins(case.open[-1])
    assert case.admission.stats.refused > 20, "what would have been refused is counted"


@pytest.mark.parametrize("rule", ["baseline", "early", "predicted", "lookahead"])
def test_a_first_token_that_comes_too_late_is_refused_with_the_time_that_the_queue_needs(rule: str) -> None:
    case = Case(rule, tbt_ms=1e6, ttft_ms=500.0)
    while case.ask()[0]:
        pass
    assert len(case.open) == 7, "64 ms each"
    refused, wait_s, _ = case.ask()
    assert not refused
    assert wait_s == pytest.approx(0.0625 if wait_s < 0.06 else 8 * 0.064 - 0.5, abs=0.05)
    for booking in list(case.open):
        case.cluster.now += 0.064
        case.joins(booking)
    assert case.ask()[0]


def test_early_admission_ignores_requests_in_prefill_and_prediction_counts_them() -> None:
    """The oscillation in the paper: while prefills run, the decode node looks empty."""
    entered = {}
    for rule in ("early", "predicted"):
        case = Case(rule)
        for _ in range(30):
            case.ask()
        entered[rule] = len(case.open)
    assert entered["early"] == 30
    assert 8 <= entered["predicted"] <= 14, "ten sequences make a step of 20 ms"


def test_prediction_admits_a_request_that_joins_when_others_have_left() -> None:
    case = Case("predicted")
    case.admission.decode_s = 0.5
    for _ in range(10):
        case.joins(case.ask()[2])
    assert not case.ask(enter=False)[0], "64 ms from now all ten are still there"
    case.cluster.now += 0.5
    assert case.ask(enter=False)[0]


def test_the_baseline_wastes_the_prefill_of_requests_it_refuses() -> None:
    case = Case("baseline")
    bookings = [case.ask()[2] for _ in range(14)]
    kept = [case.joins(booking) for booking in bookings]
    assert kept.count(False) == 4
    assert case.admission.stats.refused_after_prefill == 4


def test_lookahead_counts_on_short_answers_ending_soon() -> None:
    """Short answers are running; a request with a second of prefill joins after they have ended."""
    case = Case("lookahead", tbt_ms=18.0 / TBT_ROOM)
    for _ in range(200):
        case.admission.lengths.observe(CHAT, 20)
    while case.ask()[0]:
        case.joins(case.open[-1])
    assert 6 <= len(case.open) <= 8, "who joins in 64 ms would make the step too long"
    assert case.ask(num_tokens=12_000, enter=False)[0] or case.ask(num_tokens=6_400, enter=False)[0]
    refused, wait_s, _ = case.ask(enter=False)
    assert not refused
    assert 0.05 < wait_s < 0.6, "20 tokens of 18 ms"


def test_lookahead_leaves_kv_room_for_answers_to_grow() -> None:
    case = Case("lookahead", tbt_ms=1e6)
    load = NodeLoad(blocks_total=200, blocks_free=200)  # 12,800 tokens
    info = case.cluster.fleet.view(case.now).decode.nodes[0]
    case.cluster.fleet.registry.heartbeat("d0", info.incarnation, load, False, case.now)
    case.cluster.fleet.heartbeat("d0", load)
    for _ in range(300):
        case.admission.lengths.observe(CHAT, 640)
    while case.ask(max_tokens=2000)[0]:
        case.joins(case.open[-1])
        assert len(case.open) < 20
    assert 8 <= len(case.open) <= 11, "1,280 tokens each at the end"


def test_unneeded_refusals_are_counted() -> None:
    case = Case("early")
    bookings = [case.ask()[2] for _ in range(12)]
    for booking in bookings:
        case.joins(booking)
    assert not case.ask()[0]
    for booking in list(case.open):
        case.ends(booking, 10)
    case.cluster.now += 5.0
    case.ask(enter=False)
    stats = case.admission.stats
    assert (stats.refusals_checked, stats.refusals_unneeded) == (1, 1)


def test_requests_that_ended_leave_nothing_behind() -> None:
    case = Case("lookahead")
    bookings = [case.ask()[2] for _ in range(5)]
    for booking in bookings:
        case.joins(booking)
        case.ends(booking, 7)
        case.admission.finished(booking, case.now, 7)  # twice is once
    assert len(case.admission.inflight) == 0
    assert case.admission.inflight.decoding_on("d0") == (0.0, 0.0)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 100)), min_size=1, max_size=8))
def test_the_peak_is_that_of_a_simulation_token_by_token(sequences: list[tuple[int, int]]) -> None:
    left = np.array([[float(left) for left, _ in sequences]])
    held = np.array([[float(held) for _, held in sequences]])
    peak = max(
        sum(held + step for left, held in sequences if left >= step)
        for step in range(1 + max(left for left, _ in sequences))
    )
    assert peak_tokens(left, held)[0] == peak


class TestLengths:
    def test_quantiles_hold_the_share_they_claim(self) -> None:
        rng, lengths = np.random.default_rng(1), OutputLengths()
        answers = np.exp(rng.normal(5.0, 0.8, 4000)).astype(int) + 1
        for answer in answers[:2000]:
            lengths.observe(CHAT, int(answer))
        sampled = lengths.sample(CHAT, 100_000, 20_000, rng)
        for share in (0.25, 0.5, 0.75, 0.95):
            assert np.mean(answers[2000:] <= np.quantile(sampled, share)) == pytest.approx(share, abs=0.03)
        assert sampled.mean() == pytest.approx(answers.mean(), rel=0.1)

    def test_sampled_lengths_exceed_the_tokens_already_generated(self) -> None:
        lengths, rng = OutputLengths(), np.random.default_rng(2)
        for answer in (10, 10, 10, 1000) * 50:
            lengths.observe(CHAT, answer)
        assert np.median(lengths.sample(CHAT, 4096, 200, rng)) < 15
        assert sample_beyond(lengths.distribution(CHAT), np.full(200, 50.0), 4096, rng).min() > 800
        beyond_all = sample_beyond(lengths.distribution(CHAT), np.full(20, 3000.0), 4096, rng)
        assert (beyond_all == 4096).all(), "longer than anything seen"

    def test_the_kind_of_a_turn_includes_the_previous_answer_s_length(self) -> None:
        turns, chain = Turns(), [b"system", b"query", b"and more"]
        assert turns.kind(chain[:2], 700) == Kind(b"system", 700)
        turns.observe(chain[1], 300)
        assert turns.kind([*chain, b"next"], 1900) == Kind(b"system", 1900, 300)
        assert turns.kind([b"system", b"another query"], 700) == Kind(b"system", 700)

    def test_kinds_differ_and_unknown_ones_fall_back_on_all(self) -> None:
        lengths, rng = OutputLengths(), np.random.default_rng(3)
        for _ in range(300):
            lengths.observe(Kind(b"tool", 1000), 20)
            lengths.observe(Kind(b"chat", 1000), 400)
        assert np.median(lengths.sample(Kind(b"tool", 1000), 4096, 200, rng)) < 30
        assert np.median(lengths.sample(Kind(b"chat", 1000), 4096, 200, rng)) > 300
        assert 100 < lengths.sample(Kind(b"new", 50), 4096, 2000, rng).mean() < 300
        assert lengths.sample(Kind(b"new", 50), 64, 200, rng).max() <= 64

    def test_the_distribution_follows_a_change(self) -> None:
        lengths = OutputLengths()
        for _ in range(3000):
            lengths.observe(Kind(b"a", 100), 50)
        for _ in range(4000):
            lengths.observe(Kind(b"a", 100), 500)
        assert np.median(lengths.sample(Kind(b"a", 100), 4096, 200, np.random.default_rng(4))) > 400

    def test_without_samples_the_length_is_the_limit(self) -> None:
        assert (OutputLengths().sample(CHAT, 77, 4, np.random.default_rng(0)) == 77.0).all()


def test_room_goes_to_the_client_with_a_due_reservation() -> None:
    case = Case("early", tbt_ms=14.0)
    one, another = case.cluster.facts(620), case.cluster.facts(630)
    while (visit := case.ask(600))[0]:
        case.joins(visit[2])
    for number in range(3):  # clients keep their retry_reservations here
        mine = case.cluster.facts(610 + number)
        refused, wait_s, _ = case.ask(facts=mine)
        assert not refused
        case.cluster.now += wait_s
        case.ends(case.open[0])
        came, _, booking = case.ask(facts=mine)
        assert came
        case.joins(booking)
    assert case.admission.stats.returned_on_time == 3
    _, wait_s, _ = case.ask(facts=one)
    case.cluster.now += wait_s
    case.ends(case.open[0])
    stranger_goes_in, later_s, _ = case.ask(facts=another)
    assert not stranger_goes_in, "there is room, for somebody else"
    assert later_s > 0.0
    assert not case.ask(600, band=Band.BATCH)[0]
    assert case.ask(600, enter=False, band=Band.URGENT)[0], "what is urgent does not wait for anybody"
    assert case.ask(facts=one)[0]
    assert case.admission.stats.refused_again == 0
