"""``mooncake bench engine``: one engine in one process, compared with this machine's limits and with other engines.

All engines do the same tasks alternately (A B A B): generate exactly n greedy tokens after random prompts of the same
lengths. Engines are stopped while another one is measured.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch
from rich.progress import Progress

from mooncake.app.bench.engine_parts.kernels import (
    SPIN_S,
    Memory,
    decode_attention_s,
    drawing_s,
    gemm_s,
    shared_prefix_s,
    weight_bytes,
)
from mooncake.app.bench.engine_parts.options import MAX_MODEL_LEN, Options, parse
from mooncake.app.bench.peers.engine import PeerEngine
from mooncake.app.bench.peers.hf_folder import hf_folder
from mooncake.app.bench.peers.own import OwnEngine, median_outside_s
from mooncake.app.bench.report import Figure, Report, Value, tell
from mooncake.app.bench.shared.prompts import MIN_TOKEN, random_prompt
from mooncake.app.bench.shared.timing import milliseconds
from mooncake.app.extras import require
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.contract import EngineConfig
from mooncake.errors import ConfigError, DeadlineExceeded, NodeUnavailable
from mooncake.model.pages import TORCH_DTYPES
from mooncake.precision import has_native_bf16, resolve_precision

OURS = "mooncake"
KV_GB = 1.6
ATTENTION_BATCH, ATTENTION_CONTEXT = 32, 512
SHARED_BATCH, SHARED_PREFIX, SHARED_OWN = 16, 2048, 16
DRAWN_BATCH, DRAWN_LOGITS = 32, 3.0  # rows of normal logits with this standard deviation
DRAWS = {"temperature": (1.0, 1.0), "top_p": (0.7, 0.9)}  # temperature and top-p of each way to draw
TURNS = 6  # timings of what takes milliseconds, per repetition of what takes seconds
SINGLE_STEPS = "decode, single steps"
ATTENTION = "decode attention, one layer"
DRAWING = "drawing tokens"
NOTES = (
    "prefill: the time of 1 token after new prompts; decode: the difference that n more tokens make, with the prompts "
    "cached where the engine can",
    "limit of decode: the weights of a step at the speed of memory, read in turns with single steps",
    "ratios of rates are better above 1, of times below",
)

Result = TypeVar("Result")


class Subject(Protocol):
    """An engine to measure."""

    @property
    def name(self) -> str: ...

    @property
    def has_prefix_cache(self) -> bool: ...

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> float:
        """Seconds to generate exactly ``new`` greedy tokens after each of the prompts, all submitted at once."""
        ...


def main(args: list[str]) -> None:
    """Raises ConfigError; ModelError; NodeUnavailable when a peer does not start, and once all other results are
    reported when it ended later; Cancelled after Ctrl-C, once the results so far are reported."""
    options, lost = parse(args, __doc__), list[str]()
    report = Report("engine", options.config, options.seed)
    with report.measuring("measuring") as shown:
        lost = measure(options, report, shown)
    compare(report, options)
    report.finish(options.json)
    if lost:
        raise NodeUnavailable(f"{'; '.join(lost)}: the rest was measured without")


def measure(options: Options, report: Report, shown: Progress) -> list[str]:
    """What became of peers that did not last."""
    tell(shown, "loading the model")
    checkpoint = open_checkpoint(options.model)
    longest, room = max(options.long_tokens, options.prompt_tokens) + options.new_tokens + 1, _room(checkpoint)
    if longest > room:
        raise ConfigError(f"prompt and answer would have {longest} tokens, and the model takes {room}: lower --long")
    if "llama.cpp" in options.against and checkpoint.path.suffix != ".gguf":
        raise ConfigError("--against llama.cpp needs a .gguf file as --model")
    own = _start_own(checkpoint, options, report)
    others = [_own_with(checkpoint, options, weights) for weights in options.also]
    measure_machine(own, checkpoint, options, report, shown)
    with ExitStack() as stack:
        peers = [stack.enter_context(_peer(name, checkpoint, options, stack, shown)) for name in options.against]
        for peer in peers:
            report.config[peer.name] = peer.facts
        bench = EngineBench([own, *others, *peers], checkpoint.config.vocab_size, options, report, shown)
        bench.run()
        return bench.lost


def _engine_config(checkpoint: Checkpoint, options: Options) -> EngineConfig:
    return EngineConfig(chunk_tokens=options.chunk_tokens, max_model_len=_room(checkpoint), keep_events=False)


def _room(checkpoint: Checkpoint) -> int:
    """Maximum tokens of prompt plus answer."""
    return min(MAX_MODEL_LEN, checkpoint.config.max_model_len)


def _own_with(checkpoint: Checkpoint, options: Options, weights: str) -> OwnEngine:
    precision = resolve_precision(options.dtype, options.precision.kv_dtype, weights)
    config = _engine_config(checkpoint, options)
    return OwnEngine(checkpoint, precision, options.threads, config, KV_GB, f"{OURS} {weights}")


def _start_own(checkpoint: Checkpoint, options: Options, report: Report) -> OwnEngine:
    begin = time.perf_counter()
    config = _engine_config(checkpoint, options)
    own = OwnEngine(checkpoint, options.precision, options.threads, config, KV_GB)
    own.run([[MIN_TOKEN] * 8], 1)
    report.add(Figure(OURS, "model loaded and first token given", "s", (time.perf_counter() - begin,)))
    return own


def _peer(name: str, checkpoint: Checkpoint, options: Options, stack: ExitStack, shown: Progress) -> PeerEngine:
    tell(shown, f"starting {name}")
    if name == "transformers":
        require("transformers", "test", "--against transformers")
        model = options.peer_model or str(checkpoint.path)
        return PeerEngine(name, sys.executable, model, options.dtype, options.threads)
    if name == "llama.cpp":
        return PeerEngine(name, options.llama_python, str(checkpoint.path), options.dtype, options.threads)
    model = stack.enter_context(hf_folder(checkpoint.path, options.vllm_dtype, options.peer_model))
    return PeerEngine(name, options.vllm_python, model, options.vllm_dtype, options.threads)


def measure_machine(own: OwnEngine, checkpoint: Checkpoint, options: Options, report: Report, shown: Progress) -> None:
    """The machine's limits with the figures compared with them, and decode attention alone."""
    tell(shown, "memory and arithmetic")
    dtype, reps = TORCH_DTYPES[options.dtype], TURNS * options.reps
    memory, longest = Memory(), own.core.config.max_model_len - 2 * (reps + 1)
    prompt = [MIN_TOKEN] * min(options.prompt_tokens, longest)
    steps, reads = own.decode_in_turns(prompt, reps, memory.read_s, SPIN_S)
    report.add(Figure("limit", "memory read", "GB/s", tuple(memory.num_bytes / s / 1e9 for s in reads), True))
    shape: dict[str, Value] = {"batch": 1, "context": options.prompt_tokens}
    step_bytes = weight_bytes(checkpoint.config, 1 if options.precision.weights.coding else dtype.itemsize)
    limits = tuple(memory.num_bytes / s / step_bytes for s in reads)
    report.add(Figure("limit", SINGLE_STEPS, "tok/s", limits, True, shape))
    report.add(Figure(OURS, SINGLE_STEPS, "tok/s", tuple(1 / s for s in steps), True, shape))
    if dtype is torch.bfloat16 and not has_native_bf16():  # torch then takes a hundred times as long as for float32
        report.notes.append("limit of products: in float32, because this processor does not multiply bfloat16")
        dtype = torch.float32
    times, operations = gemm_s(dtype, max(3, options.reps))
    report.add(Figure("limit", "matrix product", "GFLOP/s", tuple(operations / s / 1e9 for s in times), True))

    tell(shown, "attention")
    batch = min(ATTENTION_BATCH, own.cache.num_blocks // -(-ATTENTION_CONTEXT // own.cache.layout.block_tokens))
    ways = decode_attention_s(own.cache.tensor, checkpoint.config.num_heads, batch, ATTENTION_CONTEXT, reps)
    shape = {"batch": batch, "context": ATTENTION_CONTEXT}
    sdpa = min(ways["sdpa_groups"], ways["sdpa_rows"], key=min)
    for subject, times in ((OURS, ways["ours"]), ("sdpa, contiguous", sdpa), ("gather + sdpa", ways["gather_sdpa"])):
        report.add(Figure(subject, ATTENTION, "ms", milliseconds(times), params=shape))

    tell(shown, "attention over a shared prefix")
    shape = {"batch": SHARED_BATCH, "prefix": SHARED_PREFIX}
    sizes = (SHARED_BATCH, SHARED_PREFIX, SHARED_OWN)
    block_tokens = own.cache.layout.block_tokens
    needed = SHARED_BATCH * (SHARED_PREFIX // block_tokens + -(-SHARED_OWN // block_tokens))
    if own.cache.num_blocks >= needed:
        ways = shared_prefix_s(own.cache.tensor, checkpoint.config.num_heads, *sizes, 5 * reps)
        for subject, times in ((OURS, ways["shared"]), (f"{OURS}, a copy each", ways["copies"])):
            report.add(Figure(subject, ATTENTION, "ms", milliseconds(times), params=shape))

    tell(shown, "drawing tokens")
    logits = DRAWN_LOGITS * torch.randn(DRAWN_BATCH, checkpoint.config.vocab_size)
    for temperature, top_p in DRAWS.values():
        ways = drawing_s(own.drawing(logits, temperature, top_p), logits, temperature, top_p, reps)
        shape = {"batch": DRAWN_BATCH, "temperature": temperature, "top_p": top_p}
        for subject, times in ((OURS, ways["ours"]), ("torch", ways["torch"])):
            report.add(Figure(subject, DRAWING, "ms", milliseconds(times), params=shape))


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds that one engine took for its tasks with one set of prompts."""

    new_prompts_s: float  # one token after new prompts
    one_token_s: float  # one token after the same prompts, cached if it can: the part of ``full_s`` before decoding
    full_s: float  # one token and n more after the same prompts


def _take_turn(subject: Subject, prompts: list[list[int]], new: int) -> Turn:
    new_prompts_s = subject.run(prompts, 1)
    one_token_s = subject.run(prompts, 1) if subject.has_prefix_cache else new_prompts_s
    return Turn(new_prompts_s, one_token_s, subject.run(prompts, 1 + new))


def _take_long_turn(subject: Subject, prompts: list[list[int]]) -> dict[str, float]:
    """Seconds to the first token of one long prompt."""
    taken = {"TTFT, cold": subject.run(prompts, 1)}
    return taken | {"TTFT, repeated": subject.run(prompts, 1)} if subject.has_prefix_cache else taken


@dataclass(slots=True)
class EngineBench:
    """Runs the tasks on all engines alternately. A peer that fails is left out from then on."""

    subjects: list[Subject]
    vocab_size: int
    options: Options
    report: Report
    shown: Progress
    lost: list[str] = field(default_factory=list)

    def run(self) -> None:
        draw = random.Random(self.options.seed)
        for subject in list(self.subjects):
            self._attempt(subject, "warm-up", partial(subject.run, self._prompts(draw, 2, 64), 4))
        for batch in self.options.batches:
            self._measure_rates(draw, batch)
        self._measure_ttft(draw)

    def _measure_rates(self, draw: random.Random, batch: int) -> None:
        """Prefill rate from the time of one token after new prompts; decode rate from the time of n more tokens.

        The shortest time of 1 token is subtracted from each time of 1 + n tokens: noise in the former must not make
        decoding look fast.
        """
        options = self.options
        turns: dict[str, list[Turn]] = {subject.name: [] for subject in self.subjects}
        for rep in range(options.reps):
            for subject in list(self.subjects):
                prompts = self._prompts(draw, batch, options.prompt_tokens)
                task = partial(_take_turn, subject, prompts, options.new_tokens)
                turns[subject.name] += self._attempt(subject, f"batch {batch}, {self._repetition(rep)}", task)
                if isinstance(subject, OwnEngine) and subject.name == OURS:
                    self._note_steps(subject, batch, rep)
        for engine, taken in turns.items():
            if not taken:
                continue
            base_s = min(turn.one_token_s for turn in taken)
            prefill = tuple(batch * options.prompt_tokens / turn.new_prompts_s for turn in taken)
            decode = tuple(batch * options.new_tokens / max(turn.full_s - base_s, 1e-9) for turn in taken)
            self._add_rates(engine, batch, prefill, decode)

    def _add_rates(self, engine: str, batch: int, prefill: tuple[float, ...], decode: tuple[float, ...]) -> None:
        tokens = self.options.prompt_tokens
        self.report.add(
            Figure(engine, "prefill", "tok/s", prefill, True, {"batch": batch, "prompt": tokens}),
            Figure(engine, "decode", "tok/s", decode, True, {"batch": batch, "context": tokens}),
        )

    def _note_steps(self, own: OwnEngine, batch: int, rep: int) -> None:
        """Times of our decode steps in the last repetition, in all and outside the model."""
        steps = own.decode_steps(batch)
        if rep + 1 < self.options.reps or not steps:
            return
        shape: dict[str, Value] = {"batch": batch, "context": self.options.prompt_tokens}
        step_ms = milliseconds(sorted(step.step_s for step in steps))
        outside_s, scan_s = median_outside_s(steps), own.choosing_s(batch)
        own_s = max(outside_s - scan_s, 0.0)  # the scan was timed separately, and may have been slower then
        self.report.add(
            Figure(OURS, "decode step", "ms", step_ms, params=shape),
            Figure(OURS, "decode step outside the model", "ms", milliseconds([outside_s]), params=shape),
            Figure(OURS, "of it, scanning logits", "ms", milliseconds([scan_s]), params=shape),
            Figure(OURS, "of it, Python's own", "ms", milliseconds([own_s]), params=shape),
        )

    def _measure_ttft(self, draw: random.Random) -> None:
        for rep in range(self.options.reps):
            for subject in list(self.subjects):
                task = partial(_take_long_turn, subject, self._prompts(draw, 1, self.options.long_tokens))
                for taken in self._attempt(subject, f"long prompt, {self._repetition(rep)}", task):
                    for name, s in taken.items():
                        self.report.add_value(subject.name, name, "ms", 1e3 * s, prompt=self.options.long_tokens)

    def _repetition(self, rep: int) -> str:
        return f"repetition {rep + 1} of {self.options.reps}"

    def _attempt(self, subject: Subject, what: str, task: Callable[[], Result]) -> list[Result]:
        """The result of a task; nothing if it failed."""
        tell(self.shown, f"{subject.name}, {what}")
        try:
            return [task()]
        except (NodeUnavailable, DeadlineExceeded) as error:
            self.subjects.remove(subject)
            self.lost.append(str(error))
            self.report.notes.append(f"{subject.name} was left out from {what} on: {error}")
            return []

    def _prompts(self, draw: random.Random, batch: int, length: int) -> list[list[int]]:
        return [random_prompt(draw, self.vocab_size, length) for _ in range(batch)]


def compare(report: Report, options: Options) -> None:
    """Add the ratios to the report."""
    for peer in options.against:
        for batch in options.batches:
            for name in ("decode", "prefill"):
                report.compare_subjects(f"{name}_b{batch}_vs_{peer}", name, OURS, peer, batch=batch)
        report.compare_subjects(f"prefill_vs_{peer}", "prefill", OURS, peer, batch=max(options.batches))
        for ratio, name in (("ttft_cold", "TTFT, cold"), ("ttft_prefix", "TTFT, repeated")):
            report.compare_subjects(f"{ratio}_vs_{peer}", name, OURS, peer)
    for weights in options.also:
        for batch in options.batches:
            for name in ("decode", "prefill"):
                ratio = f"{name}_b{batch}_{weights}_vs_own_{options.dtype}"
                report.compare_subjects(ratio, name, f"{OURS} {weights}", OURS, batch=batch)
    report.compare_subjects("decode_b1_vs_roofline", SINGLE_STEPS, OURS, "limit")
    for ratio, other in (("attention_b32_vs_sdpa", "sdpa, contiguous"), ("attention_b32_vs_gather", "gather + sdpa")):
        report.compare_subjects(ratio, ATTENTION, OURS, other, context=ATTENTION_CONTEXT)
    copies = f"{OURS}, a copy each"
    report.compare_subjects("attention_shared_prefix_vs_copies", ATTENTION, OURS, copies, prefix=SHARED_PREFIX)
    for way, (_, top_p) in DRAWS.items():
        report.compare_subjects(f"draw_{way}_vs_torch", DRAWING, OURS, "torch", top_p=top_p)
    report.compare("ttft_prefix_vs_cold", *(report.find(OURS, figure) for figure in ("TTFT, repeated", "TTFT, cold")))
    report.notes += NOTES
    if "vllm" in options.against and options.vllm_dtype != options.dtype:
        report.notes.append(f"vLLM ran in {options.vllm_dtype}, ours in {options.dtype}")
    if "llama.cpp" in options.against:
        report.notes.append("llama.cpp computed with the codes of the file, and kept KV in float16")
