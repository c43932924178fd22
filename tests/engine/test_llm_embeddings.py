"""``LLM.embed`` and ``score``, ``AsyncLLM.embed``, and what a model's folder says of embeddings."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_embedder import END, write_embedder
from tiny_gguf import write_gguf
from tiny_model import write_tiny_model

from mooncake import LLM, AsyncLLM, EngineArgs, PoolingParams, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.errors import InvalidRequest, ModelError
from mooncake.pooling import Pooling, PoolingSettings

TEXTS = ["the quick brown fox", "the lazy dog", "the quick brown fox jumps over the lazy dog and the other dogs " * 3]


def their_states(theirs: Any, llm: LLM, text: str) -> np.ndarray:
    ids = [*llm.tokenizer.encode(text).tolist(), END]
    with torch.no_grad():
        return theirs(torch.tensor([ids])).last_hidden_state[0].numpy()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_a_published_embedder_gives_the_vectors_of_transformers(tmp_path: Path) -> None:
    theirs = write_embedder(tmp_path, "Transformer", "Pooling", "Normalize")
    with LLM(str(tmp_path), kv_gb=0.01, block_tokens=16) as llm:
        for _ in range(2):  # the second time from what is cached
            for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True):
                expected = unit(their_states(theirs, llm, text)[-1])
                np.testing.assert_allclose(output.outputs.embedding, expected, rtol=2e-5, atol=2e-5)
                assert output.prompt_token_ids[-1] == END and output.finished
        assert output.num_cached_tokens > 16
        short = llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8))[0].outputs
        assert short.hidden_size == 8 and np.linalg.norm(short.embedding) == pytest.approx(1)
        plain = llm.embed(TEXTS[0], pooling_params=PoolingParams(normalize=False))[0].outputs.embedding
        np.testing.assert_allclose(plain, their_states(theirs, llm, TEXTS[0])[-1], rtol=2e-5, atol=2e-5)
        with pytest.raises(InvalidRequest, match="between 1 and 32"):
            llm.embed("x", pooling_params=PoolingParams(dimensions=33))
        with pytest.raises(InvalidRequest, match="no output head"):
            llm.generate("x", SamplingParams(max_tokens=1))


def test_means_without_a_norm(tmp_path: Path) -> None:
    theirs = write_embedder(tmp_path, "Transformer", "Pooling", mode="pooling_mode_mean_tokens")
    with LLM(str(tmp_path), kv_gb=0.01, block_tokens=16, chunk_tokens=16) as llm:
        for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True):
            expected = their_states(theirs, llm, text).mean(0)
            np.testing.assert_allclose(output.outputs.embedding, expected, rtol=2e-5, atol=2e-5)


def test_scores_are_cosines(tmp_path: Path) -> None:
    write_embedder(tmp_path)
    with LLM(str(tmp_path), kv_gb=0.01, block_tokens=16) as llm:
        vectors = [np.array(output.outputs.embedding) for output in llm.embed(TEXTS)]
        scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS)]
        assert scores == pytest.approx([vectors[0] @ vector for vector in vectors], abs=1e-6)
        assert scores[0] == pytest.approx(1, abs=1e-6)
        with pytest.raises(InvalidRequest, match="2 texts cannot be paired with 3"):
            llm.score(TEXTS[:2], TEXTS)


@pytest.mark.parametrize("processes", [{"tensor_parallel_size": 2}, {"context_parallel_size": 2}])
def test_over_processes(tmp_path: Path, processes: dict[str, int]) -> None:
    theirs = write_embedder(tmp_path)
    with LLM(str(tmp_path), kv_gb=0.01, block_tokens=16, threads=1, **processes) as llm:
        for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True):
            expected = unit(their_states(theirs, llm, text)[-1])
            np.testing.assert_allclose(output.outputs.embedding, expected, rtol=2e-5, atol=2e-5)


def test_tensor_parallel_ranks_that_also_generate(tmp_path: Path) -> None:
    theirs = write_tiny_model(tmp_path, "llama", num_key_value_heads=2)
    with LLM(str(tmp_path), kv_gb=0.01, block_tokens=16, threads=1, tensor_parallel_size=2) as llm:
        before = llm.generate(TEXTS, SamplingParams(max_tokens=4, temperature=0))
        for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True):
            with torch.no_grad():
                states = theirs.model(torch.tensor([llm.tokenizer.encode(text).tolist()])).last_hidden_state[0].numpy()
            np.testing.assert_allclose(output.outputs.embedding, unit(states[-1]), rtol=2e-5, atol=2e-5)
        after = llm.generate(TEXTS, SamplingParams(max_tokens=4, temperature=0))
        assert [each.token_ids for each in before] == [each.token_ids for each in after]


def test_a_pipeline_refuses_in_words(tmp_path: Path) -> None:
    write_embedder(tmp_path / "bare")
    with pytest.raises(ModelError, match="no output head, and so is not for stages"):
        LLM(str(tmp_path / "bare"), kv_gb=0.01, block_tokens=16, threads=1, pipeline_parallel_size=2)
    write_tiny_model(tmp_path / "whole")
    whole = str(tmp_path / "whole")
    with (
        LLM(whole, kv_gb=0.01, block_tokens=16, threads=1, pipeline_parallel_size=2) as llm,
        pytest.raises(InvalidRequest, match="pipeline stages"),
    ):
        llm.embed("x")


async def test_async(tmp_path: Path) -> None:
    write_embedder(tmp_path)
    with LLM(str(tmp_path), kv_gb=0.01, block_tokens=16) as llm:
        expected = [output.outputs.embedding for output in llm.embed(TEXTS)]
    engine = AsyncLLM(EngineArgs(str(tmp_path), kv_gb=0.01, block_tokens=16))
    try:
        found = await asyncio.gather(*(engine.embed(text, priority=1) for text in TEXTS))
        assert [output.outputs.embedding for output in found] == expected
        with pytest.raises(InvalidRequest, match="a prompt is empty"):
            await engine.embed("")
        left = asyncio.create_task(engine.embed(TEXTS[2]))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
    finally:
        engine.shutdown()
    assert engine._opened.engine.block_pool.num_in_use == 0


@pytest.mark.parametrize(
    ("modules", "mode", "found"),
    [
        ((), "", PoolingSettings(Pooling.LAST, True)),
        (("Transformer", "Pooling", "Normalize"), "pooling_mode_lasttoken", PoolingSettings(Pooling.LAST, True)),
        (("Transformer", "Pooling"), "pooling_mode_mean_tokens", PoolingSettings(Pooling.MEAN, False)),
        (("Transformer", "Pooling"), "pooling_mode_cls_token", "pooling_mode_cls_token"),
        (("Transformer", "Pooling", "Dense"), "pooling_mode_lasttoken", "'Dense'"),
    ],
)
def test_what_a_folder_says(tmp_path: Path, modules: tuple[str, ...], mode: str, found: PoolingSettings | str) -> None:
    write_embedder(tmp_path, *modules, mode=mode)
    checkpoint = open_checkpoint(str(tmp_path))
    assert not checkpoint.config.has_head
    if isinstance(found, PoolingSettings):
        assert checkpoint.pooling() == found
        return
    with pytest.raises(ModelError, match=found):
        checkpoint.pooling()


def test_a_folder_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    write_embedder(tmp_path, "Transformer", "Pooling")
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "../other", "type": "a.Pooling"}]))
    with pytest.raises(ModelError, match="not the model's"):
        open_checkpoint(str(tmp_path)).pooling()


@pytest.mark.parametrize(
    ("kind", "found"), [(None, Pooling.LAST), (1, Pooling.MEAN), (3, Pooling.LAST), (2, "the pooling_type 2")]
)
def test_what_a_gguf_file_says(tmp_path: Path, kind: int | None, found: Pooling | str) -> None:
    keys = {} if kind is None else {"qwen3.pooling_type": kind, "tokenizer.ggml.add_eos_token": True}
    write_gguf(tmp_path / "a.gguf", "qwen3", pre="qwen2", whole_keys=keys)
    checkpoint = open_checkpoint(str(tmp_path / "a.gguf"))
    if isinstance(found, Pooling):
        assert checkpoint.pooling() == PoolingSettings(found)
    else:
        with pytest.raises(ModelError, match=found):
            checkpoint.pooling()
    tokenizer = checkpoint.load_tokenizer()
    ids = tokenizer.encode("the")
    end = [] if kind is None else [tokenizer.control_id(tokenizer.named_tokens["eos_token"])]
    assert tokenizer.ended(ids).tolist() == [*ids.tolist(), *end]
