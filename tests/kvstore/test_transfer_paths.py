"""Several paths and transports to one peer: they share the work, fail, and take over from each other."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from fake_transport import FakeRail, FakeTransport

from kvstore.segment import Segment
from kvstore.transfer import protocol
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.requests import ReadRange, Request, TransferStatus, WriteRange
from kvstore.transfer.sockets import PeerClosed, Wire, tune
from kvstore.transfer.transport import Priority
from mooncake.addresses import split_address
from mooncake.app.bench.peers.rails import Rails
from mooncake.errors import Cancelled, DeadlineExceeded, InvalidRequest, NodeUnavailable, StaleEpoch
from mooncake.types import SegmentAddress

BLOCK = 1 << 20
NUM = 32
EPOCH = 3
Memory = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


class Peer:
    """A segment in this process, as the fake transport finds it."""

    def __init__(self) -> None:
        self.memory = np.zeros((NUM, BLOCK), np.uint8)
        self.grants = dict.fromkeys(range(NUM), EPOCH)
        self.address = SegmentAddress("peer", 1, "nowhere", "", "", BLOCK, NUM)

    def over(self, *rails: FakeRail, name: str = "fake") -> FakeTransport:
        return FakeTransport(self.memory.reshape(-1).data, self.grants, list(rails), name)


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def data() -> Memory:
    return np.random.default_rng(0).integers(0, 256, (NUM, BLOCK), dtype=np.uint8)


def writes(data: Memory, *blocks: int) -> list[WriteRange]:
    return [WriteRange(block, 0, data[block].data, EPOCH) for block in blocks or range(NUM)]


def test_each_request_of_a_batch_has_its_own_end(peer, engine_over, data):
    engine = engine_over(peer.over(FakeRail(), FakeRail()))
    peer.grants[2] = EPOCH + 1
    into = bytearray(BLOCK)
    good, stale, late, read = engine.submit(
        [
            Request(peer.address, writes(data, 0, 1), soon()),
            Request(peer.address, writes(data, 2, 3), soon()),
            Request(peer.address, writes(data, 4), time.monotonic() - 1),
            Request(peer.address, [ReadRange(9, 0, into)], soon(), Priority.BACKGROUND),
        ]
    )
    assert good.result().nbytes == 2 * BLOCK
    assert read.result().transport == "fake"
    with pytest.raises(StaleEpoch):
        stale.result()
    with pytest.raises(DeadlineExceeded):
        late.result()
    assert [each.status for each in (good, stale, late, read)] == [
        TransferStatus.DONE,
        TransferStatus.FAILED,
        TransferStatus.FAILED,
        TransferStatus.DONE,
    ]
    assert np.array_equal(peer.memory[:2], data[:2])
    with pytest.raises(InvalidRequest):
        engine.submit([Request(peer.address, [ReadRange(0, 0, into), writes(data, 0)[0]], soon())])


def test_one_peer_too_many_costs_the_one_that_is_idle(peer, engine_over, data):
    rail = FakeRail(is_silent=True)
    engine = engine_over(peer.over(rail), max_peers=2)
    others = [replace(peer.address, node_id=f"peer {i}") for i in range(3)]
    [busy] = engine.submit([Request(peer.address, writes(data, 0), soon())])
    for other in others:
        engine.submit([Request(other, [], soon())])
    assert [name for name, _ in engine._links] == ["peer", "peer 2"]
    [second] = engine.submit([Request(others[2], writes(data, 1), soon())])
    engine.submit([Request(others[0], [], soon())])  # more than there may be, while all of them have something to do
    assert [name for name, _ in engine._links] == ["peer", "peer 2", "peer 0"]
    rail.is_silent = False
    assert busy.result().nbytes == second.result().nbytes == BLOCK
    engine.submit([Request(others[1], [], soon())])
    engine.submit([Request(others[0], [], soon())])
    assert "peer" not in [name for name, _ in engine._links]


def test_an_urgent_layer_overtakes_a_copy_that_has_begun(peer, engine_over, data):
    rail = FakeRail(bytes_per_s=200e6)
    engine = engine_over(peer.over(rail))
    [copy] = engine.submit([Request(peer.address, writes(data), soon(), Priority.BACKGROUND)])
    while not rail.moved:
        time.sleep(0.001)
    begun = len(rail.moved)
    engine.write(peer.address, [WriteRange(0, 0, b"layer", EPOCH)], soon(), Priority.URGENT)
    assert not copy.has_ended
    [position] = [index for index, part in enumerate(rail.moved) if part.nbytes == 5]
    assert position <= begun + 2
    assert copy.result().nbytes == data.nbytes


def test_a_path_that_dies_costs_no_byte(peer, engine_over, data, caplog):
    rails = [FakeRail(bytes_per_s=50e6) for _ in range(4)]
    engine = engine_over(peer.over(*rails))
    [transfer] = engine.submit([Request(peer.address, writes(data), soon())])
    while len(rails[1].moved) < 2:
        time.sleep(0.001)
    rails[1].is_dead = True
    assert transfer.result().nbytes == data.nbytes
    assert np.array_equal(peer.memory, data)
    assert sum(part.nbytes for rail in rails for part in rail.moved) == data.nbytes
    [stats] = engine.stats()
    assert stats.failures == 0
    assert 1 <= stats.paths <= 3  # on a busy machine another one may seem to stand still for a while
    rails[1].is_dead = False
    moved, deadline = len(rails[1].moved), soon(5.0)
    while len(rails[1].moved) == moved:  # it rests for a while, and then carries again
        assert time.monotonic() < deadline
        engine.submit([Request(peer.address, writes(data), soon())])[0].result()


def test_a_path_that_falls_silent_is_retired_and_its_slices_travel_elsewhere(peer, engine_over, data, caplog):
    rails = [FakeRail(bytes_per_s=30e6) for _ in range(3)]
    engine = engine_over(peer.over(*rails))
    [transfer] = engine.submit([Request(peer.address, writes(data), soon())])
    while not rails[0].moved:
        time.sleep(0.001)
    rails[0].is_silent = True
    with caplog.at_level(logging.INFO):
        transfer.result()
    assert np.array_equal(peer.memory, data)
    assert "fake path 0 stands still" in caplog.text


def test_a_slow_path_carries_less(peer, engine_over, data):
    rails = [FakeRail(bytes_per_s=100e6), FakeRail(bytes_per_s=100e6), FakeRail(bytes_per_s=5e6)]
    engine = engine_over(peer.over(*rails))
    for _ in range(2):
        engine.submit([Request(peer.address, writes(data), soon())])[0].result()
    fast, other, slow = (len(rail.moved) for rail in rails)
    assert fast + other + slow == 2 * NUM
    assert 4 * slow < min(fast, other)


def test_the_next_transport_takes_over_while_bytes_move_and_hands_back(peer, engine_over, data, caplog):
    best, spare = FakeRail(bytes_per_s=100e6), FakeRail()
    engine = engine_over(peer.over(best, name="best"), peer.over(spare, name="spare"), retry_after_s=0.3)
    [transfer] = engine.submit([Request(peer.address, writes(data), soon())])
    while not best.moved:
        time.sleep(0.001)
    best.is_dead = True
    with caplog.at_level(logging.INFO):
        assert transfer.result().transport == "spare"
    assert np.array_equal(peer.memory, data)
    assert "peer: best does not work (the rail is dead); using spare" in caplog.text
    shown = {entry.transport: (entry.failures, entry.is_current, bool(entry.reason)) for entry in engine.stats()}
    assert shown == {"best": (1, False, True), "spare": (0, True, False)}
    assert engine.transport_of("peer") == "spare"
    best.is_dead = False
    deadline = soon(5.0)
    while engine.write(peer.address, writes(data, 0), soon()).transport != "best":
        assert time.monotonic() < deadline


def test_when_nothing_reaches_a_peer_the_reasons_are_told(peer, engine_over, data):
    engine = engine_over(peer.over(FakeRail(is_dead=True), name="a"), peer.over(FakeRail(is_dead=True), name="b"))
    for _ in range(3):
        with pytest.raises(NodeUnavailable, match=r"peer: .*a: the rail is dead"):
            engine.write(peer.address, writes(data, 0), soon())
    with pytest.raises(NodeUnavailable, match="no configured transport"):
        engine_over("shm").write(peer.address, writes(data, 0), soon())


def test_a_silent_peer_costs_the_deadline_of_each_request(peer, engine_over, data):
    engine = engine_over(peer.over(FakeRail(is_silent=True)))
    started = time.monotonic()
    short, long = engine.submit(
        [
            Request(peer.address, writes(data, 0), soon(0.2)),
            Request(peer.address, writes(data, 1), soon(0.6)),
        ]
    )
    for transfer, seconds in ((short, 0.2), (long, 0.6)):
        with pytest.raises(DeadlineExceeded):
            transfer.result()
        assert seconds - 0.05 < time.monotonic() - started < seconds + 1.0


def test_what_waits_behind_a_silent_path_can_be_cancelled(peer, engine_over, data):
    engine = engine_over(peer.over(FakeRail(is_silent=True)))
    engine.submit([Request(peer.address, writes(data, 0), soon(5.0))])
    [waiting] = engine.submit([Request(peer.address, writes(data, 1), soon(5.0))])
    waiting.cancel()
    with pytest.raises(Cancelled):
        waiting.result()


async def test_many_tasks_share_an_engine(peer, engine_over, data):
    engine = engine_over(peer.over(FakeRail(), FakeRail()))
    await asyncio.gather(*(engine.write_async(peer.address, writes(data, block), soon()) for block in range(NUM)))
    assert np.array_equal(peer.memory, data)


def test_a_path_that_cannot_be_opened_is_not_the_end_of_one_that_is_being_opened(peer, engine_over, data):
    slow, dead = FakeRail(open_s=0.3), FakeRail(is_dead=True)
    engine = engine_over(peer.over(slow, dead))
    engine.write(peer.address, writes(data), soon())
    assert np.array_equal(peer.memory, data)
    slow.is_dead = True
    with pytest.raises(NodeUnavailable, match="the rail is dead"):
        engine.write(peer.address, writes(data), soon())


def test_threads_and_failures_at_random_leave_the_right_bytes(peer, engine_over, data):
    """Rails die and come back all the time; every write that is reported done is there."""
    rails = [FakeRail(bytes_per_s=500e6) for _ in range(3)]
    engine = engine_over(peer.over(*rails))
    stop = threading.Event()
    random = np.random.default_rng(1)

    def break_things() -> None:
        while not stop.wait(0.005):
            rail = rails[int(random.integers(1, 3))]  # one always lives
            rail.is_dead = not rail.is_dead

    def write(block: int) -> None:
        for _ in range(5):
            engine.write(peer.address, writes(data, block), soon())

    breaker = threading.Thread(target=break_things)
    breaker.start()
    writers = [threading.Thread(target=write, args=(block,)) for block in range(8)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join(30)
        assert not thread.is_alive()
    stop.set()
    breaker.join()
    assert np.array_equal(peer.memory[:8], data[:8])


# Over real sockets


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_within_a_host_nothing_is_held_back_for_congestion(family, host):
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as ours,
        listener.accept()[0] as theirs,
    ):
        for sock in (ours, theirs):
            tune(sock)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"


@pytest.fixture
def served() -> Iterator[tuple[Segment, SegmentServer]]:
    segment = Segment.create("served", BLOCK, NUM)
    server = SegmentServer(segment, "served", ("tcp",))
    server.start()
    server.grant(range(NUM), EPOCH)
    yield segment, server
    server.stop()
    segment.close()


def test_rails_that_are_slowed_killed_and_silenced_corrupt_nothing(served, engine_over, data):
    segment, server = served
    engine = engine_over("tcp", streams=1)
    with Rails(split_address(server.address.tcp_address), 4, 40e6) as rails:
        address = replace(server.address, tcp_address=",".join(rails.addresses))
        [transfer] = engine.submit([Request(address, writes(data), soon(60.0))])
        time.sleep(0.1)
        rails.set_rate(0, 4e6)
        rails.kill(1)
        rails.freeze(2)
        assert transfer.result().nbytes == data.nbytes
        assert np.array_equal(np.frombuffer(segment.buffer, np.uint8).reshape(NUM, BLOCK), data)
        back = np.zeros_like(data)
        engine.read(address, [ReadRange(block, 0, back[block].data) for block in range(NUM)], soon(60.0))
        assert np.array_equal(back, data)


def test_a_peer_must_know_the_secret(engine_over, data):
    segment = Segment.create("guarded", BLOCK, 1)
    server = SegmentServer(segment, "guarded", ("tcp", "shm"), secret="open sesame")
    server.start()
    server.grant([0], EPOCH)
    try:
        for wrong in ("", "open barley"):
            with pytest.raises(NodeUnavailable, match=r"another transfer\.secret_file"):
                engine_over("tcp", secret=wrong).write(server.address, writes(data, 0), soon())
        engine_over("tcp", secret="open sesame").write(server.address, writes(data, 0), soon())
        assert np.array_equal(np.frombuffer(segment.buffer, np.uint8), data[0])
        engine_over("shm").write(server.address, writes(data, 0), soon())  # our own user needs none
    finally:
        server.stop()
        segment.close()


def test_an_owner_gives_each_connection_less_credit_the_more_there_are():
    segment = Segment.create("credit", BLOCK, NUM)
    server = SegmentServer(segment, "credit", ("tcp",), credit_bytes=6 << 20)
    server.start()
    server.grant([0], EPOCH)
    credits = []
    wires = []
    for number in range(4):
        wire = Wire(socket.create_connection(split_address(server.address.tcp_address), timeout=5.0))
        wires.append(wire)
        wire.send([protocol.pack_hello(segment.incarnation, "raw", number + 1)], soon())
        wire.receive(protocol.WELCOME_BYTES, soon())
        item = protocol.WireRange(0, 0, 8, EPOCH)
        wire.send([protocol.pack_frame(protocol.Operation.WRITE, [item], 8, 1), bytes(8)], soon())
        credits.append(protocol.unpack_reply(wire.receive(protocol.REPLY_BYTES, soon())).credit_bytes)
    assert credits == [6 << 20, 3 << 20, 2 << 20, (6 << 20) // 4]
    for wire in wires:
        wire.close()
    server.stop()
    segment.close()


def test_an_attachment_that_is_not_offered_is_refused_with_a_reason(served):
    segment, server = served
    wire = Wire(socket.create_connection(split_address(server.address.tcp_address), timeout=5.0))
    wire.send([protocol.pack_hello(segment.incarnation, "raw", 1)], soon())
    wire.receive(protocol.WELCOME_BYTES, soon())
    wire.send([protocol.pack_attach("carrier-pigeon", b"coo")], soon())
    reply = protocol.unpack_reply(wire.receive(protocol.REPLY_BYTES, soon()))
    assert reply.status is protocol.Status.NOT_OFFERED
    assert b"not offered" in wire.receive(reply.payload_bytes, soon())
    wire.send([protocol.pack_attach("x", bytes(100))[:-1]], soon())
    wire.shut()
    with pytest.raises((PeerClosed, ConnectionError)):
        wire.receive(1, soon())
    wire.close()


WITHOUT_FILES = """
import kvstore.transfer.tcp
from descriptors import no_file_descriptors
with no_file_descriptors():
    "somewhere".encode("idna")
"""


def test_a_host_can_be_named_with_no_file_descriptor_left() -> None:
    """As each connection does. Two threads that load the codec in vain at once leave it unknown for ever."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", WITHOUT_FILES], env=environment, capture_output=True)
    assert (ran.returncode, ran.stderr.decode()) == (0, "")
