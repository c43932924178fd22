"""Which tensors of a GGUF file hold each weight, by its Hugging Face name, and in what form. Torch-free.

llama.cpp's converter renames weights, stacks experts, and changes some values: ``Form`` lists all of that;
``mooncake.model.gguf_weights`` undoes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from mooncake.errors import ModelError
from mooncake.family import Shapes
from mooncake.gguf_file import GGUFFile
from mooncake.model_config import MAX_LAYERS, ModelConfig

Form = Literal["as is", "plus one", "turned", "transposed", "expert", "in turn", "stacked", "ungrouped", "rows"]
"""How the file's tensors differ from the published weight.

"plus one"    1 was added (Gemma's and Nemotron's norms)
"turned"      each head's rows are in the order of interleaved rotary pairs: (0, D/2), (1, D/2 + 1), …
"transposed"  the last two axes are swapped (GPT-2, gpt-oss's experts)
"expert"      all experts are in one tensor [E, …]
"in turn"     the weight has the columns of two tensors in turn, each [E, outputs, inputs] (gpt-oss's gate and up)
"stacked"     the weight has the rows of one tensor above those of another, in each expert (Granite's gate and up)
"ungrouped"   all queries, then all keys, then all values, and not by groups of heads (Falcon, GPT-NeoX)
"rows"        the weight is some rows of a tensor (queries, keys and values as one, in files of older converters)
"""


@dataclass(frozen=True, slots=True)
class Source:
    tensors: tuple[str, ...]
    form: Form = "as is"
    expert: int = 0
    first_row: int = 0

    def stored_shape(self, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
        """That of each tensor, for a weight of this ``shape``."""
        if self.form == "expert":
            return (config.num_experts, *shape)
        if self.form == "transposed":
            return (*shape[:-2], shape[-1], shape[-2])
        if self.form == "in turn":
            return (shape[0], shape[-1] // 2, *shape[1:-1])
        if self.form == "stacked":
            return (shape[0], shape[1] // 2, *shape[2:])
        if self.form == "rows":
            return ((config.num_heads + 2 * config.num_kv_heads) * config.head_dim, *shape[1:])
        return shape

    def keeps_codes(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of this ``shape`` can stay codes: its rows are stored whole, in any order."""
        if len(shape) == 3:
            return self.form in ("in turn", "transposed")
        return len(shape) == 2 and self.form in ("as is", "turned", "expert", "ungrouped", "rows")


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
_LLAMA = {**_ATTENTION, **_GATED}
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
    **_LLAMA,
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
_GLM = {**_LLAMA, "mlp.gate_up_proj": "ffn_up"}

_LAYERS: dict[str, Mapping[str, str]] = {
    "phi3": {**_LLAMA, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "olmo2": _POST_NORMED,
    "olmo3": _POST_NORMED,
    "exaone4": _POST_NORMED,
    "seed_oss": {**_LLAMA, "post_attention_layernorm": "post_attention_norm"},
    "mixtral": _SPARSE,
    "minimax_m2": _SPARSE,
    "glm4_moe": {**_ROUTED, "post_attention_layernorm": "post_attention_norm"},
    "dots1": _ROUTED,
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "qwen2_moe": {
        **_EXPERTS,
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
    },
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
    "hunyuan_v1_dense": {
        **_LLAMA,
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
    },
    "phi": {**_ATTENTION, "self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
    "gpt_neox": {
        "input_layernorm": "attn_norm",
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "starcoder2": {**_ATTENTION, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "falcon": {
        "input_layernorm": "attn_norm",
        "ln_attn": "attn_norm_2",
        "ln_mlp": "attn_norm",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "gpt2": {
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
}
_TOP = {
    "model.embed_tokens": "token_embd",
    "transformer.wte": "token_embd",
    "transformer.word_embeddings": "token_embd",
    "gpt_neox.embed_in": "token_embd",
    "transformer.wpe": "position_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "transformer.ln_f": "output_norm",
    "gpt_neox.final_layer_norm": "output_norm",
    "lm_head": "output",
    "embed_out": "output",
}

# Weights whose names have no ".weight", or that are made of several tensors.
_PARTS: dict[str, Mapping[str, Source]] = {
    "gpt_oss": {
        "self_attn.sinks": Source(("attn_sinks.weight",)),
        "mlp.experts.gate_up_proj": Source(("ffn_gate_exps.weight", "ffn_up_exps.weight"), "in turn"),
        "mlp.experts.gate_up_proj_bias": Source(("ffn_gate_exps.bias", "ffn_up_exps.bias"), "in turn"),
        "mlp.experts.down_proj": Source(("ffn_down_exps.weight",), "transposed"),
        "mlp.experts.down_proj_bias": Source(("ffn_down_exps.bias",)),
    },
    "granitemoe": {
        "block_sparse_moe.input_linear.weight": Source(("ffn_gate_exps.weight", "ffn_up_exps.weight"), "stacked"),
        "block_sparse_moe.output_linear.weight": Source(("ffn_down_exps.weight",)),
    },
}
_CHOICE_BIAS = ".e_score_correction_bias"
_TURNED = ("llama", "mistral", "mixtral", "granite", "granitemoe", "smollm3")
_PLUS_ONE = ("gemma2", "gemma3_text", "nemotron")
_NAME = re.compile(r"(?P<top>.*?)\.(?P<layer>\d+)\.(?P<rest>.+)")
_PROJECTION = re.compile(r"(blk\.\d+\.)attn_([qkv])\.(weight|bias)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")

# Tables that can be computed.
_SPARE = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.\w+")


def sources(config: ModelConfig, file: GGUFFile, names: Iterable[str]) -> dict[str, Source]:
    """Of each weight."""
    found = {name: _source(config.architecture, name) for name in names}
    return {name: _of_fused(config, file, source) for name, source in found.items()}


def _of_fused(config: ModelConfig, file: GGUFFile, source: Source) -> Source:
    """Rows of ``attn_qkv``, if that is what the file has of queries, keys and values."""
    match = _PROJECTION.fullmatch(source.tensors[0])
    if match is None or source.form != "as is" or source.tensors[0] in file.tensors:
        return source
    fused = f"{match[1]}attn_qkv.{match[3]}"
    heads_before = {"q": 0, "k": config.num_heads, "v": config.num_heads + config.num_kv_heads}[match[2]]
    is_there = fused in file.tensors
    return Source((fused,), "rows", first_row=heads_before * config.head_dim) if is_there else source


def _source(architecture: str, name: str) -> Source:
    match = _NAME.fullmatch(name)
    if match is None:
        kind, _, suffix = name.rpartition(".")
        return Source((f"{_TOP[kind]}.{suffix}",), _form(architecture, kind, suffix))
    at, rest = f"blk.{match['layer']}.", match["rest"]
    if part := _PARTS.get(architecture, {}).get(rest):
        return Source(tuple(at + tensor for tensor in part.tensors), part.form)
    if rest.endswith(_CHOICE_BIAS):
        return Source((f"{at}exp_probs_b.bias",))
    kind, _, suffix = rest.rpartition(".")
    expert = _EXPERT.search(kind)
    kind = _EXPERT.sub("*", kind)
    tensor = f"{at}{_LAYERS.get(architecture, _LLAMA)[kind]}.{suffix}"
    return Source((tensor,), _form(architecture, kind, suffix), int(expert[0]) if expert else 0)


def _form(architecture: str, kind: str, suffix: str) -> Form:
    if "*" in kind:
        return "expert"
    if architecture in _TURNED and kind in ("self_attn.q_proj", "self_attn.k_proj"):
        return "turned"
    if architecture in _PLUS_ONE and kind.endswith("norm") and suffix == "weight":
        return "plus one"
    if architecture == "gpt2" and suffix == "weight" and kind.startswith(("attn.", "mlp.")):
        return "transposed"
    return "ungrouped" if kind.endswith(".query_key_value") else "as is"


def check_tensors(config: ModelConfig, file: GGUFFile, needed: Shapes) -> None:
    """Raises ModelError for a weight that is missing or of another shape, and for a tensor that is not needed, because
    it means a different architecture."""
    used = set()
    for name, source in sources(config, file, needed).items():
        expected = source.stored_shape(needed[name], config)
        for tensor in source.tensors:
            found = file.tensors.get(tensor)
            if found is None:
                raise ModelError(f"{file.path} lacks the weight {name} ({tensor})")
            if _without_ones(found.shape) != _without_ones(expected):
                what = f"{name} has the shape {found.shape}, the configuration says {expected}"
                raise ModelError(f"{file.path}: the weight {what}")
            used.add(tensor)
    guessing = tuple(f"blk.{config.num_layers + number}." for number in range(_guessing_layers(file)))
    for tensor in sorted(file.tensors.keys() - used):
        if not _SPARE.fullmatch(tensor) and not tensor.startswith(guessing):
            name = published_name(config.architecture, tensor)
            raise ModelError(f"{file.path} has the weight {name}, which its configuration does not need")


def _guessing_layers(file: GGUFFile) -> int:
    """Layers behind the model's own that guess further tokens (DeepSeek-V3 2024, section 2.2)."""
    count = file.get(f"{file.get('general.architecture')}.nextn_predict_layers")
    return min(count, MAX_LAYERS) if isinstance(count, int) else 0


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A row is stored as a vector by some converters, as a matrix by others."""
    return shape[1:] if len(shape) > 1 and shape[0] == 1 else shape


def published_name(architecture: str, tensor: str) -> str:
    """A weight that this tensor would hold; unknown names stay as they are."""
    kind, _, suffix = tensor.rpartition(".")
    tops = {stored: name for name, stored in reversed(list(_TOP.items()))}
    if kind in tops:
        return f"{tops[kind]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", kind)
    layer = {stored: name for name, stored in _LAYERS.get(architecture, _LLAMA).items()}
    return f"model.layers.{match[1]}.{layer[match[2]]}.{suffix}" if match and match[2] in layer else tensor
