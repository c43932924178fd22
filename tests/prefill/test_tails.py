"""Whole answers on one node, whose prompts are stored meanwhile: blocks not stored yet do not change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tiny_model import write_tiny_model
from waiting import until

from kvstore.node import StoreNode
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, load_config
from mooncake.rpc import prefill_pb2, prefill_pb2_grpc
from mooncake.rpc.convert import sampling_to_wire, tokens_to_wire
from mooncake.rpc.server import Channels
from mooncake.sampling import SamplingParams
from prefill_node.kv_writer import KVWriter
from prefill_node.node import PrefillNode

BLOCK = 16
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 8 * 4  # layers, keys and values, heads, tokens, head size, float32
PROMPTS = [np.random.default_rng(seed).integers(3, 320, 3 * BLOCK, dtype=np.uint32) for seed in range(2)]
NEW_TOKENS = [90, 205]  # the second sequence is as long as the whole small cache in the end


def config_of(node_id: str, model: Path, num_blocks: int) -> Config:
    return load_config(
        None,
        [
            f"node.id={node_id}",
            f"model.path='{model}'",
            "node.conductor='127.0.0.1:9'",  # nobody there: nodes work without, they only are not found
            f"block.tokens={BLOCK}",
            f"prefill.kv_gb={(num_blocks + 0.5) * BLOCK_BYTES / 1e9}",
            "prefill.swap_gb=0.0",
            "prefill.threads=1",
            "store.dram_gb=0.01",
        ],
    )


class Standstill:
    """A stream that blocks the writer's thread until it is released."""

    def __init__(self, writer: KVWriter) -> None:
        self._may_go_on = threading.Event()
        writer.kick(self)  # type: ignore[arg-type]

    @property
    def address(self) -> None:
        self._may_go_on.wait(60)

    def end(self) -> None:
        self._may_go_on.set()


@asynccontextmanager
async def a_node_and_its_store(name: str, model: Path, num_blocks: int) -> AsyncIterator[tuple[PrefillNode, StoreNode]]:
    config = config_of(name, model, num_blocks)
    store, node = StoreNode(config, open_checkpoint(str(model)).kv_layout(BLOCK, "float32").block_bytes), None
    await store.start()
    try:
        node = PrefillNode(config)
        await node.start()
        yield node, store
    finally:
        if node is not None:
            await node.stop()
        await store.stop()


async def answer(node: PrefillNode, store: StoreNode, channels: Channels, number: int) -> list[int]:
    sampling = SamplingParams(max_tokens=NEW_TOKENS[number], temperature=0.0, ignore_eos=True)
    request = prefill_pb2.PrefillRequest(
        request_id=f"r{number}",
        tokens=tokens_to_wire(PROMPTS[number]),
        num_prompt_tokens=len(PROMPTS[number]),
        sampling=sampling_to_wire(sampling),
        pools=[prefill_pb2.PoolTarget(control_address=store.control_address)],
        pool_tokens=0,
    )
    stub = prefill_pb2_grpc.PrefillStub(channels.get(node.control_address))
    responses = [response async for response in stub.Run(request, timeout=120)]
    return [response.first_token.token_id for response in responses if response.HasField("first_token")]


async def stored(node: PrefillNode, store: StoreNode) -> np.ndarray:
    """The stored blocks, as numbers, ordered by the first of them."""
    await asyncio.wait_for(node.drained(), 10)
    assert node.host.engine.block_pool.num_in_use == 0, "blocks are still held"
    blocks = store.segment.array.reshape(-1, BLOCK_BYTES)
    rows = blocks[blocks.any(1)].view(np.float32)
    return rows[np.argsort(rows[:, 0])]


@pytest.mark.timeout(180)
async def test_blocks_that_a_slow_pool_has_not_got_yet_survive_their_sequences_preemption(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, initializer_range=0.5)
    channels = Channels()
    try:
        async with a_node_and_its_store("roomy", tmp_path, num_blocks=100) as (node, store):
            expected = [await answer(node, store, channels, number) for number in range(2)]
            expected_blocks = await stored(node, store)
        async with a_node_and_its_store("tight", tmp_path, num_blocks=16) as (node, store):
            pool_writes = Standstill(node._role._servicer._node.pool_writer)
            answers = []
            for number in range(2):
                answers.append(asyncio.create_task(answer(node, store, channels, number)))
                await until(lambda most=number * len(PROMPTS[0]): node.host.engine.load().context_tokens > most, 60)
            await until(lambda: answers[1].done() or node.host.engine.is_stalled, 60)
            assert node.host.engine.load().preemptions > 0
            pool_writes.end()
            assert await asyncio.wait_for(asyncio.gather(*answers), 60) == expected
            np.testing.assert_allclose(await stored(node, store), expected_blocks, atol=1e-4)
    finally:
        await channels.close()
    assert len(expected_blocks) == 6
