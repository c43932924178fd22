"""All families but Llama's (``llama``) by their names in config.json. Torch-free.

Each is one entry of ``OTHER_FAMILIES``: a reader from its settings to a ``ModelConfig``, and the names and shapes of
its weights as Hugging Face publishes them. The arithmetic of each family is in ``mooncake.model.families``.
"""

from __future__ import annotations

from mooncake.families.alibi import ALIBI_FAMILIES
from mooncake.families.cohere_moe import COHERE_MOE_FAMILIES
from mooncake.families.dense_members import DENSE_MEMBERS
from mooncake.families.falcon_h1 import FALCON_H1_FAMILIES
from mooncake.families.family import Family, Published, Shapes
from mooncake.families.gated import GATED_FAMILIES
from mooncake.families.gemma3n import GEMMA3N_FAMILIES
from mooncake.families.gemma4 import GEMMA4_FAMILIES
from mooncake.families.gpt import GPT_FAMILIES
from mooncake.families.hybrid import HYBRID_FAMILIES
from mooncake.families.interleaved import INTERLEAVED_FAMILIES
from mooncake.families.layer_norm import LAYER_NORM_FAMILIES
from mooncake.families.lfm2 import LFM2_FAMILIES
from mooncake.families.llama4 import LLAMA4_FAMILIES
from mooncake.families.mamba import MAMBA_FAMILIES
from mooncake.families.mixtures import MIXTURE_FAMILIES
from mooncake.families.multimodal import name_of_text
from mooncake.families.nemotron_h import NEMOTRON_H_FAMILIES
from mooncake.families.routed import ROUTED_FAMILIES
from mooncake.families.routed_members import ROUTED_MEMBERS
from mooncake.model_config import MAX_LAYERS, ModelConfig, Settings

OTHER_FAMILIES: dict[str, Family] = {
    **GPT_FAMILIES,
    **ALIBI_FAMILIES,
    **LAYER_NORM_FAMILIES,
    **GATED_FAMILIES,
    **DENSE_MEMBERS,
    **ROUTED_FAMILIES,
    **ROUTED_MEMBERS,
    **MIXTURE_FAMILIES,
    **INTERLEAVED_FAMILIES,
    **LLAMA4_FAMILIES,
    **COHERE_MOE_FAMILIES,
    **GEMMA3N_FAMILIES,
    **GEMMA4_FAMILIES,
    **LFM2_FAMILIES,
    **HYBRID_FAMILIES,
    **MAMBA_FAMILIES,
    **FALCON_H1_FAMILIES,
    **NEMOTRON_H_FAMILIES,
}
SHARING_FAMILIES = (*GEMMA3N_FAMILIES, *GEMMA4_FAMILIES)  # whose last layers use others' KV


BARE = ("embed_tokens.", "layers.", "norm.")
"""How names of the Llama family begin in a model that was published as what is below the head, for embeddings."""


def read_config(
    family: str,
    settings: Settings,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
    shapes: Published,
) -> ModelConfig:
    """The configuration of a model of one of ``OTHER_FAMILIES``. Raises ModelError for what is unsupported."""
    values = OTHER_FAMILIES[family].read(settings, shapes)
    base: dict[str, object] = {
        "architecture": family,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "tie_embeddings": settings.flag("tie_word_embeddings", True),
        "qkv_bias": False,
        "qk_norm": False,
        "sliding_window": None,
        "bos_id": bos_id,
        "eos_ids": eos_ids,
    }
    return ModelConfig(**(base | values))  # type: ignore[arg-type]


def weight_shapes_of(config: ModelConfig) -> Shapes:
    """Name and shape of every weight of a model of one of ``OTHER_FAMILIES``."""
    family = OTHER_FAMILIES[config.architecture]
    shapes = dict(family.top_shapes(config))
    layer = family.layer_shapes(config)
    dense = family.dense_shapes(config) if family.dense_shapes else layer
    for number in range(config.num_layers):
        is_dense = config.routing is not None and number in config.routing.dense_layers
        own = family.own_shapes(config, number) if family.own_shapes else dense if is_dense else layer
        shapes |= {f"{family.layers_at}.{number}.{name}": shape for name, shape in own.items()}
    return shapes


def without_guessing_layers(config: ModelConfig, settings: Settings, shapes: Shapes) -> Shapes:
    """Drops what predicts further tokens (DeepSeek-V3 2024, section 2.2): the layers published after the last one, or
    ERNIE's with names of their own."""
    at, last = OTHER_FAMILIES[config.architecture].layers_at, config.num_layers
    count = settings.integer("num_nextn_predict_layers", settings.integer("num_mtp_layers", 0))
    behind = ("model.mtp_", "mtp.", *(f"{at}.{last + i}." for i in range(min(count, MAX_LAYERS))))
    return {name: shape for name, shape in shapes.items() if not name.startswith(behind)}


def without_unused_keys(config: ModelConfig, shapes: Shapes) -> Shapes:
    """Drops what layers without KV of their own would compute it with: Gemma 4 is published with it."""
    at = OTHER_FAMILIES[config.architecture].layers_at
    layers = [layer for layer in range(config.num_layers) if not config.owns_kv(layer)]
    unused = {f"{at}.{layer}.self_attn.{name}.weight" for layer in layers for name in ("k_proj", "v_proj", "k_norm")}
    return {name: shape for name, shape in shapes.items() if name not in unused}


def published_name(architecture: str, name: str) -> str:
    """A weight's full name, if its publisher omitted the family's prefix, published more than the language model, or
    has other names for what all models have."""
    name = name_of_text(name)
    family = OTHER_FAMILIES.get(architecture)
    for given, ours in family.renamed if family else ():
        if name.startswith(given):
            return ours + name.removeprefix(given)
    if family is None and name.startswith(BARE):
        return f"model.{name}"
    if family is None or not family.prefix or name.startswith((family.prefix, "lm_head.", "embed_out.")):
        return name
    return family.prefix + name
