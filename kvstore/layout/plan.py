"""From one KV layout to another: which bytes of which shards make up a block. Pure, and computed once per pair of
layouts.

``plan`` describes, for one rank of a target deployment, the boxes (layers, heads, tokens) of source blocks that it is
made of, and the byte ranges they occupy. It knows neither how bytes travel nor how numbers are encoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstore.layout.layout import ShardedLayout
from mooncake.errors import InvalidRequest
from mooncake.types import KVLayout

BOX_BYTES = 1 << 20  # read into scratch memory at once: it stays in a core's L2 until it is converted
DIRECT_BYTES = 4 << 10  # pieces this long are read straight to their place, even if they are one run at the source


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """What one source block contributes to one target block: some layers, heads and tokens. Indices are local to the
    blocks; block numbers count from the start of the plan's period. A plan is computed once, so boxes compare by
    identity."""

    rank: int  # of the source
    source_block: int
    target_block: int
    source_first: tuple[int, int, int]  # layer, head, token
    target_first: tuple[int, int, int]
    count: tuple[int, int, int]
    reads: tuple[tuple[int, int], ...]  # offset and bytes of each run of the source block, in box order
    is_direct: bool  # read straight to its place in the target block, without scratch memory
    moves: npt.NDArray[np.int64]  # [3, n]: offset in the source block, bytes, offset in the target block
    nbytes: int  # to be read
    has_whole_layers: bool  # of the source block, so that their checksums can be verified

    def shape(self, layout: ShardedLayout) -> KVLayout:
        """The box as a block of its own."""
        return layout.box(*self.count)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the blocks of one target rank are made. It repeats every ``source_period`` source blocks."""

    source: ShardedLayout
    target: ShardedLayout
    target_rank: int
    source_period: int
    target_period: int
    boxes: tuple[Box, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The source ranks that are read from."""
        return tuple(sorted({box.rank for box in self.boxes}))


@lru_cache(maxsize=256)
def plan(source: ShardedLayout, target: ShardedLayout, target_rank: int) -> Plan:
    """If several source ranks store a head, neighbouring target ranks read from different ones.

    Raises InvalidRequest when the two layouts are not of one model.
    """
    same = ("num_layers", "num_kv_heads", "head_dim", "num_kinds")
    if any(getattr(source, name) != getattr(target, name) for name in same):
        raise InvalidRequest("KV of different models: layers, heads and dimensions must agree")
    if not 0 <= target_rank < target.num_ranks:
        raise InvalidRequest(f"rank {target_rank} of {target.num_ranks}")
    tokens = math.lcm(source.block_tokens, target.block_tokens)
    boxes = [
        box
        for rank, heads in _sources(source, target, target_rank)
        for span in _spans(source.block_tokens, target.block_tokens)
        for box in _boxes(source, target, target_rank, rank, heads, span)
    ]
    boxes.sort(key=lambda box: (box.target_block, box.source_block, box.target_first, box.rank))
    return Plan(source, target, target_rank, tokens // source.block_tokens, tokens // target.block_tokens, tuple(boxes))


def _sources(source: ShardedLayout, target: ShardedLayout, target_rank: int) -> Iterator[tuple[int, range]]:
    """The source ranks to read from, with the heads to take from each: every head exactly once per wanted layer."""
    wanted = target.heads(target_rank)
    degree = source.tensor_parallel
    for stage in range(len(source.stages)):
        for heads, replicas in _owners(source):
            taken = range(max(wanted.start, heads.start), min(wanted.stop, heads.stop))
            if taken:
                yield stage * degree + replicas[target_rank % len(replicas)], taken


def _owners(layout: ShardedLayout) -> list[tuple[range, list[int]]]:
    """Each distinct range of heads with the tensor ranks that store it."""
    owners: dict[range, list[int]] = {}
    for rank in range(layout.tensor_parallel):
        owners.setdefault(layout.heads(rank), []).append(rank)
    return list(owners.items())


def _spans(source_tokens: int, target_tokens: int) -> Iterator[tuple[int, int]]:
    """(first token, number) of each stretch of one period that is within one block on both sides."""
    period = math.lcm(source_tokens, target_tokens)
    cuts = sorted({*range(0, period, source_tokens), *range(0, period, target_tokens), period})
    yield from ((first, last - first) for first, last in pairwise(cuts))


def _boxes(
    source: ShardedLayout, target: ShardedLayout, target_rank: int, rank: int, heads: range, span: tuple[int, int]
) -> Iterator[Box]:
    """The boxes for some heads of one source rank and one stretch of tokens, none much larger than BOX_BYTES."""
    have, wanted = source.layers(rank), target.layers(target_rank)
    shared = range(max(have.start, wanted.start), min(have.stop, wanted.stop))
    first_token, num_tokens = span
    step = max(1, BOX_BYTES // source.box(1, len(heads), num_tokens).block_bytes)
    for first in shared[::step]:
        count = (min(step, shared.stop - first), len(heads), num_tokens)
        at_source = (first - have.start, heads.start - source.heads(rank).start, first_token % source.block_tokens)
        at_target = (
            first - wanted.start,
            heads.start - target.heads(target_rank).start,
            first_token % target.block_tokens,
        )
        source_format = source.block(rank)
        reads = tuple(_merge(_cells(source_format, at_source, count)))
        moves = _gather(reads)
        is_direct = False
        if source.dtype == target.dtype:
            places = _cells(target.block(target_rank), at_target, count)
            in_place = _pair(_cells(source_format, at_source, count), places)
            is_direct = len(in_place) == len(reads) or min(nbytes for _, nbytes, _ in in_place) >= DIRECT_BYTES
            moves = in_place if is_direct else moves
        yield Box(
            rank,
            first_token // source.block_tokens,
            first_token // target.block_tokens,
            at_source,
            at_target,
            count,
            reads,
            is_direct,
            np.array(moves, np.int64).T.copy(),
            sum(nbytes for _, nbytes in reads),
            has_whole_layers=count[1:] == (source_format.num_kv_heads, source_format.block_tokens),
        )


def _cells(block: KVLayout, first: tuple[int, int, int], count: tuple[int, int, int]) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of a box's part of each head of each layer, in the order in which a block of exactly the box's
    size would store them."""
    row, layer_bytes = block.row_bytes, block.layer_bytes
    for layer in range(first[0], first[0] + count[0]):
        for kind in range(block.num_kinds):
            for head in range(first[1], first[1] + count[1]):
                token = (kind * block.num_kv_heads + head) * block.block_tokens + first[2]
                yield layer * layer_bytes + token * row, count[2] * row


def _merge(cells: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join adjacent ranges."""
    merged: list[tuple[int, int]] = []
    for offset, nbytes in cells:
        if merged and sum(merged[-1]) == offset:
            offset, nbytes = merged[-1][0], merged.pop()[1] + nbytes
        merged.append((offset, nbytes))
    return merged


def _gather(reads: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pack the ranges one after another."""
    moves: list[tuple[int, int, int]] = []
    place = 0
    for offset, nbytes in reads:
        moves.append((offset, nbytes, place))
        place += nbytes
    return moves


def _pair(sources: Iterable[tuple[int, int]], places: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Join ranges that are adjacent on both sides."""
    moves: list[tuple[int, int, int]] = []
    for (offset, nbytes), (place, _) in zip(sources, places, strict=True):
        if moves:
            first, size, there = moves[-1]
            if (first + size, there + size) == (offset, place):
                moves[-1] = (first, size + nbytes, there)
                continue
        moves.append((offset, nbytes, place))
    return moves
