"""Blending: assembling a prompt's KV from text chunks computed alone (CacheBlend, arXiv 2405.16444).

Keys are rotated to their new positions, which RoPE allows. What they lack is the effect of attention to the chunks
before them, and that matters for few tokens. Layer 0 is computed for all tokens; those whose fresh values of layer 1
differ most from the stored ones stay in the batch for the later layers, fewer and fewer of them. A token that has left
costs one copy per layer, and its query is never computed. Tokens without stored KV stay to the end.

What remains is an ordinary batch but for its positions, which have gaps. It knows neither requests nor where stored KV
comes from.
"""

from __future__ import annotations

import torch

from mooncake.kernels import HostKernels
from mooncake.kernels.reference import from_page_rows
from mooncake.model.batch import ForwardBatch, LayerHook, Reuse
from mooncake.model.page_rows import page_rows, row_numbers

FIRST_CHOICE = 1  # the first layer at which tokens leave: keys and values of layer 0 depend on nothing before them
LAST_CHOICE = 10  # from this layer on only the configured share is left
FIRST_SURPLUS = 2.0  # multiple of the share that stays at first


def share_at(layer: int, share: float) -> float:
    """Fraction of the reused tokens computed after the keys and values of ``layer``: more at first, because one
    layer's deviation predicts the next one's only roughly."""
    if layer < FIRST_CHOICE:
        return 1.0
    progress = min(1.0, (layer - FIRST_CHOICE) / (LAST_CHOICE - FIRST_CHOICE))
    return min(1.0, share * (FIRST_SURPLUS + (1.0 - FIRST_SURPLUS) * progress))


class Blending:
    """One batch with reused tokens on its way through the layers. ``batch`` is the part still computed.

    It stands between the pass and the step's hook: before a layer is computed, the KV of tokens that are no longer
    computed is written."""

    wants_layers = True

    def __init__(
        self,
        batch: ForwardBatch,
        cache: torch.Tensor,
        hook: LayerHook,
        kernels: HostKernels,
        turns: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """``kernels`` and ``turns`` are the model's."""
        assert batch.reuse is not None
        self.batch = batch
        self._cache_layers = cache.unbind(1)
        self._hook = hook
        self._kernels, self._turns = kernels, turns
        counts = batch.query_starts.diff().long()
        self._owners = torch.repeat_interleave(
            torch.arange(batch.num_sequences), counts
        )  # [T] of the rows of ``batch``
        reused = self._owners[batch.reuse.sources >= 0]
        self._num_reused = torch.bincount(reused, minlength=batch.num_sequences).tolist()
        nothing = torch.empty(0, dtype=torch.int64)
        self._left = (nothing, nothing, nothing)  # sources, slots and shifts of tokens no longer computed

    def before_layer(self, layer: int) -> None:
        self._hook.before_layer(layer)
        if self.has_gaps:
            self._kernels.copy_turned(self._cache_layers[layer], *self._left, *self._turns)

    def after_layer(self, layer: int) -> None:
        self._hook.after_layer(layer)

    def narrow(self, layer: int) -> torch.Tensor | None:
        """Let tokens leave, once the fresh KV of ``layer`` has been written. Returns the rows that stay; None: all."""
        rows = self._staying(layer)
        if rows is None:
            return None
        reuse = self._reuse
        leaving = torch.ones(len(self.batch.tokens), dtype=torch.bool)
        leaving[rows] = False
        parts = (reuse.sources[leaving], self.batch.slots[leaving], reuse.shifts[leaving])
        sources, slots, shifts = (torch.cat(pair) for pair in zip(self._left, parts, strict=True))
        self._left = sources, slots, shifts
        self._owners = self._owners[rows]
        self.batch = self.batch.thinned(rows)
        return rows

    @property
    def has_gaps(self) -> bool:
        """Whether tokens have left, so that attention is ``attend``."""
        return len(self._left[0]) > 0

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """``[T, Hq, D]``, of all of a sequence's tokens together."""
        batch = self.batch
        seen = (batch.block_tables, batch.query_starts, batch.context_lens, batch.positions.int())
        return self._kernels.partial_attention(query, self._cache_layers[layer], *seen, scale)[0]

    @property
    def _reuse(self) -> Reuse:
        assert self.batch.reuse is not None
        return self.batch.reuse

    def _staying(self, layer: int) -> torch.Tensor | None:
        reuse, share = self._reuse, share_at(layer, self._reuse.share)
        wanted = [max(round(count * share), 1) for count in self._num_reused]  # so that no batch becomes empty
        candidates = reuse.sources >= 0
        there = torch.bincount(self._owners[candidates], minlength=len(wanted)).tolist()
        if all(count <= most for count, most in zip(there, wanted, strict=True)):
            return None
        ranks = reuse.ranks
        if ranks is None:
            ranks = deviations(self._cache_layers[layer], reuse.sources, self.batch.slots)
        stays = ~candidates
        for owner, count in enumerate(wanted):
            rows = (candidates & (self._owners == owner)).nonzero().flatten()
            best = ranks[rows].topk(min(count, len(rows))).indices
            stays[rows[best]] = True
        return stays.nonzero().flatten()


def turns(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotation alone of a model's tables [P, D / 2]: stored keys already include the attention factor of YaRN
    and LongRoPE."""
    stretch = cos[:1]  # position 0 has no rotation
    return (cos, sin) if bool((stretch == 1.0).all()) else (cos / stretch, sin / stretch)


def deviations(cache_layer: torch.Tensor, sources: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Float32 [T]: squared distance of the values in ``slots`` from those in ``sources``; 0 where there are none."""
    result = torch.zeros(len(slots))
    rows = (sources >= 0).nonzero().flatten()
    fresh, stored = (_values(cache_layer, places[rows]) for places in (slots, sources))
    result[rows] = (fresh - stored).square_().sum((1, 2, 3))
    return result


def _values(cache_layer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Float32 ``[T, 1, Hkv, D]``."""
    numbers = row_numbers(cache_layer, slots, kinds=slice(1, 2))
    rows = page_rows(cache_layer).index_select(0, numbers.flatten())
    return from_page_rows(rows.view(*numbers.shape, -1))
