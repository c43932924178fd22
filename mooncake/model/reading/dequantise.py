"""Turns codes of quantised checkpoints into values, or into int8 codes that products take directly.

It works on one weight at a time, from mapped files, and keeps nothing. ``mooncake.quantised`` has the layouts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mooncake.errors import ModelError
from mooncake.kernels.grouped import GroupedCodes
from mooncake.kernels.reference import Codes
from mooncake.model.reading.gguf_codes import FLOAT4, NOT_A_POWER
from mooncake.precision import Coding
from mooncake.quantised import CodedWeight

Tensors = Mapping[str, torch.Tensor]

_FLOAT4 = torch.from_numpy(FLOAT4)
_FLOAT4_PAIRS = torch.stack((_FLOAT4.repeat(16), _FLOAT4.repeat_interleave(16)), -1)  # for each byte, low bits first
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # position in its word of each of eight outputs


def dequantised(weight: CodedWeight, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the weight's shape, computed in float32 and rounded to ``dtype`` once. Raises ModelError if it refers
    to groups without scales, or if a scale is NaN."""
    if weight.layout == "mxfp4":
        return _of_experts(tensors[weight.codes], _exponents(weight, tensors), dtype)
    codes, scales, zeros = _parts(weight, tensors)
    outputs, inputs = weight.shape
    height, width = weight.tile
    values = codes.to(torch.float32, memory_format=torch.contiguous_format)
    if 1 < height < outputs:
        scales = scales.repeat_interleave(height, 0)[:outputs]
    tiles = values
    if weight.groups and (groups := _uneven_groups(weight, tensors)) is not None:
        scales, zeros = scales[:, groups], zeros if zeros is None else zeros[:, groups]
    elif width < inputs and inputs % width:
        columns = torch.arange(inputs) // width
        scales, zeros = scales[:, columns], zeros if zeros is None else zeros[:, columns]
    elif width < inputs:
        tiles = values.view(outputs, -1, width)
        scales, zeros = scales.unsqueeze(-1), zeros if zeros is None else zeros.unsqueeze(-1)
    if zeros is not None:
        tiles.sub_(zeros)
    tiles.mul_(scales)
    return values.to(dtype)


def as_codes(weight: CodedWeight, tensors: Tensors, coding: Coding, dtype: torch.dtype) -> Codes:
    """The codes of a weight that has a ``coding``; ``dtype`` is the model's."""
    codes, scales, _ = _parts(weight, tensors)
    return Codes(codes, scales.flatten().expand(weight.shape[0]).contiguous(), coding, dtype)


def as_groups(weight: CodedWeight, tensors: Tensors, dtype: torch.dtype) -> GroupedCodes | None:
    """Codes of 4 or 8 bits in the form that products unpack. None for other codes, for groups of another layout, and
    for scales with so many bits that products with codes would not be exact."""
    if (
        not weight.keeps_groups
        or weight.layout == "mxfp4"
        or tensors[weight.scales].dtype is torch.float32
        or (weight.groups and _uneven_groups(weight, tensors) is not None)
    ):
        return None
    codes, scales, zeros = _parts(weight, tensors)
    zeros = torch.zeros_like(scales) if zeros is None else zeros
    middle = 1 << weight.bits - 1
    if weight.bits == 8 and codes.dtype is torch.uint8:
        codes, zeros = _signed(codes.contiguous(), 8), zeros - middle
    if weight.bits == 4 and codes.dtype is torch.int8:
        codes, zeros = (codes + middle).to(torch.uint8), zeros + middle
    levels = torch.arange(16.0) if weight.bits == 4 else None
    if (zeros == (zero := zeros.flatten()[0])).all() and (levels is not None or not zero):
        return GroupedCodes(codes, scales, None, None if levels is None else levels - zero, dtype)
    return GroupedCodes(codes, scales, -zeros * scales, levels, dtype)


def experts_as_groups(weight: CodedWeight, tensors: Tensors, dtype: torch.dtype) -> list[GroupedCodes] | None:
    """The matrices ``[outputs, inputs]`` of all experts of an mxfp4 tensor; None for other weights."""
    if weight.layout != "mxfp4":
        return None
    pairs = zip(tensors[weight.codes], _exponents(weight, tensors), strict=True)
    return [
        GroupedCodes(
            torch.stack((blocks & 15, blocks >> 4), -1).flatten(1), _powers_of_two(exponents), None, _FLOAT4, dtype
        )
        for blocks, exponents in pairs
    ]


def _exponents(weight: CodedWeight, tensors: Tensors) -> torch.Tensor:
    """Of the scales of an mxfp4 weight, plus 127."""
    exponents = tensors[weight.scales]
    if bool((exponents == NOT_A_POWER).any()):
        raise ModelError(f"{weight.scales} has a scale of {NOT_A_POWER}, which means NaN in mxfp4")
    return exponents


def _powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def _parts(weight: CodedWeight, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes ``[outputs, inputs]``, and float32 scales and zeros ``[outputs / tile, inputs / tile]``."""
    bits, codes, scales = weight.bits, tensors[weight.codes], tensors[weight.scales].float()
    zeros = tensors[weight.zeros] if weight.zeros else None
    if weight.layout == "gptq":
        codes, scales = _unpacked(codes.T, bits), scales.T
        if zeros is None:
            return codes, scales, torch.full_like(scales, 1 << bits - 1)
        return codes, scales, _unpacked(_with_carry(zeros, weight.zero_shift, bits), bits).T.float()
    if weight.layout == "awq":
        assert zeros is not None
        return _awq_unpacked(codes).T, scales.T, _awq_unpacked(zeros).T.float()
    outputs, inputs = weight.shape
    grid = -(-outputs // weight.tile[0]), -(-inputs // weight.tile[1])
    if weight.layout == "packed":
        codes = _signed(_unpacked(codes, bits), bits)
        if zeros is not None and zeros.dtype is torch.int32:
            zeros = _signed(_unpacked(zeros.T, bits), bits).T[: grid[0]]
    return codes, scales.reshape(grid), None if zeros is None else zeros.reshape(grid).float()


def _of_experts(blocks: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[experts, inputs, outputs]`` from mxfp4, one expert at a time: intermediate results take many times the
    memory."""
    values = torch.empty((*exponents.shape, 2 * blocks.shape[-1]), dtype=dtype)
    for expert, codes, powers in zip(values, blocks, exponents, strict=True):
        numbers = torch.nn.functional.embedding(codes.int(), _FLOAT4_PAIRS).flatten(-2)
        torch.mul(numbers, _powers_of_two(powers).unsqueeze(-1), out=expert)
    return values.flatten(2).mT


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes ``[rows, columns * 32 / bits]`` from int32 words ``[rows, columns]``, lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    return octets.clone() if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes to signed ones, in place."""
    return codes.view(torch.int8).add_(-(1 << bits - 1))


def _awq_unpacked(words: torch.Tensor) -> torch.Tensor:
    codes = _unpacked(words, 4)
    return codes.view(len(codes), -1, len(_AWQ_PLACES))[..., _AWQ_PLACES].flatten(1)


def _with_carry(words: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
    """Words with ``shift`` added to each of their codes. A zero of 0 was stored by borrowing from the next code, so
    whole words are added."""
    each = sum(shift << place for place in range(0, 32, bits))
    return (words.long() + each).to(torch.int32)


def _uneven_groups(weight: CodedWeight, tensors: Tensors) -> torch.Tensor | None:
    """For each input, its column of scales; None if groups are consecutive tiles (or -1 is stored)."""
    groups, inputs = tensors[weight.groups].long(), weight.shape[1]
    if torch.equal(groups, torch.arange(inputs) // weight.tile[1]) or (groups == -1).all():
        return None
    if groups.min() < 0 or groups.max() * weight.tile[1] >= inputs:
        raise ModelError(f"{weight.groups} names a group that {weight.scales} does not have")
    return groups
