"""The block tables of all sequences in the layout that kernels read: a row of one int32 array per group of layers.

It counts its changes, so that whoever copies rows can tell that a copy is stale. It knows nothing of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class BlockTables:
    def __init__(self, num_rows: int, num_columns: int, num_groups: int) -> None:
        self.of_groups = [np.zeros((num_rows, num_columns), np.int32) for _ in range(num_groups)]
        self.ids = self.of_groups[0]
        self.num_changes = 0
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def has_free_row(self) -> bool:
        return bool(self._free)

    def add_row(self, tables: Sequence[Sequence[int]], firsts: Sequence[int]) -> int:
        """Copy these tables, one per group, each from its entry ``firsts`` on (earlier ones are undefined), into a
        row. Returns its number."""
        row = self._free.pop()
        for ids, table, first in zip(self.of_groups, tables, firsts, strict=True):
            ids[row, first : len(table)] = table[first:]
        self.num_changes += 1
        return row

    def set_block(self, row: int, index: int, block_id: int, group: int) -> None:
        self.of_groups[group][row, index] = block_id
        self.num_changes += 1

    def free_row(self, row: int) -> None:
        self._free.append(row)
