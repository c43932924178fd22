"""The interface between ingress and the conductor's core: token ids in, deltas of tokens out.

Ingress knows text, HTTP and gRPC; the core knows nodes, placement and hand-offs. Neither imports the other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from mooncake.adapters import Adapter
from mooncake.errors import MooncakeError
from mooncake.pooling import Pooling, Vector
from mooncake.sampling import SamplingParams
from mooncake.types import FinishReason, PrefillReport, SampledToken, TokenIds

TOO_LATE = (
    "the request did not finish within its time, at most conductor.request_timeout_s: start the cluster with "
    "`--set conductor.request_timeout_s=SECONDS` for more, ask for fewer max_tokens, or stream to keep what is there"
)
DRAIN_S = 10.0  # how long requests in progress may finish when the conductor is asked to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One attempt at a request, once it is over. Times are on this process's monotonic clock (seconds)."""

    request_id: str
    asked_at: float  # it waits for admission, or for a node of a role that has none
    placing_at: float
    called_at: float  # both nodes
    first_token_at: float  # 0: there was none
    ended_at: float
    prefill_node: str
    decode_node: str  # "": the prefill node gives whole answers
    source_node: str  # the store that the prefix was to be read from; "": none
    predicted_ms: Mapping[str, float]  # by part: queue_ms, fetch_ms, prefill_ms, handoff_ms, step_ms; {}: not known
    report: PrefillReport | None  # the last that came
    handoff: str  # its state at the end; "": there was none
    decode_ms: float  # between the decode node's first and last tokens; 0: it did not end
    preemptions: int  # of the sequence, on the decode node
    error: MooncakeError | None  # why it failed; None also where the request was cancelled or ran out of time


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One prompt and its ``sampling.num_answers`` answers. ``deadline`` is on this process's monotonic clock (seconds).

    ``session`` is an affinity hint (any stable text, "" for none), never an identity. ``attempts``, unless it is None,
    gets a record of each attempt.
    """

    request_id: str
    tokens: TokenIds
    sampling: SamplingParams
    deadline: float
    salt: str = ""
    session: str = ""
    priority: int = 0  # lower runs first on every node and enters first; 100 and above: only idle capacity
    adapter: str = ""  # digest of the adapter; "": the base model
    adapter_start: int = 0  # index of the first prompt token the adapter acts on
    attempts: list[AttemptRecord] | None = None
    pooling: Pooling | None = None  # its hidden states are wanted, pooled so, in place of an answer of one token


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Where a request runs, or ran, and what it reused, as far as is known."""

    report: PrefillReport = field(default_factory=PrefillReport)
    prefill_node: str = ""
    decode_node: str = ""
    retries: int = 0
    predicted_ttft_ms: float = 0.0


class Delta(msgspec.Struct, frozen=True):
    """New tokens of answer number ``choice``. The last delta of an answer carries the finish reason and the summary,
    and may have no tokens; earlier ones carry the summary when the prefill node has reported."""

    tokens: tuple[SampledToken, ...] = ()
    finish_reason: FinishReason | None = None
    summary: RequestSummary | None = None
    choice: int = 0
    prompt_logprobs: Collection[SampledToken] | None = None  # if requested, before any token: all but the first
    pooled: Vector | None = None  # if requested, with the finish reason: [hidden], as they are


class Generator(Protocol):
    """The seam between ingress and the core: ``dispatch.dispatcher.Dispatcher``. Tests of ingress use a fake of a few
    lines."""

    def generate(self, request: InferenceRequest) -> AsyncGenerator[Delta, None]:
        """Stream deltas until every answer has a finish reason. Closing the generator cancels the request everywhere.

        Raises MooncakeError: InvalidRequest, Overloaded (before anything is spent), NodeUnavailable or HandoffFailed
        (after the retries), DeadlineExceeded.
        """
        ...

    def check_room(self) -> None:
        """Call it before a request is decoded. Raises Overloaded when ``generate`` would refuse any request now; some
        pass all the same, because the prompts of refused requests are demand too."""
        ...

    def end_choice(self, request_id: str, choice: int) -> None:
        """End one of the answers early: it is complete, and no further delta of it follows. To end the last answer,
        close the generator instead. Idempotent."""
        ...


class AdapterLoading(Protocol):
    """Adapters that come and go while the cluster serves."""

    @property
    def served(self) -> Mapping[str, Adapter]:
        """By the names that requests may use, beside the configured ones. It changes with them."""
        ...

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Have every node load the folder at ``path``; returns once requests may name it.

        Raises InvalidRequest when it may not be loaded or does not fit the model, NotFound when nothing is there, and
        NodeUnavailable or DeadlineExceeded when nodes are missing. Nothing has changed then.
        """
        ...

    def unload(self, name: str) -> None:
        """Requests that use it are finished, new ones are refused. Raises InvalidRequest, NotFound."""
        ...
