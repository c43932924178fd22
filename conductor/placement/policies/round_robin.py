"""Nodes in turn, whatever their load. The request's number is the counter, so there is no state."""

from __future__ import annotations

import numpy as np

from conductor.placement.policies.pick import idlest_decode, prefill_choices
from conductor.placement.view import Choice, PlacementQuery


def round_robin(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    nodes = prefill_choices(query)
    return Choice(nodes[query.facts.number % len(nodes)], idlest_decode(query))
