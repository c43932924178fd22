"""Slices over real verbs: what arrives, what is refused, and what happens when queue pairs, keys and peers fail."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.pointers import address_of
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.protocol import Operation, WireRange
from kvstore.transfer.rdma import verbs
from kvstore.transfer.rdma.transport import RdmaPath, RdmaTransport
from kvstore.transfer.rdma.verbs import Endpoint, QueuePair, Status
from kvstore.transfer.requests import ReadRange, WriteRange
from kvstore.transfer.tcp import attach
from kvstore.transfer.transport import Caller, PathFailed, Piece, Slice
from mooncake.errors import MooncakeError, NodeUnavailable, StaleEpoch
from mooncake.types import SegmentAddress

pytestmark = pytest.mark.rdma

BLOCK = 192 << 10
NUM = 16
EPOCH = 5
ROOT = Path(__file__).parents[2]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def soon(seconds: float = 40.0) -> float:
    return time.monotonic() + seconds


def noise(*shape: int) -> Bytes:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def eventually(condition: Callable[[], object], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


class Slices:
    """Work for one path, and what became of it."""

    def __init__(self, operation: Operation, rows: Iterable[tuple[int, int, Bytes]], epoch: int = EPOCH) -> None:
        self.done_parts: list[Slice] = []
        self.refused: list[tuple[Slice, MooncakeError]] = []
        self.given_back: list[Slice] = []
        pieces = [Piece(WireRange(block, offset, data.nbytes, epoch), data.data) for block, offset, data in rows]
        self.waiting = deque(Slice(operation, (piece,), piece.local.nbytes, soon()) for piece in pieces)

    def take(self) -> Slice | None:
        return self.waiting.popleft() if self.waiting else None

    def done(self, part: Slice) -> None:
        self.done_parts.append(part)

    def refuse(self, part: Slice, error: MooncakeError) -> None:
        self.refused.append((part, error))

    def give_back(self, parts: Iterable[Slice]) -> None:
        self.given_back.extend(parts)


@pytest.fixture
def transport() -> Any:
    one = RdmaTransport()
    yield one
    one.close()


def open_path(transport: RdmaTransport, address: SegmentAddress) -> RdmaPath:
    return transport.open(address, Caller("tester", 1), 0, soon())


def break_queue_pair(pair: QueuePair) -> None:
    """Move it to the error state, as a device does."""
    verbs = pair.device.verbs
    attributes = verbs.qp.QPAttr()
    attributes.qp_state = verbs.enums.IBV_QPS_ERR
    pair._pair.modify(attributes, verbs.enums.IBV_QP_STATE)


def test_bytes_arrive_and_come_back(own: Any, engine_over: Any):
    owner, engine = own(), engine_over()
    blocks = noise(NUM, BLOCK)
    report = engine.write(owner.address, [WriteRange(i, 0, blocks[i], EPOCH) for i in range(NUM)], soon())
    assert (report.transport, report.nbytes) == ("rdma", blocks.nbytes)
    assert np.array_equal(owner.blocks, blocks)

    ragged = [(5, 1, 17), (0, BLOCK - 1, 1), (2, 4097, BLOCK // 2), (2, 0, 3)]
    into = [bytearray(length) for _, _, length in ragged]
    engine.read(owner.address, [ReadRange(*row[:2], data) for row, data in zip(ragged, into, strict=True)], soon())
    assert into == [blocks[b, o : o + length].tobytes() for b, o, length in ragged]
    many = np.zeros((NUM, 100, 64), dtype=np.uint8)
    engine.read(owner.address, [ReadRange(i, 128 * j, many[i, j]) for i in range(NUM) for j in range(100)], soon())
    assert np.array_equal(many, blocks[:, : 100 * 128].reshape(NUM, 100, 128)[:, :, :64])

    [stats] = engine.stats()
    assert (stats.node_id, stats.transport, stats.failures, stats.is_current) == ("owner", "rdma", 0, True)
    assert stats.gb_per_s > 0
    assert engine.unavailable() == {}
    # The owner sees no one-sided write; it is told by a write with immediate data how much has landed.
    eventually(lambda: owner.server.stats().bytes_in == blocks.nbytes)


def test_registered_memory_is_not_copied(own: Any, transport: RdmaTransport):
    owner, data = own(), noise(NUM, BLOCK)
    transport.register(data.data)
    eventually(lambda: transport._memory is not None and transport._memory.find(address_of(data.data), data.nbytes))
    path = open_path(transport, owner.address)
    work = Slices(Operation.WRITE, [(i, 0, data[i]) for i in range(NUM)])
    path.carry(work)
    assert len(work.done_parts) == NUM and np.array_equal(owner.blocks, data)
    wanted = data.copy()
    data[:] = 0
    path.carry(Slices(Operation.READ, [(i, 0, data[i]) for i in range(NUM)]))
    assert np.array_equal(data, wanted)
    assert path._staging == []  # nothing went through memory of the path's own
    path.close()


def test_a_write_whose_grant_is_gone_is_refused_and_lands_nowhere(own: Any, engine_over: Any):
    owner, engine = own(), engine_over()
    data = noise(BLOCK)
    engine.write(owner.address, [WriteRange(3, 0, data, EPOCH), WriteRange(4, 0, data, EPOCH)], soon())
    owner.server.revoke([3])
    before = owner.blocks[3].copy()
    for epoch in (EPOCH, EPOCH + 1, 0):
        with pytest.raises(StaleEpoch, match="block 3"):
            engine.write(owner.address, [WriteRange(3, 0, data[::-1].copy(), epoch)], soon())
    owner.server.grant([3], EPOCH + 1)
    with pytest.raises(StaleEpoch, match="block 3"):
        engine.write(owner.address, [WriteRange(3, 0, data[::-1].copy(), EPOCH)], soon())
    assert np.array_equal(owner.blocks[3], before)
    engine.write(owner.address, [WriteRange(3, 0, data[::-1].copy(), EPOCH + 1)], soon())  # the next writer's turn
    assert np.array_equal(owner.blocks[3], data[::-1])
    assert not owner.server.maps_memory(engine.writer_id)  # nobody has to wait for this writer to stop
    assert [entry.transport for entry in engine.stats() if entry.nbytes] == ["rdma"]


def test_no_write_lands_after_revoke_has_returned(own: Any, transport: RdmaTransport):
    """A writer continues with a key that it was given before."""
    owner = own()
    path = open_path(transport, owner.address)
    data = noise(BLOCK)
    path.carry(Slices(Operation.WRITE, [(7, 0, data)]))
    path.window_keys[7] = (EPOCH + 1, path.window_keys[7][1])  # so that it does not ask again
    owner.server.revoke([7])
    owner.server.grant([7], EPOCH + 2)
    work = Slices(Operation.WRITE, [(7, 0, np.zeros(BLOCK, np.uint8))], EPOCH + 1)
    path.carry(work)
    assert [str(error) for _, error in work.refused] == [f"owner: block 7 is not granted to epoch {EPOCH + 1}"]
    assert np.array_equal(owner.blocks[7], data)
    path.close()


def test_a_wrong_key_ends_with_status_10_and_is_mended(own: Any, transport: RdmaTransport):
    owner = own()
    path = open_path(transport, owner.address)
    data = noise(BLOCK)
    path.carry(Slices(Operation.WRITE, [(2, 0, data)]))
    pair, link = path.queue_pair, path._link
    assert link is not None
    for key in (path.window_keys[2][1] ^ 0x15, link._read_keys[0]):  # one that nobody gave out; one that may only read
        pair, link = path.queue_pair, path._link
        assert link is not None
        remote, _ = link.remote(2, 0, Operation.READ)
        staging = path._staging[0]._registered
        assert staging is not None
        pair.post_write(99, staging.address, staging.lkey, 4096, remote, key, signal=True)
        found: list[int] = []
        while not found:
            found = [completion.status for completion in pair.wait(20) if completion.tag == 99]
        assert found == [Status.REMOTE_ACCESS] == [10]
        path._disconnect()
        path.connect(soon())
    path.carry(Slices(Operation.WRITE, [(2, 0, data)]))
    path.window_keys[2] = (EPOCH, path.window_keys[2][1] ^ 0x15)
    work = Slices(Operation.WRITE, [(2, 0, data[::-1].copy())])
    path.carry(work)  # asks for the right one over a new queue pair
    assert len(work.done_parts) == 1 and np.array_equal(owner.blocks[2], data[::-1])
    path.close()


def test_refused_keys_fail_only_their_own_slices_and_the_writer_is_not_gone(own: Any, transport: RdmaTransport):
    """Each breaks the queue pair, and with it what others have in flight."""
    owner = own()
    path = open_path(transport, owner.address)
    data = noise(NUM, BLOCK)
    path.carry(Slices(Operation.WRITE, [(i, 0, data[i]) for i in range(NUM)]))

    class Spoiled(Slices):
        """Before every other slice is taken its key goes bad: its block is revoked, or the key was never one."""

        def take(self) -> Slice | None:
            part = super().take()
            if part is not None and (block := part.pieces[0].wire.block) % 2:
                epoch, key = path.window_keys.get(block, (EPOCH, 0x15))
                path.window_keys[block] = (epoch, key ^ 0x15)
                if block < NUM // 2:
                    owner.server.revoke([block])
            return part

    before = owner.blocks.copy()
    work = Spoiled(Operation.WRITE, [(i, 0, data[i][::-1].copy()) for i in range(NUM)])
    path.carry(work)
    refused = list(range(1, NUM // 2, 2))
    assert sorted(part.pieces[0].wire.block for part, _ in work.refused) == refused
    assert all(isinstance(error, StaleEpoch) for _, error in work.refused)
    assert len(work.done_parts) == NUM - len(refused) and not work.given_back
    for block in range(NUM):
        assert np.array_equal(owner.blocks[block], before[block] if block in refused else data[block][::-1])
    eventually(lambda: owner.server.stats().connections == 1)
    assert owner.gone == []
    assert not any(staging.is_busy for staging in path._staging)
    path.close()
    eventually(lambda: len(owner.gone) == 1)


def test_late_slices_do_not_keep_others_from_a_new_queue_pair(own: Any, transport: RdmaTransport):
    owner = own()
    path = open_path(transport, owner.address)
    path.carry(Slices(Operation.WRITE, [(0, 0, noise(BLOCK))]))
    path.window_keys[0] = (EPOCH, path.window_keys[0][1] ^ 0x15)
    work = Slices(Operation.WRITE, [(0, 0, noise(BLOCK)), (1, 0, noise(BLOCK))])
    first, second = work.waiting
    drive = path._drive

    def drive_late(work: Slices) -> None:
        try:
            drive(work)
        finally:
            if work.done_parts == []:
                late = dataclasses.replace(first, deadline=time.monotonic())
                path._flights[0].part = late

    path._drive = drive_late  # type: ignore[method-assign]
    path.carry(work)
    assert len(work.given_back) == 1 and work.done_parts == [second]
    assert owner.gone == []
    path.close()


def test_a_broken_queue_pair_fails_the_path_and_gives_everything_back(own: Any, transport: RdmaTransport):
    owner = own()
    path = open_path(transport, owner.address)
    path.carry(Slices(Operation.WRITE, [(0, 0, noise(BLOCK))]))
    break_queue_pair(path.queue_pair)
    work = Slices(Operation.WRITE, [(i, 0, noise(BLOCK)) for i in range(3)])
    started = time.monotonic()
    with pytest.raises(PathFailed):
        path.carry(work)
    assert time.monotonic() - started < 15
    assert {piece.wire.block for part in work.given_back for piece in part.pieces} | {
        piece.wire.block for part in [*work.done_parts, *work.waiting] for piece in part.pieces
    } == {0, 1, 2}
    path.close()
    again = open_path(transport, owner.address)
    again.carry(work := Slices(Operation.WRITE, [(0, 0, noise(BLOCK))]))
    assert len(work.done_parts) == 1
    again.close()


def test_a_queue_pair_that_the_owner_loses_is_replaced(own: Any, transport: RdmaTransport):
    owner, data = own(), noise(3, BLOCK)
    path = open_path(transport, owner.address)
    path.carry(Slices(Operation.WRITE, [(0, 0, data[1])]))
    [attachment] = owner.server._exporters[0]._attachments
    break_queue_pair(attachment._queue_pair)
    work = Slices(Operation.WRITE, [(i, 0, data[i]) for i in range(3)])
    path.carry(work)
    assert len(work.done_parts) == 3 and not work.given_back
    assert np.array_equal(owner.blocks[:3], data)
    eventually(lambda: owner.server.stats().connections == 1)
    assert owner.gone == []
    path.close()


def test_a_queue_pair_that_gets_no_acknowledgement_is_replaced_and_the_writer_is_not_gone(
    own: Any, transport: RdmaTransport, monkeypatch: pytest.MonkeyPatch
):
    owner, data, num_links = own(), noise(BLOCK), 0
    retries = verbs._RETRIES

    def attach_once_to_nobody(request: bytes, deadline: float) -> tuple[socket.socket, bytes]:
        nonlocal num_links
        num_links += 1
        sock, answer = attach(owner.address, Caller("tester", 1), "rdma", request, deadline)
        monkeypatch.setattr(verbs, "_RETRIES", 1 if num_links == 1 else retries)  # soft RoCE takes 7 for endless
        if num_links == 1:  # what is sent to this queue pair is lost
            there = Endpoint.unpack(answer[: Endpoint.SIZE])
            nobody = dataclasses.replace(there, queue_pair=there.queue_pair ^ 0x80_0000)
            answer = nobody.pack() + answer[Endpoint.SIZE :]
        return sock, answer

    assert transport._device is not None and transport._memory is not None
    path = RdmaPath(transport._device, transport._memory, owner.address, attach_once_to_nobody)
    path.connect(soon())
    work = Slices(Operation.WRITE, [(2, 0, data)])
    path.carry(work)
    assert len(work.done_parts) == 1 and not work.given_back
    assert np.array_equal(owner.blocks[2], data)
    assert num_links == 2
    eventually(lambda: owner.server.stats().connections == 1)
    assert owner.gone == []
    path.close()


def test_another_transport_takes_over_in_the_middle(own: Any, engine_over: Any):
    owner, engine = own("rdma", "tcp"), engine_over("rdma", "tcp")
    blocks = noise(NUM, BLOCK)
    engine.write(owner.address, [WriteRange(0, 0, blocks[0], EPOCH)], soon())
    exporter = owner.server._exporters[0]
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(4):
                engine.write(owner.address, [WriteRange(i, 0, blocks[i], EPOCH) for i in range(NUM)], soon())
        except BaseException as error:
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    eventually(lambda: exporter.bytes_in >= blocks[0].nbytes)
    exporter._closing = True  # takes no new queue pair, and the ones that it has break
    for attachment in list(exporter._attachments):
        break_queue_pair(attachment._queue_pair)
    writer.join(60)
    assert not writer.is_alive() and not failed
    assert np.array_equal(owner.blocks, blocks)
    stats = {entry.transport: entry for entry in engine.stats()}
    assert stats["tcp"].nbytes > 0 and stats["rdma"].failures > 0


OWNER = """
import json, sys
from dataclasses import asdict
from kvstore.segment import Segment
from kvstore.transfer.owner.server import SegmentServer
segment = Segment.create("owner", 196608, 16)
server = SegmentServer(segment, "owner", tuple(sys.argv[1:]))
server.start()
server.grant(range(16), 5)
print(json.dumps(asdict(server.address)), flush=True)
sys.stdin.read()
"""


def test_a_peer_that_dies_is_noticed(own: Any, engine_over: Any):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, "rdma"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None and process.stdin is not None
    address = SegmentAddress(**json.loads(process.stdout.readline()))
    engine = engine_over()
    data = noise(BLOCK)
    engine.write(address, [WriteRange(0, 0, data, EPOCH)], soon())
    process.kill()
    process.wait()
    started = time.monotonic()
    with pytest.raises(NodeUnavailable):
        engine.write(address, [WriteRange(i, 0, data, EPOCH) for i in range(NUM)], soon())
    assert time.monotonic() - started < 15
    process.stdin.close()
    process.stdout.close()


def test_the_owner_learns_that_a_writer_is_gone(own: Any):
    owner = own()
    engine = TransferEngine("writer", ("rdma",))
    engine.write(owner.address, [WriteRange(0, 0, noise(BLOCK), EPOCH)], soon())
    assert owner.gone == []
    engine.close()
    eventually(lambda: owner.gone == [engine.writer_id])
    eventually(lambda: not owner.server._exporters[0]._attachments)


def test_an_address_of_an_owner_that_was_replaced_is_stale(own: Any, engine_over: Any):
    owner = own()
    old = dataclasses.replace(owner.address, incarnation=owner.address.incarnation ^ 2)
    with pytest.raises(StaleEpoch):
        engine_over().read(old, [ReadRange(0, 0, bytearray(8))], soon())
