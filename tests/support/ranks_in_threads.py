"""Tensor parallel ranks as threads of one process, which exchange tensors through its memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch


class InThreads:
    """What ranks do together, among threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: dict[int, torch.Tensor] = {}

    def exchanged(self, rank: int, values: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = values
        self._barrier.wait()
        given = [self._given[rank].clone() for rank in range(len(self._given))]
        self._barrier.wait()
        return given


@dataclass(frozen=True)
class InThread:
    """``Ranks``, from the view of one of them."""

    ranks: InThreads
    rank: int
    size: int

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.ranks.exchanged(self.rank, values)).sum(0)

    def gather(self, columns: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        everyones = torch.cat(self.ranks.exchanged(self.rank, columns), 1)
        return everyones if self.rank == 0 else everyones[:0]

    def share(self, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(self.ranks.exchanged(self.rank, values)[0])
