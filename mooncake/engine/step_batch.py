"""A step's plan as the ragged batch that the model reads, built in reused buffers.

It does not know why a plan is as it is. ``B`` sequences, ``T`` tokens, ``M`` the longest block table.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from mooncake.engine.blend import reuse_of
from mooncake.engine.cache.block_tables import BlockTables
from mooncake.engine.step_plan import StepEntry
from mooncake.model.batch import ForwardBatch, Pages
from mooncake.page_groups import UNIFORM, PageGroups


class _DecodeBatch:
    """A batch of ``count`` decodes, in memory that is rewritten for each step. (Filling ctypes arrays takes half as
    long as filling numpy's.)"""

    def __init__(self, count: int, num_groups: int, places: torch.Tensor | None) -> None:
        self.numbers = (ctypes.c_int64 * ((2 + num_groups) * count))()  # tokens, positions, slots per group
        self.lengths = (ctypes.c_int32 * count)()
        self._places = places
        self._columns = torch.frombuffer(self.numbers, dtype=torch.int64).view(-1, count)
        self._starts, self._rows = torch.arange(count + 1, dtype=torch.int32), torch.arange(count)
        self.tables: tuple[int, list[int]] = (-1, [])  # the tables' change count, and the rows, when they were copied
        self.batch: ForwardBatch

    def set_sequences(self, block_tables: torch.Tensor, adapters: torch.Tensor | None) -> None:
        """Switch to another set of sequences, or other blocks: [G, B, M]."""
        slots = self._columns[2:]
        self.batch = ForwardBatch(
            tokens=self._columns[0],
            positions=self._columns[1],
            query_starts=self._starts,
            context_lens=torch.frombuffer(self.lengths, dtype=torch.int32),
            block_tables=block_tables[0],
            slots=slots[0],
            logit_rows=self._rows,
            adapters=adapters,
            pages=None if self._places is None else Pages(self._places, block_tables, slots),
        )


class BatchBuilder:
    """A batch is valid until the next one is built."""

    def __init__(self, tables: BlockTables, block_tokens: int, max_tokens: int, groups: PageGroups = UNIFORM) -> None:
        """``max_tokens`` is the usual size of a step, not a limit."""
        self._tables = tables
        self._num_groups = groups.num_groups
        self._places = torch.tensor(groups.places, dtype=torch.int32) if groups.num_groups > 1 else None
        self._block_tokens = block_tokens
        self._tokens = np.empty(max_tokens, np.int64)
        self._positions = np.empty(max_tokens, np.int64)
        self._decode_batches: dict[int, _DecodeBatch] = {}  # by number of sequences

    def build(self, entries: list[StepEntry]) -> tuple[ForwardBatch, list[StepEntry]]:
        """The batch, and the entries that reach the end of their tokens. Those have one row of logits each, in
        order, plus one for each of their draft tokens. After all of these come the rows of scored prompts."""
        if decodes := self._decode_batch(entries):
            return decodes, entries
        return self._ragged_batch(entries)

    def _decode_batch(self, entries: list[StepEntry]) -> ForwardBatch | None:
        """The newest token of each sequence, the usual case; None when there are other entries.

        The model's weights have just evicted everything from the CPU's caches, so the first use of anything is slow:
        one array operation takes 30 to 90 microseconds. So there is a single loop, and what has not changed is kept.
        """
        size = self._block_tokens
        newest: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        lengths: list[int] = []
        rows: list[int] = []
        for sequence, position, num_tokens, _ in entries:
            if num_tokens > 1 or position + 1 < sequence.num_tokens:
                return None
            newest.append(sequence.last_token)
            positions.append(position)
            blocks = sequence.blocks
            slots.append(blocks.block_table[position // size] * size + position % size)
            lengths.append(position + 1)
            rows.append(blocks.row)
        decodes = self._decode_batches.get(len(rows))
        if decodes is None:
            decodes = self._decode_batches[len(rows)] = _DecodeBatch(len(rows), self._num_groups, self._places)
        if decodes.tables != (self._tables.num_changes, rows):
            decodes.tables = self._tables.num_changes, rows
            longest = max(len(entry.sequence.blocks.block_table) for entry in entries)
            adapters = _adapters_of_sequences(entries)  # they act on every newest token
            decodes.set_sequences(self._tables_of(rows, longest), adapters)
        for group in range(1, self._num_groups):
            slots += [
                entry.sequence.blocks.tables[group][position // size] * size + position % size
                for entry, position in zip(entries, positions, strict=True)
            ]
        decodes.numbers[:] = [*newest, *positions, *slots]
        decodes.lengths[:] = [*lengths]
        return decodes.batch

    def _ragged_batch(self, entries: list[StepEntry]) -> tuple[ForwardBatch, list[StepEntry]]:
        firsts = np.array([entry.first for entry in entries], np.int64)
        counts = np.array([entry.num_tokens for entry in entries], np.int64)
        totals = np.array([entry.sequence.num_tokens for entry in entries], np.int64)
        rows = np.array([entry.sequence.blocks.row for entry in entries], np.int64)
        ends = firsts + counts
        starts = np.zeros(len(entries) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        tokens, positions = self._buffers(int(starts[-1]))
        for entry, start, end in zip(entries, starts.tolist(), starts[1:].tolist(), strict=False):
            tokens[start:end] = entry.sequence.token_slice(entry.first, entry.end)
        np.subtract(np.arange(len(tokens)), np.repeat(starts[:-1] - firsts, counts), out=positions)
        indices, offsets = np.divmod(positions, self._block_tokens)
        of_tokens = np.repeat(rows, counts)
        slots = torch.from_numpy(
            np.stack([ids[of_tokens, indices] for ids in self._tables.of_groups]).astype(np.int64) * self._block_tokens
            + offsets
        )
        longest = -(-int(ends.max()) // self._block_tokens)
        complete = np.flatnonzero(ends >= totals)
        logit_rows = _logit_rows(starts, complete, (ends - totals)[complete])
        if any(entry.scored for entry in entries):
            scored = [
                np.arange(start, start + len(entry.scored))
                for entry, start in zip(entries, starts.tolist(), strict=False)
            ]
            logit_rows = np.concatenate([logit_rows, *scored])
        tables = self._tables_of(rows, longest)
        batch = ForwardBatch(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            query_starts=torch.from_numpy(starts),
            context_lens=torch.from_numpy(ends.astype(np.int32)),
            block_tables=tables[0],
            slots=slots[0],
            logit_rows=torch.from_numpy(logit_rows),
            adapters=_adapters_of_tokens(entries, positions, counts),
            reuse=reuse_of(entries),
            pages=None if self._places is None else Pages(self._places, tables, slots),
        )
        return batch, [entries[index] for index in complete]

    def _tables_of(self, rows: list[int] | npt.NDArray[np.int64], num_columns: int) -> torch.Tensor:
        """[G, B, M]."""
        tables = [ids[rows, :num_columns] for ids in self._tables.of_groups]
        return torch.from_numpy(np.stack(tables) if len(tables) > 1 else tables[0][None])

    def _buffers(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if count > len(self._tokens):
            self._tokens, self._positions = np.empty(count, np.int64), np.empty(count, np.int64)
        return self._tokens[:count], self._positions[:count]


def _adapters_of_sequences(entries: list[StepEntry]) -> torch.Tensor | None:
    """Each sequence's [B]."""
    adapters = [entry.sequence.adapter for entry in entries]
    return torch.from_numpy(np.array(adapters, np.int32)) if max(adapters) >= 0 else None


def _adapters_of_tokens(
    entries: list[StepEntry], positions: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> torch.Tensor | None:
    """Each token's [T]: its sequence's adapter, from where it acts."""
    of_sequences = _adapters_of_sequences(entries)
    if of_sequences is None:
        return None
    starts = np.array([entry.sequence.chain.start for entry in entries], np.int64)
    places = np.repeat(of_sequences.numpy(), counts)
    places[positions < np.repeat(starts, counts)] = -1
    return torch.from_numpy(places) if places.max() >= 0 else None


def _logit_rows(
    starts: npt.NDArray[np.int32], complete: npt.NDArray[np.int64], num_draft: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The last token of each complete entry, and the draft tokens after it."""
    last = starts[complete + 1].astype(np.int64) - 1
    if not num_draft.any():
        return last
    counts = num_draft + 1
    firsts = np.cumsum(counts) - counts
    return np.repeat(last - num_draft, counts) + np.arange(counts.sum()) - np.repeat(firsts, counts)
