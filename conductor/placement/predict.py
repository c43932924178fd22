"""Predicted milliseconds of every placement of one request, as arrays over nodes, and the details of one placement.

Pure. The default policy searches the arrays; ``explain`` says what any policy's choice is expected to cost.

    TTFT(p)    = queue(p) + min over sources and cuts of [fetch(source → p, up to the cut) + prefill(p, the rest)]
    handoff    = what is left of sending the blocks that d lacks when prefill ends; the last layer always is
    total(p,d) = TTFT(p) + handoff(p → d) + expected tokens · step(d, one sequence more)

Any leading part of a store's run may be fetched, but only two cuts can be optimal: the end of its DRAM part and the end
of the run. Between them each further token costs the same to fetch (the first from the SSD also waits for the reads
queued there), while the time to compute the rest, t·(N - k) + c·(N² - k²), falls faster the longer the cut k is: the
sum is concave between two ends, so its minimum is at one of them. (Computing in chunks adds a sawtooth; ignoring its
teeth loses at most the fixed ms of one step.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from conductor.arrays import Floats
from conductor.placement.view import FASTEST, MAX_SOURCES, NONE, SESSION_MS, Choice, PlacementQuery


class FirstToken(NamedTuple):
    """Arrays over P: the shortest time to the first token on each prefill node, and what the node then computes."""

    ttft_ms: Floats
    prefill_ms: Floats


class Breakdown(NamedTuple):
    """Predicted milliseconds of each part; 0 where nothing has been measured yet."""

    queue_ms: float = 0.0
    fetch_ms: float = 0.0
    prefill_ms: float = 0.0
    handoff_ms: float = 0.0
    step_ms: float = 0.0


class Prediction(NamedTuple):
    """One choice in full. ``source`` is the store actually read from, which may be the one on the same host."""

    breakdown: Breakdown
    source: int
    local_tokens: int
    fetched_tokens: int
    sent_blocks: int


def first_token(query: PlacementQuery) -> FirstToken:
    """The fastest of each prefill node's own cache, its host's store, and the best few other stores."""
    view, shape = query.view, query.shape
    everyone, is_unknown = np.arange(len(view.prefill.nodes)), ~view.prefill.known
    local = np.minimum(query.prefill_runs * shape.block_tokens, query.usable_tokens)
    cached, fetching, computing = local, np.zeros(len(local)), prefill_array_ms(query, local)
    whole, in_dram, queue = query.store_tokens, query.dram_tokens, query.queue_ms()
    sources = query.sources(MAX_SOURCES)
    for source in [view.prefill.local_store, *(np.full(len(local), source) for source in sources)] if sources else ():
        flows = np.where(source == view.prefill.local_store, 0.0, view.stores.sending_flows[source])
        for tokens, is_cut in ((in_dram[source], True), (whole[source], False)):
            num_bytes = (tokens - local) * shape.block_bytes / shape.block_tokens * (flows + 1.0)
            slow = (tokens - in_dram[source]) * shape.block_bytes / shape.block_tokens
            fetch = view.link_ms(view.fetch_link[source, everyone], num_bytes)
            waiting = np.maximum(view.stores.ssd_ready_at_ms[source] - query.now_ms - queue, 0.0)
            fetch = fetch + np.where(slow > 0.0, slow * view.stores.ssd_byte_ms + waiting, 0.0)
            compute = prefill_array_ms(query, tokens)
            is_faster = fetch + compute < fetching + computing
            is_faster = is_faster & ~is_unknown if is_cut else is_faster | (is_unknown & (tokens > cached))
            takes = (source >= 0) & (tokens > local) & is_faster
            cached = np.where(takes, tokens, cached)
            fetching = np.where(takes, fetch, fetching)
            computing = np.where(takes, compute, computing)
    ttft = queue + (fetching + computing) + view.prefill.tie_ms
    if query.last_prefill != NONE:
        ttft[query.last_prefill] -= SESSION_MS
    return FirstToken(ttft, computing)


def prefill_array_ms(query: PlacementQuery, cached: Floats) -> Floats:
    """[P] ms to compute what is not ``cached``: new·(cached + new/2) is half the difference of the squares."""
    num_tokens, chunk = query.facts.num_tokens, query.shape.chunk_tokens
    step, token, half_pair = query.view.prefill.costs
    new = num_tokens - cached
    if chunk:
        token = token - 2.0 * step / chunk
        step = 2.0 * step * np.ceil(new / chunk)
    result: Floats = step + new * (token + half_pair * (num_tokens + cached))
    return result


def transfer_array_ms(query: PlacementQuery, source: int, tokens: Floats) -> Floats:
    """[P] ms to fetch this many tokens from one store, whose bandwidth all its readers share."""
    view, shape = query.view, query.shape
    num_bytes = tokens * (shape.block_bytes / shape.block_tokens * (view.stores.sending_flows.item(source) + 1.0))
    return np.where(tokens > 0.0, view.link_ms(view.fetch_link[source], num_bytes), 0.0)


def local_ttft_ms(query: PlacementQuery) -> Floats:
    """[P]: queue, reading from the store on the same host, and prefill; nothing from other hosts."""
    shape, view = query.shape, query.view
    own = np.minimum(query.prefill_runs * shape.block_tokens, query.usable_tokens)
    with_home = np.minimum(query.host_runs() * shape.block_tokens, query.usable_tokens)
    result: Floats = query.queue_ms() + prefill_array_ms(query, with_home) + view.prefill.tie_ms
    if view.stores.nodes:
        home_byte = view.links[view.fetch_link[view.prefill.local_store, np.arange(len(own))], 1]
        result = result + (with_home - own) * home_byte * (shape.block_bytes / shape.block_tokens)
    return result


def sent_bytes(query: PlacementQuery) -> Floats:
    """[D]: bytes of the prompt's blocks that each decode node lacks."""
    total = -(-query.facts.num_tokens // query.shape.block_tokens)
    result: Floats = (total - query.decode_runs) * query.shape.block_bytes
    return result


def decode_work_ms(query: PlacementQuery) -> Floats:
    """[D]: the expected answer, one step per token, next to what the node already runs. inf where it must not go, or
    does not fit with its answer, unless it fits nowhere."""
    side, facts, shape = query.view.decode, query.facts, query.shape
    work = (side.next_step_ms + side.context_ms * facts.num_tokens) * facts.expected_tokens + side.tie_ms
    if query.last_decode != NONE:
        work[query.last_decode] -= SESSION_MS
    wanted = sent_bytes(query) / shape.block_bytes + facts.expected_tokens / shape.block_tokens
    ok = np.ones(len(work), dtype=bool) if query.decode_ok is None else query.decode_ok
    room = ok & (side.free_blocks >= wanted)
    return np.where(room if room.any() else ok, work, np.inf)


def explain(query: PlacementQuery, choice: Choice) -> Prediction:
    """What one choice costs, part by part."""
    view, shape, num_tokens = query.view, query.shape, query.facts.num_tokens
    p, d, source = choice
    block_tokens = shape.block_tokens
    local = min(int(query.prefill_runs[p]) * block_tokens, num_tokens - 1)
    if source == FASTEST:
        found = _fastest(query, p, local, [local_store_of(query, p), *query.sources(MAX_SOURCES)])
    elif source == NONE:
        found = _fastest(query, p, local, [local_store_of(query, p)])
    else:
        found = _fetched(query, p, local, source)
    source, cached, fetch_ms, computing = found
    queue = _queue_ms(query, p)
    if d == NONE:
        return Prediction(Breakdown(queue, fetch_ms, computing), source, local, cached - local, 0)
    blocks = -(-num_tokens // block_tokens) - int(query.decode_runs[d])
    sending = 0.0
    if blocks:
        sending = float(view.link_ms(view.send_link[p, d], blocks * shape.block_bytes))
    handoff = max(sending - computing, sending / shape.num_layers)
    step = view.decode.next_step_ms.item(d) + view.decode.context_ms.item(d) * num_tokens
    return Prediction(Breakdown(queue, fetch_ms, computing, handoff, step), source, local, cached - local, blocks)


def local_store_of(query: PlacementQuery, p: int) -> int:
    """The store on the host of prefill node ``p``, or NONE."""
    return int(query.view.prefill.local_store[p])


class _PrefixSource(NamedTuple):
    """Where the prefix beyond the node's own cache comes from: a store, or NONE."""

    store: int
    cached: int  # tokens, those in the node's own cache included
    fetch_ms: float
    prefill_ms: float  # of the rest

    @property
    def total_ms(self) -> float:
        return self.fetch_ms + self.prefill_ms


def _fastest(query: PlacementQuery, p: int, local: int, sources: Iterable[int]) -> _PrefixSource:
    """The best of ``sources``, or of using none. While costs are unknown the longest run is the best."""
    best = _nothing_fetched(query, p, local)
    for source in sources:
        if source == NONE or not query.store_runs[source]:
            continue
        is_known = query.view.prefill.known[p]
        if is_known and local < (cut := query.dram_tokens.item(source)) < query.store_tokens.item(source):
            found = _fetched_to(query, p, local, source, cut)
            if found.total_ms < best.total_ms:
                best = found
        found = _fetched(query, p, local, source)
        if found.total_ms < best.total_ms or (found.cached > best.cached and not is_known):
            best = found
    return best


def _nothing_fetched(query: PlacementQuery, p: int, local: int) -> _PrefixSource:
    return _PrefixSource(NONE, local, 0.0, _prefill_ms(query, p, local))


def _fetched(query: PlacementQuery, p: int, local: int, source: int) -> _PrefixSource:
    """Fetching the store's whole run."""
    cached = query.store_tokens.item(source)
    return _fetched_to(query, p, local, source, cached) if cached > local else _nothing_fetched(query, p, local)


def _fetched_to(query: PlacementQuery, p: int, local: int, source: int, cached: float) -> _PrefixSource:
    """Fetching the tokens from ``local`` up to ``cached``."""
    fetch_ms = _fetch_ms(query, p, source, local, cached)
    return _PrefixSource(source, int(cached), fetch_ms, _prefill_ms(query, p, int(cached)))


def _fetch_ms(query: PlacementQuery, p: int, source: int, local: int, cached: float) -> float:
    """Readers share a store's outgoing bandwidth, except those on its own host. Reads of its SSD take turns, and the
    ones ahead may run while the prompt waits in the node's queue."""
    view, shape = query.view, query.shape
    num_bytes = (cached - local) * shape.block_bytes / shape.block_tokens
    if source != view.prefill.local_store[p]:
        num_bytes *= view.stores.sending_flows.item(source) + 1.0
    slow = max(cached - query.dram_tokens.item(source), 0.0) * shape.block_bytes / shape.block_tokens
    slow_ms = slow * view.stores.ssd_byte_ms
    if slow:
        slow_ms += max(view.stores.ssd_ready_at_ms.item(source) - query.now_ms - _queue_ms(query, p), 0.0)
    return float(view.link_ms(view.fetch_link[source, p], num_bytes)) + slow_ms


def _queue_ms(query: PlacementQuery, p: int) -> float:
    side = query.view.prefill
    return max(side.ready_at_ms.item(p) - query.now_ms, side.waiting_ms.item(p))


def _prefill_ms(query: PlacementQuery, p: int, cached: int) -> float:
    costs, num_tokens, chunk = query.view.prefill.costs, query.facts.num_tokens, query.shape.chunk_tokens
    new = num_tokens - cached
    step, token = costs.item(0, p), costs.item(1, p)
    if chunk:
        step *= 2.0
        token -= step / chunk
        step *= -(-new // chunk)
    return step + new * (token + costs.item(2, p) * (num_tokens + cached))
