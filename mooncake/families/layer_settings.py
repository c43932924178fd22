"""Per-layer settings in a Llama family config.json: how far back each layer sees, whose KV it attends to, and whether
it rotates.

Sharing of keys and values between layers is specified in one of four ways:

    kv_source_layers: [0, 0, 2, 2]   for each layer, the one whose KV it attends to (transformers, Mistral Large 4)
    use_cla, cla_share_factor: 2     so many layers in a row attend to the first one's (Brandon et al. 2024; Hunyuan)
    num_kv_shared_layers: 2          the last so many attend to that of the last layer before them that sees as far
                                     (Gemma 3n; with windows of one kind, Sun et al. 2024's YOCO)
    layer_types: "0_0_2s_2s"         of lckv-llama (Wu et al. 2024): as the first; s: the layer has the window

It does not know weights; ``ModelConfig`` checks that the sharing is possible.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mooncake.errors import ModelError
from mooncake.families.family import num_layers_of, windows_of_kinds
from mooncake.model_config import Settings

LCKV = "lckv-llama"
SHARING_KEYS = ("kv_source_layers", "use_cla", "num_kv_shared_layers")

_LCKV_LAYER = re.compile(r"(\d{1,4})(s?)")


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """Fields of ``ModelConfig``."""

    sliding_window: int | None
    layer_windows: tuple[int, ...]
    kv_sources: tuple[int, ...]
    still_layers: tuple[int, ...]


def read_layers(settings: Settings, family: str) -> LayerSettings:
    """Raises ModelError for anything wrong or unsupported."""
    num_layers = num_layers_of(settings)
    if family == "smollm3" and settings.flag("use_sliding_window", False):
        raise ModelError(f"{settings.source} asks for use_sliding_window, which is not supported for this family")
    if family == LCKV:
        windows, sources = _lckv_layers(settings, num_layers)
    else:
        windows = _windows(settings, family, num_layers)
        sources = _kv_sources(settings, windows)
    if family in ("phi3", "smollm3") and sources != list(range(num_layers)):
        raise ModelError(f"{settings.source} lets layers share keys and values, which is not supported for {family}")
    is_uniform = len(set(windows)) == 1
    return LayerSettings(
        sliding_window=windows[0] or None if is_uniform else None,
        layer_windows=() if is_uniform else tuple(windows),
        kv_sources=() if sources == list(range(num_layers)) else tuple(sources),
        still_layers=still_layers(settings, num_layers) if family == "smollm3" else (),
    )


def refuse_sharing(settings: Settings) -> None:
    """For families of which no published model shares KV. Raises ModelError."""
    for key in SHARING_KEYS:
        if settings.get(key):
            raise ModelError(f"{settings.source} asks for {key}, which is for the Llama family")


def _windows(settings: Settings, family: str, num_layers: int) -> list[int]:
    """Of each layer, 0 for none."""
    kinds = settings.get("layer_types")
    if kinds is None:
        return _windows_without_kinds(settings, family, num_layers)
    return list(windows_of_kinds(settings, kinds, 0))


def _windows_without_kinds(settings: Settings, family: str, num_layers: int) -> list[int]:
    window, num_full = settings.integer("sliding_window", 0), 0
    if family in ("llama", "seed_oss", "ernie4_5", "iquestcoder", "internlm3", "helium"):
        window = 0
    elif family == "cwm":
        window = settings.integer("sliding_window", 8192)
        return [window if layer % 4 else 0 for layer in range(num_layers)]
    elif family == "phi3":  # Phi-4-mini's window is larger than its context
        window = window if window < settings.integer("max_position_embeddings") else 0
    elif family not in (
        "mistral",
        "ministral",
        "ministral3",
    ):  # Qwen's first max_window_layers see everything, and the others less
        window = window if settings.flag("use_sliding_window", False) else 0
        num_full = min(max(settings.integer("max_window_layers", num_layers), 0), num_layers)
    return [0] * num_full + [window] * (num_layers - num_full)


def still_layers(settings: Settings, num_layers: int) -> tuple[int, ...]:
    """The layers of SmolLM3 and Llama 4 that do not rotate (NoPE): every fourth, unless a list has a 1 for each that
    rotates. Raises ModelError for anything wrong."""
    turning = settings.get("no_rope_layers") or None
    if turning is None:
        every = settings.integer("no_rope_layer_interval", 4)
        if every < 1:
            raise ModelError(f"{settings.source}: no_rope_layer_interval must be positive, got {every}")
        turning = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(turning, list) or len(turning) < num_layers or not all(it in (0, 1) for it in turning):
        raise ModelError(f"{settings.source}: no_rope_layers must be 0 or 1 for each of the {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not turning[layer])


def _kv_sources(settings: Settings, windows: list[int]) -> list[int]:
    own = list(range(len(windows)))
    asked = [key for key in SHARING_KEYS if settings.get(key)]
    if not asked:
        return own
    if len(asked) > 1:
        raise ModelError(f"{settings.source} says in two ways which layers share KV: {asked[0]} and {asked[1]}")
    if asked == ["kv_source_layers"]:
        return _listed(settings, len(windows))
    if asked == ["use_cla"]:
        factor = settings.integer("cla_share_factor", 1)
        if factor < 1:
            raise ModelError(f"{settings.source}: cla_share_factor must be at least 1, got {factor}")
        return [layer - layer % factor for layer in own]
    return sources_of_last(settings, windows, settings.integer("num_kv_shared_layers"))


def sources_of_last(settings: Settings, windows: list[int], count: int) -> list[int]:
    """The layer whose KV each layer attends to: its own, but for the last ``count`` that of the last layer before them
    with the same window. Raises ModelError where there is none."""
    first, own = len(windows) - count, list(range(len(windows)))
    if not 0 < first < len(windows):
        raise ModelError(f"{settings.source}: num_kv_shared_layers must leave layers that have KV, of {len(windows)}")
    last_of = {window: layer for layer, window in enumerate(windows[:first])}
    if missing := set(windows[first:]) - set(last_of):
        kind = f"a window of {missing.pop() or 'all'} tokens"
        raise ModelError(f"{settings.source}: no layer with {kind} has KV that the last layers could share")
    return own[:first] + [last_of[window] for window in windows[first:]]


def _listed(settings: Settings, num_layers: int) -> list[int]:
    sources = settings.get("kv_source_layers")
    if not isinstance(sources, list) or len(sources) != num_layers or not all(type(i) is int for i in sources):
        raise ModelError(f"{settings.source}: kv_source_layers must be the number of a layer for each of {num_layers}")
    return sources


def _lckv_layers(settings: Settings, num_layers: int) -> tuple[list[int], list[int]]:
    settings.refuse("force_nodiag")
    text = settings.get("layer_types")
    layers = "_".join(map(str, range(num_layers))) if text is None else str(text)
    found = [_LCKV_LAYER.fullmatch(layer) for layer in layers.split("_")]
    known = [(int(match[1]), match[2]) for match in found if match]
    if len(known) != len(found) or len(known) != num_layers:
        raise ModelError(f"{settings.source}: layer_types must be {num_layers} numbers of layers, got {text!r:.80}")
    window = settings.integer("sliding_window", 4096)
    if window < 1:
        raise ModelError(f"{settings.source}: sliding_window must be at least 1, got {window}")
    return [window if is_local else 0 for _, is_local in known], [source for source, _ in known]
