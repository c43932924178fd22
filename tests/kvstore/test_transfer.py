"""One-sided reads and writes between processes: what arrives, what is refused, and what happens when a peer fails."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from descriptors import no_file_descriptors

from kvstore.checksum import checksum, part_checksums
from kvstore.segment import Segment
from kvstore.transfer import native, protocol
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.protocol import Operation, WireRange
from kvstore.transfer.requests import ReadRange, Request, TransferStatus, WriteRange
from kvstore.transfer.tcp import TcpTransport
from mooncake.addresses import split_address
from mooncake.errors import Cancelled, DeadlineExceeded, InvalidRequest, NodeUnavailable, StaleEpoch
from mooncake.types import SegmentAddress

BLOCK = 3 << 20  # more than a slice
NUM = 8
EPOCH = 7
Eventually = Callable[..., None]


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def noise(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(len(shape) + sum(shape)).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def own(start_actor: Callable[..., object]) -> Callable[..., object]:
    def start(transports: tuple[str, ...] = ("shm", "tcp"), host: str = "127.0.0.1", granted: int = NUM) -> object:
        owner = start_actor("owner", block_bytes=BLOCK, num_blocks=NUM, host=host, transports=transports)
        owner.ask("grant", list(range(granted)), EPOCH)
        return owner

    return start


WAYS = [("shm", "127.0.0.1", 2), ("tcp", "127.0.0.1", 1), ("tcp", "127.0.0.1", 3), ("tcp", "::1", 2)]


@pytest.mark.parametrize(("transport", "host", "streams"), WAYS)
def test_bytes_arrive_in_another_process_and_come_back(own, engine_over, transport, host, streams):
    owner, engine = own(host=host), engine_over(transport, streams=streams)
    blocks = noise(NUM, BLOCK)
    report = engine.write(owner.address, [WriteRange(i, 0, blocks[i], EPOCH) for i in range(NUM)], soon())
    assert (report.transport, report.nbytes) == (transport, blocks.nbytes)
    assert [owner.ask("checksum", i) for i in range(NUM)] == [checksum(block) for block in blocks]

    ragged = [(5, 1, 17), (0, BLOCK - 1, 1), (2, 4097, BLOCK // 2), (2, 0, 3)]
    into = [bytearray(length) for _, _, length in ragged]
    engine.read(
        owner.address, [ReadRange(b, o, buffer) for (b, o, _), buffer in zip(ragged, into, strict=True)], soon()
    )
    assert into == [blocks[b, o : o + length].tobytes() for b, o, length in ragged]
    many = np.zeros((NUM, 300, 64), dtype=np.uint8)
    engine.read(owner.address, [ReadRange(i, 128 * j, many[i, j]) for i in range(NUM) for j in range(300)], soon())
    assert np.array_equal(many, blocks[:, : 300 * 128].reshape(NUM, 300, 128)[:, :, :64])
    [stats] = [entry for entry in engine.stats() if entry.is_current]
    assert (stats.node_id, stats.transport, stats.failures) == ("owner", transport, 0)
    assert stats.nbytes == blocks.nbytes + sum(map(len, into)) + many.nbytes
    assert stats.gb_per_s > 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_threads_share_an_engine(own, engine_over, transport):
    owner, engine = own(), engine_over(transport, streams=2)
    blocks = noise(NUM, BLOCK)
    results: list[bytes | None] = [None] * NUM

    def work(i: int) -> None:
        into = bytearray(BLOCK)
        for _ in range(3):
            engine.write(owner.address, [WriteRange(i, 0, blocks[i], EPOCH)], soon())
            engine.read(owner.address, [ReadRange(i, 0, into)], soon())
        results[i] = bytes(into)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(NUM)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [block.tobytes() for block in blocks]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_rate_limit_holds_for_writes_and_reads(own, engine_over, transport):
    owner, engine = own(), engine_over(transport, max_mb_per_s=20.0)
    data = noise(4_000_000 // 2)
    for move in (
        lambda: engine.write(owner.address, [WriteRange(i, 0, data, EPOCH) for i in range(2)], soon()),
        lambda: engine.read(owner.address, [ReadRange(i, 0, bytearray(data.nbytes)) for i in range(2)], soon()),
    ):
        started = time.monotonic()
        move()
        assert 0.17 < time.monotonic() - started < 1.5  # 4 MB at 20 MB/s are 0.2 s
    with pytest.raises(DeadlineExceeded):
        engine.write(owner.address, [WriteRange(i, 0, data, EPOCH) for i in range(NUM)], soon(0.1))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_write_of_another_epoch_is_refused(own, engine_over, transport):
    owner, engine = own(granted=4), engine_over(transport)
    before = owner.ask("checksum", 1)
    data = noise(BLOCK)
    for block, epoch in ((1, EPOCH + 1), (1, 0), (5, EPOCH), (5, 0)):
        with pytest.raises(StaleEpoch, match=f"owner: block {block} is no longer granted to epoch {epoch}"):
            engine.write(owner.address, [WriteRange(block, 0, data, epoch)], soon())
    owner.ask("revoke", [1])
    with pytest.raises(StaleEpoch):
        engine.write(owner.address, [WriteRange(1, 0, data, EPOCH)], soon())
    assert owner.ask("checksum", 1) == before
    engine.write(owner.address, [WriteRange(2, 0, data, EPOCH)], soon())  # the same connection still works
    assert owner.ask("checksum", 2) == checksum(data)


def test_ranges_outside_the_segment_are_refused_before_anything_is_sent(own, engine_over):
    owner, engine = own(), engine_over("tcp")
    for block, offset, length in ((NUM, 0, 1), (-1, 0, 1), (0, BLOCK, 1), (0, BLOCK - 1, 2), (0, -1, 4), (0, 0, 0)):
        with pytest.raises(InvalidRequest):
            engine.write(owner.address, [WriteRange(block, offset, bytes(length), EPOCH)], soon())
    with pytest.raises(InvalidRequest):
        engine.read(owner.address, [ReadRange(0, 0, b"read-only")], soon())
    with pytest.raises(InvalidRequest):
        engine.read(owner.address, [ReadRange(0, 0, np.zeros((4, 4))[:, 1])], soon())
    assert owner.ask("stats")["connections"] == 0
    assert engine.write(owner.address, [], soon()).nbytes == 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("known", [True, False])
def test_a_dead_owner_is_noticed_at_once(own, engine_over, transport, known):
    owner, engine = own(), engine_over(transport)
    data = noise(BLOCK)
    if known:
        engine.write(owner.address, [WriteRange(0, 0, data, EPOCH)], soon())
    owner.kill()
    started = time.monotonic()
    with pytest.raises(NodeUnavailable, match="owner"):
        engine.write(owner.address, [WriteRange(0, 0, data, EPOCH)], soon())
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize(("transport", "known"), [("shm", False), ("tcp", False), ("tcp", True)])
def test_a_frozen_owner_costs_the_deadline_and_no_more(own, engine_over, transport, known):
    owner, engine = own(), engine_over(transport)
    data = noise(BLOCK)
    if known:
        engine.write(owner.address, [WriteRange(0, 0, data, EPOCH)], soon())
    owner.freeze()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        engine.write(owner.address, [WriteRange(i, 0, data, EPOCH) for i in range(NUM)], soon(0.5))
    assert 0.4 < time.monotonic() - started < 1.5
    owner.thaw()
    engine.write(owner.address, [WriteRange(0, 0, data, EPOCH)], soon())  # and it recovers
    assert owner.ask("checksum", 0) == checksum(data)


def test_an_owner_that_does_not_answer_holds_up_nobody_who_maps_another(own, engine_over):
    frozen, well, engine = own(), own(), engine_over("shm")
    frozen.freeze()
    reads = [ReadRange(0, 0, bytearray(1))]
    [waiting] = engine.submit([Request(frozen.address, reads, soon(4.0))])
    assert not waiting.wait(0.2)  # for the frozen one's segment
    engine.read(well.address, reads, soon(2.0))
    with pytest.raises(DeadlineExceeded):
        engine.read(frozen.address, reads, soon(0.2))  # keeps its own deadline, not that of who came first
    assert not waiting.has_ended
    frozen.thaw()
    assert waiting.result().transport == "shm"


def test_tcp_takes_over_when_shared_memory_cannot_be_had(own, engine_over, caplog):
    owner, engine = own(), engine_over("shm", "tcp")
    address = replace(owner.address, unix_path="@mooncake-nobody-there")
    data = noise(BLOCK)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert engine.write(address, [WriteRange(0, 0, data, EPOCH)], soon()).transport == "tcp"
    assert owner.ask("checksum", 0) == checksum(data)
    [record] = [record for record in caplog.records if record.name == "kvstore.transfer.scheduling.routes"]
    assert "shm does not work" in record.getMessage()
    assert {(s.transport, s.failures, s.is_current) for s in engine.stats()} == {("shm", 1, False), ("tcp", 0, True)}
    elsewhere = replace(owner.address, host_id="another host")
    assert engine_over("shm", "tcp").write(elsewhere, [WriteRange(0, 0, data, EPOCH)], soon()).transport == "tcp"


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create("here", BLOCK, NUM)
    yield segment
    segment.close()


def test_tcp_takes_over_in_the_middle_of_a_batch(segment, engine_over):
    """Two servers of one segment: the one that shares its memory leaves during a batch."""
    lender = SegmentServer(segment, "here", ("shm",))
    sender = SegmentServer(segment, "here", ("tcp",))
    for server in (lender, sender):
        server.start()
        server.grant(range(NUM), EPOCH)
    address = replace(lender.address, tcp_address=sender.address.tcp_address)
    blocks = noise(NUM, BLOCK)
    threading.Timer(0.1, lender.stop).start()
    engine = engine_over("shm", "tcp", max_mb_per_s=100.0)  # 25 MB: a quarter of a second
    report = engine.write(address, [WriteRange(i, 0, blocks[i], EPOCH) for i in range(NUM)], soon())
    assert (report.transport, report.nbytes) == ("tcp", blocks.nbytes)
    assert np.array_equal(np.frombuffer(segment.buffer, np.uint8).reshape(NUM, BLOCK), blocks)
    moved = {stats.transport: stats.nbytes for stats in engine.stats()}
    assert moved["shm"] > 0 and moved["tcp"] > 0
    assert 0 < sender.stats().bytes_in < blocks.nbytes
    sender.stop()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_a_dead_owner_left_is_let_go_of(own, engine_over, eventually: Eventually, transport):
    """Once, a mapping kept the memory of a dead process as long as the engine lived."""
    owner, engine, before = own(), engine_over(transport, forget_after_s=0.2), _open_files()
    engine.write(owner.address, [WriteRange(0, 0, noise(BLOCK), EPOCH)], soon())
    time.sleep(0.6)  # nobody uses it, but it lives
    assert engine.stats()[0].paths and _open_files() > before
    owner.kill()

    eventually(lambda: engine.stats() == [])
    eventually(lambda: _open_files() <= before)  # giving much memory back takes the system a moment


def test_the_lives_of_a_peer_are_told_as_one(own, engine_over):
    engine, data = engine_over("shm", "tcp"), noise(BLOCK)
    for _ in range(2):
        owner = own()
        engine.write(owner.address, [WriteRange(0, 0, data, EPOCH)], soon())
        owner.kill()
        with pytest.raises(NodeUnavailable):
            engine.write(owner.address, [WriteRange(0, 0, data, EPOCH)], soon())

    told = {entry.transport: entry for entry in engine.stats()}
    assert len(engine.stats()) == 2 and told["shm"].nbytes == 2 * data.nbytes
    assert all(entry.failures >= 2 for entry in told.values())


def _open_files() -> int:
    """Sockets of this process, and segments that are mapped."""
    mapped = Path("/proc/self/maps").read_text().count("memfd:")
    return mapped + len(list(Path("/proc/self/fd").iterdir()))


def test_an_address_of_an_earlier_life_is_refused(own, engine_over):
    owner = own()
    for transport in ("shm", "tcp"):
        stale = replace(owner.address, incarnation=owner.address.incarnation + 2)
        with pytest.raises(StaleEpoch, match="restarted"):
            engine_over(transport).read(stale, [ReadRange(0, 0, bytearray(8))], soon())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_owner_learns_once_that_a_killed_writer_is_gone(own, start_actor, eventually: Eventually, transport):
    owner = own()
    writer = start_actor(
        "writer",
        address=vars_of(owner.address),
        transports=[transport],
        mb_per_s=40.0,
        blocks=list(range(NUM)),
    )
    name = writer.greeting
    writer.ask(EPOCH)
    assert owner.ask("maps_memory", name) == (transport == "shm")
    assert owner.ask("gone") == []
    writer.kill()
    eventually(lambda: owner.ask("gone") == [name])
    assert not owner.ask("maps_memory", name)
    assert owner.ask("stats")["connections"] == 0


def vars_of(address: SegmentAddress) -> dict[str, object]:
    return {name: getattr(address, name) for name in SegmentAddress.__slots__}


def connect(address: SegmentAddress) -> socket.socket:
    sock = socket.create_connection(split_address(address.tcp_address), timeout=5.0)
    sock.sendall(protocol.pack_hello(address.incarnation, "raw", 1))
    assert protocol.unpack_welcome(sock.recv(protocol.WELCOME_BYTES, socket.MSG_WAITALL)).status is protocol.Status.OK
    return sock


def begin_to_write(sock: socket.socket, segment: Segment, eventually: Eventually) -> None:
    """A frame of 1 MiB into block 3, of which 1000 bytes have come."""
    frame = protocol.pack_frame(Operation.WRITE, [WireRange(3, 0, 1 << 20, EPOCH)], 1 << 20, 1)
    sock.sendall(frame + b"x" * 1000)
    eventually(lambda: segment.block(3)[:1000] == b"x" * 1000)


@pytest.mark.parametrize("is_native", [True, False])
def test_after_a_revoke_not_even_a_write_that_had_begun_can_land(segment, eventually: Eventually, is_native):
    gone: list[str] = []
    server = SegmentServer(segment, "here", ("tcp",), on_peer_gone=gone.append, is_native=is_native)
    server.start()
    server.grant([3], EPOCH)
    with connect(server.address) as sock:
        begin_to_write(sock, segment, eventually)
        started = time.monotonic()
        server.revoke([3])
        assert time.monotonic() - started < 0.5
        segment.block(3)[:] = bytes(BLOCK)
        with pytest.raises(OSError):  # the connection was cut
            for _ in range(100):
                sock.sendall(b"y" * (1 << 16))
    assert bytes(segment.block(3)) == bytes(BLOCK)
    eventually(lambda: gone == ["raw/0000000000000001"])
    server.stop()


def test_a_writer_that_was_cut_by_a_revoke_and_returns_is_not_gone(segment, eventually: Eventually):
    """On a slow network a frame takes longer than a revoke waits; what else it writes is sound."""
    gone: list[str] = []
    server = SegmentServer(segment, "here", ("tcp",), on_peer_gone=gone.append)
    server.start()
    server.grant([3], EPOCH)
    with connect(server.address) as sock:
        begin_to_write(sock, segment, eventually)
        server.revoke([3])
        eventually(lambda: server.stats().connections == 0)
    with connect(server.address):
        assert gone == []
    eventually(lambda: gone == ["raw/0000000000000001"])
    server.stop()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_whoever_has_a_long_name_is_admitted_and_known(segment, eventually: Eventually, transport):
    gone: list[str] = []
    server = SegmentServer(segment, "here", (transport,), on_peer_gone=gone.append)
    server.start()
    server.grant([3], EPOCH)
    engine = TransferEngine("名" * 128, (transport,))
    engine.write(server.address, [WriteRange(3, 0, noise(BLOCK), EPOCH)], soon())
    assert server.is_connected(engine.writer_id)
    engine.close()
    eventually(lambda: gone == [engine.writer_id])
    server.stop()


@pytest.fixture(params=["C++", "Python", "shm"])
def pair(request, segment, engine_over) -> Iterator[tuple[SegmentServer, TransferEngine]]:
    """An owner and a caller, both of the same kind."""
    is_native = request.param == "C++"
    if is_native and native.load() is None:
        pytest.skip("there is no compiler")
    server = SegmentServer(segment, "here", ("shm", "tcp"), is_native=is_native)
    server.start()
    server.grant(range(NUM), EPOCH)
    yield server, engine_over("shm" if request.param == "shm" else TcpTransport(2, is_native))
    server.stop()


def test_checksums_are_taken_on_the_way(segment, pair):
    server, engine = pair
    data, into = noise(NUM, BLOCK), np.zeros((NUM, BLOCK), dtype=np.uint8)
    rng = np.random.default_rng(5)
    spans = [(block, int(rng.integers(0, 999)), int(rng.integers(BLOCK // 2, BLOCK - 999))) for block in range(NUM)]
    for unit in (300, 1025, 65_521, 1 << 20, (1 << 20) + 77, 4 << 20):
        parts = [data[block, start : start + length] for block, start, length in spans]
        expected = [part_checksums(part, unit) for part in parts]
        writes = [WriteRange(block, start, part, EPOCH) for (block, start, _), part in zip(spans, parts, strict=True)]
        sent = engine.write(server.address, writes, soon(), checksum_bytes=unit)
        targets = [into[block, start : start + length] for block, start, length in spans]
        reads = [ReadRange(block, start, part) for (block, start, _), part in zip(spans, targets, strict=True)]
        came = engine.read(server.address, reads, soon(), checksum_bytes=unit)
        for report in (sent, came):
            assert [sums.tolist() for sums in report.checksums] == [sums.tolist() for sums in expected]
        into[:] = 0
    assert engine.read(server.address, reads[:1], soon()).checksums == ()
    with pytest.raises(InvalidRequest):
        engine.read(server.address, reads, soon(), checksum_bytes=(4 << 20) + 1)


def test_checksums_of_every_length_agree(segment, pair):
    """At the ends of a block, a stripe and a chunk, and for lengths too short for C++."""
    server, engine = pair
    data = noise(80_000)
    for unit in (7, 240, 241, 255, 256, 257, 511, 512, 513, 1023, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 4097):
        length = 20_000 // unit * unit
        report = engine.write(
            server.address, [WriteRange(0, 5, data[3 : 3 + length], EPOCH)], soon(), checksum_bytes=unit
        )
        assert report.checksums[0].tolist() == [
            checksum(data[start : start + unit]) for start in range(3, 3 + length, unit)
        ]


@pytest.mark.parametrize("pair", ["C++", "Python"], indirect=True)
def test_a_writer_that_races_with_its_revocation_never_lands_late(segment, pair):
    server, engine = pair
    data = np.full(1 << 16, 7, dtype=np.uint8)
    ended = threading.Event()
    landed = refused = 0

    def write() -> None:
        nonlocal landed, refused
        while not ended.is_set():
            try:
                engine.write(server.address, [WriteRange(1, 0, data, EPOCH)], soon())
                landed += 1
            except StaleEpoch:
                refused += 1

    thread = threading.Thread(target=write)
    thread.start()
    until = soon(60.0)
    try:
        while (landed < 20 or refused < 20) and time.monotonic() < until:
            server.grant([1], EPOCH)
            time.sleep(0.002)
            server.revoke([1])
            segment.block(1)[: len(data)] = bytes(len(data))
            time.sleep(0.002)
            assert not np.frombuffer(segment.block(1), np.uint8).any()
    finally:
        ended.set()
        thread.join()
    assert landed >= 20
    assert refused >= 20


def test_a_transfer_can_be_cancelled(own, engine_over):
    owner, engine = own(), engine_over("tcp", max_mb_per_s=1.0)
    [transfer] = engine.submit([Request(owner.address, [WriteRange(0, 0, noise(BLOCK), EPOCH)], soon())])
    assert not transfer.wait(0.1)
    assert transfer.status is TransferStatus.MOVING
    started = time.monotonic()
    transfer.cancel()
    with pytest.raises(Cancelled):
        transfer.result()
    assert time.monotonic() - started < 1.0
    assert transfer.status is TransferStatus.FAILED


def test_what_a_frozen_owner_holds_can_be_cancelled(own, engine_over):
    owner, engine = own(), engine_over("tcp")
    data = noise(BLOCK)
    engine.write(owner.address, [WriteRange(0, 0, data, EPOCH)], soon())
    owner.freeze()
    [transfer] = engine.submit([Request(owner.address, [WriteRange(1, 0, data, EPOCH)], soon(300.0))])
    assert not transfer.wait(0.2)
    transfer.cancel()
    assert transfer.wait(30.0) and isinstance(transfer.error, Cancelled)
    owner.thaw()
    engine.write(owner.address, [WriteRange(2, 0, data, EPOCH)], soon())
    assert owner.ask("checksum", 2) == checksum(data)


async def test_a_cancelled_task_waits_until_its_memory_is_free(own, engine_over):
    owner, engine = own(), engine_over("shm", max_mb_per_s=1.0)
    data = bytearray(BLOCK)
    task = asyncio.create_task(engine.write_async(owner.address, [WriteRange(0, 0, data, EPOCH)], soon()))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 1.0)
    before = owner.ask("checksum", 0)
    data[:] = b"!" * BLOCK  # the memory is the caller's again: nobody reads it any more
    await asyncio.sleep(0.2)
    assert owner.ask("checksum", 0) == before


async def test_a_task_that_is_cancelled_again_and_again_still_waits_until_its_memory_is_free(own, engine_over):
    owner, engine = own(), engine_over("tcp")
    data = noise(BLOCK)
    engine.write(owner.address, [WriteRange(0, 0, data, EPOCH)], soon())
    owner.freeze()
    [transfer] = engine.submit([Request(owner.address, [WriteRange(1, 0, data, EPOCH)], soon(300.0))])
    task = asyncio.create_task(transfer.wait_async())
    assert not transfer.wait(0.2)
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert transfer.has_ended and isinstance(transfer.error, Cancelled)


def test_when_one_peer_of_a_batch_cannot_be_reached_nothing_of_it_moves(own, engine_over):
    """After an error the caller may use the memory for something else."""
    owner, engine, into = own(), engine_over("tcp", streams=1), bytearray(64)
    elsewhere = replace(owner.address, node_id="elsewhere", tcp_address="")
    engine.write(owner.address, [WriteRange(0, 0, b"x" * 64, EPOCH)], soon())
    read = ReadRange(0, 0, into)
    with pytest.raises(NodeUnavailable, match="no configured transport reaches elsewhere"):
        engine.submit([Request(owner.address, [read], soon()), Request(elsewhere, [read], soon())])
    behind = bytearray(64)
    engine.read(owner.address, [ReadRange(0, 0, behind)], soon())  # what was begun before it would have come by now
    assert any(behind)
    assert not any(into)


def test_a_closed_engine_says_so(own, engine_over):
    owner, engine = own(), engine_over("shm", "tcp")
    engine.write(owner.address, [WriteRange(0, 0, b"x", EPOCH)], soon())
    engine.close()
    with pytest.raises(NodeUnavailable, match="closed"):
        engine.write(owner.address, [WriteRange(0, 0, b"x", EPOCH)], soon())


def test_a_server_may_be_stopped_in_the_moment_in_which_somebody_comes():
    segment = Segment.create("owner", 4096, 1)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads are changed in the middle of everything
    try:
        for _ in range(300):
            server = SegmentServer(segment, "owner", ("tcp",))
            server.start()
            address = split_address(server.address.tcp_address)
            peers = [socket.create_connection(address) for _ in range(4)]
            server.stop()
            for peer in peers:
                peer.close()
    finally:
        sys.setswitchinterval(before)
        segment.close()


def test_a_server_without_file_descriptors_says_so_once_and_goes_on_when_it_has_some(caplog):
    segment = Segment.create("owner", 4096, 1)
    server = SegmentServer(segment, "owner", ("shm",))
    server.start()
    address = server.address
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(20)
        with no_file_descriptors():
            peer.connect("\0" + address.unix_path[1:])
            time.sleep(0.5)
            assert server.address == address, "it is told with each hand-off"
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(1) == b""  # it was let in, and left without a greeting
    assert caplog.text.count("cannot accept a connection: [Errno 24]") == 1
    server.stop()
    segment.close()


def test_a_server_without_threads_says_so_and_goes_on_when_it_has_some(caplog, eventually: Eventually):
    segment = Segment.create("owner", 4096, 1)
    server = SegmentServer(segment, "owner", ("tcp",))
    server.start()
    address = split_address(server.address.tcp_address)
    threading.stack_size(1 << 46)  # more than there is address space: no thread can be started
    try:
        with socket.create_connection(address) as peer:
            peer.settimeout(20)
            assert peer.recv(1) == b""
    finally:
        threading.stack_size(0)
    eventually(lambda: "cannot accept a connection" in caplog.text)  # the peer may hear of it before it is written down
    assert caplog.text.count("cannot accept a connection") == 1 and server.stats().connections == 0
    with socket.create_connection(address) as peer:
        peer.settimeout(20)
        peer.sendall(b"x" * protocol.HELLO_BYTES)  # no greeting of ours, but there is somebody to find that out
        assert peer.recv(1) == b""
    assert server.stats().violations == 1
    server.stop()
    segment.close()
