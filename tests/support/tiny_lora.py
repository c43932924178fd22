"""Random LoRA adapters in PEFT folders, and the same adapters in transformers' own model: merged into its weights, or
applied only to the end of a prompt."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Any,
    *,
    rank: int = 4,
    seed: int = 0,
    targets: Sequence[str] = ALL_TARGETS,
    rslora: bool = False,
    invocation: Sequence[int] = (),
) -> Any:
    """Write the folder and return a copy of ``model`` with W + s B A for each W. With an ``invocation`` it is an
    activated LoRA; the copy then matches only prompts that begin with the invocation."""
    torch.manual_seed(seed)
    merged, alpha, tensors = copy.deepcopy(model), 8.0, {}
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    with torch.no_grad():
        for name, module in merged.named_modules():
            if name.split(".")[-1] in targets:
                down = torch.randn(rank, module.in_features) * 0.1
                up = torch.randn(module.out_features, rank) * 0.1
                module.weight += scale * up @ down
                tensors[f"base_model.model.{name}.lora_A.weight"] = down
                tensors[f"base_model.model.{name}.lora_B.weight"] = up
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "target_modules": list(targets),
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "alora_invocation_tokens": list(invocation) or None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


def activated(model: Any, folder: Path, start: int) -> Any:
    """A copy of ``model`` in which the adapter acts on tokens from ``start`` on; it computes whole prompts, not with a
    cache. PEFT gives the same logits (``tests/engine/test_alora.py``)."""
    model = copy.deepcopy(model)
    config, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])

    def adding(down: torch.Tensor, up: torch.Tensor) -> Any:
        def add(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            end = inputs[0][:, start:] @ down.T @ up.T * scale
            return torch.cat([output[:, :start], output[:, start:] + end], dim=1)

        return add

    for name, module in model.named_modules():
        key = f"base_model.model.{name}.lora_{{}}.weight"
        if key.format("A") in tensors:
            module.register_forward_hook(adding(tensors[key.format("A")], tensors[key.format("B")]))
    return model
