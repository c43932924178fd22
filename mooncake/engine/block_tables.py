"""The block tables of all sequences that have blocks, as rows of one array per group of layers, as a step's batch uses
them.

It counts its changes, so that copies of rows can be recognised as stale. It knows nothing of sequences.
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
        """Returns the row that now holds these tables, one per group, each from its first held page on; entries
        before that are undefined."""
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
