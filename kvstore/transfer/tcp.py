"""TCP: connections to a peer, each carrying slices one after another.

Connections to an owner with several addresses (one per network card) are spread over them. It does not decide what goes
first.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
from collections import deque
from collections.abc import Iterable

from kvstore.transfer import native, protocol
from kvstore.transfer.greeting import greet
from kvstore.transfer.keyed import KeyedWire
from kvstore.transfer.piece_table import PieceTable
from kvstore.transfer.protocol import Operation, ProtocolViolation, Reply, Status
from kvstore.transfer.sockets import Wire, has_ended, time_left, tune
from kvstore.transfer.transport import Caller, PathFailed, Slice, Work
from mooncake.addresses import split_address
from mooncake.errors import DeadlineExceeded, InvalidRequest, MooncakeError, StaleEpoch
from mooncake.types import SegmentAddress

_READ, _OK = Operation.READ, Status.OK  # enum members are slow to look up
WINDOW = 4  # slices in flight on one connection,
WINDOW_BYTES = 2 * protocol.MAX_FRAME_BYTES  # and this many bytes


class TcpTransport:
    """``streams`` connections to each peer, or one for each of its addresses if those are more."""

    name = "tcp"
    unavailable = ""
    max_slice_bytes = protocol.MAX_FRAME_BYTES

    def __init__(self, streams: int, is_native: bool = True) -> None:
        """Without ``is_native``, or a compiler, Python moves the bytes."""
        self._streams = streams
        self._library = native.load() if is_native else None

    def paths_to(self, address: SegmentAddress) -> int:
        return max(self._streams, len(_addresses(address))) if address.tcp_address else 0

    def open(self, address: SegmentAddress, caller: Caller, index: int, deadline: float) -> TcpPath:
        """Raises PathFailed, StaleEpoch (another incarnation runs there) or DeadlineExceeded."""
        places = _addresses(address)
        wire = _connect(address, places[index % len(places)], caller, deadline, self._library)
        return TcpPath(wire, address.node_id)

    def register(self, memory: memoryview) -> None:
        """Nothing to do: the kernel accepts any memory."""

    def close(self) -> None:
        """Nothing is kept besides the paths."""


class TcpPath:
    """One connection. Several slices are in flight; replies come back in the same order."""

    def __init__(self, wire: Wire, node_id: str) -> None:
        self.window_bytes = WINDOW_BYTES
        self._wire = wire
        self._native = wire if isinstance(wire, native.NativeWire) else None
        self._node_id = node_id
        self._next_id = 0

    @property
    def progress(self) -> int:
        return self._wire.moved_bytes

    @property
    def is_gone(self) -> bool:
        return has_ended(self._wire.sock)

    def carry(self, work: Work) -> None:
        """Reads and writes are never in flight together: each side might then wait for the other to read."""
        first = work.take()
        if first is None:
            return
        following = work.take()
        taken = [first] if following is None else [following, first]  # and not sent yet
        on_way: deque[tuple[int, Slice]] = deque()
        try:
            if following is None and self._native is not None and len(first.pieces) == 1:
                self._exchange(work, self._native, first)
                taken.clear()
            while True:
                part = taken.pop() if taken else work.take() if len(on_way) < WINDOW else None
                if part is not None:
                    on_way.append((self._new_id(), part))
                    while on_way[0][1].operation is not part.operation:
                        self._finish(work, *on_way[0])
                        on_way.popleft()
                    self._send(*on_way[-1])
                elif on_way:
                    self._finish(work, *on_way[0])
                    on_way.popleft()
                else:
                    return
        except (OSError, ProtocolViolation) as error:
            self._give_back(work, on_way, taken)
            raise PathFailed(f"the connection to {self._node_id} broke: {error}") from None
        except BaseException:
            self._give_back(work, on_way, taken)
            raise

    def cut(self) -> None:
        self._wire.shut()

    def close(self) -> None:
        self._wire.close()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _give_back(self, work: Work, on_way: Iterable[tuple[int, Slice]], taken: Iterable[Slice]) -> None:
        self._wire.shut()
        work.give_back([*(part for _, part in on_way), *taken])

    def _exchange(self, work: Work, wire: native.NativeWire, part: Slice) -> None:
        """The only slice, with one piece: sent and answered in one call."""
        frame_id, hashed = self._new_id(), native.hashes(part)
        if credit_bytes := wire.exchange(frame_id, part, hashed):
            self.window_bytes = min(credit_bytes, WINDOW_BYTES)
            work.done(part, hashed)
        else:
            self._settle(work, frame_id, part, wire.reply, hashed)

    def _send(self, frame_id: int, part: Slice) -> None:
        head = _head(frame_id, part)
        if part.operation is _READ:
            self._wire.send([head], part.deadline)
        elif self._native is not None and native.suits(part):
            self._native.send_slice(head, part)
        else:
            self._wire.send([head, *(piece.local for piece in part.pieces)], part.deadline)

    def _finish(self, work: Work, frame_id: int, part: Slice) -> None:
        """Receive one reply."""
        head = bytearray(protocol.REPLY_BYTES)
        is_read = part.operation is _READ
        hashed = self._native is not None and native.suits(part)
        if not is_read:
            self._wire.receive_into([memoryview(head)], part.deadline)
        elif self._native is not None and hashed:
            self._native.receive_slice(head, part)
        else:
            self._wire.receive_into([memoryview(head), *(piece.local for piece in part.pieces)], part.deadline)
        self._settle(work, frame_id, part, head, hashed)

    def _settle(self, work: Work, frame_id: int, part: Slice, head: bytes | bytearray, hashed: bool) -> None:
        """A refusal concerns the slice, not the connection: the stream of frames stays in step."""
        reply = protocol.unpack_reply(head)
        expected_bytes = part.nbytes if part.operation is _READ else 0
        if reply.frame_id != frame_id or reply.payload_bytes != expected_bytes:
            raise ProtocolViolation("a reply that answers another frame")
        self.window_bytes = min(reply.credit_bytes, WINDOW_BYTES)
        if reply.status is _OK:
            work.done(part, hashed)
        else:
            work.refuse(part, self._refusal(reply, part))

    def _refusal(self, reply: Reply, part: Slice) -> MooncakeError:
        ranges = part.pieces.ranges() if type(part.pieces) is PieceTable else [piece.wire for piece in part.pieces]
        if reply.refused >= len(ranges):
            raise ProtocolViolation("a refusal of a range that was not sent")
        wire = ranges[reply.refused]
        if reply.status is Status.STALE_EPOCH:
            return stale_epoch(self._node_id, wire.block, wire.epoch)
        return InvalidRequest(f"{self._node_id} refused block {wire.block}: {reply.status.name.lower()}")


def _head(frame_id: int, part: Slice) -> bytes:
    if type(part.pieces) is PieceTable:
        ranges = part.pieces.packed()
        return protocol.pack_frame_of(part.operation, part.pieces.num_ranges, ranges, part.nbytes, frame_id)
    return protocol.pack_frame(part.operation, [piece.wire for piece in part.pieces], part.nbytes, frame_id)


def stale_epoch(node_id: str, block: int, epoch: int) -> StaleEpoch:
    return StaleEpoch(f"{node_id}: block {block} is no longer granted to epoch {epoch}")


def attach(
    address: SegmentAddress, caller: Caller, name: str, request: bytes, deadline: float
) -> tuple[socket.socket, bytes]:
    """Ask the owner for an attachment of the transport ``name``. The socket must stay open, silently, as long as the
    attachment is in use: its end tells either side that the other is gone.

    Raises PathFailed, StaleEpoch (another incarnation runs there) or DeadlineExceeded.
    """
    wire = _connect(address, _addresses(address)[0], caller, deadline)
    try:
        wire.send([protocol.pack_attach(name, request)], deadline)
        reply = protocol.unpack_reply(wire.receive(protocol.REPLY_BYTES, deadline))
        if reply.payload_bytes > protocol.MAX_ATTACH_BYTES:
            raise ProtocolViolation(f"an answer of {reply.payload_bytes} bytes to an attachment")
        answer = bytes(wire.receive(reply.payload_bytes, deadline)) if reply.payload_bytes else b""
        if reply.status is not Status.OK:
            raise PathFailed(f"{address.node_id} does not attach {name}: {answer.decode(errors='replace')}")
        return wire.sock, answer
    except (OSError, ProtocolViolation) as error:
        wire.close()
        raise PathFailed(f"{address.node_id}: {error}") from None
    except BaseException:
        wire.close()
        raise


def connect_keyed(address: SegmentAddress, caller: Caller, deadline: float) -> KeyedWire:
    """A connection for whole blocks by key. Raises PathFailed (also without a compiler), StaleEpoch (another
    incarnation runs there) or DeadlineExceeded."""
    library = native.load()
    if library is None or not address.tcp_address:
        raise PathFailed(f"{address.node_id} does not serve blocks by key")
    wire = _connect(address, _addresses(address)[0], caller, deadline)
    return KeyedWire(native.NativeKeyed(wire, library))


def _addresses(address: SegmentAddress) -> list[str]:
    """``tcp_address`` may list several, separated by commas."""
    return address.tcp_address.split(",") if address.tcp_address else []


def _connect(
    address: SegmentAddress, place: str, caller: Caller, deadline: float, library: ctypes.CDLL | None = None
) -> Wire:
    """Raises PathFailed, StaleEpoch (another incarnation runs there) or DeadlineExceeded."""
    try:
        sock = socket.create_connection(split_address(place), timeout=time_left(deadline))
    except TimeoutError:
        raise DeadlineExceeded(f"{address.node_id} at {place} did not answer in time") from None
    except (OSError, ValueError) as error:
        raise PathFailed(f"cannot connect to {address.node_id} at {place}: {error}") from None
    try:
        tune(sock)
        wire = Wire(sock) if library is None else native.NativeWire(sock, library)
        greet(wire, address, caller, deadline)
        return wire
    except (OSError, ProtocolViolation) as error:
        _close(sock)
        raise PathFailed(f"{address.node_id} at {place}: {error}") from None
    except BaseException:
        _close(sock)
        raise


def _close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.close()
