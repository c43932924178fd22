"""Nemotron-H (NVIDIA 2025) over a paged cache: a layer is Mamba-2 or attention, and the MLPs and mixtures of experts
that follow it, each with a norm and a residual of its own. Heads do not rotate; MLPs have no gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake.families.gated import expert_names
from mooncake.families.nemotron_h import published_layers
from mooncake.kernels import Experts, Linear
from mooncake.model.decoder import Step, activation
from mooncake.model.families.mamba import Attention, MambaDecoder, StateSpace
from mooncake.model.families.routed import choose_experts
from mooncake.model.layers import MatricesOnDemand


@dataclass(frozen=True, slots=True)
class _Mlp:
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Mixture:
    router: Linear
    choice_bias: torch.Tensor
    into: Linear | None  # smaller vectors, which experts compute with (Nemotron 3 Super)
    experts: Experts
    out_of: Linear | None
    shared: _Mlp


@dataclass(frozen=True, slots=True)
class _Part:
    norm: torch.Tensor
    mixer: Attention | StateSpace | _Mlp | _Mixture


class NemotronH(MambaDecoder[list[_Part]]):
    def _build(self) -> None:
        self._activation = activation(self.config.activation)
        super()._build()

    def _take_layers(self) -> dict[int, list[_Part]]:
        assert self.config.mamba is not None
        layers = published_layers(self.config.mamba.pattern)
        return {
            index: [part for number in numbers for part in self._take(f"model.layers.{number}.")]
            for index, numbers in enumerate(layers)
        }

    def _take(self, prefix: str) -> list[_Part]:
        """Of a published layer."""
        return [_Part(self._take_norm(prefix + "norm"), self._take_mixer(prefix))]

    def _take_mixer(self, prefix: str) -> Attention | StateSpace | _Mlp | _Mixture:
        if f"{prefix}mixer.A_log" in self._weights:
            return self._take_state_space(prefix + "mixer.")
        if f"{prefix}mixer.q_proj.weight" in self._weights:
            return self._take_attention(prefix + "mixer.")
        is_mixture = f"{prefix}{expert_names(self.config).router}.weight" in self._weights
        return self._take_mixture(prefix) if is_mixture else self._take_mlp(prefix + "mixer.")

    def _take_mlp(self, prefix: str) -> _Mlp:
        return _Mlp(self.linear(prefix + "up_proj"), self.linear(prefix + "down_proj"))

    def _take_mixture(self, prefix: str) -> _Mixture:
        names, mamba = expert_names(self.config), self.config.mamba
        assert mamba is not None
        ups, downs = (
            MatricesOnDemand(
                self._weights, [(f"{prefix}{names.experts}.{expert}.{name}.weight",) for expert in self.experts_here]
            )
            for name in (names.up, names.down)
        )
        return _Mixture(
            # in float32, as published: rounded, nearly equal scores would choose other experts
            router=self.kernels.linear(self.weight(f"{prefix}{names.router}.weight").float()),
            choice_bias=self.vector(prefix + names.choice_bias).float(),
            into=self.linear(prefix + "mixer.fc1_latent_proj") if mamba.latent_size else None,
            experts=self.kernels.experts(ups, downs, gate="relu2", coding=self.coding),
            out_of=self.linear(prefix + "mixer.fc2_latent_proj") if mamba.latent_size else None,
            shared=self._take_mlp(f"{prefix}{names.shared}."),
        )

    def _layer(self, index: int, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        for part in self._layers[index]:
            normed, mixer = self._norm(hidden, part.norm), part.mixer
            if isinstance(mixer, _Mlp):
                hidden = hidden + self._ungated(mixer, normed)
            elif isinstance(mixer, _Mixture):
                hidden = hidden + self._mixture(mixer, normed)
            else:
                hidden = hidden + self._mix(index, mixer, normed, step)
        return hidden

    def _ungated(self, mlp: _Mlp, normed: torch.Tensor) -> torch.Tensor:
        return mlp.down(self._activation(mlp.up(normed)))

    def _mixture(self, mlp: _Mixture, normed: torch.Tensor) -> torch.Tensor:
        weights, chosen = choose_experts(self.config, mlp.router, mlp.choice_bias, normed)
        mixed = mlp.experts(normed if mlp.into is None else mlp.into(normed), chosen, weights)
        return (mixed if mlp.out_of is None else mlp.out_of(mixed)) + self._ungated(mlp.shared, normed)
