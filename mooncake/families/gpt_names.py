"""What the families of the GPT line call their weights, from which the weights' shapes follow. Torch-free.

Layers of this line are alike but for names: layer norms, products mostly with biases, an MLP mostly without a gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mooncake.families.family import Shapes, linear_shapes, norm_shapes
from mooncake.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class GptNames:
    """Without ".weight" and ".bias". All but ``top`` are those within a layer."""

    top: tuple[str, str, str]  # embeddings, final norm, head
    norms: tuple[str, str]  # before attention and the MLP; one name twice: they share it
    qkv: tuple[str, ...]  # one name: published as one matrix
    output: str
    mlp: tuple[str, ...]  # (gate,) up, down
    biased: tuple[str, ...] = ()  # of these products, whatever the others have (``ModelConfig.qkv_bias``)
    unbiased: tuple[str, ...] = ()

    def is_biased(self, name: str, config: ModelConfig) -> bool:
        """Whether a layer's product has a bias."""
        return name in self.biased or (config.qkv_bias and name not in self.unbiased)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA_TOP = ("model.embed_tokens", "model.norm", "lm_head")
_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")

_GPT2 = GptNames(
    top=("transformer.wte", "transformer.ln_f", "lm_head"),
    norms=("ln_1", "ln_2"),
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    mlp=("mlp.c_fc", "mlp.c_proj"),
)
_JAIS2 = GptNames(_LLAMA_TOP, _LLAMA_NORMS, _QKV, "self_attn.o_proj", ("mlp.up_proj", "mlp.down_proj"))

GPT_NAMES: dict[str, GptNames] = {
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": GptNames(
        top=("transformer.wte", "transformer.ln_f", "lm_head"),
        norms=("ln_1", "ln_1"),
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.out_proj",
        mlp=("mlp.fc_in", "mlp.fc_out"),
        biased=("mlp.fc_in", "mlp.fc_out", "lm_head"),
    ),
    "opt": GptNames(
        top=("model.decoder.embed_tokens", "model.decoder.final_layer_norm", "lm_head"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        qkv=_QKV,
        output="self_attn.out_proj",
        mlp=("fc1", "fc2"),
    ),
    "gpt_neox": GptNames(
        top=("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
        norms=_LLAMA_NORMS,
        qkv=("attention.query_key_value",),
        output="attention.dense",
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "bloom": GptNames(
        top=("transformer.word_embeddings", "transformer.ln_f", "lm_head"),
        norms=_LLAMA_NORMS,
        qkv=("self_attention.query_key_value",),
        output="self_attention.dense",
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "mpt": GptNames(
        top=("transformer.wte", "transformer.norm_f", "lm_head"),
        norms=("norm_1", "norm_2"),
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        mlp=("ffn.up_proj", "ffn.down_proj"),
    ),
    "falcon": GptNames(  # in parallel layers the norms have other names (``gpt_names``)
        top=("transformer.word_embeddings", "transformer.ln_f", "lm_head"),
        norms=_LLAMA_NORMS,
        qkv=("self_attention.query_key_value",),
        output="self_attention.dense",
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    "starcoder2": GptNames(_LLAMA_TOP, _LLAMA_NORMS, _QKV, "self_attn.o_proj", ("mlp.c_fc", "mlp.c_proj")),
    "phi": GptNames(
        top=("model.embed_tokens", "model.final_layernorm", "lm_head"),
        norms=("input_layernorm", "input_layernorm"),
        qkv=_QKV,
        output="self_attn.dense",
        mlp=("mlp.fc1", "mlp.fc2"),
        biased=("lm_head",),
    ),
    "stablelm": GptNames(
        top=_LLAMA_TOP,
        norms=_LLAMA_NORMS,
        qkv=_QKV,
        output="self_attn.o_proj",
        mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        unbiased=("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ),
    "jais2": _JAIS2,
    "nemotron": _JAIS2,
}


def gpt_names(config: ModelConfig) -> GptNames:
    names = GPT_NAMES[config.architecture]
    if not config.parallel_residual or config.architecture not in ("falcon", "stablelm"):
        return names
    has_two = config.architecture == "falcon" and config.mlp_has_norm
    return replace(names, norms=("ln_attn", "ln_mlp") if has_two else (names.norms[0], names.norms[0]))


def gpt_layer(config: ModelConfig) -> Shapes:
    names, hidden = gpt_names(config), config.hidden_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = (query, kv, kv) if len(names.qkv) == 3 else (query + 2 * kv,)
    *widening, down = names.mlp
    products = {
        **{name: (count, hidden) for name, count in zip(names.qkv, rows, strict=True)},
        names.output: (hidden, query),
        **dict.fromkeys(widening, (config.intermediate_size, hidden)),
        down: (hidden, config.intermediate_size),
    }
    shapes: Shapes = {}
    for name in names.norms:
        shapes |= norm_shapes(name, hidden)
    for name, shape in products.items():
        shapes |= linear_shapes(name, *shape) if names.is_biased(name, config) else {f"{name}.weight": shape}
    return shapes


def gpt_top(config: ModelConfig) -> Shapes:
    names, table = gpt_names(config), (config.vocab_size, config.hidden_size)
    embedding, final_norm, head = names.top
    shapes = {f"{embedding}.weight": table, **norm_shapes(final_norm, config.hidden_size)}
    if not config.tie_embeddings:
        shapes |= linear_shapes(head, *table) if head in names.biased else {f"{head}.weight": table}
    return shapes
