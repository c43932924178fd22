"""The Llama family: how to read its config.json, and which weights it has. Torch-free."""

from __future__ import annotations

from mooncake.errors import ModelError
from mooncake.families.family import Published, Shapes, gated_shapes, llama_top
from mooncake.families.gated import attention_shapes, layer_norms
from mooncake.families.layer_settings import LCKV, read_layers
from mooncake.families.rope_settings import read_query_growth, read_rope, require_rope_scaling
from mooncake.model_config import ModelConfig, Settings

REARRANGED = ("phi3", "ernie4_5", "helium")
"""Families that store Llama's weights in another order or as one (``mooncake.model.reading.as_llama``)."""

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "ministral",
    "ministral3",
    "smollm3",
    "seed_oss",
    "iquestcoder",
    "internlm3",
    "cwm",
    *REARRANGED,
    LCKV,
)

_REFUSED = {
    "seed_oss": ("attention_out_bias", "mlp_bias"),
    "ernie4_5": ("use_bias",),
    "iquestcoder": ("attention_bias", "mlp_bias", "clip_qkv", "use_sliding_window"),
    "internlm3": ("attention_bias", "mlp_bias", "qkv_bias", "bias"),
}
_WIDE_HEADS = (
    "qwen3",
    "ministral3",
    "seed_oss",
    "ernie4_5",
    "iquestcoder",
    "internlm3",
    "cwm",
    "helium",
)  # of 128 elements, if config.json does not say
_THETAS = {"smollm3": 2_000_000.0, "ernie4_5": 500_000.0, "cwm": 1_000_000.0, "helium": 100_000.0}
_EPSILONS = {"helium": 1e-8, "internlm3": 1e-5, "cwm": 1e-5, "ernie4_5": 1e-5}

_KEYS_AND_VALUES = ("self_attn.k_", "self_attn.v_")
_SEPARATE = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


def read_llama(
    family: str,
    settings: Settings,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
    shapes: Published,
) -> ModelConfig:
    """The configuration of a model of one of ``FAMILIES``. Raises ModelError for what is unsupported."""
    settings.refuse(*_REFUSED.get(family, ("attention_bias", "mlp_bias")))
    if (activation := settings.get("hidden_act") or "silu") != "silu":
        raise ModelError(f"{settings.source} asks for the activation {activation!r}; only silu is supported")
    num_heads, hidden_size = settings.integer("num_attention_heads"), settings.integer("hidden_size")
    head_dim = settings.integer("head_dim", 128 if family in _WIDE_HEADS else hidden_size // max(1, num_heads))
    rope = read_rope(settings, head_dim, _THETAS.get(family, 10_000.0), partial=family == "phi3")
    if family == "phi3" and rope.scaling and rope.scaling["rope_type"] != "longrope":
        raise ModelError(f"{settings.source} scales its positions differently from longrope, the family's only way")
    if family == "cwm":
        require_rope_scaling(settings)
    layers = read_layers(settings, family)
    return ModelConfig(
        architecture=family,
        num_layers=settings.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=settings.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=settings.integer("vocab_size"),
        rms_eps=settings.number("rms_norm_eps", _EPSILONS.get(family, 1e-6)),
        tie_embeddings=settings.flag("tie_word_embeddings", "lm_head.weight" not in shapes),
        qkv_bias=family == "qwen2" or (family == "seed_oss" and settings.flag("attention_bias", True)),
        qk_norm=family == "qwen3",
        sliding_window=layers.sliding_window,
        bos_id=bos_id,
        eos_ids=eos_ids,
        layer_windows=layers.layer_windows,
        kv_sources=layers.kv_sources,
        still_layers=layers.still_layers,
        **{**rope.values, **(read_query_growth(settings) if family == "ministral3" else {})},  # type: ignore[arg-type]
    )


def llama_shapes(config: ModelConfig) -> Shapes:
    """Name and shape of every weight of a model of one of ``FAMILIES``."""
    layer = attention_shapes(config) | layer_norms(config)
    if config.architecture == "phi3":
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        layer = {name: shape for name, shape in layer.items() if name not in _SEPARATE}
        layer["self_attn.qkv_proj.weight"] = ((config.num_heads + 2 * config.num_kv_heads) * dim, hidden)
        layer |= {"mlp.gate_up_proj.weight": (2 * inner, hidden), "mlp.down_proj.weight": (hidden, inner)}
    else:
        layer |= gated_shapes("mlp", config.hidden_size, config.intermediate_size)
    shapes = llama_top(config)
    queries_alone = {name: shape for name, shape in layer.items() if not name.startswith(_KEYS_AND_VALUES)}
    for number in range(config.num_layers):
        own = layer if config.owns_kv(number) else queries_alone
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in own.items()}
    return shapes
