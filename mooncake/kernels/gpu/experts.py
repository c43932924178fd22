"""Host side of ``triton_experts``: the sequence of launches, and their parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from mooncake.kernels.gpu import triton_experts as kernels
from mooncake.kernels.gpu.triton_launch import INTERPRETED
from mooncake.kernels.reference import Bounds, Gate

FEW_ROWS = 16  # the smallest tensor core tile
MANY_ROWS, MANY_PAIRS = 64, 8  # for warpgroups; with more pairs per expert, small tiles would fill repeatedly
MOST_ROWS, MOST_PAIRS = 128, 192  # with fewer pairs, too much of such tiles would be empty
SORTED_AT_ONCE = 2048
ADDED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile of a product: rows of one expert, columns, and inputs per iteration."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    per_processor: int


def tiles_of(pairs: int, num_experts: int, wide: bool, is_gated: bool) -> Tiles:
    """Tiles for this many pairs. ``wide``: float32, which has no tensor cores; ``is_gated``: for two products at once.

    With few rows per expert only reading its weights matters: each program has 64 KB of gates and ups in flight, and
    narrow columns give a step of one token more programs than there are multiprocessors. With many rows L2 matters: a
    tile of 128 rows and as many columns multiplies 64 times for each byte it gets from there.
    """
    if wide:
        return Tiles(FEW_ROWS, 32, 64, num_warps=4, num_stages=2, per_processor=2)
    columns = 64 if is_gated else 128
    if pairs > MOST_PAIRS * num_experts:
        return Tiles(MOST_ROWS, columns, 64, num_warps=8, num_stages=4, per_processor=1)
    if pairs > MANY_PAIRS * num_experts:
        return Tiles(MANY_ROWS, columns, 64, num_warps=4, num_stages=4, per_processor=2)
    columns, num_stages = (32, 5) if pairs <= num_experts else (64, 3)
    return Tiles(FEW_ROWS, columns, 128, 4, num_stages, per_processor=2)


class GroupedExperts:
    """``reference.Experts`` on a GPU; weights are ``[E, 2 * I, hidden]``, or with "relu2" ``[E, I, hidden]``, and
    ``[E, hidden, I]``, contiguous on it."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        bounds: Bounds | None = None,
        first: int = 0,
        gate: Gate = "silu",
    ) -> None:
        assert gate != "relu2" or gate_up_bias is None, "no family has such experts with biases"
        self._gate_up, self._down = gate_up, down
        self._gate_up_bias, self._down_bias = gate_up_bias, down_bias
        self._bounds, self._first, self._gate = bounds, first, gate
        self._wide = down.dtype is torch.float32

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(hidden)
        if not len(hidden):
            return output
        order, ends = self._sorted(chosen)
        parts = self._through_down(self._through_gate(hidden, chosen, order, ends), shares, order, ends)
        width = hidden.shape[1]
        block = min(triton.next_power_of_2(width), ADDED_AT_ONCE)
        kernels.add_parts[(len(hidden), triton.cdiv(width, block))](
            parts, output, width, PER_TOKEN=chosen.shape[1], BLOCK=block, num_warps=4
        )
        return output

    def _sorted(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs sorted by expert, and where those of each expert end; both int32."""
        pairs, count = chosen.numel(), len(self._down)
        order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
        ends = torch.empty(count, dtype=torch.int32, device=chosen.device)
        kernels.sort_pairs[(count,)](
            chosen.contiguous(), order, ends, pairs, self._first, BLOCK=SORTED_AT_ONCE, num_warps=8
        )
        return order, ends

    def _through_gate(
        self, hidden: torch.Tensor, chosen: torch.Tensor, order: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        count, width, inner = self._down.shape
        gated = torch.empty((len(order), inner), dtype=hidden.dtype, device=hidden.device)
        tiles = tiles_of(len(order), count, self._wide, is_gated=True)
        kernels.gate_and_up[_grid(tiles, len(order), count, inner)](
            hidden,
            self._gate_up,
            gated if self._gate_up_bias is None else self._gate_up_bias,
            gated,
            order,
            ends,
            hidden.stride(0),
            width,
            inner,
            self._bounds.alpha if self._bounds else 0.0,
            self._bounds.limit if self._bounds else 0.0,
            PER_TOKEN=chosen.shape[1],
            HAS_BIAS=self._gate_up_bias is not None,
            BOUNDED=self._bounds is not None,
            IS_GELU=self._gate == "gelu_tanh",
            IS_RELU2=self._gate == "relu2",
            **self._settings(tiles),
        )
        return gated

    def _through_down(
        self, gated: torch.Tensor, shares: torch.Tensor, order: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        count, width, inner = self._down.shape
        # zeros: the pairs of other ranks' experts are in no tile
        parts = torch.zeros((len(order), width), dtype=gated.dtype, device=gated.device)
        tiles = tiles_of(len(order), count, self._wide, is_gated=False)
        kernels.down[_grid(tiles, len(order), count, width)](
            gated,
            self._down,
            gated if self._down_bias is None else self._down_bias,
            shares.contiguous(),
            parts,
            order,
            ends,
            inner,
            width,
            HAS_BIAS=self._down_bias is not None,
            **self._settings(tiles),
        )
        return parts

    def _settings(self, tiles: Tiles) -> dict[str, int | bool]:
        count = len(self._down)
        return {
            **{"WIDE": self._wide or INTERPRETED, "NUM_EXPERTS": count, "EXPERTS_PAD": triton.next_power_of_2(count)},
            **{"ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth},
            **{"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
        }


def _grid(tiles: Tiles, pairs: int, num_experts: int, columns: int) -> tuple[int, int]:
    """As many tiles as there can be; neighbouring programs have the same rows."""
    return triton.cdiv(columns, tiles.columns), min(pairs, pairs // tiles.rows + num_experts)
