"""Adapters that are loaded and unloaded while a cluster of real processes serves: exact, never in each other's KV, and
back on every node that is restarted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import commands
import grpc
import httpx
import numpy as np
import pytest
import pytest_asyncio
from drive import status, wait_running
from greedy import greedy
from live import running_cluster, small_config
from tiny_lora import write_adapter
from tiny_model import tiny_model, write_tiny_model

from mooncake.app.cluster.local import LocalCluster

NEW = 12
PROMPT = np.random.default_rng(5).integers(3, 320, 41).tolist()


@dataclass
class Front:
    """The cluster's HTTP."""

    cluster: LocalCluster
    http: httpx.AsyncClient
    folder: Path

    async def load(self, name: str, path: Path | str, **more: Any) -> httpx.Response:
        return await self.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)} | more)

    async def unload(self, name: str) -> httpx.Response:
        return await self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    async def names(self) -> list[str]:
        return [card["id"] for card in (await self.http.get("/v1/models")).json()["data"]]

    async def ask(self, name: str) -> tuple[list[int], int]:
        """The tokens, and how many of the prompt's were cached."""
        fields = {"model": name, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
        more = {"ignore_eos": True, "return_token_ids": True}
        answer = await self.http.post("/v1/completions", json=fields | more)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        return body["choices"][0]["token_ids"], body["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def until_named(self, name: str) -> None:
        """Also by a conductor that is still starting."""
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if name in await self.names():
                        return
                await asyncio.sleep(0.1)

    async def until_loads(self, counts: dict[str, int]) -> None:
        """So many loads on each node, failed ones included."""
        async with grpc.aio.insecure_channel(self.cluster.grpc_address) as channel, asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.RpcError):
                    nodes = {node.info.node_id: len(node.adapters) for node in (await status(channel)).nodes}
                    if nodes.items() >= counts.items():
                        return
                await asyncio.sleep(0.05)

    async def kill(self, child: str) -> None:
        """And wait until it has been started anew."""
        old = self.cluster.pids[child]
        os.kill(old, signal.SIGKILL)
        async with asyncio.timeout(60):
            while self.cluster.pids.get(child, old) == old:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a model and adapters, and the model with each of them merged."""
    folder = tmp_path_factory.mktemp("tiny")
    base = write_tiny_model(folder, head_dim=16)
    merged = {name: write_adapter(folder / name, base, seed=seed) for seed, name in enumerate(("sql", "poems"))}
    write_adapter(folder / "wide", tiny_model("llama", head_dim=16, intermediate_size=160))
    return folder, merged


@pytest.fixture(scope="module")
def cluster(models: tuple[Path, dict[str, Any]]) -> Iterator[LocalCluster]:
    settings = ("block.tokens=8", "prefill.kv_gb=0.02", "decode.kv_gb=0.02", "store.dram_gb=0.02")
    ours = (f"model.path={models[0]}", "model.name=tiny", "conductor.max_loaded_adapters=2")
    with running_cluster(small_config(*settings, *ours), restart=True) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def front(cluster: LocalCluster, models: tuple[Path, dict[str, Any]]) -> AsyncIterator[Front]:
    """Without adapters."""
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=60, trust_env=False) as http:
        front = Front(cluster, http, models[0])
        for name in (await front.names())[1:]:
            await front.unload(name)
        yield front


async def test_a_loaded_adapter_is_exact_and_replaced_and_gone(front: Front, models: tuple[Path, Any]) -> None:
    folder, merged = models
    base, _ = await front.ask("tiny")
    for step, name in enumerate(("sql", "poems", "sql")):  # the same name, other weights, and the first ones again
        loaded = await front.load("mine", folder / name, load_inplace=bool(step))
        assert loaded.status_code == 200 and loaded.headers["content-type"].startswith("text/plain"), loaded.text
        expected = greedy(merged[name], PROMPT, NEW)
        tokens, cached = await front.ask("mine")
        assert tokens == expected != base
        assert cached == (40 if step == 2 else 0), "blocks of other weights were taken, or its own not found"
        assert await front.ask("mine") == (expected, 40)
    cards = (await front.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("mine", "tiny")]
    assert cards[1]["root"] == str(folder / "sql")
    assert (await front.unload("mine")).status_code == 200
    assert await front.names() == ["tiny"]
    gone = await front.http.post("/v1/completions", json={"model": "mine", "prompt": PROMPT})
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"
    assert (await front.unload("mine")).status_code == 404
    assert await front.ask("tiny") == (base, 40), "the model itself is as before"


async def test_restarted_processes_have_it_again(front: Front, models: tuple[Path, Any]) -> None:
    folder, merged = models
    expected = greedy(merged["poems"], PROMPT, NEW)
    assert (await front.load("poems", folder / "poems")).status_code == 200
    for child in ("decode-0", "prefill-0"):
        await front.kill(child)
        assert (await front.ask("poems"))[0] == expected, child
    await front.kill("conductor")
    await front.until_named("poems")  # its nodes told the new one
    assert (await front.ask("poems"))[0] == expected
    assert (await front.load("poems", folder / "poems")).status_code == 400, "it is loaded"


@pytest.mark.parametrize("can_be_finished", [True, False])
async def test_a_conductor_that_dies_while_it_replaces_one_leaves_it_or_its_successor(
    can_be_finished: bool, front: Front, models: tuple[Path, Any]
) -> None:
    folder, merged = models
    mine = folder / "changing"
    shutil.copytree(folder / "sql", mine, dirs_exist_ok=True)
    assert (await front.load("mine", mine)).status_code == 200
    await front.until_loads({"prefill-0": 1, "decode-0": 1})  # what an earlier test unloaded is gone, too
    shutil.copytree(folder / "poems", mine, dirs_exist_ok=True)
    decode = front.cluster.pids["decode-0"]
    os.kill(decode, signal.SIGSTOP)
    try:
        loading = asyncio.create_task(front.load("mine", mine, load_inplace=True))
        await front.until_loads({"prefill-0": 2})
        if not can_be_finished:
            shutil.copytree(folder / "sql", mine, dirs_exist_ok=True)
        await front.kill("conductor")
    finally:
        os.kill(decode, signal.SIGCONT)
    with pytest.raises(httpx.TransportError):
        await loading
    await front.until_named("mine")
    await front.until_loads({"prefill-0": 1, "decode-0": 1})
    expected = greedy(merged["poems" if can_be_finished else "sql"], PROMPT, NEW)
    assert (await front.ask("mine"))[0] == expected


async def test_a_conductor_that_dies_while_it_unloads_one_does_not_bring_it_back(
    front: Front, models: tuple[Path, dict[str, Any]]
) -> None:
    assert (await front.load("mine", models[0] / "sql")).status_code == 200
    await front.until_loads({"prefill-0": 1, "decode-0": 1})  # those of other tests have gone
    decode = front.cluster.pids["decode-0"]
    os.kill(decode, signal.SIGSTOP)  # it will not hear of the end
    try:
        asking = asyncio.create_task(front.ask("mine"))
        async with grpc.aio.insecure_channel(front.cluster.grpc_address) as channel, asyncio.timeout(60):
            await wait_running(channel, 1)
            assert (await front.unload("mine")).status_code == 200
            while not any(load.ended for node in (await status(channel)).nodes for load in node.adapters):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await front.kill("conductor")
    finally:
        os.kill(decode, signal.SIGCONT)
    with pytest.raises(httpx.TransportError):
        await asking
    await front.until_loads({"prefill-0": 0, "decode-0": 0})
    assert await front.names() == ["tiny"]


async def test_what_cannot_be_loaded_is_refused_and_changes_nothing(front: Front, models: tuple[Path, Any]) -> None:
    folder, merged = models

    async def refused(status: int, name: str, path: Path | str, **more: Any) -> str:
        answer = await front.load(name, path, **more)
        assert answer.status_code == status, answer.text
        return str(answer.json()["error"]["message"])

    assert "no adapter is found in" in await refused(404, "x", folder / "nowhere")
    assert f"no adapter is found in {Path.home() / 'nowhere'}:" in await refused(404, "x", "~/nowhere")
    assert "the name 'tiny' is taken" in await refused(400, "tiny", folder / "sql", load_inplace=True)
    assert "both lora_name and lora_path" in await refused(400, "", folder / "sql")
    assert "printable" in await refused(400, "x", "a\0b")
    broken = folder / "broken"
    shutil.copytree(folder / "sql", broken, dirs_exist_ok=True)
    (broken / "adapter_model.safetensors").write_bytes(b"not weights")
    assert "cannot read its weights" in await refused(400, "x", broken)
    # only the nodes know the shape of each product
    assert "node" in (said := await refused(400, "x", folder / "wide")) and "another shape" in said
    assert await front.names() == ["tiny"]

    assert (await front.load("x", folder / "sql")).status_code == 200, "the name is free, and nodes try again"
    assert "has already been loaded" in await refused(400, "x", folder / "poems")
    assert "cannot read its weights" in await refused(400, "x", broken, load_inplace=True)
    assert (await front.ask("x"))[0] == greedy(merged["sql"], PROMPT, NEW), "what was to be replaced is still served"
    two = await asyncio.gather(*(front.load(name, folder / "poems") for name in ("y", "z")))
    assert sorted(answer.status_code for answer in two) == [200, 400], "there was room for one more"
    assert "the most that conductor.max_loaded_adapters allows" in await refused(400, "w", folder / "poems")
    await front.unload("x")
    assert (await front.load("w", folder / "poems")).status_code == 200


async def test_the_command_line_loads_lists_and_unloads(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(front.folder)
    monkeypatch.setenv("COLUMNS", "300")  # a narrow table folds words

    async def run(*arguments: str) -> tuple[int, str, str]:
        address = ("--address", front.cluster.grpc_address)
        done = await asyncio.to_thread(commands.run, "adapters", *arguments, *address)
        return done.returncode, done.stdout, done.stderr

    assert await run("load", "mine", "sql") == (0, "mine is loaded\n", ""), (
        "a folder beside the person, not the cluster"
    )
    monkeypatch.setenv("HOME", str(front.folder))
    assert await run("load", "mine", "~/sql", "--in-place") == (0, "mine is loaded\n", ""), "the person's home"
    code, listed, _ = await run("list", "--json")
    rows = [{"name": "mine", "path": str(front.folder / "sql"), "errors_by_node": {"prefill-0": "", "decode-0": ""}}]
    assert (code, json.loads(listed)) == (0, rows)
    table = (await run("list"))[1]
    assert all(word in table for word in ("adapter", "folder", "nodes", "mine", "prefill-0", "decode-0"))
    code, _, error = await run("load", "mine", "poems")
    assert code == 2 and "has already been loaded" in error
    assert (await run("load", "mine", "poems", "--in-place"))[0] == 0
    assert await run("unload", "mine") == (0, "mine is unloaded\n", "")
    assert (await run("unload", "mine"))[0] == 2
    assert await front.names() == ["tiny"]
