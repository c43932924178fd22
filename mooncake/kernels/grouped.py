"""Matrices stored as 4- or 8-bit codes in groups, as GGUF, GPTQ, AWQ and compressed-tensors publish them.

CPU kernels keep the codes in memory and dequantise them as they multiply (``cpp/grouped.h``). Results equal those of
the dequantised weights, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A matrix ``[out, in]`` stored as codes, with a scale for each group of adjacent inputs of an output.

    A weight is ``level * scale + offset`` in float32, rounded to ``dtype``: exactly the published weight.
    """

    codes: torch.Tensor  # [out, in]: uint8 indices of ``levels``, or int8 levels
    scales: torch.Tensor  # float32 [out, in / group], with so few bits that level * scale is exact
    offsets: torch.Tensor | None  # float32 [out, in / group]
    levels: torch.Tensor | None  # float32 [16]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def weights(self) -> torch.Tensor:
        """The dequantised matrix, ``[out, in]`` of ``dtype``."""
        levels = self.codes.float() if self.levels is None else self.levels[self.codes.int()]
        groups = levels.view(len(levels), -1, self.group) * self.scales.unsqueeze(-1)
        if self.offsets is not None:
            groups += self.offsets.unsqueeze(-1)
        weights: torch.Tensor = groups.flatten(1).to(self.dtype)
        return weights

    def of_rows(self, order: torch.Tensor) -> GroupedCodes:
        """The same matrix with its outputs in another order."""
        offsets = None if self.offsets is None else self.offsets[order]
        return replace(self, codes=self.codes[order], scales=self.scales[order], offsets=offsets)

    def part(self, rows: slice, columns: slice) -> GroupedCodes | None:
        """These outputs and inputs; None if a group would be cut."""
        first, end, _ = columns.indices(self.codes.shape[1])
        if first % self.group or end % self.group:
            return None
        groups = slice(first // self.group, end // self.group)
        offsets = None if self.offsets is None else self.offsets[rows, groups]
        return replace(self, codes=self.codes[rows, columns], scales=self.scales[rows, groups], offsets=offsets)

    def scaled(self, rows: torch.Tensor) -> GroupedCodes:
        """Each output multiplied by its factor in ``rows`` ``[out]``; the factors are powers of two."""
        offsets = None if self.offsets is None else self.offsets * rows[:, None]
        return replace(self, scales=self.scales * rows[:, None], offsets=offsets)

    def joins(self, other: GroupedCodes) -> bool:
        """Whether rows of both can be stacked into one matrix."""
        same_levels = (
            self.levels is other.levels
            if self.levels is None or other.levels is None
            else torch.equal(self.levels, other.levels)
        )
        has_offsets = self.offsets is not None, other.offsets is not None
        return same_levels and self.group == other.group and has_offsets[0] == has_offsets[1]

    @staticmethod
    def stacked(parts: Sequence[GroupedCodes]) -> GroupedCodes:
        """One matrix of the rows of all ``parts``; every pair must join."""
        offsets = [part.offsets for part in parts if part.offsets is not None]
        return GroupedCodes(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(offsets) if offsets else None,
            parts[0].levels,
            parts[0].dtype,
        )
