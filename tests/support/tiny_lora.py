"""Random LoRA adapters in PEFT's folders, and the same adapters merged into transformers' own model."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: Any,
    *,
    rank: int = 4,
    seed: int = 0,
    targets: Sequence[str] = ALL_TARGETS,
    rslora: bool = False,
) -> Any:
    """Write the folder and return a copy of ``model`` with W + s B A in place of each W."""
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
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers answers, token by token, whatever would end the answer."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
