"""A transport inside one process: paths of any speed over a plain buffer, which break on demand.

It fulfils the contract of ``transport.Path`` like the real ones, and is short enough to read.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from kvstore.transfer.protocol import SLICE_BYTES, Operation
from kvstore.transfer.transport import Caller, PathFailed, Slice, Work
from mooncake.errors import DeadlineExceeded, MooncakeError, StaleEpoch
from mooncake.types import SegmentAddress


@dataclass(eq=False)
class FakeRail:
    """One way to the segment. ``bytes_per_s`` 0: as fast as memory. Fields may be set at any time."""

    bytes_per_s: float = 0.0
    open_s: float = 0.0  # until a path is open
    is_dead: bool = False  # breaks at the next slice, and cannot be opened
    is_silent: bool = False  # moves nothing and reports nothing
    moved: list[Slice] = field(default_factory=list)  # in order, without those that broke half-way


class FakeTransport:
    """Reaches every address, and finds ``memory`` there, whose block b is granted to epoch ``grants[b]``."""

    unavailable = ""
    max_slice_bytes = SLICE_BYTES

    def __init__(self, memory: memoryview, grants: dict[int, int], rails: list[FakeRail], name: str = "fake") -> None:
        self.name = name
        self._memory = memory
        self._grants = grants
        self._rails = rails

    def paths_to(self, address: SegmentAddress) -> int:
        return len(self._rails)

    def open(self, address: SegmentAddress, caller: Caller, index: int, deadline: float) -> FakePath:
        rail = self._rails[index]
        if rail.is_dead:
            raise PathFailed("the rail is dead")
        time.sleep(rail.open_s)
        return FakePath(rail, self._memory, self._grants, address)

    def register(self, memory: memoryview) -> None:
        pass

    def close(self) -> None:
        pass


class FakePath:
    window_bytes = 2 * SLICE_BYTES

    def __init__(self, rail: FakeRail, memory: memoryview, grants: dict[int, int], address: SegmentAddress) -> None:
        self.progress = 0
        self._rail = rail
        self._memory = memory
        self._grants = grants
        self._address = address
        self._cut = threading.Event()

    def carry(self, work: Work) -> None:
        while part := work.take():
            try:
                refusal = self._move(part)
            except BaseException:
                work.give_back([part])
                raise
            self._rail.moved.append(part)
            self.progress += 1
            if refusal is None:
                work.done(part)
            else:
                work.refuse(part, refusal)

    @property
    def is_gone(self) -> bool:
        return self._rail.is_dead

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        self._cut.set()

    def _move(self, part: Slice) -> MooncakeError | None:
        for (block, offset, length, epoch), local in part.pieces:
            start = block * self._address.block_bytes + offset
            place = self._memory[start : start + length]
            self._wait(length, part.deadline)
            if part.operation is Operation.READ:
                local[:] = place
            elif self._grants.get(block, 0) != epoch:
                return StaleEpoch(f"block {block} is not granted to epoch {epoch}")
            else:
                place[:] = local
        return None

    def _wait(self, length: int, deadline: float) -> None:
        """Sleep as long as the rail takes for this many bytes. A dead one fails half-way."""
        rail = self._rail
        until = time.monotonic() + (length / rail.bytes_per_s if rail.bytes_per_s else 0.0)
        while rail.is_silent or time.monotonic() < until:
            if rail.is_dead or self._cut.is_set():
                break
            if time.monotonic() >= deadline:
                raise DeadlineExceeded("the rail did not answer")
            self._cut.wait(0.001)
        if rail.is_dead or self._cut.is_set():
            raise PathFailed("the rail broke")
