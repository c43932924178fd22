"""Where the KV of a prompt's reused chunks is in this engine's cache, and how a step's batch describes it to the model.

A chunk was computed alone, as its own sequence; the creator of the ``Blend`` holds its blocks, and the steps that
compute the prompt read them. Pure bookkeeping: it knows neither keys, the block pool nor how KV is blended.
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
    from mooncake.engine.step_plan import StepEntry


@dataclass(frozen=True, slots=True)
class Blend:
    """For a sequence's leading tokens, ``sources`` int64: the slot with a token's KV; -1: none. ``shifts`` int64:
    the token's position minus the one its KV was computed for. A fraction ``share`` of them is recomputed."""

    sources: npt.NDArray[np.int64]
    shifts: npt.NDArray[np.int64]
    share: float

    @classmethod
    def of_chunks(
        cls, chunks: Iterable[tuple[int, Sequence[int]]], first: int, block_tokens: int, share: float
    ) -> Blend | None:
        """``chunks`` are (start in the sequence, blocks), in order. Tokens before ``first`` need no blending; None
        when no other tokens do."""
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
        """The first reused token: the KV before it is exact."""
        return int(np.argmax(self.sources >= 0))

    @property
    def num_tokens(self) -> int:
        return int(np.count_nonzero(self.sources >= 0))


def reuse_of(entries: Sequence[StepEntry]) -> Reuse | None:
    """What a step's tokens reuse, in the order of its batch; None when none does."""
    blends = [blend for entry in entries if (blend := entry.sequence.reused.blend) is not None]
    if not blends:
        return None
    sources = np.full(sum(entry.num_tokens for entry in entries), -1, np.int64)
    shifts = np.zeros_like(sources)
    start = 0
    for entry in entries:
        if blend := entry.sequence.reused.blend:
            part = blend.sources[entry.first : entry.end]
            sources[start : start + len(part)] = part
            shifts[start : start + len(part)] = blend.shifts[entry.first : entry.end]
        start += entry.num_tokens
    if not (sources >= 0).any():
        return None
    return Reuse(torch.from_numpy(sources), torch.from_numpy(shifts), blends[0].share)
