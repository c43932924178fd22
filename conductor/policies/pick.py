"""Helpers that several policies share: which nodes are allowed, random tie-breaking, and decode nodes by load alone."""

from __future__ import annotations

import numpy as np

from conductor.view import NONE, Bools, Floats, Question


def any_least(cost: Floats, rng: np.random.Generator) -> int:
    """Index of a minimum of ``cost``; ties are broken uniformly at random."""
    equal = (cost == cost.min()).nonzero()[0]
    return int(equal[0]) if len(equal) == 1 else int(rng.choice(equal))


def allowed(question: Question, cost: Floats) -> Floats:
    """``cost`` [P], with inf where the request must not go."""
    return cost if question.prefill_ok is None else np.where(question.prefill_ok, cost, np.inf)


def prefill_choices(question: Question) -> list[int]:
    """Prefill nodes that the request may go to."""
    ok = question.prefill_ok
    return list(range(len(question.view.prefill.nodes))) if ok is None else [int(p) for p in ok.nonzero()[0]]


def decode_choices(question: Question) -> Bools:
    """[D]: decode nodes with room; if none has any, all that the request may go to."""
    ok = np.ones(len(question.view.decode.nodes), dtype=bool) if question.decode_ok is None else question.decode_ok
    room: Bools = ok & (question.view.decode.free_blocks > 0)
    return room if room.any() else ok


def least_decode(question: Question, cost: Floats) -> int:
    """The decode node of least ``cost`` [D]; NONE when the request needs none. Ties are broken by load."""
    if not question.facts.needs_decode:
        return NONE
    return int(np.where(decode_choices(question), cost + question.view.decode.tie_ms, np.inf).argmin())


def idlest_decode(question: Question) -> int:
    """Load balancing, as FAST'25 selects decode instances: the node that runs the fewest sequences."""
    return least_decode(question, question.view.decode.sequences)


def uncached_tokens(question: Question) -> Floats:
    """[P]: what each prefill node would have to compute using only its own cache."""
    own = np.minimum(question.own_blocks() * question.shape.block_tokens, question.usable_tokens)
    result: Floats = question.facts.num_tokens - own
    return result
