"""A step of layers that keep a state in place of KV (``kernels.recurrent``): where states are, and how a step that is
abandoned is undone.

A layer's state takes as many rows of its group's pages as it needs, and is read and written in place. Writing keys and
values twice changes nothing, but a state that has taken a token in must not take it in again. A run that begins on a
block border writes another page than it reads; what any other overwrites is kept until the step is over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mooncake.kernels.recurrent import NO_PAGE, Runs
from mooncake.model.batch import ForwardBatch
from mooncake.model.pages import first_rows
from mooncake.model_config import ModelConfig


class States:
    """Of one step."""

    def __init__(self, config: ModelConfig, batch: ForwardBatch, cache: torch.Tensor, can_be_abandoned: bool) -> None:
        """``cache`` as in ``CausalModel.forward``; ``can_be_abandoned``: between layers, by the step's hook."""
        assert config.recurrence is not None
        self._size = config.recurrence.state_size
        self._batch = batch
        self._block_tokens = cache.shape[4]
        self._numbers = cache.view(len(cache), -1).view(torch.float32)  # [N, of a page]
        self._row_size = cache.stride(1) * cache.element_size() // 4
        self._rows = first_rows(config, cache) if batch.pages is None else []
        self._runs = dict(batch.runs or {})
        self._cuts: Cuts | None = None
        self._overwritten: dict[int, torch.Tensor] = {}  # by group: the pages that a run reads and writes
        self._kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = [] if can_be_abandoned else None

    def of(self, layer: int) -> tuple[torch.Tensor, Runs]:
        """The layer's states [N, state_size], a view of all pages; and the step's runs over those of its group."""
        pages = self._batch.pages
        group, row = (0, self._rows[layer]) if pages is None else pages.places[layer].tolist()
        if group not in self._runs:
            self._cuts = self._cuts or cuts_of(self._batch, self._block_tokens)
            self._runs[group] = self._cuts.runs(self._batch, group)
        first = row * self._row_size
        states, runs = self._numbers[:, first : first + self._size], self._runs[group]
        if self._kept is not None:
            if group not in self._overwritten:
                self._overwritten[group] = runs.targets[runs.targets == runs.sources]
            overwritten = self._overwritten[group]
            self._kept.append((states, overwritten, states[overwritten]))
        return states, runs

    def undo(self) -> None:
        """Nothing of the step counts: put back what it has overwritten."""
        for states, pages, before in self._kept or ():
            states[pages] = before


class Cuts(NamedTuple):
    """Where a batch's tokens are cut into runs, at their block borders: the same in every group."""

    starts: npt.NDArray[np.int64]  # [R + 1], tokens
    owners: npt.NDArray[np.int64]  # [R], sequences
    before: npt.NDArray[np.int64]  # [R], the block of the token before the run, of the owner's; 0 if there is none
    goes_on: npt.NDArray[np.bool_]  # [R], whether there is one
    block_tokens: int

    def runs(self, batch: ForwardBatch, group: int) -> Runs:
        """Over the group's pages. The target of tokens whose slots are below 0 is NO_PAGE."""
        pages = batch.pages
        tables, slots = (
            (batch.block_tables, batch.slots) if pages is None else (pages.block_tables[group], pages.slots[group])
        )
        sources = np.where(self.goes_on, tables.numpy()[self.owners, self.before], NO_PAGE).astype(np.int64)
        targets = slots.numpy()[self.starts[:-1]] // self.block_tokens
        return Runs(*(torch.from_numpy(each) for each in (self.starts, sources, targets)))


def cuts_of(batch: ForwardBatch, block_tokens: int) -> Cuts:
    """Of a batch on the host."""
    ends = batch.context_lens.numpy().astype(np.int64)
    firsts = ends - np.diff(batch.query_starts.numpy())
    first_blocks = firsts // block_tokens
    counts = np.maximum((ends - 1) // block_tokens - first_blocks + 1, 0)
    owners = np.repeat(np.arange(len(counts)), counts)
    blocks = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - first_blocks, counts)
    begins = np.maximum(blocks * block_tokens, firsts[owners])
    starts = np.zeros(len(owners) + 1, np.int64)
    np.cumsum(np.minimum((blocks + 1) * block_tokens, ends[owners]) - begins, out=starts[1:])
    return Cuts(starts, owners, np.maximum(begins - 1, 0) // block_tokens, begins > 0, block_tokens)
