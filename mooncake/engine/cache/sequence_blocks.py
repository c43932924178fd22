"""The blocks of one sequence: its block tables, and how far they are filled (``block_manager`` allocates them)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

NEVER = sys.maxsize
"""Larger than any number of tokens."""


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """A block table per group of layers, from admission until the blocks are freed. Without arguments: no blocks."""

    tables: list[list[int]] = field(default_factory=list)
    first_held: list[int] = field(default_factory=list)  # per group: earlier pages have left the window and were freed
    row: int = -1  # in the batch's array of block tables; -1: in no step
    num_sealed: int = 0  # leading blocks that others may share
    block_table: list[int] = field(init=False)  # of the first group
    num_writable: int = field(default=0, init=False)  # tokens that can be written without another block or a copy
    out_of_window_at: int = field(default=NEVER, init=False)  # computed tokens at which the next page leaves a window
    is_loading: bool = field(default=False, init=False)  # some blocks are still being loaded

    def __post_init__(self) -> None:
        self.block_table = self.tables[0] if self.tables else []

    @property
    def pages(self) -> list[int]:
        """The pages of all groups."""
        return [page for table, first in zip(self.tables, self.first_held, strict=True) for page in table[first:]]
