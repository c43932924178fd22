"""A model whose layers share keys and values through a whole cluster: what is handed over, stored and read back are the
layers that are kept, and the answers are those of one engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest
from direct_nodes import run_prefill
from drive import check_twice
from live import running_cluster, small_config
from sharing_model import GRAPHS, write_sharing_model

from decode_node.node import DecodeNode
from kvstore.node import StoreNode
from mooncake import LLM, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.config import load_config
from mooncake.rpc import decode_pb2, decode_pb2_grpc, prefill_pb2
from mooncake.rpc.convert import sampling_to_wire, tokens_to_wire
from mooncake.rpc.server import Channels
from prefill_node.node import PrefillNode

NEW, BLOCK_TOKENS, FULL_BLOCKS = 12, 8, 5
SMALL = ("block.tokens=8", "prefill.kv_gb=0.02", "decode.kv_gb=0.02", "store.dram_gb=0.02", "prefill.chunk_tokens=16")


@pytest.mark.parametrize("kv_dtype", [pytest.param("float32", marks=pytest.mark.slow), "int8"])
async def test_a_cluster_answers_as_one_engine_does(kv_dtype: str, tmp_path: Path) -> None:
    write_sharing_model(tmp_path, GRAPHS["character"])
    prompts = [np.random.default_rng(seed).integers(3, 320, 41).tolist() for seed in range(3)]
    greedy = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    with LLM(str(tmp_path), kv_gb=0.01, block_tokens=BLOCK_TOKENS, kv_dtype=kv_dtype, chunk_tokens=16) as llm:
        wanted = [list(one.token_ids) for one in llm.generate(prompts, greedy)]
    config = small_config(f"model.path={tmp_path}", f"model.kv_dtype={kv_dtype}", "model.dtype=float32", *SMALL)
    with running_cluster(config) as cluster:
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            await check_twice(channel, prompts, wanted, 40)


async def test_bytes_on_the_wire_and_in_the_pool_fall_by_what_is_shared(tmp_path: Path) -> None:
    """Separate nodes, so that the bytes of one request can be counted exactly."""
    write_sharing_model(tmp_path, GRAPHS["character"])  # 12 layers, 6 of which are kept
    block_bytes = open_checkpoint(str(tmp_path)).kv_layout(BLOCK_TOKENS, "float32").block_bytes
    assert block_bytes == 6 * 2 * BLOCK_TOKENS * 16 * 4

    def config_of(node_id: str) -> list[str]:
        nobody = "node.conductor='127.0.0.1:9'"  # there: nodes work without, they only are not found
        sharing_alone = "block.windows=false"  # else windows, too, make it fewer
        return [f"node.id={node_id}", nobody, f"model.path={tmp_path}", "model.dtype=float32", sharing_alone, *SMALL]

    store = StoreNode(load_config(None, config_of("store-s")), block_bytes)
    decode, prefill = (
        DecodeNode(load_config(None, config_of("decode-s"))),
        PrefillNode(load_config(None, config_of("prefill-s"))),
    )
    nodes, channels = (store, decode, prefill), Channels()
    for node in nodes:
        await node.start()
    try:
        prompt = np.random.default_rng(1).integers(3, 320, FULL_BLOCKS * BLOCK_TOKENS + 1, dtype=np.uint32)
        common = {
            "request_id": "r",
            "handoff_id": "h",
            "epoch": 3,
            "tokens": tokens_to_wire(prompt),
            "num_prompt_tokens": len(prompt),
            "sampling": sampling_to_wire(SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True).for_engine()),
        }
        answering = asyncio.create_task(answer(channels, decode.control_address, common))
        pools = [prefill_pb2.PoolTarget(control_address=store.control_address)]
        request = prefill_pb2.PrefillRequest(decode_address=decode.control_address, pools=pools, **common)
        report = await run_prefill(channels, prefill.control_address, request)
        await answering
        assert report.sent_bytes == (FULL_BLOCKS + 1) * block_bytes, "and the block that is not full"
        assert report.pool_bytes == FULL_BLOCKS * block_bytes
    finally:
        await channels.close()
        for node in reversed(nodes):
            await node.stop()


async def answer(channels: Channels, address: str, common: dict[str, object]) -> None:
    stub = decode_pb2_grpc.DecodeStub(channels.get(address))
    async for _ in stub.Generate(decode_pb2.DecodeRequest(**common), timeout=60):  # type: ignore[arg-type]
        pass
