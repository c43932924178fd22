"""Linear layers with int8 weights on a GPU, by ``triton_products``: half of bfloat16's bytes to hold and to read."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from mooncake.kernels import reference
from mooncake.kernels.gpu import triton_elementwise as elementwise
from mooncake.kernels.gpu import triton_products as products
from mooncake.kernels.gpu.triton_launch import INTERPRETED, row_warps
from mooncake.precision import Coding

STRIP = 8  # tiles of tokens whose programs run at about the same time


class Tiles(NamedTuple):
    """How ``int8_product`` is launched."""

    rows: int  # tokens
    columns: int  # outputs
    depth: int  # inputs at a time
    warps: int
    stages: int


def product_tiles(tokens: int, outputs: int, itemsize: int, num_processors: int) -> Tiles:
    """``itemsize``: bytes of an activation. A decode step waits for weights, so as many multiprocessors as there are
    read them, each 16 to 32 KiB ahead."""
    rows = 128 if tokens > 64 else 64 if tokens > 32 else 32
    columns = 128
    while columns > 32 and tokens <= rows and triton.cdiv(outputs, columns) < num_processors:
        columns //= 2
    depth = (256 if rows == 32 and columns < 128 else 128) // (2 if itemsize == 4 else 1)
    if rows == columns == 128:
        return Tiles(rows, columns, depth, 8, 3 if itemsize == 1 else 2)
    return Tiles(rows, columns, depth, 4, 2 if rows == 128 and itemsize > 1 else 4 if columns == 32 else 3)


class Int8Linear:
    """int8 weights with a scale per output; activations are not quantised."""

    coding: Coding = "int8"

    def __init__(self, weight: torch.Tensor | reference.Codes, bias: torch.Tensor | None, num_processors: int) -> None:
        self.codes, self.scales, self._block = reference.coded(weight, self.coding)
        self.bias, self._dtype, self._num_processors = bias, weight.dtype, num_processors

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weights, ``[T, in]``, for int64 ``indices`` ``[T]``."""
        return (self.codes[indices] * self.scales[indices][:, None]).to(self._dtype)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._product(hidden if hidden.stride(-1) == 1 else hidden.contiguous(), None, hidden.dtype)

    def _product(self, rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        (tokens, inputs), outputs = rows.shape, self.codes.shape[0]
        output = torch.empty((tokens, outputs), dtype=dtype, device=rows.device)
        if not tokens:
            return output
        tiles = product_tiles(tokens, outputs, rows.element_size(), self._num_processors)
        products.int8_product[(triton.cdiv(tokens, tiles.rows) * triton.cdiv(outputs, tiles.columns),)](
            rows,
            self.scales if scales is None else scales,
            self.codes,
            self.scales,
            self.scales if self.bias is None else self.bias,
            output,
            rows.stride(0),
            tokens,
            outputs,
            inputs,
            HAS_BIAS=self.bias is not None,
            CODED=scales is not None,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            DEPTH=tiles.depth,
            GROUP_ROWS=STRIP,
            WIDE=INTERPRETED,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return output


class W8A8Linear(Int8Linear):
    """Activations are quantised too, per token.

    The Hadamard transform of ``reference.W8A8Linear`` is a small matrix product here.
    """

    coding = "w8a8"

    def __init__(self, weight: torch.Tensor | reference.Codes, bias: torch.Tensor | None, num_processors: int) -> None:
        super().__init__(weight, bias, num_processors)
        self._mixing = reference.hadamard(torch.eye(self._block)).to(self.codes.device, weight.dtype)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """As of ``Int8Linear``."""
        codes = self.codes[indices] if self._block == 1 else reference.hadamard(self.codes[indices])
        return (codes * self.scales[indices][:, None]).to(self._dtype)

    def mixed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Activations in the form in which they are quantised, ``[T, in]``."""
        return hidden if self._block == 1 else (hidden.reshape(len(hidden), -1, self._block) @ self._mixing).flatten(1)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.mixed(hidden)
        tokens, inputs = mixed.shape
        codes = torch.empty((tokens, inputs), dtype=torch.int8, device=hidden.device)
        scales = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        if tokens:
            elementwise.quantise_rows[(tokens,)](
                mixed,
                codes,
                scales,
                inputs,
                mixed.stride(0),
                WIDTH_PAD=triton.next_power_of_2(inputs),
                num_warps=row_warps(inputs),
            )
        return self._product(codes, scales, hidden.dtype)
