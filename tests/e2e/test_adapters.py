"""Adapters through a whole cluster: named as models, handed from prefill to decode, and never in each other's KV."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from greedy import greedy
from live import running_cluster, small_config
from tiny_lora import write_adapter
from tiny_model import write_tiny_model

NEW = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tiny")
    base = write_tiny_model(folder, head_dim=16)
    merged = {name: write_adapter(folder / name, base, seed=seed) for seed, name in enumerate(("sql", "poems"))}
    return folder, {"tiny": base} | merged


async def test_adapters_answer_exactly_across_the_hand_off(models: tuple[Path, dict[str, Any]]) -> None:
    folder, by_name = models
    adapters = [f"{name}={folder / name}" for name in by_name if name != "tiny"]
    config = small_config(
        f"model.path={folder}",
        "model.name=tiny",
        f"model.adapters={adapters!r}",
        "block.tokens=8",
        "prefill.kv_gb=0.02",
        "decode.kv_gb=0.02",
        "store.dram_gb=0.02",
    )
    prompts = [np.random.default_rng(seed).integers(3, 320, 41).tolist() for seed in range(2)]
    wanted = {
        (name, i): greedy(model, prompt, NEW) for name, model in by_name.items() for i, prompt in enumerate(prompts)
    }
    assert len({tuple(tokens) for tokens in wanted.values()}) == len(wanted)
    with running_cluster(config) as cluster:
        async with openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0) as client:
            cards = (await client.models.list()).data
            assert [card.id for card in cards] == ["tiny", "sql", "poems"]

            async def ask(name: str, prompt: list[int]) -> tuple[list[int], int]:
                extra = {"ignore_eos": True, "return_token_ids": True}
                answer = await client.completions.create(
                    model=name, prompt=prompt, max_tokens=NEW, temperature=0, extra_body=extra
                )
                assert answer.model == name and answer.usage is not None and answer.usage.prompt_tokens_details
                return answer.choices[0].token_ids, answer.usage.prompt_tokens_details.cached_tokens or 0  # type: ignore[attr-defined]

            for rounds in range(2):
                places = list(wanted)
                answers = await asyncio.gather(*(ask(name, prompts[i]) for name, i in places))
                for place, (tokens, cached) in zip(places, answers, strict=True):
                    assert tokens == wanted[place], place
                    assert cached == (40 if rounds else 0), "blocks were taken from someone else, or not found"
            with pytest.raises(openai.NotFoundError, match="served: 'tiny', 'sql', 'poems'"):
                await ask("prose", prompts[0])
