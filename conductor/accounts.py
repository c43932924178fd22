"""What is booked on each node, and what the node reports beyond that.

Pure. A node's own report is always slightly out of date, so a placement counts from the moment it is booked until its
work ends. Load that a node reports beyond what is booked comes from someone else and counts as foreign.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from conductor.registry import NodeLoad


@dataclass(eq=False, slots=True)
class Ticket:
    """One placement as it was booked. Each part is released exactly once."""

    prefill_id: str
    decode_id: str  # "": no decode node
    new_tokens: int
    prefill_ms: float  # fetching the prefix and computing the rest
    context_tokens: int
    blocks: int = 0  # to be sent to the decode node
    source_id: str = ""  # the store the prefix is read from; "": none
    source_bytes: float = 0.0
    ssd_bytes: float = 0.0  # bytes of the read that come from its SSD
    open_prefill: bool = True
    open_decode: bool = True


@dataclass(slots=True)
class Account:
    """The bookings of one node, whatever its role. Times are in seconds unless the name says otherwise."""

    prefills: dict[Ticket, None] = field(default_factory=dict)  # in placement order: the first is being computed
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    busy_since: float = 0.0  # estimated time at which the first of them started
    decodes: int = 0
    decode_tokens: int = 0
    unseen_blocks: int = 0  # placed since the last heartbeat
    foreign_tokens: int = 0
    foreign_decodes: int = 0
    foreign_context: int = 0
    sending_flows: int = 0
    sending_bytes: float = 0.0
    ssd_ready_at_ms: float = 0.0
    blocks: tuple[int, int] | None = None  # of a decode node, as the view shows them: total, and free or cached

    @property
    def is_empty(self) -> bool:
        """Whether everything has been released."""
        return not (self.prefills or self.prefill_tokens or self.decodes or self.decode_tokens or self.sending_flows)

    def add_prefill(self, ticket: Ticket, now: float) -> None:
        if not self.prefills:
            self.busy_since = now
        self.prefills[ticket] = None
        self.prefill_tokens += ticket.new_tokens
        self.prefill_ms += ticket.prefill_ms

    def remove_prefill(self, ticket: Ticket, now: float) -> None:
        """Release a prompt; the next one starts when the first one ends."""
        if next(iter(self.prefills)) is ticket:
            self.busy_since = now
        del self.prefills[ticket]
        self.prefill_tokens -= ticket.new_tokens
        self.prefill_ms = self.prefill_ms - ticket.prefill_ms if self.prefills else 0.0

    def add_decode(self, ticket: Ticket) -> None:
        self.decodes += 1
        self.decode_tokens += ticket.context_tokens
        self.unseen_blocks += ticket.blocks

    def remove_decode(self, ticket: Ticket) -> None:
        """Release a sequence, but not its blocks: the node itself reports what is free."""
        self.decodes -= 1
        self.decode_tokens -= ticket.context_tokens

    def add_read(self, ticket: Ticket, now: float, ssd_byte_ms: float) -> None:
        """Book a read from a store. Reads of its SSD run one after another. They are never released: their time
        passes by itself."""
        if ticket.ssd_bytes:
            begins_ms = max(self.ssd_ready_at_ms, now * 1e3)
            self.ssd_ready_at_ms = begins_ms + ticket.ssd_bytes * ssd_byte_ms
        self.sending_flows += 1
        self.sending_bytes += ticket.source_bytes

    def remove_read(self, ticket: Ticket) -> None:
        self.sending_flows -= 1
        self.sending_bytes = self.sending_bytes - ticket.source_bytes if self.sending_flows else 0.0

    def hear(self, load: NodeLoad) -> bool:
        """Take in a heartbeat. Returns whether it says anything new, which it usually does not."""
        tokens = max(0, load.waiting_tokens - self.prefill_tokens)
        decodes = max(0, load.running + load.waiting - self.decodes)
        context = max(0, load.context_tokens - self.decode_tokens)
        blocks = None if self.blocks is None else (load.blocks_total, load.blocks_free + load.blocks_cached)
        foreign = self.foreign_tokens, self.foreign_decodes, self.foreign_context
        if (tokens, decodes, context, 0, blocks) == (*foreign, self.unseen_blocks, self.blocks):
            return False
        self.foreign_tokens, self.foreign_decodes, self.foreign_context = tokens, decodes, context
        self.unseen_blocks = 0
        return True

    def forget_reports(self) -> None:
        """The node is gone; tickets still open release their own parts later."""
        self.foreign_tokens = self.foreign_decodes = self.foreign_context = self.unseen_blocks = 0
        self.ssd_ready_at_ms = 0.0
