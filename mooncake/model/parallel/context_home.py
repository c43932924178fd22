"""The first rank's paged cache during a step split over ranks. It is the only cache, so it keeps everything between
steps.

This module knows nothing of what is sent or attended to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mooncake.model.batch import ForwardBatch
from mooncake.model.page_rows import page_rows, row_numbers
from mooncake.model.parallel.context_plan import ContextPlan

Rows = torch.Tensor
"""Keys and values, ``[K|V, Hkv, tokens, row width]``; one kind if keys are the values."""


class Home:
    """Prefixes are read from it, and everything computed is written to it."""

    def __init__(self, plan: ContextPlan, batch: ForwardBatch, cache: torch.Tensor) -> None:
        self.batch = batch
        self.layers = cache.unbind(1)
        self._block_tokens = cache.shape[4]
        self._rows_of: dict[object, torch.Tensor] = {}
        for rank in range(plan.size):
            self._number(("new", rank), batch.slots[torch.from_numpy(plan.rows_of(rank))])
            self._number(("part", rank), self._slots(plan.part(rank)))

    def _number(self, name: object, slots: torch.Tensor) -> None:
        self._rows_of[name] = row_numbers(self.layers[0], slots).permute(1, 2, 0).contiguous()

    def _slots(self, part: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        found = [torch.empty(0, dtype=torch.int64)]
        for sequence, first, end in part:
            positions = torch.arange(first, end)
            blocks = self.batch.block_tables[sequence].long()[positions // self._block_tokens]
            found.append(blocks * self._block_tokens + positions % self._block_tokens)
        return torch.cat(found)

    def keep(self, layer: int, origin: int, rows: Rows) -> None:
        """Store what a rank has computed."""
        numbers = self._rows_of["new", origin]
        page_rows(self.layers[layer]).index_copy_(0, numbers.flatten(), rows.flatten(0, 2))

    def part(self, layer: int, rank: int) -> Rows:
        """A copy of the rank's part of the prefixes."""
        numbers = self._rows_of["part", rank]
        rows = page_rows(self.layers[layer]).index_select(0, numbers.flatten())
        return rows.view(*numbers.shape, rows.shape[1])
