"""One hand-off from prefill to decode, as its receiver sees it: states as a table, blocks, epoch.

Pure: no sockets, no clock, no engine. Every hand-off ends in exactly one of committed, failed, expired.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from mooncake.errors import InternalError, StaleEpoch


class HandoffState(StrEnum):
    ANNOUNCED = "announced"  # the conductor told us; nothing is reserved yet
    RESERVED = "reserved"  # the writer knows its blocks and may be writing
    COMMITTED = "committed"  # all ranges verified; the sequence runs
    FAILED = "failed"  # given up by either side
    EXPIRED = "expired"  # neither committed nor failed in time


TERMINAL = frozenset({HandoffState.COMMITTED, HandoffState.FAILED, HandoffState.EXPIRED})

ALLOWED: dict[HandoffState, frozenset[HandoffState]] = {
    HandoffState.ANNOUNCED: frozenset({HandoffState.RESERVED, HandoffState.FAILED, HandoffState.EXPIRED}),
    HandoffState.RESERVED: frozenset({HandoffState.COMMITTED, HandoffState.FAILED, HandoffState.EXPIRED}),
    HandoffState.COMMITTED: frozenset(),
    HandoffState.FAILED: frozenset(),
    HandoffState.EXPIRED: frozenset(),
}


@dataclass(slots=True)
class Handoff:
    """``block_ids`` receive the prompt's blocks ``first_block``, ``first_block + 1``, …; earlier ones are here already.

    ``is_quarantined``: over without a commit, but its writer may still be in the middle of a copy, so the blocks must
    not be used again before it says that it has stopped, or is gone.
    """

    handoff_id: str
    epoch: int
    request_id: str
    state: HandoffState = HandoffState.ANNOUNCED
    writer_id: str = ""
    first_block: int = 0
    block_ids: list[int] = field(default_factory=list)
    is_quarantined: bool = False

    def move(self, state: HandoffState) -> None:
        """Raises InternalError for a move that the table does not allow; nothing changes then."""
        if state not in ALLOWED[self.state]:
            raise InternalError(f"hand-off {self.handoff_id} cannot go from {self.state} to {state}")
        self.state = state

    def check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(f"hand-off {self.handoff_id} is at epoch {self.epoch}, not {epoch}")

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL
