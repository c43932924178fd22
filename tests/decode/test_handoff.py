"""The state table of hand-offs: every event is handled, every path ends in one outcome, and no block is lost."""

import itertools

import pytest

from decode_node.handoff import ANSWERS, GIVEN_UP, Handoff, HandoffState, Heard, Outcome
from mooncake.errors import HandoffFailed, InternalError, StaleEpoch

END_OF_WORK = {Heard.REFUSED, Heard.GRANTED, Heard.WRONG, Heard.RIGHT, Heard.REVOKED, Heard.COPYING, Heard.EMPTIED}
FROM_OUTSIDE = set(Heard) - END_OF_WORK


def handoff_in(state: HandoffState) -> Handoff:
    return Handoff("h", epoch=7, request_id="r", state=state)


def test_the_good_way() -> None:
    handoff = Handoff("h", epoch=7, request_id="r")
    assert handoff.hear(Heard.OPEN) is HandoffState.OPENING
    assert handoff.hear(Heard.REFUSED) is HandoffState.ANNOUNCED, "it may ask again"
    handoff.hear(Heard.OPEN)
    assert handoff.hear(Heard.GRANTED) is HandoffState.RESERVED
    assert handoff.hear(Heard.COMMIT) is HandoffState.VERIFYING
    assert not handoff.is_over
    assert handoff.hear(Heard.RIGHT) is HandoffState.COMMITTED
    assert handoff.outcome is Outcome.COMMITTED


def test_what_is_given_up_while_it_may_be_written_waits_for_its_writer() -> None:
    handoff = handoff_in(HandoffState.RESERVED)
    assert handoff.hear(Heard.GIVE_UP, is_late=True) is HandoffState.REVOKING
    assert handoff.hear(Heard.COPYING) is HandoffState.QUARANTINED
    assert handoff.hear(Heard.GIVE_UP) is HandoffState.QUARANTINED
    assert handoff.hear(Heard.CLOSE) is HandoffState.FREEING
    assert handoff.hear(Heard.EMPTIED) is HandoffState.FREED
    assert handoff.outcome is Outcome.EXPIRED, "the first reason counts"


@pytest.mark.parametrize(("state", "what"), list(itertools.product(HandoffState, Heard)))
def test_what_the_table_does_not_have_changes_nothing(state: HandoffState, what: Heard) -> None:
    handoff = handoff_in(state)
    if what in ANSWERS[state]:
        assert handoff.hear(what) is handoff.state is ANSWERS[state][what]
        return
    with pytest.raises(HandoffFailed if what in (Heard.OPEN, Heard.COMMIT) else InternalError, match=f"is {state}"):
        handoff.hear(what)
    assert handoff.state is state and handoff.outcome is None


@pytest.mark.parametrize("state", HandoffState)
def test_the_end_of_either_side_is_answered_in_every_state_and_twice(state: HandoffState) -> None:
    for what in (Heard.CLOSE, Heard.GONE, Heard.GIVE_UP):
        goal = ANSWERS[state][what]
        assert ANSWERS[goal][what] is goal


@pytest.mark.parametrize("state", HandoffState)
def test_a_writer_opens_once_and_commits_once(state: HandoffState) -> None:
    assert (Heard.OPEN in ANSWERS[state]) == (state is HandoffState.ANNOUNCED)
    assert (Heard.COMMIT in ANSWERS[state]) == (state is HandoffState.RESERVED)


def test_what_was_begun_before_it_was_given_up_may_end_after() -> None:
    begun = {
        HandoffState.OPENING: {Heard.REFUSED, Heard.GRANTED},
        HandoffState.VERIFYING: {Heard.WRONG, Heard.RIGHT},
        HandoffState.REVOKING: {Heard.REVOKED, Heard.COPYING},
        HandoffState.FREEING: {Heard.EMPTIED},
    }
    for state, ends in begun.items():
        assert ends <= set(ANSWERS[state])
        for what, goal in ANSWERS[state].items():
            if what in FROM_OUTSIDE and goal is not state:
                assert {ANSWERS[goal][end] for end in ends} == {goal}


def test_every_way_ends_with_one_outcome() -> None:
    """Over all paths: an outcome is set once and stays, and only the two final states have no successor."""
    seen: set[tuple[HandoffState, Outcome | None]] = set()
    to_see: list[tuple[HandoffState, Outcome | None]] = [(HandoffState.ANNOUNCED, None)]
    while to_see:
        state, outcome = now = to_see.pop()
        if now in seen:
            continue
        seen.add(now)
        assert (outcome is not None) == (state in GIVEN_UP or state is HandoffState.COMMITTED)
        for what in ANSWERS[state]:
            handoff = Handoff("h", 7, "r", state=state, outcome=outcome)
            handoff.hear(what, is_late=True)
            assert outcome in (None, handoff.outcome)
            assert (handoff.outcome is Outcome.COMMITTED) == (handoff.state is HandoffState.COMMITTED)
            to_see.append((handoff.state, handoff.outcome))
    assert {state for state, _ in seen} == set(HandoffState)
    ends = {state for state, _ in seen if set(ANSWERS[state].values()) == {state}}
    assert ends == {HandoffState.COMMITTED, HandoffState.FREED}


def test_only_a_writer_that_has_stopped_ends_a_quarantine() -> None:
    quarantined = HandoffState.QUARANTINED
    assert {what for what, goal in ANSWERS[quarantined].items() if goal is not quarantined} == {Heard.CLOSE, Heard.GONE}


def test_another_epoch_is_refused() -> None:
    handoff = Handoff("h", epoch=7, request_id="r")
    handoff.check_epoch(7)
    with pytest.raises(StaleEpoch, match="epoch 7, not 6"):
        handoff.check_epoch(6)
