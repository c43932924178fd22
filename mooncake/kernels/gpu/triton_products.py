"""Products of activations with int8 weights, in Triton. Sums are int32 where activations are codes too, else float32.

Each program computes the outputs of a tile of weights for a tile of tokens. Weights are the left operand: an H100's
matrix unit takes 64 rows of that side at least, of which a decode step has fewer, and takes it from registers, where
codes become the activations' type.
"""

from __future__ import annotations

import triton.language as tl

from mooncake.kernels.gpu.triton_launch import kernel


@kernel("tokens")
def int8_product(
    rows,  # [T, inputs]: int8 codes if CODED
    row_scales,  # float32 [T], if CODED
    weight,  # int8 [outputs, inputs]
    weight_scales,  # float32 [outputs]
    bias,  # [outputs], if HAS_BIAS
    output,  # [T, outputs]
    row_stride,
    tokens,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    CODED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``(rows @ weight.T) * scales + bias``. Programs traverse the output in strips, so that tiles stay in L2."""
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(tokens, ROWS), tl.cdiv(outputs, COLUMNS)
    strip = program // (GROUP_ROWS * column_tiles)
    strip_rows = tl.minimum(row_tiles - strip * GROUP_ROWS, GROUP_ROWS)
    within = program % (GROUP_ROWS * column_tiles)
    row = (strip * GROUP_ROWS + within % strip_rows) * ROWS + tl.arange(0, ROWS)
    column = (within // strip_rows) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    row_ok, column_ok = row < tokens, column < outputs
    sums = tl.zeros([COLUMNS, ROWS], dtype=tl.int32 if CODED else tl.float32)
    for start in range(0, inputs, DEPTH):
        deep_ok = start + depth < inputs
        codes = tl.load(
            weight + column.to(tl.int64)[:, None] * inputs + (start + depth)[None, :],
            mask=column_ok[:, None] & deep_ok[None, :],
            other=0,
        )
        values = tl.load(
            rows + row.to(tl.int64)[:, None] * row_stride + (start + depth)[None, :],
            mask=row_ok[:, None] & deep_ok[None, :],
            other=0,
        )
        if WIDE:  # the interpreter would multiply int8 as int8, and bfloat16 wrongly
            part = tl.dot(codes.to(tl.float32), tl.trans(values).to(tl.float32), input_precision="ieee")
            sums += part.to(sums.dtype)
        else:
            sums += tl.dot(codes.to(values.dtype), tl.trans(values), input_precision="ieee")
    result = sums.to(tl.float32) * tl.load(weight_scales + column, mask=column_ok, other=0.0)[:, None]
    if CODED:
        result *= tl.load(row_scales + row, mask=row_ok, other=0.0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[:, None]
    result = tl.trans(result)
    at = row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(output + at, result.to(output.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])
