"""What the scheduler sees of the cluster: arrays over the usable nodes, and what was placed and not yet reported.

Pure. A node's own report is always a little old, so every placement is booked here at once and taken back when its
work ends; what a node reports beyond that was given to it by somebody else and counts as foreign.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conductor.cost import CostModel
from conductor.prefix_index import PrefixIndex
from conductor.registry import NodeInfo, NodeLoad, Registry
from mooncake.types import Role

Floats = npt.NDArray[np.float64]
Slots = npt.NDArray[np.int64]

COSTS_REFRESH_S = 0.1  # new coefficients are looked at so often; placements and heartbeats count at once


@dataclass(slots=True)
class PrefillSide:
    """Arrays over ``P`` usable prefill nodes. ``queued_*`` is work placed or reported and not yet done; ``head_ms`` the
    part of it that is being computed since ``busy_since`` (0: nothing of ours is)."""

    nodes: tuple[NodeInfo, ...]
    step_ms: Floats
    token_ms: Floats
    pair_ms: Floats
    known: npt.NDArray[np.bool_]
    queued_tokens: Floats
    queued_ms: Floats
    queued_requests: Floats
    head_ms: Floats
    busy_since: Floats


@dataclass(slots=True)
class DecodeSide:
    """Arrays over ``D`` usable decode nodes. ``next_step_ms`` is a step with one sequence more, still without context;
    ``free_blocks`` is below 0 on a node that has all the sequences it may run."""

    nodes: tuple[NodeInfo, ...]
    step_ms: Floats
    sequence_ms: Floats
    context_ms: Floats
    next_step_ms: Floats
    sequences: Floats
    context_tokens: Floats
    free_blocks: Floats


@dataclass(slots=True)
class View:
    """The cluster at one moment; ``S`` store nodes. Matrices give latency (ms) and ms a byte between pairs."""

    prefill: PrefillSide
    decode: DecodeSide
    stores: tuple[NodeInfo, ...]
    prefill_at: dict[str, int]
    decode_at: dict[str, int]
    prefill_slots: Slots  # in the prefix index
    decode_slots: Slots
    store_slots: Slots
    fetch_latency: Floats  # [S, P]
    fetch_byte: Floats
    send_latency: Floats  # [P, D]
    send_byte: Floats


@dataclass(slots=True)
class Account:
    """What this conductor has placed on one node and not taken back, and what the node reports beyond it."""

    prefills: int = 0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    busy_since: float = 0.0  # when the oldest of them began, as far as we know
    decodes: int = 0
    decode_tokens: int = 0
    unseen_blocks: int = 0  # placed since the last heartbeat
    foreign_tokens: int = 0
    foreign_decodes: int = 0
    foreign_context: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.prefills or self.prefill_tokens or self.prefill_ms or self.decodes or self.decode_tokens)


@dataclass(slots=True)
class Ticket:
    """One placement as booked; its parts are taken back once each."""

    prefill_id: str
    decode_id: str  # "": none
    new_tokens: int
    prefill_ms: float
    context_tokens: int
    blocks: int = 0  # that the decode node needs
    open_prefill: bool = True
    open_decode: bool = True


class Fleet:
    """One owner: the dispatcher books, the cluster service reports. All times are given (seconds, monotonic)."""

    def __init__(self, registry: Registry, costs: CostModel, index: PrefixIndex) -> None:
        self.registry = registry
        self.costs = costs
        self.index = index
        self._accounts: dict[str, Account] = {}
        self._view: View | None = None
        self._built_at = 0.0
        self._built_from = (-1, -1)

    def account(self, node_id: str) -> Account:
        return self._accounts.setdefault(node_id, Account())

    @property
    def open_work(self) -> dict[str, Account]:
        """Nodes with something placed and not taken back. Empty when no request runs."""
        return {node_id: account for node_id, account in self._accounts.items() if not account.is_empty}

    def book(self, ticket: Ticket, now: float) -> None:
        prefill = self.account(ticket.prefill_id)
        if not prefill.prefills:
            prefill.busy_since = now
        prefill.prefills += 1
        prefill.prefill_tokens += ticket.new_tokens
        prefill.prefill_ms += ticket.prefill_ms
        self._sync(ticket.prefill_id)
        if ticket.decode_id:
            decode = self.account(ticket.decode_id)
            decode.decodes += 1
            decode.decode_tokens += ticket.context_tokens
            decode.unseen_blocks += ticket.blocks
            self._sync(ticket.decode_id)

    def prefill_done(self, ticket: Ticket, now: float) -> None:
        if not ticket.open_prefill:
            return
        ticket.open_prefill = False
        account = self.account(ticket.prefill_id)
        account.prefills -= 1
        account.prefill_tokens -= ticket.new_tokens
        account.prefill_ms = account.prefill_ms - ticket.prefill_ms if account.prefills else 0.0
        account.busy_since = now
        self._sync(ticket.prefill_id)

    def close(self, ticket: Ticket, now: float) -> None:
        """The placement's work has ended, however it did."""
        self.prefill_done(ticket, now)
        if ticket.decode_id and ticket.open_decode:
            account = self.account(ticket.decode_id)
            account.decodes -= 1
            account.decode_tokens -= ticket.context_tokens
            self._sync(ticket.decode_id)
        ticket.open_decode = False
        for node_id in (ticket.prefill_id, ticket.decode_id):
            if self.registry.get(node_id) is None:
                self.forget(node_id)

    def heard(self, node_id: str, load: NodeLoad) -> None:
        """A heartbeat: what the node reports beyond our own placements is foreign."""
        account = self.account(node_id)
        account.foreign_tokens = max(0, load.waiting_tokens - account.prefill_tokens)
        account.foreign_decodes = max(0, load.running + load.waiting - account.decodes)
        account.foreign_context = max(0, load.context_tokens - account.decode_tokens)
        account.unseen_blocks = 0
        self._sync(node_id)

    def forget(self, node_id: str) -> None:
        """The node is gone. What is still open on it is taken back by its tickets, which keep the account alive."""
        account = self._accounts.get(node_id)
        if account is None:
            return
        account.foreign_tokens = account.foreign_decodes = account.foreign_context = account.unseen_blocks = 0
        if account.is_empty:
            del self._accounts[node_id]

    def view(self, now: float) -> View:
        versions = (self.registry.version, self.costs.version)
        if self._view is None or versions[0] != self._built_from[0]:
            stale = True
        else:
            stale = versions[1] != self._built_from[1] and now - self._built_at >= COSTS_REFRESH_S
        if stale or self._view is None:
            self._view = self._build()
            self._built_at, self._built_from = now, versions
        return self._view

    def _build(self) -> View:
        prefill = tuple(node.info for node in self.registry.usable(Role.PREFILL))
        decode = tuple(node.info for node in self.registry.usable(Role.DECODE))
        stores = tuple(node.info for node in self.registry.usable(Role.STORE))
        fetch = [[self.costs.transfer(p.node_id, s.node_id) for p in prefill] for s in stores]
        send = [[self.costs.transfer(p.node_id, d.node_id) for d in decode] for p in prefill]
        prefill_costs = [self.costs.prefill(info.node_id) for info in prefill]
        decode_costs = [self.costs.decode(info.node_id) for info in decode]
        view = self._view = View(
            prefill=PrefillSide(
                nodes=prefill,
                step_ms=np.array([cost.step_ms for cost in prefill_costs]),
                token_ms=np.array([cost.token_ms for cost in prefill_costs]),
                pair_ms=np.array([cost.pair_ms for cost in prefill_costs]),
                known=np.array([cost.is_known for cost in prefill_costs], dtype=bool),
                queued_tokens=np.zeros(len(prefill)),
                queued_ms=np.zeros(len(prefill)),
                queued_requests=np.zeros(len(prefill)),
                head_ms=np.zeros(len(prefill)),
                busy_since=np.zeros(len(prefill)),
            ),
            decode=DecodeSide(
                nodes=decode,
                step_ms=np.array([cost.step_ms for cost in decode_costs]),
                sequence_ms=np.array([cost.sequence_ms for cost in decode_costs]),
                context_ms=np.array([cost.context_ms for cost in decode_costs]),
                next_step_ms=np.zeros(len(decode)),
                sequences=np.zeros(len(decode)),
                context_tokens=np.zeros(len(decode)),
                free_blocks=np.zeros(len(decode)),
            ),
            stores=stores,
            prefill_at={info.node_id: position for position, info in enumerate(prefill)},
            decode_at={info.node_id: position for position, info in enumerate(decode)},
            prefill_slots=self._slots(prefill),
            decode_slots=self._slots(decode),
            store_slots=self._slots(stores),
            fetch_latency=_matrix([[cost.latency_ms for cost in row] for row in fetch], len(prefill)),
            fetch_byte=_matrix([[cost.byte_ms for cost in row] for row in fetch], len(prefill)),
            send_latency=_matrix([[cost.latency_ms for cost in row] for row in send], len(decode)),
            send_byte=_matrix([[cost.byte_ms for cost in row] for row in send], len(decode)),
        )
        for info in (*prefill, *decode):
            self._sync(info.node_id)
        return view

    def _slots(self, nodes: tuple[NodeInfo, ...]) -> Slots:
        return np.array([self.index.slot(info.node_id) for info in nodes], dtype=np.int64)

    def _sync(self, node_id: str) -> None:
        """Carry one node's account into the view."""
        view = self._view
        if view is None:
            return
        account = self.account(node_id)
        if (at := view.prefill_at.get(node_id)) is not None:
            side = view.prefill
            side.queued_requests[at] = account.prefills
            side.queued_tokens[at] = account.prefill_tokens + account.foreign_tokens
            side.queued_ms[at] = account.prefill_ms + side.token_ms[at] * account.foreign_tokens
            side.head_ms[at] = account.prefill_ms / account.prefills if account.prefills else 0.0
            side.busy_since[at] = account.busy_since
        elif (at := view.decode_at.get(node_id)) is not None:
            self._sync_decode(view.decode, at, account)

    def _sync_decode(self, side: DecodeSide, at: int, account: Account) -> None:
        info = side.nodes[at]
        node = self.registry.get(info.node_id)
        load = node.load if node is not None else NodeLoad()
        sequences = account.decodes + account.foreign_decodes
        side.sequences[at] = sequences
        side.context_tokens[at] = account.decode_tokens + account.foreign_context
        side.next_step_ms[at] = side.step_ms[at] + side.sequence_ms[at] * (sequences + 1)
        free = load.blocks_free + load.blocks_cached - account.unseen_blocks if load.blocks_total else np.inf
        side.free_blocks[at] = -1 if info.max_sequences and sequences >= info.max_sequences else free


def _matrix(rows: list[list[float]], columns: int) -> Floats:
    return np.array(rows, dtype=np.float64).reshape(len(rows), columns)
