"""Llama 4's language model over a paged cache (Meta 2025)."""

from __future__ import annotations

import torch

from mooncake.families.gated import expert_names
from mooncake.kernels import Experts
from mooncake.model.decoder import Step
from mooncake.model.families.routed import GlmMoe, Mixture


class Llama4(GlmMoe):
    """Heads that rotate are normalised afterwards, without weights; that changes no rotation, so it can come first. An
    expert's input is scaled by how much its token wants it, and its output is not."""

    _rotates_in_turn = True

    def _head_norms(self, attention: str, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        plain = self._final_norm.new_ones(self.config.head_dim)
        return plain, plain

    def take_experts(self, prefix: str) -> Experts:
        at = prefix + expert_names(self.config).experts
        return self.experts_of_tensors(f"{at}.gate_up_proj", f"{at}.down_proj", are_transposed=True)

    def _attend_normed(
        self, step: Step, index: int, qkv: torch.Tensor, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None
    ) -> torch.Tensor:
        if index in self.config.still_layers:
            query_norm = key_norm = None
        return super()._attend_normed(step, index, qkv, query_norm, key_norm)

    def _mixture(self, mlp: Mixture, normed: torch.Tensor) -> torch.Tensor:
        """Each token enters as often as it has experts."""
        logits, chosen = mlp.router(normed.float()).topk(self.config.experts_per_token, dim=-1)  # [T, k] each
        entering = normed[:, None] * logits.sigmoid().to(normed.dtype)[..., None]
        alone = chosen.reshape(-1, 1)
        mixed = mlp.experts(entering.flatten(0, 1), alone, torch.ones_like(alone, dtype=torch.float32))
        mixed = mixed.view(len(normed), -1, normed.shape[1]).sum(1)
        return mixed if mlp.shared is None else mixed + self._dense(mlp.shared, normed)
