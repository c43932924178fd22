"""AFM, Apertus and Granite 4 without Mamba over a paged cache: the frame of ``gated.Dense`` with other MLPs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mooncake.kernels import Linear
from mooncake.model.decoder import activation
from mooncake.model.gated import Dense


class Arcee(Dense):
    """AFM-4.5B (Arcee 2025): the MLP has no gate."""

    def _take_gate_up(self, prefix: str) -> Linear:
        return self.linear(prefix + "mlp.up_proj")

    def _take_activation(self, prefix: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return activation(self.config.activation)


class Apertus(Arcee):
    """Apertus (Swiss AI 2025): each layer has learned its activation, xIELU (Huang and Schlag 2024)."""

    _norm_names = "attention_layernorm", "feedforward_layernorm"

    def _take_activation(self, prefix: str) -> Callable[[torch.Tensor], torch.Tensor]:
        above, below, slope, least = (
            self.vector(f"{prefix}mlp.act_fn.{name}") for name in ("alpha_p", "alpha_n", "beta", "eps")
        )
        above = torch.nn.functional.softplus(above)
        below = slope + torch.nn.functional.softplus(below)

        def xielu(values: torch.Tensor) -> torch.Tensor:
            positive = above * values * values + slope * values
            negative = (torch.expm1(torch.minimum(values, least)) - values) * below + slope * values
            return torch.where(values > 0, positive, negative)

        return xielu


class GraniteHybrid(Dense):
    """Granite 4 without Mamba (Granite team, IBM 2025): gates and ups are published as one."""

    def _take_gate_up(self, prefix: str) -> Linear:
        return self.linear(prefix + "shared_mlp.input_linear")

    def _take_down(self, prefix: str) -> Linear:
        return self.linear(prefix + "shared_mlp.output_linear")
