"""A prefill and a decode node of a model in the test's own process; tests call both, as a conductor would."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from waiting import until

from decode_node.node import DecodeNode
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, load_config
from mooncake.rpc import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from mooncake.rpc.convert import report_from_wire, sampling_to_wire, tokens_to_wire
from mooncake.rpc.server import Channels
from mooncake.sampling import SamplingParams
from mooncake.types import PrefillReport
from prefill_node.node import PrefillNode

BLOCK, NEW_TOKENS = 8, 20


def pair_config(node_id: str, model: Path, num_blocks: int, *settings: str) -> Config:
    block_bytes = open_checkpoint(str(model)).kv_layout(BLOCK, "float32").block_bytes
    return load_config(
        None,
        [
            f"node.id={node_id}",
            f"model.path={model}",
            "node.conductor='127.0.0.1:9'",  # nobody there
            f"block.tokens={BLOCK}",
            "prefill.threads=1",
            "decode.threads=1",
            f"prefill.kv_gb={num_blocks * block_bytes / 1e9 * 1.001}",
            "decode.kv_gb=0.01",
            *settings,
        ],
    )


@dataclass
class NodePair:
    """Calls both nodes, as a conductor does."""

    prefill: PrefillNode
    decode: DecodeNode
    channels: Channels
    pool: str = ""  # a store's control address
    asked: int = 0

    async def ask(self, tokens: Sequence[int], salt: str = "", **sampling: Any) -> tuple[list[int], PrefillReport]:
        self.asked += 1
        common: dict[str, Any] = {
            "request_id": f"r{self.asked}",
            "handoff_id": f"h{self.asked}",
            "epoch": self.asked,
            "tokens": tokens_to_wire(np.array(tokens, np.uint32)),
            "num_prompt_tokens": len(tokens),
            "sampling": sampling_to_wire(
                SamplingParams(**{"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling})
            ),
            "cache_salt": salt,
            "pools": [prefill_pb2.PoolTarget(control_address=self.pool)] if self.pool else [],
        }
        decode_stub = decode_pb2_grpc.DecodeStub(self.channels.get(self.decode.control_address))
        prefill_stub = prefill_pb2_grpc.PrefillStub(self.channels.get(self.prefill.control_address))

        async def decoded() -> list[int]:
            call = decode_stub.Generate(decode_pb2.DecodeRequest(**common), timeout=60)
            return [token.token_id async for response in call for token in response.tokens]

        async def reported() -> PrefillReport:
            request = prefill_pb2.PrefillRequest(decode_address=self.decode.control_address, **common)
            reports = [r.report async for r in prefill_stub.Run(request, timeout=60) if r.HasField("report")]
            return report_from_wire(reports[0])

        return await asyncio.gather(decoded(), reported())

    def num_known(self, node: PrefillNode | DecodeNode, tokens: Sequence[int]) -> int:
        """Number of blocks of a prompt with these tokens that a node has, at any position."""
        keys = node.host.chain().keys(np.array(tokens, np.uint32), BLOCK)
        return sum(node.host.engine.block_pool.match([key]) for key in keys)


@contextlib.asynccontextmanager
async def node_pair(
    model: Path, *settings: str, num_blocks: int = 100, name: str = "t", pool: str = ""
) -> AsyncIterator[NodePair]:
    """A started pair; at the end it checks that no blocks are held."""
    prefill = PrefillNode(pair_config(f"prefill-{name}", model, num_blocks, *settings))
    decode = DecodeNode(pair_config(f"decode-{name}", model, num_blocks, *settings))
    await decode.start()
    await prefill.start()
    channels = Channels()
    try:
        yield NodePair(prefill, decode, channels, pool)
        await prefill.drained()
        for node in (prefill, decode):
            await until(lambda pool=node.host.engine.block_pool: pool.num_in_use == 0, 30)  # type: ignore[misc]
            checked = node.host.thread.call(lambda engine: engine.block_pool.check())
            await asyncio.wrap_future(checked)
    finally:
        await channels.close()
        await prefill.stop()
        await decode.stop()
