"""The same nodes as Ray actors: they answer, and Ray brings back the one that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import SMALL, children_of, command_of, small_config

from mooncake.app.cluster.preflight import free_port
from mooncake.app.cluster.ray_cluster import RayCluster, needs_of, wait_at_most
from mooncake.app.cluster.ray_head import PRIVATE_ENV, PrivateRay, check_answers, is_loopback
from mooncake.client import Client, GenerateResult
from mooncake.errors import ConfigError, NodeUnavailable
from mooncake.sampling_params import SamplingParams

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
ROOT = Path(__file__).parents[2]
READY = "Ctrl-C stops the cluster."
PROMPT = "The first three planets are"


def ask(address: str) -> GenerateResult:
    with Client(address) as client:
        return client.generate(PROMPT, sampling=SamplingParams(max_tokens=8, temperature=0.0), timeout_s=60)


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
async def test_ray_starts_the_nodes_and_brings_back_one_that_was_killed() -> None:
    importlib.import_module("ray")  # by somebody before us: Ray reads its settings while it is imported
    told: list[str] = []
    config = small_config("cluster.decode=2", "prefill.kv_gb=0.3", "decode.kv_gb=0.3", "store.dram_gb=0.3")
    async with RayCluster(config, gcs_port=free_port("127.0.0.1"), tell=told.append) as cluster:
        assert reached_at() == {"127.0.0.1"}
        before = await asyncio.to_thread(ask, cluster.grpc_address)
        assert before.usage.completion_tokens == 8

        pids = await cluster.pids()
        killed = before.timings.decode_node
        os.kill(pids[killed], signal.SIGKILL)
        moved = await asyncio.to_thread(ask, cluster.grpc_address)
        assert moved.text == before.text
        assert moved.timings.decode_node != killed

        back = await restarted(cluster, killed, pids[killed])
        assert back not in pids.values()
        await cluster.wait_ready()
        assert (await asyncio.to_thread(ask, cluster.grpc_address)).text == before.text

        watching = asyncio.create_task(cluster.watch())
        await asyncio.sleep(1)
        os.kill(pids["conductor"], signal.SIGKILL)
        with await holding(cluster.config.conductor.grpc_port):
            await asyncio.sleep(10)  # Ray tries, and tries again
        await cluster.wait_ready(60)
        assert (await asyncio.to_thread(ask, cluster.grpc_address)).text == before.text
        await until(lambda: any(sentence.startswith("conductor is back") for sentence in told))
        watching.cancel()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", cluster.config.conductor.grpc_port), timeout=5)


async def holding(port: int) -> socket.socket:
    """A socket bound to the port as soon as it is free."""
    async with asyncio.timeout(20):
        while True:
            try:
                return socket.create_server(("127.0.0.1", port))
            except OSError:
                await asyncio.sleep(0.005)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
async def test_a_start_that_is_given_up_leaves_no_ray_behind() -> None:
    port = free_port("127.0.0.1")
    before = private_folders()
    for patience_s in (1.0, 6.0):  # while Ray starts, while its actors do
        cluster = RayCluster(small_config(), gcs_port=port)
        starting = asyncio.create_task(cluster.__aenter__())
        await asyncio.sleep(patience_s)
        starting.cancel()
        async with asyncio.timeout(30):
            await asyncio.gather(starting, return_exceptions=True)
        assert starting.cancelled()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        assert private_folders() == before


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting decode-0", READY])
def test_the_script_ends_in_order_when_it_is_told_to(moment: str) -> None:
    before = private_folders()
    with script_until(moment) as process:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=40)
        assert rest.splitlines()[-1] == "stopped"
        assert "SIGTERM" not in rest
        assert process.returncode == 0
    assert private_folders() == before


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_the_script_ends_with_the_ray_that_it_lives_on() -> None:
    before = private_folders()
    with script_until(READY) as process:
        [head] = [pid for pid in descendants(process.pid) if "gcs_server" in command_of(pid).partition("\0")[0]]
        os.kill(head, signal.SIGKILL)
        rest, _ = process.communicate(timeout=60)
        assert rest.splitlines()[-1].startswith("ray_cluster: no Ray answers at 127.0.0.1:")
        assert process.returncode == 1
    assert private_folders() == before


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_two_private_rays_share_a_machine_and_neither_lets_strangers_wait() -> None:
    with contextlib.ExitStack() as stack:
        rays = [PrivateRay() for _ in range(2)]
        for ray in rays:
            stack.callback(ray.stop)
        address, other = (ray.start(num_cpus=1) for ray in rays)  # this process then has the second one's token
        assert address != other
        check_answers(other)
        with pytest.raises(NodeUnavailable, match=f"the Ray at {address} refuses our token"):
            check_answers(address)

        stranger = {name: value for name, value in os.environ.items() if name not in PRIVATE_ENV[:2]}
        command = [sys.executable, str(ROOT / "deploy" / "ray_cluster.py"), "--address"]
        for to_join, settings, sentence in (
            (address, {}, f"the Ray at {address} wants a token (RAY_AUTH_MODE=token"),
            (address, {"RAY_AUTH_MODE": "token", "HOME": "/nonexistent"}, "Ray couldn't find an authentication token"),
            ("auto", {}, "wants a token (RAY_AUTH_MODE=token"),  # either of the two
        ):
            began_s = time.monotonic()
            done = subprocess.run(
                [*command, to_join], env=stranger | settings, capture_output=True, text=True, timeout=60, check=False
            )
            assert time.monotonic() - began_s < 15  # Ray itself tries for 20 s
            assert sentence in done.stderr and done.stderr.count("\n") == 1
            assert done.returncode == 1


@contextlib.contextmanager
def script_until(moment: str) -> Iterator[subprocess.Popen[str]]:
    """deploy/ray_cluster.py in a process of its own, once it has said this."""
    settings = [part for setting in SMALL for part in ("--set", setting)]
    command = [sys.executable, "-u", str(ROOT / "deploy" / "ray_cluster.py"), *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            assert any(moment in line for line in process.stdout)
            yield process
        finally:
            process.kill()


def descendants(pid: int) -> list[int]:
    try:
        children = children_of(pid)
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return []
    return [*children, *(pid for child in children for pid in descendants(child))]


def private_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("mr-*"))


def reached_at() -> set[str]:
    """The addresses on which the private Ray listens."""
    import ray

    return {node["NodeManagerAddress"] for node in ray.nodes()}


async def restarted(cluster: RayCluster, node_id: str, old_pid: int) -> int:
    """The actor's new process, once Ray has started one."""
    from ray.exceptions import ActorUnavailableError

    async with asyncio.timeout(60):
        while True:
            try:
                pid = (await cluster.pids())[node_id]
            except ActorUnavailableError:
                pid = old_pid
            if pid != old_pid:
                return pid
            await asyncio.sleep(0.1)


@needs_ray
def test_a_port_that_is_taken_is_told_before_ray_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} is taken by process {os.getpid()} .* RAY_ADDRESS"):
            PrivateRay(port).start(num_cpus=1)


@needs_ray
@pytest.mark.parametrize("listens", [False, True])
async def test_a_ray_that_does_not_answer_is_told_of_before_ray_waits_for_it(listens: bool) -> None:
    port = free_port("127.0.0.1")
    with socket.create_server(("", port)) if listens else contextlib.nullcontext():
        cluster = RayCluster(small_config(), ray_address=f"127.0.0.1:{port}")
        async with asyncio.timeout(30):
            with pytest.raises(NodeUnavailable, match=f"no Ray answers at 127.0.0.1:{port}"):
                async with cluster:
                    pass


@needs_ray
async def test_cores_are_not_pinned_where_ray_places_the_nodes() -> None:
    cluster = RayCluster(small_config("cluster.pin=true"), gcs_port=free_port("127.0.0.1"))
    with pytest.raises(ConfigError, match=r"cluster\.pin"):
        async with cluster:
            pass


def test_loopback_is_known_by_number_and_by_name() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "node-1.example"))


def test_a_node_asks_for_the_gpus_that_it_computes_on() -> None:
    for config, gpus in (
        (small_config("decode.device=cuda", "prefill.tensor_parallel=2"), {"decode": 1}),
        (small_config("prefill.device=cuda", "prefill.tensor_parallel=4"), {"prefill": 4}),
    ):
        roles = ("conductor", "store", "prefill", "decode")
        assert {role: need["GPU"] for role in roles if "GPU" in (need := needs_of(config, role))} == gpus


def test_leaving_a_ray_that_no_longer_answers_takes_no_longer_than_it_may() -> None:
    forever, done = threading.Event(), threading.Event()
    wait_at_most(0.05, forever.wait)
    wait_at_most(60.0, done.set)
    assert done.is_set() and not forever.is_set()
    forever.set()
