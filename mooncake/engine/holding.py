"""The pages of one sequence, and KV that it gets from elsewhere. ``holdings`` allocates and releases the pages."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake.errors import InvalidRequest

if TYPE_CHECKING:
    from mooncake.engine.blend import Blend
    from mooncake.engine.inherit import HiddenStates

NEVER = sys.maxsize
"""Larger than any number of tokens."""


@dataclass(slots=True, eq=False)
class Holding:
    """A sequence's pages from admission until they are taken back: a table per group of layers, in order of its
    blocks. Without arguments: no pages."""

    tables: list[list[int]] = field(default_factory=list)
    first_held: list[int] = field(default_factory=list)  # per group; earlier pages were given up
    row: int = -1  # in the scheduler's array of block tables; -1: in no step
    num_sealed: int = 0  # leading blocks that others may share
    block_table: list[int] = field(init=False)  # of the first group
    num_writable: int = field(default=0, init=False)  # tokens; up to the block's end no check is needed
    gives_up_at: int = field(default=NEVER, init=False)  # computed tokens at which a page leaves its window
    is_loading: bool = field(default=False, init=False)  # some blocks are still being loaded

    def __post_init__(self) -> None:
        self.block_table = self.tables[0] if self.tables else []

    @property
    def pages(self) -> list[int]:
        """All pages."""
        return [page for table, first in zip(self.tables, self.first_held, strict=True) for page in table[first:]]


@dataclass(slots=True, eq=False)
class Borrowed:
    """The KV that a sequence need not compute, beside what is cached, and how much of its KV is exact.

    Raises InvalidRequest for a negative number.
    """

    external_blocks: int = 0  # leading ones that can be loaded from elsewhere at admission
    inheritable_blocks: int = 0  # leading ones available as another model's KV, where ours is missing
    inherits: range = field(default=range(0), init=False)  # tokens computed in some layers only
    hidden: HiddenStates | None = field(default=None, init=False)  # the input of those layers; None: embeddings
    blend: Blend | None = field(default=None, init=False)  # KV blended from chunks of its prompt
    num_exact: int | None = field(default=None, init=False)  # leading tokens with KV of their own; None: all

    def __post_init__(self) -> None:
        if min(self.external_blocks, self.inheritable_blocks) < 0:
            raise InvalidRequest("external_blocks must not be negative", "external_blocks")

    def limit_exact(self, num_exact: int) -> None:
        """Tokens from this one on are not exact. The limit never rises, because inexact KV may have been kept."""
        self.num_exact = num_exact if self.num_exact is None else min(num_exact, self.num_exact)
