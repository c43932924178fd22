"""What the conductor knows of the model it serves: how its blocks are named, their sizes, and what nodes must share.

It knows neither nodes nor requests, and reads no weights (only their digest).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from conductor.placement.view import Shape
from mooncake.adapters import parse_adapters
from mooncake.checkpoint import Checkpoint
from mooncake.common_settings import node_settings
from mooncake.config import Config
from mooncake.hashing import kv_fingerprint
from mooncake.types import Role


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the conductor needs to know of the model: the seed of block names, block sizes, the end-of-sequence ids, and
    what it compares nodes with."""

    kv_fingerprint: str
    shape: Shape
    eos_ids: tuple[int, ...]
    max_model_len: int = 0  # tokens of prompt plus answer; 0: not said
    settings: Mapping[str, str] = field(default_factory=dict)  # that nodes must have in common
    page_bytes: int = 0  # that a store's slot must hold
    vocab_size: int = 1 << 32  # token ids are below
    names: frozenset[str] = frozenset()  # by which requests name the model and its configured adapters


def model_facts(config: Config, checkpoint: Checkpoint) -> ModelFacts:
    precision = config.precision(checkpoint.coding)
    groups = config.page_groups(checkpoint.config)
    block = checkpoint.kv_layout(config.block.tokens, precision.kv_dtype, config.model.keep_hidden)
    layout = groups.page_layout(block)
    return ModelFacts(
        kv_fingerprint=kv_fingerprint(precision.identity(checkpoint.digest), layout, groups.name),
        shape=Shape(
            block_tokens=config.block.tokens,
            block_bytes=layout.block_bytes * max(groups.windows.count(0), 1),  # what grows with a prompt
            num_layers=layout.num_layers,
            chunk_tokens=config.prefill.chunk_tokens,
        ),
        eos_ids=checkpoint.config.eos_ids,
        max_model_len=checkpoint.config.context(config.model.max_model_len),
        settings=node_settings(config, checkpoint),
        page_bytes=layout.block_bytes,
        vocab_size=checkpoint.config.vocab_size,
        names=frozenset((config.model.name or checkpoint.name, *parse_adapters(config.model.adapters))),
    )


def longest_sequence(config: Config, checkpoint: Checkpoint, pages_of: Callable[[Role], int]) -> Callable[[], int]:
    """Returns the tokens of the longest sequence that nodes of either role can hold, from the pages of the largest one
    (0 while unknown): an answer that has to go on elsewhere is computed as a prompt first. Layers with windows need few
    pages of a long one, and where layers are in several groups, each takes pages of its own."""
    groups, context = config.page_groups(checkpoint.config), checkpoint.config.context(config.model.max_model_len)

    @lru_cache
    def longest(num_pages: int, chunk_tokens: int) -> int:
        return groups.max_model_len(num_pages, chunk_tokens or context, config.block.tokens, context)

    def capacity_tokens() -> int:
        chunks = {Role.PREFILL: config.prefill.chunk_tokens, Role.DECODE: config.decode.chunk_tokens}
        known = [(pages, chunks[role]) for role in chunks if (pages := pages_of(role))]
        return min((longest(*each) for each in known), default=0)

    return capacity_tokens
