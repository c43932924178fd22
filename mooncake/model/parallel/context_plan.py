"""Context parallelism as arithmetic: who computes which tokens of a step, sees which keys, and sends how much. No I/O.

The first rank's cache holds every sequence, because the pool's blocks, decode steps and hand-offs use it; the other
ranks keep nothing between two steps. A step's new tokens are split over all ranks. What earlier steps left of their
sequences (the *prefix*) is distributed by the first rank, layer by layer. Letters are as in ``kernels/reference.py``,
with ``S`` ranks.

    new tokens   chunk 0 ┆ 1 ┆ … ┆ 2S-1, of equal length; rank r has chunks r and 2S-1-r: under a causal mask each
                 rank then has the same work with any other's keys (Dubey et al. 2024)
    prefix       part 0 ┆ 1 ┆ … ┆ S-1, part r for rank r; the first rank reads its part in place
    residents    sequences of a step with few new tokens (decodes): the first rank's, undivided
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

LEAST_TOKENS = 64  # sequences with fewer new tokens are not split: computing them is faster than a message per layer

Ints = npt.NDArray[np.int64]


class Method(StrEnum):
    """How ranks see each other's keys."""

    PASS_KV = "pass-kv"  # keys and values circulate; queries stay (ring attention, Liu et al. 2023)
    PASS_Q = "pass-q"  # queries circulate and return as partial outputs (Yang et al. 2024)
    HEADS = "ulysses"  # all tokens of some heads to each rank and back (Jacobs et al. 2023): any mask, but no overlap


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one layer's attention; sizes are bytes to send."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    row_bytes: int  # of one token's key in one head, as pages hold it
    num_kinds: int = 2  # as in ``KVLayout``

    @property
    def kv_bytes(self) -> int:
        return self.num_kinds * self.num_kv_heads * self.row_bytes

    @property
    def query_bytes(self) -> int:
        return 4 * self.num_heads * self.head_dim

    @property
    def partial_bytes(self) -> int:
        """Bytes of a query's output over part of the keys, with its log-sum-exp."""
        return self.query_bytes + 4 * self.num_heads

    def can_part_heads(self, size: int) -> bool:
        """Whether heads divide evenly over the ranks, with KV heads of their own or one that is repeated."""
        return self.num_heads % size == 0 and (self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0)

    def heads_of(self, rank: int, size: int) -> slice:
        return slice(rank * self.num_heads // size, (rank + 1) * self.num_heads // size)

    def kv_heads_of(self, rank: int, size: int) -> slice:
        first = rank * self.num_kv_heads // size
        return slice(first, first + max(self.num_kv_heads // size, 1))


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent new tokens ``first`` ≤ t < ``end`` of a sequence, counted from its first new token."""

    sequence: int
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Sight:
    """What runs of queries see of one stretch of tokens, which is ordered by sequence and then by position; int64
    arrays with one entry per run. The t-th query of a run sees ``firsts + t + 1`` of ``lengths`` tokens, at most all of
    them."""

    starts: Ints  # where the tokens of the run's sequence begin in the stretch
    lengths: Ints
    firsts: Ints

    @property
    def is_blind(self) -> bool:
        return not self.lengths.any()


@dataclass(frozen=True)
class ContextPlan:
    """One step over ``size`` ranks."""

    size: int
    counts: tuple[int, ...]  # new tokens of each sequence
    prefixes: tuple[int, ...]  # tokens before them
    is_cut: tuple[bool, ...]

    @classmethod
    def of(cls, size: int, query_starts: Ints, context_lens: Ints, least_tokens: int = LEAST_TOKENS) -> ContextPlan:
        counts = np.diff(query_starts)
        is_cut = counts >= max(least_tokens, 2 * size)
        return cls(
            size, tuple(counts.tolist()), tuple((context_lens - counts).tolist()), tuple(map(bool, is_cut.tolist()))
        )

    @cached_property
    def num_cut(self) -> int:
        """New tokens of all split sequences."""
        return sum(self.counts[sequence] for sequence in self._cut)

    @cached_property
    def num_prefix(self) -> int:
        """Prefix tokens of all split sequences."""
        return sum(self.prefixes[sequence] for sequence in self._cut)

    @cached_property
    def residents(self) -> list[Run]:
        return [Run(index, 0, count) for index, count in enumerate(self.counts) if not self.is_cut[index]]

    def runs(self, rank: int) -> list[Run]:
        """The rank's tokens of split sequences; two runs per sequence."""
        found = []
        for sequence in self._cut:
            for chunk in (rank, 2 * self.size - 1 - rank):
                first, end = (self.counts[sequence] * border // (2 * self.size) for border in (chunk, chunk + 1))
                found.append(Run(sequence, first, end))
        return found

    def rows(self, runs: Sequence[Run]) -> Ints:
        """Indices of the runs' tokens in the step."""
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        return np.concatenate(
            [np.arange(run.first, run.end) + starts[run.sequence] for run in runs] or [np.empty(0)]
        ).astype(np.int64)

    def rows_of(self, rank: int) -> Ints:
        """Indices of all tokens in the step that the rank computes; on the first one those of residents come last."""
        return self.rows(self.runs(rank) + (self.residents if rank == 0 else []))

    def num_tokens(self, rank: int) -> int:
        return sum(map(len, self.runs(rank)))

    def part(self, rank: int) -> list[tuple[int, int, int]]:
        """The rank's part of the prefixes: (sequence, first token, end)."""
        size = self.size
        borders = [(sequence, self.prefixes[sequence]) for sequence in self._cut]
        return [(sequence, length * rank // size, length * (rank + 1) // size) for sequence, length in borders]

    def part_tokens(self, rank: int) -> int:
        return sum(end - first for _, first, end in self.part(rank))

    def sight_of_new(self, rank: int, origin: int) -> Sight:
        """What the rank's runs see of ``origin``'s new tokens."""
        theirs: dict[int, list[Run]] = {}
        for run in self.runs(origin):
            theirs.setdefault(run.sequence, []).append(run)
        starts = _starts([sum(map(len, runs)) for runs in theirs.values()])
        start_of = dict(zip(theirs, starts, strict=False))
        runs = self.runs(rank)
        return Sight(
            np.array([start_of[run.sequence] for run in runs]),
            np.array([_below(theirs[run.sequence], run.end) for run in runs]),
            np.array([_below(theirs[run.sequence], run.first) for run in runs]),
        )

    def sight_of_part(self, origin: int) -> Sight:
        """What any rank's runs see of ``origin``'s part of the prefixes: all of it."""
        part = self.part(origin)
        lengths = np.array([end - first for _, first, end in part], np.int64)
        starts, twice = _starts(lengths.tolist())[:-1], np.repeat(lengths, 2)  # a sequence has two runs
        return Sight(np.repeat(starts, 2), twice, twice)

    # What is sent, and which method sends least

    def sent_bytes(self, method: Method, shape: Shape) -> int:
        """By all ranks together, for one layer, including what completes the first rank's cache."""
        others, tokens, prefix = self.size - 1, self.num_cut, self.num_prefix
        theirs_new = (tokens - self.num_tokens(0)) * shape.kv_bytes  # to the first rank, unless sent anyway
        if method is Method.PASS_KV:  # the prefix circulates: as many bytes as distributing it
            return others * (tokens + prefix) * shape.kv_bytes
        if method is Method.PASS_Q:
            dealt = (prefix - self.part_tokens(0)) * shape.kv_bytes
            return dealt + others * tokens * (shape.query_bytes + shape.partial_bytes) + theirs_new
        there = others * (prefix + tokens) - (tokens - self.num_tokens(0))  # keys that go to other ranks' heads
        part = max(shape.num_kv_heads // self.size, 1)
        heads = there * shape.kv_bytes * part // shape.num_kv_heads
        return heads + theirs_new + 2 * others * tokens * shape.query_bytes // self.size

    def choose(self, shape: Shape) -> Method:
        """Of the two methods that overlap with attention, the one that sends less.

        The published rule, pass-Q if T / (T + P) < 2 Hkv / Hq, compares what circulates. Ours also counts what pass-Q
        sends back, and what it takes to fill the first rank's cache and to distribute its prefix.
        """
        return min((Method.PASS_KV, Method.PASS_Q), key=lambda method: self.sent_bytes(method, shape))

    @property
    def _cut(self) -> list[int]:
        return [index for index, is_cut in enumerate(self.is_cut) if is_cut]


def _starts(lengths: Sequence[int]) -> Ints:
    """Start of each stretch when they are concatenated, and the end of the last."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _below(runs: Sequence[Run], position: int) -> int:
    """Tokens of the runs before this position."""
    return sum(min(max(position - run.first, 0), len(run)) for run in runs)
