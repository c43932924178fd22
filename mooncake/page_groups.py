"""Groups layers by what they see, so that layers with a sliding window keep only their windows.

A *page* holds ``block_tokens`` tokens of one group's layers, and consists of *rows*, all of the same number of bytes. A
layer takes one row, or several that follow each other, where it keeps more of a token than other layers; what is in
them is the layer's own matter. All groups have the same number of rows, so all pages have the same size and come from
one pool; a block of a sequence is one page per group. A model whose layers all see the same is one group, and its page
is the whole block. Pure arithmetic, after vLLM's hybrid cache manager and Jenga (arXiv 2503.18292). It does not know
which page is whose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from mooncake.model_config import ModelConfig

if TYPE_CHECKING:
    from mooncake.types import BlockKey, KVLayout  # numpy, which would slow the command line's start

MAX_GROUPS = 8  # each adds a block table and a list of slots to a step
WINDOWS_IN_CONTEXT = 8  # the context for which memory is compared, in windows
LEAST_SAVED = 0.1  # of that memory; for less, several groups are not worth their tables


@dataclass(frozen=True, slots=True)
class PageGroups:
    """``windows``: per group, the tokens that a query sees, itself included; 0: all. ``places``: (group, first row of
    its page) of each layer. ``rows``: how many each layer takes; empty: one. Both are empty when layer l is row l of
    the only group. ``has_states``: in place of KV some layers keep a state in a page, after the last computed token of
    its block, so no computed token can be computed again but from the last border on."""

    windows: tuple[int, ...]
    places: tuple[tuple[int, int], ...] = ()
    rows: tuple[int, ...] = ()
    has_states: bool = False

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def rows_of(self, layer: int) -> tuple[int, range]:
        """Group, and the rows of its pages that the layer takes."""
        group, row = self.places[layer] if self.places else (0, layer)
        return group, range(row, row + (self.rows[layer] if self.rows else 1))

    def rows_with(self, layer: int) -> tuple[int, range]:
        """Group, and the rows of its pages that become final with this layer. Empty rows become final with the last
        used one, because a page travels as a whole."""
        group, rows = self.rows_of(layer)
        has_next = not self.places or (group, rows.stop) in self.places
        return group, range(rows.start, rows.stop if has_next else self.num_rows)

    @property
    def num_rows(self) -> int:
        """Rows per page, where ``places`` says so."""
        return max(self.rows_of(layer)[1].stop for layer in range(len(self.places)))

    @property
    def name(self) -> str:
        """Part of the names of all KV with this layout; empty where a page is a block."""
        of_rows = f" {self.rows}" if self.rows else ""
        return f"groups {self.windows} {self.places}{of_rows}" if self.places else ""

    def page_layout(self, block: KVLayout) -> KVLayout:
        """The layout of one page, where ``block`` has the rows of all layers."""
        return replace(block, num_layers=self.num_rows) if self.places else block

    def first_page(self, group: int, position: int, block_tokens: int) -> int:
        """The first block that the token at ``position`` sees in the group's layers."""
        window = self.windows[group]
        return max(position - window + 1, 0) // block_tokens if window else 0

    def spans_behind(self, num_computed: int, first_block: int, block_tokens: int) -> list[range]:
        """For each group, the blocks whose pages another sequence needs to continue after ``num_computed`` tokens;
        it already has those before ``first_block``."""
        num_blocks = -(-num_computed // block_tokens)
        firsts = (self.first_page(group, num_computed, block_tokens) for group in range(self.num_groups))
        return [range(min(max(first_block, first), num_blocks), num_blocks) for first in firsts]

    def border(self, num_blocks: int, has: Callable[[int, int], bool], block_tokens: int) -> int:
        """After how many leading blocks, at most ``num_blocks``, a sequence can continue if groups that see
        everything have all of them: the others must have what the last token before that sees. ``has``: whether a
        group's page of a block is there."""
        windowed = [group for group, window in enumerate(self.windows) if window]
        while num_blocks:
            position = num_blocks * block_tokens - 1
            holes = [
                index
                for group in windowed
                for index in range(self.first_page(group, position, block_tokens), num_blocks)
                if not has(group, index)
            ]
            if not holes:
                break
            num_blocks = max(holes)
        return num_blocks

    def most_pages(self, group: int, at_once: int, block_tokens: int) -> int | None:
        """The group's maximum, for a window that begins anywhere in a block and ``at_once`` tokens after it. None:
        one page per block."""
        window = self.windows[group]
        return -(-(window + at_once - 1) // block_tokens) + 1 if window else None

    def num_pages(self, num_tokens: int, block_tokens: int) -> int:
        """Pages that a sequence holds between two steps, when all of its tokens but the newest are computed. (It
        keeps what the last computed one saw: that one may be computed again.)"""
        num_blocks = -(-num_tokens // block_tokens)
        return sum(num_blocks - self.first_page(g, num_tokens - 1, block_tokens) for g in range(self.num_groups))

    def num_needed(self, num_blocks: int, at_once: int, block_tokens: int) -> int:
        """Pages without which a sequence of this many blocks may get stuck, at ``at_once`` tokens per step: groups
        with a window need theirs in addition to those of a cached prefix, which may be shared."""
        needed = 0
        for group, window in enumerate(self.windows):
            most = self.most_pages(group, at_once, block_tokens)
            cached = -(-max(window - 1, 0) // block_tokens)
            needed += num_blocks if most is None else min(most + cached, num_blocks)
        return needed

    def max_model_len(self, num_pages: int, at_once: int, block_tokens: int, asked: int) -> int:
        """Tokens of the longest sequence that fits this many pages, at most as many as ``asked`` for."""
        low, high = 0, -(-asked // block_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_needed(middle, at_once, block_tokens) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return min(low * block_tokens, asked)


UNIFORM = PageGroups((0,))
"""One group that keeps everything: what every model can have."""


_NUMBERS = 1 << 32  # larger than the number of a sequence's blocks


def page_number(group: int, block: int) -> int:
    """Numbers a sequence's pages: those of a group are consecutive, and the first group's equal the block numbers."""
    return group * _NUMBERS + block


def page_key(key: BlockKey, group: int) -> BlockKey:
    """The key of the group's page of a block, as long as every key. The first group uses the block's own."""
    return cast("BlockKey", bytes((key[0] ^ group,)) + key[1:]) if group else key


def one_group(rows: Sequence[int] = (), window: int = 0) -> PageGroups:
    """All layers in one group, one after another, each with so many ``rows``; empty: one."""
    if max(rows, default=1) == 1:
        return PageGroups((window,))
    places = tuple((0, end - count) for count, end in zip(rows, accumulate(rows), strict=True))
    return PageGroups((window,), places, tuple(rows))


def block_layout(config: ModelConfig, block_tokens: int, dtype: str) -> KVLayout:
    """The layout of a block with the rows of all layers, one after another."""
    from mooncake.types import KVLayout

    heads, head_dim = config.row_heads
    row = KVLayout(1, heads, block_tokens, head_dim, dtype, num_kinds=config.kv_kinds)
    return replace(row, num_layers=sum(config.rows_for(row.layer_bytes)) or len(config.kv_owners))


def as_one_group(config: ModelConfig, block: KVLayout) -> PageGroups:
    """One group for all layers of a model whose blocks have this layout."""
    return replace(one_group(config.rows_for(block.layer_bytes)), has_states=config.recurrence is not None)


def groups_of(config: ModelConfig, context: int, block: KVLayout | None = None) -> PageGroups:
    """Like ``plan_groups``, for the layers of a model that keep KV. A chunk is kept like a sliding window of its size,
    which contains it. ``block``: the layout of blocks, where layers keep states."""
    windows = [abs(config.window_of(layer)) for layer in config.kv_owners]
    if config.recurrence is None:
        return plan_groups(windows, context, config.kv_rows)
    assert block is not None
    planned = plan_groups(windows, context, config.rows_for(block.layer_bytes), 2 * block.block_tokens)
    return replace(planned, has_states=True)


def plan_groups(windows: Sequence[int], context: int, rows: Sequence[int] = (), least_kept: int = 1) -> PageGroups:
    """Groups for layers that see this many tokens each (0: all), in sequences of up to ``context`` tokens. ``rows``:
    how many each takes; empty: one. ``least_kept``: tokens of which a group keeps pages, however small its window.

    Among page sizes that give at most ``MAX_GROUPS``, the one that needs the least memory, including empty rows, for
    sequences of ``WINDOWS_IN_CONTEXT`` windows. Usually that is the rows of the rarer kind of layers. Groups that see
    everything come first: the first group names the blocks for everyone else.
    """
    seen = [window if window < context else 0 for window in windows]
    taken = list(rows) or [1] * len(seen)
    kinds = sorted(set(seen), key=lambda window: (window > 0, -window))
    if len(kinds) == 1:
        return one_group(rows, kinds[0])
    layers = {kind: [layer for layer, window in enumerate(seen) if window == kind] for kind in kinds}
    longest = WINDOWS_IN_CONTEXT * max(*kinds, least_kept)
    kept = {kind: max(kind, least_kept) if kind else longest for kind in kinds}

    def cost(size: int) -> float:
        return sum(_pack(layers[kind], taken, size)[1] * size * kept[kind] for kind in kinds)

    def num_groups(size: int) -> int:
        return sum(_pack(layers[kind], taken, size)[1] for kind in kinds)

    sizes = [size for size in range(max(taken), sum(taken) + 1) if num_groups(size) <= MAX_GROUPS]
    size = min(sizes, key=lambda size: (cost(size), -size), default=0)
    as_one = sum(taken) * kept[kinds[0]]
    if not size or cost(size) > (1 - LEAST_SAVED) * as_one:
        return one_group(rows, kinds[0])  # all layers keep what those that see most keep
    places = [(0, 0)] * len(seen)
    found: list[int] = []
    for kind in kinds:
        packed, count = _pack(layers[kind], taken, size)
        for layer, (group, row) in packed.items():
            places[layer] = len(found) + group, row
        found += [kind] * count
    return PageGroups(tuple(found), tuple(places), tuple(rows) if max(taken) > 1 else ())


def _pack(layers: Sequence[int], rows: Sequence[int], size: int) -> tuple[dict[int, tuple[int, int]], int]:
    """(Group, first row) of each of these layers, in order, where a group has ``size`` rows; and how many groups."""
    places: dict[int, tuple[int, int]] = {}
    group, row = 0, 0
    for layer in layers:
        if row + rows[layer] > size:
            group, row = group + 1, 0
        places[layer] = group, row
        row += rows[layer]
    return places, group + 1
