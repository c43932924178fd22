"""The cluster as the scheduler sees it: nodes, their costs and caches, and the work booked on them.

Pure. Every placement is booked here at once and released when its work ends (``bookings``); ``view_keeper`` writes each
change into the arrays that policies read.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from conductor.placement.bookings import Booking, NodeBookings
from conductor.placement.cost import CostModel
from conductor.placement.view import NONE, View
from conductor.placement.view_keeper import ViewKeeper
from conductor.prefixes.index import PrefixIndex
from conductor.registry import NodeLoad, Registry

MAX_SESSIONS = 100_000  # remembered; beyond that those unused for longest are forgotten


class Fleet:
    """One owner: the core. The scheduler books, heartbeats report. All times are given (seconds, monotonic)."""

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
        self._bookings: defaultdict[str, NodeBookings] = defaultdict(NodeBookings)
        self._keeper = ViewKeeper(registry, costs, index, self._bookings, chunk_tokens, self._ssd_byte_ms)
        self._sessions: OrderedDict[str, tuple[str, str]] = OrderedDict()  # where each one's last request went

    def view(self, now: float) -> View:
        """The cluster as it is. The same object, updated in place, until a node comes or goes."""
        return self._keeper.current(now)

    def view_apart_from(self, barred: frozenset[int]) -> View:
        """A view of its own, of the nodes that may get work where these (incarnations) may not."""
        return self._keeper.apart_from(barred)

    def booked(self, node_id: str) -> NodeBookings:
        return self._bookings[node_id]

    @property
    def open_work(self) -> dict[str, NodeBookings]:
        """Nodes with bookings that were not released. Empty when no request runs."""
        return {node_id: booked for node_id, booked in self._bookings.items() if not booked.is_empty}

    def session(self, session: str, view: View) -> tuple[int, int]:
        """Where the session's last request was placed, in this view: (prefill, decode); NONE if that node is gone."""
        prefill_id, decode_id = self._sessions.get(session, ("", ""))
        return view.prefill_at.get(prefill_id, NONE), view.decode_at.get(decode_id, NONE)

    def book(self, booking: Booking, now: float, session: str = "") -> None:
        booked = self._bookings[booking.prefill_id]
        booked.add_prefill(booking, now)
        self._keeper.update_prefill(booking.prefill_id, booked)
        if booking.source_id:
            booked = self._bookings[booking.source_id]
            booked.add_read(booking, now, self._ssd_byte_ms)
            self._keeper.update_store(booking.source_id, booked)
        if booking.decode_id:
            booked = self._bookings[booking.decode_id]
            booked.add_decode(booking)
            self._keeper.update_decode(booking.decode_id, booked)
        if session:
            self._sessions[session] = (booking.prefill_id, booking.decode_id)
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def prefill_done(self, booking: Booking, now: float) -> None:
        if not booking.open_prefill:
            return
        booking.open_prefill = False
        booked = self._bookings[booking.prefill_id]
        booked.remove_prefill(booking, now)
        self._keeper.update_prefill(booking.prefill_id, booked)
        if booking.source_id:
            booked = self._bookings[booking.source_id]
            booked.remove_read()
            self._keeper.update_store(booking.source_id, booked)

    def close(self, booking: Booking, now: float) -> None:
        """The placement's work has ended, for whatever reason."""
        self.prefill_done(booking, now)
        if booking.decode_id and booking.open_decode:
            booked = self._bookings[booking.decode_id]
            booked.remove_decode(booking)
            self._keeper.update_decode(booking.decode_id, booked)
        booking.open_decode = False
        for node_id in (booking.prefill_id, booking.decode_id, booking.source_id):
            if node_id and self.registry.get(node_id) is None:
                self.forget(node_id)

    def heartbeat(self, node_id: str, load: NodeLoad) -> None:
        """Load the node reports beyond its bookings counts as unbooked."""
        if self._bookings[node_id].reported(load):
            self._keeper.update(node_id)

    def forget(self, node_id: str) -> None:
        """The node is gone. Its entry stays until the bookings still open on it are closed."""
        booked = self._bookings.get(node_id)
        if booked is None:
            return
        booked.forget_reported()
        self._keeper.forget(node_id)
        if booked.is_empty:
            del self._bookings[node_id]
