"""Embeddings by the engine: those of transformers, and the same bits whatever is cached and however prompts are cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Rows
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import write_tiny_model

from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import CausalModel, EngineConfig, StepOutput
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.errors import InvalidRequest
from mooncake.hashing import Chain
from mooncake.model import CausalLM, ForwardBatch, LayerHook, load_model
from mooncake.model.decoder import Decoder
from mooncake.pooling import Pooling, Vector
from mooncake.precision import FLOAT32
from mooncake.sampling import SamplingParams
from tests.engine.hash_model import hash_engine, hash_sequence

BLOCK = 16
ONE = SamplingParams(max_tokens=1, temperature=0.0)
NAMES = map("request {}".format, itertools.count())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


class Folder:
    """A tiny model, of which engines are made."""

    def __init__(self, path: Path, family: str, **changes: object) -> None:
        self.theirs = write_tiny_model(path, family, **changes)
        self.checkpoint = open_checkpoint(str(path))
        self.model = load_model(self.checkpoint, FLOAT32, 256)

    def engine(
        self, chunk_tokens: int = 64, num_blocks: int = 64, model: CausalModel | None = None, num_places: int = 0
    ) -> Engine:
        cache = KVCache(self.checkpoint.kv_layout(BLOCK, "float32"), num_blocks, num_places=num_places)
        settings = EngineConfig(BLOCK, chunk_tokens, max_sequences=8, max_model_len=256)
        return Engine(model or self.model, cache, settings)

    def their_states(self, prompt: list[int]) -> Vector:
        """[T, hidden], behind the final norm."""
        with torch.no_grad():
            return self.theirs.base_model(torch.tensor([prompt])).last_hidden_state[0].numpy()


def sequence(prompt: list[int], pooling: Pooling | None, sampling: SamplingParams = ONE) -> Sequence:
    tokens = np.array(prompt, np.uint32)
    chain = Chain(b"seed")
    return Sequence(next(NAMES), tokens, len(prompt), sampling, chain, eos_ids=(), max_model_len=256, pooling=pooling)


def embed(engine: Engine, prompts: Rows[list[int]], pooling: Pooling = Pooling.LAST) -> list[Vector]:
    wanted = [sequence(prompt, pooling) for prompt in prompts]
    for each in wanted:
        engine.add(each)
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.pooled is not None and output.finish_reason == "stop"
            found[output.request_id] = output.pooled
    assert engine.take_ended() == []
    engine.block_pool.check()
    assert engine.block_pool.num_in_use == 0
    return [found[each.request_id] for each in wanted]


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen2", "gemma2", "gpt_neox", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    of_mixtures = changes if request.param == "qwen3_moe" else {}
    return Folder(tmp_path_factory.mktemp(request.param), request.param, **of_mixtures)


def test_they_are_those_of_transformers(folder: Folder) -> None:
    prompts = [prompt_of(length, length) for length in (1, 15, 16, 17, 100)]
    states = [folder.their_states(prompt) for prompt in prompts]
    engine = folder.engine()
    for last, their in zip(embed(engine, prompts), states, strict=True):
        np.testing.assert_allclose(last, their[-1], rtol=2e-5, atol=2e-5)
    for mean, their in zip(embed(engine, prompts, Pooling.MEAN), states, strict=True):
        np.testing.assert_allclose(mean, their.mean(0), rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=16, intermediate_size=64)


@pytest.mark.parametrize("pooling", Pooling)
def test_bits_do_not_depend_on_chunks_on_others_and_on_what_is_cached(qwen3: Folder, pooling: Pooling) -> None:
    prompt = prompt_of(100)
    [alone] = embed(qwen3.engine(chunk_tokens=0), [prompt], pooling)
    in_chunks = qwen3.engine(chunk_tokens=16)
    [cut] = embed(in_chunks, [prompt], pooling)
    np.testing.assert_array_equal(alone, cut)
    first = in_chunks.load().computed_tokens
    [again] = embed(in_chunks, [prompt], pooling)
    np.testing.assert_array_equal(alone, again)
    second = in_chunks.load().computed_tokens - first
    assert second == (100 if pooling is Pooling.MEAN else 1)  # with its last block a part of one is cached, too
    among_others = [prompt_of(30, 1), prompt, prompt[:50], prompt_of(7, 2)]
    np.testing.assert_array_equal(alone, embed(qwen3.engine(), among_others, pooling)[1])


def test_of_a_prompt_that_is_cached_as_a_whole_the_last_token_is_computed(qwen3: Folder) -> None:
    prompt, engine = prompt_of(4 * BLOCK), qwen3.engine()
    [first] = embed(engine, [prompt])
    computed = engine.load().computed_tokens
    [second] = embed(engine, [prompt])
    np.testing.assert_array_equal(first, second)
    assert engine.load().computed_tokens == computed + 1


class OneRank:
    """As a rank, which has rows of logits for hidden states, too; they mean nothing."""

    def __init__(self, model: CausalLM | Decoder) -> None:
        self._model, self.config, self.hidden_size = model, model.config, model.hidden_size

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        logits = self._model.forward(batch, cache, hook)
        return torch.cat([logits, torch.full((batch.num_hidden, logits.shape[1]), torch.nan)])


@pytest.mark.parametrize("is_rank", [False, True])
def test_answers_and_embeddings_share_steps(qwen3: Folder, is_rank: bool) -> None:
    """Each is what it is alone, although they are rows of the same batches."""
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    alone = qwen3.engine(chunk_tokens=32)
    expected = [*answers(alone, [sequence(prompt_of(40, 5), None, sampling)])]
    [last], [mean] = (embed(qwen3.engine(), [prompt_of(90, 6)], kind) for kind in Pooling)

    engine = qwen3.engine(chunk_tokens=32, model=OneRank(qwen3.model) if is_rank else None)
    scored = [sequence(prompt_of(40, 5), None, sampling) for _ in range(2)]
    pooled = [sequence(prompt_of(90, 6), kind) for kind in (*Pooling, *Pooling)]
    outputs = answers(engine, [scored[0], *pooled[:2], scored[1], *pooled[2:]])
    found = {output.request_id: output.pooled for output in outputs}
    for each in scored:
        mine = [output for output in outputs if output.request_id == each.request_id]
        assert [output.token for output in mine] == [output.token for output in expected]
        assert mine[0].prompt_logprobs == expected[0].prompt_logprobs
    for each, vector in zip(pooled, (last, mean, last, mean), strict=True):
        np.testing.assert_array_equal(found[each.request_id], vector)


def answers(engine: Engine, sequences: Rows[Sequence]) -> list[StepOutput]:
    outputs = []
    for each in sequences:
        engine.add(each)
    while engine.has_work:
        outputs += engine.step()
    assert engine.take_ended() == []
    return outputs


@pytest.mark.parametrize("num_places", [0, 1, 8])
def test_a_mean_survives_preemption(qwen3: Folder, num_places: int) -> None:
    """A sequence that gives way is computed again from its first token, or from where its blocks were kept."""
    [mean] = embed(qwen3.engine(), [prompt_of(100)], Pooling.MEAN)
    engine = qwen3.engine(chunk_tokens=4, num_blocks=11, num_places=num_places)
    wanted = sequence(prompt_of(100), Pooling.MEAN)
    answer = sequence(prompt_of(40, 3), None, SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True))
    engine.add(answer)
    engine.step()
    engine.add(wanted)
    found = None
    while engine.has_work:
        for output in engine.step():
            found = output.pooled if output.request_id == wanted.request_id else found
    assert engine.load().preemptions > 0 and found is not None
    np.testing.assert_array_equal(found, mean)


def test_it_may_be_as_long_as_the_context(qwen3: Folder) -> None:
    prompt = prompt_of(256)
    [last] = embed(qwen3.engine(), [prompt])
    np.testing.assert_allclose(last, qwen3.their_states(prompt)[-1], rtol=2e-5, atol=2e-5)


def test_a_model_without_hidden_states_refuses() -> None:
    engine = hash_engine()
    with pytest.raises(InvalidRequest, match="hidden states"):
        engine.add(hash_sequence("a", [1, 2, 3], ONE, pooling=Pooling.LAST))
