"""Steps that several policies share: who may be taken, the least of several numbers, and decode nodes by load alone."""

from __future__ import annotations

import numpy as np

from conductor.view import NONE, Bools, Floats, Question

TIE_MS = 1e-6  # totals nearer than this are equal


def least(cost: Floats, prefer: int = NONE) -> int:
    """Index of the least cost, or ``prefer`` when that is equally good. Loads have told equal nodes apart already."""
    at = int(cost.argmin())
    return prefer if prefer != NONE and cost[prefer] <= cost[at] + TIE_MS else at


def any_least(cost: Floats, rng: np.random.Generator) -> int:
    """Index of a least cost; each of several equal ones with the same chance."""
    equal = (cost == cost.min()).nonzero()[0]
    return int(equal[0]) if len(equal) == 1 else int(rng.choice(equal))


def allowed(question: Question, cost: Floats) -> Floats:
    """``cost`` [P], inf where the request must not go."""
    return cost if question.prefill_ok is None else np.where(question.prefill_ok, cost, np.inf)


def prefill_choices(question: Question) -> list[int]:
    """Prefill nodes that the request may go to."""
    ok = question.prefill_ok
    return list(range(len(question.view.prefill.nodes))) if ok is None else [int(p) for p in ok.nonzero()[0]]


def decode_choices(question: Question) -> Bools:
    """[D]: decode nodes with room, or all that the request may go to when none has."""
    ok = np.ones(len(question.view.decode.nodes), dtype=bool) if question.decode_ok is None else question.decode_ok
    room: Bools = ok & (question.view.decode.free_blocks > 0)
    return room if room.any() else ok


def least_decode(question: Question, cost: Floats) -> int:
    """The decode node of least ``cost`` [D]; NONE when the request needs none. Equal ones by load."""
    if not question.facts.needs_decode:
        return NONE
    return least(np.where(decode_choices(question), cost + question.view.decode.tie_ms, np.inf))


def idlest_decode(question: Question) -> int:
    """Load balancing, as FAST'25 selects decode instances: the one that runs the fewest sequences."""
    return least_decode(question, question.view.decode.sequences)


def uncached_tokens(question: Question) -> Floats:
    """[P]: what each prefill node would have to compute with what it has itself."""
    own = np.minimum(question.own_blocks() * question.shape.block_tokens, question.usable_tokens)
    result: Floats = question.facts.num_tokens - own
    return result
