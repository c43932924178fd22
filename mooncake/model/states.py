"""A step of layers that keep a state in place of KV (``kernels.recurrent``): where states are, and how a step that is
abandoned is undone.

A layer's state takes as many rows of its group's pages as it needs, and is read and written in place. Writing keys and
values twice changes nothing, but a state that has taken a token in must not take it in again. A run that begins on a
block border writes another page than it reads; what any other overwrites is kept until the step is over.
"""

from __future__ import annotations

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
        self._runs: dict[int, Runs] = {}  # by group
        self._kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = [] if can_be_abandoned else None

    def of(self, layer: int) -> tuple[torch.Tensor, Runs]:
        """The layer's states [N, state_size], a view of all pages; and the step's runs over those of its group."""
        pages = self._batch.pages
        group, row = (0, self._rows[layer]) if pages is None else pages.places[layer].tolist()
        if group not in self._runs:
            tables = self._batch.block_tables if pages is None else pages.block_tables[group]
            self._runs[group] = runs_of(self._batch, tables, self._block_tokens)
        first = row * self._row_size
        states, runs = self._numbers[:, first : first + self._size], self._runs[group]
        if self._kept is not None:
            overwritten = runs.targets[runs.targets == runs.sources]
            self._kept.append((states, overwritten, states[overwritten]))
        return states, runs

    def undo(self) -> None:
        """Nothing of the step counts: put back what it has overwritten."""
        for states, pages, before in self._kept or ():
            states[pages] = before


def runs_of(batch: ForwardBatch, block_tables: torch.Tensor, block_tokens: int) -> Runs:
    """``block_tables`` int32 [B, M]: the pages of the blocks of each sequence."""
    counts, contexts = batch.query_starts.diff().tolist(), batch.context_lens.tolist()
    lengths: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for table, count, end in zip(block_tables, counts, contexts, strict=True):
        first = end - count
        while first < end:
            index = first // block_tokens
            border = min((index + 1) * block_tokens, end)
            lengths.append(border - first)
            sources.append(int(table[(first - 1) // block_tokens]) if first else NO_PAGE)
            targets.append(int(table[index]))
            first = border
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths), 0, out=starts[1:])
    return Runs(starts, torch.tensor(sources), torch.tensor(targets))
