"""Nodes of a cluster within a test's own process, and a request through them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from decode_node.node import DecodeNode
from kvstore.__main__ import build
from mooncake.config import load_config
from mooncake.rpc import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from mooncake.rpc.convert import sampling_to_wire, tokens_to_wire
from mooncake.rpc.server import Channels
from mooncake.sampling import SamplingParams
from prefill_node.node import PrefillNode


async def run_prefill(
    channels: Channels, address: str, request: prefill_pb2.PrefillRequest
) -> common_pb2.PrefillReport:
    stub = prefill_pb2_grpc.PrefillStub(channels.get(address))
    reports = [response.report async for response in stub.Run(request, timeout=60) if response.HasField("report")]
    assert len(reports) == 1
    return reports[0]


class Nodes:
    """A store, a decode node and prefill nodes without a conductor, so that what one request moved can be counted."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self._settings = [f"model.path={folder}", "model.dtype=float32", "node.conductor='127.0.0.1:9'", *settings]
        self._channels = Channels()
        self._nodes: list[Any] = []
        self._number = 0

    async def __aenter__(self) -> Nodes:
        try:
            self.store = await self._start(build, "store")
            self.decode = await self._start(DecodeNode, "decode")
            self.first, self.second = [await self._start(PrefillNode, f"prefill{i}") for i in range(2)]
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _start(self, make: Any, name: str) -> Any:
        node = make(load_config(None, [*self._settings, f"node.id={name}"]))
        await node.start()
        self._nodes.append(node)
        return node

    async def _stop(self) -> None:
        await self._channels.close()
        for node in reversed(self._nodes):
            await node.stop()

    async def ask(
        self, prefill: PrefillNode, prompt: list[int], num_tokens: int
    ) -> tuple[list[int], common_pb2.PrefillReport]:
        self._number += 1
        pools = [prefill_pb2.PoolTarget(control_address=self.store.control_address)]
        common: dict[str, Any] = {
            "request_id": f"r{self._number}",
            "handoff_id": f"h{self._number}",
            "epoch": self._number,
            "tokens": tokens_to_wire(np.array(prompt, np.uint32)),
            "num_prompt_tokens": len(prompt),
            "sampling": sampling_to_wire(SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)),
            "pools": pools,
        }
        answering = asyncio.create_task(self._answer(common))
        request = prefill_pb2.PrefillRequest(decode_address=self.decode.control_address, **common)
        report = await run_prefill(self._channels, prefill.control_address, request)
        return await answering, report

    async def _answer(self, common: dict[str, Any]) -> list[int]:
        stub = decode_pb2_grpc.DecodeStub(self._channels.get(self.decode.control_address))
        call = stub.Generate(decode_pb2.DecodeRequest(**common), timeout=60)
        return [token.token_id async for response in call for token in response.tokens]
