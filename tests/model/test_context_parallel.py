"""Context parallelism over real processes: the logits and tokens of one rank, hooks that are told the truth, and an
end for everybody when somebody dies."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.config import load_config
from mooncake.engine.kv_cache import KVCache
from mooncake.errors import ConfigError, InternalError, InvalidRequest, KVLoadFailed, ModelError
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.model.context_parallel import ContextParallelModel, Setup, shape_of
from mooncake.model.context_plan import ContextPlan, Method
from mooncake.model.load import load_model

BLOCK_TOKENS = 16
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def one_thread_a_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve query heads over four KV heads."""
    folder = tmp_path_factory.mktemp("cp") / "tiny"
    write_tiny_model(folder, "qwen3", num_attention_heads=12, num_key_value_heads=4, head_dim=16)
    return folder


class Pair:
    """One model alone and over ranks, each with a cache."""

    def __init__(self, model: str, size: int, method: Method | None = None, max_model_len: int = 0) -> None:
        self.checkpoint = open_checkpoint(model)
        limit = max_model_len or self.checkpoint.config.max_model_len
        self.alone = load_model(self.checkpoint, "float32", limit)
        self.setup = Setup(size, model, 0, limit, "float32", "float32", "", "", threads=1, method=method)
        self.over_ranks = ContextParallelModel(self.alone, self.setup, self.checkpoint)
        layout = self.checkpoint.kv_layout(BLOCK_TOKENS, "float32")
        self.caches = [KVCache(layout, limit // BLOCK_TOKENS) for _ in range(2)]

    def logits(self, tokens: torch.Tensor, first: int, hook: LayerHook | None = None) -> list[torch.Tensor]:
        """Of the last token and two others; tokens before ``first`` are in the caches."""
        count = len(tokens) - first
        whole = ForwardBatch.of_prompt(tokens, BLOCK_TOKENS, torch.tensor([count - 1, count // 3, count // 3]))
        batch = replace(
            whole,
            tokens=tokens[first:],
            positions=whole.positions[first:],
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            slots=whole.slots[first:],
        )
        models = (self.alone, NoHook()), (self.over_ranks, hook or NoHook())
        return [
            model.forward(batch, cache.tensor, told) for (model, told), cache in zip(models, self.caches, strict=True)
        ]

    def check(self, tokens: torch.Tensor, first: int, method: Method) -> None:
        alone, together = self.logits(tokens, first)
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(self.caches[1].tensor, self.caches[0].tensor, rtol=0, atol=1e-5)
        report = self.over_ranks.report
        assert report is not None and set(report.methods) == {method}
        plan = ContextPlan.of(self.setup.size, np.array([0, len(tokens) - first]), np.array([len(tokens)]))
        sent_bytes = plan.sent_bytes(method, shape_of(self.checkpoint, self.setup))
        assert report.sent_bytes == len(report.methods) * sent_bytes > 0


@contextmanager
def pair(model: str, size: int, method: Method | None = None, max_model_len: int = 0) -> Iterator[Pair]:
    both = Pair(model, size, method, max_model_len)
    try:
        yield both
    finally:
        both.over_ranks.close()


def some_tokens(count: int, vocab: int = 300) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(count).integers(3, vocab, count))


@pytest.mark.parametrize(
    ("size", "method"),
    [(2, method) for method in Method]
    + [pytest.param(size, method, marks=pytest.mark.slow) for size in (3, 4) for method in Method],
)
def test_ranks_give_the_logits_of_one(folder: Path, size: int, method: Method) -> None:
    if size == 3 and method is Method.HEADS:
        with pytest.raises(ModelError, match="12 heads over 4 KV heads cannot be parted among 3 ranks"):
            Pair(str(folder), size, method)
        return
    with pair(str(folder), size, method) as both:
        tokens = some_tokens(203)
        both.check(tokens[:101], 0, method)
        both.check(tokens, 101, method)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_the_real_model_over_ranks(size: int) -> None:
    """All that is cached makes queries fewer than the keys that they would have to be sent."""
    with pair("smollm2", size, max_model_len=1024) as both:
        tokens = some_tokens(800, 40_000)
        both.check(tokens[:701], 0, Method.PASS_KV)
        both.check(tokens[:770], 701, Method.PASS_Q)


def test_a_family_with_windows_goes_by_heads_where_it_must(tmp_path: Path) -> None:
    write_tiny_model(
        tmp_path / "gemma", "gemma2", num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=24
    )
    with pair(str(tmp_path / "gemma"), 2) as both:
        alone, together = both.logits(some_tokens(90), 0)
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
        assert both.over_ranks.report is not None
        assert set(both.over_ranks.report.methods) == {Method.HEADS, Method.PASS_KV}
        with pytest.raises(ModelError, match="sliding window go by heads"):
            Pair(str(tmp_path / "gemma"), 2, Method.PASS_Q)


class Watching:
    """Sees what the cache holds of a step when a layer is told to be there; fails where it is asked to."""

    wants_layers = True

    def __init__(self, both: Pair, count: int, fails_before: int = -1, fails_after: int = -1) -> None:
        self.heard: list[str] = []
        self._both, self._blocks = both, -(-count // BLOCK_TOKENS)
        self._fails_before, self._fails_after = fails_before, fails_after

    def before_layer(self, layer: int) -> None:
        self.heard.append(f"before {layer}")
        if layer == self._fails_before:
            raise KVLoadFailed("it will not come", ("someone",))

    def after_layer(self, layer: int) -> None:
        alone, together = (cache.tensor[: self._blocks, layer] for cache in self._both.caches)
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
        self.heard.append(f"after {layer}")
        if layer == self._fails_after:
            raise KVLoadFailed("it will not go", ("someone",))


@pytest.mark.parametrize("method", [Method.PASS_KV, Method.PASS_Q])
def test_hooks_hear_of_layers_that_are_there_and_may_abandon_a_step(folder: Path, method: Method) -> None:
    with pair(str(folder), 2, method) as both:
        tokens = some_tokens(120)
        told = Watching(both, 120)
        both.logits(tokens, 0, told)
        assert told.heard == ["before 0", "after 0", "before 1", "after 1"]
        for failing in ({"fails_before": 0}, {"fails_before": 1}, {"fails_after": 0}, {"fails_after": 1}):
            with pytest.raises(KVLoadFailed):
                both.logits(tokens, 0, Watching(both, 120, **failing))
        alone, together = both.logits(tokens, 0)
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_a_bad_batch_is_the_error_that_it_is_alone(folder: Path) -> None:
    with pair(str(folder), 2) as both:
        tokens = some_tokens(80)
        batch = ForwardBatch.of_prompt(tokens, BLOCK_TOKENS, torch.tensor([79]))
        with pytest.raises(IndexError):
            wrong = replace(batch, positions=batch.positions + 100_000)
            both.over_ranks.forward(wrong, both.caches[1].tensor, NoHook())
        alone, together = both.logits(tokens, 0)
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


class Killing(NoHook):
    wants_layers = True

    def __init__(self, both: Pair) -> None:
        self._both = both

    def after_layer(self, layer: int) -> None:
        worker = self._both.over_ranks.workers.processes[-1]
        worker.kill()
        worker.wait()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.timeout(60)
def test_a_rank_that_dies_ends_the_step_and_the_first_one_goes_on_alone(folder: Path, size: int) -> None:
    with pair(str(folder), size) as both:
        tokens = some_tokens(90)
        with pytest.raises(InternalError, match=rf"context parallel ranks \[.*{size - 1}\] have failed"):
            both.logits(tokens, 0, Killing(both))
        assert all(worker.poll() is not None for worker in both.over_ranks.workers.processes)
        alone, together = both.logits(tokens, 0)
        assert torch.equal(alone, together)


def generate(folder: Path, prompts: Sequence[Sequence[int]], **options: int) -> list[list[int]]:
    with LLM(str(folder), kv_gb=0.01, block_tokens=16, chunk_tokens=128, **options) as llm:
        return [each.token_ids for each in llm.generate([list(prompt) for prompt in prompts], GREEDY, use_tqdm=False)]


def test_an_engine_over_ranks_gives_the_same_answers(folder: Path) -> None:
    """Prompts in several steps, beside others' decodes, and with prefixes that were cached."""
    one, other = some_tokens(210).tolist(), some_tokens(97).tolist()
    prompts = [one, other, one[:170] + other[:30], [5, 6, 7]]
    assert generate(folder, prompts, context_parallel_size=2) == generate(folder, prompts)


def test_ranks_of_an_engine_that_is_dropped_end(folder: Path) -> None:
    llm = LLM(str(folder), kv_gb=0.01, block_tokens=16, context_parallel_size=2)
    assert isinstance(llm._backend.model, ContextParallelModel)
    [rank] = llm._backend.model.workers.processes
    assert rank.poll() is None
    del llm
    gc.collect()
    assert rank.wait(30) is not None


@pytest.mark.parametrize(
    "others",
    [{"tensor_parallel": 2}, {"device": "cuda"}, {"adapters": {"a": "folder"}}],
    ids=lambda options: next(iter(options)),
)
def test_what_does_not_go_together_is_refused(folder: Path, others: dict[str, object]) -> None:
    with pytest.raises((InvalidRequest, ModelError)):
        LLM(str(folder), context_parallel_size=2, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    ["cluster.switchable=true", "prefill.blend_share=0.2", "prefill.device=cuda", 'model.adapters=["a=/a"]'],
)
def test_nodes_refuse_what_does_not_go_together(other: str) -> None:
    assert load_config(None, ["prefill.context_parallel=2"]).prefill.context_parallel == 2
    with pytest.raises(ConfigError, match=r"prefill\.context_parallel does not go together with"):
        load_config(None, ["prefill.context_parallel=2", other])
