"""Names of a GGUF file's tensors, by those that Hugging Face publishes: a table for each family. Torch-free.

They are the names of ``gguf.tensor_mapping``, the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping

from mooncake.families.gpt_names import GPT_NAMES, GptNames
from mooncake.gguf.forms import Source

# Names in a layer, without ".weight" and ".bias"; "*" is the number of an expert.

_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GATED = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
LLAMA = {**_ATTENTION, **_GATED}
_EXPERTS = {
    **_ATTENTION,
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
}
_SPARSE = {
    **_ATTENTION,
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.*.w3": "ffn_up_exps",
    "block_sparse_moe.experts.*.w2": "ffn_down_exps",
}
_POST_NORMED = {
    **LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA = {**_POST_NORMED, "pre_feedforward_layernorm": "ffn_norm"}
_SHARED = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_ROUTED = {**_GATED, **_EXPERTS, **_SHARED}
_LATENT = {
    **_ROUTED,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
_HUNYUAN_NORMS = {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
_GLM = {**LLAMA, "mlp.gate_up_proj": "ffn_up"}

_LFM2 = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "operator_norm": "attn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
_SHARED_EXPERT = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


def _mamba(name: str) -> dict[str, str]:
    """Of layers that are called so."""
    tensors = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}
    return {f"{name}.{part}": tensor for part, tensor in tensors.items()}


_QWEN_NEXT = {
    **_GATED,
    **_EXPERTS,
    **_SHARED_EXPERT,
    **_mamba("linear_attn"),
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
}


def _gpt(names: GptNames) -> dict[str, str]:
    """Of layers of the GPT line. A norm that attention and the MLP share is attention's."""
    attention_norm, mlp_norm = names.norms
    qkv = ("attn_qkv",) if len(names.qkv) == 1 else ("attn_q", "attn_k", "attn_v")
    return {
        mlp_norm: "ffn_norm",
        attention_norm: "attn_norm",
        **dict(zip(names.qkv, qkv, strict=True)),
        names.output: "attn_output",
        **dict(zip(names.mlp, ("ffn_up", "ffn_down"), strict=True)),
    }


LAYERS: dict[str, Mapping[str, str]] = {
    "phi3": {**LLAMA, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": {
        **_GEMMA,
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "router.proj": "ffn_gate_inp",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
    },
    "olmo2": _POST_NORMED,
    "olmo3": _POST_NORMED,
    "exaone4": _POST_NORMED,
    "seed_oss": {**LLAMA, "post_attention_layernorm": "post_attention_norm"},
    "mixtral": _SPARSE,
    "minimax_m2": _SPARSE,
    "apertus": {**LLAMA, "attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
    "glm4_moe": {**_ROUTED, "post_attention_layernorm": "post_attention_norm"},
    "dots1": _ROUTED,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "qwen2_moe": {**_EXPERTS, **_SHARED_EXPERT},
    "gpt_oss": {
        **_ATTENTION,
        "post_attention_layernorm": "post_attention_norm",
        "mlp.router": "ffn_gate_inp",
    },
    "granitemoe": {**_ATTENTION, "block_sparse_moe.router.layer": "ffn_gate_inp"},
    "glm": _GLM,
    "glm4": {
        **_GLM,
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    "ernie4_5_moe": _ROUTED,
    "hunyuan_v1_dense": {**LLAMA, **_HUNYUAN_NORMS},
    "hunyuan_v1_moe": {
        **_EXPERTS,
        **_HUNYUAN_NORMS,
        "mlp.gate.wg": "ffn_gate_inp",
        "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
        "mlp.shared_mlp.up_proj": "ffn_up_shexp",
        "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    },
    **{family: _gpt(GPT_NAMES[family]) for family in ("gpt2", "bloom", "mpt", "gpt_neox", "phi", "starcoder2")},
    "falcon": {**_gpt(GPT_NAMES["falcon"]), "ln_attn": "attn_norm_2", "ln_mlp": "attn_norm"},
    "lfm2": _LFM2,
    "lfm2_moe": {
        **_LFM2,
        "feed_forward.gate": "ffn_gate_inp",
        "feed_forward.experts.*.w1": "ffn_gate_exps",
        "feed_forward.experts.*.w3": "ffn_up_exps",
        "feed_forward.experts.*.w2": "ffn_down_exps",
    },
    "qwen3_next": _QWEN_NEXT,
    "qwen3_5_text": _QWEN_NEXT,
    "qwen3_5_moe_text": _QWEN_NEXT,
    "granitemoehybrid": {**_ATTENTION, **_mamba("mamba"), "block_sparse_moe.router.layer": "ffn_gate_inp"},
    "falcon_h1": {
        **_ATTENTION,
        **_mamba("mamba"),
        "feed_forward.gate_proj": "ffn_gate",
        "feed_forward.up_proj": "ffn_up",
        "feed_forward.down_proj": "ffn_down",
    },
    "nemotron_h": {
        **_mamba("mixer"),
        **{f"mixer.{name}_proj": f"attn_{name}" for name in "qkv"},
        "mixer.o_proj": "attn_output",
        "norm": "attn_norm",
        "mixer.up_proj": "ffn_up",
        "mixer.down_proj": "ffn_down",
        "mixer.gate": "ffn_gate_inp",
        "mixer.experts.*.up_proj": "ffn_up_exps",
        "mixer.experts.*.down_proj": "ffn_down_exps",
        "mixer.shared_experts.up_proj": "ffn_up_shexp",
        "mixer.shared_experts.down_proj": "ffn_down_shexp",
        "mixer.fc1_latent_proj": "ffn_latent_down",
        "mixer.fc2_latent_proj": "ffn_latent_up",
    },
}
TOP = {
    "model.embed_tokens": "token_embd",
    "transformer.wte": "token_embd",
    "transformer.word_embeddings": "token_embd",
    "gpt_neox.embed_in": "token_embd",
    "transformer.wpe": "position_embd",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "model.final_layernorm": "output_norm",
    "transformer.ln_f": "output_norm",
    "transformer.norm_f": "output_norm",
    "gpt_neox.final_layer_norm": "output_norm",
    "lm_head": "output",
    "embed_out": "output",
}

_GRANITE_EXPERTS = {
    "block_sparse_moe.input_linear.weight": Source(("ffn_gate_exps.weight", "ffn_up_exps.weight"), "stacked"),
    "block_sparse_moe.output_linear.weight": Source(("ffn_down_exps.weight",), "matrices"),
}


def _states(name: str) -> dict[str, Source]:
    """Of layers that are called so. Norms behind the gated delta rule are those of one head, and have no groups."""
    found = {f"{name}.dt_bias": Source(("ssm_dt.bias",)), f"{name}.A_log": Source(("ssm_a",), "rates")}
    if name == "linear_attn":
        return found
    norm = Source(("ssm_norm.weight",), "in groups")
    return {**found, f"{name}.D": Source(("ssm_d",)), f"{name}.norm.weight": norm}


def _stacked(name: str) -> dict[str, Source]:
    """Of all experts that are called so."""
    tensors = {"gate_up_proj": "ffn_gate_up_exps.weight", "down_proj": "ffn_down_exps.weight"}
    return {f"{name}.{part}": Source((tensor,), "matrices") for part, tensor in tensors.items()}


_QWEN_PARTS = {**_states("linear_attn"), **_stacked("mlp.experts")}

# Weights whose names have no ".weight", or that are made of several tensors or of none.
PARTS: dict[str, Mapping[str, Source]] = {
    "apertus": {
        f"mlp.act_fn.{name}": Source((f"xielu.{name}",), "listed") for name in ("alpha_p", "alpha_n", "beta", "eps")
    },
    "gemma4_text": {
        "layer_scalar": Source(("layer_output_scale.weight",)),
        "router.scale": Source(("ffn_gate_inp.scale",)),
        "router.per_expert_scale": Source(("ffn_down_exps.scale",)),
        **_stacked("experts"),
    },
    "gpt_oss": {
        "self_attn.sinks": Source(("attn_sinks.weight",)),
        "mlp.experts.gate_up_proj": Source(("ffn_gate_exps.weight", "ffn_up_exps.weight"), "in turn"),
        "mlp.experts.gate_up_proj_bias": Source(("ffn_gate_exps.bias", "ffn_up_exps.bias"), "in turn"),
        "mlp.experts.down_proj": Source(("ffn_down_exps.weight",), "transposed"),
        "mlp.experts.down_proj_bias": Source(("ffn_down_exps.bias",)),
    },
    "granitemoe": _GRANITE_EXPERTS,
    "granitemoehybrid": {
        **_states("mamba"),
        **_GRANITE_EXPERTS,
        "shared_mlp.input_linear.weight": Source(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), "stacked"),
        "shared_mlp.output_linear.weight": Source(("ffn_down_shexp.weight",)),
    },
    "lfm2_moe": {"feed_forward.expert_bias": Source(("exp_probs_b.bias",))},
    "qwen3_next": {
        **_QWEN_PARTS,
        "linear_attn.in_proj_qkvz.weight": Source(("attn_qkv.weight", "attn_gate.weight"), "by kinds"),
    },
    "qwen3_5_text": _QWEN_PARTS,
    "qwen3_5_moe_text": _QWEN_PARTS,
    "falcon_h1": {**_states("mamba"), "pre_ff_layernorm.weight": Source(("ffn_norm",))},
    "nemotron_h": _states("mixer"),
}
