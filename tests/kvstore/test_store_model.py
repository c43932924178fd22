"""A whole store, DRAM over a real SSD log, compared with a dict: no sealed block lost, no unsealed one read, no leak.

Every step is a burst of random operations from one seed, so that a run has many of them; a failure names the step.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.board.board import Board
from kvstore.board.door import BoardDoor
from kvstore.board.reader import BoardReader, Outcome
from kvstore.checksum import range_checksums
from kvstore.eviction import make_policy
from kvstore.index.types import BlockName, Grant, Lease
from kvstore.segment import Segment
from kvstore.slots_ahead import WIRE
from kvstore.ssd.tier import SsdTier
from kvstore.store import Store
from kvstore.tiers.decisions import TierRules
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.keyed import Commit, Put, can_put
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.protocol import Status
from kvstore.wire_puts import WirePuts
from kvstore.writing import Sealing, Wanted
from mooncake.errors import OutOfBlocks
from mooncake.events import EventLog
from mooncake.types import BlockKey, Tier

SLOTS, SLOT_BYTES, KEYS, BURST = 10, 4096, 40, 25
MIN_LISTED_BYTES = 241  # of a range
WRITERS = ("one", "two")


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def content(number: int, version: int) -> bytes:
    rng = random.Random(number * 1_000_003 + version)
    return rng.randbytes(4 * rng.randrange(1, SLOT_BYTES // 4 + 1))


class StoreLife(RuleBasedStateMachine):
    """One store and its restarts. The SSD has room for everything, so all blocks sealed and not removed are there."""

    operations = 0  # of all lives
    renewed = 0

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.place = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.stored: dict[int, bytes] = {}
        self.writing: dict[int, tuple[Grant, bytes, str]] = {}
        self.over: list[tuple[Grant, bytes]] = []  # grants that have ended
        self.leases: list[tuple[Lease, list[bytes]]] = []
        self.version = 0
        self.run(self.open())

    def run(self, work: object) -> None:
        self.loop.run_until_complete(asyncio.wait_for(work, 60))  # type: ignore[arg-type]

    async def open(self) -> None:
        self.segment = Segment.create("model", SLOT_BYTES, SLOTS)
        self.events = EventLog(self.segment.incarnation)
        tier = await SsdTier.open(self.place, 64 << 20, make_policy("lru", 1000), SLOT_BYTES, segment_bytes=256 << 10)
        tier._stall_s = 50.0  # a busy machine's disk is waited for: what cannot be saved would be lost
        rules = TierRules(write_through_sights=self.version % 4, demote_sights=1)
        board = Board.create(self.segment)
        assert board is not None, "no C++ compiler"
        loop = asyncio.get_running_loop()
        self.server = SegmentServer(
            self.segment,
            "model",
            listing=board,
            on_put=lambda put: loop.call_soon_threadsafe(self.puts.came, put),
        )
        self.server.start()
        self.store = Store(
            self.segment, self.server, self.events, 600.0, 600.0, ssd=tier, rules=rules, board=board, ahead_slots=2
        )
        self.puts = WirePuts(self.store, self.server, board.wake_fd)
        self.engine = TransferEngine("model", ("tcp",))
        self.wire = await asyncio.to_thread(self.engine.connect_keyed, self.server.address, time.monotonic() + 10)
        self.board, self.door = board, BoardDoor(board, self.store.ahead.open, self.store.near_writer_gone)
        self.door.open()
        reader = await asyncio.to_thread(BoardReader.open, self.door.path)
        assert reader is not None
        self.reader = reader

    async def shut(self) -> None:
        await self.store.close()
        self.reader.close()
        self.door.close()
        self.wire.close()
        self.engine.close()
        self.server.stop()
        self.board.close()
        self.segment.close()

    def teardown(self) -> None:
        self.run(self.shut())
        self.loop.close()
        shutil.rmtree(self.place)

    @rule(seed=st.integers(0, 1 << 32))
    def burst(self, seed: int) -> None:
        rng = random.Random(seed)
        if rng.random() < 0.08:
            self.restart()
        writes = (self.put, self.put_in_place, self.put_whole, self.begin, self.end, self.abort)
        actions = (*writes, self.renew, self.get, self.peek, self.hold, self.let_go)
        rare = (self.remove, self.late, self.gone, self.pin)

        async def act() -> None:
            for _ in range(BURST):
                await rng.choice(rare if rng.random() < 0.15 else actions)(rng)
                StoreLife.operations += 1

        self.run(act())

    def restart(self) -> None:
        """A clean restart: blocks only in DRAM are saved first. Writers and readers have to start over."""
        self.run(self.shut())
        self.over += [(grant, data) for grant, data, _ in self.writing.values()]
        self.writing.clear()
        self.leases.clear()
        self.run(self.open())

    async def begin(self, rng: random.Random) -> bool:
        number, writer = rng.randrange(KEYS), rng.choice(WRITERS)
        self.version += 1
        data = content(number, self.version)
        parent = key(number - 4) if number >= 4 else b""
        try:
            [offer] = await self.store.reserve(
                Wanted([BlockName(key(number), parent)], writer, len(data), 1), wait_s=50
            )
        except OutOfBlocks:
            busy = len(self.writing) + sum(len(lease.blocks) for lease, _ in self.leases) + self.store.num_pinned
            assert busy >= SLOTS // 2, "refused with room to be made"
            return False
        assert offer.is_stored == (number in self.stored)
        assert (offer.grant is None) == (number in self.stored or number in self.writing)
        if offer.grant is not None:
            self.segment.range(offer.grant.slot, 0, len(data))[:] = data
            self.writing[number] = (offer.grant, data, writer)
        return offer.grant is not None

    async def end(self, rng: random.Random) -> None:
        if self.writing:
            await self._seal(rng.choice(list(self.writing)), rng.random() < 0.1)

    async def _seal(self, number: int, durable: bool = False) -> None:
        grant, data, _ = self.writing.pop(number)
        [sealed] = await self.store.seal([Sealing(grant, range_checksums(data, 1))], durable)
        assert sealed.is_sealed and sealed.is_durable == durable
        self.stored[number] = data

    async def put(self, rng: random.Random) -> None:
        before = set(self.writing)
        if await self.begin(rng):
            [number] = set(self.writing) - before
            await self._seal(number)

    async def renew(self, rng: random.Random) -> None:
        """A writer has recomputed a stored block: it gets a slot if only the SSD has it, and stays readable."""
        if not self.stored:
            return
        number, writer = rng.choice(list(self.stored)), rng.choice(WRITERS)
        data, parent = self.stored[number], key(number - 4) if number >= 4 else b""
        name = BlockName(key(number), parent)
        [offer] = await self.store.reserve(Wanted([name], writer, len(data), 1, into_dram=True))
        assert offer.is_stored != (offer.grant is not None)
        if offer.grant is None:
            return
        StoreLife.renewed += 1
        assert self.store.exists([name.key]) == [True]
        for _ in range(rng.randrange(3)):
            await self.get(rng)
        if rng.random() < 0.2:
            self.store.abort([offer.grant])
            return
        self.segment.range(offer.grant.slot, 0, len(data))[:] = data
        [sealed] = await self.store.seal([Sealing(offer.grant, range_checksums(data, 1))])
        assert sealed.is_sealed

    async def put_whole(self, rng: random.Random) -> None:
        """As clients of other hosts do."""
        number, name, data = self._draw(rng)
        if can_put(len(data), 1):
            await self._send(self.wire.put(*name, "", memoryview(data), 1), number, data)

    async def put_in_place(self, rng: random.Random) -> None:
        """As clients of this host do: write into a slot had in advance, and say so."""
        number, name, data = self._draw(rng)
        if not self.reader.takes(len(data), 1):
            return
        self.store.give_ahead(self.reader.writer_id, 1)
        if (gift := self.reader.receive()) is None:
            return
        assert self.reader.receive() is None, "one is all there is"
        sums = self.reader.write(gift[0], memoryview(data), 1)
        if is_late := rng.random() < 0.1:
            self.store.abort([Grant(*gift)])
        status = await self._send(self.wire.commit(*name, "", *gift, len(data), sums), number, data, is_late)
        if status is Status.HERE:
            self.store.abort([Grant(*gift)])

    def _draw(self, rng: random.Random) -> tuple[int, tuple[bytes, bytes], bytes]:
        number = rng.randrange(KEYS)
        self.version += 1
        return number, (key(number), key(number - 4) if number >= 4 else b""), content(number, self.version)

    async def _send(self, message: Put | Commit, number: int, data: bytes, is_late: bool = False) -> Status:
        """Send, and check the result at once, before the store has taken it in. Then all slots ahead are returned."""
        self.puts.heard()  # slots are given
        has_slot = isinstance(message, Commit) or self.store.ahead.num_held(WIRE) > 0
        assert has_slot or self.store.counts.free == 0  # now: a block removed while it was being saved frees one later
        await asyncio.to_thread(message.send, time.monotonic() + 10)
        status = message.status()
        if status in (Status.OK, Status.HERE):
            assert number not in self.writing and not (is_late and status is Status.OK and number not in self.stored)
            self.stored.setdefault(number, data)
        elif not is_late:
            assert (number in self.writing) if status is Status.REFUSED else not has_slot
        self.puts.heard()
        ahead = [*iter(self.server.take_ahead, None), *iter(self.reader.receive, None)]
        self.store.abort(Grant(*slot) for slot in ahead)
        return status

    async def abort(self, rng: random.Random) -> None:
        if self.writing:
            grant, data, _ = self.writing.pop(rng.choice(list(self.writing)))
            self.store.abort([grant])
            self.over.append((grant, data))

    async def late(self, rng: random.Random) -> None:
        """A writer that was given up, or wrote to an earlier incarnation, seals late."""
        if self.over:
            grant, data = rng.choice(self.over)
            [sealed] = await self.store.seal([Sealing(grant, range_checksums(data, 1))])
            assert not sealed.is_sealed

    async def gone(self, rng: random.Random) -> None:
        writer = rng.choice(WRITERS)
        self.store.writer_gone(writer)
        for number in [n for n, (_, _, who) in self.writing.items() if who == writer]:
            grant, data, _ = self.writing.pop(number)
            self.over.append((grant, data))

    async def _acquire(self, numbers: list[int], scattered: bool) -> tuple[Lease, list[bytes]]:
        """Acquired blocks have the sealed bytes; others are not stored, or have no room now."""
        lease = await self.store.acquire([key(n) for n in numbers], scattered=scattered)
        by_key = {key(n): self.stored.get(n) for n in numbers}
        expected: list[bytes] = []
        for block in lease.blocks:
            data = by_key[block.key]
            assert data is not None, "something that was not sealed was read"
            assert self.segment.range(block.slot, 0, block.length) == data
            expected.append(data)
        return lease, expected

    async def get(self, rng: random.Random) -> None:
        number = rng.randrange(KEYS)
        lease, found = await self._acquire([number], False)
        if number in self.stored and not found:
            busy = len(self.writing) + sum(len(lease.blocks) for lease, _ in self.leases) + self.store.num_pinned
            assert busy >= SLOTS // 2, f"block {number} was sealed and is gone"
            assert self.store.exists([key(number)]) == [True]
        self.store.release([lease.lease_id])

    async def peek(self, rng: random.Random) -> None:
        """Read through the board, as clients on this host do."""
        number = rng.randrange(KEYS)
        length = self.reader.length(key(number))
        if length is None:
            await self.get(rng)
            return
        into = memoryview(bytearray(length))
        assert self.reader.read(key(number), into) is Outcome.READ
        assert into == self.stored[number], "what was read is not what was sealed"

    async def hold(self, rng: random.Random) -> None:
        if len(self.leases) < 2:
            numbers = rng.sample(range(KEYS), 2)
            lease, found = await self._acquire(numbers, True)
            if found:
                self.leases.append((lease, found))

    async def let_go(self, rng: random.Random) -> None:
        if self.leases:
            lease, found = self.leases.pop(rng.randrange(len(self.leases)))
            for block, data in zip(lease.blocks, found, strict=True):  # nobody touched them meanwhile
                assert self.segment.range(block.slot, 0, block.length) == data
            self.store.release([lease.lease_id])

    async def remove(self, rng: random.Random) -> None:
        numbers = rng.sample(range(KEYS), 2)
        expected = sum(number in self.stored for number in numbers)
        assert await self.store.remove([key(number) for number in numbers]) == expected
        for number in numbers:
            self.stored.pop(number, None)

    async def pin(self, rng: random.Random) -> None:
        number = rng.randrange(KEYS)
        if rng.random() < 0.5 and self.store.num_pinned < 2:
            await self.store.pin([key(number)], rng.random() < 0.5, 600.0)
        else:
            self.store.unpin([key(n) for n in range(KEYS)])

    @invariant()
    def accounts_agree(self) -> None:
        self.store.check()
        counts = self.store.counts
        assert counts.free + counts.reserved + counts.sealed + counts.quarantined == SLOTS
        assert (counts.reserved, counts.quarantined) == (len(self.writing), 0)
        assert counts.leases == len(self.leases)
        assert self.store.exists([key(n) for n in range(KEYS)]) == [n in self.stored for n in range(KEYS)]
        told = {event.key: event.tier for event in self.events.snapshot()}
        assert told.keys() == {key(n) for n in self.stored}
        in_dram = set(self.store._index.stored_keys())
        assert {k for k, tier in told.items() if tier is Tier.DRAM} == in_dram & told.keys()
        listed = {k for k in in_dram if len(self.stored[int.from_bytes(k, "big")]) >= MIN_LISTED_BYTES}
        assert self.reader.exists([key(n) for n in range(KEYS)]) == [key(n) in listed for n in range(KEYS)]
        assert self.store.counters.get("checksum_mismatches", 0) == 0


TestStoreLife = StoreLife.TestCase
TestStoreLife.settings = settings(max_examples=6, stateful_step_count=40)


@pytest.mark.slow
def test_a_hundred_thousand_operations_agree_with_a_dict() -> None:
    StoreLife.operations = StoreLife.renewed = 0
    run_state_machine_as_test(StoreLife, settings=settings(max_examples=60, stateful_step_count=100))
    assert StoreLife.operations >= 100_000 and StoreLife.renewed >= 1000


def test_the_blocks_that_the_model_puts_differ_in_content() -> None:
    assert len({content(n, v) for n in range(20) for v in range(20)}) > 390
    assert np.mean([len(content(n, 0)) for n in range(KEYS)]) > 1000
