"""How much memory a model takes where it computes, and so how large its KV cache may be. Sizes are bytes.

Pure: what a GPU or a host has is an argument, and nothing is loaded. On a GPU all of it is known by arithmetic rather
than by a trial step, because a cache's size is needed before the weights are read: the mirror of it is opened first,
and all ranks are told. The trial comes afterwards: a GPU computes its largest steps over the cache before anyone waits
for them, and a node whose cache left too little room for them does not start.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncake.checkpoint import Checkpoint, weight_shapes
from mooncake.errors import ConfigError
from mooncake.model_config import ModelConfig
from mooncake.page_groups import PageGroups
from mooncake.precision import WeightFormat

GB = 1e9

GPU_MEMORY_UTILIZATION = 0.9
"""Of a GPU, where nobody says otherwise, as in vLLM. The rest is for what arithmetic misses: the allocator's fragments,
code of kernels, adapters."""

CPU_CACHE_GB = 1.0  # on a CPU, unless the longest sequence needs more
CPU_SHARE = 0.5  # of a node's part of the free host memory, for a cache that needs more than that
MIRROR_SHARE = 0.8  # … and for the mirror of a GPU's cache, without which that cannot be used
NODES_AT_ONCE = 2  # that may be starting on a host, where nobody says how many

# An allowance: libraries' workspaces, the code of compiled kernels, partial results of attention (100 MB at most)
WORKSPACE_BYTES = 500_000_000
NCCL_BYTES = 500_000_000  # … and the buffers of sums over GPUs
FLOAT_BYTES = 4
GRAPH_BYTES = 16_000_000  # … and a captured step's own records, beside what it computes
SAMPLED_AT_ONCE, SAMPLER_BYTES = 32, 40  # rows that are drawn from together; of each, and each token of the vocabulary
RULE_CHUNK = 64  # tokens that the gated delta rule takes together

_LAYER = re.compile(r"\.(\d+)\.")
_OTHER_EXPERT = re.compile(r"\.experts\.[1-9]\d*\.")  # all but the first
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU: what it has, and what nobody else uses as the node starts."""

    name: str
    total_bytes: int
    free_bytes: int

    def room(self, utilization: float) -> int:
        """For all that a node has there. Where others have some of it, half of what a node leaves alone stays free."""
        alone = 1 - max(utilization, GPU_MEMORY_UTILIZATION)
        return int(min(utilization * self.total_bytes, self.free_bytes - alone / 2 * self.total_bytes))


@dataclass(frozen=True, slots=True)
class LargestStep:
    """What an engine may ask of a model at once."""

    prompt_tokens: int
    sequences: int  # that decode
    draft_tokens: int = 0  # of each
    graphs: Sequence[int] = ()  # batch sizes that are captured
    context: int = 0  # longest sequence
    scored_tokens: int = 0  # of prompts, with log-probabilities

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sequences * (1 + self.draft_tokens)

    @property
    def logit_rows(self) -> int:
        return max(self.scored_tokens, self.sequences * (1 + self.draft_tokens))


@dataclass(frozen=True, slots=True)
class Need:
    """Of one GPU, beside the cache."""

    weights: int
    step: int  # what the largest one computes
    graphs: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.step + self.graphs + self.workspace

    def __add__(self, other: Need) -> Need:
        """Of two models that take turns."""
        step, workspace = max(self.step, other.step), max(self.workspace, other.workspace)
        return Need(self.weights + other.weights, step, self.graphs + other.graphs, workspace)


def parameter_count(model: ModelConfig) -> int:
    """Number of all weights, including those of experts that a token does not use."""
    return sum(map(math.prod, weight_shapes(model).values()))


def weights_bytes(checkpoint: Checkpoint, form: WeightFormat) -> int:
    """Of all weights, as one process holds them."""
    own_codes = checkpoint.num_codes if form.codes else 0  # one byte each
    in_groups, group_bytes = checkpoint.groups if form.keeps_groups and not own_codes else (0, 0)
    others = parameter_count(checkpoint.config) - own_codes - in_groups
    return others * _value_bytes(form) + own_codes + group_bytes


def rank_weights_bytes(part: ModelConfig, form: WeightFormat, num_ranks: int) -> int:
    """Of the largest of several ranks, whose ``part`` is as ``shards.shard_config`` says: each has some of the experts
    and of the vocabulary."""
    shapes = weight_shapes(part).items()
    cut = sum(math.prod(shape) for name, shape in shapes if _of_experts(name, shape) or name.endswith(_VOCABULARY))
    whole = parameter_count(part) - cut
    share = -(-part.num_experts // num_ranks) / part.num_experts if part.num_experts else 1 / num_ranks
    return int((whole + cut * max(share, 1 / num_ranks)) * _value_bytes(form))


def _value_bytes(form: WeightFormat) -> int:
    return 1 if form.coding else _bytes_of(form)


def _bytes_of(form: WeightFormat) -> int:
    return FLOAT_BYTES if form.dtype == "float32" else 2


def need_of(config: ModelConfig, form: WeightFormat, weights: int, step: LargestStep, num_ranks: int = 1) -> Need:
    """``config`` is that of one GPU's part, and ``weights`` the bytes of its weights."""
    vocab, value_bytes = config.vocab_size, _bytes_of(form)
    widest = token_bytes(config, value_bytes)
    logits = step.logit_rows * vocab * (value_bytes + FLOAT_BYTES) + SAMPLED_AT_ONCE * vocab * SAMPLER_BYTES
    tables = 2 * step.context * config.head_dim * FLOAT_BYTES * (2 if config.layer_windows else 1)  # of positions
    graphs = 0
    if step.graphs:  # they share the memory of what they compute, but each has logits of its own
        logged = sum(step.graphs) * vocab * FLOAT_BYTES
        graphs = max(step.graphs) * widest + logged + len(step.graphs) * GRAPH_BYTES
    workspace = WORKSPACE_BYTES + (NCCL_BYTES if num_ranks > 1 else 0)
    return Need(weights, step.tokens * widest + logits + tables, graphs, workspace)


def token_bytes(config: ModelConfig, value_bytes: int) -> int:
    """What a token takes at most at once: the inputs and outputs of all products of the widest layer, none of which is
    taken to be freed within it, of as many experts as a token uses; and what is between them, for which float32 is
    assumed: attention, recurrence and the stream of residuals, which some families keep in it."""
    layers: defaultdict[str, int] = defaultdict(int)
    for name, shape in weight_shapes(config).items():
        if len(shape) < 2 or not (layer := _LAYER.search(name)) or _OTHER_EXPERT.search(name):
            continue
        times = config.experts_per_token if _of_experts(name, shape) else 1
        layers[layer[1]] += times * sum(shape[-2:])
    streams = config.gemma.streams.count if config.gemma and config.gemma.streams else 1
    attention = max(config.num_heads * config.heads_of(layer)[1] for layer in range(config.num_layers))
    between = 2 * attention + (2 + streams) * config.hidden_size + _rule_numbers(config)
    latent = 2 * attention if config.latent else 0  # queries and results in the space of cached rows, and behind it
    routed = 6 * config.num_experts  # scores, and which of them are the best
    return (max(layers.values()) + latent) * value_bytes + (between + routed) * FLOAT_BYTES


def _of_experts(name: str, shape: Sequence[int]) -> bool:
    """One by one, or all of a layer in one tensor."""
    return ".experts." in name or (len(shape) == 3 and "put_linear." in name)


def _rule_numbers(config: ModelConfig) -> int:
    rule = config.recurrence
    if rule is None:
        return 0
    values = rule.num_value_heads * (rule.key_dim + rule.value_dim)
    return 4 * rule.channels + 4 * values + rule.num_key_heads * (RULE_CHUNK + 2)


def gpu_pages(
    cards: Iterable[Card], utilization: float, need: Need, page_bytes: int, host_bytes: int, host_room: int | None
) -> int:
    """Pages of a cache of which each card holds ``page_bytes`` a page, and a host's mirror ``host_bytes``. Negative or
    none where the model leaves no room. ``host_room`` None: there is no mirror, or nobody knows."""
    pages = min(card.room(utilization) - need.total for card in cards) // page_bytes
    return pages if host_room is None or not host_bytes else min(pages, host_room // host_bytes)


def cpu_cache_bytes(longest_bytes: int, part_bytes: int | None) -> int:
    """Of a cache in host memory. ``longest_bytes``: what one sequence of the whole context takes; ``part_bytes``: the
    node's part of the memory that is free (None: nobody knows).

    The default as long as that is there, and more where a sequence needs more, up to a share of the part: memory that a
    cache takes is gone for everybody else.
    """
    default = int(CPU_CACHE_GB * GB)
    if part_bytes is None:
        return default
    return max(min(default, part_bytes), min(longest_bytes, int(CPU_SHARE * part_bytes)), 0)


def longest_pages(groups: PageGroups, context: int, step_tokens: int, block_tokens: int) -> int:
    """Pages of a sequence of so many tokens, computed in steps of ``step_tokens`` (0: at once)."""
    return groups.num_needed(-(-context // block_tokens), step_tokens or context, block_tokens)


def shares_of_a_card(wanted: Sequence[float], name: str = "a GPU") -> list[float]:
    """Each node's ``gpu_memory_utilization``, of nodes on one card that ask for so much of it; those that ask for 0
    share what the others leave of the usual. Raises ConfigError when they ask for more than there is."""
    given, open_ones = sum(wanted), sum(1 for share in wanted if not share)
    left = GPU_MEMORY_UTILIZATION - given
    if given > 1 + 1e-9 or (open_ones and left <= 0):
        asked = " + ".join(f"{share:g}" for share in wanted if share)
        rest = f", and leave nothing to {open_ones} more" if given <= 1 + 1e-9 else ""
        raise ConfigError(f"nodes on {name} ask for {asked} of it (gpu_memory_utilization){rest}: lower them")
    return [share or left / open_ones for share in wanted]
