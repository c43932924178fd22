"""Helpers that several policies share: which nodes are allowed, random tie-breaking, and decode nodes by load alone."""

from __future__ import annotations

import numpy as np

from conductor.arrays import Bools, Floats
from conductor.placement.view import NONE, PlacementQuery


def any_least(cost: Floats, rng: np.random.Generator) -> int:
    """Index of a minimum of ``cost``; ties are broken uniformly at random."""
    equal = (cost == cost.min()).nonzero()[0]
    return int(equal[0]) if len(equal) == 1 else int(rng.choice(equal))


def allowed(query: PlacementQuery, cost: Floats) -> Floats:
    """``cost`` [P], with inf where the request must not go."""
    return cost if query.prefill_ok is None else np.where(query.prefill_ok, cost, np.inf)


def prefill_choices(query: PlacementQuery) -> list[int]:
    """Prefill nodes that the request may go to."""
    ok = query.prefill_ok
    return list(range(len(query.view.prefill.nodes))) if ok is None else [int(p) for p in ok.nonzero()[0]]


def decode_choices(query: PlacementQuery) -> Bools:
    """[D]: decode nodes with room; if none has any, all that the request may go to."""
    ok = np.ones(len(query.view.decode.nodes), dtype=bool) if query.decode_ok is None else query.decode_ok
    room: Bools = ok & (query.view.decode.free_blocks > 0)
    return room if room.any() else ok


def least_decode(query: PlacementQuery, cost: Floats) -> int:
    """The decode node of least ``cost`` [D]; NONE when the request needs none. Ties are broken by load."""
    if not query.facts.needs_decode:
        return NONE
    return int(np.where(decode_choices(query), cost + query.view.decode.tie_ms, np.inf).argmin())


def idlest_decode(query: PlacementQuery) -> int:
    """Load balancing, as FAST'25 selects decode instances: the node that runs the fewest sequences."""
    return least_decode(query, query.view.decode.sequences)


def uncached_tokens(query: PlacementQuery) -> Floats:
    """[P]: what each prefill node would have to compute using only its own cache."""
    own = np.minimum(query.host_runs() * query.shape.block_tokens, query.usable_tokens)
    result: Floats = query.facts.num_tokens - own
    return result
