"""A small live cluster for tests: real processes, little memory, one thread per node."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from forked_nodes import fork_module

from mooncake.app.cluster.local import LocalCluster
from mooncake.config import Config, load_config

SMALL = (
    "conductor.http_port=0",
    "conductor.grpc_port=0",
    "conductor.heartbeat_interval_s=0.1",
    "prefill.kv_gb=0.5",
    "decode.kv_gb=0.5",
    "store.dram_gb=0.5",
    "prefill.threads=1",
    "decode.threads=1",
)


def small_config(*overrides: str) -> Config:
    return load_config(None, [*SMALL, *overrides])


@contextlib.contextmanager
def running_cluster(config: Config, restart: bool = False) -> Iterator[LocalCluster]:
    """A cluster that outlives the event loops of tests: its watchers run on a loop in a separate thread."""
    started: Future[LocalCluster] = Future()
    loop_and_stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def live() -> None:
        stop = asyncio.Event()
        loop_and_stop.append((asyncio.get_running_loop(), stop))
        try:
            async with LocalCluster(config, restart=restart, start_module=fork_module) as cluster:
                started.set_result(cluster)
                await stop.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(live()), name="cluster")
    thread.start()
    try:
        yield started.result(timeout=180)
    finally:
        loop, stop = loop_and_stop[0]
        with contextlib.suppress(RuntimeError):  # the loop ended with an error
            loop.call_soon_threadsafe(stop.set)
        thread.join()


def stages_of(node: int) -> list[int]:
    """The processes of a node's pipeline."""
    return workers_of(node, "pipeline_stage")


def workers_of(node: int, module: str) -> list[int]:
    """The processes that run ``module`` for a node, started by any of its threads."""
    return [pid for pid in children_of(node) if module in command_of(pid)]


def children_of(pid: int) -> list[int]:
    """The processes that any of its threads has started."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            children += map(int, (task / "children").read_text().split())
    return children


def command_of(pid: int) -> str:
    """Its command line, or nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
