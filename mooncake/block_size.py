"""Whether blocks suit a model whose layers keep states. All pages have one size, so in small blocks, whose KV is
smaller than a state, pages of KV are mostly empty. Pure arithmetic."""

from __future__ import annotations

from mooncake.model_config import ModelConfig
from mooncake.page_groups import block_layout, groups_of

_SIZES = range(64, 1025, 32)
_WORTH_SAYING = 1.5  # times the memory


def bytes_of_a_token(config: ModelConfig, block_tokens: int, dtype: str) -> float:
    """Of the cache, for each token of a long sequence; without states, of which a sequence holds few."""
    block = block_layout(config, block_tokens, dtype)
    groups = groups_of(config, config.max_model_len, block)
    return groups.windows.count(0) * groups.page_layout(block).block_bytes / block_tokens


def block_size_advice(config: ModelConfig, block_tokens: int, dtype: str) -> str:
    """A sentence for the log when blocks of another size would take much less memory; otherwise nothing."""
    if config.recurrence is None:
        return ""
    costs = {size: bytes_of_a_token(config, size, dtype) for size in (block_tokens, *_SIZES)}
    least = min(costs.values())
    if costs[block_tokens] <= _WORTH_SAYING * least:
        return ""
    best = min(size for size, cost in costs.items() if cost < 1.05 * least)
    return (
        f"a token takes {costs[block_tokens]:,.0f} bytes of cache in blocks of {block_tokens}, because this model's "
        f"layers keep states, and {costs[best]:,.0f} with block.tokens={best}"
    )
