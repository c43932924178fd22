"""Context parallelism over real processes: the logits and tokens of one rank, hooks called at the right time, and an
end of all ranks when one dies."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from context_pair import Pair, pair, some_tokens
from tiny_mixtures import Published
from tiny_model import write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.config import load_config
from mooncake.errors import ConfigError, InvalidRequest, ModelError, NodeUnavailable
from mooncake.model.batch import NoHook
from mooncake.model.parallel.context_parallel import ContextParallelModel
from mooncake.model.parallel.context_plan import Method

pytestmark = pytest.mark.usefixtures("one_torch_thread")

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve query heads over four KV heads."""
    folder = tmp_path_factory.mktemp("cp") / "tiny"
    write_tiny_model(folder, "qwen3", num_attention_heads=12, num_key_value_heads=4, head_dim=16)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "method"), [(2, Method.HEADS), (3, Method.PASS_KV), (3, Method.PASS_Q), *((4, each) for each in Method)]
)
def test_more_ranks_and_heads_give_them_too(folder: Path, size: int, method: Method) -> None:
    with pair(str(folder), size, method) as both:
        tokens = some_tokens(203)
        both.check(tokens[:101], 0, method)
        both.check(tokens, 101, method)


def test_what_cannot_be_cut_is_refused_before_anything_starts(folder: Path) -> None:
    with pytest.raises(ModelError, match="12 heads over 4 KV heads cannot be parted among 3 ranks"):
        Pair(str(folder), 3, Method.HEADS)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_the_real_model_over_ranks(size: int) -> None:
    """Logits reach 29, and differ from float64 by 7e-5 with one rank (6e-5 with two). Keys reach 22; for one of these
    800 random tokens the rounding error is 2e-4."""
    with pair("smollm2", size, max_model_len=1024) as both:
        tokens = some_tokens(800, 40_000)
        both.check(tokens[:701], 0, Method.PASS_KV, atol=1e-4, kv_atol=5e-4)
        both.check(tokens[:770], 701, Method.PASS_Q, atol=1e-4, kv_atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_a_family_with_windows_goes_by_heads_where_it_must(family: str, tmp_path: Path) -> None:
    write_tiny_model(
        tmp_path / "tiny", family, num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=24
    )
    with pair(str(tmp_path / "tiny"), 2) as both:
        alone, together = both.logits(some_tokens(90), 0)
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
        assert both.over_ranks.report is not None
        assert set(both.over_ranks.report.methods) == {Method.HEADS, Method.PASS_KV}
        with pytest.raises(ModelError, match="sliding window go by heads"):
            Pair(str(tmp_path / "tiny"), 2, Method.PASS_Q)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "method"), [*((2, each) for each in Method), pytest.param(3, Method.PASS_Q, marks=pytest.mark.slow)]
)
def test_latent_rows_go_round_as_keys_that_are_the_values(size: int, method: Method, tmp_path: Path) -> None:
    """One row per token, with and without tokens before the step; the check counts the bytes."""
    published = Published("deepseek-v3", tmp_path)
    with pair(published.folder, size, method) as both:
        tokens = some_tokens(203)
        both.check(tokens[:101], 0, method, atol=1e-4)
        both.check(tokens, 101, method, atol=1e-4)
        assert both.caches[1].tensor.shape[2] == 1


@pytest.mark.parametrize("name", ["deepseek-v3", pytest.param("deepseek-v2", marks=pytest.mark.slow)])
def test_latent_attention_over_ranks_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    published = Published(name, tmp_path)
    prompts = [some_tokens(count).tolist() for count in (150, 97, 5)]
    found = generate(tmp_path, prompts, 2, {})
    assert found == published.greedy_all(prompts, found)


class Killing(NoHook):
    wants_layers = True

    def __init__(self, both: Pair) -> None:
        self._both = both

    def after_layer(self, layer: int) -> None:
        worker = self._both.over_ranks.workers.processes[-1]
        worker.kill()
        worker.wait()


class Interrupting(NoHook):
    wants_layers = True

    def after_layer(self, layer: int) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_dies_ends_the_step_and_the_first_one_goes_on_alone(folder: Path, size: int) -> None:
    with pair(str(folder), size) as both:
        tokens = some_tokens(90)
        with pytest.raises(NodeUnavailable, match=rf"context parallel ranks \[.*{size - 1}\] have failed"):
            both.logits(tokens, 0, Killing(both))
        check_is_alone(both)


def test_after_an_interrupt_nothing_of_its_step_is_taken_for_the_next_ones(folder: Path) -> None:
    with pair(str(folder), 2) as both:
        with pytest.raises(KeyboardInterrupt):
            both.logits(some_tokens(90), 0, Interrupting())
        check_is_alone(both)


def check_is_alone(both: Pair) -> None:
    assert all(worker.poll() is not None for worker in both.over_ranks.workers.processes)
    alone, first_rank = both.logits(some_tokens(90), 0)
    assert torch.equal(alone, first_rank)


def generate(folder: Path, prompts: Sequence[Sequence[int]], size: int, formats: dict[str, str]) -> list[list[int]]:
    options = {"kv_gb": 0.01, "block_tokens": 16, "chunk_tokens": 128, "context_parallel_size": size}
    with LLM(str(folder), **options, **formats) as llm:  # type: ignore[arg-type]
        return [each.token_ids for each in llm.generate([list(prompt) for prompt in prompts], GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    "formats", [{}, pytest.param({"kv_dtype": "int8", "weights": "int8"}, marks=pytest.mark.slow)], ids=["fp32", "int8"]
)
def test_an_engine_over_ranks_gives_the_same_answers(folder: Path, formats: dict[str, str]) -> None:
    """Prompts in several steps, together with decodes, and with cached prefixes."""
    one, other = some_tokens(210).tolist(), some_tokens(97).tolist()
    prompts = [one, other, one[:170] + other[:30], [5, 6, 7]]
    assert generate(folder, prompts, 2, formats) == generate(folder, prompts, 1, formats)


def test_ranks_of_an_engine_that_is_dropped_end(folder: Path) -> None:
    llm = LLM(str(folder), kv_gb=0.01, block_tokens=16, context_parallel_size=2)
    assert isinstance(llm._opened.backend.model, ContextParallelModel)
    [rank] = llm._opened.backend.model.workers.processes
    assert rank.poll() is None
    del llm
    gc.collect()
    assert rank.wait(30) is not None


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"tensor_parallel_size": 2}, "do not go together"),
        ({"device": "cuda"}, "is for CPUs"),
        ({"adapters": {"a": "folder"}}, "does not go with adapters"),
    ],
    ids=["tensor_parallel", "device", "adapters"],
)
def test_what_does_not_go_together_is_refused(folder: Path, others: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        LLM(str(folder), context_parallel_size=2, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    ["cluster.switchable=true", "prefill.blend_share=0.2", "prefill.device=cuda", 'model.adapters=["a=/a"]'],
)
def test_nodes_refuse_what_does_not_go_together(other: str) -> None:
    assert load_config(None, ["prefill.context_parallel=2"]).prefill.context_parallel == 2
    with pytest.raises(ConfigError, match=r"prefill\.context_parallel does not go together with"):
        load_config(None, ["prefill.context_parallel=2", other])
