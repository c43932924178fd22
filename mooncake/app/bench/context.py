"""``mooncake bench context``: prefill of one long prompt on one rank and over several, and what ranks send.

All methods alternate over the same forward passes: the whole prompt in one step, and its last tokens after a cached
prefix. One thread per rank, so two ranks and one rank with two threads have the same cores. Bytes are counted where
they are sent and compared with the formula (``ContextPlan.sent_bytes``).
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress

from mooncake.app.bench.report import Figure, Report, tell, told
from mooncake.app.cli.flags import Flags, names
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError
from mooncake.kernels.cpu_threads import threads_for
from mooncake.model import CausalLM, ForwardBatch, NoHook, load_model
from mooncake.model.decoder import Decoder
from mooncake.model.parallel.context_parallel import ContextParallelModel, Setup, shape_of
from mooncake.model.parallel.context_plan import LEAST_TOKENS, ContextPlan, Method
from mooncake.precision import FLOAT32

BLOCK_TOKENS = 64
ALONE, AUTO = "1 rank, 1 thread", "auto"

AnyModel = CausalLM | Decoder | ContextParallelModel


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    tokens: int
    tail: int
    ranks: int
    methods: tuple[str, ...]
    repeat: int
    json: Path | None


def main(args: list[str]) -> None:
    """Raises ConfigError, ModelError, Cancelled after Ctrl-C (what was measured is reported first)."""
    options = parse(args)
    checkpoint = open_checkpoint(options.model)
    tokens = checkpoint.config.context(options.tokens)
    config = told(options, "methods", "repeat", dtype="float32", tokens=tokens, threads=1)
    report = Report("context", config, seed=0)
    with report.measuring("computing") as shown:
        bench = Bench(checkpoint, options, report)
        for method in options.methods:
            bench.measure(method, shown)
    report.finish(options.json)


def parse(args: list[str]) -> Options:
    flags = Flags("bench context", __doc__)
    add = flags.add
    ways = (AUTO, *Method)
    flags.model()
    add("--tokens", type=int, default=4096, help="length of the prompt")
    add("--tail", type=int, default=256, help="last tokens of it, computed with the others as a cached prefix")
    add("--ranks", type=int, default=2, help="processes among which the prompt is cut")
    add("--methods", default=AUTO, help=f"comma-separated, of {', '.join(ways)}")
    add("--repeat", type=int, default=3, help="timings per measurement")
    flags.json_file()
    given = flags.read(args)
    given.methods = names("--methods", given.methods, ways)
    if given.ranks < 2 or given.repeat < 1:
        raise ConfigError("--ranks must be at least 2, --repeat at least 1")
    if not LEAST_TOKENS <= given.tail < given.tokens:
        raise ConfigError(f"--tail is at least {LEAST_TOKENS}, what is cut over ranks, and less than --tokens")
    return Options(**vars(given))


class Bench:
    """One prompt in the first blocks of a cache, and the model that computes it alone."""

    def __init__(self, checkpoint: Checkpoint, options: Options, report: Report) -> None:
        self._checkpoint, self._options, self._report = checkpoint, options, report
        self._model = load_model(checkpoint, FLOAT32, options.tokens)
        self._cache = KVCache(checkpoint.kv_layout(BLOCK_TOKENS, "float32"), -(-options.tokens // BLOCK_TOKENS))
        vocab = checkpoint.config.vocab_size
        tokens = torch.from_numpy(np.random.default_rng(report.seed).integers(0, vocab, options.tokens))
        whole = ForwardBatch.of_prompt(tokens, BLOCK_TOKENS, torch.tensor([options.tokens - 1]))
        behind = whole.part(options.tokens - options.tail, options.tokens)
        self._steps = {"whole prompt": whole, "behind a prefix": behind}

    def measure(self, method: str, shown: Progress) -> None:
        options = self._options
        setup = Setup(
            size=options.ranks,
            model=str(self._checkpoint.path),
            max_model_len=self._checkpoint.config.max_model_len,
            positions=options.tokens,
            weights=FLOAT32,
            kv_dtype="float32",
            threads=1,
            method=None if method == AUTO else Method(method),
        )
        over_ranks, together = f"{options.ranks} ranks, 1 thread each", f"1 rank, {options.ranks} threads"
        with closing(ContextParallelModel(self._model, setup, self._checkpoint)) as cut:
            for step, batch in self._steps.items():
                params: dict[str, str] = {"step": step, "method": method}
                ways = {ALONE: (self._model, 1), together: (self._model, options.ranks), over_ranks: (cut, 1)}
                self._time(batch, ways, params, shown)
                self._tell_bytes(batch, cut, setup, over_ranks, params)
                for ratio, other in (("speedup", ALONE), ("vs_threads", together)):
                    name = f"{ratio}_{step.replace(' ', '_')}_{method}"
                    self._report.compare_subjects(name, "forward pass", other, over_ranks, **params)

    def _time(
        self, batch: ForwardBatch, ways: dict[str, tuple[AnyModel, int]], params: dict[str, str], shown: Progress
    ) -> None:
        """Each model with this many threads, alternately. All must give the same logits."""
        for turn in range(self._options.repeat + 1):
            logits = []
            for way, (model, threads) in ways.items():
                started_s = time.perf_counter()
                with threads_for(threads):
                    logits.append(model.forward(batch, self._cache.tensor, NoHook()))
                if turn:  # the first one is a warm-up
                    elapsed_ms = (time.perf_counter() - started_s) * 1e3
                    self._report.add_value(
                        way, "forward pass", "ms", elapsed_ms, step=params["step"], method=params["method"]
                    )
            for other in logits[1:]:
                torch.testing.assert_close(other, logits[0], rtol=1e-3, atol=1e-3)
            tell(shown, f"{turn} of {self._options.repeat} timings")

    def _tell_bytes(
        self, batch: ForwardBatch, cut: ContextParallelModel, setup: Setup, way: str, params: dict[str, str]
    ) -> None:
        """Report the bytes of the last pass, and the longest wait of a rank."""
        report, shape = cut.report, shape_of(self._checkpoint, setup)
        assert report is not None
        plan = ContextPlan.of(setup.size, batch.query_starts.numpy(), batch.context_lens.numpy())
        formula = sum(plan.sent_bytes(method, shape) for method in report.methods)
        longest_s = max(rank.waited_s for rank in report.ranks)
        for name, unit, value in (
            ("sent", "MB", report.sent_bytes / 1e6),
            ("sent, by formula", "MB", formula / 1e6),
            ("waited", "ms", longest_s * 1e3),
        ):
            self._report.add(Figure(way, name, unit, (value,), params=params))
        chosen = ", ".join(sorted(set(report.methods)))
        self._report.notes.append(f"{params['step']}, {params['method']}: by {chosen}")
