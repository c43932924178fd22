"""Adapters that are loaded, used and unloaded while nodes join, leave and fail: over gRPC, with nodes whose engines can
be held up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drive import ask, wait_running
from greedy import greedy
from in_process import InProcessCluster, held
from tiny_lora import write_adapter
from tiny_model import write_tiny_model
from waiting import until

from decode_node.node import DecodeNode
from mooncake.adapters import Adapter, open_adapter
from mooncake.engine.hosting.live_adapters import LiveAdapters
from mooncake.engine_node import EngineNode
from mooncake.errors import InvalidRequest, ModelError, MooncakeError, NodeUnavailable, NotFound
from mooncake.rpc import cluster_pb2 as pb
from mooncake.rpc.cluster_pb2_grpc import ClusterStub
from mooncake.rpc.errors import error_from_rpc
from prefill_node.node import PrefillNode

NEW = 12
PROMPT = np.random.default_rng(5).integers(3, 320, 41).tolist()


class Cluster(InProcessCluster):
    """With a node of each role, and adapters "a" and "b" in folders of their names."""

    def __init__(self, folder: Path, merged: dict[str, Any]) -> None:
        settings = ("block.tokens=8", "decode.max_sequences=3", "conductor.node_timeout_s=1")
        super().__init__(folder, "conductor.max_loaded_adapters=4", *settings)
        self.folder = folder
        self.merged = merged
        self.nodes: list[EngineNode] = []

    async def add(self, kind: type[PrefillNode] | type[DecodeNode], name: str) -> EngineNode:
        node = await self.join(kind, name)
        self.nodes.append(node)
        return node

    async def load(self, name: str, folder: str = "") -> None:
        request = pb.LoadAdapterRequest(name=name, path=str(self.folder / (folder or name)))
        with ours():
            await ClusterStub(self.channel).LoadAdapter(request, timeout=60)

    async def unload(self, name: str) -> None:
        with ours():
            await ClusterStub(self.channel).UnloadAdapter(pb.UnloadAdapterRequest(name=name), timeout=10)

    def expected(self, name: str, num_tokens: int = NEW) -> list[int]:
        return greedy(self.merged[name], PROMPT, num_tokens)

    def digest(self, name: str) -> str:
        return open_adapter(name, str(self.folder / name)).digest


@contextlib.contextmanager
def ours() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise error_from_rpc(error) from None  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tiny")
    base = write_tiny_model(folder, head_dim=16)
    return folder, {name: write_adapter(folder / name, base, seed=seed) for seed, name in enumerate("ab")}


@pytest.fixture
async def cluster(models: tuple[Path, dict[str, Any]]) -> AsyncIterator[Cluster]:
    cluster = Cluster(*models)
    await cluster.start()
    await cluster.add(PrefillNode, "prefill-0")
    await cluster.add(DecodeNode, "decode-0")
    yield cluster
    for node in cluster.nodes:
        await node.stop()
    await cluster.stop()


@pytest.mark.timeout(60)
async def test_what_uses_an_unloaded_adapter_is_finished_and_then_its_memory_is_free(cluster: Cluster) -> None:
    await cluster.load("a")
    decode = cluster.nodes[1].host
    with held(cluster.nodes[1]):
        asking = asyncio.create_task(ask(cluster.channel, PROMPT, NEW, model="a"))
        await wait_running(cluster.channel, 1)
        await cluster.unload("a")
        with pytest.raises(NotFound, match="'a' is not served here"):
            await ask(cluster.channel, PROMPT, NEW, model="a")
        await asyncio.sleep(0.5)  # several heartbeats
        assert decode.adapters.has_adapter(cluster.digest("a")), "a request that came before still needs it"
    assert (await asking).tokens == cluster.expected("a")
    await cluster.load("b")
    for node in cluster.nodes:
        await until(lambda host=node.host: not host.adapters.has_adapter(cluster.digest("a")))
        await until(lambda host=node.host: len(host.adapters._table._taken) == 1)
    assert (await ask(cluster.channel, PROMPT, NEW, model="b")).tokens == cluster.expected("b")
    await cluster.load("a")
    for node in cluster.nodes:
        assert node.host.adapters._table._taken == {0, 1}, "the place is used again"
    assert (await ask(cluster.channel, PROMPT, NEW, model="a")).tokens == cluster.expected("a")


@pytest.mark.timeout(60)
async def test_a_node_that_cannot_load_it_gets_no_request_for_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.load("a")

    async def cannot(adapters: LiveAdapters, adapter: Adapter) -> None:
        raise ModelError(f"no disk for {adapter.name}")

    monkeypatch.setattr(LiveAdapters, "load_adapter", cannot)
    await cluster.add(DecodeNode, "decode-1")
    with held(cluster.nodes[1]):
        asking = [asyncio.create_task(ask(cluster.channel, PROMPT, NEW, model="a")) for _ in range(3)]
        await wait_running(cluster.channel, 3)
        plain = await ask(cluster.channel, PROMPT, NEW, timeout=20)
        assert plain.timings.decode_node == "decode-1", "the other one is full"
        assert not any(task.done() for task in asking)
    for answer in await asyncio.gather(*asking):
        assert answer.tokens == cluster.expected("a") != plain.tokens
        assert answer.timings.decode_node == "decode-0"
    with pytest.raises(InvalidRequest, match=r"node \S+: no disk for b"):
        await cluster.load("b")
    with pytest.raises(NotFound):
        await ask(cluster.channel, PROMPT, NEW, model="b")
    monkeypatch.undo()
    await cluster.load("b")
    assert (await ask(cluster.channel, PROMPT, NEW, model="b")).tokens == cluster.expected("b")


@pytest.mark.timeout(60)
async def test_a_node_that_ends_half_way_is_not_waited_for(cluster: Cluster) -> None:
    leaving = await cluster.add(DecodeNode, "decode-1")
    began = asyncio.Event()

    async def never(adapter: Adapter) -> None:
        began.set()
        await asyncio.Event().wait()

    leaving.host.adapters.load_adapter = never  # type: ignore[method-assign]
    loading = asyncio.create_task(cluster.load("a"))
    await began.wait()
    with pytest.raises(InvalidRequest, match="'a' is being loaded"):
        await cluster.load("a")
    with pytest.raises(NotFound):
        await ask(cluster.channel, PROMPT, NEW, model="a")
    assert not loading.done()
    await leaving.stop()
    await loading
    assert (await ask(cluster.channel, PROMPT, NEW, model="a")).tokens == cluster.expected("a")


@pytest.mark.timeout(60)
async def test_without_a_node_of_each_role_nothing_is_loaded(models: tuple[Path, dict[str, Any]]) -> None:
    cluster = Cluster(*models)
    await cluster.start()
    try:
        await cluster.add(PrefillNode, "prefill-0")
        with pytest.raises(NodeUnavailable, match="has no decode node"):
            await cluster.load("a")
    finally:
        await cluster.nodes[0].stop()
        await cluster.stop()


@pytest.mark.timeout(60)
async def test_a_load_whose_caller_goes_away_is_given_up(cluster: Cluster) -> None:
    began = asyncio.Event()

    async def never(adapter: Adapter) -> None:
        began.set()
        await asyncio.Event().wait()

    adapters = cluster.nodes[1].host.adapters
    real, adapters.load_adapter = adapters.load_adapter, never  # type: ignore[method-assign]
    loading = asyncio.create_task(cluster.load("a"))
    await began.wait()
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    adapters.load_adapter = real  # type: ignore[method-assign]
    prefill = cluster.nodes[0].host
    await until(lambda: not prefill.adapters.has_adapter(cluster.digest("a")))
    with pytest.raises(MooncakeError):
        await ask(cluster.channel, PROMPT, NEW, model="a")
