"""A whole model through the GPU kernels and the engine: the same tokens as the definition gives on the CPU.

On a GPU in float32, where decode steps are replayed as graphs; else in Triton's interpreter, which has none.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asked import Asked

pytest.importorskip("triton", reason="triton is not installed")

from paged_batch import keys_read
from tiny_families import VOCAB, Published
from tiny_gemma4 import GEMMA4

from mooncake.checkpoint import weight_shapes
from mooncake.engine.backends.backend import plan_pages
from mooncake.engine.cache.device_cache import DeviceCache
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.errors import ConfigError
from mooncake.families.alibi import alibi_slopes
from mooncake.hashing import Chain
from mooncake.kernels import reference
from mooncake.kernels.gpu.experts import tiles_of
from mooncake.kernels.gpu.products import product_tiles
from mooncake.kernels.gpu.triton_launch import INTERPRETED
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.decoder import Decoder
from mooncake.model.families.gpt import Mpt
from mooncake.model.families.registry import DECODERS
from mooncake.model.gpu.gpu_model import WARM_UP_TOKENS, GpuModel, fitting_into
from mooncake.model.gpu.planned_kernels import PlannedKernels
from mooncake.model.llama import CausalLM
from mooncake.model.load import load_model
from mooncake.model_config import LatentAttention, ModelConfig, Routing
from mooncake.page_groups import UNIFORM, PageGroups
from mooncake.pooling import Pooling
from mooncake.precision import FLOAT32
from mooncake.sampling import SamplingParams
from mooncake.types import KVLayout

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="triton was imported without a GPU and without its interpreter",
)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BLOCK_TOKENS = 16
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_model_len": 256,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rms_eps": 1e-5,
    "bos_id": 0,
    "eos_ids": (1,),
}
LLAMA = {"tie_embeddings": False, "qkv_bias": False, "qk_norm": False, "sliding_window": None}
LATENT = LLAMA | {
    "num_heads": 20,
    "num_kv_heads": 1,
    "head_dim": 32,
    "rotary_dim": 8,
    "attention_scale": 0.25,
    "latent": LatentAttention(rank=24, rope_dim=8, nope_dim=8, value_dim=12, query_rank=16),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama sharing": LLAMA
    | {"num_layers": 4, "qk_norm": True, "layer_windows": (24, 0, 24, 0), "kv_sources": (0, 1, 0, 1)},
    "qwen3": LLAMA | {"tie_embeddings": True, "qkv_bias": True, "qk_norm": True, "sliding_window": 24},
    "gemma3_text": LLAMA
    | {"tie_embeddings": True, "qk_norm": True, "activation": "gelu_tanh"}
    | {"layer_windows": (24, 0), "local_rope_theta": 1000.0},
    "gemma2": LLAMA
    | {"tie_embeddings": True, "activation": "gelu_tanh", "score_cap": 2.0, "logit_cap": 3.0}
    | {"layer_windows": (24, 0), "local_rope_theta": 10_000.0},
    "gpt_neox": LLAMA
    | {"num_heads": 4, "num_kv_heads": 4, "rotary_dim": 8, "activation": "gelu", "parallel_residual": True},
    "bloom": LLAMA
    | {"tie_embeddings": True, "qkv_bias": True, "num_kv_heads": 6, "rotary_dim": 0, "activation": "gelu_tanh"}
    | {"hidden_size": 96, "alibi_slopes": alibi_slopes(6)},
    "mpt": LLAMA
    | {"tie_embeddings": True, "rotary_dim": 0, "activation": "gelu", "hidden_size": 96}
    | {"qkv_limit": 2.0, "alibi_slopes": alibi_slopes(6)},
    "falcon": LLAMA
    | {"qkv_bias": True, "num_kv_heads": 6, "hidden_size": 96, "rotary_dim": 0}
    | {"activation": "gelu", "alibi_slopes": alibi_slopes(6)},
    "starcoder2": LLAMA | {"qkv_bias": True, "activation": "gelu_tanh", "sliding_window": 24},
    "granite": LLAMA | {"embedding_factor": 3.0, "residual_factor": 0.4, "logit_divisor": 2.0, "attention_scale": 0.15},
    "olmo2": LLAMA | {"qk_norm": True},
    "olmo3": LLAMA | {"qk_norm": True, "layer_windows": (24, 0), "local_rope_theta": 1000.0},
    "exaone4": LLAMA | {"qk_norm": True, "layer_windows": (24, 0), "still_layers": (1,)},
    "hunyuan_v1_dense": LLAMA | {"qk_norm": True},
    "smollm3": LLAMA | {"tie_embeddings": True, "still_layers": (1,)},
    "phi": LLAMA | {"qkv_bias": True, "rotary_dim": 8, "activation": "gelu_tanh", "parallel_residual": True},
    "stablelm": LLAMA | {"qkv_bias": True, "rotary_dim": 4},
    "nemotron": LLAMA | {"rotary_dim": 8, "activation": "relu2"},
    "qwen3_moe": LLAMA | {"qk_norm": True, "num_experts": 3, "experts_per_token": 2, "norm_expert_weights": True},
    "mixtral": LLAMA | {"num_experts": 3, "experts_per_token": 2, "norm_expert_weights": True, "sliding_window": 24},
    "olmoe": LLAMA | {"qk_norm": True, "num_experts": 3, "experts_per_token": 2},
    "granitemoe": LLAMA
    | {"num_experts": 3, "experts_per_token": 2, "norm_expert_weights": True}
    | {"embedding_factor": 3.0, "residual_factor": 0.4, "logit_divisor": 2.0, "attention_scale": 0.15},
    "qwen2_moe": LLAMA | {"qkv_bias": True, "num_experts": 3, "experts_per_token": 2, "shared_expert_size": 32},
    "glm4": LLAMA | {"qkv_bias": True, "rotary_dim": 8},
    "cohere2": LLAMA | {"tie_embeddings": True, "layer_windows": (24, 0), "still_layers": (1,), "logit_divisor": 4.0},
    "deepseek_v3": LATENT
    | {"num_experts": 6, "experts_per_token": 2, "norm_expert_weights": True, "shared_expert_size": 24}
    | {
        "routing": Routing(dense_layers=(0,), expert_size=24, scoring="sigmoid", factor=2.5, num_groups=3, top_groups=2)
    },
    "glm4_moe": LLAMA
    | {"num_experts": 4, "experts_per_token": 2, "norm_expert_weights": True, "rotary_dim": 8, "shared_expert_size": 32}
    | {"routing": Routing((0,), expert_size=32, scoring="sigmoid", factor=2.0, num_groups=2, top_groups=1)},
    "gemma": LLAMA | {"tie_embeddings": True, "activation": "gelu_tanh"},
    "arcee": LLAMA | {"activation": "relu2"},
    "apertus": LLAMA | {"activation": "xielu", "qk_norm": True},
    "granitemoehybrid": LLAMA | {"embedding_factor": 3.0, "residual_factor": 0.4, "attention_scale": 0.15},
    "ministral3": LLAMA | {"query_growth": 0.5, "query_span": 16},
    "mistral4": LATENT
    | {"num_experts": 4, "experts_per_token": 2, "norm_expert_weights": True, "shared_expert_size": 24}
    | {"routing": Routing((0,), expert_size=24, scoring="softmax", factor=1.0), "query_growth": 0.5, "query_span": 16},
    "afmoe": LLAMA
    | {"num_experts": 4, "experts_per_token": 2, "norm_expert_weights": True, "qk_norm": True, "shared_expert_size": 32}
    | {"layer_windows": (24, 0), "still_layers": (1,), "embedding_factor": 8.0}
    | {"routing": Routing((0,), expert_size=32, scoring="sigmoid", factor=2.5)},
    "hunyuan_v1_moe": LLAMA
    | {
        "num_experts": 3,
        "experts_per_token": 2,
        "norm_expert_weights": True,
        "qk_norm": True,
        "shared_expert_size": 96,
    },
    "exaone_moe": LLAMA
    | {"num_experts": 4, "experts_per_token": 2, "norm_expert_weights": True, "qk_norm": True, "shared_expert_size": 32}
    | {"layer_windows": (24, 0), "still_layers": (1,)}
    | {"routing": Routing((0,), expert_size=32, scoring="sigmoid", factor=2.5, num_groups=2, top_groups=1)},
    "cohere2_moe": LLAMA
    | {"tie_embeddings": True, "num_experts": 4, "experts_per_token": 2, "shared_expert_size": 32}
    | {"layer_windows": (24, 0), "still_layers": (1,), "norm_expert_weights": True}
    | {"routing": Routing((0,), expert_size=32, scoring="unbiased_sigmoid", factor=0.5, shared_factor=0.5)},
    "nanochat": LLAMA | {"activation": "relu2", "logit_cap": 3.0},
    "llama4_text": LLAMA
    | {"num_experts": 4, "experts_per_token": 2, "qk_norm": True, "shared_expert_size": 32, "layer_windows": (-24, 0)}
    | {"still_layers": (1,), "query_growth": 0.5, "query_span": 8, "query_offset": 1}
    | {"routing": Routing((0,), expert_size=32, scoring="sigmoid_inputs", factor=1.0)},
    "ernie4_5_moe": LLAMA
    | {"num_experts": 4, "experts_per_token": 2, "norm_expert_weights": True, "shared_expert_size": 32}
    | {"routing": Routing((0,), expert_size=32, scoring="biased_softmax", factor=1.0)},
    "minimax_m2": LLAMA
    | {"num_experts": 4, "experts_per_token": 2, "norm_expert_weights": True, "rotary_dim": 8, "qk_norm": True}
    | {"routing": Routing((), expert_size=32, scoring="sigmoid", factor=1.0)},
    "gpt_oss": LLAMA | {"qkv_bias": True, "layer_windows": (24, 0), "num_experts": 3, "experts_per_token": 2},
}


def tokens_of(
    model: Any,
    prompts: list[np.ndarray],
    sampling: SamplingParams | None = None,
    layout: KVLayout | None = None,
    groups: PageGroups = UNIFORM,
) -> dict[str, list[int]]:
    layout = layout or KVLayout(
        num_layers=len(model.config.kv_owners),
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_tokens=BLOCK_TOKENS,
        dtype="float32",
        num_kinds=model.config.kv_kinds,
    )
    config = EngineConfig(BLOCK_TOKENS, chunk_tokens=32, max_sequences=4, max_model_len=256, groups=groups)
    cache = DeviceCache(layout, 40, DEVICE) if isinstance(model, GpuModel) else KVCache(layout, 40)
    engine = Engine(model, cache, config)
    sampling = sampling or SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(Sequence(str(index), prompt, len(prompt), sampling, Chain(bytes(32)), eos_ids=(), max_model_len=256))
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token.token_id)
    engine.block_pool.check()
    assert engine.block_pool.num_in_use == 0
    assert (engine._overlap is not None and engine._overlap.num_steps > 0) == (
        getattr(model, "max_async_sequences", 0) > 0
    )
    return tokens


@pytest.mark.parametrize(
    "family", [family if family == "llama" else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_the_engine_on_gpu_kernels_gives_the_tokens_of_the_definition(family: str) -> None:
    config = ModelConfig(architecture=family, **(SHAPE | FAMILIES[family]))
    made = DECODERS.get(family, CausalLM)
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in weight_shapes(config).items()}
    random = np.random.default_rng(2)
    prompts = [random.integers(0, 101, length, dtype=np.uint32) for length in (35, 3)]

    def build(kernels: PlannedKernels) -> CausalLM | Decoder:
        return made(config, weights, kernels=kernels)

    expected = tokens_of(made(config, weights, kernels=reference), prompts)
    assert tokens_of(GpuModel(build, max_blocks=16, dtype=torch.float32, buckets=()), prompts) == expected


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_embeddings_on_gpu_kernels_are_those_of_the_definition(family: str) -> None:
    """Beside an answer, in the same steps, of which decodes are otherwise started ahead."""
    config = ModelConfig(architecture=family, **(SHAPE | FAMILIES[family]))
    made = DECODERS.get(family, CausalLM)
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in weight_shapes(config).items()}
    prompts = [np.random.default_rng(length).integers(0, 101, length, dtype=np.uint32) for length in (35, 3, 1)]

    def build(kernels: PlannedKernels) -> CausalLM | Decoder:
        return made(config, weights, kernels=kernels)

    theirs, expected = answer_and_pooled(made(config, weights, kernels=reference), prompts)
    ours, found = answer_and_pooled(GpuModel(build, max_blocks=16, dtype=torch.float32, buckets=()), prompts)
    assert ours == theirs
    for vector, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(vector, wanted, rtol=1e-4, atol=1e-4)
    with_graphs = GpuModel(build, max_blocks=16, dtype=torch.float32, buckets=(1,))
    decode = ForwardBatch.of_last_token(torch.tensor([1, 2]), BLOCK_TOKENS, [0])
    cache = torch.zeros(1, 1, 2, 2, BLOCK_TOKENS, 16)
    assert with_graphs.replays(decode, cache, NoHook())
    assert not with_graphs.replays(replace(decode, hidden=torch.empty(1, 64)), cache, NoHook())


def answer_and_pooled(model: Any, prompts: list[np.ndarray]) -> tuple[list[int], list[np.ndarray]]:
    """The answer to the first prompt, and all of them pooled in each way."""
    kv = model.config
    layout = KVLayout(len(kv.kv_owners), kv.num_kv_heads, BLOCK_TOKENS, kv.head_dim, "float32")
    cache = DeviceCache(layout, 40, DEVICE) if isinstance(model, GpuModel) else KVCache(layout, 40)
    engine = Engine(model, cache, EngineConfig(BLOCK_TOKENS, chunk_tokens=32, max_sequences=8, max_model_len=256))

    def sequence(name: str, prompt: np.ndarray, max_tokens: int, pooling: Pooling | None) -> Sequence:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        chain = Chain(bytes(32))
        return Sequence(name, prompt, len(prompt), sampling, chain, eos_ids=(), max_model_len=256, pooling=pooling)

    answer = sequence("answer", prompts[0], 5, None)
    pooled = [sequence(f"{kind} {len(prompt)}", prompt, 1, kind) for kind in Pooling for prompt in prompts]
    for each in (answer, *pooled):
        engine.add(each)
    found = {}
    while engine.has_work:
        found |= {output.request_id: output.pooled for output in engine.step()}
    pooled.append(sequence("by itself", prompts[2], 1, Pooling.LAST))  # in a step that could be a decode's
    engine.add(pooled[-1])
    while engine.has_work:
        found |= {output.request_id: output.pooled for output in engine.step()}
    engine.block_pool.check()
    return answer.tokens.tolist(), [found[each.request_id] for each in pooled]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows that only fill a graph may hold anything
def test_warming_up_captures_what_is_asked_for_and_leaves_the_cache_as_it_is() -> None:
    config = ModelConfig(architecture="llama", **(SHAPE | LLAMA))
    weights = {name: torch.randn(shape) * 0.2 for name, shape in weight_shapes(config).items()}
    model = GpuModel(
        lambda kernels: CausalLM(config, weights, kernels=kernels), 2, dtype=torch.float32, buckets=(1, 2, 4, 8)
    )
    cache = torch.randn((5, 2, 2, 2, BLOCK_TOKENS, 16), device=DEVICE)
    before = cache.clone()
    model.warm_up(cache, 3)
    assert torch.equal(cache, before)
    assert sorted(model._graphs) == [1, 2, 4] and model.max_async_sequences == 8


@pytest.mark.parametrize(
    ("max_tokens", "lengths"),
    [(0, [8192, 512, 128, 64, 16, 2]), (2048, [2048, 512, 128, 64, 16, 2]), (100, [100, 64, 16, 2])],
)
def test_warming_up_computes_as_many_tokens_as_a_step_may_have(max_tokens: int, lengths: list[int]) -> None:
    """The largest one shows that there is room for it, and no other has the widest tiles of experts."""
    config = ModelConfig(architecture="llama", **(SHAPE | LLAMA))
    weights = {name: torch.zeros(shape) for name, shape in weight_shapes(config).items()}
    computed: list[int] = []

    class Noting(CausalLM):
        def forward(self, batch: ForwardBatch, *_: object) -> torch.Tensor:
            computed.append(len(batch.tokens))
            return torch.zeros(len(batch.logit_rows), 101, device=DEVICE)

    model = GpuModel(lambda kernels: Noting(config, weights, kernels=kernels), 600, torch.float32, buckets=(1,))
    model.warm_up(torch.zeros((2, 2, 2, 2, BLOCK_TOKENS, 16), device=DEVICE), 1, max_tokens)
    assert computed[: len(lengths)] == lengths and set(computed[len(lengths) :]) <= {1, 2}


OUTPUTS = (1024, 4096, 6144, 28_672)


@pytest.mark.parametrize("max_tokens", [512, 8192])
def test_no_prompt_needs_a_kernel_that_warming_up_has_not_compiled(max_tokens: int) -> None:
    """Not even on a prefill node, which captures no decode steps but the smallest: a request would wait for seconds."""

    def kernels(tokens: int, num_experts: int, per_token: int) -> set[object]:
        pairs = tokens * per_token
        gated, others = (tiles_of(pairs, num_experts, wide=False, is_gated=gated) for gated in (True, False))
        products = {product_tiles(tokens, outputs, itemsize, 132) for outputs in OUTPUTS for itemsize in (1, 2, 4)}
        return {gated, others, *products}

    computed = {min(tokens, max_tokens) for tokens in WARM_UP_TOKENS} | {1}
    for mixture in ((8, 2), (16, 1), (16, 2), (32, 4), (60, 4), (64, 6), (128, 1), (128, 8), (256, 8), (512, 10)):
        compiled = set().union(*(kernels(tokens, *mixture) for tokens in computed))
        assert all(kernels(tokens, *mixture) <= compiled for tokens in range(1, max_tokens + 1)), mixture


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB"),
        RuntimeError("CUDA error: out of memory\nand more"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_gpu_without_room_is_an_error_of_the_configuration_whoever_says_so(error: RuntimeError) -> None:
    told = re.escape(str(error).splitlines()[0])
    with pytest.raises(ConfigError, match=f"kv_gb do not fit into cuda:1: {told}$"), fitting_into("cuda:1"):
        raise error
    with pytest.raises(ConfigError, match="kv_gb do not fit"), fitting_into("cuda:1"):
        try:
            raise error
        finally:  # as the end of a capture does
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    with pytest.raises(RuntimeError, match="illegal"), fitting_into("cuda:1"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_graphs_over_another_cache_are_captured_in_memory_of_their_own() -> None:
    """Torch stops at a capture in the memory of graphs that are all gone."""
    config = ModelConfig(architecture="llama", **(SHAPE | LLAMA))
    weights = {name: torch.randn(shape) for name, shape in weight_shapes(config).items()}
    model = GpuModel(lambda kernels: CausalLM(config, weights, kernels=kernels), 2, torch.float32, buckets=(1,))
    caches = [torch.zeros((2, 2, 2, 2, BLOCK_TOKENS, 16), device=DEVICE) for _ in range(2)]
    model._use(caches[0])
    model._pool = "of the graphs over it"
    model._use(caches[0])
    assert model._pool == "of the graphs over it"
    model._use(caches[1])
    assert model._pool is None


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("glm4_moe", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows that only fill a graph may hold anything
def test_a_replayed_step_of_a_mixture_asks_the_host_nothing(family: str) -> None:
    config = ModelConfig(architecture=family, **(SHAPE | FAMILIES[family]))
    weights = {name: torch.randn(shape) * 0.2 for name, shape in weight_shapes(config).items()}
    model = GpuModel(lambda kernels: DECODERS[family](config, weights, kernels=kernels), 2, torch.float32, buckets=(2,))
    with torch.inference_mode():
        captured = model._capture(2, torch.zeros((5, 2, 2, 2, BLOCK_TOKENS, 16), device=DEVICE))
        with Asked() as asked:
            captured.graph.replay()
    assert not asked.found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows that only fill a graph may hold anything
def test_what_neighbours_share_is_read_once_where_that_saves_enough() -> None:
    config = ModelConfig(architecture="llama", **(SHAPE | LLAMA | {"max_model_len": 1024}))
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in weight_shapes(config).items()}
    cache = torch.randn((50, 2, 2, 2, BLOCK_TOKENS, 16), generator=generator)
    batch = three_that_share_36_blocks()
    model = Counting(
        lambda kernels: CausalLM(config, weights, kernels=kernels), max_blocks=64, dtype=torch.float32, buckets=(4,)
    )
    expected = CausalLM(config, weights, kernels=reference).forward(batch, cache.clone(), NoHook())
    saved = 2 * 36 * cache[0].nbytes
    for least, num_replays in ((saved + 1, 1), (saved, 0)):
        model.cascade_bytes, model.num_replays = least, 0
        again = replace(batch, block_tables=batch.block_tables.clone())
        logits = model.forward(again, cache.to(DEVICE, copy=True), NoHook())
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert model.num_replays == num_replays
        [plan] = model.kernels.step_plans.values()
        assert keys_read(plan) == 580 + 577 + 590 - (0 if num_replays else 2 * 576)


def test_with_slopes_every_sequence_reads_what_it_shares() -> None:
    """Tiles over what is shared do not know where their queries are."""
    config = ModelConfig(architecture="mpt", **(SHAPE | FAMILIES["mpt"] | {"max_model_len": 1024}))
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in weight_shapes(config).items()}
    cache = torch.randn((50, 2, 2, 2, BLOCK_TOKENS, 16), generator=generator)
    batch = three_that_share_36_blocks()
    model = GpuModel(lambda kernels: Mpt(config, weights, kernels=kernels), 64, torch.float32, buckets=())
    expected = Mpt(config, weights, kernels=reference).forward(batch, cache.clone(), NoHook())
    logits = model.forward(batch, cache.to(DEVICE, copy=True), NoHook())
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    [plan] = model.kernels.step_plans.values()
    assert keys_read(plan) == 580 + 577 + 590


def three_that_share_36_blocks() -> ForwardBatch:
    tables = torch.zeros((3, 40), dtype=torch.int32)
    tables[:, :36] = torch.arange(36)
    tables[:, 36] = torch.tensor([40, 41, 42])
    contexts = torch.tensor([580, 577, 590], dtype=torch.int32)
    return ForwardBatch(
        tokens=torch.tensor([5, 6, 7]),
        positions=contexts.long() - 1,
        query_starts=torch.arange(4, dtype=torch.int32),
        context_lens=contexts,
        block_tables=tables,
        slots=tables[:, 36].long() * BLOCK_TOKENS + (contexts.long() - 1) % BLOCK_TOKENS,
        logit_rows=torch.arange(3),
    )


class Counting(GpuModel):
    """Counts steps that are replayed, and for how many of them block tables were copied to the device."""

    num_replays = num_tables = 0

    def _fill(self, buffers: Any, *given: Any) -> None:
        before = buffers.tables
        super()._fill(buffers, *given)
        self.num_replays += 1
        self.num_tables += buffers.tables is not before


GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9, seed=3)
WINDOWED = LLAMA | {"sliding_window": 24}
DENSE = LATENT | {"routing": Routing(dense_layers=(0, 1), expert_size=0, scoring="sigmoid", factor=1.0)}


@pytest.mark.parametrize(
    ("family", "changes", "sampling"),
    [
        ("llama", WINDOWED, GREEDY),
        pytest.param("llama", WINDOWED, DRAWN, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", DENSE, GREEDY, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", FAMILIES["qwen3_moe"], GREEDY, marks=pytest.mark.slow),
        pytest.param("gpt_oss", FAMILIES["gpt_oss"], GREEDY, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows that only fill a graph may hold anything
def test_steps_that_are_replayed_ahead_give_the_tokens_of_the_definition(
    family: str, changes: dict[str, Any], sampling: SamplingParams
) -> None:
    """The interpreter has no graphs, but the code around them runs."""
    config = ModelConfig(architecture=family, **(SHAPE | changes))
    made = DECODERS.get(family, CausalLM)
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in weight_shapes(config).items()}
    random = np.random.default_rng(2)
    prompts = [random.integers(0, 101, length, dtype=np.uint32) for length in (14, 3, 29)]  # two cross into a new block

    def build(kernels: PlannedKernels) -> CausalLM | Decoder:
        return made(config, weights, kernels=kernels)

    model = Counting(build, max_blocks=16, dtype=torch.float32, buckets=(1, 2, 4))
    expected = tokens_of(made(config, weights, kernels=reference), prompts, sampling)
    assert tokens_of(model, prompts, sampling) == expected
    assert 1 <= model.num_tables < model.num_replays, "tables that had not changed were copied again"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows that only fill a graph may hold anything
def test_steps_of_layers_in_groups_are_replayed(tmp_path: Path) -> None:
    """Gemma 4's, with windows and heads of two sizes. Nothing of such a step is computed or looked up on the host."""
    folder = Published("small", tmp_path, GEMMA4)
    groups, layout = plan_pages(folder.checkpoint, folder.checkpoint.kv_layout(BLOCK_TOKENS, "float32"), 256)
    assert groups.windows == (0, 16)
    random = np.random.default_rng(2)
    prompts = [random.integers(2, VOCAB, length, dtype=np.uint32) for length in (30, 3)]  # one leaves a page behind

    def build(kernels: PlannedKernels) -> CausalLM | Decoder:
        return load_model(folder.checkpoint, FLOAT32, kernels=kernels)

    model = Counting(build, max_blocks=16, dtype=torch.float32, buckets=(2,), groups=groups)
    on_cpu = load_model(folder.checkpoint, FLOAT32, kernels=reference)
    assert tokens_of(model, prompts, GREEDY, layout, groups) == tokens_of(on_cpu, prompts, GREEDY, layout, groups)
    assert 1 <= model.num_tables < model.num_replays, "tables that had not changed were copied again"
    with torch.inference_mode(), Asked() as asked:
        model._graphs[2].graph.replay()
    assert not asked.found
