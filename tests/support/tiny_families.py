"""Small random models of transformers of every family whose weights are not Llama's, as publishers write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from greedy import Answering
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=96, n_layer=3, n_head=6, n_positions=512, initializer_range=0.15, **IDS)
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**EVEN, ffn_dim=160, word_embed_proj_dim=96, max_position_embeddings=512, init_std=0.15)
    ),
    "gpt2-with-a-head": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=96,
            n_layer=3,
            n_head=6,
            n_positions=512,
            initializer_range=0.15,
            scale_attn_weights=False,
            tie_word_embeddings=False,
            **IDS,
        )
    ),
    "opt-with-a-head": lambda: OPTForCausalLM(
        OPTConfig(
            **EVEN,
            ffn_dim=160,
            word_embed_proj_dim=96,
            max_position_embeddings=512,
            init_std=0.15,
            tie_word_embeddings=False,
        )
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**EVEN, intermediate_size=160, max_position_embeddings=512, initializer_range=0.15)
    ),
    "gpt-neox-in-turn": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(
            **EVEN,
            intermediate_size=160,
            max_position_embeddings=512,
            use_parallel_residual=False,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
            initializer_range=0.15,
        )
    ),
    "starcoder2": lambda: Starcoder2ForCausalLM(
        Starcoder2Config(
            **EVEN,
            num_key_value_heads=2,
            intermediate_size=160,
            max_position_embeddings=512,
            sliding_window=20,
            initializer_range=0.15,
        )
    ),
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(
            **GATED,
            tie_word_embeddings=True,
            embedding_multiplier=3.0,
            attention_multiplier=0.15,
            residual_multiplier=0.4,
            logits_scaling=2.0,
            initializer_range=0.2,
        )
    ),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**GATED, initializer_range=0.2)),
    "olmo3": lambda: Olmo3ForCausalLM(
        Olmo3Config(
            **GATED,
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}},
            initializer_range=0.2,
        )
    ),
    "hunyuan": lambda: HunYuanDenseV1ForCausalLM(
        HunYuanDenseV1Config(
            **GATED,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 1000.0},
            initializer_range=0.2,
        )
    ),
    "exaone-4": lambda: Exaone4ForCausalLM(
        Exaone4Config(**GATED, sliding_window=20, sliding_window_pattern=3, initializer_range=0.2)
    ),
    "exaone-4-without-windows": lambda: Exaone4ForCausalLM(
        Exaone4Config(**GATED, sliding_window=None, layer_types=["full_attention"] * 3, initializer_range=0.2)
    ),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **GATED,
            sliding_window=20,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            initializer_range=0.2,
        )
    ),
    "gemma2-without-caps": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **GATED,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            sliding_window=33,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            initializer_range=0.2,
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **GATED,
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=24,
            initializer_range=0.15,
        )
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **GATED,
            moe_intermediate_size=48,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            initializer_range=0.2,
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**GATED, num_local_experts=6, num_experts_per_tok=2, sliding_window=20, initializer_range=0.2)
    ),
    "deepseek-v2": lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**LATENT, q_lora_rank=None, n_routed_experts=6)),
    "deepseek-v2-in-groups": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **LATENT,
            q_lora_rank=24,
            n_routed_experts=8,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=3.0,
            rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        )
    ),
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **LATENT,
            q_lora_rank=24,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        )
    ),
    "glm-4.5": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(**GLM_MOE, use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.5)
    ),
    "glm-4.5-air": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **GLM_MOE,
            attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        )
    ),
    "moonlight": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **LATENT, q_lora_rank=None, n_routed_experts=6, n_group=1, topk_group=1, routed_scaling_factor=2.446
        )
    ),
    "deepseek-v3-wide": lambda: DeepseekV3ForCausalLM(  # rows of whole blocks of codes
        DeepseekV3Config(
            **LATENT
            | {"hidden_size": 256, "num_attention_heads": 4, "moe_intermediate_size": 64, "num_hidden_layers": 3}
            | {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32},
            q_lora_rank=32,
            n_routed_experts=6,
            n_group=1,
            topk_group=1,
        )
    ),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **GATED,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=20,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
            initializer_range=0.4,
        )
    ),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **GATED,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=112,
            num_experts=6,
            num_experts_per_tok=2,
            initializer_range=0.2,
        )
    ),
    "olmoe": lambda: OlmoeForCausalLM(
        OlmoeConfig(**GATED, num_experts=6, num_experts_per_tok=2, initializer_range=0.2)
    ),
    "granite-moe": lambda: GraniteMoeForCausalLM(
        GraniteMoeConfig(
            **GATED,
            num_local_experts=6,
            num_experts_per_tok=2,
            embedding_multiplier=3.0,
            attention_multiplier=0.15,
            residual_multiplier=0.4,
            logits_scaling=2.0,
            initializer_range=0.2,
        )
    ),
    "dots1": lambda: Dots1ForCausalLM(
        Dots1Config(**GLM_MOE, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True)
    ),
    "dots1-without-norm": lambda: Dots1ForCausalLM(Dots1Config(**GLM_MOE, n_shared_experts=2, n_group=2, topk_group=1)),
    "ernie-4.5-moe": lambda: Ernie4_5_MoeForCausalLM(
        Ernie4_5_MoeConfig(
            **GATED,
            moe_intermediate_size=48,
            moe_num_experts=6,
            moe_k=3,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            initializer_range=0.2,
        )
    ),
    "minimax-m2": lambda: MiniMaxM2ForCausalLM(
        MiniMaxM2Config(**GATED, num_local_experts=6, num_experts_per_tok=3, rotary_dim=8, initializer_range=0.2)
    ),
    "glm": lambda: GlmForCausalLM(GlmConfig(**GATED, attention_bias=False, initializer_range=0.2)),
    "glm4": lambda: Glm4ForCausalLM(Glm4Config(**GATED, partial_rotary_factor=0.75, initializer_range=0.2)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**GATED, logit_scale=0.25, initializer_range=0.2)),
    "cohere-plus": lambda: CohereForCausalLM(CohereConfig(**GATED, use_qk_norm=True, initializer_range=0.2)),
    "cohere2": lambda: Cohere2ForCausalLM(
        Cohere2Config(
            **GATED,
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            initializer_range=0.2,
        )
    ),
    "gptj": lambda: GPTJForCausalLM(
        GPTJConfig(
            vocab_size=VOCAB,
            n_embd=96,
            n_layer=3,
            n_head=6,
            n_positions=512,
            rotary_dim=8,
            initializer_range=0.15,
            **IDS,
        )
    ),
    "falcon-7b": lambda: FalconForCausalLM(FalconConfig(**EVEN, initializer_range=0.15)),
    "falcon-in-turn": lambda: FalconForCausalLM(
        FalconConfig(**EVEN, multi_query=False, parallel_attn=False, bias=True, initializer_range=0.15)
    ),
    "falcon-40b": lambda: FalconForCausalLM(
        FalconConfig(
            **EVEN,
            new_decoder_architecture=True,
            num_kv_heads=2,
            ffn_hidden_size=160,
            tie_word_embeddings=False,
            initializer_range=0.15,
        )
    ),
    "falcon2-11b": lambda: FalconForCausalLM(
        FalconConfig(
            **EVEN, new_decoder_architecture=True, num_ln_in_parallel_attn=1, num_kv_heads=2, initializer_range=0.15
        )
    ),
    "phi": lambda: PhiForCausalLM(
        PhiConfig(
            **EVEN,
            num_key_value_heads=2,
            intermediate_size=160,
            max_position_embeddings=512,
            partial_rotary_factor=0.5,
            initializer_range=0.15,
        )
    ),
    "stablelm": lambda: StableLmForCausalLM(
        StableLmConfig(
            **EVEN,
            num_key_value_heads=2,
            intermediate_size=160,
            max_position_embeddings=512,
            use_qkv_bias=True,
            initializer_range=0.15,
        )
    ),
    "stablelm-in-parallel": lambda: StableLmForCausalLM(
        StableLmConfig(
            **EVEN,
            num_key_value_heads=2,
            intermediate_size=160,
            max_position_embeddings=512,
            use_parallel_residual=True,
            partial_rotary_factor=1.0,
            initializer_range=0.15,
        )
    ),
    "nemotron": lambda: NemotronForCausalLM(NemotronConfig(**GATED, initializer_range=0.2)),
    "smollm3": lambda: SmolLM3ForCausalLM(
        SmolLM3Config(**GATED, no_rope_layers=[1, 0, 1], tie_word_embeddings=True, initializer_range=0.2)
    ),
    "smollm3-in-turn": lambda: SmolLM3ForCausalLM(
        SmolLM3Config(**GATED | {"num_hidden_layers": 5}, tie_word_embeddings=True, initializer_range=0.2)
    ),
    "seed-oss": lambda: SeedOssForCausalLM(SeedOssConfig(**GATED, initializer_range=0.2)),
    "ministral": lambda: MinistralForCausalLM(
        MinistralConfig(
            **GATED,
            sliding_window=20,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            initializer_range=0.2,
        )
    ),
    "ernie-4.5": lambda: Ernie4_5ForCausalLM(Ernie4_5Config(**GATED, initializer_range=0.2)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**GATED, sliding_window=20, initializer_range=0.2)),
    "phi4-mini": lambda: Phi3ForCausalLM(
        Phi3Config(
            **GATED,
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
            initializer_range=0.2,
        )
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
