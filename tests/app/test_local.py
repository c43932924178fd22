"""A local cluster comes up, notices who dies, brings them back when told to, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from descriptors import no_file_descriptors
from forked_nodes import fork_module
from live import small_config
from waiting import is_running, until

from mooncake.app.cluster.local import LocalCluster, NodeProcess
from mooncake.app.cluster.preflight import available_cores
from mooncake.client import Client
from mooncake.config import load_config
from mooncake.errors import ConfigError, ModelError, NodeUnavailable
from mooncake.sampling_params import SamplingParams

FEW = SamplingParams(max_tokens=3, temperature=0.0)


def ask(cluster: LocalCluster) -> str:
    with Client(cluster.grpc_address) as client:
        return client.generate("The sky is", sampling=FEW, timeout_s=60).text


def state_of(pid: int) -> str:
    """The kernel's letter for the process state; "" for no process."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.slow
async def test_it_answers_and_leaves_nothing_behind() -> None:
    told: list[str] = []
    shared = [f"{role}.threads={available_cores()}" for role in ("prefill", "decode")]
    async with LocalCluster(small_config(*shared), tell=told.append) as cluster:
        assert set(cluster.pids) == {"conductor", "store-0", "prefill-0", "decode-0"}
        assert any(sentence.startswith("waiting for") for sentence in told)
        file = cluster.config_file
        assert load_config(file) == cluster.config
        assert await asyncio.to_thread(ask, cluster)
        assert "node.decode_share=0.33" in command_of(cluster.pids["decode-0"])
        pids = list(cluster.pids.values())
        port = cluster.config.conductor.grpc_port
    assert all(not is_running(pid) for pid in pids)
    assert not file.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.slow
async def test_a_process_that_dies_comes_back_and_serves() -> None:
    told: list[str] = []
    async with LocalCluster(small_config(), restart=True, tell=told.append) as cluster:
        before = await asyncio.to_thread(ask, cluster)
        for node_id in ("decode-0", "store-0"):
            old = cluster.pids[node_id]
            os.kill(old, signal.SIGKILL)
            assert await asyncio.to_thread(ask, cluster) == before, "a request waits for the node that is to come back"
            await until(lambda node_id=node_id, old=old: cluster.pids.get(node_id, old) != old, 60.0)
            assert any(f"{node_id} was killed by SIGKILL; starting it again" in sentence for sentence in told)
            await cluster.wait_ready()


async def test_a_process_that_cannot_be_started_again_is_tried_until_it_can() -> None:
    told: list[str] = []
    cluster = LocalCluster(small_config(), restart=True, tell=told.append)
    try:
        await cluster.start()
        old = cluster.pids["store-0"]
        with no_file_descriptors():
            os.kill(old, signal.SIGKILL)
            await until(lambda: any(line.startswith("cannot start store-0: Too many open") for line in told), 60.0)
        await until(lambda: cluster.pids.get("store-0", old) != old, 60.0)
    finally:
        await cluster.stop()


@pytest.mark.slow
async def test_what_hinders_a_restart_for_a_while_does_not_end_the_cluster() -> None:
    told: list[str] = []
    async with LocalCluster(small_config(), restart=True, tell=told.append) as cluster:
        before = await asyncio.to_thread(ask, cluster)
        port = cluster.config.conductor.grpc_port
        os.kill(cluster.pids["conductor"], signal.SIGKILL)
        await until(lambda: "conductor" not in cluster.pids, 60.0)
        with socket.create_server(("127.0.0.1", port)):
            await until(lambda: sum("conductor ended with exit code 2" in sentence for sentence in told) >= 2, 60.0)
        await cluster.wait_ready()
        assert await asyncio.to_thread(ask, cluster) == before


@pytest.mark.slow
async def test_a_console_that_takes_no_more_words_costs_no_node() -> None:
    is_full = False

    def tell(text: str) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    config = small_config()
    async with LocalCluster(config, restart=True, log_level="DEBUG", tell=tell, tell_log=tell) as cluster:
        is_full = True
        before = await asyncio.to_thread(ask, cluster)
        old = cluster.pids["store-0"]
        os.kill(old, signal.SIGKILL)
        await until(lambda: cluster.pids.get("store-0", old) != old, 60.0)
        await cluster.wait_ready()
        assert await asyncio.to_thread(ask, cluster) == before
        assert all(len(child.last_lines) > 1 for child in cluster.children.values()), "logs are read on"


async def test_nothing_is_started_again_while_the_cluster_stops() -> None:
    told: list[str] = []
    cluster = LocalCluster(small_config(), restart=True, tell=told.append)
    try:
        await cluster.start()
        conductor, old = cluster.pids["conductor"], cluster.pids["store-0"]
        os.kill(old, signal.SIGKILL)
        await until(lambda: any("starting it again" in sentence for sentence in told), 60.0)
        os.kill(conductor, signal.SIGSTOP)  # so that stopping takes longer than the pause
        await until(lambda: state_of(conductor) == "T", 60.0)
        stopping = asyncio.create_task(cluster.stop())
        await asyncio.sleep(0.6)
        process = cluster.children["store-0"].process
        os.kill(conductor, signal.SIGCONT)
        await stopping
    finally:
        await cluster.stop()
    assert process is not None
    assert process.pid == old


@pytest.mark.slow
async def test_a_process_that_dies_for_good_is_told() -> None:
    async with LocalCluster(small_config()) as cluster:
        os.kill(cluster.pids["prefill-0"], signal.SIGKILL)
        error = await asyncio.wait_for(cluster.wait_fatal(), 20)
        assert error.message == "prefill-0 was killed by SIGKILL"


@pytest.mark.slow
async def test_a_node_that_hangs_is_ended_all_the_same() -> None:
    cluster = LocalCluster(small_config())
    async with cluster:
        pid = cluster.pids["decode-0"]
        os.kill(pid, signal.SIGSTOP)
        start_s = time.monotonic()
    assert not is_running(pid)
    assert time.monotonic() - start_s < 30


async def test_a_node_that_cannot_start_says_why_in_one_sentence() -> None:
    cluster = LocalCluster(small_config("decode.kv_gb=0.001"), start_module=fork_module)
    with pytest.raises(ConfigError) as caught:
        async with cluster:
            pass
    assert "decode-0 ended with exit code 2: decode: " in caught.value.message
    assert "kv_gb" in caught.value.message
    assert cluster.pids == {}


async def test_what_can_be_known_beforehand_starts_no_process() -> None:
    async def start_module(*_: object) -> NodeProcess:
        raise AssertionError("it starts a process")

    for overrides, error, sentence in (
        (["model.path=/nowhere"], ModelError, "/nowhere"),
        (["store.dram_gb=1e6"], ConfigError, "GB of memory"),
        (["model.adapters=['a=/nope']"], ModelError, "the adapter a: cannot read /nope/adapter_config.json: No such"),
        (["conductor.policy=nope"], ConfigError, "conductor.policy must be one of .* got 'nope'"),
        (["model.generation_overrides='{\"top_p\": 2}'"], ConfigError, "top_p must be between 0 and 1, got 2"),
    ):
        with pytest.raises(error, match=sentence):
            async with LocalCluster(small_config(*overrides), start_module=start_module):
                pass


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group whose processes have 40 MB."""
    group = Path(f"/sys/fs/cgroup/memory/mooncake-{secrets.token_hex(4)}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(40 << 20))
        yield group
        ends_at = time.monotonic() + 20
        while (group / "cgroup.procs").read_text():
            assert time.monotonic() < ends_at, "a process outlives its cluster"
            time.sleep(0.01)
    finally:
        group.rmdir()


async def test_a_node_that_the_system_kills_for_lack_of_memory_is_told_as_such(small_group: Path) -> None:
    grow = f"open('{small_group}/cgroup.procs', 'w').write('0'); bytearray(1 << 30)"

    async def start_module(module: str, *_: object) -> NodeProcess:
        work = grow if module == "decode_node" else "input()"
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            work,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    with pytest.raises(
        NodeUnavailable, match="decode-0 was killed by SIGKILL, as the system does when memory runs out"
    ):
        async with LocalCluster(small_config(), start_module=start_module):
            pass


async def test_waiting_has_an_end() -> None:
    with pytest.raises(NodeUnavailable, match=r"not ready after 0\.05 s: still waiting for"):
        async with LocalCluster(small_config(), ready_timeout_s=0.05):
            pass
