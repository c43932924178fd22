"""Outstanding work of each node: the placements booked on it, and the load it reports beyond them.

Pure. A heartbeat is always slightly out of date, so a placement counts from the moment it is booked until its work
ends. Load that a node reports beyond its bookings comes from elsewhere (another conductor) and is kept as ``unbooked``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conductor.registry import NodeLoad


@dataclass(eq=False, slots=True)
class Booking:
    """The work one placement puts on its nodes. The prefill and decode parts are each released exactly once."""

    prefill_id: str
    decode_id: str  # "": no decode node
    new_tokens: int
    prefill_ms: float  # fetching the prefix and computing the rest
    context_tokens: int
    blocks: int = 0  # to be sent to the decode node
    source_id: str = ""  # the store the prefix is read from; "": none
    ssd_bytes: float = 0.0  # bytes of the read that come from its SSD
    open_prefill: bool = True
    open_decode: bool = True


@dataclass(slots=True)
class NodeBookings:
    """Outstanding work of one node, whatever its role. Times are in seconds unless the name says otherwise."""

    prefills: dict[Booking, None] = field(default_factory=dict)  # first come, first served: the first is running
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    busy_since: float = 0.0  # estimated time at which the first of them started
    decodes: int = 0
    decode_tokens: int = 0
    unreported_blocks: int = 0  # booked since the last heartbeat, so missing from its free blocks
    unbooked_tokens: int = 0
    unbooked_decodes: int = 0
    unbooked_context: int = 0
    sending_flows: int = 0
    ssd_ready_at_ms: float = 0.0
    viewed_blocks: tuple[int, int] | None = None  # of a decode node, as in the view: total, and free or cached

    @property
    def is_empty(self) -> bool:
        """Whether everything has been released."""
        return not (self.prefills or self.prefill_tokens or self.decodes or self.decode_tokens or self.sending_flows)

    def add_prefill(self, booking: Booking, now: float) -> None:
        if not self.prefills:
            self.busy_since = now
        self.prefills[booking] = None
        self.prefill_tokens += booking.new_tokens
        self.prefill_ms += booking.prefill_ms

    def remove_prefill(self, booking: Booking, now: float) -> None:
        """Release a prompt; the next one starts when the first one ends."""
        if next(iter(self.prefills)) is booking:
            self.busy_since = now
        del self.prefills[booking]
        self.prefill_tokens -= booking.new_tokens
        self.prefill_ms = self.prefill_ms - booking.prefill_ms if self.prefills else 0.0

    def add_decode(self, booking: Booking) -> None:
        self.decodes += 1
        self.decode_tokens += booking.context_tokens
        self.unreported_blocks += booking.blocks

    def remove_decode(self, booking: Booking) -> None:
        """Release a sequence, but not its blocks: the node itself reports what is free."""
        self.decodes -= 1
        self.decode_tokens -= booking.context_tokens

    def add_read(self, booking: Booking, now: float, ssd_byte_ms: float) -> None:
        """Book a read from a store. Reads of its SSD run one after another; their time passes by itself, so it is not
        released."""
        if booking.ssd_bytes:
            begins_ms = max(self.ssd_ready_at_ms, now * 1e3)
            self.ssd_ready_at_ms = begins_ms + booking.ssd_bytes * ssd_byte_ms
        self.sending_flows += 1

    def remove_read(self) -> None:
        self.sending_flows -= 1

    def reported(self, load: NodeLoad) -> bool:
        """Update the unbooked load from a heartbeat. Returns whether anything changed; usually nothing does."""
        tokens = max(0, load.waiting_tokens - self.prefill_tokens)
        decodes = max(0, load.running + load.waiting - self.decodes)
        context = max(0, load.context_tokens - self.decode_tokens)
        blocks = None if self.viewed_blocks is None else (load.blocks_total, load.blocks_free + load.blocks_cached)
        unbooked = self.unbooked_tokens, self.unbooked_decodes, self.unbooked_context
        if (tokens, decodes, context, 0, blocks) == (*unbooked, self.unreported_blocks, self.viewed_blocks):
            return False
        self.unbooked_tokens, self.unbooked_decodes, self.unbooked_context = tokens, decodes, context
        self.unreported_blocks = 0
        return True

    def forget_reported(self) -> None:
        """The node is gone. Bookings still open are released later."""
        self.unbooked_tokens = self.unbooked_decodes = self.unbooked_context = self.unreported_blocks = 0
        self.ssd_ready_at_ms = 0.0
