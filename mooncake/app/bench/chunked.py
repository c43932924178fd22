"""``mooncake bench chunked``: one process that prefills and decodes; answers are running when a long prompt arrives.

The same traffic alternately with whole prompts, with chunks of fixed size and with chunks cut to a limit on the token
gap. It shows the gap that the arrival causes, and how much the chunks slow the prompt.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mooncake.app.bench.report import Report, tell, told
from mooncake.app.bench.shared.prompts import random_prompt
from mooncake.app.cli.flags import Flags, positive
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.errors import ConfigError
from mooncake.hashing import Chain
from mooncake.model import load_model
from mooncake.page_groups import as_one_group
from mooncake.precision import WeightFormat
from mooncake.sampling import SamplingParams

BLOCK = 64
RUNNING_PROMPT, RUNNING_TOKENS = 64, 900  # of running answers: long enough not to end during a long prompt
NOTES = (
    "gap: between two tokens of an answer under way, from the arrival of the long prompt to its first token; the "
    "99th percentile",
    "prefill: tokens a second of a long prompt that has the engine to itself",
)


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    dtype: str
    prompt: int
    running: int
    budget: int
    limit_ms: float
    reps: int
    max_s: float
    threads: int
    seed: int
    json: Path | None


def main(args: list[str]) -> None:
    """Raises ConfigError, Cancelled after Ctrl-C."""
    options = parse(args)
    report = Report("chunked", told(options), options.seed, notes=list(NOTES))
    ways = {
        "whole": (0, 0.0),
        "chunks": (options.budget, 0.0),
        "limit": (options.budget, options.limit_ms),
    }
    with report.measuring("chunked") as shown:
        checkpoint = open_checkpoint(options.model)
        engines = _engines(checkpoint, options, ways)
        deadline_s = time.monotonic() + options.max_s
        for rep in range(options.reps):
            if rep and time.monotonic() > deadline_s:
                break
            for way, engine in engines.items():
                tell(shown, f"{way}, turn {rep + 1} of {options.reps}")
                gap_p99_ms, prefill_tok_s = _turn(engine, checkpoint.config.vocab_size, options, rep)
                report.add_value(way, "gap_p99", "ms", gap_p99_ms)
                report.add_value(way, "prefill", "tok/s", prefill_tok_s, more_is_better=True)
    _compare(report)
    report.finish(options.json)


def parse(args: list[str]) -> Options:
    flags = Flags("bench chunked", __doc__)
    add = flags.add
    flags.model()
    flags.plain_dtype()
    add("--prompt", type=int, default=2048, help="length of the arriving prompt")
    add("--running", type=int, default=4, help="running answers")
    add("--budget", type=int, default=512, help="maximum prompt tokens per step")
    add("--limit-ms", type=positive("--limit-ms"), default=100.0, help="target for the longest gap")
    flags.reps(3, "turns of each way")
    flags.turns_within()
    flags.threads()
    flags.seed()
    flags.json_file()
    options = Options(**vars(flags.read(args)))
    if min(options.prompt, options.running, options.budget) < 1:
        raise ConfigError("--prompt, --running and --budget must be positive")
    return options


def _engines(checkpoint: Checkpoint, options: Options, ways: dict[str, tuple[int, float]]) -> dict[str, Engine]:
    """One model; an engine and a cache for each variant."""
    if options.threads:
        torch.set_num_threads(options.threads)
    longest = max(options.prompt + 2, RUNNING_PROMPT + RUNNING_TOKENS)
    if longest > checkpoint.config.max_model_len:
        raise ConfigError(f"--prompt {options.prompt} is too long: the model takes {checkpoint.config.max_model_len}")
    layout = checkpoint.kv_layout(BLOCK, options.dtype)
    model = load_model(checkpoint, WeightFormat(options.dtype), longest)
    num_blocks = -(-longest // BLOCK) + options.running * -(-(RUNNING_PROMPT + RUNNING_TOKENS) // BLOCK) + 8
    engines = {}
    for way, (budget, limit_ms) in ways.items():
        config = EngineConfig(
            block_tokens=BLOCK,
            chunk_tokens=budget,
            max_sequences=options.running + 1,
            max_model_len=longest,
            tbt_limit_ms=limit_ms,
            keep_events=False,
            groups=as_one_group(checkpoint.config, layout),
        )
        engines[way] = Engine(model, KVCache(layout, num_blocks), config)
    return engines


def _turn(engine: Engine, vocab: int, options: Options, rep: int) -> tuple[float, float]:
    """The 99th percentile of gaps (ms), and tokens per second of the long prompt alone."""
    draw = random.Random(f"{options.seed} {rep}")

    def sequence(name: str, length: int, max_tokens: int) -> Sequence:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        ids = np.array(random_prompt(draw, vocab, length), np.uint32)
        limit = engine.config.max_model_len
        return Sequence(name, ids, length, sampling, Chain(b"bench"), eos_ids=(), max_model_len=limit)

    engine.drop_cached()
    began_s = time.perf_counter()
    engine.add(sequence("alone", options.prompt, 1))
    while engine.has_work:
        engine.step()
    prefill_tok_s = options.prompt / (time.perf_counter() - began_s)

    for number in range(options.running):
        engine.add(sequence(f"r{number}", RUNNING_PROMPT, RUNNING_TOKENS))
    for _ in range(12):  # until they are running, and the engine knows the duration of their steps
        engine.step()
    engine.add(sequence("long", options.prompt, 2))
    gaps_ms: list[float] = []
    last_s = time.perf_counter()
    has_come = False
    while not has_come:
        outputs = engine.step()
        now_s = time.perf_counter()
        if any(output.request_id != "long" for output in outputs):
            gaps_ms.append((now_s - last_s) * 1e3)
            last_s = now_s
        has_come = any(output.request_id == "long" for output in outputs)
    for name in ("long", *(f"r{number}" for number in range(options.running))):
        engine.abort(name)
    engine.take_ended()
    return _p99(gaps_ms), prefill_tok_s


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def _compare(report: Report) -> None:
    for way in ("chunks", "limit"):
        report.compare_subjects(f"gap_{way}_shorter", "gap_p99", "whole", way)
        report.compare_subjects(f"prefill_{way}_vs_whole", "prefill", way, "whole")
