"""SmolLM2 through the engine: answers do not depend on how, where or with which other requests they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.hashing import Chain
from mooncake.model import CausalLM, load_model
from mooncake.precision import FLOAT32
from mooncake.sampling import SamplingParams
from tests.engine.hash_model import answers, reserve_filled, run_all

BLOCK = 64
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.95, seed=1234, ignore_eos=True)
LENGTHS = (1, 5, 63, 64, 65, 200)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Iterator[CausalLM]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(checkpoint, FLOAT32, 1024)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    random = np.random.default_rng(0)
    return {f"{length} tokens": random.integers(100, 49_000, length).tolist() for length in LENGTHS}


def engine_of(model: CausalLM, checkpoint: Checkpoint, num_blocks: int = 48, chunk_tokens: int = 256) -> Engine:
    cache = KVCache(checkpoint.kv_layout(BLOCK, "float32"), num_blocks)
    config = EngineConfig(block_tokens=BLOCK, chunk_tokens=chunk_tokens, max_sequences=16, max_model_len=1024)
    return Engine(model, cache, config)


def sequence(name: str, prompt: list[int], sampling: SamplingParams, **settings: int | bool) -> Sequence:
    tokens = np.array(prompt, np.uint32)
    return Sequence(name, tokens, len(prompt), sampling, Chain(b"s"), eos_ids=(2,), max_model_len=1024, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(model: CausalLM, checkpoint: Checkpoint, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """The answer to each request alone in the engine, greedy and sampled ("~")."""
    got: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        for label, sampling in ((name, GREEDY), (f"~{name}", SAMPLED)):
            engine = engine_of(model, checkpoint)
            engine.add(sequence(label, prompt, sampling))
            got |= answers(run_all(engine))
    return got


def add_all(engine: Engine, prompts: dict[str, list[int]]) -> None:
    for name, prompt in prompts.items():
        engine.add(sequence(name, prompt, GREEDY))
        engine.add(sequence(f"~{name}", prompt, SAMPLED))


@pytest.mark.parametrize("chunk_tokens", [64, *(pytest.param(count, marks=pytest.mark.slow) for count in (256, 0))])
def test_a_batch_gives_what_each_request_gets_alone(
    model: CausalLM,
    checkpoint: Checkpoint,
    prompts: dict[str, list[int]],
    alone: dict[str, list[int]],
    chunk_tokens: int,
) -> None:
    engine = engine_of(model, checkpoint, chunk_tokens=chunk_tokens)
    add_all(engine, prompts)
    assert answers(run_all(engine)) == alone
    assert engine.block_pool.num_in_use == 0


def test_a_pool_that_is_too_small_changes_no_token(
    model: CausalLM, checkpoint: Checkpoint, prompts: dict[str, list[int]], alone: dict[str, list[int]]
) -> None:
    engine = engine_of(model, checkpoint, num_blocks=7)
    add_all(engine, {name: prompts[name] for name in ("63 tokens", "64 tokens", "5 tokens")})
    got = answers(run_all(engine))
    assert got == {name: alone[name] for name in got} and len(got) == 6
    assert engine.load().preemptions > 0


def test_a_second_turn_reuses_the_first(
    model: CausalLM, checkpoint: Checkpoint, prompts: dict[str, list[int]], alone: dict[str, list[int]]
) -> None:
    engine = engine_of(model, checkpoint)
    prompt = prompts["200 tokens"]
    engine.add(sequence("turn 1", prompt, GREEDY))
    run_all(engine)
    longer = prompt + alone["200 tokens"] + prompts["5 tokens"]
    second = sequence("turn 2", longer, GREEDY)
    engine.add(second)
    reused = answers(run_all(engine))
    cold = engine_of(model, checkpoint)
    cold.add(sequence("turn 2", longer, GREEDY))
    assert reused == answers(run_all(cold))
    assert second.num_cached_tokens == len(longer) - len(prompts["5 tokens"]) - 1


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_decode_goes_on_from_blocks_that_another_engine_computed(
    model: CausalLM,
    checkpoint: Checkpoint,
    prompts: dict[str, list[int]],
    alone: dict[str, list[int]],
    sampling: SamplingParams,
) -> None:
    prefill, decode = engine_of(model, checkpoint, chunk_tokens=64), engine_of(model, checkpoint)
    label = "" if sampling is GREEDY else "~"
    for name, prompt in prompts.items():
        source = sequence(label + name, prompt, sampling, num_to_sample=1, hold_blocks=True)
        prefill.add(source)
        [output] = run_all(prefill)
        reserve_filled(decode, sequence(label + name, prompt, sampling), prefill, source)
        prefill.abort(label + name)
        decode.start_reserved(label + name, [output.token])
    got = answers(run_all(decode))
    assert got == {label + name: alone[label + name] for name in prompts}
    assert prefill.block_pool.num_in_use == decode.block_pool.num_in_use == 0


def test_an_answer_is_continued_where_another_node_left_it(
    model: CausalLM, checkpoint: Checkpoint, prompts: dict[str, list[int]], alone: dict[str, list[int]]
) -> None:
    name = "~65 tokens"
    prompt, whole = prompts["65 tokens"], alone[name]
    tokens = np.array(prompt + whole[:3], np.uint32)
    engine = engine_of(model, checkpoint)
    engine.add(Sequence(name, tokens, 65, replace(SAMPLED), Chain(b"s"), eos_ids=(2,), max_model_len=1024))
    assert answers(run_all(engine)) == {name: whole[3:]}
