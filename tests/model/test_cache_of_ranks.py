"""The one cache of tensor parallel ranks: what one process leaves there, told to the hook once every rank has written
it, and at rest when a step has ended, however it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import Ranks, ranks_of
from tiny_model import write_tiny_model

from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.errors import KVLoadFailed
from mooncake.hashing import Chain
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.load import load_model
from mooncake.precision import FLOAT32
from mooncake.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK_TOKENS, NUM_BLOCKS, LIMIT, LAYERS = 16, 24, 256, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "tiny"
    write_tiny_model(folder, "qwen3", num_hidden_layers=LAYERS, num_attention_heads=12, head_dim=16)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Ranks]:
    with ranks_of(str(folder), 2, NUM_BLOCKS, BLOCK_TOKENS, LIMIT) as ranks:
        yield ranks


def a_prompt(count: int, *logit_rows: int) -> ForwardBatch:
    tokens = torch.from_numpy(np.random.default_rng(count).integers(3, 300, count))
    return ForwardBatch.of_prompt(tokens, BLOCK_TOKENS, torch.tensor(logit_rows, dtype=torch.int64))


def computed_alone(folder: Path, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Its logits, and the cache afterwards."""
    checkpoint = open_checkpoint(str(folder))
    cache = KVCache(checkpoint.kv_layout(BLOCK_TOKENS, "float32"), NUM_BLOCKS)
    return load_model(checkpoint, FLOAT32, LIMIT).forward(batch, cache.tensor, NoHook()), cache.tensor


class Hesitant:
    """A hook that looks at the cache, lets the other ranks wait for it, and then wait for them."""

    wants_layers = True

    def __init__(self, ranks: Ranks, wanted: torch.Tensor) -> None:
        self._ranks, self._cache, self._wanted = ranks, ranks.cache.tensor, wanted
        self.told: list[str] = []

    def before_layer(self, layer: int) -> None:
        time.sleep(0.03)  # enough for a rank that does not wait
        assert not self._cache[:, layer].any(), f"layer {layer} was computed before it was let in"
        self.told.append(f"before {layer}")
        for pid in self._ranks.model.pids:
            stop_briefly(pid)

    def after_layer(self, layer: int) -> None:
        assert is_close(self._cache[:, layer], self._wanted[:, layer]), f"layer {layer} is not complete"
        self.told.append(f"after {layer}")


def stop_briefly(pid: int) -> None:
    """A process that the system does not run for a while."""

    def go_on() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.1, go_on).start()


def is_close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Sums over ranks round differently."""
    return torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("logit_rows", [(99, 3), ()], ids=["logits", "no logits"])
def test_a_hook_lets_all_ranks_in_and_hears_of_layers_that_all_have_written(
    ranks: Ranks, folder: Path, logit_rows: tuple[int, ...]
) -> None:
    """A step without logits ends before its last layer has a sum."""
    batch = a_prompt(100, *logit_rows)
    wanted, wanted_cache = computed_alone(folder, batch)
    ranks.cache.tensor.zero_()
    hook = Hesitant(ranks, wanted_cache)
    logits = ranks.model.forward(batch, ranks.cache.tensor, hook)
    assert is_close(ranks.cache.tensor, wanted_cache) and logits.shape == wanted.shape and is_close(logits, wanted)
    assert hook.told == [f"{when} {layer}" for layer in range(LAYERS) for when in ("before", "after")]


class Failing(NoHook):
    def __init__(self, when: str, layer: int, error: Exception, wants_layers: bool = True) -> None:
        self.wants_layers = wants_layers
        self._when, self._layer, self._error = when, layer, error

    def before_layer(self, layer: int) -> None:
        if (self._when, self._layer) == ("before", layer):
            raise self._error

    def after_layer(self, layer: int) -> None:
        if (self._when, self._layer) == ("after", layer):
            raise self._error


@pytest.mark.parametrize("error", [KVLoadFailed("the prefix has gone", ("one",)), RuntimeError("a bug")])
@pytest.mark.parametrize(("when", "layer"), [("before", 0), ("before", 3), ("after", 2), ("after", LAYERS - 1)])
def test_a_step_that_its_hook_abandons_ends_on_all_ranks_and_the_next_one_runs(
    ranks: Ranks, folder: Path, when: str, layer: int, error: Exception
) -> None:
    ranks.cache.tensor.zero_()
    with pytest.raises(type(error), match=str(error)):
        ranks.model.forward(a_prompt(50), ranks.cache.tensor, Failing(when, layer, error))
    untouched = layer + (when == "after")
    time.sleep(0.05)
    assert not ranks.cache.tensor[:, untouched:].any(), "a rank went on"
    assert ranks.cache.tensor[:, :untouched].any() == (untouched > 0)
    batch = a_prompt(40, 39)
    assert is_close(ranks.model.forward(batch, ranks.cache.tensor, NoHook()), computed_alone(folder, batch)[0])


def test_ranks_give_the_tokens_of_one_process_when_sequences_fork_and_give_way(ranks: Ranks, folder: Path) -> None:
    """Copies of blocks, cached prefixes and places for preempted sequences are those of any other cache."""
    checkpoint = open_checkpoint(str(folder))
    cache = KVCache(checkpoint.kv_layout(BLOCK_TOKENS, "float32"), NUM_BLOCKS, num_places=4)
    config = EngineConfig(BLOCK_TOKENS, 96, 8, LIMIT)
    engines = [
        Engine(ranks.model, ranks.cache, config),
        Engine(load_model(checkpoint, FLOAT32, LIMIT), cache, config),
    ]
    random = np.random.default_rng(3)
    for lengths, new_tokens, num_answers in (((70, 5), 12, 1), ((40, 64), 8, 3), ((120, 110, 100), 40, 1)):
        prompts = [random.integers(3, 300, length, np.uint32) for length in lengths]
        ours, theirs = (answers(engine, prompts, new_tokens, num_answers) for engine in engines)
        assert ours == theirs
    for engine in engines:
        assert engine.load().preemptions and engine.load().forks and engine.load().copied_blocks
    engines[0].drop_cached()


def answers(
    engine: Engine, prompts: list[np.ndarray[tuple[int], np.dtype[np.uint32]]], new_tokens: int, num_answers: int
) -> dict[tuple[str, int], list[int]]:
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, seed=index + 1, n=num_answers)
        chain = Chain(bytes(32))
        engine.add(Sequence(str(index), prompt, len(prompt), sampling, chain, eos_ids=(), max_model_len=LIMIT))
    found: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault((output.request_id, output.choice), []).append(output.token.token_id)
    return found
