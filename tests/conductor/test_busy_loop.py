"""A conductor whose event loop is slow, because far more is asked of it than it can do."""

from __future__ import annotations

import asyncio
import time

from conductor.core import Core
from conductor.model_facts import ModelFacts
from conductor.placement.view import Shape
from conductor.registry import NodeInfo
from kvstore.metadata.memory import MemoryDirectory
from mooncake.config import load_config
from mooncake.types import Role

FACTS = ModelFacts("kv", Shape(block_tokens=64, block_bytes=1024, num_layers=2), eos_ids=(1,))


async def test_a_node_that_a_busy_conductor_hears_late_is_not_gone() -> None:
    settings = ["conductor.node_timeout_s=1.8", "conductor.heartbeat_interval_s=0.6", "health.watch=false"]
    core = Core(load_config(None, settings), FACTS, MemoryDirectory())
    await core.start()
    try:
        core.register(NodeInfo("p0", Role.PREFILL, 1, "127.0.0.1:9", None, "kv", 64))
        for _ in range(20):  # 3 s; between two heartbeats there is time for several passes
            time.sleep(0.15)  # noqa: ASYNC251
            await asyncio.sleep(0)
        assert core.registry.get("p0") is not None
        async with asyncio.timeout(10):
            while core.registry.get("p0") is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        await core.stop()
