"""Reads blocks back from an SSD's log: concurrent reads share trips to a few threads.

It knows where a block is and what its checksums are, but not which blocks are worth keeping.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from functools import partial

from kvstore.ssd.index import SsdBlock
from kvstore.ssd.log import BlockRead, SsdLog
from mooncake.errors import KVLoadFailed
from mooncake.threads import Threads

READ_THREADS = 4
MAX_READS_A_TRIP = 8


@dataclass(frozen=True, slots=True)
class _Reading:
    block: SsdBlock
    into: memoryview
    answer: asyncio.Future[bool]


class SsdReads:
    """Belongs to one event loop. A trip to the threads costs as much as reading 200 KB."""

    def __init__(self, log: SsdLog) -> None:
        self._log = log
        self._waiting: deque[_Reading] = deque()
        self._busy = 0  # threads
        self._threads = Threads(READ_THREADS, "ssd-read")
        self._is_closed = False

    def read(self, block: SsdBlock, into: memoryview) -> asyncio.Future[bool]:
        """Whether the bytes match their checksums; otherwise OSError, KeyError (its segment was deleted) or
        KVLoadFailed (nobody reads any more)."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Reading(block, into, answer))
        self._start()
        return answer

    def close(self) -> None:
        """Start no further reads: those that wait, or come later, fail."""
        self._is_closed = True
        self._start()

    def shut(self) -> None:
        """After ``close``: return once no thread reads any more."""
        self._threads.shutdown()

    def _start(self) -> None:
        while self._is_closed and self._waiting:
            if not (answer := self._waiting.popleft().answer).done():
                answer.set_exception(KVLoadFailed("the SSD is closed"))
        while self._waiting and self._busy < READ_THREADS:
            share = -(-len(self._waiting) // (READ_THREADS - self._busy))
            batch = [self._waiting.popleft() for _ in range(min(share, MAX_READS_A_TRIP))]
            self._busy += 1
            trip = asyncio.get_running_loop().run_in_executor(self._threads, self._read_all, batch)
            trip.add_done_callback(partial(self._end, batch))

    def _end(self, batch: list[_Reading], trip: asyncio.Future[list[bool | OSError | KeyError]]) -> None:
        self._busy -= 1
        failure = trip.exception()  # a bug; nobody must wait for ever
        results = [failure] * len(batch) if failure is not None else trip.result()
        for reading, result in zip(batch, results, strict=True):
            if reading.answer.done():  # its caller has gone
                continue
            if isinstance(result, BaseException):
                reading.answer.set_exception(result)
            else:
                reading.answer.set_result(result)
        self._start()

    def _read_all(self, batch: list[_Reading]) -> list[bool | OSError | KeyError]:
        """In a thread."""
        return self._log.read_blocks(
            [
                BlockRead(
                    reading.block.place.segment,
                    reading.block.place.offset + reading.block.place.header_bytes,
                    reading.into,
                    reading.block.header.length,
                    reading.block.header.checksums,
                )
                for reading in batch
            ]
        )
