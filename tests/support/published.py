"""A small quantised model folder as it could be published, and transformers' model with the same values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from greedy import NEW_TOKENS, greedy
from quantised import Format, write_quantised
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_model

from mooncake.checkpoint import Checkpoint, HFCheckpoint, open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.model import CausalLM, ForwardBatch, NoHook
from mooncake.model.decoder import Decoder

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "initializer_range": 0.2}


class Published:
    """A folder of codes, and transformers' own model with the values that they represent."""

    def __init__(self, folder: Path, form: Format, family: str = "llama", **changes: Any) -> None:
        self.folder = folder
        self.theirs = write_tiny_model(folder, family, **(SHAPE | changes))
        write_quantised(folder, self.theirs, form)

    @property
    def checkpoint(self) -> HFCheckpoint:
        checkpoint = open_checkpoint(str(self.folder))
        assert isinstance(checkpoint, HFCheckpoint)
        return checkpoint

    def greedy(self, prompt: list[int], guess: Sequence[int] = ()) -> tuple[int, ...]:
        return tuple(greedy(self.theirs, prompt, NEW_TOKENS, guess))

    def edit(self, **changes: object) -> None:
        """Change quantization_config; None removes a key."""
        file = self.folder / "config.json"
        tree = json.loads(file.read_text())
        settings = tree["quantization_config"] | changes
        tree["quantization_config"] = {key: value for key, value in settings.items() if value is not None}
        file.write_text(json.dumps(tree))

    def edit_tensors(self, **changes: torch.Tensor | None) -> None:
        """Change tensors of the first layer's q_proj; None removes one."""
        file = self.folder / "model.safetensors"
        module = "model.layers.0.self_attn.q_proj."
        tensors: dict[str, Any] = load_file(file) | {module + part: tensor for part, tensor in changes.items()}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def logits_of(model: CausalLM | Decoder, checkpoint: Checkpoint, dtype: str = "float32") -> torch.Tensor:
    rows = torch.arange(40)
    batch = ForwardBatch.of_prompt(rows * 37 % 300, 16, rows)
    return model.forward(batch, KVCache(checkpoint.kv_layout(16, dtype), 4).tensor, NoHook())
