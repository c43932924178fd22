"""The state table of hand-offs: every event is handled, every path ends in one outcome, and no block is lost."""

import itertools

import pytest

from decode_node.handoff import GIVEN_UP, TRANSITIONS, Handoff, HandoffEvent, HandoffState, Outcome
from mooncake.errors import HandoffFailed, InternalError, StaleEpoch

E = HandoffEvent
END_OF_WORK = {E.REFUSED, E.GRANTED, E.MISMATCHED, E.VERIFIED, E.REVOKED, E.COPYING, E.RELEASED}
FROM_OUTSIDE = set(HandoffEvent) - END_OF_WORK


def handoff_in(state: HandoffState) -> Handoff:
    return Handoff("h", epoch=7, state=state)


def test_a_hand_off_that_goes_well_is_opened_again_after_a_refusal_written_and_committed() -> None:
    handoff = Handoff("h", epoch=7)
    assert handoff.apply(E.OPEN) is HandoffState.OPENING
    assert handoff.apply(E.REFUSED) is HandoffState.ANNOUNCED, "it may ask again"
    handoff.apply(E.OPEN)
    assert handoff.apply(E.GRANTED) is HandoffState.RESERVED
    assert handoff.apply(E.COMMIT) is HandoffState.VERIFYING
    assert not handoff.is_over
    assert handoff.apply(E.VERIFIED) is HandoffState.COMMITTED
    assert handoff.outcome is Outcome.COMMITTED


def test_what_is_given_up_while_it_may_be_written_waits_for_its_writer() -> None:
    handoff = handoff_in(HandoffState.RESERVED)
    assert handoff.apply(E.CANCEL, is_late=True) is HandoffState.REVOKING
    assert handoff.apply(E.COPYING) is HandoffState.QUARANTINED
    assert handoff.apply(E.CANCEL) is HandoffState.QUARANTINED
    assert handoff.apply(E.CLOSE) is HandoffState.FREEING
    assert handoff.apply(E.RELEASED) is HandoffState.FREED
    assert handoff.outcome is Outcome.EXPIRED, "the first reason counts"


@pytest.mark.parametrize(("state", "event"), list(itertools.product(HandoffState, HandoffEvent)))
def test_what_the_table_does_not_have_changes_nothing(state: HandoffState, event: HandoffEvent) -> None:
    handoff = handoff_in(state)
    if event in TRANSITIONS[state]:
        assert handoff.apply(event) is handoff.state is TRANSITIONS[state][event]
        return
    with pytest.raises(HandoffFailed if event in (E.OPEN, E.COMMIT) else InternalError, match=f"is {state}"):
        handoff.apply(event)
    assert handoff.state is state and handoff.outcome is None


@pytest.mark.parametrize("state", HandoffState)
def test_the_end_of_either_side_is_answered_in_every_state_and_twice(state: HandoffState) -> None:
    for event in (E.CLOSE, E.DISCONNECTED, E.CANCEL):
        goal = TRANSITIONS[state][event]
        assert TRANSITIONS[goal][event] is goal


@pytest.mark.parametrize("state", HandoffState)
def test_a_writer_opens_once_and_commits_once(state: HandoffState) -> None:
    assert (E.OPEN in TRANSITIONS[state]) == (state is HandoffState.ANNOUNCED)
    assert (E.COMMIT in TRANSITIONS[state]) == (state is HandoffState.RESERVED)


def test_what_was_begun_before_it_was_given_up_may_end_after() -> None:
    begun = {
        HandoffState.OPENING: {E.REFUSED, E.GRANTED},
        HandoffState.VERIFYING: {E.MISMATCHED, E.VERIFIED},
        HandoffState.REVOKING: {E.REVOKED, E.COPYING},
        HandoffState.FREEING: {E.RELEASED},
    }
    for state, ends in begun.items():
        assert ends <= set(TRANSITIONS[state])
        for event, goal in TRANSITIONS[state].items():
            if event in FROM_OUTSIDE and goal is not state:
                assert {TRANSITIONS[goal][end] for end in ends} == {goal}


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
        for event in TRANSITIONS[state]:
            handoff = Handoff("h", 7, state=state, outcome=outcome)
            handoff.apply(event, is_late=True)
            assert outcome in (None, handoff.outcome)
            assert (handoff.outcome is Outcome.COMMITTED) == (handoff.state is HandoffState.COMMITTED)
            to_see.append((handoff.state, handoff.outcome))
    assert {state for state, _ in seen} == set(HandoffState)
    ends = {state for state, _ in seen if set(TRANSITIONS[state].values()) == {state}}
    assert ends == {HandoffState.COMMITTED, HandoffState.FREED}


def test_only_a_writer_that_has_stopped_ends_a_quarantine() -> None:
    quarantined = HandoffState.QUARANTINED
    assert {event for event, goal in TRANSITIONS[quarantined].items() if goal is not quarantined} == {
        E.CLOSE,
        E.DISCONNECTED,
    }


def test_another_epoch_is_refused() -> None:
    handoff = Handoff("h", epoch=7)
    handoff.check_epoch(7)
    with pytest.raises(StaleEpoch, match="epoch 7, not 6"):
        handoff.check_epoch(6)
