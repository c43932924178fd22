"""The settings that all nodes of a cluster must have in common, as they take effect here: for the conductor to compare,
by name, so that it can say which of them differs. The KV fingerprint covers most of them, but only says that something
differs."""

from __future__ import annotations

from mooncake.adapters import open_adapters, parse_adapters
from mooncake.checkpoint import Checkpoint
from mooncake.config import Config


def block_settings(config: Config, checkpoint: Checkpoint) -> dict[str, str]:
    """Those that say how large a block is and what is where in it: also for stores of one model. Raises ConfigError."""
    kv_dtype = config.precision().kv_dtype
    layout = checkpoint.kv_layout(config.block.tokens, kv_dtype, config.model.keep_hidden)
    return {
        "block.tokens": str(layout.block_tokens),
        "model.kv_dtype": kv_dtype,
        "model.keep_hidden": str(list(config.model.keep_hidden)),
        "layers": str(layout.num_layers),
        "KV heads": f"{layout.num_kv_heads} of {layout.head_dim}",
        "block.windows": config.page_groups(checkpoint.config).name or "whole blocks",
    }


def node_settings(config: Config, checkpoint: Checkpoint) -> dict[str, str]:
    """Those of nodes that compute. Raises ConfigError, and ModelError for an adapter that cannot be read."""
    precision = config.precision(checkpoint.coding)
    form = precision.weights
    adapters = sorted(adapter.digest[:12] for adapter in open_adapters(parse_adapters(config.model.adapters)))
    return {
        **block_settings(config, checkpoint),
        "weights": checkpoint.digest[:12],
        "model.dtype": form.dtype,
        "model.weights": " + ".join(filter(None, (form.coding, form.codes, form.groups))) or "plain",
        "model.key_scales": precision.key_scales.digest[:12] if precision.key_scales else "none",
        "model.adapters": ", ".join(adapters) or "none",
    }
