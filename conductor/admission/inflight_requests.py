"""Admitted requests from placement to end: how much KV they hold, when they start to decode, how long they may run.

Pure. One row per request in flat arrays, so that admission can look ahead over all of them at once.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple, Self

import numpy as np

from conductor.admission.lengths import Kind, OutputLengths, sample_beyond
from conductor.arrays import Bools, Floats
from conductor.placement.bookings import Booking

NUM_SAMPLES = 16  # sampled lengths of each answer: one per possible future


class DecodeBatch(NamedTuple):
    """Sequences decoding together, and their prompt tokens. Over several nodes on average, both may be fractions."""

    sequences: float
    context_tokens: float


class Futures(NamedTuple):
    """The sequences of one node at a later time, in each sampled future."""

    left: Floats  # [samples, rows]: tokens still to generate; 0: it has ended
    held: Floats  # [samples, rows]: KV tokens held
    decodes: Bools  # [rows]: whether it decodes by then


class InflightRequests:
    """One owner. Rows are reused; ``rows`` lists those of one node."""

    def __init__(self) -> None:
        self._row: dict[Booking, int] = {}
        self._by_node: dict[str, dict[int, None]] = {}
        self._kinds: dict[int, Kind] = {}
        self._free: list[int] = []
        self.is_open: Bools = np.zeros(0, dtype=bool)
        self.is_decoding: Bools = np.zeros(0, dtype=bool)
        self.joins_at: Floats = np.zeros(0)  # predicted start of decoding (s), then the actual one
        self.context: Floats = np.zeros(0)  # prompt tokens
        self.limit: Floats = np.zeros(0)  # maximum answer tokens
        self.lengths: Floats = np.zeros((0, NUM_SAMPLES))  # sampled answer lengths
        self._grow(64)

    def __len__(self) -> int:
        return len(self._row)

    def copy(self) -> Self:
        """For ``futures`` that draw lengths again without a trace. It sees later requests too: use it at once."""
        copied = copy(self)
        copied.lengths = self.lengths.copy()
        return copied

    def add(self, booking: Booking, kind: Kind, max_tokens: int, joins_at: float, lengths: Floats) -> None:
        if not self._free:
            self._grow(2 * len(self.context))
        row = self._row[booking] = self._free.pop()
        self._kinds[row] = kind
        self._by_node.setdefault(booking.decode_id, {})[row] = None
        self.is_open[row], self.is_decoding[row] = True, False
        self.joins_at[row], self.context[row], self.limit[row] = joins_at, booking.context_tokens, max_tokens
        self.lengths[row] = lengths

    def joined(self, booking: Booking, now: float) -> None:
        """Its prefill has ended, so it decodes from now on."""
        row = self._row.get(booking)
        if row is not None and not self.is_decoding[row]:
            self.is_decoding[row], self.joins_at[row] = True, now

    def remove(self, booking: Booking) -> tuple[Kind | None, float]:
        """Returns its kind and when it joined (inf: never); None if it is unknown or already removed."""
        row = self._row.pop(booking, None)
        if row is None:
            return None, np.inf
        joined_at = float(self.joins_at[row]) if self.is_decoding[row] else np.inf
        self.is_open[row] = self.is_decoding[row] = False
        rows = self._by_node[booking.decode_id]
        del rows[row]
        if not rows:
            del self._by_node[booking.decode_id]
        self._free.append(row)
        return self._kinds.pop(row), joined_at

    def rows(self, node_id: str) -> list[int]:
        return list(self._by_node.get(node_id, ()))

    def decoding_on(self, node_id: str) -> DecodeBatch:
        """What decodes on the node now."""
        rows = self.rows(node_id)
        decodes = self.is_decoding[rows]
        return DecodeBatch(float(decodes.sum()), float((self.context[rows] * decodes).sum()))

    def decoding_at(self, when: float, decode_s: float) -> DecodeBatch:
        """What decodes on all nodes at a later time, if every sequence decodes for ``decode_s``."""
        decodes = self.is_open & (self.joins_at <= when) & (self.joins_at + decode_s > when)
        return DecodeBatch(float(np.count_nonzero(decodes)), float(self.context[decodes].sum()))

    def left_s(self, node_id: str, now: float, step_s: float) -> Floats:
        """Seconds until each sequence on the node ends, by the median of its sampled lengths."""
        rows = self.rows(node_id)
        generated = self._generated(rows, now, step_s)
        left = np.maximum(np.median(self.lengths[rows], axis=1) - generated, 1.0) if rows else np.zeros(0)
        result: Floats = left * step_s + np.maximum(self.joins_at[rows] - now, 0.0)
        return result

    def futures(
        self, rows: list[int], now: float, when: float, step_s: float, lengths: OutputLengths, rng: np.random.Generator
    ) -> Futures:
        """The sequences of ``rows`` at ``when``. Sampled lengths that a sequence has outgrown are drawn again."""
        generated = self._generated(rows, now, step_s)
        sampled = self.lengths[rows]
        for at in np.flatnonzero((sampled <= generated[:, None]).any(axis=1)):
            row, reached = rows[at], generated[at]
            outgrown = sampled[at] <= reached
            share = lengths.distribution(self._kinds[row])
            sampled[at, outgrown] = sample_beyond(
                share, np.full(int(outgrown.sum()), reached), int(self.limit[row]), rng
            )
            self.lengths[row] = sampled[at]
        begins = np.maximum(self.joins_at[rows], now)
        more = np.maximum(when - begins, 0.0) / step_s
        generated_then = np.minimum(generated + more, sampled.T)
        left: Floats = sampled.T - generated_then
        return Futures(left, self.context[rows] + generated_then, self.joins_at[rows] <= when)

    def _generated(self, rows: list[int], now: float, step_s: float) -> Floats:
        """Tokens generated so far, estimated from the time: one per step."""
        since = np.where(self.is_decoding[rows], np.maximum(now - self.joins_at[rows], 0.0), 0.0)
        result: Floats = np.minimum(since / step_s, self.limit[rows])
        return result

    def _grow(self, size: int) -> None:
        """Grow the columns to ``size`` rows, keeping the existing ones."""
        old = len(self.context)
        more = size - old
        for name in ("is_open", "is_decoding"):
            setattr(self, name, np.append(getattr(self, name), np.zeros(more, dtype=bool)))
        for name in ("joins_at", "context", "limit"):
            setattr(self, name, np.append(getattr(self, name), np.zeros(more)))
        self.lengths = np.concatenate((self.lengths, np.zeros((more, NUM_SAMPLES))))
        self._free += range(size - 1, old - 1, -1)
