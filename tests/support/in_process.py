"""A cluster of real nodes in the test's own process, where their engines can be delayed. Sockets are real, too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
from drive import status

from conductor.node import ConductorNode
from mooncake.app.cluster.directory import open_directory
from mooncake.app.cluster.role_main import Node
from mooncake.config import Config, load_config
from mooncake.engine_node import EngineNode

N = TypeVar("N", bound=Node)


@contextlib.contextmanager
def held(node: EngineNode) -> Iterator[None]:
    """Block the node's engine until the end of the context."""
    go_on = threading.Event()
    node.host.thread.call(lambda engine: go_on.wait(60))
    try:
        yield
    finally:
        go_on.set()


class InProcessCluster:
    """``start`` the conductor, ``join`` nodes (the caller stops them), then ``stop``."""

    def __init__(self, model: Path, *settings: str) -> None:
        self._settings = [
            f"model.path={model}",
            "conductor.grpc_port=0",
            "conductor.http_port=0",
            "conductor.heartbeat_interval_s=0.1",
            "conductor.max_tail_tokens=0",  # the decode node never computes a prompt
            "prefill.kv_gb=0.01",
            "decode.kv_gb=0.01",
            "store.dram_gb=0.01",
            *settings,
        ]
        self._stack = contextlib.AsyncExitStack()
        self.channel: grpc.aio.Channel

    async def start(self) -> None:
        conductor = ConductorNode(load_config(None, self._settings), open_directory)
        await conductor.start()
        self._stack.push_async_callback(conductor.stop)
        self._settings.append(f"node.conductor={conductor.control_address}")
        self.channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(conductor.control_address))

    async def join(self, build: Callable[[Config], N], name: str, *settings: str) -> N:
        """Start a node; ``name`` is a role, a dash and a number."""
        role = name.partition("-")[0]
        node = build(load_config(None, [*self._settings, f"node.id={name}", f"node.role={role}", *settings]))
        await node.start()
        return node

    async def states(self) -> dict[str, str]:
        return {node.info.node_id: node.state for node in (await status(self.channel)).nodes}

    async def stop(self) -> None:
        await self._stack.aclose()
