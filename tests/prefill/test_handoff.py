"""A hand-off's messages, whatever the prompt's length."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from waiting import until

from kvstore.checksum import digest
from mooncake.errors import InternalError, NodeUnavailable, OutOfMemory
from mooncake.page_groups import UNIFORM
from mooncake.rpc import decode_pb2 as pb
from mooncake.rpc import decode_pb2_grpc, prefill_pb2
from mooncake.rpc.convert import segment_to_wire
from mooncake.rpc.server import MAX_MESSAGE_BYTES, Channels, RpcServer
from mooncake.types import KVLayout, SegmentAddress
from prefill_node.closings import Closings
from prefill_node.deadline import Deadline
from prefill_node.handoff import HandoffSender
from prefill_node.kv_writer import WriteStream
from prefill_node.resources import NodeResources

LAYOUT = KVLayout(num_layers=126, num_kv_heads=1, block_tokens=16, head_dim=8, dtype="float16")
NUM_TOKENS = 1 << 20
NUM_BLOCKS = NUM_TOKENS // LAYOUT.block_tokens
NOWHERE = SegmentAddress("decode", 1, "", "", "127.0.0.1:9", LAYOUT.block_bytes, NUM_BLOCKS)


class DecodeNode(decode_pb2_grpc.DecodeServicer):
    """Grants blocks, and notes what is committed."""

    def __init__(self) -> None:
        self.lacks_memory = False
        self.deaf_to = 0  # tries to close that are not heard
        self.closed: list[str] = []
        self.committed: list[pb.CommitHandoffRequest] = []

    async def OpenHandoff(  # noqa: N802
        self, request: pb.OpenHandoffRequest, context: Any
    ) -> pb.OpenHandoffResponse:
        if self.lacks_memory:
            return pb.OpenHandoffResponse()
        return pb.OpenHandoffResponse(segment=segment_to_wire(NOWHERE), block_ids=range(NUM_BLOCKS))

    async def CommitHandoff(  # noqa: N802
        self, request: pb.CommitHandoffRequest, context: Any
    ) -> pb.CommitHandoffResponse:
        self.committed.append(request)
        return pb.CommitHandoffResponse()

    async def CloseHandoff(  # noqa: N802
        self, request: pb.CloseHandoffRequest, context: Any
    ) -> pb.CloseHandoffResponse:
        self.deaf_to -= 1
        if self.deaf_to >= 0:
            raise NodeUnavailable("nobody listens")
        self.closed.append(request.handoff_id)
        return pb.CloseHandoffResponse()


@contextlib.asynccontextmanager
async def sender(node: DecodeNode, kick: Callable[[WriteStream], None]) -> AsyncIterator[HandoffSender]:
    server, channels = RpcServer(), Channels()
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, node, "mooncake.v1.Decode")
    port = await server.start("127.0.0.1", 0)
    try:
        resources = SimpleNamespace(
            host=SimpleNamespace(cache_size=SimpleNamespace(layout=LAYOUT, groups=UNIFORM)),
            transfer=SimpleNamespace(writer_id="prefill"),
            handoff_writer=SimpleNamespace(kick=kick),
            channels=channels,
            closings=Closings(channels),
        )
        request = prefill_pb2.PrefillRequest(handoff_id="h", epoch=1, decode_address=f"127.0.0.1:{port}")
        yield HandoffSender(cast(NodeResources, resources), request, NUM_TOKENS, Deadline(time.monotonic() + 30))
    finally:
        await channels.close()
        await server.stop()


async def test_a_million_tokens_are_committed_in_one_small_message() -> None:
    sums = np.arange(NUM_BLOCKS * LAYOUT.num_layers, dtype=np.uint64).reshape(NUM_BLOCKS, LAYOUT.num_layers)
    assert sums.nbytes > MAX_MESSAGE_BYTES
    node = DecodeNode()
    async with sender(node, lambda stream: None) as handoff:
        await handoff.open()
        handoff.stream.checksums = dict(enumerate(sums))
        handoff.stream.done.set_result(None)
        await handoff.commit([], None)
        assert [message.digest for message in node.committed] == [digest([sums.ravel()])]


async def test_a_hand_off_that_cannot_be_opened_fails_at_once() -> None:
    """Whatever the reason, such as our own bug: nobody waits for it until the deadline."""

    def kick(stream: WriteStream) -> None:
        raise ZeroDivisionError("a bug")

    async with sender(DecodeNode(), kick) as handoff:
        await handoff.open()
        with pytest.raises(InternalError, match="cannot be opened: ZeroDivisionError"):
            await asyncio.wait_for(handoff.commit([], None), 5)


async def test_an_empty_answer_of_the_decode_node_is_no_bug_of_ours() -> None:
    """gRPC sends one where it has no memory for the bytes of a message: another attempt may go well."""
    node = DecodeNode()
    node.lacks_memory = True
    async with sender(node, lambda stream: None) as handoff:
        await handoff.open()
        with pytest.raises(OutOfMemory, match="an empty message came"):
            await asyncio.wait_for(handoff.commit([], None), 5)


async def test_a_decode_node_hears_of_the_end_of_a_hand_off_however_long_it_was_deaf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its blocks would be quarantined for as long as both live: it was told three times, within 16 seconds."""
    monkeypatch.setattr("prefill_node.closings.MAX_PAUSE_S", 0.3)
    node = DecodeNode()
    node.deaf_to = 6
    async with sender(node, lambda stream: None) as handoff:
        await asyncio.wait_for(handoff.close(), 5)
        assert not node.closed and handoff._node.closings.num_owed == 1
        await until(lambda: node.closed == ["h"], 10)
        await until(lambda: handoff._node.closings.num_owed == 0, 10)
