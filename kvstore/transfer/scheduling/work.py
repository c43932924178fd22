"""The two kinds of ``Work`` that a link gives its paths: its queue, or a single slice that bypasses the queue."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from kvstore.transfer.requests import Transfer
from kvstore.transfer.scheduling.routes import Rail
from kvstore.transfer.transport import Slice
from mooncake.errors import MooncakeError


class Books(Protocol):
    """A ``Link``'s accounts: what waits for which transfer, and what is in flight on which rail."""

    def take(self, rail: Rail, until: Transfer | None) -> Slice | None: ...

    def done(self, rail: Rail, part: Slice) -> None: ...

    def refuse(self, rail: Rail, part: Slice, error: MooncakeError) -> None: ...

    def give_back(self, rail: Rail, parts: Iterable[Slice]) -> None: ...


class QueuedWork:
    """What one rail carries: until nothing of ``until`` waits, or, without it, until nothing waits."""

    __slots__ = ("_link", "_rail", "_until")

    def __init__(self, link: Books, rail: Rail, until: Transfer | None) -> None:
        self._link = link
        self._rail = rail
        self._until = until

    def take(self) -> Slice | None:
        return self._link.take(self._rail, self._until)

    def done(self, part: Slice, hashed: bool = False) -> None:
        if not hashed and part.checksum_bytes:
            part.hash()
        self._link.done(self._rail, part)

    def refuse(self, part: Slice, error: MooncakeError) -> None:
        self._link.refuse(self._rail, part, error)

    def give_back(self, parts: Iterable[Slice]) -> None:
        self._link.give_back(self._rail, parts)


class LoneWork:
    """A slice that bypasses the queue, and its outcome."""

    __slots__ = ("_part", "ended", "error")

    def __init__(self, part: Slice) -> None:
        self._part: Slice | None = part
        self.error: MooncakeError | None = None
        self.ended = 0.0  # 0: it did not succeed

    def take(self) -> Slice | None:
        part, self._part = self._part, None
        return part

    def done(self, part: Slice, hashed: bool = False) -> None:
        if not hashed and part.checksum_bytes:
            part.hash()
        self.ended = time.monotonic()

    def refuse(self, part: Slice, error: MooncakeError) -> None:
        self.error = error

    def give_back(self, parts: Iterable[Slice]) -> None:
        pass
