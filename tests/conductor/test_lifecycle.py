"""The tables of states: what may follow what, and that nothing follows an end."""

from collections.abc import Mapping
from enum import StrEnum

import pytest

from conductor.dispatch.lifecycle import (
    HANDOFF_MOVES,
    REQUEST_MOVES,
    HandoffPhase,
    RequestState,
    handoff_lifecycle,
    request_lifecycle,
)
from mooncake.errors import InternalError


def test_a_hand_off_ends_in_exactly_one_of_three() -> None:
    ends = {state for state, moves in HANDOFF_MOVES.items() if not moves}
    assert ends == {HandoffPhase.COMMITTED, HandoffPhase.FAILED, HandoffPhase.EXPIRED}
    for end in ends:
        handoff = handoff_lifecycle("h")
        handoff.move(HandoffPhase.STREAMING)
        handoff.move(end)
        assert handoff.has_ended
        for another in HandoffPhase:
            with pytest.raises(InternalError, match="hand-off h"):
                handoff.move(another)
            assert handoff.state is end, "an illegal move changes nothing"


@pytest.mark.parametrize("table", [HANDOFF_MOVES, REQUEST_MOVES])
def test_every_state_is_in_its_table_and_can_reach_an_end(table: Mapping[StrEnum, frozenset[StrEnum]]) -> None:
    assert set(table) == set(type(next(iter(table))))
    for state, moves in table.items():
        reached, todo = {state}, set(moves)
        while todo:
            reached |= todo
            todo = {after for before in todo for after in table[before]} - reached
        assert any(not table[end] for end in reached), state


def test_a_retry_takes_a_streaming_request_back_to_placed() -> None:
    request = request_lifecycle("r")
    for state in (RequestState.PLACED, RequestState.STREAMING, RequestState.PLACED, RequestState.FINISHED):
        request.move(state)
    with pytest.raises(InternalError, match="request r cannot go from finished to failed"):
        request.move(RequestState.FAILED)
