"""``mooncake key-scales``: scales for the channels of a model's keys, from their maxima over a text."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.markup import escape

from mooncake.app.console import err
from mooncake.app.outputs import writable
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.errors import ConfigError
from mooncake.key_scales import Exponents, KeyScales, save_key_scales
from mooncake.model import CausalLM, ForwardBatch, NoHook, load_model
from mooncake.precision import FLOAT32

BLOCK_TOKENS = 64
STRENGTH = 0.5  # SmoothQuant's alpha (Xiao et al. 2023): how much of a channel's size moves to the queries


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    model: str
    out: Path
    text: Path | None = None
    tokens: int = 512


def measure(options: ScaleOptions) -> None:
    """Raises ConfigError, ModelError."""
    writable(options.out)
    checkpoint = open_checkpoint(options.model)
    text = None if options.text is None else _read(options.text)
    scales = measured(checkpoint, options.tokens, text)
    save_key_scales(options.out, scales, checkpoint.name, options.tokens)
    file = escape(str(options.out))
    err.print(
        f"written: {file}. Use it with model.kv_dtype=int8 model.key_scales={file} on every node.", soft_wrap=True
    )


def measured(checkpoint: Checkpoint, num_tokens: int = 512, text: str | None = None) -> KeyScales:
    """Scales measured on the first tokens of ``text``, or of a module of Python. Raises ConfigError, ModelError."""
    if text is None:
        text = inspect.getsource(argparse)  # English and code, available in every Python
    ids = checkpoint.load_tokenizer().encode(text[: 32 * num_tokens])[:num_tokens]
    if len(ids) < BLOCK_TOKENS:
        raise ConfigError(f"{len(ids)} tokens of text are too few to measure keys on; the minimum is {BLOCK_TOKENS}")
    model = load_model(checkpoint, FLOAT32, len(ids))
    if not isinstance(model, CausalLM):
        raise ConfigError(f"keys are scaled only in the Llama family, not in {checkpoint.config.architecture}")
    return KeyScales(_exponents(model, torch.tensor(np.asarray(ids, np.int64))))


def _exponents(model: CausalLM, tokens: torch.Tensor) -> Exponents:
    """Exponents ``[KV layers, Hkv, D / 2]``, from the maximum of each pair of channels over ``tokens`` [T]."""
    config, blocks = model.config, -(-len(tokens) // BLOCK_TOKENS)
    shape = blocks, len(config.kv_owners), 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim
    cache = torch.zeros(shape)
    model.forward(ForwardBatch.of_prompt(tokens, BLOCK_TOKENS, torch.tensor([len(tokens) - 1])), cache, NoHook())
    size = cache[:, :, 0].abs().amax((0, 3))  # [KV layers, Hkv, D]; unused rows are 0
    if config.qk_norm:
        size = size.amax(1, keepdim=True).repeat(1, config.num_kv_heads, 1)  # maximum over all heads
    pairs = size.view(*size.shape[:-1], 2, -1).amax(-2).clamp_min(1e-20).log2() * STRENGTH
    exponents = (pairs - pairs.median(-1, keepdim=True).values).round().clamp(-32, 32)
    return np.asarray(exponents.numpy(), dtype=np.int8)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {path}: it is not text") from None
