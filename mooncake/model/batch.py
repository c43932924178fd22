"""The one batch form: a ragged list of (sequence, first token, number of tokens).

``B`` sequences, ``T`` tokens in total, ``M`` the longest block table, ``R`` rows whose logits are wanted. A prefill
chunk has many tokens in the batch, a decode step one, a speculative check a few. The model knows no other form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from mooncake.kernels.recurrent import Runs


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens of a step whose KV is already in the cache, computed with nothing before their chunk."""

    sources: torch.Tensor  # int64 [T]: the slot with its KV; -1: none
    shifts: torch.Tensor  # int64 [T]: the token's position minus the one its KV was computed for
    share: float  # fraction of these tokens to recompute in all layers (``blend``)
    ranks: torch.Tensor | None = None  # float32 [T]: the highest are recomputed; None: those whose KV deviates most

    @property
    def num_tokens(self) -> int:
        return int((self.sources >= 0).sum())

    def of(self, rows: torch.Tensor) -> Reuse:
        ranks = None if self.ranks is None else self.ranks[rows]
        return Reuse(self.sources[rows], self.shifts[rows], self.share, ranks)


@dataclass(frozen=True, slots=True)
class Pages:
    """Where a step's KV is when layers are in several groups (``page_groups``), ``G`` of them."""

    places: torch.Tensor  # int32 [layers of the cache, 2], on the host: each one's group, and first row of its pages
    block_tables: torch.Tensor  # int32 [G, B, M], contiguous
    slots: torch.Tensor  # int64 [G, T], contiguous

    def of(self, sequences: torch.Tensor | slice, rows: torch.Tensor | slice) -> Pages:
        return Pages(self.places, self.block_tables[:, sequences].contiguous(), self.slots[:, rows].contiguous())


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    tokens: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]: absolute position of each token in its sequence
    query_starts: torch.Tensor  # int32 [B+1]: tokens of sequence b are query_starts[b] ≤ t < query_starts[b+1]
    context_lens: torch.Tensor  # int32 [B]: KV tokens of each sequence once this step's own are written
    block_tables: torch.Tensor  # int32 [B, M]: block ids; arbitrary as padding and before all queries' windows
    slots: torch.Tensor  # int64 [T]: block_id * block_tokens + offset, where each token's KV is written
    logit_rows: torch.Tensor  # int64 [R]: the tokens t whose logits are wanted
    hidden: torch.Tensor | None = None  # float32 [P, hidden], written: the last hidden states of the last P of those
    # tokens, behind the final norm; their logits are not wanted. On the host
    adapters: torch.Tensor | None = None  # int32 [T]: index of the adapter that acts on each, -1: none; None: on none
    reuse: Reuse | None = None
    pages: Pages | None = None  # None: all layers are one group, and follow each other in its pages
    runs: Mapping[int, Runs] | None = None  # by group, where layers keep states; None: ``States`` makes them

    @classmethod
    def of_sequence(
        cls, tokens: torch.Tensor, first: int, block_ids: torch.Tensor, block_tokens: int, logit_rows: torch.Tensor
    ) -> ForwardBatch:
        """``tokens`` [T] of one sequence from position ``first`` on, whose KV is in ``block_ids``, int32 [M]."""
        end = first + tokens.shape[0]
        positions = torch.arange(first, end)
        return cls(
            tokens=tokens,
            positions=positions,
            query_starts=torch.tensor([0, end - first], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=block_ids[None],
            slots=block_ids[positions // block_tokens].long() * block_tokens + positions % block_tokens,
            logit_rows=logit_rows,
        )

    @classmethod
    def of_prompt(cls, tokens: torch.Tensor, block_tokens: int, logit_rows: torch.Tensor) -> ForwardBatch:
        """One whole prompt, ``tokens`` [T], in the first blocks of a cache."""
        block_ids = torch.arange(-(-tokens.shape[0] // block_tokens), dtype=torch.int32)
        return cls.of_sequence(tokens, 0, block_ids, block_tokens, logit_rows)

    @classmethod
    def of_last_token(cls, tokens: torch.Tensor, block_tokens: int, block_ids: Sequence[int]) -> ForwardBatch:
        """A decode step of the last of ``tokens`` [T]; these blocks have the KV of the others."""
        table, first = torch.tensor(list(block_ids), dtype=torch.int32), tokens.shape[0] - 1
        return cls.of_sequence(tokens[first:], first, table, block_tokens, torch.tensor([0]))

    def pages_of(self, layer: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """For the cache's ``layer``: its first row of a page (where each layer is one row), block tables and slots."""
        if self.pages is None:
            return layer, self.block_tables, self.slots
        group, row = self.pages.places[layer].tolist()
        return row, self.pages.block_tables[group], self.pages.slots[group]

    def part(self, begin: int, end: int) -> ForwardBatch:
        """Only its tokens ``begin`` ≤ t < ``end``, at least one, without ``reuse``. Computed after those before
        them, they get the same results as in one batch; the remaining logits keep their order."""
        if begin == 0 and end == self.tokens.shape[0]:
            return self
        first = int(torch.searchsorted(self.query_starts, begin, right=True)) - 1
        last = int(torch.searchsorted(self.query_starts, end))  # the first sequence without any of them
        missing = (self.query_starts[first + 1 : last + 1] - end).clamp(min=0)
        rows = self.logit_rows
        return ForwardBatch(
            tokens=self.tokens[begin:end],
            positions=self.positions[begin:end],
            query_starts=self.query_starts[first : last + 1].clamp(begin, end) - begin,
            context_lens=self.context_lens[first:last] - missing,
            block_tables=self.block_tables[first:last],
            slots=self.slots[begin:end],
            logit_rows=rows[(rows >= begin) & (rows < end)] - begin,
            adapters=None if self.adapters is None else self.adapters[begin:end],
            pages=None if self.pages is None else self.pages.of(slice(first, last), slice(begin, end)),
        )

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]

    @property
    def num_hidden(self) -> int:
        """How many of the last logit rows are for ``hidden``."""
        return 0 if self.hidden is None else self.hidden.shape[0]

    def thinned(self, rows: torch.Tensor) -> ForwardBatch:
        """Only these tokens (int64, rising), at least one of each sequence, whose positions may have gaps then:
        attention must be told them. Logits can only be wanted of these rows."""
        places = torch.full_like(self.tokens, -1)
        places[rows] = torch.arange(len(rows), device=rows.device)
        return replace(
            self,
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            query_starts=torch.searchsorted(rows, self.query_starts.long()).int(),
            slots=self.slots[rows],
            logit_rows=places[self.logit_rows],
            adapters=None if self.adapters is None else self.adapters[rows],
            reuse=None if self.reuse is None else self.reuse.of(rows),
        )

    def narrowed(self, rows: torch.Tensor) -> ForwardBatch:
        """Only these tokens (int64, at least one): a run of adjacent ones is a sequence over its owner's blocks.

        What is in the cache stays there. Logits can only be wanted of these rows.
        """
        starts = self.query_starts.long()
        owners = torch.repeat_interleave(torch.arange(self.num_sequences, device=rows.device), starts.diff())[rows]
        positions = self.positions[rows]
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = (owners.diff() != 0) | (positions.diff() != 1)
        firsts = is_first.nonzero().flatten()
        ends = torch.cat([firsts[1:], firsts.new_tensor([len(rows)])])
        sequences = owners[firsts]
        places = torch.full_like(self.tokens, -1)
        places[rows] = torch.arange(len(rows), device=rows.device)
        return ForwardBatch(
            tokens=self.tokens[rows],
            positions=positions,
            query_starts=torch.cat([firsts, ends[-1:]]).int(),
            context_lens=(positions[ends - 1] + 1).int(),
            block_tables=self.block_tables[sequences],
            slots=self.slots[rows],
            logit_rows=places[self.logit_rows],
            hidden=self.hidden,
            adapters=None if self.adapters is None else self.adapters[rows],
            reuse=None if self.reuse is None else self.reuse.of(rows),
            pages=None if self.pages is None else self.pages.of(sequences, rows),
        )


class LayerHook(Protocol):
    """What happens around each layer of a step: waiting for loaded KV, streaming computed KV."""

    @property
    def wants_layers(self) -> bool:
        """Whether it has anything to do between this step's layers; otherwise they may run without calling it."""
        ...

    def before_layer(self, layer: int) -> None:
        """Called before layer ``layer`` touches the cache. Blocks until reused KV of that layer is there.

        Raises KVLoadFailed when it will not come; the step is then abandoned and nothing of it counts.
        """

    def after_layer(self, layer: int) -> None:
        """Called once the step's KV of layer ``layer`` is in the cache."""


class Attention(Protocol):
    """Computes attention instead of the kernel, on a rank that has only part of the context."""

    def __call__(self, layer: int, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """``[T, Hq, D]`` of the step's queries ``[T, Hq, D]``, whose keys and values are written; ``sinks`` [Hq]."""
        ...


@runtime_checkable
class PieceHook(LayerHook, Protocol):
    """A hook that is also called before the whole step's part of a layer is computed, when steps run in pieces."""

    def after_piece(self, layer: int, num_tokens: int) -> None:
        """Called once the KV of layer ``layer`` of the step's first ``num_tokens`` tokens is in the cache, except
        for all of them: then ``after_layer`` is called."""


class NoHook:
    """For steps whose KV neither comes from nor goes to anywhere else."""

    wants_layers = False

    def before_layer(self, layer: int) -> None:
        pass

    def after_layer(self, layer: int) -> None:
        pass


class OnlyWaiting:
    """A hook for passes whose KV is not streamed: it still waits for what they reuse."""

    def __init__(self, hook: LayerHook) -> None:
        self.wants_layers = hook.wants_layers
        self.before_layer = hook.before_layer

    def after_layer(self, layer: int) -> None:
        pass
