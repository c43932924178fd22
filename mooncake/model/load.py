"""From a checkpoint on disk to a model ready to run."""

from __future__ import annotations

from mooncake.checkpoint import Checkpoint
from mooncake.errors import ModelError
from mooncake.model.llama import CausalLM
from mooncake.model.weights import load_weights

DTYPES = ("float32", "bfloat16")


def load_model(checkpoint: Checkpoint, dtype: str, max_model_len: int = 0) -> CausalLM:
    """Read the weights and build the model; ``max_model_len`` 0 means the model's own.

    Raises ModelError when weights are missing, broken or of an unsupported kind.
    """
    if dtype not in DTYPES:
        raise ModelError(f"model.dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return CausalLM(checkpoint.config, load_weights(checkpoint, dtype), max_model_len)
