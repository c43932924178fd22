"""The blocks of each sequence that has some, a row each of one array a group of layers, as a step's batch takes them.

It counts its changes, so that whoever has copied rows knows when they are out of date. It must not know sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class BlockTables:
    def __init__(self, num_rows: int, num_columns: int, num_groups: int = 1) -> None:
        self.of_groups = [np.zeros((num_rows, num_columns), np.int32) for _ in range(num_groups)]
        self.ids = self.of_groups[0]
        self.num_changes = 0
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def enter(self, tables: Sequence[Sequence[int]], firsts: Sequence[int]) -> int:
        """The row that holds them, one a group, from now on, each from its first page on: what is before has numbers
        that mean nothing."""
        row = self._free.pop()
        for ids, table, first in zip(self.of_groups, tables, firsts, strict=True):
            ids[row, first : len(table)] = table[first:]
        self.num_changes += 1
        return row

    def put(self, row: int, index: int, block_id: int, group: int = 0) -> None:
        self.of_groups[group][row, index] = block_id
        self.num_changes += 1

    def leave(self, row: int) -> None:
        self._free.append(row)
