"""What a decision looks at: flat arrays over the usable nodes, and the request that asks. No rule lives here.

Arrays are over ``P`` prefill nodes, ``D`` decode nodes and ``S`` stores, in the order of the tuples of nodes.
``view_keeper`` keeps them true; policies read them and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.registry import NodeInfo

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Links = npt.NDArray[np.int32]

NONE = -1  # no node, where an index is wanted
MAX_SOURCES = 3  # stores looked at as sources of one prefix
SESSION_MS = 1e-6  # what staying with the session's nodes is worth: it breaks ties
FASTEST = -2  # as a source: whichever store is predicted to be fastest, or none


@dataclass(frozen=True, slots=True)
class Shape:
    """What a token weighs in this cluster."""

    block_tokens: int
    block_bytes: int
    num_layers: int
    chunk_tokens: int = 0  # of a prefill step; 0: whole prompts


class RequestFacts(NamedTuple):
    """All of a request that placement depends on. ``keys`` name the full blocks of the prompt, in order."""

    num_tokens: int  # prompt, and what was generated before a retry
    keys: Sequence[bytes] = ()
    expected_tokens: float = 1.0  # of the answer
    needs_decode: bool = True
    budget_ms: float = float("inf")  # to the deadline
    excluded: frozenset[int] = frozenset()  # incarnations of nodes that failed this request
    session: str = ""  # a hint: requests of one conversation share it
    number: int = 0  # how many requests came before


@dataclass(slots=True)
class PrefillSide:
    """``queued_*`` is work placed or reported and not yet done. Its first part (all but ``tail_ms``) is being computed;
    the whole is done at ``ready_at_ms`` if the node keeps to the prediction."""

    nodes: tuple[NodeInfo, ...]
    slots: Ints  # in the prefix index
    home: Ints  # the store on the same host, NONE: there is none
    costs: Floats  # [3, P]: ms a prompt, a token, and half of ms a pair of tokens; chunks are spread over the tokens
    known: Bools
    measured: Bools  # has shown its own costs; the others' are what all nodes together have shown
    queued_requests: Floats
    queued_tokens: Floats
    queued_ms: Floats
    tail_ms: Floats
    ready_at_ms: Floats
    tie_ms: Floats  # next to nothing, more the more is queued: tells equal nodes apart


@dataclass(slots=True)
class DecodeSide:
    """``next_step_ms`` is a step with one sequence more, still without its context; ``free_blocks`` is below 0 on a
    node that has all the sequences it may run."""

    nodes: tuple[NodeInfo, ...]
    slots: Ints
    measured: Bools  # as of prefill nodes
    step_ms: Floats
    sequence_ms: Floats
    context_ms: Floats
    sequences: Floats
    context_tokens: Floats
    next_step_ms: Floats
    free_blocks: Floats
    total_blocks: Floats  # 0: the node has not said
    tie_ms: Floats


@dataclass(slots=True)
class StoreSide:
    """``sending_*`` is what is being read from each store now: reads share its way out."""

    nodes: tuple[NodeInfo, ...]
    slots: Ints  # blocks in any tier
    dram_slots: Ints
    ssd_byte_ms: float  # more for each byte that is not in DRAM
    ssd_ready_at_ms: Floats  # when each has read what was promised of its SSD, at that rate; reads take turns
    sending_flows: Floats
    sending_bytes: Floats
    idleness: Floats  # below 1, less the more is being read: tells equal runs apart


@dataclass(slots=True)
class View:
    """The cluster at one moment. Matrices give the row of ``links`` that a pair of nodes has."""

    prefill: PrefillSide
    decode: DecodeSide
    stores: StoreSide
    prefill_at: dict[str, int]
    decode_at: dict[str, int]
    store_at: dict[str, int]
    links: Floats  # [L, 2]: ms of latency, and ms a byte; the first row is what all pairs together have shown
    num_links: int
    fetch_link: Links  # [S, P]; 0: the pair has moved nothing yet
    send_link: Links  # [P, D]
    has_sent: Bools  # [P]: whether it has shown a link of its own to some decode node
    least_send: Floats  # [P, 2]: the least latency, and the least ms a byte, over D

    def link_ms(self, link: Links | np.int32, num_bytes: Floats | float) -> Floats:
        """Of moving so many bytes over a link, or over each of several."""
        costs = self.links[link]
        result: Floats = costs[..., 0] + costs[..., 1] * num_bytes
        return result


class Choice(NamedTuple):
    """What a policy says: indices into the view. ``source`` is the store to fetch the missing prefix from, or FASTEST;
    NONE: what the prefill node has itself (its own cache or the store on its host) is all it uses."""

    prefill: int
    decode: int = NONE
    source: int = NONE


@dataclass(slots=True)
class Question:
    """One request before the cluster as it is now: what every policy is given. A run is of leading blocks."""

    facts: RequestFacts
    view: View
    shape: Shape
    now_ms: float
    runs: Floats  # by slot of the prefix index
    prefill_ok: Bools | None = None  # None: all
    decode_ok: Bools | None = None
    last_prefill: int = NONE  # where the session's last request was
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
        """[S]: of the prompt, as many as a prefill node may use, in any tier."""
        return np.minimum(self.store_runs * self.shape.block_tokens, self.usable_tokens)

    @property
    def dram_tokens(self) -> Floats:
        """[S]: as ``store_tokens``, up to the first block that only the SSD has."""
        return np.minimum(self.dram_runs * self.shape.block_tokens, self.usable_tokens)

    def home_runs(self) -> Floats:
        """[P]: in the store on the same host."""
        home, runs = self.view.prefill.home, self.store_runs
        return np.where(home >= 0, runs[home], 0.0) if len(runs) else np.zeros(len(home))

    def own_blocks(self) -> Floats:
        """[P]: what a prefill node has without asking another host."""
        return np.maximum(self.prefill_runs, self.home_runs())

    def queue_ms(self) -> Floats:
        """[P]: until a request placed now would begin."""
        side = self.view.prefill
        return np.maximum(side.ready_at_ms - self.now_ms, side.tail_ms)

    def sources(self, limit: int) -> list[int]:
        """Up to ``limit`` stores with the longest runs of the prompt; of equal ones, those that send least now."""
        runs = self.store_runs
        rank = np.where(runs >= 1.0, runs + self.view.stores.idleness, -np.inf)
        order = np.argsort(-rank, kind="stable")[:limit]
        return [int(at) for at in order if rank[at] > -np.inf]
