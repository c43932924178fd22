"""Keeps the view up to date: builds it when a node comes or goes, and otherwise updates single numbers in place.

Pure. It decides nothing: it copies what the registry, the cost model and the bookings say into the view's arrays.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conductor.arrays import Bools, Ints, Links
from conductor.placement.bookings import NodeBookings
from conductor.placement.cost import ALL_NODES, MAX_FITS, Changed, CostModel, TransferCost
from conductor.placement.view import NONE, DecodeSide, PrefillSide, StoreSide, View
from conductor.prefixes.index import PrefixIndex
from conductor.registry import NodeInfo, NodeLoad, Registry
from mooncake.types import Role

# New coefficients are picked up this often, a few nodes at a time, so that no decision waits for all of them.
COSTS_REFRESH_S = 0.01
CHANGES_A_REFRESH = 4
TIE_REQUEST_MS, TIE_TOKEN_MS = 1e-9, 1e-10  # ties between equal nodes are broken by what they have queued

Nodes = tuple[NodeInfo, ...]


class ViewKeeper:
    """One owner: the fleet. ``bookings``: outstanding work by node id; a missing entry is created on access."""

    def __init__(
        self,
        registry: Registry,
        costs: CostModel,
        index: PrefixIndex,
        bookings: Mapping[str, NodeBookings],
        chunk_tokens: int,
        ssd_byte_ms: float,
    ) -> None:
        self._registry = registry
        self._costs = costs
        self._index = index
        self._bookings = bookings
        self._chunk_tokens = chunk_tokens
        self._ssd_byte_ms = ssd_byte_ms
        self._has_unbooked_tokens: dict[str, None] = {}
        self._built_from = (-1, -1)
        self._refreshed_at = 0.0
        self.view: View | None = None  # the last one returned

    def current(self, now: float) -> View:
        """The cluster as it is. The same object, updated in place, until a node comes or goes."""
        view, versions = self.view, (self._registry.version, self._index.version)
        if view is None or versions != self._built_from:
            view = self._build()
            # slots assigned while building are in it already
            self._built_from = (self._registry.version, self._index.version)
            self._refreshed_at = now
        elif now - self._refreshed_at >= COSTS_REFRESH_S:
            self._refreshed_at = now
            for changed in self._costs.take_changed(CHANGES_A_REFRESH):
                self._set_cost(view, changed)
        return view

    def apart_from(self, barred: frozenset[int]) -> View:
        """A view of its own, never updated, of the nodes that may get work where these may not."""
        shared = self.view
        try:
            return self._build(barred)
        finally:
            self.view = shared

    def update(self, node_id: str) -> None:
        """Update a node's numbers after anything in its bookings has changed."""
        booked = self._bookings[node_id]
        if booked.unbooked_tokens:
            self._has_unbooked_tokens[node_id] = None
        else:
            self._has_unbooked_tokens.pop(node_id, None)
        view = self.view
        if view is None:
            return
        if node_id in view.prefill_at:
            self.update_prefill(node_id, booked)
        elif node_id in view.decode_at:
            self.update_decode(node_id, booked)
        elif node_id in view.store_at:
            self.update_store(node_id, booked)

    def update_prefill(self, node_id: str, booked: NodeBookings) -> None:
        """Like ``update``, for a prefill node whose queued prompts have changed."""
        view = self.view
        if view is None or (at := view.prefill_at.get(node_id)) is None:
            return
        side = view.prefill
        queued_ms = booked.prefill_ms
        if booked.unbooked_tokens:
            queued_ms += float(side.costs[1, at]) * booked.unbooked_tokens
        requests, running_ms = len(booked.prefills), 0.0
        if requests:
            running_ms = next(iter(booked.prefills)).prefill_ms
        tokens = booked.prefill_tokens + booked.unbooked_tokens
        side.queued_requests[at] = requests
        side.queued_tokens[at] = tokens
        side.queued_ms[at] = queued_ms
        side.waiting_ms[at] = queued_ms - running_ms if queued_ms > running_ms else 0.0
        side.ready_at_ms[at] = booked.busy_since * 1e3 + queued_ms
        side.tie_ms[at] = TIE_TOKEN_MS * tokens + TIE_REQUEST_MS * requests

    def update_decode(self, node_id: str, booked: NodeBookings) -> None:
        """Like ``update``, for a decode node whose sequences have changed."""
        view = self.view
        if view is None or (at := view.decode_at.get(node_id)) is None:
            return
        side = view.decode
        node = self._registry.get(node_id)
        load = node.load if node is not None else _NO_LOAD
        sequences = booked.decodes + booked.unbooked_decodes
        context_tokens = booked.decode_tokens + booked.unbooked_context
        side.sequences[at] = sequences
        side.context_tokens[at] = context_tokens
        fixed, of_sequences = side.step_ms.item(at), side.sequence_ms.item(at) * (sequences + 1)
        side.next_step_ms[at] = fixed + of_sequences + side.context_ms.item(at) * context_tokens
        total, available = booked.viewed_blocks = load.blocks_total, load.blocks_free + load.blocks_cached
        free = available - booked.unreported_blocks if total else np.inf
        side.free_blocks[at] = -1.0 if 0 < side.nodes[at].max_sequences <= sequences else free
        side.total_blocks[at] = total
        side.tie_ms[at] = TIE_REQUEST_MS * sequences + TIE_TOKEN_MS * context_tokens

    def update_store(self, node_id: str, booked: NodeBookings) -> None:
        """Like ``update``, for a store whose reads have changed."""
        view = self.view
        if view is None or (at := view.store_at.get(node_id)) is None:
            return
        side = view.stores
        side.sending_flows[at] = booked.sending_flows
        side.idleness[at] = -min(booked.sending_flows, 1000) / 1024
        side.ssd_ready_at_ms[at] = booked.ssd_ready_at_ms

    def forget(self, node_id: str) -> None:
        """The node is gone; the next ``current`` rebuilds the view without it."""
        self._has_unbooked_tokens.pop(node_id, None)

    def _build(self, barred: frozenset[int] = frozenset()) -> View:
        prefill, decode = self._usable(Role.PREFILL, barred), self._usable(Role.DECODE, barred)
        stores = self._usable(Role.STORE)
        for info in stores:
            self._index.join(info.node_id, is_tiered=True)
        view = self.view = self._empty_view(prefill, decode, stores)
        for info in (*prefill, *decode, *stores):
            self.update(info.node_id)
        self._set_prefill_cost(view, ALL_NODES)
        self._set_decode_cost(view, ALL_NODES)
        for info in prefill:
            if self._costs.has_measured("prefill", info.node_id):
                self._set_prefill_cost(view, info.node_id)
        for info in decode:
            if self._costs.has_measured("decode", info.node_id):
                self._set_decode_cost(view, info.node_id)
        self._set_default_link(view)
        for node_id, peer in self._costs.measured_pairs():
            self._set_link(view, node_id, peer)
        return view

    def _usable(self, role: Role, barred: frozenset[int] = frozenset()) -> Nodes:
        return tuple(node.info for node in self._registry.usable(role, barred))

    def _empty_view(self, prefill: Nodes, decode: Nodes, stores: Nodes) -> View:
        """A view of idle nodes whose costs are unknown."""
        num_prefill, num_decode, num_stores = len(prefill), len(decode), len(stores)
        by_host = {info.host_id: at for at, info in enumerate(stores) if info.host_id}
        return View(
            prefill=PrefillSide(
                nodes=prefill,
                slots=self._slots(prefill),
                local_store=np.array([by_host.get(info.host_id, NONE) for info in prefill], dtype=np.int64),
                costs=np.zeros((3, num_prefill)),
                known=np.zeros(num_prefill, dtype=bool),
                measured=np.zeros(num_prefill, dtype=bool),
                **{name: np.zeros(num_prefill) for name in _PREFILL_FLOATS},
            ),
            decode=DecodeSide(
                nodes=decode,
                slots=self._slots(decode),
                measured=np.zeros(num_decode, dtype=bool),
                **{name: np.zeros(num_decode) for name in _DECODE_FLOATS},
            ),
            stores=StoreSide(
                nodes=stores,
                slots=self._slots(stores),
                dram_slots=np.array([self._index.dram_slot(info.node_id) for info in stores], dtype=np.int64),
                ssd_byte_ms=self._ssd_byte_ms,
                **{name: np.zeros(num_stores) for name in _STORE_FLOATS},
            ),
            prefill_at={info.node_id: position for position, info in enumerate(prefill)},
            decode_at={info.node_id: position for position, info in enumerate(decode)},
            store_at={info.node_id: position for position, info in enumerate(stores)},
            links=np.zeros((1 + min(MAX_FITS, num_prefill * (num_stores + num_decode)), 2)),
            num_links=1,
            fetch_link=np.zeros((num_stores, num_prefill), dtype=np.int32),
            send_link=np.zeros((num_prefill, num_decode), dtype=np.int32),
            has_sent=np.zeros(num_prefill, dtype=bool),
            least_send=np.zeros((num_prefill, 2)),
        )

    def _slots(self, nodes: Nodes) -> Ints:
        return np.array([self._index.slot(info.node_id) for info in nodes], dtype=np.int64)

    def _set_cost(self, view: View, changed: Changed) -> None:
        """Write new coefficients into the view."""
        kind, node_id, peer = changed
        if kind == "prefill":
            self._set_prefill_cost(view, node_id)
        elif kind == "decode":
            self._set_decode_cost(view, node_id)
        elif node_id == ALL_NODES:
            self._set_default_link(view)
        else:
            self._set_link(view, node_id, peer)

    def _set_prefill_cost(self, view: View, node_id: str) -> None:
        """Update one node; with ALL_NODES, all nodes without samples of their own."""
        side, chunk = view.prefill, self._chunk_tokens
        at = _selected(node_id, view.prefill_at, side.measured)
        if at is None:
            return
        side.measured[at] = node_id != ALL_NODES and self._costs.has_measured("prefill", node_id)
        cost = self._costs.prefill(node_id)
        spread, step = (cost.step_ms / chunk, cost.step_ms / 2) if chunk else (0.0, cost.step_ms)
        for row, value in enumerate((step, cost.token_ms + spread, cost.pair_ms / 2)):
            side.costs[row, at] = value
        side.known[at] = cost.is_known
        for name in self._has_unbooked_tokens:  # unbooked tokens are priced by the cost per token
            self.update(name)

    def _set_decode_cost(self, view: View, node_id: str) -> None:
        """Like ``_set_prefill_cost``."""
        side = view.decode
        at = _selected(node_id, view.decode_at, side.measured)
        if at is None:
            return
        side.measured[at] = node_id != ALL_NODES and self._costs.has_measured("decode", node_id)
        cost = self._costs.decode(node_id)
        side.step_ms[at], side.sequence_ms[at], side.context_ms[at] = cost.step_ms, cost.sequence_ms, cost.context_ms
        of_sequences = cost.sequence_ms * (side.sequences[at] + 1)
        side.next_step_ms[at] = cost.step_ms + of_sequences + cost.context_ms * side.context_tokens[at]

    def _set_default_link(self, view: View) -> None:
        """Set the link of pairs without a transfer so far: the fit over all pairs."""
        default = self._costs.transfer_of_all()
        view.links[0] = default.latency_ms, default.byte_ms
        view.least_send[:] = view.links[0]
        if view.has_sent.any():
            shown = view.send_link[view.has_sent]
            view.least_send[view.has_sent] = view.links[shown].min(axis=1)

    def _set_link(self, view: View, node_id: str, peer: str) -> None:
        """Update the link of a prefill node to a decode node, or to a store."""
        p = view.prefill_at.get(node_id)
        if p is None:
            return
        cost = self._costs.transfer(node_id, peer)
        if (d := view.decode_at.get(peer)) is not None:
            _set_own_link(view, view.send_link, p, d, cost)
            view.has_sent[p] = True
            view.least_send[p] = view.links[view.send_link[p]].min(axis=0)
        elif (s := view.store_at.get(peer)) is not None:
            _set_own_link(view, view.fetch_link, s, p, cost)


def _set_own_link(view: View, links: Links, row: int, column: int, cost: TransferCost) -> None:
    """The link of a pair that has moved something; created if there is none."""
    link = links.item(row, column)
    if not link:
        link = links[row, column] = view.num_links
        view.num_links += 1
    view.links[link] = cost.latency_ms, cost.byte_ms


def _selected(node_id: str, known: dict[str, int], measured: Bools) -> int | Bools | None:
    """Index of the nodes whose costs change with those of ``node_id``; None: no node's."""
    if node_id != ALL_NODES:
        return known.get(node_id)
    return None if measured.all() else ~measured


_NO_LOAD = NodeLoad()
_PREFILL_FLOATS = (
    "queued_requests",
    "queued_tokens",
    "queued_ms",
    "waiting_ms",
    "ready_at_ms",
    "tie_ms",
)
_DECODE_FLOATS = (
    "step_ms",
    "sequence_ms",
    "context_ms",
    "sequences",
    "context_tokens",
    "next_step_ms",
    "free_blocks",
    "total_blocks",
    "tie_ms",
)
_STORE_FLOATS = ("ssd_ready_at_ms", "sending_flows", "idleness")
