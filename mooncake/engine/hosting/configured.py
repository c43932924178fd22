"""A node's engine as its configuration wants it: how large the cache is, over what to compute, within which limits.

From sections of the file to values that the engine knows; nothing is loaded but the draft model, which is open at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mooncake.adapters import Adapter
from mooncake.checkpoint import Checkpoint
from mooncake.config import Config, EngineSection, PrefillSection
from mooncake.engine.backends.backend import BackendSpec, CacheSize, Processes, draft_on
from mooncake.engine.backends.fitting import Asked, choose_pages, largest_step
from mooncake.engine.contract import EngineConfig
from mooncake.engine.decoding.draft_model import DraftModel
from mooncake.errors import ConfigError
from mooncake.page_groups import PageGroups
from mooncake.precision import Precision
from mooncake.types import KVLayout
from mooncake.variants import Profile, read_profile


def plan_cache(config: Config, section: EngineSection, checkpoint: Checkpoint) -> CacheSize:
    """The pages of ``kv_gb``, or of what the machine has room for, the places of ``swap_gb``, and the sequence length
    that follows. Raises ConfigError when fewer than two blocks fit, or the configured context exceeds the model's."""
    groups = config.page_groups(checkpoint.config)
    block = checkpoint.kv_layout(config.block.tokens, config.precision().kv_dtype, config.model.keep_hidden)
    layout = groups.page_layout(block)
    context = checkpoint.config.context(config.model.max_model_len)
    chosen = None
    if not section.kv_gb:
        chosen = choose_pages(_asked(config, section, checkpoint, layout, groups, context))
    num_pages = chosen.num_pages if chosen else int(section.kv_gb * 1e9) // layout.block_bytes
    max_model_len = groups.max_model_len(num_pages, section.chunk_tokens or context, config.block.tokens, context)
    if num_pages < 2 * groups.num_groups:
        size = f"kv_gb = {section.kv_gb:g}" if chosen is None else f"the KV cache ({chosen.why})"
        raise ConfigError(
            f"{size} holds {num_pages} pages of {layout.block_bytes / 1e6:.1f} MB; at least "
            f"{2 * groups.num_groups} are needed, for 2 blocks: raise kv_gb or lower block.tokens"
        )
    num_places = int(section.swap_gb * 1e9) // layout.block_bytes
    limits = (num_places, section.max_sequences, groups, section.chunk_tokens)
    return CacheSize(layout, num_pages, max_model_len, *limits, why=chosen.why if chosen else "")


def _asked(
    config: Config, section: EngineSection, checkpoint: Checkpoint, page: KVLayout, groups: PageGroups, context: int
) -> Asked:
    chunk, sequences, drafts = section.chunk_tokens, section.max_sequences, section.speculative_tokens
    return Asked(
        checkpoint,
        config.precision(checkpoint.coding),
        section.device,
        page,
        groups,
        largest_step(section.device, chunk, sequences, drafts, context),
        num_ranks=section.tensor_parallel,
        num_copies=section.context_parallel if isinstance(section, PrefillSection) else 1,
        draft_model=section.draft_model,
        utilization=section.gpu_memory_utilization,
        swap_bytes=int(section.swap_gb * 1e9),
        spare_bytes=int(config.node.spare_gb * 1e9),
    )


def engine_config(config: Config, section: EngineSection, size: CacheSize, variant: Profile | None) -> EngineConfig:
    """Raises ConfigError."""
    return EngineConfig(
        block_tokens=config.block.tokens,
        chunk_tokens=section.chunk_tokens,
        tbt_limit_ms=section.tbt_limit_ms,
        speculative_tokens=section.speculative_tokens,
        max_sequences=section.max_sequences,
        max_model_len=size.max_model_len,
        own_layers=variant.layers if variant else None,
        groups=size.groups,
    )


def backend_spec(
    config: Config,
    section: EngineSection,
    checkpoint: Checkpoint,
    precision: Precision,
    size: CacheSize,
    adapters: Sequence[Adapter],
) -> BackendSpec:
    processes = Processes(section.tensor_parallel, threads=section.threads, cores=config.node.cores)
    can_blend = False
    if isinstance(section, PrefillSection):
        processes = replace(processes, stages=section.pipeline_stages, context=section.context_parallel)
        can_blend = section.blend_share > 0
    context = config.model.max_model_len
    return BackendSpec(checkpoint, precision, size, section.device, processes, adapters, context, can_blend)


def open_drafter(config: Config, section: EngineSection, size: CacheSize, vocab_size: int) -> DraftModel | None:
    """None: there is no draft model. Raises as ``draft_on``."""
    if not section.draft_model:
        return None
    limits = (vocab_size, section.speculative_tokens, section.chunk_tokens)
    return draft_on(section.device, section.draft_model, config.model.dtype, size, *limits)


def read_variant(section: EngineSection, content: str, num_layers: int) -> Profile | None:
    """Whose KV this node continues from; None: no one's. Raises ConfigError."""
    if not isinstance(section, PrefillSection) or not section.variant:
        return None
    profile = read_profile(section.variant)
    profile.check(content, num_layers)
    return profile
