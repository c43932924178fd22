"""Shared by the readers of all families: their entry, activations, and shapes of common parts. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mooncake.errors import ModelError
from mooncake.model_config import ModelConfig, Settings

Shapes = dict[str, tuple[int, ...]]


def unsupported(what: str, families: Iterable[str]) -> ModelError:
    return ModelError(f"{what} is not supported; supported families: {', '.join(families)}")


_ACTIVATIONS = {
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Family:
    """``prefix``: the start of every weight's name, which some publishers omit. ``first_shapes``: shapes of the dense
    layers that precede those of a ``Routing``."""

    read: Callable[[Settings, Mapping[str, tuple[int, ...]]], dict[str, object]]
    layer_shapes: Callable[[ModelConfig], Shapes]
    layers_at: str
    top_shapes: Callable[[ModelConfig], Shapes]
    prefix: str = ""
    first_shapes: Callable[[ModelConfig], Shapes] | None = None


def activation(settings: Settings, key: str, default: str) -> str:
    name = settings.get(key) or default
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(f"{settings.source} asks for the activation {name!r}; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def linear_shapes(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm_shapes(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def head_shapes(name: str, config: ModelConfig) -> Shapes:
    """Shapes of the output head; empty if it is tied to the embeddings."""
    return {} if config.tie_embeddings else {f"{name}.weight": (config.vocab_size, config.hidden_size)}


def gated_shapes(name: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }


def llama_top(config: ModelConfig) -> Shapes:
    table = (config.vocab_size, config.hidden_size)
    norm = {"model.norm.weight": (config.hidden_size,)}
    return {"model.embed_tokens.weight": table, **norm, **head_shapes("lm_head", config)}
