"""The metadata of GGUF files that ``converted`` makes, as llama.cpp's converter writes them of each architecture."""

from __future__ import annotations

import math
from dataclasses import dataclass

import gguf
from transformers import PreTrainedConfig

_GRANITE = ("granite", "granitemoe", "granitemoehybrid")
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def falcon_kv_heads(config: PreTrainedConfig) -> int:
    return int(config.num_kv_heads) if config.new_decoder_architecture else 1


@dataclass(frozen=True, slots=True)
class ConvertedMetadata:
    """``config`` of transformers, whose model_type is ``family``; ``is_older``: as before latent attention was stored
    in halves; ``num_guessing`` layers behind the others guess further tokens."""

    config: PreTrainedConfig
    family: str
    is_older: bool
    num_guessing: int

    def write(self, writer: gguf.GGUFWriter) -> None:
        config, family = self.config, self.family
        heads, hidden = config.num_attention_heads, config.hidden_size
        writer.add_block_count(config.num_hidden_layers + self.num_guessing)
        if self.num_guessing:
            writer.add_nextn_predict_layers(self.num_guessing)
        writer.add_embedding_length(hidden)
        writer.add_head_count(heads)
        writer.add_bos_token_id(config.bos_token_id)
        writer.add_eos_token_id(config.eos_token_id)
        if family == "falcon":
            writer.add_context_length(2048)
            writer.add_feed_forward_length(config.ffn_hidden_size)
            writer.add_head_count_kv(falcon_kv_heads(config))
            writer.add_layer_norm_eps(config.layer_norm_epsilon)
            return
        if family in ("bloom", "mpt"):
            self._write_slopes(writer)
            return
        writer.add_context_length(config.max_position_embeddings)
        if family.startswith("gemma4"):
            self._write_gemma4(writer)
            return
        if family == "gpt2":
            writer.add_feed_forward_length(4 * hidden)
            writer.add_layer_norm_eps(config.layer_norm_epsilon)
            return
        writer.add_feed_forward_length(config.intermediate_size)
        if family in _LATENT:
            self._write_latent(writer)
        elif family == "granitemoehybrid":
            writer.add_head_count_kv([config.num_key_value_heads] * config.num_hidden_layers)
        elif family != "gpt_neox":
            writer.add_head_count_kv(config.num_key_value_heads)
        if family in ("stablelm", "gpt_neox"):
            writer.add_parallel_residual(config.use_parallel_residual)
        if hasattr(config, "rms_norm_eps"):
            writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        else:
            names = "layer_norm_eps", "norm_epsilon", "norm_eps"
            writer.add_layer_norm_eps(next(getattr(config, name) for name in names if hasattr(config, name)))
        if family not in (
            *_GRANITE,
            "phi3",
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "starcoder2",
            "phi",
            "stablelm",
            "gpt_neox",
            "glm",
            *_LATENT,
        ):
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        self._write_rope(writer)
        self._write_experts(writer)
        self._write_particulars(writer)

    def _write_slopes(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        writer.add_context_length(2048 if self.family == "bloom" else config.max_seq_len)
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        if self.family == "bloom":
            writer.add_head_count_kv(config.num_attention_heads)
            return
        if config.attn_config.clip_qkv is not None:
            writer.add_clamp_kqv(config.attn_config.clip_qkv)
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)

    def _write_gemma4(self, writer: gguf.GGUFWriter) -> None:
        config, num_layers, shared = self.config, self.config.num_hidden_layers, self.config.num_kv_shared_layers
        is_local = [kind == "sliding_attention" for kind in config.layer_types]
        local, wide = (config.per_layer_config[kind] for kind in ("sliding_attention", "full_attention"))
        rope = config.rope_parameters
        inner = config.intermediate_size
        is_wide = config.use_double_wide_mlp
        writer.add_feed_forward_length([inner] * (num_layers - shared) + [2 * inner] * shared if is_wide else inner)
        counts = [(local if each else wide).num_key_value_heads for each in is_local]
        writer.add_head_count_kv(counts if config.attention_k_eq_v else counts[0])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(is_local)
        writer.add_shared_kv_layers(shared)
        writer.add_embedding_length_per_layer_input(getattr(config, "hidden_size_per_layer_input", 0))
        for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
            add(wide.head_dim)
        for add in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
            add(local.head_dim)
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        if getattr(config, "enable_moe_block", False):
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.top_k_experts)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)

    def _write_latent(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        rank, key_dim = config.kv_lora_rank, config.qk_nope_head_dim + config.qk_rope_head_dim
        writer.add_kv_lora_rank(rank)
        if config.q_lora_rank:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        writer.add_head_count_kv(config.num_attention_heads if self.is_older else 1)
        writer.add_key_length(key_dim if self.is_older else rank + config.qk_rope_head_dim)
        writer.add_value_length(config.v_head_dim if self.is_older else rank)
        if not self.is_older:
            writer.add_key_length_mla(key_dim)
            writer.add_value_length_mla(config.v_head_dim)
        is_v2 = self.family == "deepseek_v2"
        if hasattr(config, "mlp_layer_types"):
            return  # config.json of GLM-4.7-Flash does not name the function, and neither does its file
        if not (is_v2 and self.is_older):
            kinds = gguf.ExpertGatingFuncType
            writer.add_expert_gating_func(kinds.SOFTMAX if is_v2 else kinds.SIGMOID)

    def _write_rope(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kinds = config.rope_parameters
        rope = kinds.get("full_attention", kinds)
        alpha = rope.get("alpha")
        if self.family not in ("gemma", "gemma2"):
            writer.add_rope_freq_base(rope["rope_theta"] * (alpha ** (dim / (dim - 2)) if alpha else 1))
        if alpha:
            writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
            writer.add_rope_scaling_factor(1)
        whole = ("mixtral", "ministral3", "arcee", "apertus", *_GRANITE, "cohere2")
        partial = ("phi3", "glm4", "glm4_moe", "minimax_m2", "glm", "phi", "stablelm", "nemotron", "gpt_neox")
        if self.family in (*whole, *partial):
            writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
        if "sliding_attention" in kinds:
            writer.add_rope_freq_base_swa(kinds["sliding_attention"]["rope_theta"])
        if rope.get("rope_type") == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
            writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
            if rope.get("mscale_all_dim"):
                writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"] * (0.1 if self.family in _LATENT else 1.0))
            if rope.get("llama_4_scaling_beta"):
                writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        if sections := rope.get("mrope_section"):
            writer.add_rope_dimension_sections([*sections, 0])
        if rope.get("rope_type") == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        if self.family == "phi3":
            trained = config.original_max_position_embeddings
            stretch = config.max_position_embeddings / trained
            writer.add_rope_scaling_orig_ctx_len(trained)
            if rope.get("long_factor"):
                sharpness = math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
                writer.add_rope_scaling_attn_factors(sharpness)

    def _write_experts(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        names = "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"
        count = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
        if not count:
            return
        writer.add_expert_count(count)
        used = config.moe_k if self.family == "ernie4_5_moe" else config.num_experts_per_tok
        writer.add_expert_used_count(used[0] if isinstance(used, list) else used)
        if self.family == "ernie4_5_moe":
            writer.add_interleave_moe_layer_step(config.moe_layer_interval)
            writer.add_leading_dense_block_count(config.moe_layer_start_index)
            writer.add_expert_shared_count(config.moe_num_shared_experts)
        if self.family == "hunyuan_v1_moe":
            writer.add_expert_shared_feed_forward_length(config.intermediate_size)
            writer.add_expert_feed_forward_length(config.intermediate_size)
            writer.add_expert_shared_count(1)
        if self.family == "gpt_oss":
            writer.add_expert_feed_forward_length(config.intermediate_size)
        if self.family == "minimax_m2":
            writer.add_expert_feed_forward_length(config.intermediate_size)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if self.family in ("glm4_moe", "dots1", *_LATENT):
            kinds = getattr(config, "mlp_layer_types", ())
            writer.add_leading_dense_block_count(kinds.count("dense") if kinds else config.first_k_dense_replace)
            writer.add_expert_shared_count(config.n_shared_experts)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            if config.norm_topk_prob or self.family not in _LATENT:
                writer.add_expert_weights_norm(config.norm_topk_prob)
            if config.n_group and not self.is_older:
                writer.add_expert_group_count(config.n_group)
                writer.add_expert_group_used_count(config.topk_group)
        if self.family in (
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_vl_moe_text",
            "glm4_moe",
            "dots1",
            "ernie4_5_moe",
            *_LATENT,
        ):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if self.family == "qwen2_moe":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)

    def _write_particulars(self, writer: gguf.GGUFWriter) -> None:
        config, family = self.config, self.family
        if family in ("gemma2", "gemma3_text", "phi3", "gpt_oss", "cohere2", "olmo3"):
            writer.add_sliding_window(config.sliding_window or 0)
        if family == "exaone4" and config.sliding_window:
            writer.add_sliding_window(config.sliding_window)
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        if family in ("gemma3_text", "cohere2", "olmo3"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        if family == "gemma2":
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        if family.startswith("qwen3_vl"):
            writer.add_num_deepstack_layers(1)
        if family in ("cohere", "cohere2"):
            writer.add_logit_scale(config.logit_scale)
        if family == "granitemoehybrid":
            writer.add_expert_count(0)
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
            writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        if family in _GRANITE:
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
