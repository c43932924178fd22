"""A node as a Ray actor. Tokens and KV do not pass through Ray: the actor's methods only report and stop."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import threading
import time
from collections.abc import Coroutine
from typing import TypeVar, cast

import msgspec
from msgspec.structs import replace

from mooncake.app.cluster.last_resort import LoopWatch, end_when_crippled
from mooncake.app.cluster.ray_head import is_loopback
from mooncake.app.cluster.role_main import Node, raise_file_limit, set_up_logging
from mooncake.config import Config
from mooncake.errors import MooncakeError
from mooncake.threads import Threads
from mooncake.types import Role

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 2.0  # between two attempts to restart a node
NODE_BUILDERS = {
    "conductor": ("conductor.__main__", "build"),
    "store": ("kvstore.__main__", "build"),
    "prefill": ("prefill_node.node", "PrefillNode"),
    "decode": ("decode_node.node", "DecodeNode"),
}
SWITCHABLE = ("mooncake.app.cluster.compute_node.node", "ComputeNode")


class RayNode:
    """The body of an actor: one node on its own event loop. Ray runs ``__init__`` again after a crash; the node then
    registers under its old name and a new incarnation."""

    def __init__(self, role: str, config_json: bytes, log_level: str) -> None:
        config = msgspec.json.decode(config_json, type=Config)
        if not is_loopback(config.conductor.host):
            import ray

            host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
            config = replace(config, node=replace(config.node, host=host, advertise=""))
        set_up_logging(config.node.id, log_level)
        raise_file_limit()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="node", daemon=True).start()
        self._failure = ""
        try:
            self._node: Node = self._run(_started(role, config))
        except MooncakeError as error:
            if was_alive():  # a taken port or too little memory may pass: Ray tries again once this process has ended
                log.error("%s cannot start again: %s", config.node.id, error.message)
                time.sleep(RETRY_S)
                os._exit(1)
            self._failure = error.message  # returned by `failure`: Ray would bury it in a traceback
        else:
            if config.node.step_timeout_s:
                LoopWatch(self._loop)
            self._ending = asyncio.run_coroutine_threadsafe(_end_when_fatal(self._node), self._loop)

    def failure(self) -> str:
        """Why the node did not start; "" if it did."""
        return self._failure

    def address(self) -> str:
        return self._node.control_address

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        if not self._failure:
            self._run(self._node.stop())

    def _run(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def was_alive() -> bool:
    """Whether Ray has restarted this actor."""
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


async def _started(role: str, config: Config) -> Node:
    loop = asyncio.get_running_loop()
    end_when_crippled(loop)
    loop.set_default_executor(Threads(name="aside"))
    can_switch = config.cluster.switchable and role in (Role.PREFILL, Role.DECODE)
    module, name = SWITCHABLE if can_switch else NODE_BUILDERS[role]
    node = cast(Node, getattr(importlib.import_module(module), name)(config))
    await node.start()
    return node


async def _end_when_fatal(node: Node) -> None:
    log.error("%s", await node.wait_fatal())
    os._exit(1)
