"""What the scheduler sees of the cluster: the view, plus placements the nodes have not reported yet.

Pure. Every placement is booked here at once, in the ``accounts`` of its nodes, and released when its work ends; the
``view_keeper`` carries each change into the arrays that decisions read.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from conductor.accounts import Account, Ticket
from conductor.cost import CostModel
from conductor.prefix_index import PrefixIndex
from conductor.registry import NodeLoad, Registry
from conductor.view import NONE, View
from conductor.view_keeper import ViewKeeper

MAX_SESSIONS = 100_000


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
        """``chunk_tokens`` is the size of a prefill step; 0: whole prompts."""
        self.registry = registry
        self.costs = costs
        self.index = index
        self._ssd_byte_ms = 1e-3 / ssd_mb_per_s
        self._accounts: defaultdict[str, Account] = defaultdict(Account)
        self._keeper = ViewKeeper(registry, costs, index, self._accounts, chunk_tokens, self._ssd_byte_ms)
        self._sessions: OrderedDict[str, tuple[str, str]] = OrderedDict()  # where each one's last request went

    def view(self, now: float) -> View:
        """The cluster as it is. The same object, updated in place, until a node comes or goes."""
        return self._keeper.look(now)

    def account(self, node_id: str) -> Account:
        return self._accounts[node_id]

    @property
    def open_work(self) -> dict[str, Account]:
        """Nodes with bookings that were not released. Empty when no request runs."""
        return {node_id: account for node_id, account in self._accounts.items() if not account.is_empty}

    def session(self, session: str) -> tuple[int, int]:
        """Where the session's last request was placed, in the current view: (prefill, decode); NONE if that node is
        gone."""
        prefill_id, decode_id = self._sessions.get(session, ("", ""))
        view = self._keeper.view
        if view is None:
            return NONE, NONE
        return view.prefill_at.get(prefill_id, NONE), view.decode_at.get(decode_id, NONE)

    def book(self, ticket: Ticket, now: float, session: str = "") -> None:
        account = self._accounts[ticket.prefill_id]
        account.add_prefill(ticket, now)
        self._keeper.show_prefill(ticket.prefill_id, account)
        if ticket.source_id:
            account = self._accounts[ticket.source_id]
            account.add_read(ticket, now, self._ssd_byte_ms)
            self._keeper.show_store(ticket.source_id, account)
        if ticket.decode_id:
            account = self._accounts[ticket.decode_id]
            account.add_decode(ticket)
            self._keeper.show_decode(ticket.decode_id, account)
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
        account.remove_prefill(ticket, now)
        self._keeper.show_prefill(ticket.prefill_id, account)
        if ticket.source_id:
            account = self._accounts[ticket.source_id]
            account.remove_read(ticket)
            self._keeper.show_store(ticket.source_id, account)

    def close(self, ticket: Ticket, now: float) -> None:
        """The placement's work has ended, for whatever reason."""
        self.prefill_done(ticket, now)
        if ticket.decode_id and ticket.open_decode:
            account = self._accounts[ticket.decode_id]
            account.remove_decode(ticket)
            self._keeper.show_decode(ticket.decode_id, account)
        ticket.open_decode = False
        for node_id in (ticket.prefill_id, ticket.decode_id, ticket.source_id):
            if node_id and self.registry.get(node_id) is None:
                self.forget(node_id)

    def heard(self, node_id: str, load: NodeLoad) -> None:
        """A heartbeat: load the node reports beyond our own placements is foreign."""
        if self._accounts[node_id].hear(load):
            self._keeper.show(node_id)

    def forget(self, node_id: str) -> None:
        """The node is gone. Bookings still open there are released by their tickets, which keep the account alive."""
        account = self._accounts.get(node_id)
        if account is None:
            return
        account.forget_reports()
        self._keeper.forget(node_id)
        if account.is_empty:
            del self._accounts[node_id]
