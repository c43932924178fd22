"""A request in progress in the simulated cluster, and the results of all requests as flat arrays.

Only the arrays are kept of requests that have ended, so a million of them fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.placement.bookings import Booking
from conductor.placement.scheduler import Placement
from mooncake.app.sim.links import Flow
from mooncake.app.sim.machines.tiered import Loading
from mooncake.trace import ResampledTrace, TraceRequest
from mooncake.types import BlockKey

Floats = npt.NDArray[np.float64]


class Fate(IntEnum):
    OPEN = 0  # not ended; none are left when a simulation has finished
    DONE = 1
    REJECTED = 2  # at arrival, before anything was spent on it
    REJECTED_LATE = 3  # after its prefill
    FAILED = 4  # its nodes died too often


class RetryTime(NamedTuple):
    """The retry time of a client that will return: it was refused at ``at_s`` and told to wait ``wait_s``."""

    request: int
    at_s: float
    wait_s: int


class SimRequest:
    """One request while it runs: its parameters, and the state of its current attempt."""

    __slots__ = (
        "attempts",
        "booking",
        "cached_tokens",
        "dead",
        "decode_id",
        "end_step",
        "fetched_tokens",
        "first_token_s",
        "held",
        "index",
        "is_handed_over",
        "is_prefilled",
        "is_ready",
        "keys",
        "loading",
        "num_tokens",
        "output_tokens",
        "placement",
        "predicted_ttft_s",
        "prefill_id",
        "reserved_tokens",
        "retries",
        "returns",
        "session",
        "source_held",
        "source_id",
        "spent_s",
        "ssd_tokens",
        "start_step",
        "started_s",
        "transfers",
    )

    def __init__(self, index: int, num_tokens: int, output_tokens: int, keys: list[BlockKey]) -> None:
        self.index = index
        self.keys = keys  # of the prompt's full blocks
        self.num_tokens = num_tokens  # of the prompt and of what earlier attempts generated
        self.output_tokens = output_tokens  # still to generate
        self.attempts = 0
        self.retries = 0  # retries that followed a loss that counts
        self.returns = 0  # times that its client returned after a refusal
        self.predicted_ttft_s = math.nan
        self.first_token_s = math.nan  # of the answer, from any attempt
        self.session = ""
        self.dead: frozenset[int] = frozenset()  # incarnations of nodes lost while they served it
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self.placement: Placement | None = None
        self.booking: Booking | None = None
        self.prefill_id = self.decode_id = ""
        self.source_id = ""  # the host it is fetching from
        self.cached_tokens = self.fetched_tokens = 0
        self.ssd_tokens = 0  # read from an SSD, here or on another host
        self.loading: Loading | None = None  # reading from an SSD
        self.is_ready = False  # everything needed to compute it has arrived
        self.is_prefilled = self.is_handed_over = False
        self.held: list[int] = []  # blocks kept in the cache of its prefill machine
        self.source_held: list[int] = []  # and in the one it fetches from
        self.transfers: list[Flow] = []
        self.started_s = math.nan
        self.spent_s = 0.0  # machine time, on the prompt
        self.start_step = self.end_step = 0
        self.reserved_tokens = 0  # of its decode machine's KV: whole blocks for prompt and answer


class Results:
    """One number per request and measure, by index in the trace. Seconds; NaN if the request did not get that far."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        size = len(trace)
        self.size = size
        if isinstance(trace, ResampledTrace):
            self.arrival_s = trace.timestamps_ms / 1e3
            self.input_tokens, outputs = trace.lengths()
        else:
            self.arrival_s = np.array([request.timestamp_ms for request in trace]) / 1e3
            self.input_tokens = np.array([request.input_length for request in trace], dtype=np.int64)
            outputs = np.array([request.output_length for request in trace], dtype=np.int64)
        self.output_tokens = np.maximum(outputs, 1)
        self.fate = np.zeros(size, dtype=np.int8)
        self.ttft_s = np.full(size, np.nan)
        self.queue_s = np.full(size, np.nan)
        self.predicted_ttft_s = np.full(size, np.nan)
        self.mean_tbt_ms = np.full(size, np.nan)
        self.tail_tbt_ms = np.full(size, np.nan)
        self.end_s = np.full(size, np.nan)
        self.cached_tokens = np.zeros(size, dtype=np.int64)  # reused, wherever from
        self.fetched_tokens = np.zeros(size, dtype=np.int64)  # part of cached_tokens: from another host
        self.ssd_tokens = np.zeros(size, dtype=np.int64)  # part of cached_tokens: from an SSD, here or on another host
        self.prefill_ms = np.zeros(size)  # of the machine's time, over all attempts
        self.retry_after_s = np.full(size, np.nan)
        self.attempts = np.zeros(size, dtype=np.int16)
        self.retry_times: list[RetryTime] = []
