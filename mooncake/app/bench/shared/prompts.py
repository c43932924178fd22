"""Prompts of benchmarks: random token ids, and windows of a text that every Python has."""

from __future__ import annotations

import pydoc_data.topics
import random

import numpy as np
import numpy.typing as npt

from mooncake.checkpoint import Checkpoint
from mooncake.errors import ConfigError

MIN_TOKEN = 100  # ids below are often special
TEXT = "pydoc_data.topics of the Python in use"


def random_prompt(draw: random.Random, vocab_size: int, length: int) -> list[int]:
    first = min(MIN_TOKEN, vocab_size - 1)
    return [draw.randrange(first, vocab_size) for _ in range(length)]


def python_reference() -> str:
    """The Python language reference that CPython ships."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def text_windows(checkpoint: Checkpoint, num_tokens: int, window: int) -> npt.NDArray[np.int64]:
    """Its token ids ``[windows, window]``. Raises ConfigError when the text is shorter."""
    ids = checkpoint.load_tokenizer().encode(python_reference())
    count = num_tokens // window
    if len(ids) < count * window:
        raise ConfigError(f"the text has {len(ids)} tokens; --tokens asks for {num_tokens}")
    return ids[: count * window].reshape(count, window).astype(np.int64)
