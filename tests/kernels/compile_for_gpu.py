"""Compile every Triton kernel, in every configuration that is launched, for sm_80 and sm_90; needs no GPU.

Run as a script (Triton's interpreter must be off in its process): prints one JSON line per kernel, configuration and
target with registers, spilled bytes and shared memory from ``cuobjdump``. Used by ``test_gpu_compile.py``, and useful
by hand.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mooncake.app.bench.gpu_parts.device import DECODE_INT8, OTHERS
from mooncake.kernels.gpu import (
    triton_attention,
    triton_coded_attention,
    triton_elementwise,
    triton_experts,
    triton_latent_attention,
    triton_products,
    triton_recurrent,
    triton_recurrent_chunks,
)
from mooncake.kernels.gpu.attention import (
    DECODE_ROWS,
    MERGED_PARTS,
    MERGES_PER_PROCESSOR,
    PREFILL_ROWS,
    SHARED_ROWS,
    attention_launch,
    merge_warps,
    most_rows,
    reads_pairs,
)
from mooncake.kernels.gpu.experts import ADDED_AT_ONCE, SORTED_AT_ONCE, tiles_of
from mooncake.kernels.gpu.kernels import COPY_WORDS, TURNED_PAIRS
from mooncake.kernels.gpu.latent import LATENT_ROWS, column_parts, latent_launch, pack_latent
from mooncake.kernels.gpu.products import STRIP, product_tiles
from mooncake.kernels.gpu.recurrent import CONVOLVED_CHANNELS, CONVOLVED_TOKENS, CONVOLVED_WARPS, matrix_part
from mooncake.kernels.gpu.recurrent_chunks import PART, STAGES, WALKING_WARPS, WARPS, of_score, of_solve, of_walk
from mooncake.kernels.gpu.triton_launch import facts
from mooncake.kernels.recurrent_chunks import CHUNK_TOKENS

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int8": "*i8", "float8": "*fp8e4nv"}
SCALED = ("int8", "float8")
COUNTED = ("16-bfloat16-bfloat16", "16-bfloat16-int8")  # ends of names; to take a program apart takes half a second
RECURRENT_TYPES = {
    **dict.fromkeys(("inputs", "taps", "bias", "mixed", "decay", "share", "skip", "states", "output"), "*fp32"),
    **dict.fromkeys(("scores", "scales", "of_state", "written"), "*fp32"),
    **dict.fromkeys(("starts", "sources", "targets", "chains", "spans"), "*i64"),
    **dict.fromkeys(("num_runs", "num_few", "num_tokens", "channels", "state_stride"), "i32"),
    "eps": "fp32",
}
PROGRAMS_OF_RECURRENCE = 16  # that a multiprocessor should hold, of a warp each


@dataclass(frozen=True)
class Case:
    name: str
    kernel: triton.JITFunction
    types: dict[str, str]  # of the arguments that are no constants
    constants: dict[str, object]
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 1  # that a multiprocessor should hold
    targets: tuple[int, ...] = (80, 90)
    plain: frozenset[str] = frozenset()  # numbers that are not multiples of 16, besides those that vary


def attention_cases() -> Iterator[Case]:
    shapes = {  # group of query heads, head size, block tokens
        "llama8b": (4, 128, 64),
        "llama8b-page16": (4, 128, 16),
        "smollm2": (3, 64, 64),
        "mqa": (16, 128, 64),
        "gemma3": (2, 256, 64),
        "gemma4": (8, 512, 64),
    }
    for shape, (group, head_dim, block_tokens) in shapes.items():
        for query, pages in (
            ("bfloat16", "bfloat16"),
            ("bfloat16", "int8"),
            ("bfloat16", "float8"),
            ("float32", "float32"),
        ):
            most = most_rows(head_dim, pages in SCALED)
            for rows in sorted({min(rows, most) for rows in (DECODE_ROWS, SHARED_ROWS, PREFILL_ROWS)}):
                if pages not in ("bfloat16", "int8") and shape != "llama8b":
                    continue
                if query == "float32" and rows != DECODE_ROWS:
                    continue  # never planned
                if shape in ("mqa", "llama8b-page16") and (pages != "bfloat16" or rows == SHARED_ROWS):
                    continue
                yield _attention(shape, group, head_dim, block_tokens, rows, query, pages, windowed=False)
    for rows in (DECODE_ROWS, PREFILL_ROWS):
        yield _attention("mistral", 4, 128, 64, rows, "bfloat16", "bfloat16", windowed=True)
        yield _attention("llama4", 5, 128, 64, rows, "bfloat16", "bfloat16", windowed=-1)
        yield _attention("gemma3", 2, 256, 64, min(rows, most_rows(256, False)), "bfloat16", "bfloat16", windowed=True)
        for windowed in (False, True):
            few = min(rows, most_rows(256, False))
            yield _attention("gemma2", 2, 256, 64, few, "bfloat16", "bfloat16", windowed, capped=True)
        yield _attention("llama8b-rows", 4, 128, 64, rows, "bfloat16", "int8", windowed=False, row_unit=4)
        for windowed in (False, True):
            yield _attention("gpt-oss", 8, 64, 64, rows, "bfloat16", "bfloat16", windowed, sinks=True)
        yield _attention("mpt-7b", 1, 128, 64, rows, "bfloat16", "bfloat16", windowed=False, sloped=True)
    for kind, launches in OTHERS.items():
        for launch in launches:
            usual = _attention(
                "llama8b", 4, 128, 64, launch.tile_rows, "bfloat16", "int8" if kind == DECODE_INT8 else "bfloat16",
                windowed=False, row_unit=4 if kind == DECODE_INT8 else 16,
            )  # fmt: skip
            yield replace(
                usual,
                name=f"{usual.name}-{launch.keys}-{launch.num_stages}-{launch.per_processor}",
                constants={**usual.constants, "KEYS": launch.keys},
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
                programs=launch.per_processor,
                targets=(90,),
            )
    for head_dim, sinks in ((64, False), (128, False), (256, False), (512, False), (576, False), (64, True)):
        yield Case(
            f"merge-{head_dim}{'-sinks' if sinks else ''}",
            triton_attention.merge,
            {
                **dict.fromkeys(("partial", "partial_lse"), "*fp32"),
                "sinks": "*bf16",
                **dict.fromkeys(("merge_tokens", "merge_starts", "merge_rows", "num_tokens"), "*i32"),
                "output": "*bf16",
            },
            {
                **{"NUM_HEADS": 32, "HEAD_DIM": head_dim, "HEAD_PAD": triton.next_power_of_2(head_dim)},
                **{"SINKS": sinks, "PARTS": MERGED_PARTS},
            },
            num_warps=merge_warps(head_dim),
            programs=MERGES_PER_PROCESSOR if head_dim <= 128 else 1,
        )


def _attention(
    shape: str,
    group: int,
    head_dim: int,
    block_tokens: int,
    rows: int,
    query: str,
    pages: str,
    windowed: int,  # 1 slides, -1 is a chunk
    capped: bool = False,
    sinks: bool = False,
    sloped: bool = False,
    row_unit: int = 16,  # 4: each row carries its scale
) -> Case:
    if pages == "int8" and reads_pairs(rows, head_dim, torch.int8):
        return _coded_attention(shape, group, head_dim, block_tokens, row_unit)
    wide = query == "float32"
    group_pad = triton.next_power_of_2(group)
    launch = attention_launch(rows, head_dim, block_tokens, wide, pages in SCALED)
    return Case(
        f"attend-{shape}-{rows}-{query}-{pages}{'-window' if windowed else ''}"
        f"{'-cap' if capped else ''}{'-sinks' if sinks else ''}{'-slopes' if sloped else ''}",
        triton_attention.attend,
        {
            "query": POINTERS[query],
            "cache": POINTERS[pages],
            **dict.fromkeys(("scales", "partial", "partial_lse", "alibi_slopes"), "*fp32"),
            **dict.fromkeys(("block_tables", "pieces", "num_pieces"), "*i32"),
            **dict.fromkeys(("sinks", "output"), POINTERS[query]),
            **dict.fromkeys(
                (
                    *(
                        "query_stride",
                        "block_stride",
                        "kv_stride",
                        "head_stride",
                        "row_stride",
                        "table_stride",
                        "window",
                    ),
                    *("scale_block_stride", "scale_kv_stride", "scale_head_stride", "scale_row_stride"),
                ),
                "i32",
            ),
            **dict.fromkeys(("softmax_scale", "softcap"), "fp32"),
        },
        {
            "NUM_KV_HEADS": 8,
            "GROUP": group,
            "GROUP_PAD": group_pad,
            "HEAD_DIM": head_dim,
            "HEAD_PAD": triton.next_power_of_2(head_dim),
            "BLOCK_TOKENS": block_tokens,
            "TILE_TOKENS": max(rows // group_pad, 1),
            "KEYS": launch.keys,
            "WINDOWED": windowed,
            "CAPPED": capped,
            "SLOPED": sloped,
            "SCALED": pages in SCALED,
            "SINKS": sinks,
            "WIDE": wide,
            "ROW_UNIT": row_unit,
        },
        launch.num_warps,
        launch.num_stages,
        launch.per_processor,
        plain=frozenset(
            {"window", "scale_row_stride"} | ({"row_stride", "scale_head_stride"} if row_unit % 16 else set())
        ),
    )


def _coded_attention(shape: str, group: int, head_dim: int, block_tokens: int, row_unit: int) -> Case:
    """Attention over int8 pages that are read two codes at a time; with ``row_unit`` 4 each row has its scale."""
    group_pad = triton.next_power_of_2(group)
    launch = attention_launch(DECODE_ROWS, head_dim, block_tokens, False, True)
    carries = row_unit % 16 != 0
    row, scale_row = (head_dim // 2 + 2, head_dim // 4 + 1) if carries else (head_dim // 2, 1)
    return Case(
        f"attend-{shape}-{DECODE_ROWS}-bfloat16-int8",
        triton_coded_attention.attend_codes,
        {
            **{"query": "*bf16", "cache": "*i16", "sinks": "*bf16", "output": "*bf16"},
            **dict.fromkeys(("scales", "partial", "partial_lse", "alibi_slopes"), "*fp32"),
            **dict.fromkeys(("block_tables", "pieces", "num_pieces"), "*i32"),
            **dict.fromkeys(("query_stride", "block_stride", "head_stride", "table_stride", "window"), "i32"),
            **dict.fromkeys(("scale_block_stride", "scale_head_stride"), "i32"),
            **dict.fromkeys(("softmax_scale", "softcap"), "fp32"),
        },
        {
            **{
                "NUM_KV_HEADS": 8,
                "GROUP": group,
                "GROUP_PAD": group_pad,
                "TILE_TOKENS": max(DECODE_ROWS // group_pad, 1),
            },
            **{"HEAD_DIM": head_dim, "HEAD_PAD": triton.next_power_of_2(head_dim), "BLOCK_TOKENS": block_tokens},
            **{"KEYS": launch.keys, "WINDOWED": False, "CAPPED": False, "SLOPED": False, "SINKS": False, "WIDE": False},
            **{"ROW_STRIDE": row, "KV_STRIDE": 8 * block_tokens * row},
            **{"SCALE_ROW_STRIDE": scale_row, "SCALE_KV_STRIDE": 8 * block_tokens * scale_row},
        },
        launch.num_warps,
        launch.num_stages,
        launch.per_processor,
        plain=frozenset({"window"} | ({"scale_head_stride"} if carries else set())),
    )


def latent_cases() -> Iterator[Case]:
    for shape, num_heads in (("deepseek-v3", 128), ("kimi-k2", 64), ("moonlight", 16)):
        for block_tokens in (64, 16):
            for rows in (DECODE_ROWS, LATENT_ROWS):
                if rows < num_heads and rows == DECODE_ROWS:
                    continue  # never planned but in float32
                yield _latent(f"{shape}-page{block_tokens}", num_heads, 576, block_tokens, rows, "bfloat16", "bfloat16")
        yield _latent(shape, num_heads, 576, 64, LATENT_ROWS, "bfloat16", "int8")
        yield _latent(shape, num_heads, 576, 64, DECODE_ROWS, "float32", "float32")
    yield _latent("moonlight", 16, 576, 64, DECODE_ROWS, "bfloat16", "int8")
    yield _latent("tiny", 6, 32, 16, DECODE_ROWS, "float32", "float32")


def _latent(shape: str, num_heads: int, head_dim: int, block_tokens: int, rows: int, query: str, pages: str) -> Case:
    wide, scaled = query == "float32", pages in SCALED
    launch, packing, (main, rest) = (
        latent_launch(rows, wide, scaled),
        pack_latent(num_heads, wide),
        column_parts(head_dim),
    )
    return Case(
        f"attend-latent-{shape}-{query}-{pages}-{rows}",
        triton_latent_attention.attend_latent,
        {
            "query": POINTERS[query],
            "cache": POINTERS[pages],
            **dict.fromkeys(("scales", "partial", "partial_lse"), "*fp32"),
            **dict.fromkeys(("block_tables", "pieces", "num_pieces"), "*i32"),
            "output": POINTERS[query],
            **dict.fromkeys(("query_stride", "block_stride", "scale_block_stride", "table_stride"), "i32"),
            "softmax_scale": "fp32",
        },
        {
            **{"NUM_HEADS": num_heads, "PARTS": packing.parts, "GROUP": packing.group},
            **{"GROUP_PAD": packing.group_pad, "HEAD_DIM": head_dim, "MAIN": main, "REST": rest},
            **{"ROW_STRIDE": head_dim + 4 * scaled, "SCALE_ROW_STRIDE": (head_dim // 4 + 1) * scaled},
            **{"BLOCK_TOKENS": block_tokens, "TILE_TOKENS": packing.tile_tokens(rows), "KEYS": launch.keys},
            **{"SCALED": scaled, "WIDE": wide},
        },
        launch.num_warps,
        launch.num_stages,
        launch.per_processor,
    )


def elementwise_cases() -> Iterator[Case]:
    for width in (576, 4096):
        for has_update in (False, True):
            yield Case(
                f"norm-{width}-{'add' if has_update else 'plain'}",
                triton_elementwise.add_rms_norm,
                {
                    **dict.fromkeys(("residual", "update", "weight", "output"), "*bf16"),
                    **dict.fromkeys(("residual_stride", "update_stride", "width"), "i32"),
                    "eps": "fp32",
                },
                {"HAS_UPDATE": has_update, "WIDTH_PAD": triton.next_power_of_2(width)},
                num_warps=max(triton.next_power_of_2(width) // 512, 1),
            )
    yield Case(
        "silu-mul",
        triton_elementwise.silu_mul,
        {"gate_up": "*bf16", "output": "*bf16", "width": "i32", "stride": "i32"},
        {"BLOCK": 1024},
    )
    for pages, kv_heads, half in (
        *(("bfloat16", 8, 64), ("int8", 8, 64), ("float8", 8, 64)),
        *(("bfloat16", 4, 256), ("int8", 4, 256)),  # Gemma 4's global layers
        *(("bfloat16", 0, 64), ("bfloat16", 1, 288), ("int8", 1, 288)),  # 0: queries alone; 288: latent rows
    ):
        name = f"rope-write-{pages}" if kv_heads else "rope-queries"
        half_pad = triton.next_power_of_2(half)
        yield Case(
            f"{name}{'-latent' if half == 288 else '-wide' if half == 256 else ''}",
            triton_elementwise.rope_write_kv,
            {
                "qkv": "*bf16",
                **dict.fromkeys(("cos", "sin", "scales"), "*fp32"),
                **dict.fromkeys(("positions", "slots"), "*i64"),
                "cache": POINTERS[pages],
                **dict.fromkeys(("query_norm", "key_norm"), "*bf16"),
                "eps": "fp32",
                **dict.fromkeys(
                    (
                        *("qkv_stride", "block_stride", "kv_stride", "head_stride", "row_stride"),
                        *("scale_block_stride", "scale_kv_stride", "scale_head_stride", "scale_row_stride"),
                    ),
                    "i32",
                ),
            },
            {
                **{"NUM_HEADS": 32, "HEADS": TURNED_PAIRS // half_pad, "HALF": half, "HALF_PAD": half_pad},
                **{"NUM_KV_HEADS": kv_heads, "KV_HEADS_PAD": max(kv_heads, 1), "HAS_VALUES": half != 288},
                **{"BLOCK_TOKENS": 64, "NORMED": pages == "bfloat16", "SCALED": pages != "bfloat16"},
                "MAX_CODE": 448.0 if pages == "float8" else 127.0,
            },
        )
    yield Case(
        "copy-pages",
        triton_elementwise.copy_pages,
        {
            **dict.fromkeys(("source", "target", "source_pages", "target_pages"), "*i64"),
            **dict.fromkeys(("num_pages", "source_stride", "target_stride", "page_words"), "i32"),
        },
        {"BLOCK": COPY_WORDS},
        num_warps=8,
    )
    yield Case(
        "quantise-rows",
        triton_elementwise.quantise_rows,
        {"rows": "*bf16", "codes": "*i8", "scales": "*fp32", "width": "i32", "stride": "i32"},
        {"WIDTH_PAD": 4096},
        num_warps=8,
    )
    for activations, itemsize in (("int8", 1), ("bfloat16", 2), ("float32", 4)):
        shapes = itertools.product((1, 64, 128, 4096), (1024, 12_288, 28_672))
        for tiles in dict.fromkeys(product_tiles(*shape, itemsize, 132) for shape in shapes):
            output = "float32" if itemsize == 4 else "bfloat16"
            yield Case(
                f"int8-product-{activations}-{tiles.rows}x{tiles.columns}",
                triton_products.int8_product,
                {
                    **{"rows": POINTERS[activations], "row_scales": "*fp32", "weight": "*i8", "weight_scales": "*fp32"},
                    **{"bias": POINTERS[output], "output": POINTERS[output]},
                    **dict.fromkeys(("row_stride", "tokens", "outputs", "inputs"), "i32"),
                },
                {
                    **{"HAS_BIAS": False, "CODED": itemsize == 1, "GROUP_ROWS": STRIP, "WIDE": False},
                    **{"ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth},
                },
                num_warps=tiles.warps,
                num_stages=tiles.stages,
                plain=frozenset({"tokens"}),
            )


def expert_cases() -> Iterator[Case]:
    shapes = {"qwen3-30b": (128, 8, False), "gpt-oss": (32, 4, True)}  # experts, a token's, with biases and bounds
    yield Case(
        "experts-sort",
        triton_experts.sort_pairs,
        {"chosen": "*i64", "order": "*i32", "ends": "*i32", "pairs": "i32", "first": "i32"},
        {"BLOCK": SORTED_AT_ONCE},
        num_warps=8,
        plain=frozenset({"first"}),
    )
    for shape, (count, per_token, is_bounded) in shapes.items():
        yield Case(
            f"experts-add-{shape}",
            triton_experts.add_parts,
            {"parts": "*bf16", "output": "*bf16", "width": "i32"},
            {"PER_TOKEN": per_token, "BLOCK": ADDED_AT_ONCE},
        )
        for kind, mean in (("bfloat16", 1), ("bfloat16", 8), ("bfloat16", 64), ("bfloat16", 512), ("float32", 1)):
            for is_gated in (True, False):
                yield _experts(shape, count, per_token, is_bounded, kind, mean * count, is_gated)
    for mean in (1, 8, 64, 512):
        yield _experts("nemotron-3", 128, 6, False, "bfloat16", mean * 128, is_gated=True, is_relu2=True)


def _experts(
    shape: str,
    count: int,
    per_token: int,
    is_bounded: bool,
    kind: str,
    pairs: int,
    is_gated: bool,
    is_relu2: bool = False,
) -> Case:
    pointer, wide = POINTERS[kind], kind == "float32"
    tiles = tiles_of(pairs, count, wide, is_gated)
    integers = ("hidden_stride", "width", "inner") if is_gated else ("width", "inner")
    own = {"PER_TOKEN": per_token, "BOUNDED": is_bounded, "IS_GELU": False, "IS_RELU2": is_relu2} if is_gated else {}
    return Case(
        f"experts-{'gate' if is_gated else 'down'}-{shape}-{tiles.rows}x{tiles.columns}-{kind}",
        triton_experts.gate_and_up if is_gated else triton_experts.down,
        {
            **dict.fromkeys(("hidden", "weight", "bias", "gated", "parts"), pointer),
            **dict.fromkeys(("order", "ends"), "*i32"),
            **dict.fromkeys(integers, "i32"),
            **{"shares": "*fp32", "alpha": "fp32", "limit": "fp32"},
        },
        {
            **own,
            **{"HAS_BIAS": is_bounded, "WIDE": wide, "NUM_EXPERTS": count, "EXPERTS_PAD": count},
            **{"ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth},
        },
        tiles.num_warps,
        tiles.num_stages,
        tiles.per_processor,
    )


def recurrent_cases() -> Iterator[Case]:
    shapes = {  # key heads, heads, elements of a key, and of a value; whether it is the delta rule
        "qwen3-next": (16, 32, 128, 128, True),
        "granite4-small": (1, 128, 128, 64, False),
        "falcon-h1-34b": (2, 32, 256, 128, False),
    }
    for shape, (key_heads, heads, key_dim, value_dim, is_delta) in shapes.items():
        keys, values = key_heads * key_dim, heads * value_dim
        channels = 2 * keys + values
        yield from _convolutions(shape, 4, has_bias=not is_delta, has_silu=True)
        key_pad, columns = matrix_part(key_dim, value_dim)
        places = (0, keys, 2 * keys) if is_delta else (values + keys, values, 0)
        constants = {
            **dict(zip(("QUERY_AT", "KEY_AT", "VALUE_AT"), places, strict=True)),
            **{"TAIL": 3 * channels, "NUM_HEADS": heads, "OF_KEY": heads // key_heads, "IS_DELTA": is_delta},
            **{"KEY_DIM": key_dim, "VALUE_DIM": value_dim},
        }
        for is_listed in (False, True):
            yield Case(
                f"recur{'-listed' if is_listed else ''}-{shape}",
                triton_recurrent.recur,
                RECURRENT_TYPES,
                {**constants, "KEY_PAD": key_pad, "COLUMNS": columns, "LISTED": is_listed},
                num_warps=1,
                programs=PROGRAMS_OF_RECURRENCE,
            )
        in_chunks = [("score", of_score, WARPS, 4), ("solve", of_solve, WARPS, 4), ("walk", of_walk, WALKING_WARPS, 1)]
        for name, of_kernel, num_warps, programs in in_chunks:
            if name == "solve" and not is_delta:
                continue
            yield Case(
                f"{name}-{shape}",
                getattr(triton_recurrent_chunks, name),
                RECURRENT_TYPES,
                {**of_kernel(constants), "PART": PART, "CHUNK": CHUNK_TOKENS},
                num_warps,
                STAGES,
                programs,
            )
    yield from _convolutions("lfm2", 3, has_bias=False, has_silu=False)


def _convolutions(shape: str, taps: int, has_bias: bool, has_silu: bool) -> Iterator[Case]:
    constants = {"TAPS": taps, "HAS_BIAS": has_bias, "HAS_SILU": has_silu, "CHANNELS": CONVOLVED_CHANNELS}
    by_token = {"TAIL_PAD": triton.next_power_of_2(taps - 1), "TOKENS": CONVOLVED_TOKENS}
    for name, kernel, given, num_warps in (
        ("convolve", triton_recurrent.convolve, by_token | {"LISTED": False}, 4),
        ("convolve-listed", triton_recurrent.convolve, by_token | {"LISTED": True}, 4),
        ("convolve-chunks", triton_recurrent_chunks.convolve_chunks, {"CHUNK": CHUNK_TOKENS}, CONVOLVED_WARPS),
    ):
        yield Case(
            f"{name}-{shape}",
            kernel,
            RECURRENT_TYPES,
            constants | given,
            num_warps,
            programs=16 // num_warps,
        )


def build(case: Case, capability: int) -> dict[str, object]:
    names = case.kernel.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    plain = case.plain.union(case.kernel.do_not_specialize)
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name in case.types and name not in plain and case.types[name] != "fp32"
    }
    source = ASTSource(case.kernel, signature, case.constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=target, options=options)
    told, cubin = facts(compiled), compiled.asm["cubin"]
    is_counted = case.name.endswith(COUNTED)
    return {
        "case": case.name,
        "sm": capability,
        "threads": 32 * case.num_warps,
        "programs": case.programs,
        "shared_bytes": told["shared_bytes"],
        **_resources(_cuobjdump("--dump-resource-usage", cubin)),
        "loop_instructions": _loop_instructions(_cuobjdump("--dump-sass", cubin)) if is_counted else None,
        "async_copies": told["async_copies"],
        "wgmma": bool(told["warpgroup_products"]),
    }


def _resources(dumped: str) -> dict[str, int]:
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", dumped)
    assert found, dumped
    return {"registers": int(found[1]), "stack_bytes": int(found[2]), "local_bytes": int(found[4])}


def _loop_instructions(dumped: str) -> int:
    """Instructions of the first innermost loop with matrix products: in attention, that over unmasked keys. 0: none.

    A warp issues them once per iteration; a multiprocessor issues four per cycle for all its warps.
    """
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", dumped)]
    index = {at: number for number, (at, _) in enumerate(code)}
    jumps = [(index.get(int(found[1], 16), 0), number) for number, (_, text) in enumerate(code)
             if (found := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text))]  # fmt: skip
    loops = [(first, last) for first, last in jumps if first < last]
    for first, last in sorted(loops):
        inner = any(first < begin and end < last and end - begin > 40 for begin, end in loops)
        if not inner and any(re.search(r"MMA\b|MMA\.", text) for _, text in code[first:last]):
            return last - first + 1
    return 0


def _cuobjdump(what: str, cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(patterns: list[str]) -> None:
    for case in (*attention_cases(), *latent_cases(), *elementwise_cases(), *expert_cases(), *recurrent_cases()):
        if patterns and not any(re.search(pattern, case.name) for pattern in patterns):
            continue
        for capability in case.targets:
            if capability == 80 and "float8" in case.name:
                continue  # no such numbers on that processor
            print(json.dumps(build(case, capability)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
