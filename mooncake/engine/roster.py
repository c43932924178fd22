"""The sequences in an engine: by id, with the number of answers each request still expects, and those that failed.

It keeps accounts and decides nothing. It knows nothing of blocks, steps or tokens.
"""

from __future__ import annotations

from collections import Counter

from mooncake.engine.sequence import Sequence
from mooncake.errors import MooncakeError


class Roster:
    """A request enters with one expected answer; its forks join as answers or beams."""

    def __init__(self) -> None:
        self._sequences: dict[str, Sequence] = {}
        self._open: Counter[str] = Counter()  # by request: answers that have neither ended nor failed
        self._failures: list[tuple[str, MooncakeError]] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __getitem__(self, request_id: str) -> Sequence:
        return self._sequences[request_id]

    def get(self, request_id: str) -> Sequence | None:
        return self._sequences.get(request_id)

    def answers_to(self, root_id: str) -> list[Sequence]:
        """The sequences of one request."""
        return [sequence for sequence in self._sequences.values() if sequence.root_id == root_id]

    def enter(self, sequence: Sequence) -> None:
        """Add a new request."""
        self.join(sequence)
        self.expect(sequence.root_id, 1)

    def join(self, fork: Sequence) -> None:
        """Add another sequence of a request that is, or was, here. If it is an answer, ``expect`` counts it."""
        self._sequences[fork.request_id] = fork

    def leave(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]

    def expect(self, root_id: str, num_answers: int) -> None:
        self._open[root_id] += num_answers

    def is_open(self, root_id: str) -> bool:
        """Whether some answer of the request has not ended."""
        return root_id in self._open

    def close(self, root_id: str) -> None:
        """One answer of the request has ended."""
        self._open[root_id] -= 1
        if not self._open[root_id]:
            del self._open[root_id]

    def fail(self, root_id: str, error: MooncakeError) -> None:
        """One answer of the request has ended without its last token."""
        self.close(root_id)
        self._failures.append((root_id, error))

    def undo_add(self, sequence: Sequence) -> None:
        """As if it had never entered, however far it got."""
        self._sequences.pop(sequence.request_id, None)
        self._open.pop(sequence.root_id, None)

    def close_lost(self) -> None:
        """End answers of requests that have no sequence here any more."""
        here = {sequence.root_id for sequence in self._sequences.values()}
        for root_id in self._open.keys() - here:
            del self._open[root_id]

    def take_failures(self) -> list[tuple[str, MooncakeError]]:
        failures, self._failures = self._failures, []
        return failures
