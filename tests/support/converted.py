"""Tiny random models of transformers as GGUF files, made of their folders in the manner of llama.cpp's converter.

Names come from ``gguf.TensorNameMap``, and everything the converter changes is done here once more, so that nothing of
the code under test decides what a file should hold. ``Converted.theirs`` is transformers' model with the weights as
rounded by the file's kind.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import gguf
import numpy as np
import torch
from converted_metadata import ConvertedMetadata, falcon_kv_heads
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH, MODEL_ARCH_NAMES
from greedy import Answering
from safetensors.torch import load_file, save_file
from tiny_alibi import ALIBI
from tiny_families import FAMILIES, Published
from tiny_gemma4 import GEMMA4
from tiny_gguf import add_metadata, finish
from tiny_members import LLAMA3, MEMBERS
from tiny_multimodal import MULTIMODAL, QWEN3_VL_MOE
from transformers import AutoConfig, PreTrainedModel

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.model_config import ModelConfig

Kind = gguf.GGMLQuantizationType
Tensors = dict[str, torch.Tensor]

_VISION = {name: MULTIMODAL[name] for name in ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")}
_GEMMA4 = {f"gemma4-{name}": make for name, make in GEMMA4.items()}
MODELS = FAMILIES | MEMBERS | ALIBI | _VISION | _GEMMA4 | {"qwen3-vl-moe": QWEN3_VL_MOE}
ARCHITECTURES = {  # where they are not called as in transformers
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "gemma4_unified_text": MODEL_ARCH.GEMMA4,
    "mixtral": MODEL_ARCH.LLAMA,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "qwen2_vl_text": MODEL_ARCH.QWEN2VL,
    "qwen2_5_vl_text": MODEL_ARCH.QWEN2VL,
    "qwen3_vl_text": MODEL_ARCH.QWEN3VL,
    "qwen3_vl_moe_text": MODEL_ARCH.QWEN3VLMOE,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "granitemoehybrid": MODEL_ARCH.GRANITE,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "olmo3": MODEL_ARCH.OLMO2,
    "cohere": MODEL_ARCH.COMMAND_R,
    "deepseek_v2": MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": MODEL_ARCH.DEEPSEEK2,
    "glm4_moe_lite": MODEL_ARCH.DEEPSEEK2,
    "minimax_m2": MODEL_ARCH.MINIMAXM2,
    "hunyuan_v1_dense": MODEL_ARCH.HUNYUAN_DENSE,
    "hunyuan_v1_moe": MODEL_ARCH.HUNYUAN_MOE,
    "glm": MODEL_ARCH.CHATGLM,
    "phi": MODEL_ARCH.PHI2,
    "gpt_neox": MODEL_ARCH.GPTNEOX,
}

# Of ``MODELS``, with what a GGUF file cannot say changed in their config.json.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "mixtral": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    **{name: {"intermediate_size": 112} for name in ("granite-4", "granite-4-without-rotation")},
    **{
        name: {}
        for name in (
            *("phi3", "phi4-mini", "qwen2-moe", "qwen3-moe", "gpt-oss", "olmoe", "granite", "granite-moe", "olmo2"),
            *("smollm3-in-turn", "seed-oss", "ernie-4.5", "exaone-4", "exaone-4-without-windows", "glm-4.5"),
            *("glm-4.5-air", "dots1", "dots1-without-norm", "minimax-m2", "ernie-4.5-moe", "hunyuan", "glm", "phi"),
            *("stablelm", "stablelm-in-parallel", "nemotron", "gpt-neox-in-turn"),
            *("deepseek-v2", "deepseek-v2-in-groups", "deepseek-v3", "deepseek-v3-wide", "moonlight"),
            *("olmo3", "cohere", "cohere-plus", "cohere2", "glm4", "falcon-7b", "falcon-40b", "falcon2-11b", "gpt2"),
            *_VISION,
            *_GEMMA4,
            *("gemma", "afm", "ministral3", "glm-4.7-flash", "glm-4.7-flash-in-groups"),
        )
    },
    "hunyuan-moe": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 1000.0}
    },
    "apertus": {
        "max_position_embeddings": 65_536,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192},
    },
    "gpt2-with-a-head": {"scale_attn_weights": True},
    "bloom": {},
    "bloom-of-6-heads": {},
    "mpt": {},
    "mpt-clamped": {"attn_config": {"clip_qkv": 1.5}},
}
_SMALL = (
    "mlp.gate",
    "gate.wg",
    "router",
    "router.layer",
    "router.proj",
    "block_sparse_moe.gate",
    "shared_expert_gate",
    "wpe",
)  # stay float32
_TURNED = ("mixtral", "ministral3", "arcee", "granite", "granitemoe", "granitemoehybrid", "smollm3")


class Converted(Answering):
    """``kind`` is that of the matrices, ``expert_kind`` of stacked experts; those that do not fit become float16."""

    models: ClassVar[Mapping[str, Callable[[], Any]]] = MODELS
    changes: ClassVar[dict[str, dict[str, Any]]] = CHANGES

    def __init__(
        self,
        family: str,
        folder: Path,
        kind: Kind = Kind.F32,
        expert_kind: Kind | None = None,
        tokenizer: Mapping[str, Any] = MappingProxyType({}),
        tensors_a_file: int = 0,
        **changes: Any,
    ) -> None:
        """``tokenizer``: metadata by their whole keys; ``tensors_a_file``: at most, 0 for one file; ``changes`` of
        config.json."""
        self.published = Published(family, folder / "published", self.models)
        where = self.published.folder
        settings = json.loads((where / "config.json").read_text())
        (where / "config.json").write_text(json.dumps(settings | self.changes.get(family, {}) | changes))
        self.config = AutoConfig.from_pretrained(where).get_text_config()
        self.family = str(self.config.model_type)
        self._kinds = kind, expert_kind or kind
        self._is_older, self._has_halves = False, True
        weights = {name: self._rounded(name, tensor) for name, tensor in load_file(where / "model.safetensors").items()}
        save_file(weights, where / "model.safetensors", metadata={"format": "pt"})
        self._num_guessing, self._tokenizer, self._tensors_a_file = 0, tokenizer, tensors_a_file
        self.path = folder / "model.gguf"  # of several files: the first
        self._write(weights)

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(str(self.path))

    @cached_property
    def theirs(self) -> PreTrainedModel:
        """With the values of the file: many tests need none."""
        kind = type(self.published.theirs)
        found: PreTrainedModel = kind.from_pretrained(self.published.folder, dtype=torch.float32).eval()
        return found

    # Numbers

    def _kind(self, name: str, shape: tuple[int, ...]) -> Kind:
        bare = name.rpartition(".")[0]
        if len(shape) == 1 or bare.endswith(("norm", *_SMALL)) or name.endswith(("_bias", ".bias")):
            return Kind.F32
        wanted = self._kinds[".experts." in name or "_linear" in name]
        return Kind.F16 if shape[-1] % GGML_QUANT_SIZES[wanted][0] else wanted

    def _rounded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if ".act_fn." in name:
            return tensor
        if "kv_b_proj" in name:
            [(_, keys), (_, values)] = self._changed(name, tensor.float())
            halves = self._rounded_as(name, keys).mT, self._rounded_as(name, values)
            return torch.cat(halves, dim=1).reshape(tensor.shape).contiguous()
        return self._as_stored(name, self._rounded_as(name, self._as_stored(name, tensor.float()))).contiguous()

    def _rounded_as(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """As it is in the file."""
        stored = np.ascontiguousarray(tensor.numpy())
        kind = self._kind(name, stored.shape)
        values = gguf.quants.dequantize(quantized(stored, kind), kind).reshape(stored.shape)
        return torch.from_numpy(np.array(values, np.float32))

    def _as_stored(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Some matrices are stored transposed; the same undoes it."""
        is_gpt2 = self.family == "gpt2" and ".h." in name and tensor.ndim == 2
        is_gpt_oss = self.family == "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        return tensor.mT if is_gpt2 or is_gpt_oss else tensor

    # Metadata

    def _architecture(self) -> MODEL_ARCH:
        return ARCHITECTURES.get(self.family) or MODEL_ARCH[self.family.upper()]

    def _write_metadata(self, writer: gguf.GGUFWriter) -> None:
        ConvertedMetadata(self.config, self.family, self._is_older, self._num_guessing).write(writer)

    # Tensors

    def add_guessing_layer(self) -> None:
        """Write the file anew with a layer behind the last one, as of models that also guess further tokens."""
        self._num_guessing = 1
        self._write(load_file(self.published.folder / "model.safetensors"))

    def fuse(self) -> None:
        """Write the file anew with queries, keys and values as one tensor, as converters of the first GLM-4 did."""
        weights = load_file(self.published.folder / "model.safetensors")
        for name in [name for name in weights if ".q_proj." in name]:
            parts = [weights.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            weights[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        self._write(weights)

    def write_as_older_converters_did(self, halves_too: bool = False) -> None:
        """Latent attention as ordinary heads, whose keys and values are one matrix (and in halves once more, in files
        of some converters); and nothing about groups."""
        self._is_older, self._has_halves = True, halves_too
        self._write(load_file(self.published.folder / "model.safetensors"))

    def _write(self, weights: Tensors) -> None:
        architecture = self._architecture()
        path = self.path.with_name("model.gguf")
        writer = gguf.GGUFWriter(path, MODEL_ARCH_NAMES[architecture], split_max_tensors=self._tensors_a_file)
        write_activations(writer, weights)
        names = gguf.get_tensor_name_map(architecture, self.config.num_hidden_layers)
        self._write_metadata(writer)
        for key, value in self._tokenizer.items():
            add_metadata(writer, key, value)
        for name, tensor in self._converted(weights):
            mapped = name if name.startswith(("rope_", "blk.")) else names.get_name(name, (".weight", ".bias"))
            if ".qkv_proj." in name:
                mapped = f"blk.{name.split('.')[2]}.attn_qkv.{name.split('.')[-1]}"
            assert mapped is not None, name
            kind = Kind.F32 if name.startswith("rope_") else self._kind(name, tuple(tensor.shape))
            values = np.ascontiguousarray(tensor.float().numpy())
            writer.add_tensor(mapped, quantized(values, kind), raw_dtype=kind)
        for layer in range(self.config.num_hidden_layers, self.config.num_hidden_layers + self._num_guessing):
            writer.add_tensor(f"blk.{layer}.nextn.enorm.weight", np.ones(self.config.hidden_size, np.float32))
        finish(writer)
        self.path = writer.format_shard_names(path)[0]

    def _converted(self, weights: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        stacks: dict[str, dict[int, torch.Tensor]] = {}
        for whole_name, tensor in weights.items():
            name = whole_name.replace("model.language_model.", "model.")
            name = name.removeprefix("transformer." if self.family == "bloom" else "")
            if ".act_fn." in name or "visual." in name:  # which are metadata, and a file of its own
                continue
            before, is_expert, behind = name.partition(".experts.")
            number, _, rest = behind.partition(".")
            if is_expert and number.isdigit():
                stacks.setdefault(f"{before}.experts.{rest}", {})[int(number)] = tensor
            else:
                yield from self._changed(name, self._as_stored(name, tensor))
        for name, experts in stacks.items():
            yield self._of_all_experts(name), torch.stack([experts[number] for number in sorted(experts)])
        scaling = getattr(self.config, "rope_parameters", None) or {}
        for kind in ("long", "short") if scaling.get("long_factor") else ():
            yield f"rope_factors_{kind}.weight", torch.tensor(scaling[f"{kind}_factor"])
        if self.family.startswith("gemma4"):
            pairs = self.config.per_layer_config["full_attention"].head_dim // 2
            turning = int(pairs * scaling["full_attention"]["partial_rotary_factor"])
            yield "rope_freqs.weight", torch.tensor([1.0] * turning + [1e30] * (pairs - turning))
        if scaling.get("rope_type") == "llama3":
            yield "rope_freqs.weight", llama3_divisors(scaling, self.config.head_dim)

    def _of_all_experts(self, name: str) -> str:
        is_mixtral = self.family == "mixtral"
        return (
            name.replace("block_sparse_moe", "feed_forward").replace("model.layers", "layers") if is_mixtral else name
        )

    def _changed(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        config = self.config
        if self.family.startswith("gemma4"):
            small = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
            mapped = small.get(".".join(name.split(".")[3:]))
            whole = name if name.endswith(".weight") else f"{name}.weight"
            yield f"blk.{name.split('.')[2]}.{mapped}" if mapped else whole, tensor
        elif (self.family.startswith("gemma") or self.family == "nemotron") and name.endswith("norm.weight"):
            yield name, tensor + 1
        elif self.family in _TURNED and ".self_attn.q_proj" in name:
            yield name, turned(tensor, config.num_attention_heads)
        elif self.family in _TURNED and ".self_attn.k_proj" in name:
            yield name, turned(tensor, config.num_key_value_heads)
        elif name.endswith("sinks"):
            yield f"{name}.weight", tensor
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), tensor
        elif "experts.gate_up_proj" in name:
            in_turn = tensor[:, ::2], tensor[:, 1::2]
            parts = in_turn if self.family == "gpt_oss" else tensor.chunk(2, dim=1)
            suffix = "bias" if name.endswith("_bias") else "weight"
            for part, values in zip(("gate", "up"), parts, strict=True):
                yield f"{name.partition('gate_up')[0]}{part}_proj.{suffix}", values
        elif "experts.down_proj" in name:
            suffix = "bias" if name.endswith("_bias") else "weight"
            yield f"{name.partition('down')[0]}down_proj.{suffix}", tensor
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            layer = int(name.split(".")[2])
            gate, up = tensor.split(config.intermediate_size, dim=-2)
            yield f"model.layers.{layer}.mlp.experts.gate_proj.weight", gate
            yield f"model.layers.{layer}.mlp.experts.up_proj.weight", up
        elif "shared_mlp.input_linear" in name:
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"mlp.{part}_proj"), rows
        elif "shared_mlp.output_linear" in name:
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor
        elif "kv_b_proj" in name:
            heads = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            if self._has_halves:
                yield name.replace("kv_b", "k_b"), keys.mT
                yield name.replace("kv_b", "v_b"), values
            if self._is_older:
                yield name, tensor
        elif "query_key_value" in name:
            yield name, self._ungrouped(tensor)
        else:
            yield name, tensor

    def _ungrouped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Falcon's, GPT-NeoX's and BLOOM's queries, then keys, then values."""
        heads = self.config.num_attention_heads
        kv_heads = falcon_kv_heads(self.config) if self.family == "falcon" else heads
        dim = self.config.hidden_size // heads
        groups = tensor.view(kv_heads, heads // kv_heads + 2, dim, *tensor.shape[1:])
        parts = groups[:, :-2], groups[:, [-2]], groups[:, [-1]]
        return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def cache_for_weights(folder: Path) -> Path:
    """A folder that is as XDG_CACHE_HOME is; compiled kernels stay where they are."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mooncake" / "kernels"
    usual.mkdir(parents=True, exist_ok=True)
    (folder / "cache" / "mooncake").mkdir(parents=True)
    (folder / "cache" / "mooncake" / "kernels").symlink_to(usual)
    return folder / "cache"


def plain(config: ModelConfig) -> dict[str, object]:
    """Metadata are float32, and so is what is computed with them."""
    return {name: narrowed(value) for name, value in dataclasses.asdict(config).items()}


def narrowed(value: object) -> object:
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, dict):
        return {name: narrowed(inner) for name, inner in value.items()}
    return tuple(map(narrowed, value)) if isinstance(value, (list, tuple)) else value


def write_activations(writer: gguf.GGUFWriter, weights: Tensors) -> None:
    """Those that each layer of Apertus has learned."""
    adders = {
        "alpha_p": writer.add_xielu_alpha_p,
        "alpha_n": writer.add_xielu_alpha_n,
        "beta": writer.add_xielu_beta,
        "eps": writer.add_xielu_eps,
    }
    for name, add in adders.items():
        if values := [float(tensor) for key, tensor in sorted(weights.items()) if key.endswith(f"act_fn.{name}")]:
            add(values)


def llama3_divisors(rope: Mapping[str, float], dim: int) -> torch.Tensor:
    """What each frequency is divided by, for the longer a wave is."""
    waves = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((rope["original_max_position_embeddings"] / waves - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - kept) / rope["factor"] + kept)


def turned(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Each head's halves in turn: the order in which llama.cpp rotates neighbours."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def quantized(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Rows of blocks; what has been quantised before does not change. The package has no quantiser for Q4_K."""
    return _q4_k(values) if kind is Kind.Q4_K else gguf.quants.quantize(values, kind)


def _q4_k(values: np.ndarray) -> np.ndarray:
    """Scales are given, and not fitted: step [8] of each of a block's groups, and what is subtracted from it."""
    factors, offsets = np.arange(16, 40, 3, np.uint8), np.arange(15, 39, 3, np.uint8)  # each of 6 bits
    step, low = np.float32(2**-9) * factors, np.float32(2**-6) * offsets
    groups = values.reshape(-1, 8, 32)
    codes = np.clip(np.rint((groups + low[:, None]) / step[:, None]), 0, 15).astype(np.uint8)
    first, last = (slice(0, 4), slice(4, 8))
    scales = np.concatenate(
        [
            factors[first] | factors[last] >> 4 << 6,
            offsets[first] | offsets[last] >> 4 << 6,
            factors[last] & 15 | (offsets[last] & 15) << 4,
        ]
    )
    head = np.concatenate([np.array([2**-9, 2**-6], np.float16).view(np.uint8), scales])
    nibbles = codes[:, ::2] | codes[:, 1::2] << 4
    blocks = np.concatenate([np.tile(head, (len(groups), 1)), nibbles.reshape(len(groups), -1)], axis=1)
    return blocks.reshape(*values.shape[:-1], -1)
