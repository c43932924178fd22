"""GGUF files of tiny random models some of whose layers keep a state, made in the manner of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import gguf
import torch
from converted import Converted, Kind, turned
from gguf.constants import MODEL_ARCH
from safetensors.torch import load_file
from tiny_hybrid import HYBRIDS
from tiny_model import tiny_model

_WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "initializer_range": 0.2}
_HEADS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
_MIXED = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
_SPACES = _WIDE | {"mamba_n_heads": 8, "max_position_embeddings": 1 << 20}
_NEMOTRON = _WIDE | {"head_dim": 32, "mamba_num_heads": 8, "intermediate_size": 64, "max_position_embeddings": 1 << 20}
SIZES: dict[str, dict[str, Any]] = {
    "lfm2": _WIDE,
    "lfm2-moe": _WIDE | {"moe_intermediate_size": 32},
    "qwen3-next": _WIDE | _HEADS | _MIXED,
    "qwen3.5": _WIDE | _HEADS,
    "qwen3.5-moe": _WIDE | _HEADS | _MIXED,
    "granite-4": _SPACES | {"shared_intermediate_size": 64, "position_embedding_type": "nope"},
    "granite-4-moe": _SPACES | {"shared_intermediate_size": 64, "position_embedding_type": "nope"},
    "falcon-h1": _WIDE | {"mamba_n_heads": 8, "mamba_d_ssm": 128, "mamba_norm_before_gate": False},
    "falcon-h1-with-norms": _WIDE | {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    "nemotron-h": _NEMOTRON,
    "nemotron-3": _NEMOTRON | {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96},
    "nemotron-3-latent": _NEMOTRON | {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96},
}
"""Of ``HYBRIDS``, with sizes that llama.cpp's converter takes and, but for attention that rotates in Granite 4, what a
file can say."""
_ARCHITECTURES = {
    "lfm2": MODEL_ARCH.LFM2,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "granitemoehybrid": MODEL_ARCH.GRANITE_HYBRID,
    "falcon_h1": MODEL_ARCH.FALCON_H1,
}


def _maker(name: str) -> Callable[[], Any]:
    def make() -> Any:
        family, changes = HYBRIDS[name]
        model = tiny_model(family, **(changes | SIZES[name]))
        with torch.no_grad():
            for key, weight in model.state_dict().items():
                if key.endswith("A_log") and "mamba_n_heads" in SIZES[name]:
                    weight.sub_(4)  # as they are, they forget all within a few tokens
                if key.endswith("expert_bias"):
                    weight.normal_(std=0.3)
        return model

    return make


class ConvertedHybrid(Converted):
    """``is_older``: Qwen3-Next's, before what states are computed from was cut in two."""

    models: ClassVar[dict[str, Callable[[], Any]]] = {name: _maker(name) for name in SIZES}
    changes: ClassVar[dict[str, dict[str, Any]]] = {}
    is_older = False

    def _architecture(self) -> MODEL_ARCH:
        if self.family != "nemotron_h":
            return _ARCHITECTURES[self.family]
        has_experts = "E" in self._letters()
        return MODEL_ARCH.NEMOTRON_H_MOE if has_experts else MODEL_ARCH.NEMOTRON_H

    def _letters(self) -> str:
        letters = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
        return "".join(letters[kind] for kind in self.config.layers_block_type)

    def _kind(self, name: str, shape: tuple[int, ...]) -> Kind:
        small = ("conv1d.weight", "conv.conv.weight", "A_log", ".D", "mixer.gate.weight", "feed_forward.gate.weight")
        return Kind.F32 if name.endswith(small) else super()._kind(name, shape)

    def write_as_older_converters_did(self, halves_too: bool = False) -> None:
        self.is_older = True
        self._write(load_file(self.published.folder / "model.safetensors"))

    def fuse(self) -> None:
        """Write the file anew with gates and ups of all experts as one tensor, as converters do if asked to."""
        weights = load_file(self.published.folder / "model.safetensors")
        for first in [name for name in weights if name.endswith(".experts.0.gate_proj.weight")]:
            at = first.removesuffix("0.gate_proj.weight")
            experts = [
                torch.cat([weights.pop(f"{at}{expert}.{part}_proj.weight") for part in ("gate", "up")])
                for expert in range(self.config.num_experts)
            ]
            weights[f"{at}gate_up_proj"] = torch.stack(experts)
        self._write(weights)

    # Metadata

    def _write_metadata(self, writer: gguf.GGUFWriter) -> None:
        config, family = self.config, self.family
        num_layers, letters = config.num_hidden_layers, ""
        if family == "nemotron_h":
            letters = self._letters()
            num_layers = len(letters)
        writer.add_block_count(num_layers + self._num_guessing)
        if self._num_guessing:
            writer.add_nextn_predict_layers(self._num_guessing)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_bos_token_id(config.bos_token_id)
        writer.add_eos_token_id(config.eos_token_id)
        epsilons = "rms_norm_eps", "norm_eps", "layer_norm_epsilon"
        writer.add_layer_norm_rms_eps(next(getattr(config, name) for name in epsilons if hasattr(config, name)))
        kinds = letters or getattr(config, "layer_types", None) or [""] * num_layers
        attends = [kind in ("full_attention", "attention", "*", "") for kind in kinds]
        heads = config.num_key_value_heads
        one_for_all = family.startswith(("qwen", "falcon"))
        writer.add_head_count_kv(heads if one_for_all else [heads if each else 0 for each in attends])
        if family not in ("granitemoehybrid", "lfm2", "lfm2_moe"):
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        {"lfm2": self._write_lfm2, "lfm2_moe": self._write_lfm2, "granitemoehybrid": self._write_granite}.get(
            family, self._write_nemotron if letters else self._write_plain
        )(writer)
        if family.startswith("qwen"):
            writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
            writer.add_ssm_state_size(config.linear_key_head_dim)
            writer.add_ssm_group_count(config.linear_num_key_heads)
            writer.add_ssm_time_step_rank(config.linear_num_value_heads)
            writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
            writer.add_full_attention_interval(4)
            writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
            if family != "qwen3_next":
                writer.add_rope_dimension_sections([11, 11, 10, 0])

    def _write_lfm2(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        if self.family == "lfm2":
            inner, unit = int(2 * config.intermediate_size / 3), config.block_multiple_of
            writer.add_feed_forward_length(unit * ((inner + unit - 1) // unit))
            return
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def _write_plain(self, writer: gguf.GGUFWriter) -> None:
        """Qwen3-Next, Qwen3.5 and Falcon-H1."""
        config = self.config
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_feed_forward_length(getattr(config, "intermediate_size", 0) or 96)
        if getattr(config, "num_experts", 0):
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        if self.family == "falcon_h1":
            self._write_states(writer, config.mamba_n_heads, config.mamba_d_ssm, config.mamba_n_groups)
            writer.add_ssm_state_size(config.mamba_d_state)
            writer.add_ssm_conv_kernel(config.mamba_d_conv)

    def _write_states(self, writer: gguf.GGUFWriter, heads: int, inner: int, groups: int) -> None:
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(inner)
        writer.add_ssm_group_count(groups)

    def _write_granite(self, writer: gguf.GGUFWriter) -> None:
        config = self.config
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
        writer.add_rope_scaling_finetuned(False)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        self._write_states(
            writer, config.mamba_n_heads, config.mamba_expand * config.hidden_size, config.mamba_n_groups
        )
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_conv_kernel(config.mamba_d_conv)

    def _write_nemotron(self, writer: gguf.GGUFWriter) -> None:
        config, letters = self.config, self._letters()
        writer.add_rope_scaling_finetuned(False)
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)  # and no head rotates
        self._write_states(
            writer, config.mamba_num_heads, config.mamba_num_heads * config.mamba_head_dim, config.n_groups
        )
        writer.add_ssm_state_size(config.ssm_state_size)
        writer.add_ssm_conv_kernel(config.conv_kernel)
        if "E" not in letters:
            writer.add_feed_forward_length([config.intermediate_size if letter == "-" else 0 for letter in letters])
            return
        writer.add_feed_forward_length([config.moe_intermediate_size if letter == "E" else 0 for letter in letters])
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        if config.moe_latent_size:
            writer.add_moe_latent_size(config.moe_latent_size)

    # Tensors

    def _of_all_experts(self, name: str) -> str:
        if self.family == "lfm2_moe":
            return name.replace("model.layers", "layers")
        return name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")  # Nemotron 3's

    def _changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if name.endswith("experts.gate_up_proj"):
            yield f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight", tensor
            return
        for changed, values in super()._changed(name, tensor):
            yield from self._of_states(changed, values)

    def _of_states(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        family, is_qwen = self.family, self.family.startswith("qwen")
        layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if family == "falcon_h1":
            tensor = tensor * self._factors(name, len(tensor))
        if ".mixer.q_proj" in name or ".mixer.k_proj" in name:
            heads = self.config.num_attention_heads if ".q_proj" in name else self.config.num_key_value_heads
            tensor = turned(tensor, heads)
        if "linear_attn." in name and family != "qwen3_next":
            tensor = self._tiled(name, tensor)
        if name.endswith("A_log"):
            rates = -tensor.exp()
            yield name, rates if is_qwen else rates[:, None]
        elif name.endswith(".D"):
            yield name, tensor[:, None]
        elif name.endswith("dt_bias"):
            yield f"{layer}.ssm_dt.bias", tensor
        elif "conv1d.weight" in name or "conv.conv.weight" in name:
            yield name, tensor.squeeze(1)
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            groups = self.config.n_groups if family == "nemotron_h" else self.config.mamba_n_groups
            yield name, tensor.reshape(groups, -1)
        elif is_qwen and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            yield name, tensor + 1
        elif "in_proj_qkvz" in name and not self.is_older:
            config = self.config
            dim, values = config.linear_key_head_dim, config.linear_value_head_dim
            of_key = config.linear_num_value_heads // config.linear_num_key_heads * values
            heads = tensor.view(config.linear_num_key_heads, -1, tensor.shape[-1])
            query, key, value, gate = (part.flatten(0, 1) for part in heads.split([dim, dim, of_key, of_key], 1))
            yield f"{layer}.attn_qkv.weight", torch.cat([query, key, value])
            yield f"{layer}.attn_gate.weight", gate
        elif name.endswith("feed_forward.expert_bias"):
            yield f"{name}.bias", tensor
        elif ".mlp." in name and "experts" not in name and getattr(self.config, "num_local_experts", 0):
            yield name.replace(".mlp.", ".mlp.shared_experts."), tensor
        else:
            yield name, tensor

    def _factors(self, name: str, num_rows: int) -> torch.Tensor | float:
        """Falcon-H1's, which the converter applies to weights."""
        config = self.config
        entering = config.attention_in_multiplier
        if "mamba.in_proj" in name:
            inner, groups = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
            sizes = torch.tensor([inner, inner, groups, groups, num_rows - 2 * inner - 2 * groups])
            of_parts = torch.tensor(config.ssm_multipliers) * config.ssm_in_multiplier
            return of_parts.repeat_interleave(sizes)[:, None]
        factors = {
            "down_proj": config.mlp_multipliers[1],
            "gate_proj": config.mlp_multipliers[0],
            "k_proj": config.key_multiplier * entering,
            "q_proj": entering,
            "v_proj": entering,
            "o_proj": config.attention_out_multiplier,
            "mamba.out_proj": config.ssm_out_multiplier,
            "lm_head": config.lm_head_multiplier,
            "embed_tokens": config.embedding_multiplier,
        }
        return next((factor for part, factor in factors.items() if f"{part}.weight" in name), 1.0)

    def _tiled(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Qwen3.5's value heads in turns of all key heads."""
        config = self.config
        keys, heads, dim = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
        before = 2 * keys * config.linear_key_head_dim

        def reorder(rows: torch.Tensor, size: int) -> torch.Tensor:
            return rows.reshape(keys, heads // keys, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

        if ".norm." in name:
            return tensor
        if ".in_proj_qkv." in name or ".conv1d." in name:
            return torch.cat([tensor[:before], reorder(tensor[before:], dim)])
        if ".out_proj." in name:
            return reorder(tensor.T, dim).T
        return reorder(tensor, dim if ".in_proj_z." in name else 1)
