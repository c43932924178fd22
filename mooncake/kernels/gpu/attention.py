"""Host side of attention on a GPU: a plan in device memory, and the launches of its pieces and their merge."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import triton

from mooncake.kernels.gpu import triton_attention as kernels
from mooncake.kernels.gpu.attention_plan import PIECE_FIELDS, AttentionPlan
from mooncake.kernels.gpu.triton_coded_attention import attend_codes
from mooncake.kernels.gpu.triton_launch import INTERPRETED

DECODE_ROWS = 16  # rows of a tile: the smallest a matrix unit takes
SHARED_ROWS = 64  # if a few sequences share a prefix
PREFILL_ROWS = 128
MERGES_PER_PROCESSOR = 32  # as many as fit: a merge uses one warp, which mostly waits for memory
MERGED_PARTS = 8  # parts of a token that a merge loads at a time
ALIGNED = 4  # int32 words: Triton compiles again for pointers that are not multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """How one attention kernel is compiled and started: ``keys`` per loop iteration, ``per_processor`` programs on
    each."""

    tile_rows: int
    keys: int
    num_warps: int
    num_stages: int
    per_processor: int


def attention_launch(tile_rows: int, head_dim: int, block_tokens: int, wide: bool, scaled: bool) -> Launch:
    """The launch for tiles of this many rows. ``wide`` multiplies in float32, for exactness rather than speed;
    ``scaled`` pages hold codes and scales.

    The pipeline is deep because a page's address must itself be loaded: of five stages two hold keys and values in
    flight. Tiles of few rows are bound by memory, and two programs share a multiprocessor; tiles of many rows are bound
    by computation and need all its registers. With pages of 64, or multiples of 128, joining two iterations into one
    needs a quarter fewer instructions per key. Heads beyond 128 leave room for half of everything, those beyond 256
    for half of that.
    """
    if wide:
        return Launch(tile_rows, keys=16, num_warps=4, num_stages=2, per_processor=2)
    if tile_rows == PREFILL_ROWS and not scaled and (block_tokens == 64 or block_tokens % 128 == 0):
        return Launch(tile_rows, keys=128, num_warps=8, num_stages=4, per_processor=1)
    if tile_rows >= most_rows(head_dim, scaled):
        keys, stages = 64 if head_dim <= 256 else 32, 5 if head_dim <= 128 else 2
        return Launch(tile_rows, keys, num_warps=8, num_stages=stages, per_processor=1)
    keys, stages = 64 if head_dim <= 128 else 32 if head_dim <= 256 else 16, 5 if tile_rows < SHARED_ROWS else 4
    return Launch(tile_rows, keys, num_warps=4, num_stages=stages, per_processor=2)  # with 4 stages, two programs fit


def most_rows(head_dim: int, scaled: bool) -> int:
    """Rows of a tile if there are enough queries. More would not fit into registers."""
    if head_dim <= 128:
        return PREFILL_ROWS
    return SHARED_ROWS // 2 if scaled else SHARED_ROWS


def reads_pairs(tile_rows: int, head_dim: int, pages: torch.dtype) -> bool:
    """Whether quantised pages are read two codes at a time: for tiles of few rows, if half a head fills a matrix
    unit."""
    return pages is torch.int8 and tile_rows == DECODE_ROWS and head_dim >= 2 * DECODE_ROWS and head_dim % 2 == 0


@dataclass(frozen=True, slots=True)
class Packing:
    """How query heads become rows of tiles: ``parts`` programs have ``group`` heads each, in ``group_pad`` rows per
    token."""

    parts: int
    group: int

    @property
    def group_pad(self) -> int:
        return int(triton.next_power_of_2(self.group))

    def tile_tokens(self, rows: int) -> int:
        return max(rows // self.group_pad, 1)


def pack_heads(num_heads: int, num_kv_heads: int) -> Packing:
    """The query heads of one KV head together."""
    return Packing(num_kv_heads, num_heads // num_kv_heads)


def fits_a_tile(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether a multiprocessor holds a tile of one token, which has all query heads of a KV head."""
    return head_dim <= 128 or pack_heads(num_heads, num_kv_heads).group_pad <= SHARED_ROWS


@dataclass(frozen=True, slots=True)
class DevicePass:
    tile_tokens: int
    pieces: torch.Tensor  # int32 [capacity, PIECE_FIELDS]
    num_pieces: torch.Tensor  # int32 [1]


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """An ``AttentionPlan`` in device memory, with buffers for partial results. Reused by every layer of a step."""

    numbers: torch.Tensor  # int32: all fields below except the partial results, so that one copy transfers them
    passes: tuple[DevicePass, ...]
    merge_tokens: torch.Tensor
    merge_starts: torch.Tensor
    merge_rows: torch.Tensor
    num_merged: torch.Tensor  # int32 [1]
    partial: torch.Tensor  # float32 [rows, Hq, D]
    partial_lse: torch.Tensor  # float32 [rows, Hq]

    @classmethod
    def empty(
        cls,
        passes: Sequence[tuple[int, int]],
        num_rows: int,
        num_merged: int,
        num_merged_rows: int,
        num_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> DevicePlan:
        """Buffers for plans up to these sizes, for a captured graph to read from. ``passes`` are (tokens per tile,
        pieces)."""
        sizes = [size for _, pieces in passes for size in (max(pieces, 1) * PIECE_FIELDS, 1)]
        sizes += [max(num_merged, 1), num_merged + 1, max(num_merged_rows, 1), 1]
        starts = list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))
        numbers = torch.zeros(starts.pop(), dtype=torch.int32, device=device)
        parts = iter([numbers[start : start + size] for start, size in zip(starts, sizes, strict=True)])
        return cls(
            numbers,
            passes=tuple(
                DevicePass(tile_tokens, pieces=next(parts).view(-1, PIECE_FIELDS), num_pieces=next(parts))
                for tile_tokens, _ in passes
            ),
            merge_tokens=next(parts),
            merge_starts=next(parts),
            merge_rows=next(parts),
            num_merged=next(parts),
            partial=torch.empty((max(num_rows, 1), num_heads, head_dim), dtype=torch.float32, device=device),
            partial_lse=torch.empty((max(num_rows, 1), num_heads), dtype=torch.float32, device=device),
        )

    def fits(self, plan: AttentionPlan) -> bool:
        return (
            [one.tile_tokens for one in plan.passes] == [one.tile_tokens for one in self.passes]
            and all(len(own.pieces) <= len(mine.pieces) for own, mine in zip(plan.passes, self.passes, strict=True))
            and plan.num_rows <= self.partial.shape[0]
            and len(plan.merge_tokens) <= self.merge_tokens.shape[0]
            and len(plan.merge_rows) <= self.merge_rows.shape[0]
        )

    def load(self, plan: AttentionPlan) -> None:
        """Copy ``plan`` into these buffers, in the order of the current stream; the host does not wait.

        It would wait for more than 64 KB of unpinned memory. Torch reuses pinned memory only once its copies are done.
        """
        assert self.fits(plan)
        host = torch.empty(self.numbers.shape, dtype=torch.int32, pin_memory=self.numbers.is_cuda)
        words = host.numpy()
        for target, source in (
            *((mine.pieces, own.pieces) for mine, own in zip(self.passes, plan.passes, strict=True)),
            *(
                (mine.num_pieces, np.array([len(own.pieces)], np.int32))
                for mine, own in zip(self.passes, plan.passes, strict=True)
            ),
            (self.merge_tokens, plan.merge_tokens),
            (self.merge_starts, plan.merge_starts),
            (self.merge_rows, plan.merge_rows),
            (self.num_merged, np.array([len(plan.merge_tokens)], np.int32)),
        ):
            start = target.storage_offset()
            words[start : start + source.size] = source.reshape(-1)
        self.numbers.copy_(host, non_blocking=True)


def run_plan(
    plan: DevicePlan,
    num_processors: int,
    query: torch.Tensor,
    cache_layer: torch.Tensor,
    scales: torch.Tensor | None,
    block_tables: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    choose: Callable[[int, int, int, bool, bool], Launch],
) -> torch.Tensor:
    """Attend as ``plan`` says: ``[T, Hq, D]``; the other arguments as in ``GpuKernels.paged_attention``."""
    assert alibi_slopes is None or len(plan.passes) == 1, (
        "tiles of a shared prefix do not know their queries' positions"
    )
    tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_tokens = cache_layer.shape[2:4]
    packing = pack_heads(num_heads, num_kv_heads)
    wide = INTERPRETED or query.dtype is torch.float32
    heads = {"HEAD_DIM": head_dim, "HEAD_PAD": triton.next_power_of_2(head_dim)}
    output = torch.empty((tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    of_heads = [plan.partial_lse if numbers is None else numbers for numbers in (sinks, alibi_slopes)]
    results = (output, plan.partial, plan.partial_lse, *of_heads)
    for one in plan.passes:
        launch = choose(one.tile_tokens * packing.group_pad, head_dim, block_tokens, wide, scales is not None)
        grid = (num_processors * launch.per_processor,)
        places = (block_tables, one.pieces, one.num_pieces, *results, query.stride(0))
        numbers = (block_tables.stride(0), scale, window, softcap)
        shape = {
            **{"NUM_KV_HEADS": num_kv_heads, "GROUP": packing.group, "GROUP_PAD": packing.group_pad, **heads},
            **{"BLOCK_TOKENS": block_tokens, "TILE_TOKENS": one.tile_tokens, "KEYS": launch.keys},
            **{
                "WINDOWED": (window > 0) - (window < 0),
                "CAPPED": softcap > 0,
                "SLOPED": alibi_slopes is not None,
                "SINKS": sinks is not None,
                "WIDE": wide,
            },
            **{"num_warps": launch.num_warps, "num_stages": launch.num_stages},
        }
        if scales is not None and reads_pairs(launch.tile_rows, head_dim, cache_layer.dtype):
            pairs, strides, inside = _pairs(cache_layer, scales)
            attend_codes[grid](query, pairs, scales, *places, *strides, *numbers, **shape, **inside)
        else:
            coding = plan.partial_lse if scales is None else scales
            strides = (*cache_layer.stride()[:4], *((0, 0, 0, 0) if scales is None else scales.stride()))
            inside = {"SCALED": scales is not None, "ROW_UNIT": math.gcd(cache_layer.stride(3), 16)}
            kernels.attend[grid](query, cache_layer, coding, *places, *strides, *numbers, **shape, **inside)
    merge_parts(plan, num_processors, output, sinks)
    return output


def merge_parts(plan: DevicePlan, num_processors: int, output: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
    """Merge tokens that were cut into several pieces, into ``output`` ``[T, Hq, D]``."""
    tokens, num_heads, head_dim = output.shape
    merges = min(num_processors * MERGES_PER_PROCESSOR, tokens * num_heads)
    kernels.merge[(merges,)](
        plan.partial,
        plan.partial_lse,
        plan.merge_tokens,
        plan.merge_starts,
        plan.merge_rows,
        plan.num_merged,
        plan.partial_lse if sinks is None else sinks,
        output,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        SINKS=sinks is not None,
        PARTS=MERGED_PARTS,
        num_warps=merge_warps(head_dim),
    )


def merge_warps(head_dim: int) -> int:
    """One warp up to heads of 256: its registers hold the parts that it loads at a time."""
    return 1 if head_dim <= 256 else 4


def _pairs(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], dict[str, int]]:
    """A quantised layer as 16-bit numbers of two codes each; its strides between blocks and between heads, and those of
    its scales; and the strides inside a block, which are compiled in."""
    pairs = codes.view(torch.int16)
    inside = {"KV_STRIDE": pairs.stride(1), "ROW_STRIDE": pairs.stride(3)}
    inside |= {"SCALE_KV_STRIDE": scales.stride(1), "SCALE_ROW_STRIDE": scales.stride(3)}
    return pairs, (pairs.stride(0), pairs.stride(2), scales.stride(0), scales.stride(2)), inside
