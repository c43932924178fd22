"""Admission rules, from the paper's to ours: each predicts the decode load of admitting one request.

Pure functions of a candidate and of what admission knows of the requests in flight. TTFT is the same for all rules and
is checked by ``admission``.

    none        no limit
    baseline    checked only after the prefill, which a late refusal wastes
    early       the current decode load, on arrival; it oscillates against the prefill load
    predicted   the decode load when this prefill will end, assuming one decode time for all
    lookahead   as predicted, but for the chosen node and over sampled answer lengths: both TBT and KV room
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from conductor.admission.inflight_requests import NUM_SAMPLES, DecodeBatch, InflightRequests
from conductor.admission.lengths import Kind, OutputLengths
from conductor.arrays import Floats
from conductor.placement.scheduler import Placement
from conductor.placement.view import PlacementQuery
from mooncake.config import TBT_ROOM

CONFIDENCE = 0.9  # fraction of the sampled futures in which the request must fit
COMFORT = 0.7  # if all loads are certainly below this fraction of the limits, no future is sampled


@dataclass(frozen=True, slots=True)
class Limits:
    """Service-level limits in ms. TBT is the mean of the longest tenth of a request's token gaps."""

    ttft_ms: float = float("inf")
    tbt_ms: float = float("inf")


class Candidate(NamedTuple):
    """The request to be admitted: where it would go, and when (s) it would begin to decode."""

    query: PlacementQuery
    placement: Placement
    decode: int  # index into the view; NONE: no decode node needed
    kind: Kind
    max_tokens: int
    now: float
    joins_at: float

    @property
    def prefill_wait_ms(self) -> float:
        """Time before its prompt is computed: the queue, and fetching the prefix."""
        return self.placement.breakdown.queue_ms + self.placement.breakdown.fetch_ms

    @property
    def decode_id(self) -> str:
        return self.placement.decode.node_id if self.placement.decode else ""


class Known(NamedTuple):
    """What ``Admission`` knows when a rule is asked."""

    limits: Limits
    inflight: InflightRequests
    lengths: OutputLengths
    decode_s: float  # mean decode time of a request
    rng: np.random.Generator


Rule = Callable[[Known, Candidate], float]
"""The decode load of admitting the candidate, over the limit."""


def no_rule(known: Known, candidate: Candidate) -> float:
    return 0.0


def baseline(known: Known, candidate: Candidate) -> float:
    """Nothing on arrival: the decode load is checked when the prefill has ended."""
    return 0.0


def early(known: Known, candidate: Candidate) -> float:
    """The current decode load. It ignores requests still in prefill, which is why it oscillates."""
    batch = known.inflight.decoding_on(candidate.decode_id)
    new_tokens = float(candidate.query.facts.num_tokens)
    return step_load(known.limits, candidate.query, candidate.decode, batch, new_tokens)


def predicted(known: Known, candidate: Candidate) -> float:
    """The mean decode load of the whole system when this prefill ends: every request whose prefill ends earlier has
    joined, and every request has left after the mean decode time (arXiv 2407.00079 §7.4)."""
    side = candidate.query.view.decode
    num_nodes = max(len(side.nodes), 1)
    then = known.inflight.decoding_at(candidate.joins_at, known.decode_s)
    batch = then.sequences / num_nodes + 1.0
    tokens = then.context_tokens / num_nodes + candidate.query.facts.num_tokens
    step = side.step_ms + side.sequence_ms * batch + side.context_ms * tokens
    return float(step.mean()) / known.limits.tbt_ms


def lookahead(known: Known, candidate: Candidate) -> float:
    """The chosen node in sampled futures: the step this request joins, and the peak KV it will ever need.

    A load above 1 means that the request fits in too few of them.
    """
    load = _load_if_comfortable(known, candidate)
    return _load_in_futures(known, candidate) if load is None else load


def _load_if_comfortable(known: Known, candidate: Candidate) -> float | None:
    """The load with every sequence at its maximum length at once, if even that is well below the limits."""
    side, d, inflight = candidate.query.view.decode, candidate.decode, known.inflight
    rows = inflight.rows(candidate.decode_id)
    tokens = candidate.query.facts.num_tokens + candidate.max_tokens
    most = tokens + float((inflight.context[rows] + inflight.limit[rows]).sum())
    worst = side.step_ms.item(d) + side.sequence_ms.item(d) * (len(rows) + 1) + side.context_ms.item(d) * most
    limit_ms, total_tokens = TBT_ROOM * known.limits.tbt_ms, _total_tokens(candidate)
    if worst <= COMFORT * limit_ms and most <= COMFORT * total_tokens:
        return max(worst / limit_ms, most / total_tokens)
    return None


def _load_in_futures(known: Known, candidate: Candidate) -> float:
    """The load that ``CONFIDENCE`` of the sampled futures do not exceed."""
    side, d, num_tokens = candidate.query.view.decode, candidate.decode, candidate.query.facts.num_tokens
    step_ms, sequence_ms, context_ms = side.step_ms.item(d), side.sequence_ms.item(d), side.context_ms.item(d)
    rows = known.inflight.rows(candidate.decode_id)
    batch, context = known.inflight.decoding_on(candidate.decode_id)  # sets the pace until it joins
    step_s = max(step_ms + sequence_ms * max(batch, 1.0) + context_ms * context, 0.01) / 1e3
    then = known.inflight.futures(rows, candidate.now, candidate.joins_at, step_s, known.lengths, known.rng)
    own = known.lengths.sample(candidate.kind, candidate.max_tokens, NUM_SAMPLES, known.rng)
    left = np.concatenate((then.left, own[:, None]), axis=1)  # [samples, sequences], the candidate last
    held = np.concatenate((then.held, np.full((NUM_SAMPLES, 1), float(num_tokens))), axis=1)
    is_running = left > 0.0
    in_step = is_running & np.append(then.decodes, True)
    steps = step_ms + sequence_ms * in_step.sum(axis=1) + context_ms * (held * in_step).sum(axis=1)
    limit_ms = TBT_ROOM * known.limits.tbt_ms
    loads = np.maximum(steps / limit_ms, peak_tokens(left, held * is_running) / _total_tokens(candidate))
    return float(np.quantile(loads, CONFIDENCE))


def _total_tokens(candidate: Candidate) -> float:
    """KV tokens that the chosen node can hold; infinite while it has not reported them."""
    query = candidate.query
    return query.view.decode.total_blocks.item(candidate.decode) * query.shape.block_tokens or np.inf


def peak_tokens(left: Floats, held: Floats) -> Floats:
    """[samples]: peak number of KV tokens. Memory only grows between two ends, so it peaks just before an end. With
    sequences sorted by tokens left, all later ones are still there at the i-th end, each grown by what the i-th had
    left."""
    order = np.argsort(left, axis=1)
    left = np.take_along_axis(left, order, axis=1)
    held = np.take_along_axis(held, order, axis=1)
    held_from = held[:, ::-1].cumsum(axis=1)[:, ::-1]
    running = (held > 0.0)[:, ::-1].cumsum(axis=1)[:, ::-1]
    result: Floats = (held_from + running * left).max(axis=1)
    return result


def step_load(limits: Limits, query: PlacementQuery, d: int, batch: DecodeBatch, new_tokens: float = 0.0) -> float:
    """Time over limit of one step of ``batch`` on decode node ``d``, with one sequence more if ``new_tokens``."""
    side = query.view.decode
    sequences = batch.sequences + (new_tokens > 0.0)
    context_tokens = batch.context_tokens + new_tokens
    step = side.step_ms.item(d) + side.sequence_ms.item(d) * sequences + side.context_ms.item(d) * context_tokens
    return step / limits.tbt_ms if sequences else 0.0


ADMISSIONS: dict[str, Rule] = {
    "none": no_rule,
    "baseline": baseline,
    "early": early,
    "predicted": predicted,
    "lookahead": lookahead,
}
