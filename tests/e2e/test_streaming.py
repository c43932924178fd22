"""Layer-wise streaming is real: over a throttled link the first layer is there long before the last one is computed,
and decoding starts earlier than computing first and sending afterwards would allow."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from direct_nodes import run_prefill

from decode_node.node import DecodeNode
from mooncake.config import Config, load_config
from mooncake.rpc import decode_pb2, decode_pb2_grpc, prefill_pb2
from mooncake.rpc.convert import sampling_to_wire, tokens_to_wire
from mooncake.rpc.server import Channels
from mooncake.sampling import SamplingParams
from prefill_node.node import PrefillNode

PROMPT_TOKENS = 512
LINK_MB_PER_S = 20.0  # 23.6 MB of KV: about as long on the link as in computation


def config_of(node_id: str, *extra: str) -> Config:
    return load_config(
        None,
        [
            f"node.id={node_id}",
            "node.conductor='127.0.0.1:9'",  # nobody there: nodes work without, they only are not found
            "prefill.kv_gb=0.2",
            "decode.kv_gb=0.2",
            "prefill.chunk_tokens=0",
            "prefill.threads=1",
            "decode.threads=1",
            *extra,
        ],
    )


@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
async def test_layer_0_is_at_the_decode_host_before_the_last_layer_is_computed(transport: str) -> None:
    link = [f"transfer.transports=['{transport}']", f"transfer.max_mb_per_s={LINK_MB_PER_S}"]
    decode, prefill = DecodeNode(config_of("decode-t", *link)), PrefillNode(config_of("prefill-t", *link))
    channels = Channels()
    await decode.start()
    await prefill.start()
    try:
        layout = prefill.host.cache_size.layout
        arrived_s = watch_layer(decode, layer=0)
        computed_s = record_layers(prefill)

        prompt = np.random.default_rng(0).integers(100, 49000, PROMPT_TOKENS, dtype=np.uint32)
        sampling = sampling_to_wire(SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        common = {
            "request_id": "r",
            "handoff_id": "h",
            "epoch": 3,
            "tokens": tokens_to_wire(prompt),
            "num_prompt_tokens": PROMPT_TOKENS,
            "sampling": sampling,
        }
        started_s = time.monotonic()
        decoding = asyncio.create_task(
            first_two_tokens(channels, decode.control_address, decode_pb2.DecodeRequest(**common))
        )
        report = await run_prefill(
            channels,
            prefill.control_address,
            prefill_pb2.PrefillRequest(decode_address=decode.control_address, **common),
        )
        decoded_s = await decoding - started_s

        last_layer_s = computed_s[layout.num_layers - 1]
        assert arrived_s.wait_s() < last_layer_s, "layer 0 came only after the last layer was computed"

        blocks = PROMPT_TOKENS // layout.block_tokens
        assert report.sent_bytes == blocks * layout.block_bytes
        whole_transfer_s = report.sent_bytes / (LINK_MB_PER_S * 1e6)
        prefill_s = report.timings.prefill_ms / 1e3
        assert decoded_s < prefill_s + whole_transfer_s, (decoded_s, prefill_s, whole_transfer_s)
    finally:
        await channels.close()
        await prefill.stop()
        await decode.stop()


class Arrival:
    """When the last byte of one layer of the first block that the hand-off fills became non-zero."""

    def __init__(self, node: DecodeNode, layer: int) -> None:
        layout = node.host.cache_size.layout
        start = layer * layout.layer_bytes
        self._memory = node.host.engine.cache.memory[:, start : start + layout.layer_bytes]
        self._before = self._memory[:, -64:].copy()
        self._seen_s = 0.0
        self._seen = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not (self._memory[:, -64:] != self._before).any():
            time.sleep(0.001)
        self._seen_s = time.monotonic()
        self._seen.set()

    def wait_s(self) -> float:
        assert self._seen.wait(30), "layer 0 never arrived"
        return self._seen_s


def watch_layer(node: DecodeNode, layer: int) -> Arrival:
    return Arrival(node, layer)


def record_layers(node: PrefillNode) -> dict[int, float]:
    """When each layer of the request was computed, as the streamer is told."""
    computed_s: dict[int, float] = {}
    node.streamer.listeners.append(lambda layer: computed_s.__setitem__(layer, time.monotonic()))
    return computed_s


async def first_two_tokens(channels: Channels, address: str, request: decode_pb2.DecodeRequest) -> float:
    """When the first token computed by the decode node arrived (monotonic s)."""
    stub = decode_pb2_grpc.DecodeStub(channels.get(address))
    async for response in stub.Generate(request, timeout=60):
        if any(token.index >= 1 for token in response.tokens):
            return time.monotonic()
    raise AssertionError("decode ended early")
