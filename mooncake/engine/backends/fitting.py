"""How large a cache is, where ``kv_gb`` leaves it to the machine: as large as a GPU has room for beside the model, or
as a CPU's host can spare. Decisions over given sizes; ``mooncake.sizing`` has their arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.config_sections import GPU_CHUNK_TOKENS
from mooncake.engine.backends.cards import cards_at, is_interpreted
from mooncake.engine.scheduler import MAX_SCORED
from mooncake.errors import ConfigError, ModelError
from mooncake.host_memory import available_bytes
from mooncake.model.parallel.shards import shard_config
from mooncake.page_groups import PageGroups
from mooncake.precision import Precision, resolve_precision
from mooncake.sizing import (
    GB,
    GPU_MEMORY_UTILIZATION,
    MIRROR_SHARE,
    NODES_AT_ONCE,
    Card,
    LargestStep,
    Need,
    cpu_cache_bytes,
    gpu_pages,
    longest_pages,
    need_of,
    rank_weights_bytes,
    weights_bytes,
)
from mooncake.types import KVLayout


@dataclass(frozen=True, slots=True)
class Asked:
    """A cache for this model, of pages of this layout."""

    checkpoint: Checkpoint
    precision: Precision
    device: str
    page: KVLayout
    groups: PageGroups
    step: LargestStep
    num_ranks: int = 1  # tensor parallel ones
    num_copies: int = 1  # processes with all weights
    draft_model: str = ""
    utilization: float = 0.0  # of each GPU; 0: the usual
    swap_bytes: int = 0
    has_mirror: bool = True  # if it is on a GPU
    spare_bytes: int = 0  # its part of the host's free memory; 0: nobody has divided it

    @property
    def least_pages(self) -> int:
        """Those of two blocks."""
        return 2 * self.groups.num_groups

    def longest_bytes(self) -> int:
        step, block = self.step, self.page.block_tokens
        return longest_pages(self.groups, step.context, step.prompt_tokens, block) * self.page.block_bytes


@dataclass(frozen=True, slots=True)
class Chosen:
    num_pages: int
    why: str


def largest_step(device: str, chunk_tokens: int, max_sequences: int, draft_tokens: int, context: int) -> LargestStep:
    """Of an engine with these settings. On a GPU decode steps are captured for batches of up to so many sequences.
    Raises ConfigError without Triton."""
    graphs: Sequence[int] = ()
    if device != "cpu" and not is_interpreted(device):
        from mooncake.model.gpu.gpu_model import captured_buckets

        graphs = captured_buckets(max_sequences)
    prompt = min(chunk_tokens or context, context)
    return LargestStep(prompt, max_sequences, draft_tokens, graphs, context, min(prompt, MAX_SCORED))


def choose_pages(asked: Asked) -> Chosen:
    """By what this machine has now. Raises ConfigError where the model does not fit, or there is no such GPU."""
    cards = [] if asked.device == "cpu" else cards_at(asked.device, asked.num_ranks)
    return pages_beside(asked, cards, available_bytes())


def pages_beside(asked: Asked, cards: Sequence[Card], free_host: int | None) -> Chosen:
    """``cards``: one for each rank, none where it computes on processors. ``free_host``: bytes; None: nobody knows.
    Raises ConfigError where the model does not fit, with what would."""
    return _on_cards(asked, cards, free_host) if cards else _on_cpu(asked, free_host)


def _on_cpu(asked: Asked, free_host: int | None) -> Chosen:
    # A draft model has as large a cache, and in Triton's interpreter the mirror is beside it.
    times = 1 + bool(asked.draft_model) + (asked.device != "cpu" and asked.has_mirror)
    part = _host_part(asked, free_host, asked.num_copies * weights_bytes(asked.checkpoint, asked.precision.weights))
    part = None if part is None else part // times
    longest = asked.longest_bytes()
    size = cpu_cache_bytes(longest, part)
    pages = size // asked.page.block_bytes
    why = "the default"
    if size > cpu_cache_bytes(0, part):
        why = f"what a sequence of {asked.step.context:,} tokens takes"
    if part is not None and size < max(longest, cpu_cache_bytes(0, None)):
        why = f"by the {part / GB:.1f} GB that the host can spare for it"
    return Chosen(pages, why)


def _on_cards(asked: Asked, cards: Sequence[Card], free_host: int | None) -> Chosen:
    utilization = asked.utilization or GPU_MEMORY_UTILIZATION
    need, page_bytes = _need(asked)
    host_room = None
    if asked.has_mirror and (part := _host_part(asked, free_host, 0)) is not None:
        host_room = int(MIRROR_SHARE * part)
    sizes = (utilization, need, page_bytes, asked.page.block_bytes)
    alone, pages = (gpu_pages(cards, *sizes, room) for room in (None, host_room))
    if alone < asked.least_pages:
        raise ConfigError(_too_large(asked, cards, need, page_bytes))
    if pages < asked.least_pages:
        raise ConfigError(
            f"the host has {max(host_room or 0, 0) / GB:.2f} GB for the mirror of a GPU's KV cache: free some, or "
            "start fewer nodes"
        )
    if pages < alone:
        return Chosen(pages, f"by the {(host_room or 0) / GB:.1f} GB that the host can spare for its mirror")
    card = cards[0]
    why = (
        f"{utilization:.3g} of {card.name} ({card.total_bytes / GB:.1f} GB, {card.free_bytes / GB:.1f} free), less "
        f"{need.weights / GB:.1f} for weights, {(need.step + need.workspace) / GB:.1f} to compute with and "
        f"{need.graphs / GB:.1f} for CUDA graphs"
    )
    return Chosen(pages, why)


def _host_part(asked: Asked, free_host: int | None, weights: int) -> int | None:
    if asked.spare_bytes:
        return asked.spare_bytes
    return None if free_host is None else (free_host - weights - asked.swap_bytes) // NODES_AT_ONCE


def _need(asked: Asked) -> tuple[Need, int]:
    """Of each GPU, and what a page takes there. Raises ModelError where the model cannot be cut so."""
    config, form, ranks = asked.checkpoint.config, asked.precision.weights, asked.num_ranks
    if ranks > 1:
        part = shard_config(config, ranks)
        need = need_of(part, form, rank_weights_bytes(part, form, ranks), asked.step, ranks)
        page_bytes = replace(asked.page, num_kv_heads=part.num_kv_heads).block_bytes
    else:
        need, page_bytes = (
            need_of(config, form, weights_bytes(asked.checkpoint, form), asked.step),
            asked.page.block_bytes,
        )
    if asked.draft_model:
        draft = open_checkpoint(asked.draft_model, asked.step.context)
        precision = resolve_precision(form.dtype, devices=(asked.device,), stored=draft.coding)
        need += need_of(draft.config, precision.weights, weights_bytes(draft, precision.weights), asked.step)
        its_page = draft.kv_layout(asked.page.block_tokens, precision.kv_dtype)
        page_bytes += min(its_page.block_bytes, asked.page.block_bytes)  # as ``draft_on`` makes its cache
    return need, page_bytes


def _too_large(asked: Asked, cards: Sequence[Card], need: Need, page_bytes: int) -> str:
    utilization = asked.utilization or GPU_MEMORY_UTILIZATION
    card = min(cards, key=lambda card: card.room(utilization))
    ways = [words for words, other in _others(asked) if _fits(other, card, utilization)]
    least = (need.total + asked.least_pages * page_bytes) / utilization / GB
    return (
        f"{asked.checkpoint.name} does not fit into {card.name}: {need.weights / GB:.1f} GB of weights and "
        f"{(need.total - need.weights) / GB:.1f} GB to compute with, in {card.room(utilization) / GB:.1f} GB "
        f"(gpu_memory_utilization {utilization:.3g} of {card.total_bytes / GB:.1f} GB, {card.free_bytes / GB:.1f} "
        "free). " + (f"It would fit with {' or '.join(ways)}" if ways else f"It needs a GPU of {least:.0f} GB")
    )


def _others(asked: Asked) -> Iterator[tuple[str, Asked]]:
    """Other ways to compute the same model, each with its words."""
    precision, page = asked.precision, asked.page
    if asked.step.prompt_tokens > GPU_CHUNK_TOKENS:
        yield (
            f"chunk_tokens {GPU_CHUNK_TOKENS}",
            replace(asked, step=replace(asked.step, prompt_tokens=GPU_CHUNK_TOKENS)),
        )
    if precision.weights.dtype == "float32":
        half = replace(precision, weights=replace(precision.weights, dtype="bfloat16"))
        kept = "bfloat16" if page.dtype == "float32" else page.dtype
        yield "dtype bfloat16", replace(asked, precision=half, page=replace(page, dtype=kept))
    for ranks in (2, 4, 8, 16):
        if ranks > asked.num_ranks and not precision.weights.coding and not precision.weights.codes:
            yield f"tensor parallelism over {ranks} GPUs", replace(asked, num_ranks=ranks)


def _fits(asked: Asked, card: Card, utilization: float) -> bool:
    try:
        need, page_bytes = _need(asked)
    except ModelError:
        return False
    return gpu_pages([card], utilization, need, page_bytes, 0, None) >= asked.least_pages
