"""Where a request goes: the (prefill, decode) pair with the least predicted milliseconds to its last token.

Pure: reads no clock and changes nothing. FAST'25 Algorithm 1 in milliseconds, without its hand-set threshold: a
prefix is worth what fetching it costs against computing it, and a node's queue counts as much as its cache, so the
longest match does not herd.

    TTFT(p)    = queue(p) + fetch(missing prefix → p) + prefill(p, rest)
    total(p,d) = TTFT(p) + hand-off(p → d, blocks d lacks) + expected tokens · step(d, one sequence more)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conductor.fleet import Floats, PrefillSide, View
from conductor.registry import NodeInfo
from mooncake.errors import NodeUnavailable, Overloaded

TIE_MS = 1e-6  # totals nearer than this are equal
MAX_SOURCES = 4  # stores looked at as sources of one prefix
MIN_RETRY_S, MAX_RETRY_S = 0.05, 30.0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """All of a request that placement depends on. ``runs`` is the prefix index's answer: leading blocks, by node."""

    num_tokens: int  # prompt, and what was generated before a retry
    runs: Mapping[str, int]
    expected_tokens: float = 1.0  # of the answer
    needs_decode: bool = True
    budget_ms: float = float("inf")  # to the deadline
    excluded: frozenset[str] = frozenset()


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
        return _placement(facts, view, shape, first, best, None, Breakdown())
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
    local = np.zeros(len(side.nodes), dtype=np.int64)
    runs: list[tuple[int, int]] = []  # (blocks, store)
    for node_id, run in facts.runs.items():
        if (at := view.prefill_at.get(node_id)) is not None:
            local[at] = min(run * shape.block_tokens, usable)
        elif (at := view.store_at.get(node_id)) is not None:
            runs.append((run, at))
    queue = _queue_ms(side, now)
    compute = _prefill_ms(side, local, facts.num_tokens, shape.chunk_tokens)
    fetch = np.zeros(len(local))
    cached = local
    source = np.full(len(local), -1)
    best = None
    # Longest run first, so that it is the one taken while nothing is known about costs.
    for run, store in sorted(runs, key=lambda found: (-found[0], found[1]))[:MAX_SOURCES]:
        reach = np.maximum(local, min(run * shape.block_tokens, usable))
        brings = reach > local
        if not brings.any():
            break
        num_bytes = (reach - local) * (shape.block_bytes / shape.block_tokens)
        this_fetch = np.where(brings, view.fetch_latency[store] + view.fetch_byte[store] * num_bytes, 0.0)
        this_compute = _prefill_ms(side, reach, facts.num_tokens, shape.chunk_tokens)
        total = this_fetch + this_compute
        # A node that lacks the prefix reads it from the first pool it is told of, so some store is always taken.
        better = brings if best is None else brings & ((source < 0) | (total < best))
        best = total if best is None else np.where(better, total, best)
        fetch, compute = np.where(better, this_fetch, fetch), np.where(better, this_compute, compute)
        cached, source = np.where(better, reach, cached), np.where(better, store, source)
    return _FirstToken(queue, fetch, compute, local, cached, source, queue + fetch + compute)


def _queue_ms(side: PrefillSide, now: float) -> Floats:
    """Work in front of a new arrival: all that is queued, less what the one in progress has had already."""
    elapsed = np.maximum((now - side.busy_since) * 1e3, 0.0)
    each = side.queued_ms / np.maximum(side.queued_requests, 1.0)
    result: Floats = side.queued_ms - np.where(side.queued_requests > 0, np.minimum(elapsed, each), 0.0)
    return result


def _prefill_ms(side: PrefillSide, cached: npt.NDArray[np.int64], num_tokens: int, chunk_tokens: int) -> Floats:
    new = num_tokens - cached
    steps = -(-new // chunk_tokens) if chunk_tokens else 1
    result: Floats = steps * side.step_ms + new * (side.token_ms + side.pair_ms * (cached + 0.5 * new))
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
    step = (
        side.step_ms
        + side.sequence_ms * (side.sequences + 1)
        + side.context_ms * (side.context_tokens + facts.num_tokens)
    )
    total_blocks = -(-facts.num_tokens // shape.block_tokens)
    send_blocks = np.full(len(side.nodes), total_blocks)
    for node_id, run in facts.runs.items():
        if (at := view.decode_at.get(node_id)) is not None:
            send_blocks[at] = max(total_blocks - run, 0)
    work = facts.expected_tokens * step
    room = (side.free_sequences >= 1) & (side.free_blocks >= send_blocks + facts.expected_tokens / shape.block_tokens)
    if allowed is not None:
        room &= allowed
    if not room.any():
        room = allowed if allowed is not None else np.ones(len(side.nodes), dtype=bool)  # it will have to wait there
    work = np.where(room, work, np.inf)
    send_bytes = send_blocks * float(shape.block_bytes)

    def totals(rows: npt.NDArray[np.intp]) -> tuple[Floats, Floats]:
        handoff = _handoff_ms(view.send_latency[rows], view.send_byte[rows], send_bytes, first.prefill_ms[rows], shape)
        return ttft[rows, None] + handoff + work, handoff

    # No pair of prefill node p is better than ttft(p) + min work, so most rows need not be computed. Exact.
    only_best = np.array([best])
    matrix, handoff = totals(only_best)
    rows = np.flatnonzero(ttft + work.min() < matrix.min() - TIE_MS)
    if len(rows) > 1 or (len(rows) == 1 and rows[0] != best):
        rows = np.union1d(rows, only_best)
        matrix, handoff = totals(rows)
    else:
        rows = only_best
    row = _least(matrix.min(axis=1), view.prefill.queued_tokens[rows], view.prefill.queued_requests[rows])
    column = _least(matrix[row], side.sequences, side.context_tokens)
    parts = Breakdown(handoff_ms=float(handoff[row, column]), step_ms=float(step[column]))
    return _placement(facts, view, shape, first, int(rows[row]), column, parts)


def _handoff_ms(latency: Floats, byte: Floats, num_bytes: Floats, prefill_ms: Floats, shape: Shape) -> Floats:
    """What is left of the transfer when prefill ends: layers are sent while later ones compute, the last cannot be."""
    transfer = latency + byte * num_bytes
    result: Floats = np.maximum(transfer - prefill_ms[:, None], transfer / shape.num_layers)
    return result


def _placement(
    facts: RequestFacts, view: View, shape: Shape, first: _FirstToken, p: int, d: int | None, parts: Breakdown
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
    equal = np.flatnonzero(cost <= cost[at] + TIE_MS)
    if len(equal) < 2:
        return at
    keys = [tie[equal] for tie in reversed(ties)]
    return int(equal[np.lexsort(keys)[0]])


def _allowed(nodes: tuple[NodeInfo, ...], excluded: frozenset[str]) -> npt.NDArray[np.bool_] | None:
    if not excluded:
        return None
    return np.array([info.node_id not in excluded for info in nodes], dtype=bool)


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
