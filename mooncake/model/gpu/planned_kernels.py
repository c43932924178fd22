"""GPU kernels whose attention follows the plans of the running step, which its model makes once for all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from mooncake.kernels.gpu.attention import DevicePlan
from mooncake.kernels.gpu.kernels import GpuKernels


class Kind(NamedTuple):
    """Of attention. Layers of one kind share a step's plan."""

    window: int  # as ``reference.paged_attention`` takes it: 0 for none, negative for chunks
    num_kv_heads: int
    head_dim: int


Plans = Mapping[Kind, DevicePlan]
"""A step's plan for each kind of attention in the model."""


class PlannedKernels(GpuKernels):
    """If layers share KV, the last ones of a step compute only some of its rows (``ForwardBatch.narrowed``): this is
    planned when the first of them asks."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__(device)
        self.step_plans: dict[Kind, DevicePlan] = {}
        self._planned: torch.Tensor | None = None  # the query starts that they are for

    def follow(self, plans: Plans, query_starts: torch.Tensor) -> None:
        """Use these plans in attention with these ``query_starts``."""
        self.step_plans, self._planned = dict(plans), query_starts

    def paged_attention(
        self,
        query: torch.Tensor,
        cache_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        plan: DevicePlan | None = None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if query_starts is not self._planned:
            self.follow({}, query_starts)
        kind = Kind(window, cache_layer.shape[2], query.shape[2])
        if plan is None and kind not in self.step_plans and len(query):
            is_coded = cache_layer.dtype is torch.int8
            self.step_plans[kind] = self.plan_call(
                query, cache_layer, query_starts, context_lens, window, scaled=is_coded
            )
        return super().paged_attention(
            query,
            cache_layer,
            block_tables,
            query_starts,
            context_lens,
            scale,
            window,
            softcap,
            sinks,
            alibi_slopes,
            plan or self.step_plans.get(kind),
            scales,
        )
