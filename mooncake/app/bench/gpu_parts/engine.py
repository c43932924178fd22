"""A part of ``mooncake bench gpu``: decode steps through the engine, running ahead of the GPU and waiting for it.

Both are compared with the bare step: the model and its sampler, started again and again with nothing in between. The
difference is time in which the GPU waits for the host. Also steps of sequences with a long common prefix: as a replayed
graph, which reads the prefix once per sequence, and kernel by kernel, which reads it once in all.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import torch

from mooncake.app.bench.gpu_parts.device import Gpu, rate
from mooncake.app.bench.gpu_parts.model import BLOCK, build_model, decode_batch
from mooncake.app.bench.report import Report
from mooncake.engine.cache.device_cache import DeviceCache
from mooncake.engine.contract import CausalModel, EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.hashing import Chain
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.model.gpu.gpu_model import GpuModel
from mooncake.model_config import ModelConfig
from mooncake.sampling import SamplingParams
from mooncake.types import KVLayout, SampledToken

SHAPES = {"1": (1, 1024), "64x2k": (64, 2048)}  # sequences, tokens of context
SHARED_CONTEXT = 8192  # tokens, all shared except those of the last block
SAMPLINGS = {"": SamplingParams(temperature=0.0), "_drawn": SamplingParams(temperature=1.0, top_p=0.9, seed=1)}
STEPS = 128
STEPS_DRAWN_BY_HOST = 8
MOST_REPS = 3


class _Waiting:
    """The same model without ``start``: logits go to the host, which samples."""

    def __init__(self, model: GpuModel) -> None:
        self._model = model

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        return self._model.forward(batch, cache, hook)


def engine_steps(gpu: Gpu, report: Report, _: float) -> None:
    """Adds, by shape, tokens per second of each way, and the bare step's time over the engine's."""
    model = build_model(gpu, host_logits=True)[0]
    ahead: dict[str, float] = {}
    for name in SHAPES:
        with gpu.trying(f"steps ahead, {name}"):
            ahead[name] = _ahead_s(gpu, report, name, model)
    for name in ahead:
        with gpu.trying(f"steps ahead and waiting, {name}"):
            _compare_waiting(gpu, report, name, model, ahead[name])
    with gpu.trying("common prefix"):
        _shared_prefix(gpu, report, model)


def _ahead_s(gpu: Gpu, report: Report, name: str, model: GpuModel) -> float:
    cache = _cache_of(gpu, name, model)
    batch, context, steps = _shape_of(gpu, name)
    halfway = context + steps // 2
    bare = decode_batch(batch, halfway, -(-halfway // BLOCK), BLOCK, model.config.vocab_size)
    bare_s = min(gpu.timed_s(lambda _: model.start(bare, cache.tensor, None)))
    ahead_s = _timed_s(gpu, report, name, "", "ahead", model, cache)
    report.ratios[f"engine_{name}_vs_model"] = bare_s / ahead_s
    return ahead_s


def _compare_waiting(gpu: Gpu, report: Report, name: str, model: GpuModel, ahead_s: float) -> None:
    cache = _cache_of(gpu, name, model)
    drawn_s = _timed_s(gpu, report, name, "_drawn", "ahead", model, cache)
    for kind, ran_s in (("", ahead_s), ("_drawn", drawn_s)):
        waiting_s = _timed_s(gpu, report, name, kind, "waiting", _Waiting(model), cache)
        report.ratios[f"engine_{name}{kind}_ahead_vs_waiting"] = waiting_s / ran_s


def _shape_of(gpu: Gpu, name: str) -> tuple[int, int, int]:
    """Sequences, tokens of context, steps."""
    batch, context = SHAPES[name]
    return gpu.scale.size(batch, min(batch, 2)), gpu.scale.size(context, 40), gpu.scale.size(STEPS, 4)


def _cache_of(gpu: Gpu, name: str, model: GpuModel) -> DeviceCache:
    batch, context, steps = _shape_of(gpu, name)
    config, dtype = model.config, str(gpu.dtype).removeprefix("torch.")
    layout = KVLayout(config.num_layers, config.num_kv_heads, BLOCK, config.head_dim, dtype)
    cache = DeviceCache(layout, batch * -(-(context + steps + 8) // BLOCK) + 1, gpu.device)
    cache.tensor.normal_()
    return cache


def _timed_s(gpu: Gpu, report: Report, name: str, kind: str, way: str, model: CausalModel, cache: DeviceCache) -> float:
    """Seconds per step. The host takes 0.2 s to sample 64 tokens, so few such steps are run."""
    batch, context, steps = _shape_of(gpu, name)
    reps = min(gpu.reps, MOST_REPS)
    if kind == "_drawn" and way == "waiting":
        steps, reps = min(steps, STEPS_DRAWN_BY_HOST), 1
    found = [_step_s(model, cache, batch, context, steps, SAMPLINGS[kind]) for _ in range(reps)]
    title = f"engine, 8B decode{kind.replace('_', ', ')}, {way}"
    report.add(rate("ours", title, "tokens/s", batch, found, batch=batch, context=context))
    return min(found)


def _shared_prefix(gpu: Gpu, report: Report, model: GpuModel) -> None:
    config = model.config
    batch, context = gpu.scale.size(64, 2), gpu.scale.size(SHARED_CONTEXT, 200)
    per_sequence = -(-context // BLOCK)
    shape = (per_sequence + batch, config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim)
    cache = torch.zeros(shape, dtype=gpu.dtype, device=gpu.device).normal_()
    step = decode_batch(batch, context, per_sequence, BLOCK, config.vocab_size)
    tables = torch.arange(per_sequence, dtype=torch.int32).repeat(batch, 1)
    tables[:, -1] = per_sequence + torch.arange(batch)
    slots = tables[:, -1].long() * BLOCK + (context - 1) % BLOCK
    found = {}
    for way, least in (("replayed", math.inf), ("cascade", 0.0)):
        model.cascade_bytes = least
        given = replace(step, block_tables=tables.clone(), slots=slots)
        found[way] = gpu.timed_s(lambda _, s=given: model.start(s, cache, None))  # type: ignore[misc]
        title = f"8B decode, common prefix, {way}"
        report.add(rate("ours", title, "tokens/s", batch, found[way], batch=batch, context=context))
    report.ratios["model_cascade_64x8k_vs_replayed"] = min(found["replayed"]) / min(found["cascade"])


def _step_s(
    model: CausalModel, cache: DeviceCache, batch: int, context: int, steps: int, sampling: SamplingParams
) -> float:
    """Mean seconds of a step. Contexts are not computed but handed over, as by a prefill node."""
    random = np.random.default_rng(0)
    longest = context + steps + 8
    settings = EngineConfig(BLOCK, 0, batch, longest, keep_events=False)
    engine = Engine(model, cache, settings)
    vocab = model.config.vocab_size
    params = SamplingParams(
        max_tokens=longest - context, temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed
    )
    for index in range(batch):
        prompt = random.integers(0, vocab, context, dtype=np.uint32)
        name = f"r{index}"
        engine.reserve(Sequence(name, prompt, context, params, Chain(b"bench"), eos_ids=(), max_model_len=longest))
        engine.start_reserved(name, [SampledToken(0, int(random.integers(vocab)))])
    for _ in range(3):
        engine.step()
    started = time.perf_counter()
    tokens = sum(len(engine.step()) for _ in range(steps))
    took_s = time.perf_counter() - started
    assert tokens == steps * batch
    while engine.has_work:
        engine.step()
    return took_s / steps
