"""Small random models of transformers of every family whose weights are not Llama's, as publishers write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from greedy import Answering
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM, PreTrainedModel

from mooncake.checkpoint import Checkpoint, open_checkpoint

VOCAB = 97
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
EVEN = {"vocab_size": VOCAB, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, **IDS}
GATED = {**EVEN, "intermediate_size": 160, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}

LATENT = {
    **{**EVEN, "num_hidden_layers": 4},
    **{"intermediate_size": 160, "moe_intermediate_size": 48, "num_experts_per_tok": 3, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24},
    **{"v_head_dim": 20, "max_position_embeddings": 512, "initializer_range": 0.2},
}
GLM_MOE = {
    **GATED,
    **{"moe_intermediate_size": 48, "num_experts_per_tok": 3, "n_routed_experts": 6, "first_k_dense_replace": 1},
    "initializer_range": 0.2,
}
WIDE = {"initializer_range": 0.2}
PLAIN = {**EVEN, "intermediate_size": 160, "max_position_embeddings": 512, "initializer_range": 0.15}
GPT = {
    **{"vocab_size": VOCAB, "n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 512, "initializer_range": 0.15},
    **IDS,
}
OPT = {**EVEN, "ffn_dim": 160, "word_embed_proj_dim": 96, "max_position_embeddings": 512, "init_std": 0.15}
MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}


def member(
    family: str, *settings: dict[str, Any], without: tuple[str, ...] = (), **own: Any
) -> Callable[[], PreTrainedModel]:
    """Makes a model of transformers' ``family`` with these settings of its configuration."""

    def make() -> PreTrainedModel:
        # Copies: some configurations change what they are given.
        given = [*settings, own]
        wanted = {key: deepcopy(value) for each in given for key, value in each.items() if key not in without}
        config = AutoConfig.for_model(family, **wanted)
        if isinstance(config, Mistral4Config):  # which the automatic class does not know
            return Mistral4ForCausalLM(config)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        return model

    return make


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": member("gpt2", GPT),
    "opt": member("opt", OPT),
    "gpt2-with-a-head": member("gpt2", GPT, scale_attn_weights=False, tie_word_embeddings=False),
    "opt-with-a-head": member("opt", OPT, tie_word_embeddings=False),
    "gpt-neox": member("gpt_neox", PLAIN),
    "gpt-neox-in-turn": member(
        "gpt_neox",
        PLAIN,
        use_parallel_residual=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
    ),
    "starcoder2": member("starcoder2", PLAIN, num_key_value_heads=2, sliding_window=20),
    "granite": member("granite", GATED, MULTIPLIED, WIDE, tie_word_embeddings=True),
    "olmo2": member("olmo2", GATED, WIDE),
    "olmo3": member(
        "olmo3",
        GATED,
        WIDE,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
    "hunyuan": member(
        "hunyuan_v1_dense",
        GATED,
        WIDE,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 1000.0},
    ),
    "exaone-4": member("exaone4", GATED, WIDE, sliding_window=20, sliding_window_pattern=3),
    "exaone-4-without-windows": member("exaone4", GATED, WIDE, sliding_window=None, layer_types=["full_attention"] * 3),
    "gemma2": member(
        "gemma2",
        GATED,
        WIDE,
        sliding_window=20,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma2-without-caps": member(
        "gemma2",
        GATED,
        WIDE,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        sliding_window=33,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma3": member(
        "gemma3_text",
        GATED,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=24,
        initializer_range=0.15,
    ),
    "qwen3-moe": member(
        "qwen3_moe", GATED, WIDE, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "mixtral": member("mixtral", GATED, LOCAL, WIDE, sliding_window=20),
    "deepseek-v2": member("deepseek_v2", LATENT, q_lora_rank=None, n_routed_experts=6),
    "deepseek-v2-in-groups": member(
        "deepseek_v2",
        LATENT,
        q_lora_rank=24,
        n_routed_experts=8,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=3.0,
        rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek-v3": member(
        "deepseek_v3",
        LATENT,
        q_lora_rank=24,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm-4.5": member("glm4_moe", GLM_MOE, use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.5),
    "glm-4.5-air": member(
        "glm4_moe",
        GLM_MOE,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    ),
    "moonlight": member(
        "deepseek_v3",
        LATENT,
        q_lora_rank=None,
        n_routed_experts=6,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.446,
    ),
    "deepseek-v3-wide": member(
        "deepseek_v3",
        LATENT
        | {"hidden_size": 256, "num_attention_heads": 4, "moe_intermediate_size": 64, "num_hidden_layers": 3}
        | {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32},
        q_lora_rank=32,
        n_routed_experts=6,
        n_group=1,
        topk_group=1,
    ),  # rows of whole blocks of codes
    "gpt-oss": member(
        "gpt_oss",
        GATED,
        LOCAL,
        sliding_window=20,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 8.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        initializer_range=0.4,
    ),
    "qwen2-moe": member(
        "qwen2_moe",
        GATED,
        WIDE,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=112,
        num_experts=6,
        num_experts_per_tok=2,
    ),
    "olmoe": member("olmoe", GATED, WIDE, num_experts=6, num_experts_per_tok=2),
    "granite-moe": member("granitemoe", GATED, MULTIPLIED, LOCAL, WIDE),
    "dots1": member("dots1", GLM_MOE, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True),
    "dots1-without-norm": member("dots1", GLM_MOE, n_shared_experts=2, n_group=2, topk_group=1),
    "ernie-4.5-moe": member(
        "ernie4_5_moe",
        GATED,
        WIDE,
        moe_intermediate_size=48,
        moe_num_experts=6,
        moe_k=3,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
    ),
    "minimax-m2": member("minimax_m2", GATED, WIDE, num_local_experts=6, num_experts_per_tok=3, rotary_dim=8),
    "glm": member("glm", GATED, WIDE, attention_bias=False),
    "glm4": member("glm4", GATED, WIDE, partial_rotary_factor=0.75),
    "cohere": member("cohere", GATED, WIDE, logit_scale=0.25),
    "cohere-plus": member("cohere", GATED, WIDE, use_qk_norm=True),
    "cohere2": member(
        "cohere2",
        GATED,
        WIDE,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gptj": member("gptj", GPT, rotary_dim=8),
    "falcon-7b": member("falcon", EVEN, initializer_range=0.15),
    "falcon-in-turn": member("falcon", EVEN, multi_query=False, parallel_attn=False, bias=True, initializer_range=0.15),
    "falcon-40b": member(
        "falcon",
        EVEN,
        new_decoder_architecture=True,
        num_kv_heads=2,
        ffn_hidden_size=160,
        tie_word_embeddings=False,
        initializer_range=0.15,
    ),
    "falcon2-11b": member(
        "falcon", EVEN, new_decoder_architecture=True, num_ln_in_parallel_attn=1, num_kv_heads=2, initializer_range=0.15
    ),
    "phi": member("phi", PLAIN, num_key_value_heads=2, partial_rotary_factor=0.5),
    "stablelm": member("stablelm", PLAIN, num_key_value_heads=2, use_qkv_bias=True),
    "stablelm-in-parallel": member(
        "stablelm", PLAIN, num_key_value_heads=2, use_parallel_residual=True, partial_rotary_factor=1.0
    ),
    "nemotron": member("nemotron", GATED, WIDE),
    "smollm3": member("smollm3", GATED, WIDE, no_rope_layers=[1, 0, 1], tie_word_embeddings=True),
    "smollm3-in-turn": member(
        "smollm3", GATED | {"num_hidden_layers": 5}, tie_word_embeddings=True, initializer_range=0.2
    ),
    "seed-oss": member("seed_oss", GATED, WIDE),
    "ministral": member(
        "ministral",
        GATED,
        WIDE,
        sliding_window=20,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "ernie-4.5": member("ernie4_5", GATED, WIDE),
    "phi3": member("phi3", GATED, WIDE, sliding_window=20),
    "phi4-mini": member(
        "phi3",
        GATED,
        WIDE,
        tie_word_embeddings=True,
        sliding_window=4096,
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
            "long_factor": [1.0, 1.5, 2.5, 5.0, 9.0, 15.0],
        },
    ),
}


class Published(Answering):
    """A random model of transformers', and the folder that its publisher would upload."""

    def __init__(
        self, family: str, folder: Path, families: Mapping[str, Callable[[], PreTrainedModel]] = FAMILIES
    ) -> None:
        torch.manual_seed(7)
        self.theirs = families[family]().eval()
        with torch.no_grad():  # published models have neither zero biases nor all-one norms
            for name, parameter in (*self.theirs.named_parameters(), *self.theirs.named_buffers()):
                is_bias = name.endswith("e_score_correction_bias")
                if is_bias or (isinstance(parameter, torch.nn.Parameter) and is_flat(parameter)):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        self.theirs.save_pretrained(folder)
        self.folder = folder

    def rewrite(self, **changes: object) -> None:
        """Change config.json; None removes a key."""
        tree = self.tree | changes
        (self.folder / "config.json").write_text(
            json.dumps({key: value for key, value in tree.items() if value is not None})
        )

    @property
    def tree(self) -> dict[str, object]:
        """What config.json says."""
        tree: dict[str, object] = json.loads((self.folder / "config.json").read_text())
        return tree

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(str(self.folder))


def is_flat(parameter: torch.Tensor) -> bool:
    return parameter.ndim == 1 or bool((parameter == 1).all())
