"""LoRA (Hu et al. 2021) on every projection of every layer of a Llama, in plain torch, to make a variant.

It has its own forward pass, because the serving one has no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn import functional

from mooncake.app.variants.task import MostOfAll
from mooncake.checkpoint import Checkpoint
from mooncake.errors import ConfigError
from mooncake.model.reading.weights import load_weights
from mooncake.model.rope import rope_tables

PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


WARM_UP_STEPS = 10
TENSORS, ORIGIN = "tuned.safetensors", "training.json"


@dataclass(frozen=True, slots=True)
class Training:
    rank: int
    steps: int
    batch: int  # prompts per step
    rate: float  # peak learning rate
    records: int  # per prompt
    scale: float = 2.0  # factor on the low-rank product
    seed: int = 0


class Trainee:
    """A frozen model with a low-rank pair A, B at each projection; B is initialised to zeros."""

    def __init__(self, checkpoint: Checkpoint, rank: int, scale: float, seed: int) -> None:
        self._config = checkpoint.config
        self._scale = scale
        self._weights = dict(load_weights(checkpoint, "float32"))
        random = torch.Generator().manual_seed(seed)
        self.pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in range(self._config.num_layers):
            for projection in PROJECTIONS:
                name = f"model.layers.{layer}.{projection}.weight"
                outputs, inputs = self._weights[name].shape
                down = (torch.randn(rank, inputs, generator=random) / inputs**0.5).requires_grad_()
                self.pairs[name] = down, torch.zeros(outputs, rank).requires_grad_()

    def parameters(self) -> Iterator[torch.Tensor]:
        for pair in self.pairs.values():
            yield from pair

    def merged(self) -> dict[str, torch.Tensor]:
        """The variant's weights: W + s B A for each W."""
        with torch.no_grad():
            return {
                name: weight + self._scale * self.pairs[name][1] @ self.pairs[name][0] if name in self.pairs else weight
                for name, weight in self._weights.items()
            }

    def last_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, V]`` after the last of ``tokens`` [B, T]."""
        config, weights = self._config, self._weights
        num_prompts, length = tokens.shape
        cos, sin = rope_tables(config.head_dim, length, config.rope_theta, config.rope_scaling)
        residual = functional.embedding(tokens, weights["model.embed_tokens.weight"])
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(residual, f"{prefix}input_layernorm")
            query, key, value = (
                self._project(normed, f"{prefix}self_attn.{name}_proj")
                .view(num_prompts, length, -1, config.head_dim)
                .transpose(1, 2)
                for name in "qkv"
            )
            mixed = functional.scaled_dot_product_attention(
                _turned(query, cos, sin), _turned(key, cos, sin), value, is_causal=True, enable_gqa=True
            )
            residual = residual + self._project(mixed.transpose(1, 2).flatten(2), f"{prefix}self_attn.o_proj")
            normed = self._norm(residual, f"{prefix}post_attention_layernorm")
            gate, up = (self._project(normed, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
            residual = residual + self._project(functional.silu(gate) * up, f"{prefix}mlp.down_proj")
        head = weights["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
        return functional.linear(self._norm(residual[:, -1], "model.norm"), head)

    def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        down, up = self.pairs[f"{name}.weight"]
        return functional.linear(x, self._weights[f"{name}.weight"]) + self._scale * (x @ down.T) @ up.T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._config.rms_eps)


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def tuned(
    checkpoint: Checkpoint, task: MostOfAll, training: Training, folder: Path | None, tell: Callable[[str], None]
) -> dict[str, torch.Tensor]:
    """The variant's weights: loaded from ``folder``, or trained now and saved there. Raises ModelError; ConfigError
    when the folder holds weights of another training."""
    trainee = Trainee(checkpoint, training.rank, training.scale, training.seed)
    origin = {"weights": checkpoint.digest, **msgspec.to_builtins(training)}
    if folder is None or not (folder / ORIGIN).exists():
        _train(trainee, task, training, tell)
        if folder is not None:
            _keep(trainee, origin, folder)
        return trainee.merged()
    try:
        if msgspec.json.decode((folder / ORIGIN).read_bytes()) != origin:
            raise ConfigError(f"{folder} holds weights that were tuned with other options: use another folder")
        halves = load_file(folder / TENSORS)
        trainee.pairs = {name: (halves[f"{name}.A"], halves[f"{name}.B"]) for name in trainee.pairs}
    except (OSError, KeyError, SafetensorError, msgspec.DecodeError) as error:
        raise ConfigError(f"{folder} does not hold tuned weights: {error}") from None
    return trainee.merged()


def _keep(trainee: Trainee, origin: dict[str, object], folder: Path) -> None:
    """Save the weights; the origin comes last, and marks them complete."""
    tensors = {
        f"{name}.{half}": pair.detach()
        for name, pairs in trainee.pairs.items()
        for half, pair in zip("AB", pairs, strict=True)
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / TENSORS)
        (folder / ORIGIN).write_bytes(msgspec.json.encode(origin))
    except OSError as error:
        raise ConfigError(f"cannot save the tuned weights in {folder}: {error.strerror}") from None


def _train(trainee: Trainee, task: MostOfAll, training: Training, tell: Callable[[str], None]) -> None:
    """AdamW with linear warm-up and linear decay."""
    steps, parameters = training.steps, list(trainee.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=training.rate, weight_decay=0.0)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = training.rate * min((step + 1) / WARM_UP_STEPS, (steps - step) / steps)
        questions = task.questions(training.batch, training.seed + step)
        logits = trainee.last_logits(torch.tensor([question.prompt for question in questions]))
        loss = functional.cross_entropy(logits, torch.tensor([question.answer for question in questions]))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        tell(f"training: step {step + 1} of {steps}, loss {loss.item():.2f}")
