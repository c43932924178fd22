"""Reading a store's DRAM through the board: without a message to the store, and never a wrong byte."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import mmap
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from descriptors import no_file_descriptors

import kvstore
from kvstore.board.board import Board
from kvstore.board.door import BoardDoor
from kvstore.board.library import load_board
from kvstore.board.reader import BoardReader, Outcome
from kvstore.checksum import range_checksums
from kvstore.client.near import RETURN_AHEAD_AFTER_S
from kvstore.client.store_client import StoreClient
from kvstore.node import StoreNode
from kvstore.segment import Segment, sealed_memory
from kvstore.transfer.engine import TransferEngine
from mooncake.config import load_config
from mooncake.errors import DeadlineExceeded, NodeUnavailable
from mooncake.native import load_native
from mooncake.rpc.server import Channels

SLOTS, SLOT_BYTES = 8, 64 << 10
ROOT = Path(__file__).parents[2]


class Desk:
    """A board over a segment, without a store, and a reader."""

    def __init__(self, segment: Segment, board: Board, door: BoardDoor, reader: BoardReader) -> None:
        self.segment, self.board, self.door, self.reader = segment, board, door, reader

    def put(self, slot: int, epoch: int, key: bytes, data: bytes, ranges: int = 1) -> None:
        self.segment.range(slot, 0, len(data))[:] = data
        self.board.show(slot, epoch, key, len(data), range_checksums(data, ranges))

    def get(self, key: bytes) -> bytes | None:
        length = self.reader.length(key)
        if length is None:
            return None
        into = memoryview(bytearray(length + 3))[3:]  # memory need not be aligned
        assert self.reader.read(key, into) is Outcome.READ
        return bytes(into)


@contextlib.asynccontextmanager
async def open_desk(num_slots: int) -> AsyncIterator[Desk]:
    segment = Segment.create("desk", SLOT_BYTES, num_slots)
    board = Board.create(segment)
    assert board is not None, "no C++ compiler"
    door = BoardDoor(board, opened=lambda writer, give: None, gone=lambda writer: None)
    door.open()
    reader = await asyncio.to_thread(BoardReader.open, door.path)
    assert reader is not None
    yield Desk(segment, board, door, reader)
    reader.close()
    door.close()
    board.close()
    segment.close()


@pytest_asyncio.fixture
async def desk() -> AsyncIterator[Desk]:
    async with open_desk(SLOTS) as desk:
        yield desk


async def test_blocks_of_any_length_come_back_checked_range_by_range(desk):
    rng = random.Random(1)
    for epoch in range(1, 200):
        ranges = rng.choice([1, 1, 2, 30])
        size = rng.choice([241, 1024, 1025, rng.randrange(241, SLOT_BYTES // ranges)])
        data = rng.randbytes(min(size, SLOT_BYTES // ranges) * ranges)
        desk.put(epoch % SLOTS, epoch, key := rng.randbytes(rng.randrange(1, 256)), data, ranges)
        assert desk.get(key) == data
        desk.board.hide(epoch % SLOTS)
        assert desk.get(key) is None and desk.reader.exists([key]) == [False]


async def test_what_no_record_holds_and_what_one_pass_cannot_check_is_not_listed(desk):
    desk.put(2, 3, long := b"k" * 257, b"x" * 256)
    assert not desk.reader.lists_all
    desk.put(0, 1, b"short", b"x" * 240)
    desk.put(1, 2, b"many ranges", b"x" * 256 * 100, ranges=100)
    assert desk.reader.exists([b"short", b"many ranges", long]) == [False] * 3 and not desk.reader.lists_all
    for slot in range(3):
        desk.board.hide(slot)
    assert desk.reader.lists_all
    desk.board.hide(0)  # never shown: harmless


async def test_the_list_agrees_with_a_dict_however_often_it_changes(desk):
    rng, held, data = random.Random(2), {}, bytes(241)
    keys = [number.to_bytes(4, "big") * 8 for number in range(40)]
    for epoch in range(1, 4000):
        slot = rng.randrange(SLOTS)
        if slot in held:
            desk.board.hide(slot)
            del held[slot]
        if (key := rng.choice(keys)) not in held.values():
            desk.put(slot, epoch, key, data)
            held[slot] = key
        if epoch % 10 == 0:
            assert desk.reader.exists(keys) == [key in held.values() for key in keys]


async def test_a_reader_that_races_with_eviction_never_returns_wrong_bytes(desk):
    """The slots are filled with other keys over and over, while another thread reads whatever it finds."""
    keys = [bytes([number]) * 32 for number in range(3 * SLOTS)]
    stop, seen = threading.Event(), dict.fromkeys(Outcome, 0)
    wrong: list[bytes] = []

    def read() -> None:
        rng, into = random.Random(3), memoryview(bytearray(SLOT_BYTES))
        while not stop.is_set():
            key = rng.choice(keys)
            outcome = desk.reader.read(key, into)
            seen[outcome] += 1
            if outcome is Outcome.READ and into[8:] != key[:1] * (SLOT_BYTES - 8):
                wrong.append(key)

    reading = threading.Thread(target=read)
    reading.start()
    rng, slots, epoch = random.Random(4), {}, 0
    while seen[Outcome.READ] < 300 or epoch < 1000:
        epoch += 1
        assert epoch < 1_000_000 and reading.is_alive()
        slot = rng.randrange(SLOTS)
        desk.board.hide(slot)
        slots.pop(slot, None)
        key = rng.choice([key for key in keys if key not in slots.values()])
        slots[slot] = key
        desk.put(slot, epoch, key, epoch.to_bytes(8, "big") + key[:1] * (SLOT_BYTES - 8))
        if epoch % 8 == 0:
            await asyncio.sleep(0)
    stop.set()
    reading.join()
    assert not wrong and not seen[Outcome.CORRUPT], seen


async def test_a_flipped_bit_is_found_and_what_was_read_is_noted(desk):
    desk.put(0, 1, b"good", data := os.urandom(SLOT_BYTES))
    desk.put(1, 2, b"bad", data, ranges=2)
    desk.segment.range(1, SLOT_BYTES - 1, 1)[0] ^= 1
    into = memoryview(bytearray(SLOT_BYTES))
    assert desk.reader.read(b"bad", into) is Outcome.CORRUPT
    assert desk.reader.read(b"good", into[1:]) is Outcome.CHANGED  # not the length that was found
    assert desk.reader.read(b"none", into) is Outcome.MISSING
    assert desk.reader.read(b"good", into) is Outcome.READ and desk.board.take_notes() == [0]
    assert desk.reader.read(b"good", into) is Outcome.READ
    desk.board.hide(0)
    desk.put(0, 3, b"new", data)
    assert desk.board.take_notes() == []  # of what was there before
    for _ in range(5000):  # more than the mailbox holds: the rest is not noted
        desk.reader.read(b"new", into)
    assert 0 < len(desk.board.take_notes()) < 5000


async def test_readers_that_note_at_once_leave_no_gap_at_which_the_store_would_wait_for_ever(desk):
    headers = [ROOT / "kvstore" / name for name in ("board/board.h", "xxh3.h")]
    library = load_native("note_reads", Path(__file__).with_name("note_reads.cpp"), headers)
    [mailbox] = desk.board._mailboxes.values()
    desk.put(0, 1, b"key", bytes(SLOT_BYTES))
    noting = threading.Thread(target=library.note_reads, args=(ctypes.c_void_p(mailbox), 0, 1, 4, 400))
    noting.start()
    heard = 0
    while noting.is_alive():
        heard += len(desk.board.take_notes())
        await asyncio.sleep(0.0001)
    while more := len(desk.board.take_notes()):
        heard += more
    library.note_reads(ctypes.c_void_p(mailbox), 0, 1, 1, 0)
    assert desk.board.take_notes() == [0], f"of {heard} notes the last ones, and of none since"


async def test_a_reader_maps_the_segment_ahead_of_its_use():
    """So no page is touched for the first time during a copy."""
    async with open_desk(num_slots=64) as desk, asyncio.timeout(60):
        while any(thread.name == "prefault" for thread in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        block = memoryview(bytes(SLOT_BYTES))
        for slot in range(64):
            desk.reader.write(slot, block, 1)
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 64 * SLOT_BYTES // 4096 // 2


async def test_memory_is_unmapped_when_the_last_one_who_reads_has_done(desk):
    """Closed while threads read: each read is complete, or finds nothing."""
    desk.put(0, 1, b"key", data := os.urandom(SLOT_BYTES))
    segment = desk.reader._mapped.segment()
    assert bytes(segment[:SLOT_BYTES]) == data
    outcomes: list[set[Outcome]] = [set(), set()]

    def read(seen: set[Outcome]) -> None:
        into = memoryview(bytearray(SLOT_BYTES))
        while Outcome.GONE not in seen:
            seen.add(outcome := desk.reader.read(b"key", into))
            assert outcome is Outcome.GONE or into == data

    reading = [threading.Thread(target=read, args=(seen,)) for seen in outcomes]
    for thread in reading:
        thread.start()
    while not all(outcomes):  # noqa: ASYNC110
        await asyncio.sleep(0)
    desk.reader.close()
    for thread in reading:
        thread.join()
    assert outcomes == [{Outcome.READ, Outcome.GONE}] * 2
    assert desk.reader.get(b"key", bytearray(SLOT_BYTES)) is None
    assert bytes(segment[:SLOT_BYTES]) == data, "who holds the memory has it"
    maps = Path("/proc/self/maps").read_text
    assert maps().count("mooncake-mailbox") == 2, "the store's and the reader's"
    del segment
    assert maps().count("mooncake-mailbox") == 1


async def test_the_store_may_still_use_a_board_that_it_has_closed():
    """What threads said before is heard after."""

    def num_boards() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("mooncake-board")

    before = num_boards()
    segment = Segment.create("desk", SLOT_BYTES, SLOTS)
    board = Board.create(segment)
    assert board is not None
    board.show(0, 1, b"key", SLOT_BYTES, range_checksums(bytes(SLOT_BYTES), 1))
    board.close()
    board.mark(b"other", True)
    board.hide(0)
    with board.held():
        assert board.take_arrived() == [] and board.take_notes() == []
    assert num_boards() == before + 1
    del board
    assert num_boards() == before
    segment.close()


async def test_a_block_comes_in_one_call_into_any_memory_that_holds_it(desk):
    desk.put(0, 1, b"key", data := os.urandom(4096), ranges=2)
    into = np.zeros(SLOT_BYTES // 4, dtype=np.float32)
    assert desk.reader.get(b"key", into) == 4096 and into.tobytes()[:4096] == data
    room = bytearray(4096)
    assert desk.reader.get(b"key", room) == 4096 and room == data
    for wrong in (bytearray(4095), bytes(4096), into[::2], "text", None, bytearray()):
        assert desk.reader.get(b"key", wrong) is None
    assert desk.reader.get(b"none", room) is None
    desk.segment.range(0, 17, 1)[0] ^= 1
    assert desk.reader.get(b"key", room) is None
    with pytest.raises(TypeError):
        desk.reader.get("key", room)


async def test_either_side_notices_the_end_of_the_other(desk):
    desk.put(0, 1, b"key", bytes(SLOT_BYTES))
    other = await asyncio.to_thread(BoardReader.open, desk.door.path)
    assert other is not None and len(desk.board._mailboxes) == 2
    other.close()
    with pytest.raises(NodeUnavailable):
        other.write(0, memoryview(bytes(SLOT_BYTES)), 1)
    assert other.exists([b"key"]) is None and other.length(b"key") is None
    async with asyncio.timeout(10):
        while len(desk.board._mailboxes) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    desk.door.close()
    assert desk.reader.read(b"key", memoryview(bytearray(SLOT_BYTES))) is Outcome.GONE
    assert desk.reader.exists([b"key"]) is None
    assert BoardReader.open(desk.door.path) is None


async def test_a_door_without_file_descriptors_says_so_once_and_goes_on_when_it_has_some(desk, caplog):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(20)
        with no_file_descriptors():
            client.connect("\0" + desk.door.path[1:])
            used_s = time.process_time()
            await asyncio.sleep(1)
            assert time.process_time() - used_s < 0.5  # the store has other things to do
        greeting, files, _, _ = await asyncio.to_thread(socket.recv_fds, client, 100, 3)
    for fd in files:
        os.close(fd)
    assert greeting.startswith(b"board") and len(files) == 3
    assert caplog.text.count("cannot accept a connection: [Errno 24]") == 1


def test_a_board_of_another_version_is_none():
    library = load_board()
    with os.fdopen(os.memfd_create("another-board"), "wb") as file:
        file.write(b"\xff" * (1 << 16))
        file.flush()
        fd, opened = file.fileno(), []
        opening = threading.Thread(target=lambda: opened.append(library.board_open(fd, fd, fd, fd)), daemon=True)
        opening.start()
        opening.join(20)
        assert opened == [None]


@pytest.mark.parametrize("num_slots", [SLOTS, 1 << 20])
def test_a_board_that_is_shorter_than_it_says_is_none(num_slots):
    """Whoever touched what is missing would be killed."""
    segment = Segment.create("desk", SLOT_BYTES, SLOTS)
    board = Board.create(segment)
    assert board is not None
    _, [board_fd, mailbox_fd, _] = board.add_mailbox()
    with mmap.mmap(os.open(f"/proc/self/fd/{board_fd}", os.O_RDWR), 0) as memory:
        struct.pack_into("<2I", memory, 24, num_slots, next(1 << i for i in range(6, 64) if 1 << i >= 4 * num_slots))
    assert load_board().board_open(board_fd, mailbox_fd, sealed_memory("short", SLOT_BYTES), -1) is None
    board.close()
    segment.close()


FLIPPING = textwrap.dedent(
    """
    import asyncio, mmap, os, random, sys
    from test_board import SLOT_BYTES, open_desk

    KEYS = [bytes([slot]) * 32 for slot in range(8)]
    DATA = [bytes([slot]) * SLOT_BYTES for slot in range(8)]

    async def flip(rng, desk):
        with mmap.mmap(os.open(f"/proc/self/fd/{desk.board._read_only}", os.O_RDWR), 0) as memory:
            records = (range(at, at + 320) for at in range(4608, 12800, 1024))
            places = [range(8, 40), range(4096, 4608), *records]  # of the head and the cells, too
            for slot in range(8):
                desk.put(slot, slot + 1, KEYS[slot], DATA[slot])
            for _ in range(300):
                memory[rng.choice(rng.choice(places))] ^= 1 << rng.randrange(8)
                for slot, key in enumerate(KEYS):
                    into = bytearray(SLOT_BYTES)
                    desk.reader.exists([key])
                    desk.reader.length(key)
                    if desk.reader.read(key, memoryview(into)) == 0:
                        assert into == DATA[slot]
                    if (length := desk.reader.get(key, into)) is not None:
                        assert into[:length] == DATA[slot][:length]
            for slot in range(8):
                desk.board.hide(slot)

    async def main():
        for seed in range(10):
            async with open_desk(8) as desk:
                await flip(random.Random(seed), desk)

    asyncio.run(main())
    """
)


def test_bits_that_flip_on_a_board_while_it_is_read_end_nobody():
    """Readers are prefill and decode nodes: what one process's memory does must not end all those beside it."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", FLIPPING], check=True, timeout=120, env={**os.environ, "PYTHONPATH": path})


async def test_a_slot_that_no_segment_has_is_not_taken(desk):
    [number] = desk.board._mailboxes
    assert desk.board.give(number, SLOTS, 7) and desk.board.give(number, SLOTS - 1, 8)
    assert [desk.reader.receive(), desk.reader.receive(), desk.reader.receive()] == [None, (SLOTS - 1, 8), None]


async def test_a_reader_without_file_descriptors_finds_no_board(desk):
    with no_file_descriptors():
        assert BoardReader.open(desk.door.path) is None


@pytest.fixture
def keep(start_actor: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *settings: start_actor(
        "store", block_bytes=SLOT_BYTES, settings=[f"store.dram_gb={SLOTS * SLOT_BYTES / 1e9 + 1e-6}", *settings]
    )


async def test_reading_without_asking_protects_from_eviction_and_ends_with_removal(keep):
    """Through the client: hits count, the least recently *read* goes first, a removed block is gone at once."""
    data = np.random.default_rng(0).bytes(SLOT_BYTES)
    async with await kvstore.Client.connect(keep().greeting["control"]) as pool:
        for number in range(SLOTS):
            assert await pool.put(f"{number}", data)
        assert await pool.get("0") == data
        assert await pool.put("one more", data)
        assert await pool.exists(["0", "1", "one more"]) == [True, False, True]
        [stats] = (await pool.stats()).values()
        assert stats.leases == 0 and stats.counters["hits"] == 1
        assert await pool.remove(["0"]) == 1
        assert await pool.get("0") is None and await pool.exists(["0"]) == [False]


async def test_a_corrupt_block_is_dropped_for_all_and_a_store_that_died_is_gone(keep):
    actor = keep()
    data = np.random.default_rng(0).bytes(SLOT_BYTES)
    async with await kvstore.Client.connect(actor.greeting["control"]) as pool:
        await pool.put("block", data)
        assert await pool.get("block") == data
        actor.ask("flip", 0, 17)
        assert await pool.get("block") is None and await pool.exists(["block"]) == [False]
        [stats] = (await pool.stats()).values()
        assert stats.counters["checksum_mismatches"] == 1 and stats.sealed == 0
        await pool.put("block", data)
        actor.kill()
        with pytest.raises(NodeUnavailable):
            await pool.get("block")
        with pytest.raises(NodeUnavailable):
            await pool.exists(["block"])


def test_without_a_compiler_blocks_are_asked_for_over_the_wire(keep, tmp_path):
    address = keep().greeting["control"]
    program = (
        "import asyncio, kvstore\n"
        "async def main():\n"
        f"    async with await kvstore.Client.connect({address!r}) as pool:\n"
        "        assert await pool.put('block', bytes(5000))\n"
        "        assert await pool.exists(['block', 'none']) == [True, False]\n"
        "        assert await pool.get('block') == bytes(5000)\n"
        "        assert all(store.shortcuts._near.board is None for store in pool._stores.values())\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=120)


ROOMY = f"store.dram_gb={32 * SLOT_BYTES / 1e9 + 1e-6}"


async def test_blocks_written_in_place_are_like_any_others(keep):
    """One of 32 slots is granted in advance; this is visible only in the counters, and it is returned."""
    actor, data = keep(ROOMY), np.random.default_rng(0).bytes(SLOT_BYTES)
    address = actor.greeting["control"]
    async with await kvstore.Client.connect(address, transports=("tcp",)) as far:
        async with await kvstore.Client.connect(address, transports=("shm",)) as near:
            assert await near.put("first", data, ranges=4) and await near.put("second", data[:1000], parent="first")
            assert (await near.stats())[address].reserved == 1
            assert await far.get("first") == data and await far.get_range("first", 0, 100) == data[:100]
            assert await near.get("second") == data[:1000]
            assert await near.put("first", bytes(SLOT_BYTES)) and await far.get("first") == data  # it was there
            for number in range(200):
                assert await near.put("first", bytes(SLOT_BYTES)) and await near.put(f"{number}", data)
            assert await near.exists(["199", "0", "first"]) == [True, False, True]  # offered again is used
            writing = far._stores[address]
            [slot] = await writing.ranges.reserve([(far._keys.wire("busy"), b"")], SLOT_BYTES, 1)
            assert slot is not None and not await near.put("busy", data)
            await writing.ranges.abort([slot])
            assert await near.put("short", b"not listed") and await near.exists(["no", "short"]) == [False, True]
            assert await near.put("busy", data)
        counts = (await far.stats())[address]
        assert counts.reserved == counts.quarantined == counts.leases == 0
        actor.ask("counts")  # and they add up


async def test_a_slot_had_in_advance_too_long_is_quarantined_until_its_writer_says_so(keep, eventually):
    actor, data = keep(ROOMY, "store.reserve_timeout_s=0.3"), bytes(SLOT_BYTES)
    async with await kvstore.Client.connect(actor.greeting["control"], transports=("shm",)) as pool:
        [store] = pool._stores.values()
        assert await pool.put("one", data)
        store.shortcuts._near._timer.cancel()  # an event loop that hangs
        eventually(lambda: actor.ask("counts")["quarantined"] == 1)
        assert await pool.put("two", data) and await pool.exists(["one", "two"]) == [True, True]
        assert actor.ask("counts")["quarantined"] == 0


async def test_slots_that_come_after_their_writer_has_given_up_go_back(keep):
    """The store's event loop hangs for longer than the writer waits and would keep such slots."""
    actor = keep(ROOMY)
    async with await kvstore.Client.connect(actor.greeting["control"], transports=("shm",)) as pool:
        actor.ask("hang")
        with pytest.raises(DeadlineExceeded):
            await pool.put("late", bytes(SLOT_BYTES), timeout_s=0.2)
        await asyncio.sleep(RETURN_AHEAD_AFTER_S + 0.5)
        actor.tell("wake")
        async with asyncio.timeout(10):
            while not actor.ask("counts")["reserved"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while actor.ask("counts")["reserved"]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def test_a_client_that_meets_a_store_several_times_at_once_keeps_one_board():
    settings = ["node.id=store", f"store.dram_gb={SLOTS * SLOT_BYTES / 1e9 + 1e-6}"]
    node = StoreNode(load_config(None, settings), SLOT_BYTES, join_cluster=False)
    await node.start()
    engine, channels = TransferEngine("client"), Channels()
    client = StoreClient(node.control_address, engine, channels, copies_inline=True)
    try:
        await asyncio.gather(*(client.stats() for _ in range(3)))
        assert client.shortcuts._near.board is not None
        async with asyncio.timeout(10):
            while len(node.store._board._mailboxes) > 2:  # noqa: ASYNC110 - the client's and the data plane's
                await asyncio.sleep(0.01)
        assert await client.exists([b"key"]) == [False]
    finally:
        await client.close()
        await channels.close()
        engine.close()
        await node.stop()


def test_what_a_killed_client_had_in_advance_comes_back(keep, eventually):
    actor = keep(ROOMY)
    program = (
        "import asyncio, kvstore, os, signal\n"
        "async def main():\n"
        f"    pool = await kvstore.Client.connect({actor.greeting['control']!r}, transports=('shm',))\n"
        "    assert await pool.put('block', bytes(5000))\n"
        "    assert [(await store.stats()).reserved for store in pool._stores.values()] == [1]\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    client = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert client.returncode == -9
    eventually(lambda: actor.ask("counts")["reserved"] == 0, within_s=20)
    assert actor.ask("counts")["sealed"] == 1


async def test_where_a_quota_is_kept_nothing_is_had_in_advance(keep):
    actor = keep(ROOMY, f"store.tenant_dram_gb={2.5 * SLOT_BYTES / 1e9}")
    async with await kvstore.Client.connect(actor.greeting["control"], tenant="small") as pool:
        for number in range(5):
            assert await pool.put(f"{number}", bytes(SLOT_BYTES))
        counts = actor.ask("counts")
        assert (counts["sealed"], counts["reserved"]) == (2, 0)
