"""What other policies are compared with (most are those of FAST'25 Fig. 5): each looks at one thing alone."""

from __future__ import annotations

import numpy as np

from conductor.placement.policies.pick import allowed, any_least, idlest_decode, prefill_choices
from conductor.placement.predict import local_ttft_ms
from conductor.placement.view import Choice, PlacementQuery


def random(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    """Any prefill node."""
    return Choice(int(rng.choice(prefill_choices(query))), idlest_decode(query))


def round_robin(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    """Nodes in turn, whatever their load. The request's number is the counter, so there is no state."""
    nodes = prefill_choices(query)
    return Choice(nodes[query.facts.number % len(nodes)], idlest_decode(query))


def least_loaded(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    """Load balancing: the prefill node with the least queued work, whatever it has cached."""
    return Choice(any_least(allowed(query, query.queue_ms()), rng), idlest_decode(query))


def longest_prefix(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    """The longest match wins, whatever its queue. It herds: prompts that share a first block all go to one node."""
    return Choice(any_least(allowed(query, -query.host_runs()), rng), idlest_decode(query))


def local_cache_aware(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    """Least queue + prefill, using only each node's own cache and no transfer."""
    return Choice(int(allowed(query, local_ttft_ms(query)).argmin()), idlest_decode(query))
