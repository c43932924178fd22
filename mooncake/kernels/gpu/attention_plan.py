"""How one step's attention is cut into pieces of equal work for a GPU: pure arithmetic over lengths on the host.

A *tile* is a run of query tokens that read the same keys. A *piece* is a tile and part of its context, small enough
that all multiprocessors finish together (split-K; Flash-Decoding, FlashInfer's plan). A tile's pieces are merged
afterwards by their log-sum-exps. Because merging is associative, a prefix shared by several sequences is one more tile,
whose rows come from all of them (cascade attention, Hydragen). A plan is made once per step and serves every layer.
This module knows neither tensors nor devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mooncake.kernels.windows import first_seen

Int32s = npt.NDArray[np.int32]

PIECE_FIELDS = 8
"""Block table row, first query token, query tokens, position of the first query, first key, end of keys, first row of
its partial results, unused."""

NO_ROW = -1  # the only piece of a tile writes the output itself
BEHIND_ALL_KEYS = 1 << 30  # the position of queries that see all of a shared prefix

PIECES_PER_PROCESSOR = 4
"""Pieces per multiprocessor. More pieces balance better but cost more merging."""

MIN_PIECE_TOKENS = 256
"""With fewer keys, a piece costs more to start and to merge than to read."""

CRUMB = 8
"""A remainder of at most 1/CRUMB of a piece is not a piece of its own."""

PIECE_START = 192
"""Cost of a piece of a shared prefix besides its keys, in keys: it waits for its first pages, and as many partial
results as its tile has rows are written and merged. An estimate: in 4 µs a tile of 128 rows reads this many keys at 430
TFLOP/s."""

MIN_SHARED_TOKENS = 512
"""A cascade must save reading at least this many shared keys, in tokens, to pay for its second pass."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Pieces of tiles of up to ``tile_tokens`` query tokens. One launch, because the tile size is compiled in."""

    tile_tokens: int
    pieces: Int32s  # [pieces, PIECE_FIELDS]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The last pass reads what each sequence has on its own; a pass before it, if any, reads what is shared."""

    passes: tuple[Pass, ...]
    num_rows: int  # of partial results
    merge_tokens: Int32s  # [tokens to merge]
    merge_starts: Int32s  # [tokens to merge + 1], into merge_rows
    merge_rows: Int32s  # rows of partial results

    @property
    def pieces(self) -> Int32s:
        """Of all passes."""
        return np.concatenate([one.pieces for one in self.passes])


@dataclass(frozen=True, slots=True)
class _Tile:
    table: int
    first: int
    count: int
    position: int
    begin: int  # first key
    end: int


def plan_attention(
    query_starts: Int32s,
    context_lens: Int32s,
    *,
    block_tokens: int,
    num_kv_heads: int,
    tile_tokens: int,
    num_processors: int,
    window: int = 0,
    block_tables: Int32s | None = None,
    shared_tile_tokens: Sequence[int] = (),
    shared_programs: Sequence[int] = (),
    piece_tokens: int = 0,
) -> AttentionPlan:
    """Cut a ragged batch (shapes as in ``reference``) into pieces of nearly equal numbers of keys.

    With ``block_tables`` ``[B, M]``, leading blocks shared by neighbouring one-token sequences are read once for all of
    them. Such tiles have the first of the sizes ``shared_tile_tokens`` that holds the largest group, otherwise the last
    one; without sizes, ``tile_tokens``. ``shared_programs`` gives, per size, how many programs a processor runs at once
    (default 1). ``piece_tokens`` > 0 fixes the split, so that a sequence's result does not depend on the rest of the
    batch; otherwise it follows from the batch. ``window`` is as in ``reference.paged_attention``; it excludes sharing.
    """
    starts, contexts = query_starts.tolist(), context_lens.tolist()
    groups: list[_Tile] = []
    own_begin = [0] * len(contexts)
    if block_tables is not None and not window:
        groups, own_begin = _shared_groups(starts, contexts, block_tables, block_tokens)
    own = [
        _Tile(b, first, count, contexts[b] - (end - first), begin, 0)
        for b, ((start, end), begin) in enumerate(zip(pairwise(starts), own_begin, strict=True))
        for first, count in _runs(start, end, contexts[b] - end, tile_tokens, window)
    ]
    parts = [(tile_tokens, [_with_keys(tile, window, block_tokens) for tile in own])]
    programs = num_processors
    if groups:
        sizes = shared_tile_tokens or (tile_tokens,)
        largest = max(group.count for group in groups)
        size = next((size for size in sizes if size >= largest), sizes[-1])
        programs *= dict(zip(sizes, shared_programs, strict=False)).get(size, 1)
        parts.insert(0, (size, [tile for group in groups for tile in _tiles(group, size)]))
    splits = [_piece_tokens(tiles, block_tokens, num_kv_heads, num_processors) for _, tiles in parts]
    if groups:
        splits[0] = _shared_piece_tokens(parts[0][1], block_tokens, num_kv_heads, programs)
    return _cut([(size, tiles, piece_tokens or split) for (size, tiles), split in zip(parts, splits, strict=True)])


def _runs(start: int, end: int, offset: int, tile_tokens: int, window: int) -> Iterator[tuple[int, int]]:
    """Query tokens ``start … end`` in runs of ``(first, count)``. A run ends where a chunk does (``window`` < 0), so
    that all its queries see the same first key. Token ``t`` is at position ``offset + t``."""
    first = start
    while first < end:
        count = min(tile_tokens, end - first)
        if window < 0:
            count = min(count, -window - (offset + first) % -window)
        yield first, count
        first += count


def _tiles(group: _Tile, size: int) -> Iterator[_Tile]:
    for offset in range(0, group.count, size):
        yield replace(group, first=group.first + offset, count=min(size, group.count - offset))


def _with_keys(tile: _Tile, window: int, block_tokens: int) -> _Tile:
    """The keys that the tile's queries see: from the block with the first query's first one, to the last query."""
    begin = tile.begin
    if window:
        begin = max(begin, first_seen(tile.position, window) // block_tokens * block_tokens)
    return _Tile(tile.table, tile.first, tile.count, tile.position, begin, tile.position + tile.count)


def _piece_tokens(tiles: list[_Tile], block_tokens: int, num_kv_heads: int, num_processors: int) -> int:
    keys = sum(tile.end - tile.begin for tile in tiles) * num_kv_heads
    equal = -(-keys // (num_processors * PIECES_PER_PROCESSOR))
    return -(-max(equal, MIN_PIECE_TOKENS) // block_tokens) * block_tokens


def _shared_piece_tokens(tiles: list[_Tile], block_tokens: int, num_kv_heads: int, num_programs: int) -> int:
    """The split that finishes first among those that give each program one piece, two pieces, and so on. Such tiles are
    few and compute-bound: if one program gets one piece more, the others wait for it."""
    keys = sum(tile.end - tile.begin for tile in tiles) * num_kv_heads
    longest = max(tile.end - tile.begin for tile in tiles)
    splits: list[int] = []
    for rounds in range(1, PIECES_PER_PROCESSOR + 1):
        pieces = -(-longest // max(-(-keys // (num_programs * rounds)), MIN_PIECE_TOKENS))
        while True:
            splits.append(-(-longest // (pieces * block_tokens)) * block_tokens)
            works = sum(len(_bounds(tile, splits[-1])) - 1 for tile in tiles) * num_kv_heads
            if pieces == 1 or works <= num_programs * rounds:
                break
            pieces = max(min(pieces - 1, pieces * num_programs * rounds // works), 1)
    return min(splits, key=lambda split: _ends_after(tiles, split, num_kv_heads, num_programs))


def _ends_after(tiles: list[_Tile], split: int, num_kv_heads: int, num_programs: int) -> int:
    """Keys read by the program that gets the longest piece of each round, in the order in which the kernel takes
    pieces."""
    lengths = sorted((end - begin for tile in tiles for begin, end in pairwise(_bounds(tile, split))), reverse=True)
    rounds = range(0, len(lengths) * num_kv_heads, num_programs)
    return sum(lengths[work // num_kv_heads] + PIECE_START for work in rounds)


def _cut(parts: list[tuple[int, list[_Tile], int]]) -> AttentionPlan:
    """Cut passes, given as tile size, tiles, and keys per piece, and determine the order in which tokens are merged.

    The longest pieces go first, so that the last ones to finish are short; of equally long ones, those that read the
    same keys are adjacent, so that they find them in the GPU's cache.
    """
    num_tiles: dict[int, int] = {}  # tiles that contain each query token
    for _, tiles, _ in parts:
        for tile in tiles:
            for token in range(tile.first, tile.first + tile.count):
                num_tiles[token] = num_tiles.get(token, 0) + 1
    passes: list[Pass] = []
    rows: dict[int, list[int]] = {}
    num_rows = 0
    for size, tiles, split in parts:
        pieces: list[tuple[int, ...]] = []
        for tile in tiles:
            bounds = _bounds(tile, split)
            alone = len(bounds) == 2 and num_tiles[tile.first] == 1
            for begin, end in pairwise(bounds):
                row = NO_ROW if alone else num_rows
                pieces.append((tile.table, tile.first, tile.count, tile.position, begin, end, row, 0))
                if alone:
                    continue
                for offset in range(tile.count):
                    rows.setdefault(tile.first + offset, []).append(num_rows + offset)
                num_rows += tile.count
        pieces.sort(key=lambda piece: (piece[4] - piece[5], piece[0], piece[4], piece))
        passes.append(Pass(size, np.array(pieces, dtype=np.int32).reshape(-1, PIECE_FIELDS)))
    merged = sorted(rows)
    return AttentionPlan(
        tuple(passes),
        num_rows=num_rows,
        merge_tokens=np.array(merged, dtype=np.int32),
        merge_starts=np.cumsum([0, *(len(rows[token]) for token in merged)], dtype=np.int32),
        merge_rows=np.array([row for token in merged for row in rows[token]], dtype=np.int32),
    )


def _bounds(tile: _Tile, split: int) -> list[int]:
    """Where its pieces begin and the last one ends. A short remainder joins the piece before it: alone it would cost a
    start and a merge, and would be taken when all others have finished. Depends only on the tile and the split."""
    bounds = [*range(tile.begin, tile.end, split), tile.end]
    if len(bounds) > 2 and bounds[-1] - bounds[-2] <= split // CRUMB:
        del bounds[-2]
    return bounds


def _shared_groups(
    starts: list[int], contexts: list[int], block_tables: Int32s, block_tokens: int
) -> tuple[list[_Tile], list[int]]:
    """Tiles of any size over shared prefixes, and for every sequence the first key it reads on its own.

    Only neighbours in the batch are grouped, since a tile's rows are consecutive; the caller must place siblings
    together. Prefixes may nest: a group shares some blocks and parts of it share more, to any depth.
    """
    groups: list[_Tile] = []
    own_begin = [0] * len(contexts)
    # The block with the step's own token differs between sequences, so it is never shared.
    full_blocks = [(context - 1) // block_tokens for context in contexts]

    def descend(first: int, end: int, depth: int) -> None:
        begin = first
        while begin < end:
            stop = _run_end(begin, end, depth)
            if stop - begin > 1:
                deep = _common_depth(begin, stop, depth)
                if (stop - begin - 1) * (deep - depth) * block_tokens >= MIN_SHARED_TOKENS:
                    span = (depth * block_tokens, deep * block_tokens)
                    groups.append(_Tile(begin, starts[begin], stop - begin, BEHIND_ALL_KEYS, *span))
                    own_begin[begin:stop] = [span[1]] * (stop - begin)
                    descend(begin, stop, deep)
            begin = stop

    def one_token(b: int) -> bool:
        return starts[b + 1] - starts[b] == 1

    def _run_end(begin: int, end: int, depth: int) -> int:
        stop = begin + 1
        if not one_token(begin) or full_blocks[begin] <= depth:
            return stop
        while (
            stop < end
            and one_token(stop)
            and full_blocks[stop] > depth
            and block_tables[stop, depth] == block_tables[begin, depth]
        ):
            stop += 1
        return stop

    def _common_depth(begin: int, stop: int, depth: int) -> int:
        limit = min(full_blocks[begin:stop])
        same = (block_tables[begin:stop, depth:limit] == block_tables[begin, depth:limit]).all(axis=0)
        return depth + (int(np.argmin(same)) if not same.all() else limit - depth)

    descend(0, len(contexts), 0)
    return groups, own_begin
