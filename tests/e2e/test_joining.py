"""Nodes whose settings differ from their cluster's are refused before they load a model, or as they join: in a sentence
that says what differs."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import InProcessCluster
from tiny_lora import write_adapter
from tiny_model import tiny_model, write_tiny_model

from decode_node.node import DecodeNode
from kvstore.__main__ import build as build_store
from kvstore.transfer.engine import TransferEngine
from mooncake.app.cluster.role_main import Node
from mooncake.config import Config
from mooncake.errors import ConfigError
from prefill_node.node import PrefillNode

WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
LONG_ROPE = {
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    "original_max_position_embeddings": 64,
}


async def test_each_setting_that_nodes_must_share_is_compared_before_a_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mooncake.engine.hosting.host")
    write_tiny_model(tmp_path / "model")
    write_tiny_model(tmp_path / "trained", seed=1)
    write_tiny_model(tmp_path / "deep", num_hidden_layers=3)
    write_adapter(tmp_path / "adapter", tiny_model("llama"))
    (tmp_path / "keys.json").write_text(json.dumps({"model": "m", "tokens": 64, "exponents": [[[1] * 4] * 2] * 2}))
    cluster = InProcessCluster(tmp_path / "model", "block.tokens=8", "model.kv_dtype=int8", "model.max_model_len=128")
    await cluster.start()

    async def refused(build: Callable[[Config], Node], name: str, *settings: str) -> str:
        with pytest.raises(ConfigError) as error:
            await cluster.join(build, name, *settings)
        assert error.value.message.startswith(f"node '{name}' has ")
        assert "reading" not in caplog.text, "with a large model that is minutes"
        return error.value.message

    try:
        for build, name in ((PrefillNode, "prefill-1"), (DecodeNode, "decode-1")):
            other = "where this cluster has"
            for setting, words in (
                ("model.dtype=bfloat16", f"model.dtype = bfloat16 {other} float32"),
                ("model.kv_dtype=float32", f"model.kv_dtype = float32 {other} int8"),
                ("block.tokens=16", f"block.tokens = 16 {other} 8"),
                ("model.weights=int8", f"model.weights = int8 {other} plain"),
                (f"model.key_scales={tmp_path / 'keys.json'}", f"{other} none"),
                (f"model.adapters=['mine={tmp_path / 'adapter'}']", f"{other} none"),
                (f"model.path={tmp_path / 'trained'}", "weights = "),
                (f"model.path={tmp_path / 'deep'}", f"layers = 3 {other} 2"),
                ("model.max_model_len=64", "a context of 64 tokens, this cluster 128"),
            ):
                assert words in await refused(build, name, setting)
        for setting, words in (
            ("model.kv_dtype=bfloat16", "model.kv_dtype = bfloat16"),
            ("block.tokens=16", "block.tokens = 16"),
            ("store.block_bytes=64", "slots of 64 bytes, too few for this cluster's blocks of"),
        ):
            assert words in await refused(build_store, "store-1", setting)
        stores = [
            await cluster.join(build_store, "store-2"),
            await cluster.join(build_store, "store-3", "store.block_bytes=1_000_000"),  # it may be for others, too
        ]
        assert await cluster.states() == {"store-2": "live", "store-3": "live"}
        await asyncio.gather(*(store.stop() for store in stores))
        node = await cluster.join(PrefillNode, "prefill-2")
        assert "reading model for cpu" in caplog.text
        await node.stop()
    finally:
        await cluster.stop()


@pytest.mark.parametrize(
    ("family", "shape", "setting", "words"),
    [
        ("llama", {}, "model.keep_hidden=[1]", r"model.keep_hidden = \[1\] where this cluster has \[\]"),
        ("gemma3_text", WINDOWS, "block.windows=false", "block.windows = whole blocks where this cluster has groups"),
        ("phi3", LONG_ROPE, "model.max_model_len=128", "weights = "),
    ],
)
async def test_those_of_some_models_are_compared_too(
    family: str, shape: dict[str, object], setting: str, words: str, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, family, **shape)
    cluster = InProcessCluster(tmp_path, "block.tokens=8")
    await cluster.start()
    try:
        with pytest.raises(ConfigError, match=words):
            await cluster.join(PrefillNode, "prefill-1", setting)
    finally:
        await cluster.stop()


async def test_a_node_that_no_conductor_answers_loads_its_model_and_is_refused_when_it_joins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    cluster = InProcessCluster(tmp_path, "block.tokens=8", f"conductor.grpc_port={port}")
    settings = [f"node.conductor=127.0.0.1:{port}", "block.tokens=16"]
    node = await cluster.join(PrefillNode, "prefill-1", *settings)
    await cluster.start()
    try:
        async with asyncio.timeout(10):
            while "node 'prefill-1' has block.tokens = 16 where this cluster has 8" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await cluster.states() == {}
    finally:
        await node.stop()
        await cluster.stop()


async def test_a_node_that_no_transport_would_reach_does_not_start(tmp_path: Path) -> None:
    """The cluster was ready, and failed every request."""
    probe = TransferEngine("probe", ("rdma",))
    probe.close()
    if not probe.unavailable():
        pytest.skip("this machine has verbs")
    write_tiny_model(tmp_path)
    cluster = InProcessCluster(tmp_path, "block.tokens=8")
    await cluster.start()
    try:
        for build, name in ((PrefillNode, "prefill-1"), (DecodeNode, "decode-1"), (build_store, "store-1")):
            with pytest.raises(ConfigError, match=r"none of transfer\.transports can be used here \(rdma: "):
                await cluster.join(build, name, "transfer.transports=['rdma']")
    finally:
        await cluster.stop()
