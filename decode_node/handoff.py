"""One hand-off from prefill to decode, as the receiver sees it: a table of events and states.

Pure: no sockets, no clock, no engine. Events come from several sides, and may be late, repeated or crossed: from the
writer (a prefill node), from the request's own call, and from work started here. The table defines all of them. Every
hand-off ends in exactly one of committed, failed, expired.

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
    VERIFYING = "verifying"  # the writer says that everything is written; it is being compared with the checksums
    COMMITTED = "committed"  # all bytes were right; the sequence runs
    REVOKING = "revoking"  # given up while the writer may be writing; its right to write is being revoked
    QUARANTINED = "quarantined"  # given up; the writer starts no new write but may be in the middle of a copy
    FREEING = "freeing"  # given up, and nobody writes; the blocks are freed when nothing here uses them
    FREED = "freed"


class Heard(StrEnum):
    OPEN = "open"  # the writer asks for blocks
    REFUSED = "refused"  # there was no room for them
    GRANTED = "granted"  # the engine has reserved them
    COMMIT = "commit"  # the writer has written them
    WRONG = "wrong"  # the bytes do not match their checksums
    RIGHT = "right"
    CLOSE = "close"  # the writer has stopped for good
    GONE = "gone"  # its last connection has ended, which matters only once it knows its blocks
    GIVE_UP = "give up"  # the request's own call has ended
    REVOKED = "revoked"  # no write can land any more
    COPYING = "copying"  # no new write can start, but over shared memory one may be in progress
    EMPTIED = "emptied"  # the engine has its blocks back


_S, _H = HandoffState, Heard
_LATE = (_H.REFUSED, _H.GRANTED, _H.WRONG, _H.RIGHT, _H.REVOKED, _H.COPYING)  # results of work that started earlier

ANSWERS: dict[HandoffState, dict[Heard, HandoffState]] = {
    _S.ANNOUNCED: {
        _H.OPEN: _S.OPENING,
        _H.CLOSE: _S.FREEING,
        _H.GONE: _S.ANNOUNCED,
        _H.GIVE_UP: _S.FREEING,
    },
    _S.OPENING: {
        _H.REFUSED: _S.ANNOUNCED,
        _H.GRANTED: _S.RESERVED,
        _H.CLOSE: _S.FREEING,
        _H.GONE: _S.OPENING,
        _H.GIVE_UP: _S.FREEING,
    },
    _S.RESERVED: {
        _H.COMMIT: _S.VERIFYING,
        _H.CLOSE: _S.FREEING,
        _H.GONE: _S.FREEING,
        _H.GIVE_UP: _S.REVOKING,
    },
    _S.VERIFYING: {
        _H.WRONG: _S.FREEING,
        _H.RIGHT: _S.COMMITTED,
        _H.CLOSE: _S.FREEING,
        _H.GONE: _S.FREEING,
        _H.GIVE_UP: _S.FREEING,
    },
    _S.COMMITTED: dict.fromkeys((_H.CLOSE, _H.GONE, _H.GIVE_UP), _S.COMMITTED),
    _S.REVOKING: {
        _H.REVOKED: _S.FREEING,
        _H.COPYING: _S.QUARANTINED,
        _H.CLOSE: _S.FREEING,
        _H.GONE: _S.FREEING,
        _H.GIVE_UP: _S.REVOKING,
    },
    _S.QUARANTINED: {
        _H.CLOSE: _S.FREEING,
        _H.GONE: _S.FREEING,
        _H.GIVE_UP: _S.QUARANTINED,
    },
    _S.FREEING: {
        **dict.fromkeys((_H.CLOSE, _H.GONE, _H.GIVE_UP, *_LATE), _S.FREEING),
        _H.EMPTIED: _S.FREED,
    },
    _S.FREED: dict.fromkeys((_H.CLOSE, _H.GONE, _H.GIVE_UP, *_LATE), _S.FREED),
}
"""A move that is not listed is refused: a writer may open or commit too late or twice; any other would be our bug."""

GIVEN_UP = frozenset({_S.REVOKING, _S.QUARANTINED, _S.FREEING, _S.FREED})


class Outcome(StrEnum):
    COMMITTED = "committed"
    FAILED = "failed"  # given up by either side
    EXPIRED = "expired"  # given up because it was too late


@dataclass(slots=True)
class Handoff:
    """``block_ids`` receive the prompt's blocks ``first_block``, ``first_block + 1``, …; earlier ones are already
    here."""

    handoff_id: str
    epoch: int
    request_id: str
    state: HandoffState = HandoffState.ANNOUNCED
    outcome: Outcome | None = None  # None: it may still be committed
    writer_id: str = ""
    first_block: int = 0
    block_ids: list[int] = field(default_factory=list)

    def hear(self, what: Heard, *, is_late: bool = False) -> HandoffState:
        """Returns the state that follows. A hand-off given up because it ``is_late`` has expired.

        Raises HandoffFailed for a request of the writer that is not (or no longer) possible; nothing changes then.
        """
        state = ANSWERS[self.state].get(what)
        if state is None:
            if what not in (Heard.OPEN, Heard.COMMIT):
                raise InternalError(f"hand-off {self.handoff_id} is {self.state} and heard {what!r}")
            raise HandoffFailed(f"hand-off {self.handoff_id} is {self.state}: it cannot {what} (any more)")
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
