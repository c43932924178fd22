"""Tiny random models with recurrent layers, as Hugging Face folders, and engines over them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from greedy import greedy
from tiny_model import write_tiny_model

from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import NO_HOOK, EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.errors import KVLoadFailed
from mooncake.hashing import Chain
from mooncake.kernels import Kernels
from mooncake.model import load_model
from mooncake.page_groups import as_one_group, groups_of
from mooncake.precision import Coding, KeptGroups, WeightFormat
from mooncake.sampling import SamplingParams

BLOCK, CONTEXT = 8, 256
STATES: dict[str, Any] = {
    **{"num_hidden_layers": 5, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "initializer_range": 0.2, "hidden_size": 48, "head_dim": 16},
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
}
MIXED = {
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
}
CONVOLUTIONS: dict[str, Any] = {
    **{"num_hidden_layers": 5, "hidden_size": 48, "initializer_range": 0.3, "block_multiple_of": 32},
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
}
SPACES: dict[str, Any] = {
    **{"num_hidden_layers": 5, "hidden_size": 48, "initializer_range": 0.2, "head_dim": 16, "mamba_n_heads": 6},
    **{"mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16},
}
GRANITE: dict[str, Any] = {
    **{"shared_intermediate_size": 40, "embedding_multiplier": 3.0, "attention_multiplier": 0.4},
    **{"residual_multiplier": 0.6, "logits_scaling": 2.0, "num_local_experts": 0},
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
}
FALCON: dict[str, Any] = {
    **{"num_hidden_layers": 3, "intermediate_size": 64, "pad_token_id": None, "mamba_d_ssm": 96},
    **{"attention_in_multiplier": 0.8, "attention_out_multiplier": 0.9, "key_multiplier": 0.7},
    **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.8, 1.2]},
    **{"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.7, 1.1, 0.9, 1.2, 0.8]},
}
NEMOTRON: dict[str, Any] = {
    **{"hidden_size": 48, "head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 16},
    **{"n_groups": 2, "initializer_range": 0.3, "intermediate_size": 64, "chunk_size": 16},
    **{"time_step_min": 1e-9, "num_hidden_layers": None},
}
NEMOTRON_MIXED: dict[str, Any] = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2},
    **{"moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.5},
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("qwen3_next", STATES | MIXED),
    "qwen3.5": ("qwen3_5_text", STATES),
    "lfm2": ("lfm2", CONVOLUTIONS),
    "lfm2-moe": (
        "lfm2_moe",
        CONVOLUTIONS
        | {"num_dense_layers": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"intermediate_size": 64, "pad_token_id": None},
    ),
    "granite-4": ("granitemoehybrid", SPACES | GRANITE),
    "granite-4-moe": (
        "granitemoehybrid",
        SPACES | GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    ),
    "bamba": ("bamba", SPACES | {"attn_layer_indices": [2, 4], "intermediate_size": 64, "pad_token_id": None}),
    "falcon-h1": ("falcon_h1", SPACES | FALCON),
    "falcon-h1-with-norms": ("falcon_h1", SPACES | FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "nemotron-h": ("nemotron_h", NEMOTRON | {"hybrid_override_pattern": "M-M*-M-M*"}),
    "nemotron-3": ("nemotron_h", NEMOTRON | NEMOTRON_MIXED | {"hybrid_override_pattern": "MEM*EMEM*E-"}),
    "nemotron-3-latent": (
        "nemotron_h",
        NEMOTRON
        | NEMOTRON_MIXED
        | {"hybrid_override_pattern": "MEM*EM*E", "moe_latent_size": 32, "use_bias": True, "initializer_range": 0.2},
    ),
    "qwen3.5-moe": ("qwen3_5_moe_text", STATES | MIXED),
}


def write_hybrid(name: str, folder: Path) -> Any:
    """Returns transformers' own model."""
    family, changes = HYBRIDS[name]
    model = write_tiny_model(folder, family, **changes)
    changed = False
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            if key.endswith("A_log") and "mamba_n_heads" in changes:
                changed, _ = True, weight.sub_(4)  # as they are, they forget all within a few tokens
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                changed, _ = True, weight.normal_(std=0.3)  # it is 0
    if changed:
        model.save_pretrained(folder)
    return model


def hybrid_engine(
    folder: Path,
    num_pages: int = 300,
    num_places: int = 0,
    kernels: Kernels | None = None,
    dtype: str = "float32",
    has_groups: bool = True,
    coding: Coding = "",
    keeps_groups: KeptGroups = "",
    **settings: Any,
) -> Engine:
    checkpoint = open_checkpoint(str(folder))
    numbers = {"block_tokens": BLOCK, "chunk_tokens": 24, "max_sequences": 8, "max_model_len": CONTEXT} | settings
    block = checkpoint.kv_layout(numbers["block_tokens"], dtype)
    groups = groups_of(checkpoint.config, CONTEXT, block) if has_groups else as_one_group(checkpoint.config, block)
    cache = KVCache(groups.page_layout(block), num_pages, num_places=num_places)
    cache.memory[:] = 0xFF  # what was never written must never be read: NaN
    model = load_model(checkpoint, WeightFormat("float32", coding=coding, keeps_groups=keeps_groups), CONTEXT, kernels)
    return Engine(model, cache, EngineConfig(**numbers, groups=groups))


def sequence(
    name: str, prompt: list[int], count: int = 12, given: SamplingParams | None = None, **sampling: Any
) -> Sequence:
    wanted = given or SamplingParams(**({"max_tokens": count, "temperature": 0.0, "ignore_eos": True} | sampling))
    tokens = np.array(prompt, np.uint32)
    return Sequence(name, tokens, len(tokens), wanted, Chain(bytes(32)), eos_ids=(), max_model_len=CONTEXT)


def run(engine: Engine) -> dict[str, list[int]]:
    """All tokens, by request and, where there are several, answer."""
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            name = f"{output.request_id}#{output.choice}" if output.choice else output.request_id
            found.setdefault(name, []).append(output.token.token_id)
    assert not engine.take_ended()
    return found


class Failing:
    """A hook that abandons steps at a random layer, as one does whose loads fail."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.wants_layers = True
        self.num_failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(NO_HOOK, name)

    def before_layer(self, layer: int) -> None:
        if self._random.random() < 0.1:
            self.num_failed += 1
            raise KVLoadFailed("a load that never comes")

    def after_layer(self, layer: int) -> None:
        if self._random.random() < 0.05:
            self.num_failed += 1
            raise KVLoadFailed("a load that never comes")


def run_failing(engine: Engine, hook: Failing, prompts: dict[str, list[int]], count: int = 12) -> dict[str, list[int]]:
    """All tokens by request; a step that fails is planned again."""
    found: dict[str, list[int]] = {name: [] for name in prompts}
    waiting = list(prompts.items())
    while engine.has_work or waiting:
        if waiting:
            engine.add(sequence(*waiting.pop(), count))
        try:
            for output in engine.step(hook):
                found[output.request_id].append(output.token.token_id)
        except KVLoadFailed:
            continue  # nothing was loading: the same step is planned again
    return found


def prompt_of(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng([seed, length]).integers(3, 320, length).tolist()
    return found


LENGTHS = 1, 9, 40, 70


def answers(path: Path, **settings: Any) -> list[list[int]]:
    """To prompts of these lengths, by an engine with these settings."""
    engine = hybrid_engine(path, **settings)
    for length in LENGTHS:
        engine.add(sequence(str(length), prompt_of(length)))
    found = run(engine)
    return [found[str(length)] for length in LENGTHS]


def their_answers(model: Any, guesses: list[list[int]]) -> list[list[int]]:
    """To the same prompts, by transformers' model."""
    asked = zip(LENGTHS, guesses, strict=True)
    return [greedy(model, prompt_of(length), 12, guess) for length, guess in asked]
