"""Tiny random models whose layers share keys and values, and their reference in plain torch over whole prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_model

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.2,
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Graph:
    """``sources``: the layer whose KV each layer attends to. ``settings``: this and ``windows`` in config.json."""

    sources: list[int]
    settings: dict[str, Any]
    windows: list[int] = field(default_factory=list)  # per layer; []: no windows
    family: str = "llama"

    def window_of(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    @property
    def num_owners(self) -> int:
        return len(set(self.sources))


GLOBALS_AND_LOCALS = [LOCAL] * 5 + [GLOBAL] + [LOCAL] * 5 + [GLOBAL]
WINDOWS = [8 if kind == LOCAL else 0 for kind in GLOBALS_AND_LOCALS]
CHARACTER = [0, 0, 2, 2, 4, 5, 4, 7, 7, 9, 9, 5]
"""One global layer in six; pairs of adjacent local layers share KV, and both global layers use the first one's
(Character.AI)."""

GRAPHS = {
    "pairs": Graph([0, 0, 2, 2], {"use_cla": True, "cla_share_factor": 2}),
    "pairs, normed": Graph([0, 0, 2, 2], {"use_cla": True, "cla_share_factor": 2}, family="qwen3"),
    "pairs, biased": Graph([0, 0, 2, 2], {"use_cla": True, "cla_share_factor": 2}, family="qwen2"),
    "second half": Graph([0, 1, 2, 2, 2, 2], {"num_kv_shared_layers": 3}),
    "last of each kind": Graph(
        [0, 1, 2, 2, 1, 2],
        {"num_kv_shared_layers": 3, "sliding_window": 8, "layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL]},
        [8, 0, 8, 8, 0, 8],
    ),
    "character": Graph(
        CHARACTER,
        {"kv_source_layers": CHARACTER, "sliding_window": 8, "layer_types": GLOBALS_AND_LOCALS},
        WINDOWS,
        family="mistral",
    ),
    "lckv-llama": Graph(
        [0, 1, 1, 3, 1, 3],
        {"model_type": "lckv-llama", "sliding_window": 6, "layer_types": "0_1s_1s_3_1s_3"},
        [0, 6, 6, 0, 6, 0],
    ),
}


def write_sharing_model(folder: Path, graph: Graph, **changes: Any) -> dict[str, torch.Tensor]:
    """Write the folder as its publisher would, without unused key and value weights. Returns its weights."""
    shape = SHAPE | {"num_hidden_layers": len(graph.sources)} | changes
    write_tiny_model(folder, graph.family, **shape)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | graph.settings))
    weights = load_file(folder / "model.safetensors")
    for layer, source in enumerate(graph.sources):
        unused = [f"model.layers.{layer}.self_attn.{name}" for name in ("k_proj", "v_proj", "k_norm")]
        if source != layer:
            weights = {name: tensor for name, tensor in weights.items() if not name.startswith(tuple(unused))}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def whole_prompt_logits(weights: dict[str, torch.Tensor], graph: Graph, tokens: torch.Tensor) -> torch.Tensor:
    """Logits ``[T, V]`` in float32: full attention, layer by layer, over shared keys and values."""
    length, head_dim = len(tokens), SHAPE["head_dim"]
    at = torch.arange(length)
    angles = at[:, None] / 10_000.0 ** (torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    hidden = weights["model.embed_tokens.weight"][tokens]
    shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def normed(values: torch.Tensor, name: str) -> torch.Tensor:
        return values * (values.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[name]

    def heads(values: torch.Tensor, name: str) -> torch.Tensor:
        made = values @ weights[f"{name}_proj.weight"].T + weights.get(f"{name}_proj.bias", torch.zeros(1))
        return made.view(length, -1, head_dim).transpose(0, 1)  # [H, T, D]

    def turned(values: torch.Tensor, norm: str) -> torch.Tensor:
        values = normed(values, norm) if norm in weights else values
        low, high = values.chunk(2, -1)
        return values * cos + torch.cat([-high, low], -1) * sin

    for layer, source in enumerate(graph.sources):
        name = f"model.layers.{layer}."
        attention, mlp = name + "self_attn.", name + "mlp."
        inputs = normed(hidden, name + "input_layernorm.weight")
        if source == layer:
            key = turned(heads(inputs, attention + "k"), attention + "k_norm.weight")
            shared[layer] = key, heads(inputs, attention + "v")
        key, value = shared[source]
        query = turned(heads(inputs, attention + "q"), attention + "q_norm.weight")
        distance = at[:, None] - at
        seen = (distance >= 0) & (distance < (graph.window_of(layer) or length))
        scores = (query @ key.transpose(1, 2) * head_dim**-0.5).masked_fill(~seen, -torch.inf)
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        hidden = hidden + mixed @ weights[attention + "o_proj.weight"].T
        inputs = normed(hidden, name + "post_attention_layernorm.weight")
        gate, up = (inputs @ weights[f"{mlp}{half}_proj.weight"].T for half in ("gate", "up"))
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ weights[mlp + "down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return normed(hidden, "model.norm.weight") @ head.T
