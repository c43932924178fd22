"""Where the KV of a prompt's reused chunks lies in this engine's cache, and how a step's batch tells the model.

A chunk was computed alone, as a sequence of its own; its blocks are held by whoever made the ``Blend``, and read by the
steps that compute the prompt. Pure bookkeeping: it must not know keys, the block pool or how KV is blended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from mooncake.model.batch import Reuse

if TYPE_CHECKING:
    from mooncake.engine.scheduler import StepEntry


@dataclass(frozen=True, slots=True)
class Blend:
    """Of a sequence's leading tokens, ``sources`` int64: the slot that holds a token's KV; -1: none. ``shifts`` int64:
    how far behind the position that it was computed at the token stands. ``share`` of them is computed anew."""

    sources: npt.NDArray[np.int64]
    shifts: npt.NDArray[np.int64]
    share: float

    @classmethod
    def of_chunks(
        cls, chunks: Iterable[tuple[int, Sequence[int]]], first: int, block_tokens: int, share: float
    ) -> Blend | None:
        """``chunks`` are (where it starts in the sequence, its blocks), in order. What lies before token ``first``
        needs no blending; None when nothing does."""
        spans = [(start, np.asarray(block_ids, np.int64)) for start, block_ids in chunks]
        spans = [(start, ids) for start, ids in spans if start + len(ids) * block_tokens > first]
        if not spans:
            return None
        start, ids = spans[-1]
        sources = np.full(start + len(ids) * block_tokens, -1, np.int64)
        shifts = np.zeros_like(sources)
        for start, ids in spans:
            here = slice(start, start + len(ids) * block_tokens)
            sources[here] = (ids[:, None] * block_tokens + np.arange(block_tokens)).ravel()
            shifts[here] = start
        sources[:first] = -1
        return cls(sources, shifts, share)

    @property
    def first(self) -> int:
        """The first reused token: the KV of those before it is what it would be without blending."""
        return int(np.argmax(self.sources >= 0))

    @property
    def num_tokens(self) -> int:
        return int(np.count_nonzero(self.sources >= 0))


def reuse_of(entries: Sequence[StepEntry]) -> Reuse | None:
    """What the tokens of a step reuse, in the order of its batch; None when none of them does."""
    blends = [entry.sequence.blend for entry in entries if entry.sequence.blend is not None]
    if not blends:
        return None
    sources = np.full(sum(entry.num_tokens for entry in entries), -1, np.int64)
    shifts = np.zeros_like(sources)
    start = 0
    for entry in entries:
        if blend := entry.sequence.blend:
            part = blend.sources[entry.first : entry.end]
            sources[start : start + len(part)] = part
            shifts[start : start + len(part)] = blend.shifts[entry.first : entry.end]
        start += entry.num_tokens
    if not (sources >= 0).any():
        return None
    return Reuse(torch.from_numpy(sources), torch.from_numpy(shifts), blends[0].share)
