"""A hand-off's states: every path ends in exactly one terminal state, and nothing leaves it again."""

import itertools

import pytest

from decode_node.handoff import ALLOWED, TERMINAL, Handoff, HandoffState
from mooncake.errors import InternalError, StaleEpoch


def test_the_good_way() -> None:
    handoff = Handoff("h", epoch=7, request_id="r")
    assert not handoff.is_over
    handoff.move(HandoffState.RESERVED)
    assert not handoff.is_over
    handoff.move(HandoffState.COMMITTED)
    assert handoff.is_over


@pytest.mark.parametrize(("start", "goal"), list(itertools.product(HandoffState, repeat=2)))
def test_only_moves_of_the_table_are_made(start: HandoffState, goal: HandoffState) -> None:
    handoff = Handoff("h", epoch=7, request_id="r", state=start)
    if goal in ALLOWED[start]:
        handoff.move(goal)
        assert handoff.state is goal
    else:
        with pytest.raises(InternalError, match=f"from {start} to {goal}"):
            handoff.move(goal)
        assert handoff.state is start


def test_terminal_states_have_no_way_out_and_all_others_can_fail_and_expire() -> None:
    for state, goals in ALLOWED.items():
        if state in TERMINAL:
            assert not goals
        else:
            assert {HandoffState.FAILED, HandoffState.EXPIRED} <= goals


def test_another_epoch_is_refused() -> None:
    handoff = Handoff("h", epoch=7, request_id="r")
    handoff.check_epoch(7)
    with pytest.raises(StaleEpoch, match="epoch 7, not 6"):
        handoff.check_epoch(6)
