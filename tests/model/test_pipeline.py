"""A pipeline of processes gives the results of one process, calls its hook at the right time, and reports dead stages.

Small steps are forced into several pieces, so that pieces do run in parallel.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import write_tiny_model

from mooncake import LLM
from mooncake.checkpoint import open_checkpoint
from mooncake.engine.backends.backend import BackendSpec, CacheSize, Processes, over_stages
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig, StepOutput
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence as Prompt
from mooncake.errors import (
    ConfigError,
    InternalError,
    InvalidRequest,
    KVLoadFailed,
    ModelError,
    MooncakeError,
    NodeUnavailable,
)
from mooncake.hashing import Chain
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.llama import CausalLM
from mooncake.model.load import load_model
from mooncake.model.pages import SharedMemory, pages_over
from mooncake.model.parallel.pieces import PieceCost, Span, equal_length
from mooncake.model.parallel.pipeline import PipelineModel, spans_of
from mooncake.model.reading.weights import load_weights
from mooncake.precision import FLOAT32, resolve_precision
from mooncake.sampling_params import SamplingParams

BLOCK_TOKENS, NUM_BLOCKS, LIMIT = 16, 24, 256
FP32 = resolve_precision("float32")


def five_pieces(spans: Sequence[Span], costs: Sequence[PieceCost]) -> list[int]:
    return equal_length(spans, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers, whose heads the fused pass takes."""
    folder = tmp_path_factory.mktemp("pipeline") / "tiny"
    write_tiny_model(folder, "qwen3", num_hidden_layers=5, head_dim=16)
    return folder


class Pipeline:
    """A model in stages, and its cache."""

    def __init__(self, folder: Path, num_stages: int) -> None:
        layout = open_checkpoint(str(folder)).kv_layout(BLOCK_TOKENS, "float32")
        memory = SharedMemory.create(NUM_BLOCKS * layout.block_bytes)
        self.model = PipelineModel(
            str(folder), FP32, memory, layout, NUM_BLOCKS, num_stages, LIMIT, threads=1, cut=five_pieces
        )
        self.cache = KVCache(layout, NUM_BLOCKS, memory.bytes.data, num_places=4)
        memory.close()


@pytest.fixture(scope="module", params=[3, pytest.param(2, marks=pytest.mark.slow)])
def pipeline(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pipeline]:
    """Of three stages, one is neither the first nor the last."""
    made = Pipeline(folder, request.param)
    yield made
    made.model.close()


@pytest.fixture
def own(folder: Path) -> Iterator[Pipeline]:
    """One that a test may break."""
    made = Pipeline(folder, 2)
    yield made
    made.model.close()


@pytest.fixture(scope="module")
def whole(folder: Path) -> CausalLM:
    model = load_model(open_checkpoint(str(folder)), FLOAT32, LIMIT)
    assert isinstance(model, CausalLM)
    return model


def engine_over(model: PipelineModel | CausalLM, cache: KVCache, **changes: int) -> Engine:
    numbers = {"block_tokens": BLOCK_TOKENS, "chunk_tokens": 96, "max_sequences": 8, "max_model_len": LIMIT} | changes
    return Engine(model, cache, EngineConfig(**numbers))


def answers(engine: Engine, prompts: list[list[int]], new_tokens: int, **sampling: int) -> list[StepOutput]:
    """In the order of (prompt, answer, place)."""
    limit = engine.config.max_model_len
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, seed=index + 1, **sampling).for_engine()
        tokens = np.array(prompt, np.uint32)
        engine.add(Prompt(str(index), tokens, len(tokens), params, Chain(bytes(32)), eos_ids=(), max_model_len=limit))
    found: list[StepOutput] = []
    while engine.has_work:
        found += engine.step()
    assert not engine.take_ended()
    return sorted(found, key=lambda output: (int(output.request_id), output.choice))


def some_prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, 300, length).tolist() for length in lengths]


def test_stages_give_the_tokens_of_one_process(pipeline: Pipeline, whole: CausalLM) -> None:
    """Ragged batches, chunks, cached prefixes, several answers over shared blocks, preempted sequences."""
    ours = engine_over(pipeline.model, pipeline.cache)
    theirs = engine_over(whole, KVCache(pipeline.cache.layout, NUM_BLOCKS, num_places=4))
    shared = some_prompts(70)[0]
    rounds: list[tuple[list[list[int]], int, dict[str, int]]] = [
        (some_prompts(70, 5, 33, 1), 12, {"temperature": 0}),
        ([shared + tail for tail in some_prompts(9, 40)], 6, {"temperature": 0}),  # their prefix is cached by now
        (some_prompts(40, 64), 8, {"temperature": 1, "n": 3}),
        (some_prompts(120, 110, 100), 40, {"temperature": 0}),  # they outgrow the blocks that there are
        (some_prompts(50), 4, {"temperature": 0, "logprobs": 1, "prompt_logprobs": 0}),
    ]
    for prompts, new_tokens, sampling in rounds:
        got, wanted = (answers(engine, prompts, new_tokens, **sampling) for engine in (ours, theirs))
        assert [output.token.token_id for output in got] == [output.token.token_id for output in wanted]
        for one, other in zip(got, wanted, strict=True):
            ours_told, theirs_told = one.prompt_logprobs or (), other.prompt_logprobs or ()
            assert [each.logprob for each in ours_told] == pytest.approx([each.logprob for each in theirs_told])
    for load in (ours.load(), theirs.load()):
        assert load.preemptions and load.forks and load.copied_blocks
    ours.drop_cached()


class Watcher:
    """A hook that checks the cache when a layer is reported."""

    wants_layers = True

    def __init__(self, cache: torch.Tensor, wanted: torch.Tensor) -> None:
        self._cache, self._wanted = cache, wanted
        self.told: list[str] = []

    def before_layer(self, layer: int) -> None:
        assert not self._cache[:, layer].any(), f"layer {layer} was computed before it was let in"
        self.told.append(f"before {layer}")

    def after_layer(self, layer: int) -> None:
        assert torch.equal(self._cache[:, layer], self._wanted[:, layer]), f"layer {layer} is not complete"
        self.told.append(f"after {layer}")


class PieceWatcher(Watcher):
    def after_piece(self, layer: int, num_tokens: int) -> None:
        """In the first blocks of the cache, as the prompt lies."""
        full, rest = divmod(num_tokens, BLOCK_TOKENS)
        for part in (np.s_[:full, layer], np.s_[full : full + 1, layer, :, :, :rest]):
            assert torch.equal(self._cache[part], self._wanted[part]), f"{num_tokens} tokens are not there"
        self.told.append(f"piece {layer} {num_tokens}")


def prompt_batch(count: int) -> ForwardBatch:
    tokens = torch.tensor(some_prompts(count)[0])
    return ForwardBatch.of_prompt(tokens, BLOCK_TOKENS, torch.tensor([count - 1, 3]))  # not in order


@pytest.mark.parametrize("kind", [Watcher, PieceWatcher])
def test_a_hook_lets_layers_in_and_hears_of_complete_ones(
    pipeline: Pipeline, whole: CausalLM, kind: type[Watcher]
) -> None:
    batch, cache = prompt_batch(100), pipeline.cache.tensor
    cache.zero_()
    wanted_cache = torch.zeros_like(cache)
    wanted = whole.forward(batch, wanted_cache, NoHook())
    hook = kind(cache, wanted_cache)
    logits = pipeline.model.forward(batch, cache, hook)
    assert torch.allclose(logits, wanted, atol=1e-5)
    for what in ("before", "after"):
        assert [told for told in hook.told if told.startswith(what)] == [f"{what} {layer}" for layer in range(5)]
    pieces = {told for told in hook.told if told.startswith("piece")}
    wanted_pieces = {f"piece {layer} {end}" for layer in range(5) for end in (20, 40, 60, 80)}
    assert pieces == (wanted_pieces if kind is PieceWatcher else set())


def test_what_crosses_between_stages_is_the_residual_stream(pipeline: Pipeline) -> None:
    for count in (100, 1):
        pipeline.model.forward(prompt_batch(count) if count > 1 else one_token(), pipeline.cache.tensor, NoHook())
        times = pipeline.model.last_step
        assert times is not None
        num_stages = len(pipeline.model.pids)
        assert times.bytes_between == [count * 32 * 4] * (num_stages - 1)
        assert times.pieces_ms.shape == (num_stages, min(count, 5), 3)
        begins, ends = times.pieces_ms[..., 0], times.pieces_ms[..., 1]
        assert (begins[1:] >= ends[:-1]).all(), "a piece began before the stage before had left it"
        assert (begins[:, 1:] >= ends[:, :-1]).all()
        assert ends[-1, -1] <= times.elapsed_ms


def one_token() -> ForwardBatch:
    return ForwardBatch.of_prompt(torch.tensor([5]), BLOCK_TOKENS, torch.tensor([0]))


class Failing(NoHook):
    wants_layers = True

    def __init__(self, layer: int, what: str, error: Exception | None = None) -> None:
        self._place = (what, layer)
        self.error = error or gone()

    def before_layer(self, layer: int) -> None:
        self._fail("before", layer)

    def after_layer(self, layer: int) -> None:
        self._fail("after", layer)

    def _fail(self, what: str, layer: int) -> None:
        if (what, layer) == self._place:
            raise self.error


def gone() -> KVLoadFailed:
    return KVLoadFailed("gone", ("r",))


@pytest.mark.parametrize(("layer", "what"), [(0, "before"), (3, "before"), (0, "after"), (4, "after")])
def test_a_step_that_its_hook_gives_up_is_over_everywhere(
    pipeline: Pipeline, whole: CausalLM, layer: int, what: str
) -> None:
    batch, cache = prompt_batch(100), pipeline.cache.tensor
    with pytest.raises(KVLoadFailed):
        pipeline.model.forward(batch, cache, Failing(layer, what))
    left = cache.clone()
    logits = pipeline.model.forward(one_token(), cache, NoHook())  # in the first slot alone
    left[0, :, :, :, 0] = cache[0, :, :, :, 0]
    assert torch.equal(left, cache), "something was written after the step was over"
    assert torch.allclose(logits, whole.forward(one_token(), torch.zeros_like(cache), NoHook()), atol=1e-5)


def test_what_a_hook_raises_is_never_taken_for_the_end_of_a_stage(pipeline: Pipeline) -> None:
    with pytest.raises(ConnectionResetError, match="its own"):
        hook = Failing(1, "before", ConnectionResetError("its own"))
        pipeline.model.forward(prompt_batch(100), pipeline.cache.tensor, hook)
    assert torch.isfinite(pipeline.model.forward(one_token(), pipeline.cache.tensor, NoHook())).all()


def test_what_a_stage_cannot_compute_is_an_error_of_that_step_alone(pipeline: Pipeline) -> None:
    wrong = ForwardBatch.of_prompt(torch.tensor([5, 6]), BLOCK_TOKENS, torch.tensor([1]))
    wrong.slots[1] = NUM_BLOCKS * BLOCK_TOKENS
    for hook in (NoHook(), Failing(9, "before")):
        with pytest.raises(InternalError, match="a stage of the pipeline failed: IndexError"):
            pipeline.model.forward(wrong, pipeline.cache.tensor, hook)
    assert torch.isfinite(pipeline.model.forward(one_token(), pipeline.cache.tensor, NoHook())).all()


class Killing(NoHook):
    wants_layers = True

    def __init__(self, layer: int, pid: int) -> None:
        self._layer, self._pid = layer, pid

    def before_layer(self, layer: int) -> None:
        if layer == self._layer:
            os.kill(self._pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_dies_in_mid_step_is_an_error_then_and_ever_after(own: Pipeline, stage: int) -> None:
    died: list[MooncakeError] = []
    is_told = threading.Event()

    def tell(error: MooncakeError) -> None:
        died.append(error)
        is_told.set()

    own.model.watch(tell)
    processes = list(own.model._workers.processes)
    for _ in range(2):
        with pytest.raises(NodeUnavailable, match=rf"pipeline stages \[{stage + 1}\] have failed"):
            own.model.forward(prompt_batch(100), own.cache.tensor, Killing(1, own.model.pids[stage]))
    assert all(process.poll() is not None for process in processes), "the others go on without it"
    assert is_told.wait(10)
    assert f"[{stage + 1}]" in died[0].message


def test_a_stage_that_dies_between_two_steps_is_told(own: Pipeline) -> None:
    died: list[MooncakeError] = []
    is_told = threading.Event()
    own.model.watch(lambda error: (died.append(error), is_told.set()))  # type: ignore[func-returns-value]
    os.kill(own.model.pids[0], signal.SIGKILL)
    assert is_told.wait(10)
    with pytest.raises(NodeUnavailable, match=r"pipeline stages \[1\] have failed"):
        own.model.forward(one_token(), own.cache.tensor, NoHook())


def test_closing_is_no_death(folder: Path) -> None:
    made, died = Pipeline(folder, 2), list[MooncakeError]()
    made.model.watch(died.append)
    processes = list(made.model._workers.processes)
    made.model.close()
    made.model.close()
    assert [process.wait(10) for process in processes] == [0, 0]
    assert not died


@pytest.mark.slow
def test_stages_end_with_the_process_that_started_them(folder: Path) -> None:
    code = f"""
import sys
from mooncake import LLM, SamplingParams
llm = LLM({str(folder)!r}, kv_gb=0.01, block_tokens=16, pipeline_parallel_size=2, threads=1)
[answer] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True), use_tqdm=False)
print(len(answer.token_ids), *llm.engine._model.pids, flush=True)
sys.stdin.read()
"""
    first = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with first:
        assert first.stdout is not None
        num_tokens, *stages = map(int, first.stdout.readline().split())
        assert num_tokens == 4 and len(stages) == 2
        handles = [os.pidfd_open(pid) for pid in stages]
        first.kill()
    for handle in handles:
        is_over, _, _ = select.select([handle], [], [], 30)
        os.close(handle)
        assert is_over, "a stage outlived the process that started it"


@pytest.mark.parametrize("is_fused", [True, False])
def test_stages_with_and_without_the_fused_pass(folder: Path, whole: CausalLM, is_fused: bool) -> None:
    """In one process: the output of one stage is the input of the other, bit for bit."""
    checkpoint = open_checkpoint(str(folder))
    weights, batch = load_weights(checkpoint, "float32"), prompt_batch(60)
    stages = [
        CausalLM(checkpoint.config, weights, LIMIT, is_fused=is_fused, layers=layers)
        for layers in (range(2), range(2, 3), range(3, 5))
    ]
    cache = torch.zeros(NUM_BLOCKS, 5, 2, 2, BLOCK_TOKENS, 16)
    wanted = whole.forward(batch, torch.zeros_like(cache), NoHook())
    first, second = torch.empty(2, 60, 32)
    assert stages[0].forward(batch, cache, NoHook(), None, first).shape == (0, 320)
    stages[1].forward(batch, cache, NoHook(), first, second)
    logits = stages[2].forward(batch, cache, NoHook(), second)
    assert torch.equal(logits, wanted) if is_fused else torch.allclose(logits, wanted, atol=1e-5)


def test_a_part_of_a_batch_is_what_is_between_two_tokens() -> None:
    batch = ForwardBatch(
        tokens=torch.arange(10, 20),
        positions=torch.tensor([7, 8, 9, 30, 0, 1, 2, 3, 4, 5]),
        query_starts=torch.tensor([0, 3, 4, 10], dtype=torch.int32),
        context_lens=torch.tensor([10, 31, 6], dtype=torch.int32),
        block_tables=torch.tensor([[1, 0], [2, 3], [4, 0]], dtype=torch.int32),
        slots=torch.arange(100, 110),
        logit_rows=torch.tensor([9, 3, 2]),
    )
    assert spans_of(batch) == [Span(7, 3), Span(30, 1), Span(0, 6)]
    middle = batch.part(2, 6)
    assert middle.tokens.tolist() == [12, 13, 14, 15] and middle.slots.tolist() == [102, 103, 104, 105]
    assert middle.query_starts.tolist() == [0, 1, 2, 4]
    assert middle.context_lens.tolist() == [10, 31, 2]
    assert middle.logit_rows.tolist() == [1, 0]
    assert spans_of(middle) == [Span(9, 1), Span(30, 1), Span(0, 2)]
    end = batch.part(5, 10)
    assert end.block_tables.tolist() == [[4, 0]] and end.context_lens.tolist() == [6] and end.logit_rows.tolist() == [4]
    assert batch.part(0, 3).context_lens.tolist() == [10]


def test_an_llm_in_stages_answers_as_one_does(folder: Path) -> None:
    """Whole prompts in a step, guesses, and int8 weights and pages."""
    prompts = [[5, 6, 7, 8] * 30, some_prompts(40)[0]]
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    found = []
    for size in (1, 2):
        with LLM(
            str(folder),
            kv_gb=0.01,
            kv_dtype="int8",
            weights="int8",
            block_tokens=16,
            chunk_tokens=0,
            speculative_tokens=3,
            threads=1,
            pipeline_parallel_size=size,
        ) as llm:
            found.append([answer.token_ids for answer in llm.generate(prompts, sampling, use_tqdm=False)])
    assert found[0] == found[1]


def test_what_does_not_go_together_is_refused(folder: Path, tmp_path: Path) -> None:
    for wrong in ({"tensor_parallel_size": 2}, {"device": "cuda"}):
        with pytest.raises(InvalidRequest, match="pipeline_parallel_size"):
            LLM(str(folder), pipeline_parallel_size=2, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="5 layers are not enough for 6 stages"):
        LLM(str(folder), kv_gb=0.01, pipeline_parallel_size=6)
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        LLM(str(folder), pipeline_parallel_size=0)
    write_tiny_model(tmp_path / "other", "gpt_neox")
    with pytest.raises(ModelError, match="stages are for the Llama family"):
        LLM(str(tmp_path / "other"), kv_gb=0.01, pipeline_parallel_size=2, threads=1)


@pytest.mark.slow
def test_the_real_model_in_stages(capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = open_checkpoint("smollm2", 1024)
    layout = checkpoint.kv_layout(64, "float32")
    random = np.random.default_rng(1)
    prompts = [random.integers(100, 40_000, length).tolist() for length in (700, 20, 150)]
    config = EngineConfig(64, 0, 8, 1024)
    one = Engine(load_model(checkpoint, FLOAT32, 1024), KVCache(layout, 40), config)
    wanted = [output.token.token_id for output in answers(one, prompts, 24, temperature=0)]
    for stages in (2, 3):
        processes = Processes(stages=stages, threads=1)
        size = CacheSize(layout, 40, 1024)
        backend = over_stages(BackendSpec(checkpoint, FP32, size, processes=processes, context=1024))
        try:
            got = answers(Engine(backend.model, backend.cache, config), prompts, 24, temperature=0)
            assert [output.token.token_id for output in got] == wanted
            assert isinstance(backend.model, PipelineModel)
            assert len(backend.model.pids) == stages
        finally:
            backend.close()
    assert "Traceback" not in capfd.readouterr().err


def test_shared_pages_are_the_cache(folder: Path) -> None:
    layout = open_checkpoint(str(folder)).kv_layout(BLOCK_TOKENS, "float32")
    memory = SharedMemory.create(2 * layout.block_bytes)
    other = SharedMemory(os.dup(memory.fd), 2 * layout.block_bytes)
    pages_over(memory.bytes, layout, 2)[1, 4].fill_(3)
    assert pages_over(other.bytes, layout, 2)[1, 4].eq(3).all()
    memory.close()
    memory.close()
    other.close()
    assert pages_over(memory.bytes, layout, 2)[1, 4].eq(3).all(), "mapped memory went with its descriptor"
