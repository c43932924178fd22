"""``python -m kvstore --config FILE --set section.key=value``: one store node until SIGTERM or SIGINT."""

from __future__ import annotations

from kvstore.node import StoreNode
from mooncake.app.cluster.role_main import run_role
from mooncake.checkpoint import open_checkpoint
from mooncake.common_settings import block_settings
from mooncake.config import Config


def build(config: Config) -> StoreNode:
    """A slot holds ``store.block_bytes``, or one block of the configured model (one page, if its blocks have
    several)."""
    if config.store.block_bytes:
        return StoreNode(config, config.store.block_bytes, config.store.join)
    checkpoint = open_checkpoint(config.model.path, config.model.max_model_len)
    block = checkpoint.kv_layout(config.block.tokens, config.precision().kv_dtype, config.model.keep_hidden)
    page = config.page_groups(checkpoint.config).page_layout(block)
    return StoreNode(config, page.block_bytes, config.store.join, block_settings(config, checkpoint))


if __name__ == "__main__":
    run_role("store", build)
