"""What the scheduler sees of the cluster: the view, and what was placed and not yet reported.

Pure. A node's own report is always a little old, so every placement is booked here at once and taken back when its
work ends; what a node reports beyond that was given to it by somebody else and counts as foreign. The view is built
when a node comes or goes; everything else changes single numbers of it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

import numpy as np

from conductor.cost import ALL_NODES, MAX_FITS, Changed, CostModel, TransferCost
from conductor.prefix_index import PrefixIndex
from conductor.registry import NodeInfo, NodeLoad, Registry
from conductor.view import NONE, Bools, DecodeSide, Ints, Links, PrefillSide, StoreSide, View
from mooncake.types import Role

COSTS_REFRESH_S = (
    0.01  # new coefficients are looked at so often, a few nodes each time, so that no decision waits for all
)
CHANGES_A_REFRESH = 4
MAX_SESSIONS = 100_000
TIE_REQUEST_MS, TIE_TOKEN_MS = 1e-9, 1e-10  # equal nodes are told apart by what they have


@dataclass(eq=False, slots=True)
class Ticket:
    """One placement as booked; its parts are taken back once each."""

    prefill_id: str
    decode_id: str  # "": none
    new_tokens: int
    prefill_ms: float  # fetching and computing
    context_tokens: int
    blocks: int = 0  # that the decode node needs
    source_id: str = ""  # the store that is read from; "": none
    source_bytes: float = 0.0
    ssd_bytes: float = 0.0  # of those, from its SSD
    open_prefill: bool = True
    open_decode: bool = True


@dataclass(slots=True)
class Account:
    """What this conductor has placed on one node and not taken back, and what the node reports beyond it."""

    prefills: dict[Ticket, None] = field(default_factory=dict)  # in order of placement: the first one is being computed
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    busy_since: float = 0.0  # when the first of them began, as far as we know
    decodes: int = 0
    decode_tokens: int = 0
    unseen_blocks: int = 0  # placed since the last heartbeat
    foreign_tokens: int = 0
    foreign_decodes: int = 0
    foreign_context: int = 0
    sending_flows: int = 0
    sending_bytes: float = 0.0
    ssd_ready_at_ms: float = 0.0
    blocks: tuple[int, int] | None = None  # of a decode node, as the view has them: all, and free or cached

    @property
    def known(self) -> tuple[int, int, int, int, tuple[int, int] | None]:
        """What a heartbeat would say when nothing has changed."""
        foreign = self.foreign_tokens, self.foreign_decodes, self.foreign_context
        return *foreign, self.unseen_blocks, self.blocks

    @property
    def is_empty(self) -> bool:
        return not (self.prefills or self.prefill_tokens or self.decodes or self.decode_tokens or self.sending_flows)


class Fleet:
    """One owner: the dispatcher books, the cluster service reports. All times are given (seconds, monotonic)."""

    def __init__(
        self,
        registry: Registry,
        costs: CostModel,
        index: PrefixIndex,
        chunk_tokens: int = 0,
        ssd_mb_per_s: float = 1000.0,
    ) -> None:
        self.registry = registry
        self.costs = costs
        self.index = index
        self._chunk_tokens = chunk_tokens  # of a prefill step; 0: whole prompts
        self._ssd_byte_ms = 1e-3 / ssd_mb_per_s
        self._accounts: defaultdict[str, Account] = defaultdict(Account)
        self._sessions: OrderedDict[str, tuple[str, str]] = OrderedDict()  # where the last request of each was placed
        self._has_foreign_tokens: dict[str, None] = {}
        self._view: View | None = None
        self._built_from = (-1, -1)
        self._refreshed_at = 0.0

    def account(self, node_id: str) -> Account:
        return self._accounts[node_id]

    @property
    def open_work(self) -> dict[str, Account]:
        """Nodes with something placed and not taken back. Empty when no request runs."""
        return {node_id: account for node_id, account in self._accounts.items() if not account.is_empty}

    def session(self, session: str) -> tuple[int, int]:
        """Where in the current view the session's last request was placed: (prefill, decode), NONE where it is gone."""
        prefill_id, decode_id = self._sessions.get(session, ("", ""))
        view = self._view
        if view is None:
            return NONE, NONE
        return view.prefill_at.get(prefill_id, NONE), view.decode_at.get(decode_id, NONE)

    def book(self, ticket: Ticket, now: float, session: str = "") -> None:
        account = self._accounts[ticket.prefill_id]
        if not account.prefills:
            account.busy_since = now
        account.prefills[ticket] = None
        account.prefill_tokens += ticket.new_tokens
        account.prefill_ms += ticket.prefill_ms
        self._sync_prefill(ticket.prefill_id, account)
        if ticket.source_id:
            self._promise_ssd(ticket, now)
            self._count_flow(ticket, 1)
        if ticket.decode_id:
            account = self._accounts[ticket.decode_id]
            account.decodes += 1
            account.decode_tokens += ticket.context_tokens
            account.unseen_blocks += ticket.blocks
            self._sync_decode(ticket.decode_id, account)
        if session:
            self._sessions[session] = (ticket.prefill_id, ticket.decode_id)
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def prefill_done(self, ticket: Ticket, now: float) -> None:
        if not ticket.open_prefill:
            return
        ticket.open_prefill = False
        account = self._accounts[ticket.prefill_id]
        was_first = next(iter(account.prefills)) is ticket
        del account.prefills[ticket]
        account.prefill_tokens -= ticket.new_tokens
        account.prefill_ms = account.prefill_ms - ticket.prefill_ms if account.prefills else 0.0
        if was_first:
            account.busy_since = now
        self._sync_prefill(ticket.prefill_id, account)
        if ticket.source_id:
            self._count_flow(ticket, -1)

    def close(self, ticket: Ticket, now: float) -> None:
        """The placement's work has ended, however it did."""
        self.prefill_done(ticket, now)
        if ticket.decode_id and ticket.open_decode:
            account = self._accounts[ticket.decode_id]
            account.decodes -= 1
            account.decode_tokens -= ticket.context_tokens
            self._sync_decode(ticket.decode_id, account)
        ticket.open_decode = False
        for node_id in (ticket.prefill_id, ticket.decode_id, ticket.source_id):
            if node_id and self.registry.get(node_id) is None:
                self.forget(node_id)

    def heard(self, node_id: str, load: NodeLoad) -> None:
        """A heartbeat: what the node reports beyond our own placements is foreign."""
        account = self._accounts[node_id]
        tokens = max(0, load.waiting_tokens - account.prefill_tokens)
        decodes = max(0, load.running + load.waiting - account.decodes)
        context = max(0, load.context_tokens - account.decode_tokens)
        said = (tokens, decodes, context, 0, (load.blocks_total, load.blocks_free + load.blocks_cached))
        if said == account.known:  # as mostly
            return
        account.foreign_tokens, account.foreign_decodes, account.foreign_context = tokens, decodes, context
        account.unseen_blocks = 0
        if account.foreign_tokens:
            self._has_foreign_tokens[node_id] = None
        else:
            self._has_foreign_tokens.pop(node_id, None)
        self._sync(node_id)

    def forget(self, node_id: str) -> None:
        """The node is gone. What is still open on it is taken back by its tickets, which keep the account alive."""
        account = self._accounts.get(node_id)
        if account is None:
            return
        account.foreign_tokens = account.foreign_decodes = account.foreign_context = account.unseen_blocks = 0
        account.ssd_ready_at_ms = 0.0
        self._has_foreign_tokens.pop(node_id, None)
        if account.is_empty:
            del self._accounts[node_id]

    def view(self, now: float) -> View:
        """The cluster as it is. The object stays the same, and changes, until a node comes or goes."""
        versions = (self.registry.version, self.index.version)
        if self._view is None or versions != self._built_from:
            self._view = self._build()
            # slots that were given out while building are in it already
            self._built_from = (self.registry.version, self.index.version)
            self._refreshed_at = now
        elif now - self._refreshed_at >= COSTS_REFRESH_S:
            self._refreshed_at = now
            changed = self.costs.take_changed(CHANGES_A_REFRESH)
            if changed:
                self._refresh(self._view, changed)
        return self._view

    def _build(self) -> View:
        prefill = tuple(node.info for node in self.registry.usable(Role.PREFILL))
        decode = tuple(node.info for node in self.registry.usable(Role.DECODE))
        stores = tuple(node.info for node in self.registry.usable(Role.STORE))
        for info in stores:
            self.index.join(info.node_id, is_tiered=True)
        num_prefill, num_decode, num_stores = len(prefill), len(decode), len(stores)
        by_host = {info.host_id: at for at, info in enumerate(stores) if info.host_id}
        home = np.array([by_host.get(info.host_id, NONE) for info in prefill], dtype=np.int64)
        view = self._view = View(
            prefill=PrefillSide(
                nodes=prefill,
                slots=self._slots(prefill),
                home=home,
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
                dram_slots=np.array([self.index.dram_slot(info.node_id) for info in stores], dtype=np.int64),
                ssd_byte_ms=self._ssd_byte_ms,
                ssd_ready_at_ms=np.zeros(num_stores),
                sending_flows=np.zeros(num_stores),
                sending_bytes=np.zeros(num_stores),
                idleness=np.zeros(num_stores),
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
        for info in (*prefill, *decode, *stores):
            self._sync(info.node_id)
        self._set_prefill_cost(view, ALL_NODES)
        self._set_decode_cost(view, ALL_NODES)
        for info in prefill:
            if self.costs.has_measured("prefill", info.node_id):
                self._set_prefill_cost(view, info.node_id)
        for info in decode:
            if self.costs.has_measured("decode", info.node_id):
                self._set_decode_cost(view, info.node_id)
        self._set_all_transfers(view)
        for node_id, peer in self.costs.measured_pairs():
            self._set_transfer(view, node_id, peer)
        return view

    def _refresh(self, view: View, changed: list[Changed]) -> None:
        """Carry new coefficients into the view."""
        for kind, node_id, peer in changed:
            if kind == "prefill":
                self._set_prefill_cost(view, node_id)
            elif kind == "decode":
                self._set_decode_cost(view, node_id)
            elif node_id == ALL_NODES:
                self._set_all_transfers(view)
            else:
                self._set_transfer(view, node_id, peer)

    def _set_prefill_cost(self, view: View, node_id: str) -> None:
        """Of one node, or with ALL_NODES of those that have shown nothing themselves."""
        side, chunk = view.prefill, self._chunk_tokens
        at = _meant(node_id, view.prefill_at, side.measured)
        if at is None:
            return
        side.measured[at] = node_id != ALL_NODES and self.costs.has_measured("prefill", node_id)
        cost = self.costs.prefill(node_id)
        spread, step = (cost.step_ms / chunk, cost.step_ms / 2) if chunk else (0.0, cost.step_ms)
        for row, value in enumerate((step, cost.token_ms + spread, cost.pair_ms / 2)):
            side.costs[row, at] = value
        side.known[at] = cost.is_known
        for name in self._has_foreign_tokens:  # they are counted by the cost of a token
            self._sync(name)

    def _set_decode_cost(self, view: View, node_id: str) -> None:
        """As ``_set_prefill_cost``."""
        side = view.decode
        at = _meant(node_id, view.decode_at, side.measured)
        if at is None:
            return
        side.measured[at] = node_id != ALL_NODES and self.costs.has_measured("decode", node_id)
        cost = self.costs.decode(node_id)
        side.step_ms[at], side.sequence_ms[at], side.context_ms[at] = cost.step_ms, cost.sequence_ms, cost.context_ms
        of_sequences = cost.sequence_ms * (side.sequences[at] + 1)
        side.next_step_ms[at] = cost.step_ms + of_sequences + cost.context_ms * side.context_tokens[at]

    def _set_all_transfers(self, view: View) -> None:
        """Pairs that have moved nothing yet are taken to be as all pairs are."""
        usual = self.costs.transfer_of_all()
        view.links[0] = usual.latency_ms, usual.byte_ms
        view.least_send[:] = view.links[0]
        if view.has_sent.any():
            shown = view.send_link[view.has_sent]
            view.least_send[view.has_sent] = view.links[shown].min(axis=1)

    def _set_transfer(self, view: View, node_id: str, peer: str) -> None:
        p = view.prefill_at.get(node_id)
        if p is None:
            return
        cost = self.costs.transfer(node_id, peer)
        if (d := view.decode_at.get(peer)) is not None:
            _set_link(view, view.send_link, p, d, cost)
            view.has_sent[p] = True
            view.least_send[p] = view.links[view.send_link[p]].min(axis=0)
        elif (s := view.store_at.get(peer)) is not None:
            _set_link(view, view.fetch_link, s, p, cost)

    def _slots(self, nodes: tuple[NodeInfo, ...]) -> Ints:
        return np.array([self.index.slot(info.node_id) for info in nodes], dtype=np.int64)

    def _sync(self, node_id: str) -> None:
        """Carry one node's account into the view."""
        view = self._view
        if view is None:
            return
        if node_id in view.prefill_at:
            self._sync_prefill(node_id, self._accounts[node_id])
        elif node_id in view.decode_at:
            self._sync_decode(node_id, self._accounts[node_id])
        elif node_id in view.store_at:
            self._sync_store(node_id, self._accounts[node_id])

    def _sync_prefill(self, node_id: str, account: Account) -> None:
        view = self._view
        if view is None or (at := view.prefill_at.get(node_id)) is None:
            return
        side = view.prefill
        queued_ms = account.prefill_ms
        if account.foreign_tokens:
            queued_ms += float(side.costs[1, at]) * account.foreign_tokens
        requests, head_ms = len(account.prefills), 0.0
        if requests:
            head_ms = next(iter(account.prefills)).prefill_ms
        tokens = account.prefill_tokens + account.foreign_tokens
        side.queued_requests[at] = requests
        side.queued_tokens[at] = tokens
        side.queued_ms[at] = queued_ms
        side.tail_ms[at] = queued_ms - head_ms if queued_ms > head_ms else 0.0
        side.ready_at_ms[at] = account.busy_since * 1e3 + queued_ms
        side.tie_ms[at] = TIE_TOKEN_MS * tokens + TIE_REQUEST_MS * requests

    def _sync_decode(self, node_id: str, account: Account) -> None:
        view = self._view
        if view is None or (at := view.decode_at.get(node_id)) is None:
            return
        side = view.decode
        node = self.registry.get(node_id)
        load = node.load if node is not None else _NO_LOAD
        sequences = account.decodes + account.foreign_decodes
        context_tokens = account.decode_tokens + account.foreign_context
        side.sequences[at] = sequences
        side.context_tokens[at] = context_tokens
        fixed, of_sequences = side.step_ms.item(at), side.sequence_ms.item(at) * (sequences + 1)
        side.next_step_ms[at] = fixed + of_sequences + side.context_ms.item(at) * context_tokens
        total, available = account.blocks = load.blocks_total, load.blocks_free + load.blocks_cached
        free = available - account.unseen_blocks if total else np.inf
        side.free_blocks[at] = -1.0 if 0 < side.nodes[at].max_sequences <= sequences else free
        side.total_blocks[at] = total
        side.tie_ms[at] = TIE_REQUEST_MS * sequences + TIE_TOKEN_MS * context_tokens

    def _sync_store(self, node_id: str, account: Account) -> None:
        view = self._view
        if view is None or (at := view.store_at.get(node_id)) is None:
            return
        view.stores.sending_flows[at] = account.sending_flows
        view.stores.sending_bytes[at] = account.sending_bytes
        view.stores.idleness[at] = -min(account.sending_flows, 1000) / 1024
        view.stores.ssd_ready_at_ms[at] = account.ssd_ready_at_ms

    def _promise_ssd(self, ticket: Ticket, now: float) -> None:
        """One read after the other. Nothing is taken back: what has been read by then is past by itself."""
        if ticket.ssd_bytes:
            account = self._accounts[ticket.source_id]
            begins_ms = max(account.ssd_ready_at_ms, now * 1e3)
            account.ssd_ready_at_ms = begins_ms + ticket.ssd_bytes * self._ssd_byte_ms

    def _count_flow(self, ticket: Ticket, sign: int) -> None:
        """A read from a store begins, or is over: it shares the store's way out with the others."""
        account = self._accounts[ticket.source_id]
        account.sending_flows += sign
        account.sending_bytes = account.sending_bytes + sign * ticket.source_bytes if account.sending_flows else 0.0
        self._sync_store(ticket.source_id, account)


def _set_link(view: View, links: Links, row: int, column: int, cost: TransferCost) -> None:
    """Of a pair that has moved something; it gets a link of its own when it has none."""
    link = links.item(row, column)
    if not link:
        link = links[row, column] = view.num_links
        view.num_links += 1
    view.links[link] = cost.latency_ms, cost.byte_ms


def _meant(node_id: str, known: dict[str, int], measured: Bools) -> int | Bools | None:
    """Whose cost changes with that of ``node_id``, as an index; None: nobody's."""
    if node_id != ALL_NODES:
        return known.get(node_id)
    return None if measured.all() else ~measured


_NO_LOAD = NodeLoad()
_PREFILL_FLOATS = (
    "queued_requests",
    "queued_tokens",
    "queued_ms",
    "tail_ms",
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
