"""The input of a decision: flat arrays over the usable nodes, and the request. No rule is here.

Arrays are over ``P`` prefill nodes, ``D`` decode nodes and ``S`` stores, in the order of the tuples of nodes.
``view_keeper`` keeps them up to date; policies only read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from conductor.arrays import Bools, Floats, Ints, Links
from conductor.registry import NodeInfo

NONE = -1  # no node, where an index is expected
MAX_SOURCES = 3  # stores considered as sources of a prefix
SESSION_MS = 1e-6  # bonus for the session's previous nodes: it only breaks ties
FASTEST = -2  # as a source: whichever store is predicted to be fastest, or none


@dataclass(frozen=True, slots=True)
class Shape:
    """Block size, number of layers and chunk size: what turns tokens into bytes and steps."""

    block_tokens: int
    block_bytes: int
    num_layers: int
    chunk_tokens: int = 0  # size of a prefill step; 0: whole prompts


class RequestFacts(NamedTuple):
    """What placement depends on of a request. ``keys`` name the prompt's full blocks, in order."""

    num_tokens: int  # prompt, plus what was generated before a retry
    keys: Sequence[bytes] = ()
    expected_tokens: float = 1.0  # of the answer
    needs_decode: bool = True
    budget_ms: float = float("inf")  # time left to the deadline
    excluded: frozenset[int] = frozenset()  # incarnations of nodes that failed this request, or lack its adapter
    session: str = ""  # a hint: requests of one conversation share it
    number: int = 0  # number of requests before it


@dataclass(slots=True)
class PrefillSide:
    """``queued_*`` is work placed or reported and not yet done: the prompt being computed, and those behind it
    (``waiting_ms``). It ends at ``ready_at_ms`` if the node keeps to the prediction."""

    nodes: tuple[NodeInfo, ...]
    slots: Ints  # in the prefix index
    local_store: Ints  # index of the store on the same host; NONE: there is none
    costs: Floats  # [3, P]: ms per prompt, per token (with its part of chunks' fixed costs), half the ms per token pair
    known: Bools
    measured: Bools  # has samples of its own; the others use the fit over all nodes
    queued_requests: Floats
    queued_tokens: Floats
    queued_ms: Floats
    waiting_ms: Floats
    ready_at_ms: Floats
    tie_ms: Floats  # tiny, growing with what is queued: breaks ties between equal nodes


@dataclass(slots=True)
class DecodeSide:
    """``next_step_ms`` is a step with one more sequence, without its context; ``free_blocks`` is negative on a node
    that already runs as many sequences as it may."""

    nodes: tuple[NodeInfo, ...]
    slots: Ints
    measured: Bools  # as for prefill nodes
    step_ms: Floats
    sequence_ms: Floats
    context_ms: Floats
    sequences: Floats
    context_tokens: Floats
    next_step_ms: Floats
    free_blocks: Floats
    total_blocks: Floats  # 0: not reported yet
    tie_ms: Floats


@dataclass(slots=True)
class StoreSide:
    """``sending_flows`` is the number of reads from each store now: they share its outgoing bandwidth."""

    nodes: tuple[NodeInfo, ...]
    slots: Ints  # blocks in any tier
    dram_slots: Ints
    ssd_byte_ms: float  # extra ms per byte that is not in DRAM
    ssd_ready_at_ms: Floats  # when each will have finished the SSD reads booked, at that rate; reads take turns
    sending_flows: Floats
    idleness: Floats  # below 1, lower the more is being read: breaks ties between equal runs


@dataclass(slots=True)
class View:
    """The cluster at one moment. The ``*_link`` matrices give a pair's row in ``links``."""

    prefill: PrefillSide
    decode: DecodeSide
    stores: StoreSide
    prefill_at: dict[str, int]
    decode_at: dict[str, int]
    store_at: dict[str, int]
    links: Floats  # [L, 2]: ms of latency, and ms per byte; row 0 is the fit over all pairs
    num_links: int
    fetch_link: Links  # [S, P]; 0: the pair has moved nothing yet
    send_link: Links  # [P, D]
    has_sent: Bools  # [P]: whether it has a measured link to some decode node
    least_send: Floats  # [P, 2]: minimum latency and minimum ms per byte over D

    def link_ms(self, link: Links | np.int32, num_bytes: Floats | float) -> Floats:
        """Time to move this many bytes over one link, or over each of several."""
        costs = self.links[link]
        result: Floats = costs[..., 0] + costs[..., 1] * num_bytes
        return result


class Choice(NamedTuple):
    """A policy's choice, as indices into the view. ``source`` is the store to fetch the missing prefix from, or
    FASTEST. NONE: use only what the prefill node has (its own cache, or the store on its host)."""

    prefill: int
    decode: int = NONE
    source: int = NONE


@dataclass(slots=True)
class PlacementQuery:
    """One request and the cluster as it is now: the input of every policy. A *run* is how many leading blocks of the
    prompt a node holds: its prefix match."""

    facts: RequestFacts
    view: View
    shape: Shape
    now_ms: float
    runs: Floats  # by slot of the prefix index
    prefill_ok: Bools | None = None  # None: all
    decode_ok: Bools | None = None
    last_prefill: int = NONE  # where the session's last request went
    last_decode: int = NONE

    @property
    def usable_tokens(self) -> int:
        """The last token of a prompt is always computed."""
        return self.facts.num_tokens - 1

    @property
    def prefill_runs(self) -> Floats:
        """[P]: in each node's own cache."""
        return self.runs[self.view.prefill.slots]

    @property
    def decode_runs(self) -> Floats:
        """[D]"""
        return self.runs[self.view.decode.slots]

    @property
    def store_runs(self) -> Floats:
        """[S]: in any tier."""
        return self.runs[self.view.stores.slots]

    @property
    def dram_runs(self) -> Floats:
        """[S]"""
        return self.runs[self.view.stores.dram_slots]

    @property
    def store_tokens(self) -> Floats:
        """[S]: prompt tokens a prefill node may use from each store, in any tier."""
        return np.minimum(self.store_runs * self.shape.block_tokens, self.usable_tokens)

    @property
    def dram_tokens(self) -> Floats:
        """[S]: like ``store_tokens``, up to the first block that is only on the SSD."""
        return np.minimum(self.dram_runs * self.shape.block_tokens, self.usable_tokens)

    def local_store_runs(self) -> Floats:
        """[P]: in the store on the prefill node's host."""
        local_store, runs = self.view.prefill.local_store, self.store_runs
        return np.where(local_store >= 0, runs[local_store], 0.0) if len(runs) else np.zeros(len(local_store))

    def host_runs(self) -> Floats:
        """[P]: what a prefill node has without fetching from another host."""
        return np.maximum(self.prefill_runs, self.local_store_runs())

    def queue_ms(self) -> Floats:
        """[P]: time until a request placed now would start."""
        side = self.view.prefill
        return np.maximum(side.ready_at_ms - self.now_ms, side.waiting_ms)

    def sources(self, limit: int) -> list[int]:
        """Up to ``limit`` stores with the longest runs of the prompt; ties go to those that are sending least."""
        runs = self.store_runs
        rank = np.where(runs >= 1.0, runs + self.view.stores.idleness, -np.inf)
        order = np.argsort(-rank, kind="stable")[:limit]
        return [int(at) for at in order if rank[at] > -np.inf]
