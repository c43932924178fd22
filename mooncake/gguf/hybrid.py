"""From the metadata of GGUF files to the fields of ``ModelConfig``: models of which some layers keep a state in place
of KV. Torch-free.

Which layers those are is seen by their tensors: files say it in several ways, and some not at all. Sizes of states have
the same keys (``ssm``) for the gated delta rule and for Mamba-2.
"""

from __future__ import annotations

from dataclasses import replace

from mooncake.errors import ModelError
from mooncake.families.hybrid import state_windows
from mooncake.families.nemotron_h import ATTENTION, MAMBA, MIXTURE, MLP
from mooncake.gguf.fields import Fields, decoder_fields
from mooncake.gguf.metadata import Metadata
from mooncake.gguf.mixtures import expert_fields, routed_fields
from mooncake.model_config import MAX_LAYERS, Factors, Mamba, Recurrence


def lfm2(meta: Metadata) -> Fields:
    recurrent = _layers_with(meta, "shortconv.conv.weight")
    values = {
        **decoder_fields(meta),
        "architecture": "lfm2",
        "qk_norm": True,
        "layer_windows": state_windows(meta.integer("block_count"), recurrent),
        "recurrence": Recurrence(
            layers=recurrent, taps=meta.integer("shortconv.l_cache"), channels=meta.integer("embedding_length")
        ),
    }
    if meta.prefix == "lfm2":
        return values
    return {**values, **routed_fields(meta, normed=True), "architecture": "lfm2_moe"}


# The gated delta rule


def qwen_next(meta: Metadata) -> Fields:
    """Qwen3-Next, and Qwen3.5, whose layers that predict further tokens come last and are left out."""
    num_layers = _num_layers(meta)
    recurrent = _layers_with(meta, "ssm_conv1d.weight")
    values = {
        **decoder_fields(meta, partial=True),
        "architecture": _QWEN[meta.prefix],
        "num_layers": num_layers,
        "qk_norm": True,
        "layer_windows": state_windows(num_layers, recurrent),
        "recurrence": _states(meta, recurrent),
    }
    if not meta.integer("expert_count", 0):
        return values
    return {
        **values,
        **expert_fields(meta),
        "norm_expert_weights": meta.flag("expert_weights_norm", True),
        "shared_expert_size": meta.integer("expert_shared_feed_forward_length"),
        "stacked_experts": meta.has_tensor("blk.0.ffn_gate_up_exps.weight"),
    }


_QWEN = {"qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}


# Mamba-2


def granite_states(meta: Metadata) -> Fields:
    """What Granite 4 has besides Granite. MLPs beside a mixture are as wide as an expert that all tokens use."""
    recurrent = _layers_with(meta, "ssm_conv1d.weight")
    if not recurrent:
        raise ModelError(f"{meta.source} has no layers of Mamba, which is not supported for {meta.prefix}")
    shared = meta.integer("expert_shared_feed_forward_length", 0)
    values: Fields = {"architecture": "granitemoehybrid", **_mamba(meta, meta.integer("block_count"), recurrent)}
    if not meta.integer("expert_count", 0):
        return {**values, "intermediate_size": shared or meta.integer("feed_forward_length")}
    return {**values, **expert_fields(meta), "norm_expert_weights": True, "shared_expert_size": shared}


def falcon_h1(meta: Metadata) -> Fields:
    """Its factors have been applied to the weights. Norms of states come behind their gates, as in llama.cpp."""
    num_layers = 2 * min(meta.integer("block_count"), MAX_LAYERS)
    states = _mamba(meta, num_layers, tuple(range(0, num_layers, 2)))
    mamba = states["mamba"]
    assert isinstance(mamba, Mamba)
    none = Factors(inputs=(1.0,) * 5, state_space=1.0, attention=1.0, gate=1.0, mlp=1.0)
    return {
        **decoder_fields(meta),
        **states,
        "architecture": "falcon_h1",
        "num_layers": num_layers,
        "mamba": replace(mamba, factors=none),
    }


def nemotron_h(meta: Metadata) -> Fields:
    pattern = _pattern(meta)
    mixers = [letter for letter in pattern if letter in (MAMBA, ATTENTION)]
    states = _mamba(meta, len(mixers), tuple(at for at, letter in enumerate(mixers) if letter == MAMBA))
    mamba = states["mamba"]
    assert isinstance(mamba, Mamba)
    values = {
        **decoder_fields(meta, rotates=False),
        **states,
        "architecture": "nemotron_h",
        "num_layers": len(mixers),
        "activation": "relu2",
        "still_layers": tuple(range(len(mixers))),
        "mamba": replace(mamba, pattern=pattern, latent_size=meta.integer("moe_latent_size", 0)),
    }
    if MIXTURE not in pattern:
        return values
    shared = meta.integer("expert_shared_feed_forward_length")
    return {**values, **routed_fields(meta, normed=True), "shared_expert_size": shared}


_LETTERS = {"ssm_in": MAMBA, "attn_q": ATTENTION, "ffn_gate_inp": MIXTURE, "ffn_up": MLP}


def _pattern(meta: Metadata) -> str:
    """Of a letter for each published layer (``families.nemotron_h``)."""
    found = []
    for layer in range(_num_layers(meta)):
        kinds = [letter for name, letter in _LETTERS.items() if meta.has_tensor(f"blk.{layer}.{name}.weight")]
        if not kinds:
            raise ModelError(f"{meta.source} does not say of which kind its layer {layer} is")
        found.append(kinds[0])
    if found and found[0] not in (MAMBA, ATTENTION):
        raise ModelError(f"{meta.source} begins with an MLP, which is not supported")
    return "".join(found)


def _mamba(meta: Metadata, num_layers: int, recurrent: tuple[int, ...]) -> Fields:
    states = _states(meta, recurrent)

    def has(name: str) -> bool:
        return any(meta.has_tensor(f"blk.{layer}.{name}") for layer in range(_num_layers(meta)))

    return {
        "layer_windows": state_windows(num_layers, recurrent),
        "recurrence": states,
        "mamba": Mamba(
            norm_groups=states.num_key_heads if has("ssm_norm.weight") else 0,
            has_conv_bias=has("ssm_conv1d.bias"),
            has_biases=has("ssm_in.bias"),
        ),
    }


# Of all of them


def _num_layers(meta: Metadata) -> int:
    """Without those that predict further tokens."""
    return min(meta.integer("block_count") - meta.integer("nextn_predict_layers", 0), MAX_LAYERS)


def _layers_with(meta: Metadata, tensor: str) -> tuple[int, ...]:
    return tuple(layer for layer in range(_num_layers(meta)) if meta.has_tensor(f"blk.{layer}.{tensor}"))


def _states(meta: Metadata, layers: tuple[int, ...]) -> Recurrence:
    heads, inner = meta.integer("ssm.time_step_rank"), meta.integer("ssm.inner_size")
    groups, key_dim = meta.integer("ssm.group_count"), meta.integer("ssm.state_size")
    if heads < 1 or inner % heads:
        raise meta.wrong("ssm.inner_size", f"must be a multiple of ssm.time_step_rank, {heads}, got {inner}")
    return Recurrence(
        layers=layers,
        taps=meta.integer("ssm.conv_kernel"),
        channels=inner + 2 * groups * key_dim,
        num_value_heads=heads,
        value_dim=inner // heads,
        num_key_heads=groups,
        key_dim=key_dim,
    )
