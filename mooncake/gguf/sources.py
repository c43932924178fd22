"""Which tensors of a GGUF file hold each weight of a model, and whether they are all there. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from mooncake.errors import ModelError
from mooncake.families.family import Shapes
from mooncake.gguf.file import GGUF
from mooncake.gguf.forms import Form, Source
from mooncake.gguf.names import LAYERS, LLAMA, PARTS, TOP
from mooncake.model_config import MAX_LAYERS, ModelConfig

_CHOICE_BIAS = ".e_score_correction_bias"
_LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")
_TURNED = (
    *("llama", "mistral", "ministral3", "mixtral", "granite", "granitemoe", "granitemoehybrid", "smollm3", "arcee"),
    "nemotron_h",
)
_TURNED_PARTS = tuple(f"{at}.{name}_proj" for at in ("self_attn", "mixer") for name in "qk")
_TILED = ("qwen3_5_text", "qwen3_5_moe_text")
_PUT_TOGETHER = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_PLUS_ONE = ("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_HEAD_NORM = "linear_attn.norm"  # to which nothing was added
_NAME = re.compile(r"(?P<top>.*?)\.(?P<layer>\d+)\.(?P<rest>.+)")
_LATENT = re.compile(r"(blk\.\d+\.attn_)kv_b\.weight")
_PROJECTION = re.compile(r"(blk\.\d+\.)attn_([qkv])\.(weight|bias)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")

# Tables that can be computed; and halves of attn_kv_b, which some files have besides.
_SPARE = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.(attn_rot_embd\.\w+|attn_[kv]_b\.weight)"
)


def sources(config: ModelConfig, file: GGUF, names: Iterable[str]) -> dict[str, Source]:
    """Of each weight."""
    found = {name: _source(config.architecture, name) for name in names}
    return {name: _of_fused(config, file, _as_there(file, source)) for name, source in found.items()}


def _as_there(file: GGUF, source: Source) -> Source:
    """Keys and values of latent attention, which only older files have in one tensor; what Qwen3-Next's states are
    computed from, which only newer ones have in two; and Granite 4's MLPs, which have other names without a mixture."""
    first = source.tensors[0]
    if first in file.tensors:
        return source
    if match := _LATENT.fullmatch(first):
        return Source((f"{match[1]}k_b.weight", f"{match[1]}v_b.weight"), "absorbed")
    older = first.replace("attn_qkv", "ssm_in")
    if source.form == "by kinds" and older in file.tensors:
        return Source((older,))
    alone = tuple(tensor.replace("_shexp", "") for tensor in source.tensors)
    return replace(source, tensors=alone) if alone[0] in file.tensors else source


def _of_fused(config: ModelConfig, file: GGUF, source: Source) -> Source:
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
        return Source((f"{TOP[kind]}.{suffix}",), _form(architecture, kind, suffix))
    at, rest = f"blk.{match['layer']}.", match["rest"]
    if part := PARTS.get(architecture, {}).get(rest):
        if part.form == "listed":
            return replace(part, layer=int(match["layer"]))
        tensors = tuple(at + tensor for tensor in part.tensors)
        return Source(tensors, part.form, is_tiled=_is_tiled(architecture, rest))
    if rest.endswith(_CHOICE_BIAS):
        return Source((f"{at}exp_probs_b.bias",))
    kind, _, suffix = rest.rpartition(".")
    expert = _EXPERT.search(kind)
    kind = _EXPERT.sub("*", kind)
    tensor = f"{at}{LAYERS.get(architecture, LLAMA)[kind]}.{suffix}"
    form, number = _form(architecture, kind, suffix), int(expert[0]) if expert else 0
    return Source((tensor,), form, number, is_tiled=_is_tiled(architecture, kind))


def _is_tiled(architecture: str, kind: str) -> bool:
    return architecture in _TILED and kind.startswith("linear_attn.") and kind != _HEAD_NORM


def _form(architecture: str, kind: str, suffix: str) -> Form:
    if "*" in kind:
        return "expert"
    if architecture in _TURNED and kind in _TURNED_PARTS:
        return "turned"
    if architecture in _LATENT_FAMILIES and kind.endswith(_PUT_TOGETHER):
        return "values"
    if architecture in _PLUS_ONE and kind.endswith("norm") and suffix == "weight" and kind != _HEAD_NORM:
        return "plus one"
    if architecture == "gpt2" and suffix == "weight" and kind.startswith(("attn.", "mlp.")):
        return "transposed"
    return "ungrouped" if kind.endswith(".query_key_value") else "as is"


def check_tensors(config: ModelConfig, file: GGUF, needed: Shapes) -> None:
    """Raises ModelError for a weight that is missing or of another shape, and for a tensor that is not needed, because
    it means a different architecture."""
    used = set()
    for name, source in sources(config, file, needed).items():
        if source.form == "listed":
            listed_number(file, source)
            continue
        for which, tensor in enumerate(source.tensors):
            expected = source.stored_shape(needed[name], config, which)
            found = file.tensors.get(tensor)
            if found is None:
                raise ModelError(f"{file.path} lacks the weight {name} ({tensor})")
            if _without_ones(found.shape) != _without_ones(expected):
                what = f"{name} has the shape {found.shape}, the configuration says {expected}"
                raise ModelError(f"{file.path}: the weight {what}")
            used.add(tensor)
    unused = {f"blk.{layer}.attn_{kind}.weight" for layer in _without_kv(config) for kind in ("k", "v", "k_norm")}
    mtp = tuple(f"blk.{number}." for number in _mtp_layers(file))
    for tensor in sorted(file.tensors.keys() - used - unused):
        if not _SPARE.fullmatch(tensor) and not tensor.startswith(mtp):
            name = published_name(config.architecture, tensor)
            raise ModelError(f"{file.path} has the weight {name}, which its configuration does not need")


def _without_kv(config: ModelConfig) -> list[int]:
    """Layers that use others' keys and values; of Gemma 4, files have what would compute their own."""
    return [layer for layer in range(config.num_layers) if not config.owns_kv(layer)]


def listed_number(file: GGUF, source: Source) -> float:
    """Raises ModelError if the metadata have none for the layer."""
    [key] = source.tensors
    numbers = file.get(key)
    if not isinstance(numbers, list) or source.layer >= len(numbers) or type(numbers[source.layer]) is not float:
        raise ModelError(f"{file.path}: {key} must have a number for each layer, and lacks that of {source.layer}")
    return float(numbers[source.layer])


def _mtp_layers(file: GGUF) -> range:
    """Layers behind the model's own for multi-token prediction (DeepSeek-V3 2024, section 2.2)."""
    prefix = file.get("general.architecture")
    count, num_layers = (file.get(f"{prefix}.{key}") for key in ("nextn_predict_layers", "block_count"))
    if not isinstance(count, int) or not isinstance(num_layers, int):
        return range(0)
    return range(max(num_layers - count, 0), num_layers)[:MAX_LAYERS]


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A row or a column is stored as a vector by some converters, as a matrix by others."""
    return tuple(size for size in shape if size != 1)


def published_name(architecture: str, tensor: str) -> str:
    """A weight that this tensor would hold; unknown names stay as they are."""
    kind, _, suffix = tensor.rpartition(".")
    tops = {stored: name for name, stored in reversed(list(TOP.items()))}
    if kind in tops:
        return f"{tops[kind]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", kind)
    layer = {stored: name for name, stored in LAYERS.get(architecture, LLAMA).items()}
    return f"model.layers.{match[1]}.{layer[match[2]]}.{suffix}" if match and match[2] in layer else tensor
