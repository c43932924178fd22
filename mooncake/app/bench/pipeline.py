"""``mooncake bench pipeline``: prompts through a pipeline of stages, compared with one process.

One forward pass of a whole prompt into an empty cache, alternating between: one process with a stage's threads (all at
once, and in the same pieces); one process with the threads of all stages; and the stages, on their own cores, in pieces
of equal cost, in pieces of equal length, and in as many as are predicted to finish first. With p stages and k pieces a
pipeline can be k p / (k + p - 1) times as fast as one stage. The time predicted from earlier pieces is compared with
the measured one, and the bytes between two stages with tokens · hidden size · 4. A node computes prompts in steps
(``prefill.chunk_tokens``), each of which fills and drains the pipeline; the last measurements do the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from rich.progress import Progress

from mooncake.app.bench.report import Figure, Report, tell, told
from mooncake.app.bench.shared.prompts import MIN_TOKEN
from mooncake.app.cli.flags import Flags, numbers
from mooncake.app.outputs import output_file
from mooncake.app.plots import write_timeline
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.backends.backend import BackendSpec, CacheSize, Processes, over_stages
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError
from mooncake.kernels.cpu_threads import use_threads
from mooncake.model import CausalLM, ForwardBatch, NoHook, load_model
from mooncake.model.parallel.pieces import Cutter, Span, equal_cost, equal_length, fastest, predicted_ms, timetable
from mooncake.model.parallel.pipeline import PipelineModel, StepTimes
from mooncake.precision import FLOAT32, resolve_precision

BLOCK_TOKENS = 64
ONE, ONE_IN_PIECES, ALL_THREADS = "one process", "one process, in pieces", "one process, all threads"
EQUAL_COST, EQUAL_LENGTH, FASTEST = "stages, equal cost", "stages, equal length", "stages, as many as pay"
NOTES = (
    "predicted over measured: of each turn, by the costs fitted in the turns before it",
    "idle: of the stages' time from the first one's beginning to the last one's end, with nothing to compute",
)


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    tokens: tuple[int, ...]
    stages: int
    pieces: int
    chunk_tokens: tuple[int, ...]
    threads: int
    repeat: int
    seed: int
    plot: Path | None
    json: Path | None


def main(args: list[str]) -> None:
    """Raises ConfigError, ModelError, Cancelled after Ctrl-C (what was measured is reported first)."""
    options = parse(args)
    cores = sorted(os.sched_getaffinity(0))
    wanted = options.stages * options.threads
    if len(cores) < wanted:
        raise ConfigError(f"{options.stages} stages of {options.threads} threads need {wanted} cores, not {len(cores)}")
    report = Report("pipeline", told(options, "tokens", "plot", dtype="float32"), options.seed, notes=list(NOTES))
    with report.measuring("computing") as shown:
        contest = Contest(options, open_checkpoint(options.model, max(options.tokens)), cores[:wanted])
        try:
            for tokens in options.tokens:
                contest.measure(tokens, report, shown)
        finally:
            contest.close()
    report.finish(options.json)


def parse(args: list[str]) -> Options:
    flags = Flags("bench pipeline", __doc__)
    add = flags.add
    add("--model", default="smollm2", help="a Llama family model: an HF folder, a .gguf file, or smollm2")
    add("--tokens", default="4096,8192", help="prompt lengths, comma-separated")
    add("--stages", type=int, default=2, help="processes with a part of the layers each")
    add("--pieces", type=int, default=8, help="pieces per prompt")
    add("--chunk-tokens", default="256,1024,2048", help="prompt tokens per step of a node; comma-separated")
    add("--threads", type=int, default=1, help="threads of each stage, and of the single process for comparison")
    add("--repeat", type=int, default=5, help="repetitions")
    flags.seed()
    add("--plot", type=output_file, metavar="FILE", help="draw the timeline of the stages (.png, .svg)")
    flags.json_file()
    given = flags.read(args)
    if given.stages < 2 or min(given.pieces, given.threads, given.repeat) < 1:
        raise ConfigError("--stages must be at least 2, --pieces, --threads and --repeat at least 1")
    given.tokens = numbers("--tokens", given.tokens, given.pieces)
    given.chunk_tokens = numbers("--chunk-tokens", given.chunk_tokens, 1)
    return Options(**vars(given))


class Contest:
    """The same model in one process and in stages, each over its own cache."""

    def __init__(self, options: Options, checkpoint: Checkpoint, cores: list[int]) -> None:
        self._options, self._cores = options, cores
        longest = max(options.tokens)
        layout = checkpoint.kv_layout(BLOCK_TOKENS, "float32")
        num_blocks = -(-longest // BLOCK_TOKENS)
        precision = resolve_precision("float32")
        size = CacheSize(layout, num_blocks, longest)
        processes = Processes(stages=options.stages, threads=options.threads, cores=cores)
        self._backend = over_stages(BackendSpec(checkpoint, precision, size, processes=processes, context=longest))
        assert isinstance(self._backend.model, PipelineModel)
        self._stages = self._backend.model
        one = load_model(checkpoint, FLOAT32, longest)
        assert isinstance(one, CausalLM)
        self._one = one
        self._cache = KVCache(layout, num_blocks)
        generator = torch.Generator().manual_seed(options.seed)
        self._prompt = torch.randint(MIN_TOKEN, checkpoint.config.vocab_size, (longest,), generator=generator)
        self._width = checkpoint.config.hidden_size

    def close(self) -> None:
        self._backend.close()

    def measure(self, tokens: int, report: Report, shown: Progress) -> None:
        options = self._options
        batch = ForwardBatch.of_prompt(self._prompt[:tokens], BLOCK_TOKENS, torch.tensor([tokens - 1]))
        spans, few, all_threads = [Span(0, tokens)], options.threads, options.threads * options.stages

        def by_cost() -> list[int]:
            return equal_cost(spans, self._stages.costs, options.pieces)

        ways: dict[str, Callable[[], StepTimes | None]] = {
            ALL_THREADS: lambda: self._alone(batch, [0, tokens], all_threads),
            ONE: lambda: self._alone(batch, [0, tokens], few),
            ONE_IN_PIECES: lambda: self._alone(batch, by_cost(), few),
            EQUAL_COST: lambda: self._in_stages(batch, lambda its, costs: equal_cost(its, costs, options.pieces)),
            EQUAL_LENGTH: lambda: self._in_stages(batch, lambda its, _: equal_length(its, options.pieces)),
            FASTEST: lambda: self._in_stages(batch, fastest),
        }
        for chunk in options.chunk_tokens:
            ways[_steps_name(chunk)] = partial(self._in_steps, batch, chunk)
        for turn in range(options.repeat + 1):
            for name, compute in ways.items():
                tell(shown, f"{tokens} tokens, {name}, {turn} of {options.repeat} turns")
                costs = self._stages.costs
                started_s = time.perf_counter()
                times = compute()
                elapsed_ms = (time.perf_counter() - started_s) * 1e3
                if not turn:  # warm-up
                    continue
                add = partial(report.add_value, name, tokens=tokens)
                add("forward pass", "ms", elapsed_ms)
                if times is not None:
                    expected_ms = timetable(predicted_ms(spans, times.cuts, costs))[-1, -1, 1]
                    add("predicted over measured", "", float(expected_ms) / elapsed_ms)
                    add("idle", "", _idle_share(times))
                    add("bytes between two stages", "B", float(times.bytes_between[0]))
                if name == EQUAL_COST and options.plot is not None and times is not None:
                    write_timeline(options.plot, f"{tokens:,} tokens, pieces of equal cost", times.pieces_ms)
        _compare(report, tokens, options, tokens * self._width * 4)

    def _alone(self, batch: ForwardBatch, cuts: list[int], threads: int) -> None:
        """Runs on as many cores as it has threads."""
        use_threads(threads)
        os.sched_setaffinity(0, self._cores[:threads])
        try:
            for begin, end in pairwise(cuts):
                self._one.forward(batch.part(begin, end), self._cache.tensor, NoHook())
        finally:
            os.sched_setaffinity(0, self._cores)

    def _in_steps(self, batch: ForwardBatch, chunk: int) -> None:
        """Like an engine, but without its own work between two steps."""
        tokens = batch.tokens.shape[0]
        for begin in range(0, tokens, chunk):
            self._in_stages(batch.part(begin, min(begin + chunk, tokens)), fastest)

    def _in_stages(self, batch: ForwardBatch, cut: Cutter) -> StepTimes | None:
        self._stages.cut = cut
        self._stages.forward(batch, self._backend.cache.tensor, NoHook())
        return self._stages.last_step


def _steps_name(chunk: int) -> str:
    return f"stages, steps of {chunk}"


def _idle_share(times: StepTimes) -> float:
    begins, ends = times.pieces_ms[..., 0], times.pieces_ms[..., 1]
    return float(1 - (ends - begins).sum() / ((ends.max() - begins.min()) * len(begins)))


def _compare(report: Report, tokens: int, options: Options, expected_bytes: int) -> None:
    def passes(name: str) -> Figure | None:
        return report.find(name, "forward pass", tokens=tokens)

    stages = passes(EQUAL_COST)
    if stages is None:
        return
    alone = [figure for figure in (passes(ONE), passes(ONE_IN_PIECES)) if figure is not None]
    best_alone = min(alone, key=lambda figure: figure.best)
    report.compare(f"stages_vs_one_{tokens}", best_alone, stages)
    report.ratios[f"ideal_{tokens}"] = options.pieces * options.stages / (options.pieces + options.stages - 1)
    report.compare(f"as_many_as_pay_vs_one_{tokens}", best_alone, passes(FASTEST))
    for chunk in options.chunk_tokens:
        report.compare(f"steps_of_{chunk}_vs_one_{tokens}", best_alone, passes(_steps_name(chunk)))
    report.compare(f"stages_vs_all_threads_{tokens}", passes(ALL_THREADS), stages)
    report.compare(f"equal_cost_vs_equal_length_{tokens}", passes(EQUAL_LENGTH), stages)
    predicted = report.find(EQUAL_COST, "predicted over measured", tokens=tokens)
    sent = report.find(EQUAL_COST, "bytes between two stages", tokens=tokens)
    assert predicted is not None and sent is not None
    report.ratios[f"predicted_vs_measured_{tokens}"] = predicted.median
    report.ratios[f"bytes_vs_formula_{tokens}"] = sent.best / expected_bytes
