"""The parts of ``mooncake bench gpu`` that run a whole model: steps compared with their roofline, and a hand-off."""

from __future__ import annotations

import torch

from mooncake.app.bench.gpu_parts.device import Gpu, check, rate
from mooncake.app.bench.gpu_parts.kernels import HEAD_DIM, HEADS, KV_HEADS
from mooncake.app.bench.report import Figure, Report
from mooncake.checkpoint import weight_shapes
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.gpu.gpu_model import GpuModel
from mooncake.model.gpu.planned_kernels import PlannedKernels
from mooncake.model.llama import CausalLM
from mooncake.model_config import ModelConfig

BLOCK = 64
MOST_ERROR = 0.3  # of the norm of the logits
LEAST_CONTEXT = 1024


def model_of_8b(gpu: Gpu) -> ModelConfig:
    size = gpu.scale.size
    return ModelConfig(
        architecture="llama",
        num_layers=size(32, 1),
        hidden_size=size(4096, 64),
        intermediate_size=size(14_336, 96),
        num_heads=size(HEADS, 4),
        num_kv_heads=size(KV_HEADS, 2),
        head_dim=size(HEAD_DIM, 16),
        vocab_size=size(128_256, 101),
        max_model_len=size(131_072, 256),
        rope_theta=500_000.0,
        rope_scaling=None,
        rms_eps=1e-5,
        tie_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        sliding_window=None,
        bos_id=None,
        eos_ids=(),
    )


def build_model(gpu: Gpu, host_logits: bool = False) -> tuple[GpuModel, int]:
    """A model with random weights, and the bytes of weights that a decode step reads."""
    config = model_of_8b(gpu)
    weights = {
        name: torch.randn(shape, device=gpu.device, dtype=gpu.dtype) * 0.02
        for name, shape in weight_shapes(config).items()
    }
    step_bytes = sum(tensor.nbytes for name, tensor in weights.items() if "embed_tokens" not in name)
    graphs = gpu.device.type == "cuda"

    def build(kernels: PlannedKernels) -> CausalLM:
        return CausalLM(config, weights, kernels=kernels)

    model = GpuModel(
        build, config.max_model_len // BLOCK, gpu.dtype, buckets=(1, 64) if graphs else (), host_logits=host_logits
    )
    model.kernels.choose_launch = gpu.kernels.choose_launch
    weights.clear()
    gpu.free()
    return model, step_bytes


def whole_model(gpu: Gpu, report: Report, stream: float) -> None:
    """Decode steps and a prefill of an 8B model with random weights: speed only."""
    model, step_bytes = build_model(gpu)
    for batch, context in ((64, 8192), (1, 1024)):
        with gpu.trying(f"decode steps of {batch}"):
            _decode(gpu, report, model, batch, context, step_bytes, stream)
    with gpu.trying("prefill"):
        _prefill(gpu, report, model)
    with gpu.trying("replays are what runs kernel by kernel"):
        _check_replays(gpu, report, model)


def _decode(
    gpu: Gpu, report: Report, model: GpuModel, batch: int, context: int, step_bytes: int, stream: float
) -> None:
    """Decode steps at the longest context whose cache fits beside the weights: the given one, halved until it fits."""
    config, graphs = model.config, gpu.device.type == "cuda"
    token_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * gpu.dtype.itemsize
    while not gpu.fits(batch * context * token_bytes) and context > LEAST_CONTEXT:
        context //= 2
    name = "1" if batch == 1 else f"64x{context // 1024}k"
    batch, context = gpu.scale.size(batch, min(batch, 2)), gpu.scale.size(context, 40)
    per_sequence = -(-context // BLOCK)
    shape = (batch * per_sequence, config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim)
    cache = torch.empty(shape, dtype=gpu.dtype, device=gpu.device).normal_()
    step = decode_batch(batch, context, per_sequence, BLOCK, config.vocab_size)
    seconds = gpu.timed_s(lambda _: model.forward(step, cache, NoHook()))
    report.add(rate("ours", "8B decode", "tokens/s", batch, seconds, batch=batch, context=context))
    report.add(Figure("ours", "8B decode step", "ms", tuple(1e3 * s for s in seconds), params={"shape": name}))
    roofline_s = (step_bytes + batch * context * token_bytes) / stream
    report.ratios[f"model_decode_{name}_vs_roofline"] = roofline_s / min(seconds)
    if batch == 1 and graphs:
        eager = _kernel_by_kernel(gpu, model)
        eager_s = gpu.timed_s(lambda _: eager.forward(step, cache, NoHook()))
        report.ratios["graph_vs_eager_batch_1"] = min(eager_s) / min(seconds)


def _kernel_by_kernel(gpu: Gpu, model: GpuModel) -> GpuModel:
    blocks = model.config.max_model_len // BLOCK
    eager = GpuModel(lambda _: model._model, blocks, gpu.dtype, buckets=(), host_logits=False)
    eager.kernels = model.kernels  # the model follows their plan
    return eager


def _check_replays(gpu: Gpu, report: Report, model: GpuModel) -> None:
    """Compare the logits of replayed steps, some with padding rows, with those of steps run kernel by kernel.

    Raises AssertionError. Another summation order changes bfloat16 logits by a few hundredths of their norm, more with
    random weights than with a trained model's; mistaking a page or row for another changes them completely.
    """
    config, eager = model.config, _kernel_by_kernel(gpu, model)
    for batch, context in ((1, 1000), (50, 700)):
        batch, context = gpu.scale.size(batch, min(batch, 2)), gpu.scale.size(context, 40)
        per_sequence = -(-context // BLOCK)
        shape = (batch * per_sequence, config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim)
        cache = torch.randn(shape, dtype=gpu.dtype, device=gpu.device)
        for turn in range(2):  # the second one with other tables in the same buffers
            step = decode_batch(batch, context, per_sequence, BLOCK, config.vocab_size)
            replayed, plain = (one.forward(step, cache, NoHook()).float().clone() for one in (model, eager))
            check(report, f"replayed steps of {batch}, turn {turn}", replayed, plain, MOST_ERROR)
        del cache
        gpu.free()


def handed_off(gpu: Gpu, report: Report, _: float) -> None:
    from mooncake.app.bench.gpu_parts.handoff import hand_off  # needs the dependencies of nodes

    hand_off(gpu, report, build_model(gpu)[0], BLOCK if gpu.device.type == "cuda" else 16)


def _prefill(gpu: Gpu, report: Report, model: GpuModel) -> None:
    config = model.config
    length = gpu.scale.size(8192, 40)
    blocks = -(-length // BLOCK)
    cache = torch.zeros(
        (blocks, config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim), dtype=gpu.dtype, device=gpu.device
    )
    tokens = torch.randint(0, config.vocab_size, (length,))
    batch = ForwardBatch.of_prompt(tokens, BLOCK, torch.tensor([length - 1]))
    seconds = gpu.timed_s(lambda _: model.forward(batch, cache, NoHook()))
    report.add(rate("ours", "8B prefill", "tokens/s", length, seconds, tokens=length))


def decode_batch(batch: int, context: int, per_sequence: int, block: int, vocab: int) -> ForwardBatch:
    tables = torch.randperm(batch * per_sequence).int().view(batch, per_sequence)
    last = context - 1
    return ForwardBatch(
        tokens=torch.randint(0, vocab, (batch,)),
        positions=torch.full((batch,), last),
        query_starts=torch.arange(batch + 1, dtype=torch.int32),
        context_lens=torch.full((batch,), context, dtype=torch.int32),
        block_tables=tables,
        slots=tables[:, last // block].long() * block + last % block,
        logit_rows=torch.arange(batch),
    )
