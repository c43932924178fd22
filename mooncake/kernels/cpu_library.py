"""The interface of the C++ library: its functions' signatures, structures that mirror its own, and its status codes.

The C side checks block ids, slots and positions: a wrong one is our bug and raises IndexError before a byte is written.
Where it finds no memory, what it should have written is not to be used; a later call may succeed.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import ClassVar

import torch

from mooncake.kernels import reference
from mooncake.precision import Coding

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
SIGNATURES = {
    "mc_paged_attention": [
        *(POINTER, LONG, POINTER, POINTER, INT),  # query, query_stride, output, pages, num_heads
        *(POINTER, LONG, POINTER, POINTER, INT),  # block_tables, table_stride, query_starts, context_lens, B
        *(FLOAT, INT, FLOAT, POINTER, POINTER),  # scale, window, softcap, sinks, alibi_slopes
        *(POINTER, POINTER, INT),  # positions, log_sums, threads
    ],
    "mc_rope_write_kv": [
        *(POINTER, LONG, POINTER, POINTER, POINTER),  # qkv, qkv_stride, rope, positions, pages
        *(INT, POINTER, LONG, INT),  # num_heads, slots, T, threads
    ],
    "mc_copy_turned": [POINTER, POINTER, POINTER, POINTER, POINTER, LONG, INT],
    "mc_add_rms_norm": [POINTER, POINTER, POINTER, POINTER, LONG, INT, FLOAT, INT],
    "mc_silu_mul": [POINTER, POINTER, LONG, INT, INT],
    "mc_recur": [POINTER, INT],
    "mc_size_of": [ctypes.c_char_p],
    "mc_panel_width": [],
    "mc_activation_unit": [INT],
    "mc_pack": [POINTER, POINTER, POINTER, INT],
    "mc_pack_groups": [POINTER, POINTER, POINTER, POINTER, POINTER, INT],
    "mc_unpack_rows": [POINTER, POINTER, LONG, POINTER],
    "mc_linear": [POINTER, POINTER, LONG, POINTER, LONG, INT],  # layer, from, from_stride, to, T, threads
    "mc_experts": [
        *(POINTER, POINTER, POINTER, POINTER, LONG, LONG),  # experts, hidden, chosen, shares, T, k
        *(POINTER, INT),  # output, threads
    ],
    "mc_sample": [POINTER, LONG, LONG, POINTER, POINTER, POINTER, INT],
    "mc_score": [
        *(POINTER, LONG, LONG, LONG),  # logits, stride, count, vocab
        *(POINTER, POINTER, POINTER, LONG),  # rows, tokens, counts, most
        *(POINTER, POINTER, POINTER, POINTER, INT),  # logprobs, ranks, top_ids, top_logprobs, threads
    ],
    "mc_forward": [*(POINTER, POINTER, POINTER), *(POINTER, POINTER, POINTER, POINTER), POINTER, INT],
}
PAGE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
WEIGHT_KINDS = {torch.float32: 0, torch.bfloat16: 1}
CODED_KINDS: dict[Coding, int] = {"int8": 2, "w8a8": 3}
WIDE_CODES, GROUPED_CODES = 4, 5
PROBLEMS = {
    1: "a block id or slot lies outside the cache",
    2: "a position lies outside the model's length",
    3: "a token id or row lies outside its range",
}
STOPPED_BY_HOOK, NO_MEMORY = 4, 5
DRAW = struct.Struct("=dddqQ")
"""How one token is chosen: temperature, top_p, min_p, top_k, seed; mirrors ``Draw`` of sampling.h."""
ROW_UNIT = 64  # bytes, as in packed.h


class PackedLinear(ctypes.Structure):
    """Mirrors ``PackedLinear`` of packed.h."""

    _fields_: ClassVar = [
        ("panels", POINTER),
        ("bias", POINTER),
        ("scales", POINTER),
        ("sums", POINTER),
        ("levels", POINTER),
        ("bytes", POINTER),
        ("inputs", LONG),
        ("outputs", LONG),
        *((name, ctypes.c_int32) for name in ("kind", "is_gated", "hadamard", "code_bits", "group")),
        *((name, ctypes.c_int32) for name in ("has_offsets", "middle")),
    ]


class CacheLayer(ctypes.Structure):
    """Mirrors ``CacheLayer`` of pages.h; strides in bytes."""

    _fields_: ClassVar = [
        *((name, POINTER if name == "base" else LONG) for name in ("base", "num_blocks", "block_stride")),
        *((name, LONG) for name in ("kv_stride", "head_stride")),
        *((name, ctypes.c_int32) for name in ("block_tokens", "num_kv_heads", "head_dim", "kind")),
    ]


class Rope(ctypes.Structure):
    """Mirrors ``Rope`` of steps.h."""

    _fields_: ClassVar = [
        ("cos", POINTER),
        ("sin", POINTER),
        ("num_positions", LONG),
        ("query_norm", POINTER),
        ("key_norm", POINTER),
        ("eps", FLOAT),
    ]


class Experts(ctypes.Structure):
    """Mirrors ``Experts`` of experts.h."""

    _fields_: ClassVar = [
        ("gate_up", POINTER),
        ("down", POINTER),
        ("first", LONG),
        ("count", LONG),
        ("alpha", FLOAT),
        ("limit", FLOAT),
        ("gate", INT),
    ]


class RecurrentCall(ctypes.Structure):
    """Mirrors ``RecurrentCall`` of recurrent.h."""

    _fields_: ClassVar = [
        *((name, POINTER) for name in ("inputs", "decay", "beta", "taps", "bias", "skip", "states")),
        *((name, LONG) for name in ("num_pages", "page_stride")),
        *((name, POINTER) for name in ("starts", "sources", "targets")),
        ("num_runs", LONG),
        *((name, POINTER) for name in ("mixed", "output")),
        *(
            (name, ctypes.c_int32)
            for name in ("channels", "num_taps", "num_key_heads", "heads", "key_dim", "value_dim")
        ),
    ]


def check_mirrors(library: ctypes.CDLL, mirrors: Mapping[str, type[ctypes.Structure]]) -> None:
    """Check that these have the same size as their namesakes in C++; otherwise the library would read past their
    end."""
    for name, mirror in mirrors.items():
        assert library.mc_size_of(name.encode()) == ctypes.sizeof(mirror), f"{name} has changed on one side alone"


def activation_unit(library: ctypes.CDLL) -> int:
    """Bytes of activations that products with bfloat16 weights take at once; 0 if those are float32. If not 0, int8
    weights of a bfloat16 model meet 16-bit activations."""
    return int(library.mc_activation_unit(WEIGHT_KINDS[torch.bfloat16]))


def declare(library: ctypes.CDLL) -> None:
    """Gives the library's functions their signatures. Structures and ``DRAW`` must have their sizes in C++."""
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, INT
    check_mirrors(library, {each.__name__: each for each in (PackedLinear, CacheLayer, Rope, Experts, RecurrentCall)})
    assert library.mc_size_of(b"Draw") == DRAW.size


def pages_of(cache_layer: torch.Tensor) -> CacheLayer:
    num_blocks, num_kinds, num_kv_heads, block_tokens, _ = cache_layer.shape
    strides = [stride * cache_layer.element_size() for stride in cache_layer.stride()[:3]]
    if num_kinds == 1:  # values are the keys
        strides[1] = 0
    kind = PAGE_KINDS[cache_layer.dtype]
    head_dim = reference.head_dim_of(cache_layer)
    return CacheLayer(cache_layer.data_ptr(), num_blocks, *strides, block_tokens, num_kv_heads, head_dim, kind)


def page_kind(dtype: torch.dtype) -> int:
    """As ``PageKind`` of pages.h."""
    return PAGE_KINDS[dtype]


def check(status: int) -> None:
    """Raises IndexError, or MemoryError."""
    if status == NO_MEMORY:
        raise MemoryError("the kernels found none")
    if status:
        raise IndexError(PROBLEMS[status])
