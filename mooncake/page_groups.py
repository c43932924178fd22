"""Layers in groups by what they see, so that layers with a sliding window keep no more than their windows.

A *page* holds ``block_tokens`` tokens of one group's layers. Groups have equally many rows, so all pages have the same
size and come from one pool; a block of a sequence is a page a group. A model whose layers all see the same is one
group, and its page is the whole block. Pure arithmetic, after vLLM's hybrid cache manager and Jenga (arXiv 2503.18292).
It must not know which page is whose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from mooncake.model_config import ModelConfig

if TYPE_CHECKING:
    from mooncake.types import BlockKey, KVLayout  # numpy, without which the command line comes to life sooner

MAX_GROUPS = 8  # each costs a step a block table and a list of slots
WINDOWS_IN_CONTEXT = 8  # the context for which memory is weighed, in windows
LEAST_SAVED = 0.1  # of that memory; for less, several groups are not worth their tables


@dataclass(frozen=True, slots=True)
class PageGroups:
    """``windows``: tokens that a query sees, itself included, in the layers of each group; 0: all. ``places``: (group,
    row of its page) of each layer; empty when layer l is row l of the only group."""

    windows: tuple[int, ...]
    places: tuple[tuple[int, int], ...] = ()

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def place_of(self, layer: int) -> tuple[int, int]:
        """Group, and row of its pages."""
        return self.places[layer] if self.places else (0, layer)

    def rows_with(self, layer: int) -> tuple[int, range]:
        """Group, and the rows of its pages that are final with the layer: the empty ones follow the last that is not,
        for a page travels as a whole."""
        group, row = self.place_of(layer)
        has_next = not self.places or (group, row + 1) in self.places
        return group, range(row, row + 1 if has_next else self.num_rows)

    @property
    def num_rows(self) -> int:
        """Layers in a page."""
        return 1 + max(row for _, row in self.places)

    @property
    def num_empty_rows(self) -> int:
        """In all pages of one block: what is wasted where numbers of layers do not divide."""
        return self.num_groups * self.num_rows - len(self.places) if self.places else 0

    @property
    def name(self) -> str:
        """Part of the names of all KV that lies so; empty where a page is a block."""
        return f"groups {self.windows} {self.places}" if self.places else ""

    def page_layout(self, block: KVLayout) -> KVLayout:
        """Of one page, where ``block`` has all layers."""
        return replace(block, num_layers=self.num_rows) if self.places else block

    def first_page(self, group: int, position: int, block_tokens: int) -> int:
        """The first block of which the token at ``position`` sees something in the group's layers."""
        window = self.windows[group]
        return max(position - window + 1, 0) // block_tokens if window else 0

    def spans_behind(self, num_computed: int, first_block: int, block_tokens: int) -> list[range]:
        """The blocks of each group whose pages a sequence needs that goes on behind so many computed tokens, in place
        of another one; it has those of blocks before ``first_block``."""
        num_blocks = -(-num_computed // block_tokens)
        firsts = (self.first_page(group, num_computed, block_tokens) for group in range(self.num_groups))
        return [range(min(max(first_block, first), num_blocks), num_blocks) for first in firsts]

    def border(self, num_blocks: int, has: Callable[[int, int], bool], block_tokens: int) -> int:
        """How many leading blocks, ``num_blocks`` at most, a sequence can go on behind where groups that see everything
        have all of those: the others have what the last token of them sees. ``has``: a group's page of a block."""
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
        """Of the group, for a window that begins anywhere in a block and ``at_once`` tokens behind it. None: as many as
        the sequence has blocks."""
        window = self.windows[group]
        return -(-(window + at_once - 1) // block_tokens) + 1 if window else None

    def num_pages(self, num_tokens: int, block_tokens: int) -> int:
        """That a sequence holds between two steps, all of whose tokens but the newest, so many, are computed. (Of the
        last one it keeps all that it saw: it may be computed again.)"""
        num_blocks = -(-num_tokens // block_tokens)
        return sum(num_blocks - self.first_page(g, num_tokens - 1, block_tokens) for g in range(self.num_groups))

    def num_needed(self, num_blocks: int, at_once: int, block_tokens: int) -> int:
        """Pages without which a sequence of so many blocks may not get on, ``at_once`` tokens a step: groups with a
        window need theirs beside those of a cached prefix, which may be another sequence's too."""
        needed = 0
        for group, window in enumerate(self.windows):
            most = self.most_pages(group, at_once, block_tokens)
            cached = -(-max(window - 1, 0) // block_tokens)
            needed += num_blocks if most is None else min(most + cached, num_blocks)
        return needed

    def max_model_len(self, num_pages: int, at_once: int, block_tokens: int, asked: int) -> int:
        """Tokens of the longest sequence that so many pages hold, up to as many as are ``asked`` for."""
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


_NUMBERS = 1 << 32  # blocks of a sequence, and more


def page_number(group: int, block: int) -> int:
    """Of a sequence's pages: those of one group follow one another, and the first group's are the blocks' own."""
    return group * _NUMBERS + block


def page_key(key: BlockKey, group: int) -> BlockKey:
    """Of the group's page of a block, as long as every key. The first group has the block's own."""
    return cast("BlockKey", bytes((key[0] ^ group,)) + key[1:]) if group else key


def groups_of(config: ModelConfig, context: int) -> PageGroups:
    """As ``plan_groups``, for the layers of a model that keep keys and values."""
    return plan_groups([config.window_of(layer) for layer in config.kv_owners], context)


def plan_groups(windows: Sequence[int], context: int) -> PageGroups:
    """Groups for layers that see so many tokens each (0: all), in sequences of up to ``context`` tokens.

    Of all sizes of a group that give no more than ``MAX_GROUPS``, the one that needs the least memory, empty rows
    included, where sequences are ``WINDOWS_IN_CONTEXT`` windows long. That is mostly the number of layers of the rarer
    kind. Groups that see everything come first: the first group names the blocks for everybody else.
    """
    seen = [window if window < context else 0 for window in windows]
    kinds = sorted(set(seen), key=lambda window: (window > 0, -window))
    if len(kinds) == 1:
        return PageGroups((kinds[0],))
    layers = {kind: [layer for layer, window in enumerate(seen) if window == kind] for kind in kinds}
    longest = WINDOWS_IN_CONTEXT * max(kinds)

    def groups_of(kind: int, size: int) -> int:
        return -(-len(layers[kind]) // size)

    def cost(size: int) -> float:
        return sum(groups_of(kind, size) * size * (kind or longest) for kind in kinds)

    sizes = [s for s in range(1, len(seen) + 1) if sum(groups_of(kind, s) for kind in kinds) <= MAX_GROUPS]
    size = min(sizes, key=lambda size: (cost(size), -size), default=0)
    as_one = len(seen) * (kinds[0] or longest)
    if not size or cost(size) > (1 - LEAST_SAVED) * as_one:
        return PageGroups((kinds[0],))  # everybody keeps what the layers keep that see most
    places = [(0, 0)] * len(seen)
    found: list[int] = []
    for kind in kinds:
        for number, layer in enumerate(layers[kind]):
            places[layer] = len(found) + number // size, number % size
        found += [kind] * groups_of(kind, size)
    return PageGroups(tuple(found), tuple(places))
