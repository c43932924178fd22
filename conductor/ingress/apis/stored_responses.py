"""Responses that later requests read again or continue: in this process's memory, within a limit, and those that were
used least recently go first. It does not know what they say.

Each belongs to the caller who made it. It is gone when the process ends, and other conductors do not have it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

ENTRY_BYTES = 512  # that one takes beside its contents


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``body`` is the JSON that was sent, ``input`` the whole conversation before it as its API encodes it."""

    body: bytes
    input: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.input) + ENTRY_BYTES


class StoredResponses:
    """One event loop."""

    def __init__(self, most_bytes: int) -> None:
        """0: none are stored."""
        self._most_bytes = most_bytes
        self._entries: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __bool__(self) -> bool:
        """Whether any are stored at all."""
        return self._most_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, owner: bytes, response_id: str, stored: StoredResponse) -> None:
        """In place of one with the same id. One that is larger than the limit is not kept."""
        self.remove(owner, response_id)
        if stored.num_bytes > self._most_bytes:
            return
        self._entries[owner, response_id] = stored
        self._num_bytes += stored.num_bytes
        while self._num_bytes > self._most_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, owner: bytes, response_id: str) -> StoredResponse | None:
        if found := self._entries.get((owner, response_id)):
            self._entries.move_to_end((owner, response_id))
        return found

    def remove(self, owner: bytes, response_id: str) -> bool:
        """Whether it was there."""
        removed = self._entries.pop((owner, response_id), None)
        if removed is not None:
            self._num_bytes -= removed.num_bytes
        return removed is not None
