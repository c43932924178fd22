"""The part of ``mooncake bench gpu`` that needs two GPUs: one model over both, against the same model on one.

Steps of decodes overlap, as in an engine, so the time of a step includes the host's messages between
ranks where the cards wait for them. Beside the times: a prompt and a replayed step give the logits of one GPU, and so
do blocks that have gone through host memory as in a node.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed import is_nccl_available

from mooncake.app.bench.gpu_parts.device import Gpu, check, rate
from mooncake.app.bench.gpu_parts.model import BLOCK, MOST_ERROR, decode_batch, model_of_8b
from mooncake.app.bench.report import Report
from mooncake.checkpoint import Checkpoint, open_checkpoint, weight_shapes
from mooncake.engine.backends.backend import ALONE, Backend, BackendSpec, CacheSize, Processes, open_for_node
from mooncake.engine.cache.kv_cache import Arrival, Mirror
from mooncake.engine.contract import AsyncModel
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.precision import Precision, WeightFormat

LAYERS = 16  # of the 8B model's 32: written to disk and read three times
SHAPES = {"1": (1, 1024), "64x2k": (64, 2048)}  # sequences, tokens of context
PROMPT = 1000
STEPS = 100


def two_gpus(gpu: Gpu, report: Report, _: float) -> None:
    """Adds tokens a second of each way, and how much sooner a step is done on two."""
    if gpu.device.type == "cuda" and (torch.cuda.device_count() < 2 or not is_nccl_available()):
        report.notes.append(f"two GPUs: left out, torch finds {torch.cuda.device_count()} and needs NCCL beside two")
        return
    with tempfile.TemporaryDirectory() as folder:
        _write_model(gpu, Path(folder))
        checkpoint = open_checkpoint(folder)
        found = [_Found(gpu, report, checkpoint, processes) for processes in (ALONE, Processes(tensor=2))]
    alone, both = found
    for name, seconds in both.seconds.items():
        report.ratios[f"two_gpus_decode_{name}_vs_one"] = alone.seconds[name] / seconds
    for what, logits in both.logits.items():
        with gpu.trying(f"two GPUs, {what}"):
            check(report, f"two GPUs, {what}", logits, alone.logits[what], MOST_ERROR)


def _write_model(gpu: Gpu, folder: Path) -> None:
    """Random weights, as a publisher would upload them."""
    config = replace(model_of_8b(gpu), num_layers=gpu.scale.size(LAYERS, 1))
    published = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_model_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(published))
    weights = {name: _random(gpu, shape) for name, shape in weight_shapes(config).items()}
    save_file(weights, folder / "model.safetensors")


def _random(gpu: Gpu, shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.randn(shape, device=gpu.device, dtype=gpu.dtype) * 0.02).cpu()


class _Found:
    """What was found over so many GPUs: seconds a step, by shape, and logits, which are to agree."""

    def __init__(self, gpu: Gpu, report: Report, checkpoint: Checkpoint, processes: Processes) -> None:
        self.seconds: dict[str, float] = {}
        self.logits: dict[str, torch.Tensor] = {}
        self._gpu, self._config = gpu, checkpoint.config
        dtype = str(gpu.dtype).removeprefix("torch.")
        longest = gpu.scale.size(max(context for _, context in SHAPES.values()), 40)
        sequences = gpu.scale.size(max(batch for batch, _ in SHAPES.values()), 2)
        blocks = -(-longest // BLOCK)
        size = CacheSize(
            checkpoint.kv_layout(BLOCK, dtype), sequences * blocks, blocks * BLOCK, max_sequences=sequences
        )
        backend = open_for_node(BackendSpec(checkpoint, Precision(WeightFormat(dtype), dtype), size, "cuda", processes))
        try:
            self._compute(backend)
            for name in SHAPES:
                with gpu.trying(f"{processes.tensor} GPUs, decode steps of {name}"):
                    self._time(report, backend, name, processes.tensor)
        finally:
            backend.close()
            del backend
            gpu.free()

    def _compute(self, backend: Backend) -> None:
        """A prompt and the token after it; then the same over blocks that have been in host memory."""
        length, random = self._gpu.scale.size(PROMPT, 20), torch.Generator().manual_seed(0)
        tokens = torch.randint(0, self._config.vocab_size, (length + 1,), generator=random)
        prompt = ForwardBatch.of_prompt(tokens[:length], BLOCK, torch.tensor([length - 1]))
        here = list(range(length // BLOCK + 1))
        there = [block + len(here) for block in here]
        mirror, hook = backend.mirror, NoHook()
        assert mirror is not None, "a node has one"
        self._compute_one(backend, "a prompt", prompt, hook)
        self._compute_one(backend, "a step", ForwardBatch.of_last_token(tokens, BLOCK, here), hook)
        leaving = _Leaving(mirror, here)
        self._compute_one(backend, "a prompt whose layers leave", prompt, leaving)
        for arrival in leaving.arrivals:
            arrival.wait()
        self.logits["layers in host memory"] = torch.from_numpy(mirror.memory[here]).view(self._gpu.dtype).clone()
        mirror.memory[there] = mirror.memory[here]
        mirror.to_device(there).wait()
        self._compute_one(
            backend, "a step over blocks that came in", ForwardBatch.of_last_token(tokens, BLOCK, there), hook
        )

    def _compute_one(self, backend: Backend, what: str, batch: ForwardBatch, hook: LayerHook) -> None:
        self.logits[what] = backend.model.forward(batch, backend.cache.tensor, hook).clone()

    def _time(self, report: Report, backend: Backend, name: str, num_gpus: int) -> None:
        scale = self._gpu.scale
        batch, context = SHAPES[name]
        batch, context = scale.size(batch, min(batch, 2)), scale.size(context, 40)
        step = decode_batch(batch, context, -(-context // BLOCK), BLOCK, self._config.vocab_size)
        model = backend.model
        assert isinstance(model, AsyncModel)
        steps = scale.size(STEPS, 2)
        seconds = [_step_s(model, backend.cache.tensor, step, steps) for _ in range(self._gpu.reps)]
        title = f"{self._config.num_layers} layers of 8B, decode"
        report.add(rate("ours", title, "tokens/s", batch, seconds, gpus=num_gpus, batch=batch, context=context))
        self.seconds[name] = min(seconds)


class _Leaving:
    """A prefill node's hook: each layer of these blocks leaves when it is computed."""

    wants_layers = True

    def __init__(self, mirror: Mirror, block_ids: list[int]) -> None:
        self.arrivals: list[Arrival] = []
        self._mirror, self._block_ids = mirror, block_ids

    def before_layer(self, layer: int) -> None:
        pass

    def after_layer(self, layer: int) -> None:
        self.arrivals.append(self._mirror.to_host(self._block_ids, layer))


def _step_s(model: AsyncModel, cache: torch.Tensor, step: ForwardBatch, steps: int) -> float:
    """Of each of many, with the next one always started before the last has ended."""
    running = model.start(step, cache, None)
    started = time.perf_counter()
    for _ in range(steps):
        following = model.start(step, cache, None)
        running.tokens()
        running = following
    running.tokens()
    return (time.perf_counter() - started) / (steps + 1)
