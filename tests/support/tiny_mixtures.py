"""Tiny random mixtures of experts, two with latent attention, as Hugging Face folders; and their greedy answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from greedy import NEW_TOKENS, Answering, greedy_answers
from tiny_model import LATENT, write_tiny_model

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import Cache, CausalModel, EngineConfig
from mooncake.engine.engine import Engine
from mooncake.kernels import choose_kernels, reference
from mooncake.model.load import load_model
from mooncake.precision import FLOAT32, WeightFormat

BLOCK_TOKENS, NUM_BLOCKS = 16, 60
PROMPTS = [np.random.default_rng(seed).integers(3, 320, length).tolist() for seed, length in enumerate((70, 5, 33))]

WIDE = {"initializer_range": 0.2, "num_experts_per_tok": 2}
ROUTED = {
    **WIDE,
    **{"n_routed_experts": 6, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_hidden_layers": 3},
}
LATENT_V2 = {name: value for name, value in LATENT.items() if name not in ("n_group", "topk_group")}
YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": ("deepseek_v3", LATENT),
    "deepseek-v2": ("deepseek_v2", LATENT_V2 | {"q_lora_rank": None, "n_routed_experts": 7}),
    "glm-4.5": ("glm4_moe", ROUTED | {"use_qk_norm": True, "attention_bias": True}),
    "qwen2-moe": (
        "qwen2_moe",
        WIDE | {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
    "qwen3-moe": ("qwen3_moe", WIDE | {"num_experts": 6, "moe_intermediate_size": 20, "norm_topk_prob": True}),
    "mixtral": ("mixtral", WIDE | {"num_local_experts": 5, "sliding_window": 20}),
    "olmoe": ("olmoe", WIDE | {"num_experts": 6, "intermediate_size": 24}),
    "granite-moe": (
        "granitemoe",
        WIDE | {"num_local_experts": 6, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    "ernie-4.5": (
        "ernie4_5_moe",
        {"initializer_range": 0.2, "num_hidden_layers": 3}
        | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    ),
    "minimax-m2": ("minimax_m2", WIDE | {"num_local_experts": 6, "rotary_dim": 4, "intermediate_size": 24}),
    "gpt-oss": (
        "gpt_oss",
        WIDE | {"initializer_range": 0.4, "num_local_experts": 6, "sliding_window": 20, "rope_parameters": YARN},
    ),
}


class Published(Answering):
    """A random mixture model of transformers, and its folder as published."""

    def __init__(self, name: str, folder: Path) -> None:
        family, changes = MIXTURES[name]
        self.theirs = write_tiny_model(folder, family, **changes)
        self.folder = str(folder)

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.folder)


def answers(model: CausalModel, cache: Cache, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Greedy tokens through the engine: prompts in chunks, then all in one batch."""
    engine = Engine(model, cache, EngineConfig(BLOCK_TOKENS, 32, 8, 256))
    return greedy_answers(engine, prompts, NEW_TOKENS)


def answers_of(
    checkpoint: Checkpoint,
    prompts: list[list[int]] = PROMPTS,
    form: WeightFormat = FLOAT32,
    use_reference: bool = False,
    kv_dtype: str = "float32",
) -> list[list[int]]:
    """The same, by the model that is loaded from there, over a cache of its own."""
    model = load_model(checkpoint, form, kernels=reference if use_reference else choose_kernels())
    return answers(model, KVCache(checkpoint.kv_layout(BLOCK_TOKENS, kv_dtype), 80), prompts)
