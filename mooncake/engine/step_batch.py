"""A step's plan as the arrays that the model reads, built in buffers that are used again and again.

It must not know why a plan is as it is. ``B`` sequences, ``T`` tokens, ``M`` the longest block table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mooncake.engine.scheduler import StepEntry
from mooncake.model.batch import ForwardBatch


class _DecodeViews(NamedTuple):
    """What a batch of so many decodes shows of the builder's buffers; starts and rows are always the same."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor
    logit_rows: torch.Tensor


class BatchBuilder:
    """The batch it gives out is valid until the next one is built."""

    def __init__(self, tables: npt.NDArray[np.int32], block_tokens: int, max_tokens: int) -> None:
        """``tables`` are the scheduler's, by row; ``max_tokens`` is the usual size of a step, not a limit."""
        self._tables = tables
        self._block_tokens = block_tokens
        self._tokens = np.empty(max_tokens, np.int64)
        self._positions = np.empty(max_tokens, np.int64)
        self._columns = np.empty((3, len(tables)), np.int64)  # of decode steps: tokens, positions and slots
        self._lengths = np.empty(len(tables), np.int32)
        self._views: dict[int, _DecodeViews] = {}  # by number of sequences

    def build(self, entries: list[StepEntry]) -> tuple[ForwardBatch, list[int]]:
        """The batch, and which entries reach the end of their tokens: those have a row of logits each, in order, and
        one more for each guess behind their tokens. Behind all these come the rows of scored prompts."""
        if all(entry.is_decode for entry in entries):
            return self._decodes(entries), list(range(len(entries)))
        return self._chunks(entries)

    def _decodes(self, entries: list[StepEntry]) -> ForwardBatch:
        """The newest token of each, as in most steps. For so few numbers Python's own loops are the faster ones: an
        operation on arrays takes ten microseconds when a model's weights have just gone through the caches."""
        count, size = len(entries), self._block_tokens
        newest = [entry.sequence.last_token for entry in entries]
        places = [entry.first for entry in entries]
        blocks = [entry.sequence.block_table[entry.first // size] for entry in entries]
        targets = [block * size + place % size for block, place in zip(blocks, places, strict=True)]
        self._columns[:, :count] = newest, places, targets
        self._lengths[:count] = [place + 1 for place in places]
        views = self._views.get(count) or self._view(count)
        rows = [entry.sequence.row for entry in entries]
        return ForwardBatch(
            tokens=views.tokens,
            positions=views.positions,
            query_starts=views.query_starts,
            context_lens=views.context_lens,
            block_tables=torch.from_numpy(self._tables[rows, : max(places) // size + 1]),
            slots=views.slots,
            logit_rows=views.logit_rows,
            adapters=_adapters(entries),
        )

    def _view(self, count: int) -> _DecodeViews:
        tokens, positions, slots = torch.from_numpy(self._columns[:, :count]).unbind()
        starts, rows = torch.arange(count + 1, dtype=torch.int32), torch.arange(count)
        lengths = torch.from_numpy(self._lengths[:count])
        views = self._views[count] = _DecodeViews(tokens, positions, slots, lengths, starts, rows)
        return views

    def _chunks(self, entries: list[StepEntry]) -> tuple[ForwardBatch, list[int]]:
        firsts = np.array([entry.first for entry in entries], np.int64)
        counts = np.array([entry.num_tokens for entry in entries], np.int64)
        totals = np.array([entry.sequence.num_tokens for entry in entries], np.int64)
        rows = np.array([entry.sequence.row for entry in entries], np.int64)
        ends = firsts + counts
        starts = np.zeros(len(entries) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        tokens, positions = self._buffers(int(starts[-1]))
        for entry, start, end in zip(entries, starts.tolist(), starts[1:].tolist(), strict=False):
            tokens[start:end] = entry.sequence.window(entry.first, entry.end)
        np.subtract(np.arange(len(tokens)), np.repeat(starts[:-1] - firsts, counts), out=positions)
        indices, offsets = np.divmod(positions, self._block_tokens)
        slots = self._tables[np.repeat(rows, counts), indices].astype(np.int64) * self._block_tokens + offsets
        longest = -(-int(ends.max()) // self._block_tokens)
        complete = np.flatnonzero(ends >= totals)
        logit_rows = _logit_rows(starts, complete, (ends - totals)[complete])
        if any(entry.scored for entry in entries):
            scored = [
                np.arange(start, start + len(entry.scored))
                for entry, start in zip(entries, starts.tolist(), strict=False)
            ]
            logit_rows = np.concatenate([logit_rows, *scored])
        batch = ForwardBatch(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            query_starts=torch.from_numpy(starts),
            context_lens=torch.from_numpy(ends.astype(np.int32)),
            block_tables=torch.from_numpy(self._tables[rows, :longest]),
            slots=torch.from_numpy(slots),
            logit_rows=torch.from_numpy(logit_rows),
            adapters=_adapters(entries),
        )
        return batch, complete.tolist()

    def _buffers(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if count > len(self._tokens):
            self._tokens, self._positions = np.empty(count, np.int64), np.empty(count, np.int64)
        return self._tokens[:count], self._positions[:count]


def _adapters(entries: list[StepEntry]) -> torch.Tensor | None:
    adapters = [entry.sequence.adapter for entry in entries]
    return torch.from_numpy(np.array(adapters, np.int32)) if max(adapters) >= 0 else None


def _logit_rows(
    starts: npt.NDArray[np.int32], complete: npt.NDArray[np.int64], num_draft: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The last token of each complete entry, with the guesses behind it."""
    last = starts[complete + 1].astype(np.int64) - 1
    if not num_draft.any():
        return last
    counts = num_draft + 1
    firsts = np.cumsum(counts) - counts
    return np.repeat(last - num_draft, counts) + np.arange(counts.sum()) - np.repeat(firsts, counts)
