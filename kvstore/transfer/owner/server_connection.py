"""One connection to a ``SegmentServer``, its counters, and what the server reports about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvstore.transfer.owner.native_owner import HEAD_BYTES, Landed, NativeConnection
from kvstore.transfer.protocol import Status
from kvstore.transfer.sockets import Wire
from kvstore.transfer.transport import Attachment

NOWHERE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Since start. Shared-memory traffic bypasses the owner and is not counted here."""

    bytes_in: int
    bytes_out: int
    refused: int  # writes and reads that were not allowed
    violations: int  # connections closed for violating the protocol
    connections: int  # open now


@dataclass(frozen=True, slots=True)
class Put:
    """A whole block that has arrived, and may have to be refused. Its sender waits for the answer: OK when it can be
    read."""

    landed: Landed
    answer: Callable[[Status], None]  # once, from any thread; does not block


@dataclass(slots=True)
class Counts:
    """Written by one connection's thread, read by any."""

    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0
    violations: int = 0

    def add(self, other: Counts) -> None:
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        self.refused += other.refused
        self.violations += other.violations

    def add_native(self, connection: NativeConnection) -> None:
        bytes_in, bytes_out, refused = connection.counts
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out
        self.refused += refused


@dataclass(eq=False, slots=True)
class ServerConnection:
    """Served by its own thread; other threads check where it lands, and cut it."""

    wire: Wire
    is_local: bool  # over the unix socket: holds a mapping, sends nothing
    peer: str = ""  # set once it has said hello
    was_cut: bool = False  # by us, because a frame would have gone on landing where it may not any more
    landing_here: frozenset[int] = NOWHERE  # blocks that the frame being received in Python writes into
    counts: Counts = field(default_factory=Counts)
    attachment: Attachment | None = None  # it uses another transport, and is silent here
    native: NativeConnection | None = None  # reads and writes are answered without Python
    head: memoryview = field(default_factory=lambda: memoryview(bytearray(HEAD_BYTES)))  # of the current frame

    @property
    def landing(self) -> frozenset[int]:
        """Blocks that the frame being received writes into."""
        return self.landing_here if self.native is None else self.native.landing

    def total(self) -> Counts:
        total = replace(self.counts)
        if self.native is not None:
            total.add_native(self.native)
        return total
