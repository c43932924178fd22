"""The embedding table and the head over tensor parallel ranks: each has some rows of both, that is, some of the
vocabulary's tokens (Shoeybi et al. 2019).

Embeddings are looked up by the rank that has the token, and summed with the zeros of all others, which is exact. The
table could be whole on every rank, and would save that sum of ``[T, hidden]`` per step; but where it is also the head,
it would be in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from mooncake.kernels import Linear


class Ranks(Protocol):
    """The tensor parallel ranks, from the view of one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over the ranks, possibly in place; bit-identical on every rank."""
        ...

    def gather(self, columns: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Every rank's ``columns`` ``[R, widths[rank]]`` side by side, on the first rank; no rows on others."""
        ...


class VocabularyPart:
    """``kernels.Linear`` of the whole matrix, from ``part``, which has this rank's rows of it."""

    def __init__(self, part: Linear, shares: Sequence[range], ranks: Ranks) -> None:
        """``shares`` are the rows of each rank."""
        self.part = part
        self._here = shares[ranks.rank]
        self._widths = [len(share) for share in shares]
        self._ranks = ranks

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, V]`` on the first rank, ``[0, V]`` on others."""
        return self._ranks.gather(self.part(hidden), self._widths)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` on every rank."""
        places = indices - self._here.start
        is_here = (places >= 0) & (places < len(self._here))
        found = self.part.rows(places.clamp(0, len(self._here) - 1))
        return self._ranks.sum(torch.where(is_here[:, None], found, 0))
