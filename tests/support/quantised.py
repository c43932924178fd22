"""Quantised Hugging Face folders, each format packed as its tools document it, with the values that it represents.

Codes are rounded to the nearest: how well scales are chosen does not matter to a reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Parts = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]
"""From a weight [outputs, inputs] to its parts by name, and to the float32 values that they represent."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Format:
    settings: dict[str, Any]  # quantization_config
    pack: Pack


def write_quantised(folder: Path, theirs: Any, form: Format) -> None:
    """Quantise the projections of the layers: in the folder they become codes, and in ``theirs``, transformers' model,
    the values of these codes."""
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if name.endswith("_proj.weight"):
                module = name.removesuffix(".weight")
                parts, values = form.pack(stored.pop(name).float())
                stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
                weight.copy_(values)
    save_file(stored, folder / "model.safetensors")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": form.settings}))


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned codes [rows, n] into int32 words of 32 / bits codes of a row, the first in the lowest bits."""
    per_word = 32 // bits
    packed = torch.zeros(codes.shape[0], -(-codes.shape[1] // per_word), dtype=torch.int64)
    for place in range(per_word):
        of_place = codes[:, place::per_word].long()
        packed[:, : of_place.shape[1]] |= of_place << bits * place
    return packed.to(torch.int32)


def grouped(
    weight: torch.Tensor, bits: int, size: int, symmetric: bool, groups: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned codes [out, in], float16 scales and unsigned zeros [out, groups], and the values."""
    top = (1 << bits) - 1
    groups = torch.arange(weight.shape[1]) // size if groups is None else groups
    count = int(groups.max()) + 1
    low = torch.stack([weight[:, groups == g].amin(1) for g in range(count)], 1).clamp(max=0.0)
    high = torch.stack([weight[:, groups == g].amax(1) for g in range(count)], 1).clamp(min=0.0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / top).half()
    zeros = torch.full_like(low, 1 << bits - 1) if symmetric else (-low / scales.float()).round().clamp(0, top)
    of_input = scales.float()[:, groups], zeros[:, groups]
    codes = (weight / of_input[0] + of_input[1]).round().clamp(0, top)
    return codes, scales, zeros, (codes - of_input[1]) * of_input[0]


def scattered(inputs: int, size: int) -> torch.Tensor:
    """The group of each input, scattered as by activation order."""
    return (torch.arange(inputs) // size)[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))].int()


# compressed-tensors

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "group_size": None, "strategy": "channel"}
BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None, pack: Pack) -> Format:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
    return Format(settings, pack)


def int8(strategy: str = "channel", activations: dict[str, Any] | None = BY_TOKEN) -> Format:
    """int-quantized: codes from -128 to 127."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        size = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax().view(1)
        scale = (size / 127.5).bfloat16()
        codes = (weight / scale.float()).round().clamp(-128, 127)
        codes.view(-1)[0] = -128.0  # products must accept it
        return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale.float()

    return compressed("int-quantized", INT8 | {"strategy": strategy}, activations, pack)


def packed(bits: int, size: int = 0, symmetric: bool = True, order: bool = False, loose_zeros: bool = False) -> Format:
    """pack-quantized; ``size`` 0: one scale per output. ``loose_zeros``: not packed, as earlier versions wrote them."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        groups = scattered(weight.shape[1], size) if order else None
        codes, scales, zeros, values = grouped(weight, bits, size or weight.shape[1], symmetric, groups)
        parts = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            signed = (zeros - (1 << bits - 1)).to(torch.int8)
            parts["weight_zero_point"] = signed if loose_zeros else words(zeros.T, bits).T
        if groups is not None:
            parts["weight_g_idx"] = groups
        return parts, values

    strategy = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    return compressed("pack-quantized", INT8 | {"num_bits": bits, "symmetric": symmetric} | strategy, None, pack)


def float8(strategy: str, block: tuple[int, int] = (0, 0)) -> Format:
    """float-quantized."""
    weights = INT8 | {"type": "float", "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = list(block)
    return compressed("float-quantized", weights, BY_TOKEN | {"type": "float"}, _float8_pack(strategy, block, "_scale"))


def fp8(block: tuple[int, int] = (0, 0)) -> Format:
    """Plain fp8, in blocks or with one scale per weight matrix."""
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    if block != (0, 0):
        return Format(settings | {"weight_block_size": list(block)}, _float8_pack("block", block, "_scale_inv"))
    return Format(settings, _float8_pack("tensor", block, "_scale"))


def _float8_pack(strategy: str, block: tuple[int, int], suffix: str) -> Pack:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        outputs, inputs = weight.shape
        height, width = {"tensor": weight.shape, "channel": (1, inputs), "block": block}[strategy]
        scale = torch.zeros(-(-outputs // height), -(-inputs // width))
        codes, values = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                tile = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                scale[i, j] = weight[tile].abs().max() / 448
                codes[tile] = (weight[tile] / scale[i, j]).to(torch.float8_e4m3fn)
                values[tile] = codes[tile].float() * scale[i, j]
        stored = scale.view(()) if strategy == "tensor" else scale
        return {"weight": codes, f"weight{suffix}": stored, "input_scale": torch.ones(1)}, values

    return pack


# GPTQ and AWQ


def gptq(
    bits: int, size: int, symmetric: bool = False, order: bool = False, version: int = 1, bias: float | None = 0.0
) -> Format:
    """``version`` 1 stores zeros minus one. ``bias``: its value; early tools wrote biases although none were needed."""

    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        groups = scattered(weight.shape[1], size) if order else (torch.arange(weight.shape[1]) // size).int()
        codes, scales, zeros, values = grouped(weight, bits, size, symmetric, groups)
        parts = {
            "qweight": words(codes, bits).T,
            "qzeros": words(zeros.T, bits) if version == 2 else less_one(words(zeros.T, bits), bits),
            "scales": scales.T,
            "g_idx": groups,
        }
        if bias is not None:
            parts["bias"] = torch.full((weight.shape[0],), bias).half()
        return parts, values

    form = "gptq" if version == 1 else "gptq_v2"
    settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": order, "sym": symmetric}
    return Format(settings | {"checkpoint_format": form}, pack)


def less_one(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Every code minus one; it borrows from the next one, because whole words are subtracted."""
    return (packed.long() - sum(1 << place for place in range(0, 32, bits))).to(torch.int32)


def awq(size: int) -> Format:
    def pack(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        codes, scales, zeros, values = grouped(weight, 4, size, symmetric=False)
        return {"qweight": _awq_words(codes.T), "qzeros": _awq_words(zeros.T), "scales": scales.T}, values

    return Format({"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}, pack)


def _awq_words(codes: torch.Tensor) -> torch.Tensor:
    mixed = torch.cat(
        [codes[:, first + place, None] for first in range(0, codes.shape[1], 8) for place in AWQ_ORDER], 1
    )
    return words(mixed, 4)


# mxfp4

FLOAT4 = torch.tensor([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])  # by their codes


def write_mxfp4(folder: Path, theirs: Any) -> None:
    """Like ``write_quantised``, for the experts of a gpt-oss model."""
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if name.endswith((".gate_up_proj", ".down_proj")):
                blocks, scales, values = mxfp4(stored.pop(name).float().mT)
                stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
                weight.copy_(values.mT)
    save_file(stored, folder / "model.safetensors")
    config, settings = folder / "config.json", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": settings}))


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks [..., groups, 16] and scales [..., groups] of weights [..., inputs], and the values."""
    groups = weight.unflatten(-1, (-1, 32))
    powers = groups.abs().amax(-1).log2().floor() - 2  # the largest code is 1.5 * 2^2
    scales = 2.0 ** powers[..., None]
    codes = ((groups / scales)[..., None] - FLOAT4).abs().argmin(-1)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (powers + 127).to(torch.uint8), (FLOAT4[codes] * scales).flatten(-2)
