"""The interface between the transfer engine and its transports: what a transport offers and what it is given.

The engine cuts requests into slices, decides which path carries which, and counts; a transport opens paths, and a path
moves slices. A transport must not decide what travels first, nor retry: it reports what arrived, gives back what may
not have, and fails. Shared memory, TCP, RDMA and the fake for tests all implement these few methods.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvstore.checksum import Checksums, checksum, part_checksums
from kvstore.transfer.protocol import Operation, WireRange
from mooncake.errors import MooncakeError
from mooncake.types import SegmentAddress


class PathFailed(Exception):
    """This path cannot carry (any more); another may."""


class NotAllowed(PathFailed):
    """The owner does not admit us, however often we ask."""


class Priority(IntEnum):
    """What overtakes what. Waiting raises a slice by one class at a time, so nothing starves."""

    URGENT = 0  # a token waits for it: layers on their way to a decode node, a prefix being loaded
    NORMAL = 1
    BACKGROUND = 2  # copies into the pool, replication


class Piece(NamedTuple):
    """A part of one range, no longer than a slice."""

    wire: WireRange
    local: memoryview


@dataclass(slots=True, eq=False)  # frozen it would take four times as long to create, which small requests notice
class Slice:
    """Pieces that travel together: 1 to MAX_RANGES of them, about SLICE_BYTES in total, one operation. Never
    modified."""

    operation: Operation
    pieces: Sequence[Piece]
    nbytes: int
    deadline: float  # time.monotonic()
    checksum_bytes: int = 0  # 0: no checksums
    sums: tuple[Checksums, ...] = ()  # otherwise filled: one array per piece, with one checksum per this many bytes

    def hash(self) -> None:
        """Compute the checksums of all pieces from their local memory."""
        for piece, sums in zip(self.pieces, self.sums, strict=True):
            if piece.local.nbytes <= self.checksum_bytes:
                sums[0] = checksum(piece.local)
            else:
                sums[:] = part_checksums(piece.local, self.checksum_bytes)


@dataclass(frozen=True, slots=True)
class Caller:
    """The client's identity for the greeting. ``name`` and ``incarnation`` make the writer id that owners know."""

    name: str
    incarnation: int
    secret: bytes = b""  # shared by the cluster; empty where none is configured

    @property
    def writer_id(self) -> str:
        """How owners of segments name this caller, in ``on_peer_gone`` and in reservations: unique per instance."""
        return f"{self.name}/{self.incarnation:016x}"


class Work(Protocol):
    """Slices for one path, taken as it has room for them. Every slice taken ends in exactly one of the three calls."""

    def take(self) -> Slice | None:
        """The slice that this path should carry next, or None if there is none now. Never blocks for work to appear;
        may sleep to keep a rate limit. A path with nothing in flight that gets None returns."""
        ...

    def done(self, part: Slice, hashed: bool = False) -> None:
        """A write is visible to whoever reads the segment next; a read is in its local memory, and nothing will
        touch that memory any more. ``hashed``: the path has also filled the requested checksums."""
        ...

    def refuse(self, part: Slice, error: MooncakeError) -> None:
        """The owner refuses it (StaleEpoch, InvalidRequest): another path would not help."""
        ...

    def give_back(self, parts: Iterable[Slice]) -> None:
        """These may or may not have arrived. Nothing of this path touches their local memory any more, and of a
        write at most the same bytes can still land, fenced by the epoch. They will travel again over another path."""
        ...


class Path(Protocol):
    """One connection, mapping or queue pair to one segment. Driven by one thread at a time."""

    @property
    def window_bytes(self) -> int:
        """How much may be in flight over this path, limited by the owner's credit. One slice always may be."""
        ...

    def carry(self, work: Work) -> None:
        """Take slices, several in flight at once where that helps, until there are no more and none is in flight.

        Raises PathFailed, or DeadlineExceeded when the deadline of a slice in flight passed, after giving back what was
        in flight. The path is then closed and discarded. A slice's fate is reported through ``work`` only.
        """
        ...

    @property
    def progress(self) -> int | None:
        """A count that grows while bytes move, readable from any thread, to distinguish a stalled path from a slow
        one. Bytes where they are known within a slice, whole slices otherwise; None where no path can stall by
        itself."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether the owner has closed its end. Called only while nobody carries; never blocks."""
        ...

    def cut(self) -> None:
        """From any thread: make a running ``carry`` fail soon. Idempotent, never blocks."""
        ...

    def close(self) -> None:
        """Release everything. Never called while ``carry`` runs. Idempotent."""
        ...


class Transport(Protocol):
    """One way to reach segments. Thread-safe."""

    @property
    def name(self) -> str:
        """As in ``transfer.transports``."""
        ...

    @property
    def unavailable(self) -> str:
        """Why this process cannot use it at all, in one line, or ""."""
        ...

    @property
    def max_slice_bytes(self) -> int:
        """The largest slice that a path carries: a multiple of SLICE_BYTES, at most MAX_FRAME_BYTES."""
        ...

    def paths_to(self, address: SegmentAddress) -> int:
        """How many paths to this segment make sense; 0 if this transport cannot reach it. Never blocks."""
        ...

    def open(self, address: SegmentAddress, caller: Caller, index: int, deadline: float) -> Path:
        """Open path ``index`` of ``paths_to``. Raises PathFailed, DeadlineExceeded, or StaleEpoch when the segment's
        owner has restarted."""
        ...

    def register(self, memory: memoryview) -> None:
        """A hint: slices will often use this memory. Raises nothing; memory that cannot be registered is copied."""
        ...

    def close(self) -> None:
        """Called when every path has been closed."""
        ...


class Attachment(Protocol):
    """The owner's end of a path that a peer set up over a TCP connection; it lives as long as that connection."""

    @property
    def reply(self) -> bytes:
        """What the peer needs to continue, at most MAX_ATTACH_BYTES."""
        ...

    def close(self) -> None:
        """After this returns nothing of the peer lands through this attachment any more. Idempotent."""
        ...


class Exporter(Protocol):
    """The owner's side of a transport that needs more than a socket. ``SegmentServer`` asks it for attachments."""

    @property
    def name(self) -> str:
        """As in ``transfer.transports``."""
        ...

    def attach(self, request: bytes, on_broken: Callable[[], object]) -> Attachment:
        """``request`` comes from the peer's ``Transport.open``, unchecked. ``on_broken`` is called, on any thread, when
        the attachment can carry no more, and must not block. Raises InvalidRequest, or PathFailed when it is
        impossible. Called on the connection's thread."""
        ...

    @property
    def bytes_in(self) -> int:
        """Written by peers, as far as they have reported it."""
        ...

    def revoke(self, block_ids: Collection[int]) -> None:
        """After this returns no write through any attachment lands in these blocks. Takes microseconds; an
        uncooperative peer loses its attachment."""
        ...

    def close(self) -> None:
        """Called when every attachment has been closed."""
        ...
