"""Matrices stored as 4- or 8-bit codes in groups, as GGUF, GPTQ, AWQ and compressed-tensors publish them.

CPU kernels keep the codes in memory and dequantise them as they multiply (``cpp/grouped.h``). Results equal those of
the dequantised weights, bit for bit; or activations become codes, too, which is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

MOST_GROUP = 128
"""Inputs that share a scale of activations, at most."""


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A matrix ``[out, in]`` stored as codes, with a scale for each group of adjacent inputs of an output.

    A weight is ``level * scale + offset`` in float32, rounded to ``dtype``: exactly the published weight.

    With ``meets_codes`` activations become int8, with a scale for each token and group, and weights are not rounded to
    ``dtype``. Then levels are whole numbers, and groups have at most ``MOST_GROUP`` inputs.
    """

    codes: torch.Tensor  # [out, in]: uint8 indices of ``levels``, or int8 levels
    scales: torch.Tensor  # float32 [out, in / group], with so few bits that level * scale is exact
    offsets: torch.Tensor | None  # float32 [out, in / group]
    levels: torch.Tensor | None  # float32 [16]
    dtype: torch.dtype
    meets_codes: bool = False

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

    def meeting_codes(self) -> GroupedCodes:
        """The same matrix with ``meets_codes``; the matrix as it is if its levels are not whole, nor halves."""
        levels, factor = self.levels, 1
        if levels is not None:
            factor = 1 if _are_whole(levels) else 2
            levels = levels * factor
            if not _are_whole(levels):
                return self
        parts = self.group // math.gcd(self.group, MOST_GROUP)
        scales = (self.scales / factor).repeat_interleave(parts, 1)
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(parts, 1)
        return replace(self, scales=scales, offsets=offsets, levels=levels, dtype=torch.float32, meets_codes=True)

    def of_rows(self, order: torch.Tensor) -> GroupedCodes:
        """The same matrix with its outputs in another order."""
        offsets = None if self.offsets is None else self.offsets[order]
        return replace(self, codes=self.codes[order], scales=self.scales[order], offsets=offsets)

    def of_columns(self, order: torch.Tensor) -> GroupedCodes | None:
        """The same matrix with its inputs in another order; None if that is not an order of whole groups."""
        firsts = order[:: self.group]
        if (firsts % self.group).any() or not torch.equal(order.view(-1, self.group) - firsts[:, None], _steps(self)):
            return None
        groups = firsts // self.group
        offsets = None if self.offsets is None else self.offsets[:, groups]
        return replace(self, codes=self.codes[:, order], scales=self.scales[:, groups], offsets=offsets)

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
            parts[0].meets_codes,
        )


def _steps(codes: GroupedCodes) -> torch.Tensor:
    """Of inputs from the first of their groups, ``[groups, group]``."""
    return torch.arange(codes.group).expand(codes.scales.shape[1], -1)


def _are_whole(levels: torch.Tensor) -> bool:
    return torch.equal(levels, levels.round())
