"""Attention of one step over ranks that each hold part of its tokens, by three methods.

``context_plan`` decides who holds what and sees what; this module sends it and computes attention, with sends in flight
during the computation. Keys and values travel as the cache's own rows, ``[K|V, Hkv, tokens, row width]``, and are
attended to where they arrive, as pages of one token. It knows nothing of how ranks are reached (``Post``), or how they
start or end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from mooncake.kernels import HostKernels
from mooncake.kernels.reference import merge_attention, positions_from
from mooncake.model.parallel.context_home import Home, Rows
from mooncake.model.parallel.context_plan import ContextPlan, Ints, Method, Run, Shape, Sight
from mooncake.model_config import ModelConfig

Partial = tuple[torch.Tensor, torch.Tensor]
"""An output ``[T, Hq, D]`` over some of the keys, and its log-sum-exp ``[T, Hq]``."""


class Kind(IntEnum):
    """The kind of a message; those of one kind arrive in the order in which they were sent."""

    NEW = 1  # rows of new tokens
    PREFIX = 2  # rows of tokens before them
    QUERY = 3
    OUTPUT = 4


class Awaited(Protocol):
    def wait(self) -> torch.Tensor:
        """Wait for the message and return it; may be called again. Raises if it cannot arrive."""
        ...


class Post(Protocol):
    """How one rank reaches the others."""

    rank: int
    size: int

    def send(self, values: torch.Tensor, to: int, kind: Kind) -> None:
        """Start sending; the values must be contiguous and must not change before ``settle`` returns."""
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, kind: Kind) -> Awaited: ...

    def settle(self) -> None:
        """Return once everything has been sent. Raises if it cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class _Look:
    """A ``Sight`` in the form that attention over one-token pages takes."""

    tables: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor
    is_blind: bool

    @classmethod
    def of(cls, sight: Sight, query_starts: torch.Tensor) -> _Look:
        reach = torch.arange(int(sight.lengths.max(initial=0)), dtype=torch.int32)
        positions = positions_from(_int32(sight.firsts), query_starts)
        return cls(_int32(sight.starts)[:, None] + reach, _int32(sight.lengths), positions, sight.is_blind)


def needs_whole_contexts(config: ModelConfig, layer: int) -> bool:
    """Whether what a key's score is depends on how far away it is: in parts of a context, nobody knows."""
    return config.window_of(layer) != 0 or len(config.alibi_slopes) > 0


class ContextAttention:
    """``batch.Attention`` of one rank for one step. ``own`` is where the pass writes the keys and values of the rank's
    tokens: those of its runs, followed on the first rank by those of residents."""

    def __init__(
        self,
        plan: ContextPlan,
        post: Post,
        kernels: HostKernels,
        config: ModelConfig,
        shape: Shape,
        own: Rows,
        method: Method | None,
        home: Home | None,
    ) -> None:
        """``method`` None: the plan chooses; layers that need whole contexts always go by heads. ``home``: only on the
        first rank."""
        self._plan, self._post, self._kernels, self._config = plan, post, kernels, config
        self._own, self._home = own, home
        self._alibi_slopes = torch.tensor(config.alibi_slopes) if config.alibi_slopes else None
        self._shape = shape
        self._method = method or plan.choose(shape)
        self._num_tokens = [plan.num_tokens(rank) for rank in range(plan.size)]
        self._part_tokens = [plan.part_tokens(rank) for rank in range(plan.size)]
        self._starts = [_query_starts(plan.runs(rank)) for rank in range(plan.size)]
        self._looks: dict[tuple[str, int, int], _Look] = {}
        self._others = [other for other in range(plan.size) if other != post.rank]

    def method_of(self, layer: int) -> Method:
        return Method.HEADS if needs_whole_contexts(self._config, layer) else self._method

    def __call__(self, layer: int, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        count = self._num_tokens[self._post.rank]
        if self._home is not None:
            self._home.keep(layer, 0, self._own)
        cut, own = query[:count], self._own[:, :, :count].contiguous()
        method = self.method_of(layer)
        if method is Method.HEADS:
            mixed = self._by_heads(layer, cut, own, sinks)
        elif method is Method.PASS_Q:
            mixed = self._pass_q(layer, cut, own).with_sinks(sinks)
        else:
            mixed = self._pass_kv(layer, cut, own).with_sinks(sinks)
        if len(query) > count:
            mixed = torch.cat([mixed, self._residents(layer, query[count:], sinks)])
        self._post.settle()
        return mixed

    # Keys and values circulate

    def _pass_kv(self, layer: int, query: torch.Tensor, own: Rows) -> _Seen:
        post, rank, size, home = self._post, self._post.rank, self._plan.size, self._home
        left, right = (rank - 1) % size, (rank + 1) % size
        part = self._deal(layer)
        new = own
        seen = _Seen()
        if home is not None:
            seen.add(self._in_place(layer, query, 0, self._plan.prefixes))
        for hop in range(size):
            origin, is_last = (rank - hop) % size, hop == size - 1
            before = (origin - 1) % size
            if not is_last:
                post.send(new, right, Kind.NEW)
                next_new = self._rows_from(left, self._num_tokens[before], Kind.NEW)
                if home is not None:
                    self._send_rows(home.part(layer, origin), right, Kind.PREFIX)
                else:
                    next_part = self._rows_from(left, self._part_tokens[before], Kind.PREFIX)
            seen.add(self._attend(query, rank, new, self._look("new", rank, origin)))
            if home is None:
                prefix = part.wait()
                if not is_last and right:
                    self._send_rows(prefix, right, Kind.PREFIX)
                seen.add(self._attend(query, rank, prefix, self._look("part", rank, origin)))
            if not is_last:
                new = next_new.wait()
                if home is not None:
                    home.keep(layer, before, new)
                else:
                    part = next_part
        return seen

    def _deal(self, layer: int) -> Awaited:
        """Send each rank its part of the prefixes; returns this rank's own."""
        if self._home is None:
            return self._rows_from(0, self._part_tokens[self._post.rank], Kind.PREFIX)
        for other in range(1, self._plan.size):
            self._send_rows(self._home.part(layer, other), other, Kind.PREFIX)
        return _Here(self._own[:, :, :0])  # the first rank reads its part in place

    # Queries circulate

    def _pass_q(self, layer: int, query: torch.Tensor, own: Rows) -> _Seen:
        post, rank, size, home = self._post, self._post.rank, self._plan.size, self._home
        left, right = (rank - 1) % size, (rank + 1) % size
        part = self._deal(layer)
        arriving: dict[int, Awaited] = {}
        if home is None:
            post.send(own, 0, Kind.NEW)
        else:
            arriving = self._new_of_others()
        shape = (*query.shape[:2], query.shape[2] + 1)
        coming_home = [post.receive(shape, torch.float32, other, Kind.OUTPUT) for other in self._others]
        visiting, seen = query.contiguous(), _Seen()
        for hop in range(size):
            origin, is_last = (rank - hop) % size, hop == size - 1
            if not is_last:
                post.send(visiting, right, Kind.QUERY)
                count = self._num_tokens[(origin - 1) % size]
                next_visiting = post.receive((count, *query.shape[1:]), torch.float32, left, Kind.QUERY)
            here = _Seen() if hop else seen
            here.add(self._attend(visiting, origin, own, self._look("new", origin, rank)))
            if home is None:
                here.add(self._attend(visiting, origin, part.wait(), self._look("part", origin, rank)))
            else:
                here.add(self._in_place(layer, visiting, origin, [length // size for length in self._plan.prefixes]))
            if hop:
                output, log_sums = here.partial(visiting)
                post.send(torch.cat([output, log_sums[..., None]], dim=-1), origin, Kind.OUTPUT)
            if not is_last:
                visiting = next_visiting.wait()
        for other, rows in arriving.items():
            assert home is not None
            home.keep(layer, other, rows.wait())
        for awaited in coming_home:
            both = awaited.wait()
            seen.add((both[..., :-1], both[..., -1]))
        return seen

    # Each rank gets all tokens of some heads

    def _by_heads(self, layer: int, query: torch.Tensor, own: Rows, sinks: torch.Tensor | None) -> torch.Tensor:
        rank, size, shape, order = self._post.rank, self._plan.size, self._shape, self._order
        prefix = self._send_heads(layer, query, own)
        heads, kv_heads = shape.heads_of(rank, size), shape.kv_heads_of(rank, size)
        queries = self._from_all(query[:, heads], Kind.QUERY, self._num_tokens)
        if self._home is None:
            num_kv = kv_heads.stop - kv_heads.start
            new = [self._rows_from(other, self._num_tokens[other], Kind.NEW, num_kv) for other in self._others]
            new.insert(rank, _Here(own[:, kv_heads]))
            pages = _pages(torch.cat([each.wait() for each in (prefix, *new)], dim=2))
            tables = order.tables
        else:
            for other, rows in self._new_of_others().items():
                self._home.keep(layer, other, rows.wait())
            pages = self._home.layers[layer][:, :, kv_heads]
            tables = self._home.batch.block_tables[order.sequences].contiguous()
        together = torch.cat([each.wait() for each in queries])[order.by_sequence]
        mine = [None if numbers is None else numbers[heads] for numbers in (sinks, self._alibi_slopes)]
        mixed = self._whole(layer, together, pages, tables, order.query_starts, order.context_lens, *mine)
        by_rank = torch.split(mixed[order.by_rank], self._num_tokens)
        for other in self._others:
            self._post.send(by_rank[other], other, Kind.OUTPUT)
        outputs = self._from_all(by_rank[rank], Kind.OUTPUT, [len(query)] * size)
        return torch.cat([each.wait() for each in outputs], dim=1)

    def _send_heads(self, layer: int, query: torch.Tensor, own: Rows) -> Awaited:
        """Send the other ranks their heads, and the first rank all keys and values; returns the prefixes' rows for its
        own heads."""
        size, shape, home = self._plan.size, self._shape, self._home
        for other in self._others:
            heads, kv_heads = shape.heads_of(other, size), shape.kv_heads_of(other, size)
            self._post.send((own[:, kv_heads] if other else own).contiguous(), other, Kind.NEW)
            self._post.send(query[:, heads].contiguous(), other, Kind.QUERY)
        mine = shape.kv_heads_of(self._post.rank, size)
        if home is None:
            return self._rows_from(0, self._plan.num_prefix, Kind.PREFIX, mine.stop - mine.start)
        prefix = torch.cat([home.part(layer, each) for each in range(size)], dim=2)
        for other in self._others:
            self._send_rows(prefix[:, shape.kv_heads_of(other, size)].contiguous(), other, Kind.PREFIX)
        return _Here(prefix[:, mine])

    def _from_all(self, own: torch.Tensor, kind: Kind, counts: Sequence[int]) -> list[Awaited]:
        """``[count, Hq / S, D]`` from each rank."""
        found: list[Awaited] = [
            self._post.receive((counts[other], *own.shape[1:]), torch.float32, other, kind) for other in self._others
        ]
        found.insert(self._post.rank, _Here(own))
        return found

    @cached_property
    def _order(self) -> _HeadsOrder:
        return _HeadsOrder(self._plan)

    # Parts shared by the three methods

    def _new_of_others(self) -> dict[int, Awaited]:
        """Keys and values of all heads, being sent to the first rank."""
        return {other: self._rows_from(other, self._num_tokens[other], Kind.NEW) for other in self._others}

    def _residents(self, layer: int, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        assert self._home is not None
        batch, runs = self._home.batch, self._plan.residents
        sequences = [run.sequence for run in runs]
        tables, lengths = batch.block_tables[sequences].contiguous(), batch.context_lens[sequences]
        return self._whole(
            layer, query, self._home.layers[layer], tables, _query_starts(runs), lengths, sinks, self._alibi_slopes
        )

    def _whole(
        self,
        layer: int,
        query: torch.Tensor,
        pages: torch.Tensor,
        tables: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        config = self._config
        rest = (config.softmax_scale, config.window_of(layer), config.score_cap, sinks, alibi_slopes)
        return self._kernels.paged_attention(query, pages, tables, starts, lengths, *rest)

    def _in_place(self, layer: int, query: torch.Tensor, origin: int, lengths: Sequence[int]) -> Partial | None:
        """Attention of ``origin``'s queries over the first tokens of each sequence, in place in the cache."""
        assert self._home is not None
        sequences = [run.sequence for run in self._plan.runs(origin)]
        seen = torch.tensor([lengths[sequence] for sequence in sequences], dtype=torch.int32)
        tables, positions = self._home.batch.block_tables[sequences], positions_from(seen, self._starts[origin])
        look = _Look(tables.contiguous(), seen, positions, not seen.any())
        return self._over(query, origin, self._home.layers[layer], look)

    def _attend(self, query: torch.Tensor, origin: int, rows: Rows, look: _Look) -> Partial | None:
        return self._over(query, origin, _pages(rows), look)

    def _over(self, query: torch.Tensor, origin: int, pages: torch.Tensor, look: _Look) -> Partial | None:
        if look.is_blind:
            return None
        starts, scale, cap = self._starts[origin], self._config.softmax_scale, self._config.score_cap
        seen = (look.tables, starts, look.lengths, look.positions)
        return self._kernels.partial_attention(query, pages, *seen, scale, cap)

    def _look(self, what: str, rank: int, origin: int) -> _Look:
        """Cached: the same for every layer."""
        key = (what, rank, origin)
        if key not in self._looks:
            plan = self._plan
            sight = plan.sight_of_new(rank, origin) if what == "new" else plan.sight_of_part(origin)
            self._looks[key] = _Look.of(sight, self._starts[rank])
        return self._looks[key]

    def _send_rows(self, rows: Rows, to: int, kind: Kind) -> None:
        if rows.shape[2]:
            self._post.send(rows, to, kind)

    def _rows_from(self, source: int, count: int, kind: Kind, num_heads: int | None = None) -> Awaited:
        num_kinds, heads, _, width = self._own.shape
        if not count:
            return _Here(self._own[:, :num_heads, :0])
        return self._post.receive((num_kinds, num_heads or heads, count, width), self._own.dtype, source, kind)


class _Seen:
    """Attention over everything seen so far."""

    def __init__(self) -> None:
        self._so_far: Partial | None = None

    def add(self, part: Partial | None) -> None:
        if self._so_far is None:
            self._so_far = part
        elif part is not None:
            merge_attention(*self._so_far, *part)

    def with_sinks(self, sinks: torch.Tensor | None) -> torch.Tensor:
        """The output, once everything has been seen: a sink is a part with a score and no value."""
        assert self._so_far is not None, "every token sees itself"
        output, log_sums = self._so_far
        if sinks is not None:
            self.add((torch.zeros_like(output), sinks.expand_as(log_sums)))
        return output

    def partial(self, query: torch.Tensor) -> Partial:
        """The state, also for queries that may have seen nothing."""
        if self._so_far is None:
            return torch.zeros_like(query), query.new_full(query.shape[:2], float("-inf"))
        return self._so_far


@dataclass(frozen=True, slots=True)
class _Here:
    values: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.values


class _HeadsOrder:
    """The order that turns tokens of all ranks back into sequences."""

    def __init__(self, plan: ContextPlan) -> None:
        runs = [run for rank in range(plan.size) for run in plan.runs(rank)]
        rows = torch.from_numpy(plan.rows(runs))
        self.by_sequence = rows.argsort()  # from the ranks' tokens, concatenated
        self.by_rank = self.by_sequence.argsort()
        self.sequences = [index for index, is_cut in enumerate(plan.is_cut) if is_cut]
        counts = [plan.counts[sequence] for sequence in self.sequences]
        prefixes = [plan.prefixes[sequence] for sequence in self.sequences]
        self.query_starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        self.context_lens = _int32(np.add(counts, prefixes))
        # Where they are: first the ranks' parts of the prefixes, then the ranks' new tokens.
        parts = [(sequence, first, end) for rank in range(plan.size) for sequence, first, end in plan.part(rank)]
        ends = np.cumsum([end - first for _, first, end in parts])
        self.tables = torch.zeros((len(counts), int(self.context_lens.max())), dtype=torch.int32)
        for index, sequence in enumerate(self.sequences):
            for (owner, first, end), stop in zip(parts, ends.tolist(), strict=True):
                if owner == sequence:
                    self.tables[index, first:end] = torch.arange(stop - (end - first), stop, dtype=torch.int32)
            start, count = int(self.query_starts[index]), counts[index]
            new = self.by_sequence[start : start + count] + plan.num_prefix
            self.tables[index, prefixes[index] : prefixes[index] + count] = new.int()


def _pages(rows: Rows) -> torch.Tensor:
    """The rows in place, as a layer of a paged cache with blocks of one token."""
    num_kinds, num_heads, count, width = rows.shape
    kind, head, token, _ = rows.stride()
    return rows.as_strided((count, num_kinds, num_heads, 1, width), (token, kind, head, width, 1))


def _query_starts(runs: Sequence[Run]) -> torch.Tensor:
    return _int32(np.concatenate([[0], np.cumsum([len(run) for run in runs])]))


def _int32(values: Ints) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int32))
