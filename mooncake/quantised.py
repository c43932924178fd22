"""Quantised weights in Hugging Face folders: what config.json says, and which tensors form each weight. Torch-free.

Opens compressed-tensors, fp8, GPTQ, AWQ and mxfp4; for other formats it says in one sentence what is wrong. The tensors
show which weights are quantised; lists of excluded modules ("ignore", "modules_to_not_convert") only repeat that.
``mooncake.model.reading.dequantise`` reads the codes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mooncake.errors import ModelError
from mooncake.model_config import Settings
from mooncake.precision import Coding
from mooncake.safetensors_file import StoredTensor

Tensors = Mapping[str, StoredTensor]
Layout = Literal["rows", "packed", "gptq", "awq", "mxfp4"]
"""Layout of the codes of a matrix ``[outputs, inputs]``. Words are int32 with 32 / bits codes, lowest bits first.

    rows    [outputs, inputs] of int8 or float8; zeros are int8
    packed  [outputs, words] along the inputs, signed codes plus 2^(bits - 1); zeros likewise, [words, groups] along the
            outputs, or int8
    gptq    [words, outputs] along the inputs; zeros [groups, words] along the outputs
    awq     [inputs, words] along the outputs, in the order 0 2 4 6 1 3 5 7; zeros [groups, words] likewise
    mxfp4   [experts, outputs, groups, 16] along the inputs, two float4 a byte; scales are exponents (OCP MX 1.0, 2023)
"""

WORD_BITS = 32
_PACKED_BITS = (4, 8)
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_FLOATS = ("F32", "F16", "BF16")
# Scales of activations and of cached KV (both are quantised by their actual values), and zeros with known values.
_UNUSED = re.compile(
    r".*\.((input|output|activation|[qkv]|kv)_(scale|zero_point)|weight_shape|weight_zero_point|qzeros)"
)


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """One matrix, or those of all experts, as codes, with weight = (code - zero) * scale; and the names of the tensors
    that hold its parts ("" for none).

    Each scale and zero covers ``tile`` rows and columns. Without ``zeros``, signed codes have zero 0 and unsigned ones
    the middle of their range.
    """

    shape: tuple[int, ...]  # outputs, inputs; for gpt-oss's experts: experts, inputs, outputs
    layout: Layout
    bits: int
    tile: tuple[int, int]
    codes: str
    scales: str
    zeros: str = ""
    groups: str = ""  # int32 [inputs]: the scales' column of each input; "": consecutive tiles
    zero_shift: int = 0  # to be added to the stored zeros
    coding: Coding = ""  # the products that can use its codes directly

    @property
    def keeps_groups(self) -> bool:
        """Whether CPUs can multiply its codes without dequantising them first."""
        if self.layout == "mxfp4":
            return True
        height, width = self.tile
        inputs = self.shape[-1]
        of_groups = self.layout in ("packed", "gptq", "awq") and self.bits in (4, 8) and height == 1
        return of_groups and width % 16 == 0 and inputs % width == 0 and inputs % 32 == 0

    @property
    def group_bytes(self) -> int:
        """Bytes of such codes, with their groups' scales and offsets in float32."""
        return math.prod(self.shape) * self.bits // 8 + math.prod(self.shape) // self.tile[1] * 8

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.codes, self.scales, self.zeros, self.groups)))


Coded = Mapping[str, CodedWeight]
"""By the names that the weights have when not quantised."""

Reader = Callable[[Tensors], Coded]
"""Raises ModelError for missing tensors and wrong shapes."""


def quantisation_of(settings: Settings) -> Reader | None:
    """How to read the weights of a model with this config.json; None: unquantised. Raises ModelError for an unsupported
    quantisation before any weights are read."""
    tree = settings.get("quantization_config") or settings.get("compression_config")
    if not tree:
        return None
    if not isinstance(tree, dict):
        raise ModelError(f"{settings.source}: quantization_config must be an object")
    method = tree.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        supported = ", ".join(_METHODS)
        raise ModelError(
            f"{settings.source} is quantised by {method!r}, which is not supported; supported: {supported}"
        )
    return _METHODS[method](Settings(tree, f"{settings.source}: quantization_config"))


def shapes_of(tensors: Tensors, coded: Coded) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights, as if none were quantised."""
    parts = {part for weight in coded.values() for part in weight.parts}
    shapes = {
        name: tensor.shape
        for name, tensor in tensors.items()
        if name not in parts and not (coded and _UNUSED.fullmatch(name))
    }
    shapes.update((name, weight.shape) for name, weight in coded.items())
    return shapes


def zero_biases(coded: Coded) -> frozenset[str]:
    """Biases that early GPTQ tools wrote for every weight; if the model has no such bias, they must be zero."""
    return frozenset(f"{_module(name)}.bias" for name, weight in coded.items() if weight.layout == "gptq")


def coding_of(coded: Coded) -> Coding:
    """The most that products can do with these codes directly."""
    codings = {weight.coding for weight in coded.values()}
    return "w8a8" if "w8a8" in codings else "int8" if "int8" in codings else ""


# compressed-tensors (llm-compressor)

_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")


@dataclass(frozen=True, slots=True)
class _Group:
    """One of ``config_groups``: how the weights of its targets are quantised."""

    targets: tuple[str, ...]  # classes and names of modules
    patterns: tuple[re.Pattern[str], ...]  # of names, from their beginning
    bits: int
    is_symmetric: bool
    block: tuple[int, int] | None
    coding: Coding


def _compressed_tensors(settings: Settings) -> Reader:
    groups = [_group(settings, given) for given in _objects(settings, "config_groups") if given.get("weights")]
    if not groups:
        raise ModelError(f"{settings.source} has no config_groups with weights")
    if settings.get("transform_config"):
        raise ModelError(f"{settings.source} asks for a transform_config, which is not supported")
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise ModelError(f"{settings.source} has sparse weights ({sparsity['format']}), which are not supported")
    _one_of(settings, "format", _FORMATS, "int-quantized")

    def read(tensors: Tensors) -> Coded:
        coded: dict[str, CodedWeight] = {}
        for name, module in _modules(tensors, "weight_packed"):
            group = _group_of(groups, module)
            coded[f"{module}.weight"] = _compressed(tensors, module, group, name)
        for name, module in _modules(tensors, "weight"):
            if tensors[name].dtype in ("I8", *_FLOAT8):
                coded[name] = _compressed(tensors, module, _group_of(groups, module), name)
        return coded

    return read


def _group(settings: Settings, given: Mapping[str, object]) -> _Group:
    tree, targets = given["weights"], given.get("targets")
    _one_of(Settings(given, settings.source), "format", _FORMATS, "int-quantized")
    if not isinstance(tree, dict) or not isinstance(targets, list):
        raise ModelError(f"{settings.source}: config_groups must have weights and a list of targets")
    weights = Settings(tree, settings.source)
    bits = weights.integer("num_bits", 8)
    if not 1 < bits <= 8:
        raise ModelError(f"{settings.source} asks for weights of {bits} bits; supported: 2 to 8")
    is_symmetric = weights.flag("symmetric", True)
    coding: Coding = ""
    if weights.get("type") != "float" and is_symmetric:
        coding = "w8a8" if _is_by_token(given.get("input_activations")) else "int8"
    block = _block(weights, "block_structure") if weights.get("strategy") == "block" else None
    names = [str(target) for target in targets]
    try:
        patterns = tuple(re.compile(name.removeprefix("re:")) for name in names if name.startswith("re:"))
    except re.error as error:
        raise ModelError(f"{settings.source} has a target that is no pattern: {error}") from None
    return _Group(tuple(names), patterns, bits, is_symmetric, block, coding)


def _is_by_token(activations: object) -> bool:
    """Quantised as in our own kernels: int8 with a scale per token, computed from the token itself."""
    wanted = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    return isinstance(activations, dict) and all(activations.get(key, value) == value for key, value in wanted.items())


def _group_of(groups: list[_Group], module: str) -> _Group:
    """Names take precedence over classes."""
    kind = "Embedding" if ".embed" in module else "Linear"
    by_name = [g for g in groups if module in g.targets or any(pattern.match(module) for pattern in g.patterns)]
    by_class = [group for group in groups if kind in group.targets]
    return (by_name or by_class or groups)[0]


def _compressed(tensors: Tensors, module: str, group: _Group, codes: str) -> CodedWeight:
    is_packed = codes.endswith("weight_packed")
    rows, columns = _matrix(tensors, codes, ("I32",) if is_packed else ("I8", *_FLOAT8))
    per_word = _per_word(codes, group.bits) if is_packed else 1
    shape = rows, columns * per_word
    scales, zeros, groups = (f"{module}.weight_{part}" for part in ("scale", "zero_point", "g_idx"))
    tile = _tile(tensors, scales, shape, group.block)
    if group.is_symmetric:
        zeros = ""
    elif is_packed and zeros in tensors and tensors[zeros].dtype == "I32":
        _check(tensors, zeros, ("I32",), (-(-rows // per_word), shape[1] // tile[1]))
    else:
        _check(tensors, zeros, ("I8",), tensors[scales].shape)
    if groups in tensors:
        _check(tensors, groups, ("I32",), (shape[1],))
    else:
        groups = ""
    is_by_output = tile in ((1, shape[1]), shape) and tensors[codes].dtype not in _FLOAT8
    layout: Layout = "packed" if is_packed else "rows"
    coding = group.coding if is_by_output else ""
    return CodedWeight(shape, layout, group.bits, tile, codes, scales, zeros, groups, coding=coding)


# fp8, as DeepSeek and Qwen (in blocks) and AutoFP8 (whole weights) publish it


def _fp8(settings: Settings) -> Reader:
    block = _block(settings, "weight_block_size") if settings.get("weight_block_size") else None

    def read(tensors: Tensors) -> Coded:
        coded: dict[str, CodedWeight] = {}
        for name, module in _modules(tensors, "weight"):
            if tensors[name].dtype in _FLOAT8:
                shape, scales = _matrix(tensors, name, _FLOAT8), f"{module}.weight_scale_inv"  # still a factor
                if scales not in tensors:
                    scales = f"{module}.weight_scale"
                coded[name] = CodedWeight(shape, "rows", 8, _tile(tensors, scales, shape, block), name, scales)
        return coded

    return read


# GPTQ and AWQ


def _gptq(settings: Settings) -> Reader:
    bits = settings.integer("bits")
    if bits not in _PACKED_BITS:
        raise ModelError(f"{settings.source} asks for GPTQ of {bits} bits; supported: 4 and 8")
    form = _one_of(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    dynamic = settings.get("dynamic")
    if isinstance(dynamic, dict) and not all(str(pattern).startswith("-:") for pattern in dynamic):
        raise ModelError(f"{settings.source} quantises some modules in their own way (dynamic), which is not supported")
    # The zero of symmetric codes is the middle, whatever is stored: tools differ in which of two forms they write.
    is_symmetric, is_scattered = settings.flag("sym", False), settings.flag("desc_act", False)

    def read(tensors: Tensors) -> Coded:
        coded: dict[str, CodedWeight] = {}
        for codes, module in _modules(tensors, "qweight"):
            words, outputs = _matrix(tensors, codes, ("I32",))
            inputs, groups = words * _per_word(codes, bits), f"{module}.g_idx"
            tile = 1, _group_size(settings, inputs)
            scales, zeros = _grouped(tensors, module, -(-inputs // tile[1]), outputs, bits)
            if is_scattered or groups in tensors:
                _check(tensors, groups, ("I32",), (inputs,))
            else:
                groups = ""
            zeros = "" if is_symmetric else zeros
            shift = 1 if form == "gptq" else 0
            coded[f"{module}.weight"] = CodedWeight(
                (outputs, inputs), "gptq", bits, tile, codes, scales, zeros, groups, shift
            )
        return coded

    return read


def _awq(settings: Settings) -> Reader:
    bits = settings.integer("bits")
    if bits != 4:
        raise ModelError(f"{settings.source} asks for AWQ of {bits} bits; supported: 4")
    version = settings.get("version") or settings.get("format") or "gemm"
    if str(version).lower() != "gemm" or settings.get("backend") == "llm-awq":
        raise ModelError(f"{settings.source} asks for AWQ packed for {version!r}; supported: gemm")

    def read(tensors: Tensors) -> Coded:
        coded: dict[str, CodedWeight] = {}
        for codes, module in _modules(tensors, "qweight"):
            inputs, words = _matrix(tensors, codes, ("I32",))
            outputs, tile = words * _per_word(codes, bits), (1, _group_size(settings, inputs))
            scales, zeros = _grouped(tensors, module, -(-inputs // tile[1]), outputs, bits)
            coded[f"{module}.weight"] = CodedWeight((outputs, inputs), "awq", bits, tile, codes, scales, zeros)
        return coded

    return read


def _group_size(settings: Settings, inputs: int) -> int:
    """Inputs that share a scale; -1 in the file, or none named: all."""
    size = settings.integer("group_size", -1)
    return size if size > 0 else inputs


def _grouped(tensors: Tensors, module: str, groups: int, outputs: int, bits: int) -> tuple[str, str]:
    """Scales and zeros of a module, their shapes checked."""
    scales, zeros = f"{module}.scales", f"{module}.qzeros"
    _check(tensors, scales, _FLOATS, (groups, outputs))
    _check(tensors, zeros, ("I32",), (groups, outputs * bits // WORD_BITS))
    return scales, zeros


# mxfp4, as gpt-oss has it

MXFP4_GROUP = 32  # inputs that share a scale


def _mxfp4(settings: Settings) -> Reader:
    def read(tensors: Tensors) -> Coded:
        coded: dict[str, CodedWeight] = {}
        for codes in sorted(name for name in tensors if name.endswith("_blocks")):
            name, tensor = codes.removesuffix("_blocks"), tensors[codes]
            if len(tensor.shape) != 4:
                raise ModelError(f"{codes} is {tensor.dtype} {list(tensor.shape)}; mxfp4 needs U8 of four dimensions")
            experts, outputs, groups, _ = tensor.shape
            _check(tensors, codes, ("U8",), (experts, outputs, groups, MXFP4_GROUP // 2))
            _check(tensors, f"{name}_scales", ("U8",), (experts, outputs, groups))
            shape = experts, groups * MXFP4_GROUP, outputs
            coded[name] = CodedWeight(shape, "mxfp4", 4, (1, MXFP4_GROUP), codes, f"{name}_scales")
        return coded

    return read


_METHODS: dict[str, Callable[[Settings], Reader]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}


# What config.json says


def _one_of(settings: Settings, key: str, supported: Sequence[str], default: str) -> str:
    value = settings.get(key) or default
    if not isinstance(value, str) or value not in supported:
        raise ModelError(f"{settings.source} has the {key} {value!r}; supported: {', '.join(supported)}")
    return value


def _block(settings: Settings, key: str) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    value = settings.get(key)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    ):
        raise ModelError(f"{settings.source}: {key} must be two sizes, got {value!r}")
    return value[0], value[1]


def _objects(settings: Settings, key: str) -> list[Mapping[str, object]]:
    tree = settings.get(key) or {}
    if not isinstance(tree, dict) or not all(isinstance(each, dict) for each in tree.values()):
        raise ModelError(f"{settings.source}: {key} must be an object of objects")
    return list(tree.values())


# What is in the files


def _modules(tensors: Tensors, part: str) -> Iterator[tuple[str, str]]:
    """Names of tensors that are this part of a module, with the module's name."""
    return ((name, _module(name)) for name in sorted(tensors) if name.endswith(f".{part}"))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _matrix(tensors: Tensors, name: str, kinds: Sequence[str]) -> tuple[int, int]:
    tensor = tensors[name]
    if tensor.dtype not in kinds or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ModelError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; its quantisation needs a matrix of {kinds[0]}"
        )
    return tensor.shape[0], tensor.shape[1]


def _check(tensors: Tensors, name: str, kinds: Sequence[str], shape: tuple[int, ...]) -> None:
    tensor = tensors.get(name)
    if tensor is None:
        raise ModelError(f"the quantised weights lack {name}")
    if tensor.dtype not in kinds or tensor.shape != shape:
        needed = f"{' or '.join(kinds)} {list(shape)}"
        raise ModelError(f"{name} is {tensor.dtype} {list(tensor.shape)}; its quantisation needs {needed}")


def _per_word(name: str, bits: int) -> int:
    if bits not in _PACKED_BITS:
        raise ModelError(f"{name} is packed with {bits} bits; supported: 4 and 8")
    return WORD_BITS // bits


def _tile(tensors: Tensors, scales: str, shape: tuple[int, int], block: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns that share a scale, as the scales' own shape says: all, one row, some of a row, or a block."""
    rows, columns = shape
    tensor = tensors.get(scales)
    if tensor is None:
        raise ModelError(f"the quantised weights lack {scales}")
    if tensor.dtype in _FLOATS:
        if block is not None:
            if tensor.shape == (-(-rows // block[0]), -(-columns // block[1])):
                return block
        elif math.prod(tensor.shape) == 1:
            return shape
        elif tensor.shape in ((rows,), (rows, 1)):
            return 1, columns
        elif len(tensor.shape) == 2 and tensor.shape[0] == rows and tensor.shape[1] and columns % tensor.shape[1] == 0:
            return 1, columns // tensor.shape[1]
    raise ModelError(f"{scales} is {tensor.dtype} {list(tensor.shape)}, which does not fit a weight of {list(shape)}")
