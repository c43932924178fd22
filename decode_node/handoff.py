"""The state machine of one hand-off from prefill to decode, on the receiving side: a table of states and events.

Pure: no sockets, no clock, no engine. Events come from the writer (a prefill node), from the request's own call and
from work started here; they may be late, repeated or crossed, and the table defines all of them. Every hand-off ends in
exactly one of committed, failed, expired.

    announced ─▶ opening ─▶ reserved ───▶ verifying ─▶ committed
        │           │        │   │            │
        │           │        │   ▼            │
        │           │        │  revoking ─────│──▶ quarantined
        │           │        │   │            │         │
        ▼           ▼        ▼   ▼            ▼         ▼
        └───────────┴────────┴───┴────────────┴─────────┴──▶ freeing ─▶ freed
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from mooncake.errors import HandoffFailed, InternalError, StaleEpoch


class HandoffState(StrEnum):
    ANNOUNCED = "announced"  # the conductor told us; nothing is reserved yet
    OPENING = "opening"  # the writer waits for room
    RESERVED = "reserved"  # the writer knows its blocks and may be writing
    VERIFYING = "verifying"  # the writer says that everything is written; checksums are being compared
    COMMITTED = "committed"  # all bytes were right; the sequence runs
    REVOKING = "revoking"  # given up while the writer may be writing; its write access is being revoked
    QUARANTINED = "quarantined"  # given up; the writer starts no new write but may be in the middle of a copy
    FREEING = "freeing"  # given up, and nobody writes; the blocks are freed when nothing here uses them
    FREED = "freed"


class HandoffEvent(StrEnum):
    OPEN = "open"  # the writer asks for blocks
    REFUSED = "refused"  # there was no room for them
    GRANTED = "granted"  # the engine has reserved them
    COMMIT = "commit"  # the writer has written them
    MISMATCHED = "mismatched"  # the bytes do not match their checksums
    VERIFIED = "verified"  # they do
    CLOSE = "close"  # the writer has stopped for good
    DISCONNECTED = "disconnected"  # its last connection has ended, which matters only once it knows its blocks
    CANCEL = "cancel"  # the request's own call has ended
    REVOKED = "revoked"  # no write can land any more
    COPYING = "copying"  # no new write can start, but over shared memory one may be in progress
    RELEASED = "released"  # the engine has its blocks back


_S, _E = HandoffState, HandoffEvent
_RESULTS = (_E.REFUSED, _E.GRANTED, _E.MISMATCHED, _E.VERIFIED, _E.REVOKED, _E.COPYING)  # of work that started earlier

TRANSITIONS: dict[HandoffState, dict[HandoffEvent, HandoffState]] = {
    _S.ANNOUNCED: {
        _E.OPEN: _S.OPENING,
        _E.CLOSE: _S.FREEING,
        _E.DISCONNECTED: _S.ANNOUNCED,
        _E.CANCEL: _S.FREEING,
    },
    _S.OPENING: {
        _E.REFUSED: _S.ANNOUNCED,
        _E.GRANTED: _S.RESERVED,
        _E.CLOSE: _S.FREEING,
        _E.DISCONNECTED: _S.OPENING,
        _E.CANCEL: _S.FREEING,
    },
    _S.RESERVED: {
        _E.COMMIT: _S.VERIFYING,
        _E.CLOSE: _S.FREEING,
        _E.DISCONNECTED: _S.FREEING,
        _E.CANCEL: _S.REVOKING,
    },
    _S.VERIFYING: {
        _E.MISMATCHED: _S.FREEING,
        _E.VERIFIED: _S.COMMITTED,
        _E.CLOSE: _S.FREEING,
        _E.DISCONNECTED: _S.FREEING,
        _E.CANCEL: _S.FREEING,
    },
    _S.COMMITTED: dict.fromkeys((_E.CLOSE, _E.DISCONNECTED, _E.CANCEL), _S.COMMITTED),
    _S.REVOKING: {
        _E.REVOKED: _S.FREEING,
        _E.COPYING: _S.QUARANTINED,
        _E.CLOSE: _S.FREEING,
        _E.DISCONNECTED: _S.FREEING,
        _E.CANCEL: _S.REVOKING,
    },
    _S.QUARANTINED: {
        _E.CLOSE: _S.FREEING,
        _E.DISCONNECTED: _S.FREEING,
        _E.CANCEL: _S.QUARANTINED,
    },
    _S.FREEING: {
        **dict.fromkeys((_E.CLOSE, _E.DISCONNECTED, _E.CANCEL, *_RESULTS), _S.FREEING),
        _E.RELEASED: _S.FREED,
    },
    _S.FREED: dict.fromkeys((_E.CLOSE, _E.DISCONNECTED, _E.CANCEL, *_RESULTS), _S.FREED),
}
"""An event that is not listed is refused: a writer may open or commit too late or twice; others would be our bug."""

BEING_COMPUTED = frozenset({_S.ANNOUNCED, _S.RESERVED})
GIVEN_UP = frozenset({_S.REVOKING, _S.QUARANTINED, _S.FREEING, _S.FREED})


class Outcome(StrEnum):
    COMMITTED = "committed"
    FAILED = "failed"  # given up by either side
    EXPIRED = "expired"  # given up because it was too late


@dataclass(slots=True)
class Handoff:
    """``block_ids`` receive the prompt's blocks ``first_block``, ``first_block + 1``, …; earlier ones are already
    here."""

    handoff_id: str  # its sequence's, too
    epoch: int
    state: HandoffState = HandoffState.ANNOUNCED
    outcome: Outcome | None = None  # None: it may still be committed
    writer_id: str = ""
    first_block: int = 0
    block_ids: list[int] = field(default_factory=list)

    def apply(self, event: HandoffEvent, *, is_late: bool = False) -> HandoffState:
        """Returns the state that follows. A hand-off given up because it ``is_late`` has expired.

        Raises HandoffFailed for a request of the writer that is not (or no longer) possible; nothing changes then.
        """
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            if event not in (HandoffEvent.OPEN, HandoffEvent.COMMIT):
                raise InternalError(f"hand-off {self.handoff_id} is {self.state} and got {event!r}")
            raise HandoffFailed(f"hand-off {self.handoff_id} is {self.state}: it cannot {event} (any more)")
        if self.outcome is None and state is HandoffState.COMMITTED:
            self.outcome = Outcome.COMMITTED
        elif self.outcome is None and state in GIVEN_UP:
            self.outcome = Outcome.EXPIRED if is_late else Outcome.FAILED
        self.state = state
        return state

    def check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(f"hand-off {self.handoff_id} is at epoch {self.epoch}, not {epoch}")

    @property
    def is_over(self) -> bool:
        return self.outcome is not None
