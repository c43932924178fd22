"""Models with recurrent layers through the GPU kernels and the engine: the tokens of transformers, in groups of pages,
with decode steps that are replayed, hits, forks, swaps, and steps that are abandoned.

On a GPU in float32; else in Triton's interpreter, which has no graphs, but the code around them runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from asked import Asked
from tiny_hybrid import (
    BLOCK,
    CONTEXT,
    HYBRIDS,
    Failing,
    greedy,
    prompt_of,
    run,
    run_failing,
    sequence,
    write_hybrid,
)

pytest.importorskip("triton", reason="triton is not installed")

from mooncake import LLM, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.device_cache import DeviceCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.kernels.gpu.triton_launch import INTERPRETED
from mooncake.model import load_model
from mooncake.model.gpu.gpu_model import GpuModel
from mooncake.page_groups import as_one_group, groups_of
from mooncake.precision import FLOAT32

pytestmark = [
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="triton was imported without a GPU and without its interpreter",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # rows that only fill a graph may hold anything
]


class Counting(GpuModel):
    num_replays = 0

    def _fill(self, *given: Any) -> None:
        super()._fill(*given)
        self.num_replays += 1


def gpu_engine(
    folder: Path,
    buckets: tuple[int, ...] = (),
    has_groups: bool = True,
    num_pages: int = 60,
    num_places: int = 0,
    **settings: Any,
) -> tuple[Engine, Counting]:
    checkpoint = open_checkpoint(str(folder))
    block = checkpoint.kv_layout(BLOCK, "float32")
    groups = groups_of(checkpoint.config, CONTEXT, block) if has_groups else as_one_group(checkpoint.config, block)
    numbers = {"block_tokens": BLOCK, "chunk_tokens": 24, "max_sequences": 8, "max_model_len": CONTEXT} | settings
    model = Counting(
        lambda kernels: load_model(checkpoint, FLOAT32, CONTEXT, kernels=kernels),
        max_blocks=numbers["max_model_len"] // BLOCK,
        dtype=torch.float32,
        buckets=buckets,
        groups=groups,
    )
    cache = DeviceCache(groups.page_layout(block), num_pages, model.kernels.device, num_places)
    cache.tensor.view(torch.uint8).fill_(0xFF)  # what was never written must never be read: NaN
    return Engine(model, cache, EngineConfig(**numbers, groups=groups)), model


def hybrids(*quick: str) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS]


@pytest.mark.parametrize("name", hybrids("lfm2"))
def test_replayed_steps_over_groups_of_pages_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = write_hybrid(name, tmp_path)
    engine, model = gpu_engine(tmp_path, buckets=(1, 4))
    prompts = {f"r{length}": prompt_of(length) for length in (3, 14, 33)}  # some cross into a new block
    for request, prompt in prompts.items():
        engine.add(sequence(request, prompt, 5))
    assert run(engine) == {request: greedy(theirs, prompt, 5) for request, prompt in prompts.items()}
    assert engine.config.groups.num_groups > 1 and model.num_replays >= 4
    assert engine._overlap is None and engine.block_pool.num_in_use == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "granite-4"])
def test_all_layers_may_be_one_group_and_hits_and_turns_go_on_behind_a_border(name: str, tmp_path: Path) -> None:
    theirs = write_hybrid(name, tmp_path)
    engine, _ = gpu_engine(tmp_path, has_groups=False)
    prompt = prompt_of(17)
    turn = [*prompt, *greedy(theirs, prompt, 4), 5, 6]
    for request, tokens, cached in (("first", prompt, 0), ("again", prompt, 16), ("turn", turn, 16)):
        asked = sequence(request, tokens, 4)
        engine.add(asked)
        assert run(engine)[request] == greedy(theirs, tokens, 4)
        assert asked.num_cached_tokens == cached


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5"])
def test_several_answers_each_go_on_with_a_state_of_their_own(name: str, tmp_path: Path) -> None:
    write_hybrid(name, tmp_path)
    engine, _ = gpu_engine(tmp_path, (1, 2))
    whole = sequence("r", prompt_of(12), 3, n=2, temperature=1.0, seed=5)
    engine.add(whole)
    found = run(engine)
    assert found["r"] != found["r#1"] and engine.load().copied_blocks
    for choice in range(2):
        engine.drop_cached()
        engine.add(sequence("one", prompt_of(12), given=whole.sampling.for_answer(choice)))
        assert run(engine)["one"] == found[f"r#{choice}" if choice else "r"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "qwen3.5"])
def test_swapped_sequences_go_on_as_they_were(name: str, tmp_path: Path) -> None:
    theirs = write_hybrid(name, tmp_path)
    engine, _ = gpu_engine(tmp_path, (1, 2, 4), num_pages=29, num_places=60, max_model_len=64)
    prompts = {f"r{i}": prompt_of(6 + 5 * i, i) for i in range(4)}
    for request, prompt in prompts.items():
        engine.add(sequence(request, prompt, 14))
    assert run(engine) == {request: greedy(theirs, prompt, 14) for request, prompt in prompts.items()}
    assert engine.load().swapped_blocks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "nemotron-h"])
def test_a_step_that_is_abandoned_leaves_states_as_they_were(name: str, tmp_path: Path) -> None:
    theirs = write_hybrid(name, tmp_path)
    engine, hook = gpu_engine(tmp_path, chunk_tokens=10)[0], Failing(1)
    prompts = {f"r{i}": prompt_of(9 * i + 4, i) for i in range(3)}
    assert run_failing(engine, hook, prompts, 4) == {
        request: greedy(theirs, prompt, 4) for request, prompt in prompts.items()
    }
    assert hook.num_failed > 3


@pytest.mark.parametrize(
    ("name", "captured"), [("lfm2", [2]), pytest.param("falcon-h1", [1, 2], marks=pytest.mark.slow)]
)
def test_captured_steps_ask_the_host_nothing_and_leave_the_cache_as_it_is(
    name: str, captured: list[int], tmp_path: Path
) -> None:
    write_hybrid(name, tmp_path)
    engine, model = gpu_engine(tmp_path, buckets=(*captured, 4), max_model_len=24)
    cache = engine.cache.tensor
    cache.copy_(torch.randn_like(cache))
    before = cache.clone()
    model.warm_up(cache, 2)
    assert sorted(model._graphs) == captured and torch.equal(cache, before)
    with torch.inference_mode(), Asked() as asked:
        model._graphs[2].graph.replay()
    assert not asked.found and torch.equal(cache, before)


def test_an_engine_in_one_process_opens_on_a_gpu(tmp_path: Path) -> None:
    theirs = write_hybrid("lfm2", tmp_path)
    with LLM(str(tmp_path), device="cuda", kv_gb=0.01, block_tokens=BLOCK, dtype="float32") as llm:
        assert llm.engine.config.groups.windows == (0, 0, 2, 2, 2)
        [found] = llm.generate([prompt_of(11)], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert found.outputs[0].token_ids == greedy(theirs, prompt_of(11), 4)
