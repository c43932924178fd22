"""Batches on their way to a device: in memory of their own, or in buffers that a captured graph reads.

Everything goes through pinned memory, which torch reuses only once it has been copied. It does not know what is
computed from a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from mooncake.kernels.recurrent import NO_PAGE, Runs
from mooncake.kernels.recurrent_chunks import in_chunks
from mooncake.model.batch import ForwardBatch, Pages
from mooncake.model.states import cuts_of
from mooncake.model_config import ModelConfig
from mooncake.page_groups import PageGroups

NO_SLOT = NO_PAGE  # slot of a padding token: its keys and values are not written, and its state to no page
NEWEST_ROW, FIRST_SLOTS = 2, 3  # rows of ``Buffers.numbers``


@dataclass(slots=True)
class Buffers:
    """Of a decode step. Rows of ``numbers`` are tokens, positions, rows of the last step that draws tokens, the slots
    of each group, and of each group with states the sources and targets of its runs."""

    numbers: torch.Tensor  # int64 [rows, bucket]
    batch: ForwardBatch  # views of them, and other buffers
    tables: torch.Tensor | None = None  # on the host: what the block tables here are a copy of


class DeviceBatches:
    """For sequences of at most ``max_blocks`` blocks, and a cache whose layers are in ``groups``."""

    def __init__(self, config: ModelConfig, groups: PageGroups, max_blocks: int, device: torch.device) -> None:
        stateful = config.recurrence.layers if config.recurrence else ()
        self._groups_of_states = sorted({groups.rows_of(layer)[0] for layer in stateful})
        self._num_groups = groups.num_groups
        self._places = torch.tensor(groups.places, dtype=torch.int32) if groups.num_groups > 1 else None
        self._max_blocks = max_blocks
        self._device = device

    def moved(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        pinned = self._pinned(numbers.shape, torch.from_numpy(numbers).dtype)
        pinned.numpy()[:] = numbers
        return pinned.to(self._device, non_blocking=True)

    def of(self, batch: ForwardBatch, block_tokens: int) -> ForwardBatch:
        """``batch``, which is on the host, with the runs of its states; ``hidden`` stays there."""
        given = {
            name: getattr(batch, name) for name in ForwardBatch.__slots__ if name not in ("hidden", "pages", "runs")
        }
        moved: dict[str, Any] = {name: self.moved(part.numpy()) for name, part in given.items() if part is not None}
        if batch.pages is not None:
            tables, slots = (self.moved(part.numpy()) for part in (batch.pages.block_tables, batch.pages.slots))
            moved["pages"] = Pages(batch.pages.places, tables, slots)
        moved["runs"] = {
            group: in_chunks(runs, lambda part: self.moved(part.numpy()))
            for group, runs in self._runs(batch, block_tokens).items()
        }
        return ForwardBatch(**moved, hidden=batch.hidden)

    def _runs(self, batch: ForwardBatch, block_tokens: int) -> dict[int, Runs]:
        """By group of states."""
        if not self._groups_of_states:
            return {}
        cuts = cuts_of(batch, block_tokens)
        return {group: cuts.runs(batch, group) for group in self._groups_of_states}

    def empty_step(self, starts: list[int], context: int) -> ForwardBatch:
        """A step of which nothing is kept, of sequences of ``context`` tokens; on the host, like the engine's."""
        tables = torch.zeros((self._num_groups, len(starts) - 1, self._max_blocks), dtype=torch.int32)
        slots = torch.full((self._num_groups, starts[-1]), NO_SLOT)
        return ForwardBatch(
            tokens=torch.zeros(starts[-1], dtype=torch.int64),
            positions=torch.zeros(starts[-1], dtype=torch.int64),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.full((len(starts) - 1,), context, dtype=torch.int32),
            block_tables=tables[0],
            slots=slots[0],
            logit_rows=torch.tensor(starts[1:]) - 1,
            pages=None if self._places is None else Pages(self._places, tables, slots),
        )

    def buffers(self, bucket: int) -> Buffers:
        """For up to ``bucket`` sequences; of these nothing is kept until they are filled."""
        first_pages = FIRST_SLOTS + self._num_groups
        shape = (first_pages + 2 * len(self._groups_of_states), bucket)
        numbers = torch.zeros(shape, dtype=torch.int64, device=self._device)
        numbers[FIRST_SLOTS:].fill_(NO_SLOT)
        slots, pages = numbers[FIRST_SLOTS:first_pages], numbers[first_pages:]
        tables = torch.zeros((self._num_groups, bucket, self._max_blocks), dtype=torch.int32, device=self._device)
        starts = torch.arange(bucket + 1, device=self._device)
        runs = [Runs(starts, *pair) for pair in pages.view(-1, 2, bucket)]
        batch = ForwardBatch(
            tokens=numbers[0],
            positions=numbers[1],
            query_starts=starts.int(),
            context_lens=torch.ones(bucket, dtype=torch.int32, device=self._device),
            block_tables=tables[0],
            slots=slots[0],
            logit_rows=starts[:-1],
            pages=None if self._places is None else Pages(self._places, tables, slots),
            runs=dict(zip(self._groups_of_states, runs, strict=True)),
        )
        return Buffers(numbers, batch)

    def fill(self, buffers: Buffers, batch: ForwardBatch, newest: Sequence[int] | None, block_tokens: int) -> None:
        """One copy to the device, and one more where block tables have changed."""
        size, pinned = batch.num_sequences, self._pinned(buffers.numbers.shape, torch.int64)
        numbers = pinned.numpy()
        numbers[:FIRST_SLOTS, size:], numbers[FIRST_SLOTS:, size:] = 0, NO_SLOT
        runs = self._runs(batch, block_tokens).values()
        slots = batch.slots[None] if batch.pages is None else batch.pages.slots
        given = [batch.tokens.numpy(), batch.positions.numpy(), 0 if newest is None else newest, *slots.numpy()]
        given += [part.numpy() for each in runs for part in (each.sources, each.targets)]
        for row, part in zip(numbers, given, strict=True):
            row[:size] = part
        buffers.numbers.copy_(pinned, non_blocking=True)
        if buffers.tables is not batch.block_tables:
            buffers.tables, blocks = batch.block_tables, batch.block_tables.shape[1]
            ours, theirs = (_tables_of(each) for each in (buffers.batch, batch))
            ours[:, :size, :blocks].copy_(self.moved(theirs.numpy()))

    def _pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory for one copy to the device, to be filled."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")


def _tables_of(batch: ForwardBatch) -> torch.Tensor:
    """[G, B, M]."""
    return batch.block_tables[None] if batch.pages is None else batch.pages.block_tables
