"""The blocks of each sequence that has some, a row each of one array, as a step's batch takes them.

It counts its changes, so that whoever has copied rows knows when they are out of date. It must not know sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class BlockTables:
    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.ids = np.zeros((num_rows, num_columns), np.int32)
        self.num_changes = 0
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def enter(self, block_ids: Sequence[int]) -> int:
        """The row that holds them from now on."""
        row = self._free.pop()
        self.ids[row, : len(block_ids)] = block_ids
        self.num_changes += 1
        return row

    def put(self, row: int, index: int, block_id: int) -> None:
        self.ids[row, index] = block_id
        self.num_changes += 1

    def leave(self, row: int) -> None:
        self._free.append(row)
