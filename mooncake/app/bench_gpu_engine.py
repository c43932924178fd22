"""A part of ``mooncake bench gpu``: decode steps through the engine, running ahead of the card and waiting for it.

Both are held to the bare step: the model and its sampler, started again and again with nothing in between. What is
missing to that is time in which the card waits for the host. Beside that, steps of sequences with a long common prefix:
replayed, which reads it once for each, and kernel by kernel, which reads it once.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import torch

from mooncake.app.bench_gpu_kernels import Gpu, rate
from mooncake.app.bench_gpu_model import BLOCK, build_model, decode_batch
from mooncake.app.bench_report import Report
from mooncake.engine.device_cache import DeviceCache
from mooncake.engine.engine import CausalModel, Engine, EngineConfig
from mooncake.engine.sequence import Sequence
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.model.gpu_model import GpuModel
from mooncake.model_config import ModelConfig
from mooncake.types import KVLayout, SampledToken, SamplingParams

SHAPES = {"1": (1, 1024), "64x2k": (64, 2048)}  # sequences, tokens of context
SHARED_CONTEXT = 8192  # tokens, all in common but those of the last block
STEPS = 128
MOST_REPS = 3


class _Waiting:
    """The same model, which cannot be told to start a step: logits go to the host, and the host draws."""

    def __init__(self, model: GpuModel) -> None:
        self._model = model

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        return self._model.forward(batch, cache, hook)


def engine_steps(gpu: Gpu, report: Report, _: float) -> None:
    """Adds tokens a second of each way, and the bare step's time over the engine's, by shape."""
    model = build_model(gpu, host_logits=True)[0]
    samplings = {"": SamplingParams(temperature=0.0), "_drawn": SamplingParams(temperature=1.0, top_p=0.9, seed=1)}
    for name, (batch, context) in SHAPES.items():
        batch, context = gpu.scale.size(batch, min(batch, 2)), gpu.scale.size(context, 40)
        steps = gpu.scale.size(STEPS, 4)
        num_blocks = batch * -(-(context + steps + 8) // BLOCK) + 1
        dtype = str(gpu.dtype).removeprefix("torch.")
        config = model.config
        layout = KVLayout(config.num_layers, config.num_kv_heads, BLOCK, config.head_dim, dtype)
        cache = DeviceCache(layout, num_blocks, gpu.device)
        cache.tensor.normal_()
        halfway = context + steps // 2
        bare = decode_batch(batch, halfway, -(-halfway // BLOCK), BLOCK, config.vocab_size)
        bare_s = min(gpu.timed_s(lambda _, b=bare, c=cache.tensor: model.start(b, c, None)))  # type: ignore[misc]
        for kind, sampling in samplings.items():
            ways: dict[str, CausalModel] = {"ahead": model, "waiting": _Waiting(model)}
            found = {}
            for way, runs in ways.items():
                found[way] = [
                    _step_s(runs, cache, batch, context, steps, sampling) for _ in range(min(gpu.reps, MOST_REPS))
                ]
                title = f"engine, 8B decode{kind.replace('_', ', ')}, {way}"
                report.add(rate("ours", title, "tokens/s", batch, found[way], batch=batch, context=context))
            if not kind:
                report.ratios[f"engine_{name}_vs_model"] = bare_s / min(found["ahead"])
            report.ratios[f"engine_{name}{kind}_ahead_vs_waiting"] = min(found["waiting"]) / min(found["ahead"])
        del cache
        gpu.free()
    _shared_prefix(gpu, report, model)


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
    """Of one of many steps over contexts that nobody computed: they are handed over as a prefill node's are."""
    random = np.random.default_rng(0)
    longest = context + steps + 8
    settings = EngineConfig(BLOCK, 0, batch, longest, keep_events=False)
    engine = Engine(model, cache, settings)
    vocab = model.config.vocab_size
    asked = SamplingParams(
        max_tokens=longest - context, temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed
    )
    for index in range(batch):
        prompt = random.integers(0, vocab, context, dtype=np.uint32)
        name = f"r{index}"
        engine.reserve(Sequence(name, prompt, context, asked, b"bench", eos_ids=(), max_model_len=longest))
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
