"""Shared by the readers of all families: their entry, activations, and shapes of common parts. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from mooncake.errors import ModelError
from mooncake.model_config import MAX_LAYERS, ModelConfig, Settings

Shapes = dict[str, tuple[int, ...]]
Published = Mapping[str, tuple[int, ...]]
"""The shapes of a folder's weights, by name."""

_RECURRENT = "layers with a recurrent state in place of KV"
_INDEXED = "an indexer that chooses which tokens attention sees"
_CONVOLVED = "short convolutions, whose state is beside KV"
_MISSING = {
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note", "dots3_note_text"), _INDEXED),
    **dict.fromkeys(("mistral_large4", "mistral_large4_text", "minimax_m3_vl", "minimax_m3_vl_text"), _INDEXED),
    "deepseek_v4": "compressed KV, an indexer, and several residual streams (mHC)",
    "axk1": "a norm behind each mixture of experts",
    "longcat_flash": "two attentions in each layer, and experts that do nothing",
    "laguna": "layers with different numbers of heads",
    "phimoe": "its own way to choose experts (SparseMixer), and norms and a head with biases",
    "dbrx": "all experts' matrices in one, and clamped projections",
    "diffllama": "differences of two attentions",
    "doge": "a mask of attention that depends on values",
    "blt": "bytes in patches of changing length",
    **dict.fromkeys(
        ("granite_swa", "granitemoe_swa"), "rotations of each layer's own, and sinks beside Granite's factors"
    ),
    "granitemoeshared": "an expert for all tokens beside Granite's mixture",
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text", "glm5_next", "bailing_hybrid", "lfm3", "xlstm", "falcon_mamba"), _RECURRENT
    ),
    **dict.fromkeys(("inkling_mm_model", "inkling_text", "inkling2", "inkling2_text", "zaya"), _CONVOLVED),
    **dict.fromkeys(("mamba", "mamba2", "jamba", "zamba2", "rwkv"), _RECURRENT),
    **dict.fromkeys(("minimax", "kimi_linear", "recurrent_gemma", "olmo_hybrid"), _RECURRENT),
    "mllama": "attention to encoded images",
    "mimo_v2_flash": "keys and values of different sizes",
    "bitnet": "weights of three values",
}
"""By model_type, what models that are asked for need and we do not have."""


def unsupported(what: str, families: Iterable[str], model_type: object = None) -> ModelError:
    """``model_type`` as config.json names it."""
    if isinstance(model_type, str) and model_type in _MISSING:
        return ModelError(f"{what} is not supported: it needs {_MISSING[model_type]}")
    return ModelError(f"{what} is not supported; supported families: {', '.join(families)}")


_ACTIVATIONS = {
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_sizes(settings: Settings, num_layers: str, hidden_size: str, num_heads: str) -> dict[str, object]:
    """By these keys, of a model whose heads are parts of its width and have keys and values each."""
    hidden, heads = settings.integer(hidden_size), settings.integer(num_heads)
    return {
        "num_layers": settings.integer(num_layers),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // max(1, heads),
        "vocab_size": settings.integer("vocab_size"),
    }


def num_layers_of(settings: Settings) -> int:
    """Raises ModelError for more than a model can have."""
    num_layers = settings.integer("num_hidden_layers")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ModelError(f"num_layers of the model must be between 1 and {MAX_LAYERS}, got {num_layers}")
    return num_layers


def rotating_in_windows(windows: tuple[int, ...]) -> dict[str, object]:
    """Of a model whose layers with a window rotate, and no others."""
    still = tuple(layer for layer, window in enumerate(windows) if not window)
    return {"layer_windows": windows, "still_layers": still}


def layer_kinds(settings: Settings, kinds: object, known: Collection[str]) -> list[str]:
    """``kinds``, the value of ``layer_types``, if it gives each layer one of the ``known``. Raises ModelError."""
    num_layers = num_layers_of(settings)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"{settings.source}: layer_types must name the kind of each of the {num_layers} layers")
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ModelError(f"{settings.source} has layers of the kind {unknown[0]!r}, which is not supported")
    return kinds


def windows_of_kinds(settings: Settings, kinds: object, default: int) -> tuple[int, ...]:
    """Of layers of full attention (0) and of sliding attention (``sliding_window``). Raises ModelError."""
    kinds = layer_kinds(settings, kinds, ("full_attention", "sliding_attention"))
    window = settings.integer("sliding_window", default)
    if window < 1 and "sliding_attention" in kinds:
        raise ModelError(f"{settings.source}: layers of sliding_attention need a sliding_window, got {window}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def activation(settings: Settings, key: str, default: str) -> str:
    name = settings.get(key) or default
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(f"{settings.source} asks for the activation {name!r}; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def cap_of(settings: Settings, key: str, default: float) -> float:
    """Null means no cap; a missing key means the family's default."""
    cap = 0.0 if key in settings.tree and settings.tree[key] is None else settings.number(key, default)
    if not 0 <= cap < 1e6:
        raise ModelError(f"{settings.source}: {key} must be a positive number or null, got {cap}")
    return cap


def linear_shapes(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm_shapes(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def head_shapes(name: str, config: ModelConfig) -> Shapes:
    """Shapes of the output head; empty if it is tied to the embeddings, or if there is none."""
    has_own = config.has_head and not config.tie_embeddings
    return {f"{name}.weight": (config.vocab_size, config.hidden_size)} if has_own else {}


def gated_shapes(name: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }


def llama_top(config: ModelConfig) -> Shapes:
    table = (config.vocab_size, config.hidden_size)
    norm = {"model.norm.weight": (config.hidden_size,)}
    return {"model.embed_tokens.weight": table, **norm, **head_shapes("lm_head", config)}


@dataclass(frozen=True, slots=True)
class Family:
    """``prefix``: the start of every weight's name, which some publishers omit. ``dense_shapes``: those of the layers
    without experts of a model with a ``Routing``. ``own_shapes``: those of one layer, where layers differ otherwise;
    none, where published layers are not those of the cache: ``top_shapes`` then has them. ``renamed``: other starts of
    names, and those here, the first that fits."""

    read: Callable[[Settings, Published], dict[str, object]]
    layer_shapes: Callable[[ModelConfig], Shapes]
    layers_at: str = "model.layers"
    top_shapes: Callable[[ModelConfig], Shapes] = llama_top
    prefix: str = ""
    dense_shapes: Callable[[ModelConfig], Shapes] | None = None
    own_shapes: Callable[[ModelConfig, int], Shapes] | None = None
    renamed: tuple[tuple[str, str], ...] = ()
