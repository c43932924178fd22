"""Tensor parallel ranks on GPUs, here in Triton's interpreter: their tokens are those of one process on CPUs."""

from __future__ import annotations

import gc
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ranks_in_threads import InThread, InThreads
from tiny_mixtures import MIXTURES
from tiny_model import write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.engine.backends.gpu_ranks import TensorParallelGpuModel
from mooncake.errors import ConfigError, InternalError, InvalidRequest, ModelError, NodeUnavailable
from mooncake.kernels.gpu.triton_launch import INTERPRETED
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.gpu.gpu_model import GpuModel
from mooncake.model.load import load_model, load_part
from mooncake.precision import FLOAT32

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.skipif(not INTERPRETED, reason="compares with a CPU; `make gpu` runs two ranks on two GPUs"),
]

PROMPTS = [np.random.default_rng(seed).integers(3, 320, length).tolist() for seed, length in ((0, 19), (1, 4))]
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A vocabulary and KV heads that two ranks share unevenly."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, head_dim=16, hidden_size=64, vocab_size=321, initializer_range=0.1)
    return str(folder)


def two_ranks(folder: str, **options: Any) -> LLM:
    return LLM(folder, device="cuda", tensor_parallel_size=2, **({"kv_gb": 0.005, "block_tokens": 16} | options))


def on_cpu(folder: str, prompts: list[list[int]], sampling: list[SamplingParams], **options: Any) -> list[list[int]]:
    with LLM(folder, block_tokens=16, threads=1, **({"kv_gb": 0.005} | options)) as llm:
        return [answer.token_ids for answer in llm.generate(prompts, sampling, use_tqdm=False)]


def test_two_ranks_give_the_tokens_of_a_cpu_and_start_steps_ahead(folder: str) -> None:
    sampling = [GREEDY, DRAWN]
    wanted = on_cpu(folder, PROMPTS, sampling)
    assert {token < 160 for tokens in wanted for token in tokens} == {True, False}, "one part gives all tokens"
    with two_ranks(folder) as llm:
        answers = llm.generate(PROMPTS, sampling, use_tqdm=False)
        assert llm.engine._overlap is not None and llm.engine._overlap.num_steps > 0
        model = llm._opened.backend.model
        assert isinstance(model, TensorParallelGpuModel) and model.tensor.shape[3] == 1, "one KV head of two"
        [rank] = model._workers.processes
    assert [answer.token_ids for answer in answers] == wanted
    assert rank.returncode in (0, -signal.SIGKILL), "it crashed, and was neither done nor slow to end"


@pytest.mark.slow
def test_who_gives_way_comes_back_from_host_memory_of_all_ranks(folder: str) -> None:
    prompts = [np.random.default_rng(seed).integers(3, 320, 14).tolist() for seed in range(2)]
    options, sampling = {"kv_gb": 3.2 * 8192e-9}, [SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)] * 2
    wanted = on_cpu(folder, prompts, sampling, **options)
    with two_ranks(folder, **options) as llm:
        found = [answer.token_ids for answer in llm.generate(prompts, sampling, use_tqdm=False)]
        assert llm.engine.load().swapped_blocks > 0, "nobody had to give way"
    assert found == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-moe", "gpt-oss"])
def test_mixtures_give_the_tokens_of_a_cpu(name: str, tmp_path: Path) -> None:
    family, changes = MIXTURES[name]
    write_tiny_model(tmp_path, family, **({"head_dim": 16, "hidden_size": 64} | changes))
    wanted = on_cpu(str(tmp_path), PROMPTS, [GREEDY, GREEDY])
    with two_ranks(str(tmp_path)) as llm:
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == wanted


@pytest.mark.slow
def test_pages_of_int8_codes_give_the_tokens_of_a_cpu(folder: str) -> None:
    wanted = on_cpu(folder, PROMPTS, [GREEDY, GREEDY], kv_dtype="int8")
    with two_ranks(folder, kv_dtype="int8") as llm:
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == wanted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows that only fill a graph may hold anything
def test_graphs_of_two_ranks_are_captured_alike_and_replayed_together(folder: str) -> None:
    """Three sequences in a graph of four, and a second step whose tokens only the first rank's GPU knows: each
    sequence's is the one drawn for another."""
    checkpoint = open_checkpoint(folder)
    ranks = InThreads(2)
    whole = torch.zeros((4, 2, 2, 2, 16, 16))
    newest, steps = [2, 0, 1], [step(3, torch.tensor([5, 200, 320])), step(4, torch.zeros(3, dtype=torch.int64))]
    expected = load_model(checkpoint, FLOAT32, 32)
    first = expected.forward(steps[0], whole, NoHook()).argmax(-1)
    second = expected.forward(step(4, first[newest]), whole, NoHook()).argmax(-1)
    assert len(set(first.tolist())) == 3, "to mistake one for another would change nothing"

    def compute(rank: int) -> tuple[list[int], list[list[int]]]:
        ours = InThread(ranks, rank, 2)
        model = GpuModel(
            lambda kernels: load_part(checkpoint, FLOAT32, ours, 32, kernels),
            max_blocks=2,
            dtype=torch.float32,
            buckets=(1, 2, 4),
            share=ours.share,
        )
        cache = torch.zeros((4, 2, 2, 1, 16, 16))
        model.warm_up(cache, 2)
        captured = sorted(model._graphs)
        drawn = []
        for index, batch in enumerate(steps):
            known = newest if index else None
            if rank == 0:
                assert model.replays(batch, cache, NoHook())
                drawn.append(model.start(batch, cache, None, known).tokens())
            else:
                model.follow(batch, cache, known, NoHook(), replays=True, draws=True)
                drawn.append(model._drawn.tolist())
        return captured, drawn

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(compute, range(2)))
    assert found[0] == found[1] == ([1, 2], [first.tolist(), second.tolist()])


def step(position: int, tokens: torch.Tensor) -> ForwardBatch:
    """Of three sequences with a block each."""
    return ForwardBatch(
        tokens=tokens,
        positions=torch.full((3,), position),
        query_starts=torch.arange(4, dtype=torch.int32),
        context_lens=torch.full((3,), position + 1, dtype=torch.int32),
        block_tables=torch.arange(3, dtype=torch.int32)[:, None],
        slots=torch.arange(3) * 16 + position,
        logit_rows=torch.arange(3),
    )


def test_a_dead_rank_is_an_error_and_not_a_hang(folder: str) -> None:
    with two_ranks(folder) as llm:
        model = llm._opened.backend.model
        assert isinstance(model, TensorParallelGpuModel)
        [rank] = model._workers.processes
        rank.kill()
        rank.wait()
        for _ in range(2):
            with pytest.raises(NodeUnavailable, match=r"ranks \[1\] have failed"):
                llm.generate(PROMPTS[1:], GREEDY, use_tqdm=False)


def test_after_an_interrupt_no_step_hangs_and_ranks_end_with_their_engine(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = two_ranks(folder)
    model = llm._opened.backend.model
    assert isinstance(model, TensorParallelGpuModel)
    [rank] = model._workers.processes

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model._rank.model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1:], GREEDY, use_tqdm=False)
    assert rank.poll() is not None
    with pytest.raises(InternalError, match="ended with a step that failed or was interrupted"):
        llm.generate(PROMPTS[1:], GREEDY, use_tqdm=False)


def test_ranks_of_an_engine_that_is_dropped_end(folder: str) -> None:
    llm = two_ranks(folder)
    model = llm._opened.backend.model
    assert isinstance(model, TensorParallelGpuModel)
    [rank] = model._workers.processes
    assert rank.poll() is None
    del llm, model
    gc.collect()
    assert rank.wait(30) == -signal.SIGKILL


def test_what_cannot_be_is_refused_in_a_sentence(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="tensor parallelism over GPUs takes float32 or bfloat16 weights"):
        LLM(folder, device="cuda", tensor_parallel_size=2, weights="w8a8")
    with pytest.raises(ModelError, match=r"4 heads .* cannot be cut into 3 equal parts"):
        LLM(folder, device="cuda", tensor_parallel_size=3)
    with pytest.raises(InvalidRequest, match="tensor_parallel_size does not go with adapters"):
        LLM(folder, device="cuda", tensor_parallel_size=2, adapters={"a": folder})
    monkeypatch.setattr("mooncake.kernels.gpu.triton_launch.INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match="2 tensor parallel ranks need a GPU each from 'cuda:2' on: torch finds 3"):
        LLM(folder, device="cuda:2", tensor_parallel_size=2)
