"""Tensor parallelism: several processes give the tokens that one gives, and say so when one of them dies."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np
import pytest
import torch
from greedy import greedy_answers
from ranks import ranks_of
from tiny_model import write_tiny_model
from waiting import is_running

from mooncake import LLM
from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.errors import InternalError, ModelError, NodeUnavailable
from mooncake.model.load import load_model
from mooncake.model.parallel.context_parallel import ContextParallelModel
from mooncake.model.parallel.shards import shard_config, shard_weights
from mooncake.model.parallel.tensor_parallel import TensorParallelModel
from mooncake.model.reading.weights import load_weights
from mooncake.precision import FLOAT32
from mooncake.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_torch_thread")

VOCABULARY = ("embed_tokens", "lm_head")
BLOCK_TOKENS = 16
NUM_BLOCKS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve query heads over two KV heads."""
    folder = tmp_path_factory.mktemp("tp") / "tiny"
    write_tiny_model(folder, "qwen3", num_attention_heads=12, num_key_value_heads=2, intermediate_size=48)
    return folder


def config_of(limit: int) -> EngineConfig:
    return EngineConfig(BLOCK_TOKENS, 32, 8, limit)


def whole(model: str, prompts: list[Many[int]], new_tokens: int, limit: int = 256) -> list[list[int]]:
    checkpoint = open_checkpoint(model)
    cache = KVCache(checkpoint.kv_layout(BLOCK_TOKENS, "float32"), NUM_BLOCKS)
    return greedy_answers(Engine(load_model(checkpoint, FLOAT32), cache, config_of(limit)), prompts, new_tokens)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_give_the_tokens_of_one_process(folder: Path, size: int) -> None:
    """With four ranks each KV head is on two of them."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 300, length).tolist() for length in (70, 5, 33)]
    with ranks_of(str(folder), size, NUM_BLOCKS, BLOCK_TOKENS) as ranks:
        found = greedy_answers(Engine(ranks.model, ranks.cache, config_of(256)), prompts, 16)
    assert found == whole(str(folder), prompts, 16)


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_vocabulary_that_does_not_divide_gives_the_tokens_of_one_process(is_tied: bool, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "qwen3", vocab_size=321, tie_word_embeddings=is_tied, initializer_range=0.1)
    prompts = [[320, 0, 160, 161, 159, 7], [5, 6, 300]]  # tokens at the borders of the parts
    wanted = whole(str(tmp_path), prompts, 16)
    assert {token < 160 for tokens in wanted for token in tokens} == {True, False}, "one part gives all tokens"
    with ranks_of(str(tmp_path), 2, NUM_BLOCKS, BLOCK_TOKENS) as ranks:
        assert greedy_answers(Engine(ranks.model, ranks.cache, config_of(256)), prompts, 16) == wanted


@pytest.mark.slow
def test_the_real_model_on_three_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    prompts = [np.random.default_rng(1).integers(100, 40_000, length).tolist() for length in (150, 20)]
    with ranks_of("smollm2", 3, NUM_BLOCKS, BLOCK_TOKENS, 512) as ranks:
        found = greedy_answers(Engine(ranks.model, ranks.cache, config_of(512)), prompts, 24)
    assert found == whole("smollm2", prompts, 24, 512)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_ranks_share_pages_of_int8(folder: Path) -> None:
    prompts = [np.random.default_rng(seed).integers(3, 300, 40).tolist() for seed in range(3)]
    found = []
    for size in (1, 2):
        with LLM(str(folder), kv_gb=0.01, block_tokens=16, kv_dtype="int8", tensor_parallel_size=size) as llm:
            given = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
            found.append([answer.token_ids for answer in given])
    assert found[0] == found[1]


def test_the_parts_of_a_layer_are_the_layer(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    weights, config = load_weights(checkpoint, "float32"), checkpoint.config
    parts = [shard_weights(weights, config, rank, 2) for rank in range(2)]
    for name, tensor in weights.items():
        pieces = [part[name] for part in parts]
        if any(kind in name for kind in (*("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), *VOCABULARY)):
            assert torch.equal(torch.cat(pieces), tensor)
        elif any(kind in name for kind in ("o_proj", "down_proj")):
            assert torch.equal(torch.cat(pieces, dim=1), tensor)
        else:
            assert all(torch.equal(piece, tensor) for piece in pieces)


def test_a_dead_rank_is_an_error_and_not_a_hang(folder: Path) -> None:
    with ranks_of(str(folder), 2, NUM_BLOCKS, BLOCK_TOKENS) as ranks:
        engine = Engine(ranks.model, ranks.cache, config_of(256))
        assert greedy_answers(engine, [[5, 6, 7]], 2)
        [worker] = ranks.model._workers.processes
        worker.kill()
        worker.wait()
        with pytest.raises(NodeUnavailable, match=r"ranks \[1\] have failed"):
            greedy_answers(engine, [[8, 9]], 8)


def test_after_an_interrupt_no_step_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C leaves the other rank in the middle of a step."""
    with LLM(str(folder), kv_gb=0.001, block_tokens=4, tensor_parallel_size=2) as llm:
        model = llm._opened.backend.model
        assert isinstance(model, TensorParallelModel)
        [worker] = model._workers.processes

        def interrupted(*arguments: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(model._shard, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert worker.poll() is not None
        with pytest.raises(InternalError, match="ended with a step that failed or was interrupted"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))


@pytest.mark.slow
def test_ranks_outlive_the_thread_that_started_them_and_end_with_the_process(folder: Path) -> None:
    code = f"""
import sys, threading, torch
from mooncake import LLM, SamplingParams
torch.set_num_threads(1)
made = []
def make():
    made.append(LLM({str(folder)!r}, kv_gb=0.01, block_tokens=16, tensor_parallel_size=2))
thread = threading.Thread(target=make)
thread.start()
thread.join()
[answer] = made[0].generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True), use_tqdm=False)
print(len(answer.token_ids), made[0]._opened.backend.model.pids[0], flush=True)
sys.stdin.read()
"""
    first = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with first:
        assert first.stdout is not None
        num_tokens, rank = map(int, first.stdout.readline().split())
        assert num_tokens == 4 and is_running(rank)
        first.kill()
    for _ in range(600):
        if not is_running(rank):
            break
        time.sleep(0.05)
    assert not is_running(rank)


@pytest.mark.slow
def test_ranks_of_an_engine_that_is_dropped_or_closed_end(folder: Path) -> None:
    for is_closed in (False, True):
        llm = LLM(str(folder), kv_gb=0.01, block_tokens=16, tensor_parallel_size=2)
        assert isinstance(llm._opened.backend.model, TensorParallelModel)
        [rank] = llm._opened.backend.model._workers.processes
        assert rank.poll() is None
        if is_closed:
            llm.close()
            llm.close()
        del llm
        gc.collect()
        assert rank.wait(30) != -signal.SIGABRT, "it ended while it was in its group"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tensor_parallel_size", "context_parallel_size"])
def test_ranks_that_are_told_to_end_do_not_crash(folder: Path, way: str) -> None:
    """Ranks that left their process group open at exit aborted three times out of ten."""
    for _ in range(6):
        with LLM(str(folder), kv_gb=0.01, block_tokens=16, **{way: 2}) as llm:  # type: ignore[arg-type]
            model = llm._opened.backend.model
            assert isinstance(model, TensorParallelModel | ContextParallelModel)
            [rank] = (model._workers if isinstance(model, TensorParallelModel) else model.workers).processes
        assert rank.returncode == 0


@pytest.mark.parametrize(("size", "sentence"), [(5, "cannot be cut into 5 equal parts"), (3, "neither be cut into 3")])
def test_a_model_that_cannot_be_cut_is_refused_before_anything_starts(folder: Path, size: int, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        shard_config(open_checkpoint(str(folder)).config, size)
    with pytest.raises(ModelError, match=sentence), ranks_of(str(folder), size, NUM_BLOCKS, BLOCK_TOKENS):
        pass
