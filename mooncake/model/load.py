"""From a checkpoint on disk to a model ready to run."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.adapters import Adapter
from mooncake.checkpoint import Checkpoint
from mooncake.errors import ModelError
from mooncake.host_memory import gives_back_memory
from mooncake.kernels import Kernels, Linear
from mooncake.key_scales import KeyScales
from mooncake.model.decoder import Decoder
from mooncake.model.families.gated import GatedDecoder
from mooncake.model.families.registry import decoder_of
from mooncake.model.llama import CausalLM
from mooncake.model.lora import load_adapter
from mooncake.model.parallel.shards import experts_of, shard_config, shard_weights, vocabulary_shares
from mooncake.model.parallel.vocabulary import Ranks, VocabularyPart
from mooncake.model.reading.key_channels import with_scaled_keys
from mooncake.model.reading.weights import load_weights
from mooncake.model_config import ModelConfig
from mooncake.precision import WeightFormat

DTYPES = ("float32", "bfloat16")


@gives_back_memory
def load_model(
    checkpoint: Checkpoint,
    form: WeightFormat,
    max_model_len: int = 0,
    kernels: Kernels | None = None,
    *,
    adapters: Sequence[Adapter] = (),
    key_scales: KeyScales | None = None,
    can_blend: bool = False,
    layers: range | None = None,
    keep_hidden: Sequence[int] = (),
) -> CausalLM | Decoder:
    """Read the weights and build the model; ``max_model_len`` 0 means the model's own. Batches refer to ``adapters`` by
    index. ``can_blend``: batches may have ``reuse``. ``layers``: load only those, as a stage. ``keep_hidden``: layers
    whose inputs the cache keeps.

    Raises ModelError if weights are missing, broken or of an unsupported kind.
    """
    if form.dtype not in DTYPES:
        raise ModelError(f"model.dtype must be one of {', '.join(DTYPES)}, got {form.dtype!r}")
    config = checkpoint.config
    family = decoder_of(config)
    if can_blend:
        _check_blends(config, key_scales)
    if layers is not None:
        _check_stages(checkpoint)
    if family is not None:
        asked = {"adapters": adapters, "model.key_scales": key_scales, "kept inputs (model.keep_hidden)": keep_hidden}
        if wrong := [what for what, value in asked.items() if value]:
            raise ModelError(_for_llama(wrong[0], checkpoint))
        weights = load_weights(checkpoint, form.dtype, keeps_groups=form.keeps_groups)
        return family(config, weights, max_model_len, kernels, layers=layers, coding=form.coding)
    if key_scales and adapters:
        raise ModelError("model.key_scales and adapters do not go together: adapters are made for keys as they were")
    lora = [load_adapter(adapter, config) for adapter in adapters]
    weights = load_weights(checkpoint, form.dtype, form.codes, form.keeps_groups)
    if key_scales:
        weights = with_scaled_keys(weights, config, key_scales)
    return CausalLM(
        config, weights, max_model_len, kernels, form.coding, adapters=lora, layers=layers, keep_hidden=keep_hidden
    )


def _check_blends(config: ModelConfig, key_scales: KeyScales | None) -> None:
    has_windows = any(config.window_of(layer) for layer in range(config.num_layers))
    if decoder_of(config) or has_windows or key_scales or config.kv_sources or config.still_layers:
        raise ModelError(
            "chunks are blended for the Llama family, with full attention, rotation and KV of each layer's own, "
            "without model.key_scales"
        )


def _check_stages(checkpoint: Checkpoint) -> None:
    family = decoder_of(checkpoint.config)
    if checkpoint.config.kv_sources or not (family is None or issubclass(family, GatedDecoder)):
        raise ModelError(
            "stages are for the Llama family and those built like it, with KV of each layer's own, "
            f"not for {checkpoint.name}"
        )


@gives_back_memory
def load_part(
    checkpoint: Checkpoint,
    form: WeightFormat,
    ranks: Ranks,
    max_model_len: int = 0,
    kernels: Kernels | None = None,
) -> CausalLM | Decoder:
    """One tensor parallel rank's part of the model (``shards``). ``form`` is without W8A8, with which each rank would
    quantise its part of the activations alone. Raises ModelError if the model cannot be split into so many parts, and
    like ``load_model``."""
    assert "w8a8" not in (form.coding, form.codes)
    whole, rank, size = checkpoint.config, ranks.rank, ranks.size
    config, shares = shard_config(whole, size), vocabulary_shares(whole, size)
    stored = load_weights(checkpoint, form.dtype, form.codes, form.keeps_groups)
    weights = shard_weights(stored, whole, rank, size, form.coding)

    def vocabulary(part: Linear) -> Linear:
        return VocabularyPart(part, shares, ranks)

    family = decoder_of(whole)
    if family is None:
        return CausalLM(config, weights, max_model_len, kernels, form.coding, reduce=ranks.sum, vocabulary=vocabulary)
    if form.coding:
        raise ModelError(_for_llama("tensor parallel ranks with int8 weights", checkpoint))
    experts = experts_of(whole, rank, size)
    return family(config, weights, max_model_len, kernels, reduce=ranks.sum, vocabulary=vocabulary, experts=experts)


def _for_llama(what: str, checkpoint: Checkpoint) -> str:
    return f"{what} are for the Llama family; {checkpoint.name} is of the family {checkpoint.config.architecture}"
