"""Where a request goes: the (prefill, decode) pair with the least predicted milliseconds to its last token.

Pure: reads no clock and changes nothing. FAST'25 Algorithm 1 in milliseconds, without its hand-set threshold: a
prefix is worth what fetching it costs against computing it, and a node's queue counts as much as its cache, so the
longest match does not herd.

    TTFT(p)    = queue(p) + fetch(missing prefix → p) + prefill(p, rest)
    total(p,d) = TTFT(p) + hand-off(p → d, blocks d lacks) + expected tokens · step(d, one sequence more)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conductor.fleet import Floats, PrefillSide, Slots, View
from conductor.registry import NodeInfo
from mooncake.errors import NodeUnavailable, Overloaded

TIE_MS = 1e-6  # totals nearer than this are equal
MAX_SOURCES = 4  # stores looked at as sources of one prefix
MIN_RETRY_S, MAX_RETRY_S = 0.05, 30.0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """All of a request that placement depends on. ``runs`` is the prefix index's answer: leading blocks, by slot. Ask
    for the view first: it gives every node its slot."""

    num_tokens: int  # prompt, and what was generated before a retry
    runs: Slots
    expected_tokens: float = 1.0  # of the answer
    needs_decode: bool = True
    budget_ms: float = float("inf")  # to the deadline
    excluded: frozenset[int] = frozenset()  # incarnations of nodes that failed this request


@dataclass(frozen=True, slots=True)
class Shape:
    """What a token weighs in this cluster."""

    block_tokens: int
    block_bytes: int
    num_layers: int
    chunk_tokens: int = 0  # of a prefill step; 0: whole prompts


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Predicted milliseconds of each part; 0 where nothing was measured yet."""

    queue_ms: float = 0.0
    fetch_ms: float = 0.0
    prefill_ms: float = 0.0
    handoff_ms: float = 0.0
    step_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: NodeInfo
    decode: NodeInfo | None
    pools: tuple[NodeInfo, ...]  # stores: where to read the prefix and to keep new blocks, best first
    local_tokens: int  # of the prompt, in the prefill node's cache
    fetched_tokens: int  # beyond those, in the first pool
    new_tokens: int  # to compute
    sent_blocks: int  # to the decode node, which lacks them
    is_known: bool  # whether the prefill node's predictions rest on measurements
    breakdown: Breakdown

    @property
    def predicted_ttft_ms(self) -> float:
        parts = self.breakdown
        return parts.queue_ms + parts.fetch_ms + parts.prefill_ms


def place(facts: RequestFacts, view: View, shape: Shape, now: float) -> Placement:
    """The best pair. Equal totals go to the less loaded node, then to the first by id.

    Raises NodeUnavailable when a role has no usable node, Overloaded when no node is predicted to meet the deadline.
    """
    allowed_prefill = _allowed(view.prefill.nodes, facts.excluded)
    allowed_decode = _allowed(view.decode.nodes, facts.excluded)
    _check_somebody(view, allowed_prefill, allowed_decode, facts)
    first = _first_token(facts, view, shape, now)
    ttft = first.ttft_ms
    if allowed_prefill is not None:
        ttft = np.where(allowed_prefill, ttft, np.inf)
    fastest = float(ttft.min())
    if fastest > facts.budget_ms:
        wait_s = (fastest - facts.budget_ms) / 1e3
        raise Overloaded(
            f"the first token is predicted in {fastest:.0f} ms, after the request's deadline",
            min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S),
        )
    best = _least(ttft, view.prefill.queued_tokens, view.prefill.queued_requests)
    if not facts.needs_decode:
        return _placement(facts, view, first, best, None, Breakdown())
    return _with_decode(facts, view, shape, first, ttft, best, allowed_decode)


@dataclass(frozen=True, slots=True)
class _FirstToken:
    """Arrays over P: the way to the first token on each prefill node."""

    queue_ms: Floats
    fetch_ms: Floats
    prefill_ms: Floats
    local_tokens: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    source: npt.NDArray[np.int64]  # store to fetch from, -1: none
    ttft_ms: Floats


def _first_token(facts: RequestFacts, view: View, shape: Shape, now: float) -> _FirstToken:
    side = view.prefill
    usable = facts.num_tokens - 1  # the last token is always computed
    local = np.minimum(facts.runs[view.prefill_slots] * shape.block_tokens, usable)
    queue = side.queued_ms - np.minimum((now - side.busy_since) * 1e3, side.head_ms)
    sources = _sources(facts, view)
    if not sources:
        compute = _prefill_ms(side, local, facts.num_tokens, shape.chunk_tokens)
        no_source, no_fetch = np.full(len(local), -1), np.zeros(len(local))
        return _FirstToken(queue, no_fetch, compute, local, local, no_source, queue + compute)
    best: _FirstToken | None = None
    for run, store in sources:
        cached = np.maximum(local, min(run * shape.block_tokens, usable))
        brings = cached > local
        num_bytes = (cached - local) * (shape.block_bytes / shape.block_tokens)
        fetch = view.fetch_latency[store] * brings + view.fetch_byte[store] * num_bytes
        compute = _prefill_ms(side, cached, facts.num_tokens, shape.chunk_tokens)
        source = np.where(brings, store, -1)
        found = _FirstToken(queue, fetch, compute, local, cached, source, queue + fetch + compute)
        best = found if best is None else _cheaper(best, found)
    assert best is not None
    return best


def _cheaper(one: _FirstToken, other: _FirstToken) -> _FirstToken:
    """Of two stores to fetch from, for each node the one that is predicted faster; ``one`` when they are equal. A node
    that lacks the prefix reads it from the first pool it is told of, so fetching nothing is no choice."""
    better = (other.source >= 0) & (other.ttft_ms < one.ttft_ms - TIE_MS)
    if not better.any():
        return one
    return _FirstToken(
        one.queue_ms,
        np.where(better, other.fetch_ms, one.fetch_ms),
        np.where(better, other.prefill_ms, one.prefill_ms),
        one.local_tokens,
        np.where(better, other.cached_tokens, one.cached_tokens),
        np.where(better, other.source, one.source),
        np.where(better, other.ttft_ms, one.ttft_ms),
    )


def _sources(facts: RequestFacts, view: View) -> list[tuple[int, int]]:
    """(blocks, store) of the stores that hold some of the prefix; the longest run first, so that it is the one taken
    while nothing is known about costs."""
    runs = facts.runs[view.store_slots].tolist()
    found = sorted((-run, store) for store, run in enumerate(runs) if run)
    return [(-run, store) for run, store in found[:MAX_SOURCES]]


def _prefill_ms(side: PrefillSide, cached: Slots, num_tokens: int, chunk_tokens: int) -> Floats:
    new = num_tokens - cached
    steps = (new + (chunk_tokens - 1)) // chunk_tokens if chunk_tokens else 1
    # new·(cached + new/2) = new·(num_tokens + cached)/2
    result: Floats = steps * side.step_ms + new * (side.token_ms + side.pair_ms * (0.5 * (num_tokens + cached)))
    return result


def _with_decode(
    facts: RequestFacts,
    view: View,
    shape: Shape,
    first: _FirstToken,
    ttft: Floats,
    best: int,
    allowed: npt.NDArray[np.bool_] | None,
) -> Placement:
    side = view.decode
    step = side.next_step_ms + side.context_ms * (side.context_tokens + facts.num_tokens)
    total_blocks = -(-facts.num_tokens // shape.block_tokens)
    send_blocks = np.maximum(total_blocks - facts.runs[view.decode_slots], 0)
    work = facts.expected_tokens * step
    room = side.free_blocks >= send_blocks + facts.expected_tokens / shape.block_tokens
    if allowed is not None:
        room &= allowed
    if not room.any():  # it will have to wait there
        room = np.ones(len(side.nodes), dtype=np.bool_) if allowed is None else allowed
    if not room.all():
        work = np.where(room, work, np.inf)
    send_bytes = send_blocks * float(shape.block_bytes)

    def row(p: int) -> tuple[Floats, Floats]:
        transfer = view.send_latency[p] + view.send_byte[p] * send_bytes
        # What is left of the transfer when prefill ends: layers are sent while later ones compute, the last cannot be.
        handoff = np.maximum(transfer - first.prefill_ms[p], transfer / shape.num_layers)
        return ttft[p] + handoff + work, handoff

    # No pair of prefill node p is better than ttft(p) + min work, so most rows need not be computed. Exact.
    totals, handoff = row(best)
    least = totals.min()
    for p in (ttft + work.min() < least - TIE_MS).nonzero()[0].tolist():
        if p == best:
            continue
        other, other_handoff = row(p)
        if other.min() < least - TIE_MS:
            best, totals, handoff, least = p, other, other_handoff, other.min()
    d = _least(totals, side.sequences, side.context_tokens)
    parts = Breakdown(handoff_ms=float(handoff[d]), step_ms=float(step[d]))
    return _placement(facts, view, first, best, d, parts, int(send_blocks[d]))


def _placement(
    facts: RequestFacts,
    view: View,
    first: _FirstToken,
    p: int,
    d: int | None,
    parts: Breakdown,
    sent_blocks: int = 0,
) -> Placement:
    prefill = view.prefill.nodes[p]
    decode = None if d is None else view.decode.nodes[d]
    local, cached, source = int(first.local_tokens[p]), int(first.cached_tokens[p]), int(first.source[p])
    return Placement(
        prefill=prefill,
        decode=decode,
        pools=_pools(view.stores, prefill, source),
        local_tokens=local,
        fetched_tokens=cached - local,
        new_tokens=facts.num_tokens - cached,
        sent_blocks=sent_blocks,
        is_known=bool(view.prefill.known[p]),
        breakdown=Breakdown(
            queue_ms=float(first.queue_ms[p]),
            fetch_ms=float(first.fetch_ms[p]),
            prefill_ms=float(first.prefill_ms[p]),
            handoff_ms=parts.handoff_ms,
            step_ms=parts.step_ms,
        ),
    )


def _pools(stores: tuple[NodeInfo, ...], prefill: NodeInfo, source: int) -> tuple[NodeInfo, ...]:
    """The store to read from, else one on the prefill node's host, else any."""
    if source >= 0:
        return (stores[source],)
    near = [store for store in stores if store.host_id and store.host_id == prefill.host_id]
    return tuple((near or stores)[:1])


def _least(cost: Floats, *ties: Floats) -> int:
    """Index of the least cost; near-equal costs are told apart by ``ties`` in order, then by position."""
    at = int(cost.argmin())
    equal = (cost <= cost[at] + TIE_MS).nonzero()[0]
    if len(equal) < 2:
        return at
    keys = [tie[equal] for tie in reversed(ties)]
    return int(equal[np.lexsort(keys)[0]])


def _allowed(nodes: tuple[NodeInfo, ...], excluded: frozenset[int]) -> npt.NDArray[np.bool_] | None:
    if not excluded:
        return None
    return np.array([info.incarnation not in excluded for info in nodes], dtype=bool)


def _check_somebody(
    view: View,
    prefill: npt.NDArray[np.bool_] | None,
    decode: npt.NDArray[np.bool_] | None,
    facts: RequestFacts,
) -> None:
    if not view.prefill.nodes or (prefill is not None and not prefill.any()):
        raise NodeUnavailable("no prefill node is available")
    if facts.needs_decode and (not view.decode.nodes or (decode is not None and not decode.any())):
        raise NodeUnavailable("no decode node is available")
