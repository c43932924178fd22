"""Layers sent to several peers, one of which hangs: real processes, real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.requests import Request, WriteRange
from kvstore.transfer.transport import Priority
from mooncake.errors import HandoffFailed, InternalError
from mooncake.types import KVLayout, SegmentAddress
from prefill_node.kv_writer import (
    LAYERS_PER_TURN,
    MIN_TURN_BYTES,
    Destination,
    KVWriter,
    LayerBlocks,
    WriteStream,
)

ROOT = Path(__file__).parents[2]
LAYOUT = KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, block_tokens=64, dtype="float32")
NUM_BLOCKS = 16
EPOCH = 7

Owner = tuple[subprocess.Popen[bytes], SegmentAddress]


@pytest.fixture
def own() -> Iterator[Callable[[], Owner]]:
    """Starts a process that owns a segment, every block of it granted."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> Owner:
        what = {"block_bytes": LAYOUT.block_bytes, "num_blocks": NUM_BLOCKS, "host": "127.0.0.1", "transports": ["tcp"]}
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "kvstore" / "actor.py"), "owner", json.dumps(what)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        assert process.stdin is not None and process.stdout is not None
        address = SegmentAddress(**json.loads(process.stdout.readline()))
        process.stdin.write(json.dumps(["grant", list(range(NUM_BLOCKS)), EPOCH]).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())
        return process, address

    yield start
    for process in started:
        process.kill()
        process.communicate()


def a_stream(name: str, address: SegmentAddress, writer: KVWriter) -> WriteStream:
    """Everything for every block, and no more."""
    stream = WriteStream(name, LAYOUT, time.monotonic() + 300, writer)
    stream.open(Destination(address, {block: (block, EPOCH) for block in range(NUM_BLOCKS)}))
    for layer in range(LAYOUT.num_layers):
        stream.push(LayerBlocks(layer, 0, tuple(range(NUM_BLOCKS))))
    stream.end()
    return stream


class Turns:
    """The turns of a stream to a peer that takes them at once."""

    def __init__(self, name: str, memory: npt.NDArray[np.uint8], num_slots: int, layout: KVLayout = LAYOUT) -> None:
        address = SegmentAddress("decode-t", 1, "h", "", "", layout.block_bytes, NUM_BLOCKS)
        self.stream = WriteStream(name, layout, time.monotonic() + 300, None)  # type: ignore[arg-type]
        self.stream.open(Destination(address, {block: (block, EPOCH) for block in range(num_slots)}))
        self._memory = memory
        self._submitted: list[Request] = []

    def submit(self, requests: list[Request]) -> list[Turns]:
        """What the stream asks of a transfer engine, and gets as its transfer."""
        self._submitted += requests
        return [self]

    def next(self) -> list[WriteRange]:
        """What its next turn writes; nothing if it has none."""
        self._submitted.clear()
        self.stream._transfer = None
        self.stream.start_turn(self, self._memory, Priority.NORMAL)  # type: ignore[arg-type]
        return [each for request in self._submitted for each in request.ranges if isinstance(each, WriteRange)]


@pytest.mark.timeout(120)
def test_a_peer_that_stands_still_keeps_nobody_else_waiting(own: Callable[[], Owner]) -> None:
    frozen, there = own()
    _, elsewhere = own()
    memory = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), np.uint8)
    transfer, sent = TransferEngine("prefill-t", ("tcp",), streams=1), []
    writer = KVWriter("hand-offs", transfer, memory, lambda stream, nbytes, _: sent.append((stream.name, nbytes)))

    def stream_to(name: str, address: SegmentAddress) -> WriteStream:
        stream = a_stream(name, address, writer)
        writer.kick(stream)
        return stream

    try:
        frozen.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, frozen.pid, os.WSTOPPED | os.WNOWAIT)
        stuck, behind = stream_to("stuck", there), stream_to("behind", there)
        right = [stream_to(f"right-{number}", elsewhere) for number in range(3)]
        for stream in right:
            stream.done.result(60)
            assert (stream.sent_bytes, stream.transport) == (memory.nbytes, "tcp")
            assert len(stream.checksums) == NUM_BLOCKS
        assert not stuck.done.done() and not behind.done.done()
        for stream in (stuck, behind):  # whose request has been given up
            stream.close()
            assert isinstance(stream.done.exception(0), HandoffFailed)
        memory[:] = 0  # is ours again
        frozen.send_signal(signal.SIGCONT)
        stream_to("again", there).done.result(60)
        assert {name for name, _ in sent} == {"right-0", "right-1", "right-2", "again"}
    finally:
        writer.stop()
        transfer.close()


def test_what_a_step_was_abandoned_with_is_not_written_beside_what_replaces_it() -> None:
    """Ranges of one request travel in any order, and the blocks of an abandoned step may have other sequences' KV."""
    memory = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None].repeat(LAYOUT.block_bytes, 1)
    turns = Turns("anew", memory, 3)
    for blocks in ((7, 8), (1, 2, 3)):
        turns.stream.push(LayerBlocks(0, 0, blocks))
    turns.stream.end()
    assert [(written.block, bytes(written.data)[0]) for written in turns.next()] == [(0, 1), (1, 2), (2, 3)]


def test_a_stream_collects_until_a_turn_is_worth_its_cost() -> None:
    memory = np.zeros((NUM_BLOCKS, LAYOUT.block_bytes), np.uint8)
    turns, num_blocks = Turns("collected", memory, NUM_BLOCKS), 3
    enough = -(-MIN_TURN_BYTES // (num_blocks * LAYOUT.layer_bytes))
    pages = tuple(range(num_blocks))
    assert enough > 1
    for layer in range(enough - 1):
        assert not turns.stream.push(LayerBlocks(layer, 0, pages))
    assert not turns.next()
    assert turns.stream.push(LayerBlocks(enough - 1, 0, pages))
    assert len(turns.next()) == enough * num_blocks
    assert not turns.stream.push(LayerBlocks(0, num_blocks, (0,)))  # the next chunk
    assert not turns.next()
    turns.stream.end()
    assert [written.block for written in turns.next()] == [num_blocks]


def test_a_turn_of_small_layers_takes_more_of_them() -> None:
    small = KVLayout(num_layers=4, num_kv_heads=1, head_dim=64, block_tokens=64, dtype="float32")
    turns = Turns("small", np.zeros((NUM_BLOCKS, small.block_bytes), np.uint8), NUM_BLOCKS, small)
    enough = MIN_TURN_BYTES // small.layer_bytes
    assert enough > LAYERS_PER_TURN
    for block in range(NUM_BLOCKS):
        for layer in range(small.num_layers):
            turns.stream.push(LayerBlocks(layer, block, (block,)))
    turns.stream.end()
    assert [len(turns.next()) for _ in range(3)] == [enough, enough, 0]


@pytest.mark.timeout(120)
async def test_whoever_no_longer_waits_cannot_take_the_end_from_the_writer(own: Callable[[], Owner]) -> None:
    _, address = own()
    memory = np.zeros((NUM_BLOCKS, LAYOUT.block_bytes), np.uint8)
    transfer = TransferEngine("prefill-t", ("tcp",), streams=1)
    writer = KVWriter("hand-offs", transfer, memory, lambda stream, nbytes, ms: None)
    try:
        given_up = a_stream("given up", address, writer)
        waiting = asyncio.wrap_future(given_up.done)
        waiting.cancel()
        await asyncio.sleep(0)  # it tells the future that it waited for, at no particular moment
        assert not given_up.done.cancelled() and not given_up.is_written
        writer.kick(given_up)
        await asyncio.wait_for(asyncio.wrap_future(given_up.done), 60)
        assert given_up.sent_bytes == memory.nbytes and given_up.is_written
    finally:
        writer.stop()
        transfer.close()


def test_a_stream_that_failed_may_have_a_write_in_progress() -> None:
    stream = WriteStream("failed", LAYOUT, time.monotonic() + 300, None)  # type: ignore[arg-type]
    stream.fail(HandoffFailed("no"))
    assert not stream.is_written, "``close`` waits for it"


@pytest.mark.timeout(120)
def test_a_bug_at_the_end_of_a_turn_costs_one_stream(own: Callable[[], Owner]) -> None:
    _, address = own()
    memory = np.zeros((NUM_BLOCKS, LAYOUT.block_bytes), np.uint8)
    transfer = TransferEngine("prefill-t", ("tcp",), streams=1)

    def on_sent(stream: WriteStream, num_bytes: int, elapsed_ms: float) -> None:
        if stream.name == "bad":
            raise ZeroDivisionError

    writer = KVWriter("hand-offs", transfer, memory, on_sent)
    try:
        bad, good = a_stream("bad", address, writer), a_stream("good", address, writer)
        for _ in range(2 * LAYERS_PER_TURN):  # so that it needs more than the turn that goes wrong
            bad.push(LayerBlocks(0, 0, (0,)))
        writer.kick(bad)
        writer.kick(good)
        good.done.result(60)
        assert isinstance(bad.done.exception(60), InternalError)
    finally:
        writer.stop()
        transfer.close()
