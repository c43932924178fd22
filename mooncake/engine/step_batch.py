"""A step's plan as the ragged batch that the model reads.

It does not know why a plan is as it is. ``B`` sequences, ``T`` tokens, ``M`` the longest block table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch

from mooncake.engine.blend import reuse_of
from mooncake.engine.cache.block_tables import BlockTables
from mooncake.engine.step_plan import StepEntry
from mooncake.model.batch import ForwardBatch, Pages
from mooncake.page_groups import PageGroups


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

    def __init__(self, tables: BlockTables, block_tokens: int, groups: PageGroups, hidden_size: int) -> None:
        """``hidden_size``: of the states that sequences which are pooled need; 0: there are no such sequences."""
        self._tables = tables
        self._num_groups = groups.num_groups
        self._places = torch.tensor(groups.places, dtype=torch.int32) if groups.num_groups > 1 else None
        self._block_tokens = block_tokens
        self._hidden_size = hidden_size
        self._decode_batches: dict[int, _DecodeBatch] = {}  # by number of sequences

    def build(self, entries: list[StepEntry]) -> tuple[ForwardBatch, list[StepEntry]]:
        """The batch, and the entries that reach the end of their tokens. Those have one row of logits each, in
        order, plus one for each of their draft tokens. After all of these come the rows of scored prompts. Those that
        are pooled have hidden states in place of logits."""
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
            if num_tokens > 1 or position + 1 < sequence.num_tokens or sequence.pooling is not None:
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
        """Any tokens of any sequences. For the same reason there is a single loop over lists, and two arrays hold what
        comes of it."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in range(self._num_groups)]
        starts, lengths = [0], list[int]()
        rows: list[int] = []
        complete: list[StepEntry] = []
        sampled: list[int] = []  # rows of the batch that need logits: the last of each complete entry, and its draft's
        scored: list[int] = []
        pooled: list[int] = []
        for entry in entries:
            sequence, first, num_tokens, _ = entry
            end, begin = first + num_tokens, len(tokens)
            tokens += sequence.token_slice(first, end).tolist()
            positions += range(first, end)
            for table, of_group in zip(sequence.blocks.tables, slots, strict=True):
                of_group += self._slots_of(table, first, end)
            starts.append(len(tokens))
            lengths.append(end)
            rows.append(sequence.blocks.row)
            if sequence.pooling is not None:
                pooled += (begin + position - first for position in entry.pooled)
            elif end >= sequence.num_tokens:
                complete.append(entry)
                sampled += range(len(tokens) - 1 - (end - sequence.num_tokens), len(tokens))
            scored += range(begin, begin + len(entry.scored))
        count, num_entries = len(tokens), len(entries)
        numbers = np.array([*tokens, *positions, *chain.from_iterable(slots), *sampled, *scored, *pooled], np.int64)
        ends = np.array([*starts, *lengths], np.int32)
        slots_end = (2 + self._num_groups) * count
        of_groups = torch.from_numpy(numbers[2 * count : slots_end].reshape(self._num_groups, count))
        tables = self._tables_of(rows, -(-max(lengths) // self._block_tokens))
        batch = ForwardBatch(
            tokens=torch.from_numpy(numbers[:count]),
            positions=torch.from_numpy(numbers[count : 2 * count]),
            query_starts=torch.from_numpy(ends[: num_entries + 1]),
            context_lens=torch.from_numpy(ends[num_entries + 1 :]),
            block_tables=tables[0],
            slots=of_groups[0],
            logit_rows=torch.from_numpy(numbers[slots_end:]),
            hidden=torch.empty((len(pooled), self._hidden_size)) if pooled else None,
            adapters=_adapters_of_tokens(entries),
            reuse=reuse_of(entries),
            pages=None if self._places is None else Pages(self._places, tables, of_groups),
        )
        return batch, complete

    def _slots_of(self, table: list[int], first: int, end: int) -> Iterator[int]:
        """The slots of tokens ``first ≤ i < end``, a block at a time."""
        size = self._block_tokens
        for index in range(first // size, -(-end // size)):
            base = table[index] * size
            yield from range(base + max(first - index * size, 0), base + min(end - index * size, size))

    def _tables_of(self, rows: list[int], num_columns: int) -> torch.Tensor:
        """[G, B, M]."""
        tables = [ids[rows, :num_columns] for ids in self._tables.of_groups]
        return torch.from_numpy(np.stack(tables) if len(tables) > 1 else tables[0][None])


def _adapters_of_sequences(entries: list[StepEntry]) -> torch.Tensor | None:
    """Each sequence's [B]."""
    adapters = [entry.sequence.adapter for entry in entries]
    return torch.from_numpy(np.array(adapters, np.int32)) if max(adapters) >= 0 else None


def _adapters_of_tokens(entries: list[StepEntry]) -> torch.Tensor | None:
    """Each token's [T]: its sequence's adapter, from where it acts."""
    if all(entry.sequence.adapter < 0 for entry in entries):
        return None
    places: list[int] = []
    for entry in entries:
        num_before = min(max(entry.sequence.chain.start - entry.first, 0), entry.num_tokens)
        places += [-1] * num_before + [entry.sequence.adapter] * (entry.num_tokens - num_before)
    return torch.from_numpy(np.array(places, np.int32)) if max(places) >= 0 else None
