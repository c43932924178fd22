"""The states of a request and of a hand-off, as tables of allowed moves. Pure.

Every hand-off ends in exactly one of committed, failed, expired; every request in exactly one of finished, failed,
cancelled, expired. An illegal move is our bug: it raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from mooncake.errors import InternalError


class HandoffPhase(StrEnum):
    RESERVED = "reserved"  # both nodes have been told
    STREAMING = "streaming"  # prefill has produced the first token; ranges are on their way
    COMMITTED = "committed"  # the decode node has verified every range and generates
    FAILED = "failed"
    EXPIRED = "expired"


class RequestState(StrEnum):
    ADMITTED = "admitted"
    PLACED = "placed"  # on a pair of nodes, no token received yet
    STREAMING = "streaming"  # tokens reach the client
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"  # the client disconnected
    EXPIRED = "expired"


_H, _R = HandoffPhase, RequestState
HANDOFF_MOVES: Mapping[HandoffPhase, frozenset[HandoffPhase]] = {
    _H.RESERVED: frozenset({_H.STREAMING, _H.COMMITTED, _H.FAILED, _H.EXPIRED}),
    _H.STREAMING: frozenset({_H.COMMITTED, _H.FAILED, _H.EXPIRED}),
    _H.COMMITTED: frozenset(),
    _H.FAILED: frozenset(),
    _H.EXPIRED: frozenset(),
}
REQUEST_MOVES: Mapping[RequestState, frozenset[RequestState]] = {
    _R.ADMITTED: frozenset({_R.PLACED, _R.FAILED, _R.CANCELLED, _R.EXPIRED}),
    _R.PLACED: frozenset({_R.PLACED, _R.STREAMING, _R.FINISHED, _R.FAILED, _R.CANCELLED, _R.EXPIRED}),
    # back to placed: a retry on another pair
    _R.STREAMING: frozenset({_R.PLACED, _R.FINISHED, _R.FAILED, _R.CANCELLED, _R.EXPIRED}),
    _R.FINISHED: frozenset(),
    _R.FAILED: frozenset(),
    _R.CANCELLED: frozenset(),
    _R.EXPIRED: frozenset(),
}

S = TypeVar("S", bound=StrEnum)


class Lifecycle(Generic[S]):
    """The state of one request or hand-off in its table."""

    def __init__(self, name: str, moves: Mapping[S, frozenset[S]], start: S) -> None:
        self._name = name
        self._moves = moves
        self.state = start

    @property
    def has_ended(self) -> bool:
        return not self._moves[self.state]

    def move(self, to: S) -> None:
        """Raises InternalError when the table has no such move."""
        if to not in self._moves[self.state]:
            raise InternalError(f"{self._name} cannot go from {self.state} to {to}")
        self.state = to


def handoff_lifecycle(handoff_id: str) -> Lifecycle[HandoffPhase]:
    return Lifecycle(f"hand-off {handoff_id}", HANDOFF_MOVES, HandoffPhase.RESERVED)


def request_lifecycle(request_id: str) -> Lifecycle[RequestState]:
    return Lifecycle(f"request {request_id}", REQUEST_MOVES, RequestState.ADMITTED)
