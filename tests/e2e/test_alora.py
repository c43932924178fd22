"""Activated LoRA through a whole cluster: conductor, both nodes and the pool agree on which KV is the model's own and
which is an adapter's. Real processes, fp32, greedy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import openai
import pytest
from drive import status
from greedy import greedy
from live import running_cluster, small_config
from store_alone import connect_store
from tiny_lora import activated, write_adapter
from tiny_model import write_tiny_model

from conductor.model_facts import model_facts
from mooncake.adapters import open_adapter
from mooncake.app.cluster.local import LocalCluster
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config
from mooncake.hashing import Chain

NEW, BLOCK = 12, 8
INVOCATIONS = {"check": (7, 9, 11), "rewrite": (5, 6)}
TEXT = np.random.default_rng(0).integers(20, 320, 45).tolist()
SHARED = len(TEXT) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    base = write_tiny_model(folder, head_dim=16)
    for seed, (name, invocation) in enumerate(INVOCATIONS.items(), 1):
        write_adapter(folder / name, base, seed=seed, invocation=invocation)
    write_adapter(folder / "always", base, seed=1)  # with the weights of "check"
    return folder, base


def configured(folder: Path, *more: str) -> Config:
    adapters = [f"{name}={folder / name}" for name in (*INVOCATIONS, "always")]
    return small_config(
        f"model.path={folder}",
        "model.name=tiny",
        f"model.adapters={adapters!r}",
        f"block.tokens={BLOCK}",
        "prefill.kv_gb=0.02",
        "decode.kv_gb=0.02",
        "store.dram_gb=0.02",
        *more,
    )


def clients(cluster: LocalCluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0)


async def ask(client: openai.AsyncOpenAI, name: str, prompt: list[int], **more: object) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's were cached."""
    extra = {"ignore_eos": True, "return_token_ids": True} | more
    answer = await client.completions.create(model=name, prompt=prompt, max_tokens=NEW, temperature=0, extra_body=extra)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    tokens: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


async def test_adapters_take_the_models_own_kv_and_leave_theirs_to_the_next_turn(model: tuple[Path, Any]) -> None:
    folder, base = model
    config = configured(folder)
    prompts = {name: [*TEXT, *invocation, 30] for name, invocation in INVOCATIONS.items()}
    expected = {
        name: greedy(activated(base, folder / name, len(TEXT)), prompt, NEW) for name, prompt in prompts.items()
    }
    assert expected["check"] != greedy(base, prompts["check"], NEW), "the adapter changes nothing: no test"
    with running_cluster(config) as cluster:
        async with clients(cluster) as client:
            cold = {name: await ask(client, name, prompt, cache_salt="other") for name, prompt in prompts.items()}
            assert cold == {"check": (expected["check"], 0), "rewrite": (expected["rewrite"], SHARED)}
            assert await ask(client, "tiny", TEXT) == (greedy(base, TEXT, NEW), 0)
            names = list(prompts)
            warm = await asyncio.gather(*(ask(client, name, prompts[name]) for name in names))
            assert dict(zip(names, warm, strict=True)) == {name: (expected[name], SHARED) for name in names}
            merged = activated(base, folder / "always", 0)
            assert await ask(client, "always", prompts["check"]) == (greedy(merged, prompts["check"], NEW), 0)

            uninvoked = [*TEXT, 40, 41]
            assert await ask(client, "check", uninvoked) == (greedy(base, uninvoked, NEW), len(TEXT))

            said = [*prompts["check"], *expected["check"]]
            digest = open_adapter("check", str(folder / "check")).digest
            fingerprint = model_facts(config, open_checkpoint(str(folder))).kv_fingerprint
            known = said[:-1]  # the last token of an answer has no KV
            keys = Chain.of(fingerprint, "", digest, len(TEXT)).keys(np.array(known, np.uint32), BLOCK)
            await until_stored(cluster, keys)  # also what the decode node filled
            following = [*said, 50, 51]
            tokens, cached = await ask(client, "check", following)
            assert tokens == greedy(activated(base, folder / "check", len(TEXT)), following, NEW)
            assert cached in range(SHARED + BLOCK, len(keys) * BLOCK + 1)  # fetching the last one may not pay


async def until_stored(cluster: LocalCluster, keys: list[Any]) -> None:
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        nodes = (await status(channel)).nodes
    address = next(node.info.control_address for node in nodes if node.info.role == "store")
    async with await connect_store(address) as store, asyncio.timeout(20):
        while not all(await store.exists(keys)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_coupled_cluster_and_one_that_guesses_give_the_same(model: tuple[Path, Any]) -> None:
    folder, base = model
    prompt = [*TEXT, *INVOCATIONS["check"], *TEXT[:20]]
    expected = greedy(activated(base, folder / "check", len(TEXT)), prompt, NEW)
    for settings in (["cluster.coupled=1"], ["prefill.speculative_tokens=2", "decode.speculative_tokens=2"]):
        with running_cluster(configured(folder, *settings)) as cluster:
            async with clients(cluster) as client:
                assert await ask(client, "tiny", TEXT) == (greedy(base, TEXT, NEW), 0)
                assert await ask(client, "check", prompt) == (expected, SHARED)
