"""The receiver with a real engine, segment and writer: messages that come late, twice or out of order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from waiting import until

from decode_node.handoff import Handoff, HandoffState, Outcome
from decode_node.receiver import Receiver
from kvstore.checksum import digest, range_checksums
from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.requests import WriteRange
from mooncake.engine.cache.kv_cache import Arrival, KVCache
from mooncake.engine.contract import EngineConfig, StepOutput
from mooncake.engine.engine import Engine
from mooncake.engine.loop import EngineThread
from mooncake.errors import Cancelled, HandoffFailed, InvalidRequest, MooncakeError, StaleEpoch
from mooncake.types import SampledToken
from tests.engine.hash_model import (
    BLOCK,
    LAYOUT,
    HashModel,
    hash_sequence,
    random_prompt,
    running_checksums,
    true_answer,
)

NUM_BLOCKS = 8
PROMPT = random_prompt(3 * BLOCK - 2, 0)
WAIT_S = 20.0


class SlowMirror:
    """A mirror whose copies take as long as the test wants."""

    def __init__(self, cache: KVCache) -> None:
        self.memory = cache.memory
        self.may_end = threading.Event()
        self.may_end.set()
        self.has_begun = threading.Event()

    def to_host(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        raise NotImplementedError

    def to_device(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        return self

    def wait(self) -> None:
        self.has_begun.set()
        self.may_end.wait(WAIT_S)

    def order(self) -> None:
        raise NotImplementedError


@dataclass
class Node:
    receiver: Receiver
    thread: EngineThread
    mirror: SlowMirror
    server: SegmentServer
    writer: TransferEngine

    def announce(self, name: str, prompt: list[int] = PROMPT, epoch: int = 3) -> tuple[Handoff, Inbox]:
        handoff, inbox = Handoff(name, epoch), Inbox()
        self.receiver.announce(handoff, hash_sequence(name, prompt), inbox)
        return handoff, inbox

    async def open(self, name: str, epoch: int = 3, wait_s: float = WAIT_S) -> Handoff:
        return await self.receiver.open(name, epoch, self.writer.writer_id, wait_s)

    async def write(self, handoff: Handoff, prompt: list[int] = PROMPT) -> int:
        """The digest of what was written."""
        blocks = kv_of(prompt)[handoff.first_block :]
        ranges = [
            WriteRange(block_id, 0, data, handoff.epoch)
            for block_id, data in zip(handoff.block_ids, blocks, strict=True)
        ]
        await self.writer.write_async(self.server.address, ranges, time.monotonic() + WAIT_S)
        return digest(range_checksums(block.data, LAYOUT.num_layers) for block in blocks)

    async def in_use(self) -> int:
        return await asyncio.wrap_future(self.thread.call(lambda engine: engine.block_pool.num_in_use))

    async def all_is_free(self) -> None:
        await until(lambda: self.receiver.num_open == 0)
        async with asyncio.timeout(WAIT_S):
            while await self.in_use():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


class Inbox:
    """The outputs that the request's call received."""

    def __init__(self) -> None:
        self.told: list[StepOutput | MooncakeError] = []

    def __call__(self, output: StepOutput | MooncakeError) -> None:
        self.told.append(output)

    @property
    def answer(self) -> list[int]:
        return [output.token.token_id for output in self.told if isinstance(output, StepOutput)]


def kv_of(prompt: list[int]) -> np.ndarray:
    """Its blocks, as a prefill node computes them."""
    blocks = np.zeros((-(-len(prompt) // BLOCK), LAYOUT.num_layers, 2, BLOCK), np.float32)
    for place, (token, checksum) in enumerate(zip(prompt, running_checksums(prompt), strict=True)):
        blocks[place // BLOCK, :, :, place % BLOCK] = [[token, place], [checksum, 0]]
    return blocks.view(np.uint8).reshape(len(blocks), LAYOUT.block_bytes)


def first_token(prompt: list[int] = PROMPT, index: int = 0) -> list[SampledToken]:
    return [SampledToken(index, true_answer(prompt, 1)[0])]


@contextlib.asynccontextmanager
async def a_node(*transports: str) -> AsyncIterator[Node]:
    loop = asyncio.get_running_loop()
    segment = Segment.create("late", LAYOUT.block_bytes, NUM_BLOCKS)
    cache = KVCache(LAYOUT, NUM_BLOCKS, segment.buffer)
    config = EngineConfig(block_tokens=BLOCK, max_sequences=8, max_model_len=NUM_BLOCKS * BLOCK)
    thread = EngineThread(Engine(HashModel(), cache, config))
    thread.start()
    server = SegmentServer(
        segment,
        "decode-t",
        transports or ("shm",),
        on_peer_gone=lambda writer: loop.call_soon_threadsafe(receiver.peer_gone, writer),
    )
    server.start()
    writer = TransferEngine("prefill-t", transports or ("shm",))
    mirror = SlowMirror(cache)
    receiver = Receiver(thread, server, mirror, LAYOUT)
    try:
        yield Node(receiver, thread, mirror, server, writer)
    finally:
        mirror.may_end.set()
        writer.close()
        server.stop()
        thread.stop()
        thread.engine.block_pool.check()


async def test_messages_in_time_give_the_whole_answer_and_all_blocks_back() -> None:
    async with a_node() as node:
        _, inbox = node.announce("h")
        handoff = await node.open("h")
        await node.receiver.commit("h", 3, first_token(), await node.write(handoff))
        await until(lambda: len(inbox.told) == 12)
        assert inbox.answer == true_answer(PROMPT, 12)
        await node.all_is_free()
        assert handoff.outcome is Outcome.COMMITTED


async def test_what_the_engine_does_not_start_is_told_and_gives_its_blocks_back() -> None:
    """The first token has the wrong index: the two nodes do not agree on the request."""
    async with a_node() as node:
        handoff, inbox = node.announce("h")
        whole = await node.write(await node.open("h"))
        with pytest.raises(InvalidRequest, match="token 5 is not the next one"):
            await node.receiver.commit("h", 3, first_token(index=5), whole)
        await until(lambda: inbox.told)
        assert isinstance(inbox.told[0], InvalidRequest), "it would wait for its answer to its deadline"
        await node.receiver.cancel(handoff, is_late=False)
        await node.all_is_free()


async def test_a_second_writer_is_refused_while_the_first_one_waits_for_room() -> None:
    async with a_node() as node:
        node.announce("full", random_prompt(NUM_BLOCKS * BLOCK - 1, 1))
        await node.open("full")
        _, inbox = node.announce("h")
        opening = asyncio.create_task(node.open("h"))
        await until(lambda: node.receiver.num_waiting == 1)
        with pytest.raises(HandoffFailed, match="h is opening"):
            await node.receiver.open("h", 3, "another", WAIT_S)
        await node.receiver.close("full", 3, "")
        await node.receiver.commit("h", 3, first_token(), await node.write(await opening))
        await until(lambda: inbox.answer == true_answer(PROMPT, 12))


async def test_a_writer_that_found_no_room_may_ask_again() -> None:
    async with a_node() as node:
        node.announce("full", random_prompt(NUM_BLOCKS * BLOCK - 1, 1))
        await node.open("full")
        node.announce("h")
        with pytest.raises(MooncakeError, match="blocks are needed"):
            await node.open("h", wait_s=0.05)
        await node.receiver.close("full", 3, "")
        assert (await node.open("h")).state is HandoffState.RESERVED
        await node.receiver.close("h", 3, "")
        await node.all_is_free()


async def test_a_writer_that_no_longer_waits_gets_no_blocks() -> None:
    """The engine has reserved them, but the reservation has not been reported yet."""
    async with a_node() as node:
        _, inbox = node.announce("h")
        may_reserve = threading.Event()
        node.thread.call(lambda engine: may_reserve.wait(WAIT_S))
        opening = asyncio.create_task(node.open("h"))
        for _ in range(5):
            await asyncio.sleep(0)  # as far as the engine's queue
        may_reserve.set()
        assert node.thread.call(lambda engine: engine.block_pool.num_in_use).result(WAIT_S) == 3
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await node.all_is_free()
        assert not inbox.told, "why its writer stopped is for the writer's own call to tell"


async def test_an_announcement_finds_each_writer_that_waits_for_it() -> None:
    async with a_node() as node:
        early = [asyncio.create_task(node.open("h", wait_s=wait_s)) for wait_s in (0.05, WAIT_S)]
        with pytest.raises(HandoffFailed, match="was not announced"):
            await early[0]
        node.announce("other")
        await asyncio.sleep(0.01)
        assert not early[1].done()
        node.announce("h")
        assert (await early[1]).state is HandoffState.RESERVED
        await node.receiver.close("h", 3, "")
        await node.receiver.close("other", 3, "")
        await node.all_is_free()


async def test_blocks_are_not_granted_to_the_next_one_before_the_right_to_write_them_is_back() -> None:
    """The first hand-off is given up, its writer closes, and the thread that revokes its grant is late: it must not
    revoke the grant of the blocks' next owner."""
    async with a_node("tcp") as node:
        threads = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(threads)
        handoff, _ = node.announce("a", random_prompt(NUM_BLOCKS * BLOCK - 1, 1))
        await node.open("a")
        is_busy = threading.Event()
        threads.submit(is_busy.wait, WAIT_S)
        cancelling = asyncio.create_task(node.receiver.cancel(handoff, is_late=False))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(node.receiver.close("a", 3, ""))
        _, inbox = node.announce("b", epoch=4)
        opening = asyncio.create_task(node.open("b", epoch=4))
        await asyncio.wait([opening], timeout=0.2)
        is_busy.set()
        await asyncio.gather(cancelling, closing)
        await asyncio.wrap_future(threads.submit(lambda: None))
        await node.receiver.commit("b", 4, first_token(), await node.write(await opening))
        await until(lambda: inbox.answer == true_answer(PROMPT, 12))


async def test_what_is_given_up_while_it_is_verified_goes_back_once_the_thread_is_through() -> None:
    async with a_node() as node:
        handoff, inbox = node.announce("h")
        whole = await node.write(await node.open("h"))
        node.mirror.may_end.clear()
        committing = asyncio.create_task(node.receiver.commit("h", 3, first_token(), whole))
        await asyncio.to_thread(node.mirror.has_begun.wait, WAIT_S)
        with pytest.raises(HandoffFailed, match="is verifying"):
            await node.receiver.commit("h", 3, first_token(), whole)
        cancelling = asyncio.create_task(node.receiver.cancel(handoff, is_late=True))
        await asyncio.sleep(0.02)
        assert await node.in_use() == 3
        node.mirror.may_end.set()
        await cancelling
        with pytest.raises(HandoffFailed, match="has expired"):
            await committing
        await node.all_is_free()
        assert not inbox.told


async def test_a_writer_that_does_not_wait_for_the_end_of_its_commit_has_closed() -> None:
    async with a_node() as node:
        _, inbox = node.announce("h")
        whole = await node.write(await node.open("h"))
        node.mirror.may_end.clear()
        committing = asyncio.create_task(node.receiver.commit("h", 3, first_token(), whole))
        await asyncio.to_thread(node.mirror.has_begun.wait, WAIT_S)
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await committing
        assert await node.in_use() == 3
        node.mirror.may_end.set()
        await node.all_is_free()
        assert not inbox.told


async def test_over_shared_memory_blocks_wait_for_a_writer_that_may_be_copying() -> None:
    async with a_node() as node:
        handoff, inbox = node.announce("h")
        await node.write(await node.open("h"))
        await node.receiver.cancel(handoff, is_late=False)
        assert (handoff.state, node.receiver.num_quarantined_blocks) == (HandoffState.QUARANTINED, 3)
        await node.receiver.cancel(handoff, is_late=True)
        with pytest.raises(HandoffFailed, match="is quarantined"):
            await node.open("h")
        with pytest.raises(HandoffFailed, match="is quarantined"):
            await node.receiver.commit("h", 3, first_token(), b"")
        await node.receiver.close("h", 2, "of an attempt before")
        assert await node.in_use() == 3
        await node.receiver.close("h", 3, "")
        await node.all_is_free()
        await node.receiver.close("h", 3, "")
        with pytest.raises(HandoffFailed, match="not known"):
            await node.receiver.commit("h", 3, first_token(), b"")
        assert handoff.outcome is Outcome.FAILED and not inbox.told


async def test_a_writer_that_is_connected_again_before_its_end_was_heard_goes_on() -> None:
    """The event loop is busy meanwhile. Over its new connection it may be in the middle of a copy."""
    async with a_node() as node:
        _, inbox = node.announce("h")
        handoff = await node.open("h")
        await node.write(handoff)
        node.writer.forget("decode-t")
        while node.server.stats().connections:
            time.sleep(0.001)  # noqa: ASYNC251
        write = WriteRange(handoff.block_ids[0], 0, kv_of(PROMPT)[0], handoff.epoch)
        node.writer.write(node.server.address, [write], time.monotonic() + WAIT_S)
        await asyncio.sleep(0.05)
        assert handoff.state is HandoffState.RESERVED and not inbox.told
        node.writer.forget("decode-t")
        await until(lambda: inbox.told)
        await node.all_is_free()


async def test_who_waits_is_told_that_the_writer_has_given_up() -> None:
    async with a_node() as node:
        _, inbox = node.announce("h")
        await node.open("h")
        await node.receiver.close("h", 3, "out of luck")
        assert await node.in_use() == 0
        await node.receiver.close("h", 3, "out of luck")
        [told] = inbox.told
        assert isinstance(told, HandoffFailed) and "out of luck" in told.message


async def test_a_writer_that_goes_away_leaves_nothing_behind() -> None:
    async with a_node() as node:
        given_up, _ = node.announce("given up")
        await node.write(await node.open("given up"))
        await node.receiver.cancel(given_up, is_late=False)
        _, inbox = node.announce("open")
        await node.open("open")
        node.announce("not yet")
        node.writer.close()
        await until(lambda: inbox.told)
        assert [type(output) for output in inbox.told] == [HandoffFailed]
        await until(lambda: node.receiver.num_open == 1)
        assert await node.in_use() == 0
        await node.receiver.close("not yet", 3, "")
        await node.all_is_free()


async def test_an_old_epoch_is_refused_and_changes_nothing() -> None:
    async with a_node() as node:
        handoff, inbox = node.announce("h")
        with pytest.raises(StaleEpoch):
            await node.open("h", epoch=2)
        whole = await node.write(await node.open("h"))
        with pytest.raises(StaleEpoch):
            await node.receiver.commit("h", 2, first_token(), whole)
        await node.receiver.close("h", 2, "")
        assert handoff.state is HandoffState.RESERVED
        await node.receiver.commit("h", 3, first_token(), whole)
        await until(lambda: inbox.answer == true_answer(PROMPT, 12))
        assert not any(isinstance(output, Cancelled) for output in inbox.told)


async def test_an_epoch_that_means_nobody_is_refused_before_a_block_is_reserved() -> None:
    async with a_node() as node:
        with pytest.raises(InvalidRequest, match="count from 1"):
            node.announce("h", epoch=0)
        assert node.receiver.num_open == 0 and await node.in_use() == 0
