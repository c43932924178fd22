"""One call's trace: what ingress and core know of it, and the spans that this makes.

Pure, and without OpenTelemetry: a span is a plain value here, made when the call is over. Nodes tell in their ordinary
messages how long they waited and computed; their spans are put behind each other from the moment they were called.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from conductor.api import AttemptRecord, InferenceRequest
from mooncake.errors import Cancelled, InternalError, MooncakeError
from mooncake.types import FinishReason, Usage

Value = str | int | float | Sequence[str]
Attributes = Mapping[str, Value]
COMMITTED = "committed"  # a hand-off
TTFT_PARTS = ("queue_ms", "fetch_ms", "prefill_ms")


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds on the monotonic clock."""

    name: str
    start_at: float
    end_at: float
    attributes: Attributes = field(default_factory=dict)
    parts: Sequence[Span] = ()
    error: MooncakeError | None = None
    events: Mapping[str, float] = field(default_factory=dict)  # when what happened


class Tracer(Protocol):
    """Whoever makes traces of calls."""

    def begin(self, headers: Mapping[str, str], call_id: str, model: str, arrived_at: float) -> CallTrace | None:
        """None: this call is not sampled. ``headers`` may have a ``traceparent``."""
        ...

    async def close(self) -> None:
        """Tell what has not been told, within a bound."""
        ...


@dataclass(slots=True)
class CallTrace:
    """One call, which may have several prompts and answers. Enter it while they are generated; ``tell`` then gets the
    root span."""

    call_id: str
    model: str
    arrived_at: float
    traceparent: str  # of the root span, as W3C's header
    clock: Callable[[], float]
    tell: Callable[[Span], None]
    requests: list[InferenceRequest] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)  # that are over: the core adds them
    finish_reasons: list[FinishReason] = field(default_factory=list)
    num_tokens: int = 0  # of all answers
    num_cached: int = 0  # of all prompts
    generated_from: float = 0.0

    @property
    def traceresponse(self) -> str:
        """``traceparent``, once it is certain that there will be a trace: what is refused before has none."""
        return self.traceparent if self.generated_from else ""

    def answered(self, choice: int, reason: FinishReason, usage: Usage) -> None:
        """An answer is complete."""
        self.finish_reasons.append(reason)
        self.num_tokens += usage.completion_tokens
        self.num_cached += 0 if choice else usage.cached_tokens  # all answers share the prompt

    def __enter__(self) -> Self:
        self.generated_from = self.clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended_at = self.clock()
        parts = [Span("receive", self.arrived_at, self.generated_from), *map(attempt_span, self.attempts)]
        if not self.attempts:  # it was refused, or waited in vain
            parts.append(Span("admission", self.generated_from, ended_at))
        first_token_at = min((at.first_token_at for at in self.attempts if at.first_token_at), default=0.0)
        events = {"first_token": first_token_at} if first_token_at else {}
        attributes = self._asked() | self._used() | self._latency(first_token_at, ended_at)
        self.tell(Span("llm_request", self.arrived_at, ended_at, attributes, parts, _ours(error), events))

    def _asked(self) -> dict[str, Value]:
        """By vLLM's names, as all that follows."""
        sampling = self.requests[0].sampling
        return {
            "gen_ai.request.id": self.call_id,
            "gen_ai.response.model": self.model,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.n": sampling.n,
        }

    def _used(self) -> dict[str, Value]:
        """The conventions have renamed the tokens since vLLM named them."""
        prompt = sum(len(request.tokens) for request in self.requests)
        return {
            "gen_ai.usage.prompt_tokens": prompt,
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.completion_tokens": self.num_tokens,
            "gen_ai.usage.output_tokens": self.num_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.num_cached,
            "gen_ai.response.finish_reasons": [str(reason) for reason in self.finish_reasons],
            "mooncake.failed_attempts": sum(attempt.error is not None for attempt in self.attempts),
        }

    def _latency(self, first_token_at: float, ended_at: float) -> dict[str, Value]:
        """Seconds, like vLLM's; those in the model are the last attempt's."""
        told: dict[str, Value] = {"gen_ai.latency.e2e": ended_at - self.arrived_at}
        if first_token_at:
            told["gen_ai.latency.time_to_first_token"] = first_token_at - self.arrived_at
        if self.attempts and (report := self.attempts[-1].report) is not None:
            last, times = self.attempts[-1], report.timings
            prefill_from = last.called_at + times.queue_ms / 1e3
            told["gen_ai.latency.time_in_queue"] = prefill_from - self.generated_from
            told["gen_ai.latency.time_in_model_prefill"] = times.prefill_ms / 1e3
            told["gen_ai.latency.time_in_model_inference"] = last.ended_at - prefill_from
            if last.first_token_at:
                told["gen_ai.latency.time_in_model_decode"] = last.ended_at - last.first_token_at
        return told


def attempt_span(attempt: AttemptRecord) -> Span:
    """With what its nodes did, as far as they have told."""
    attributes: dict[str, Value] = {
        "gen_ai.request.id": attempt.request_id,
        "mooncake.prefill_node": attempt.prefill_node,
        "mooncake.decode_node": attempt.decode_node,
    }
    if (report := attempt.report) is not None:
        attributes |= {
            "mooncake.local_cached_tokens": report.local_cached_tokens,
            "mooncake.pool_cached_tokens": report.pool_cached_tokens,
            "mooncake.blended_tokens": report.blended_tokens,
            "mooncake.inherited_tokens": report.inherited_tokens,
            "mooncake.pool_written_bytes": report.pool_bytes,
        }
    if attempt.first_token_at:
        attributes["mooncake.ttft_ms"] = (attempt.first_token_at - attempt.placing_at) * 1e3
    if predicted := attempt.predicted_ms:
        attributes["mooncake.predicted_ttft_ms"] = sum(predicted[part] for part in TTFT_PARTS)
    parts = [
        Span("admission", attempt.asked_at, attempt.placing_at),
        Span("placement", attempt.placing_at, attempt.called_at),
        *_on_nodes(attempt),
    ]
    return Span("attempt", attempt.asked_at, attempt.ended_at, attributes, parts, attempt.error)


def _on_nodes(attempt: AttemptRecord) -> list[Span]:
    report, end_at = attempt.report, attempt.ended_at

    def span(name: str, start_at: float, ms: float, part: str, told: Attributes, parts: Sequence[Span] = ()) -> Span:
        predicted = {"mooncake.predicted_ms": attempt.predicted_ms[part]} if attempt.predicted_ms else {}
        return Span(name, start_at, min(start_at + ms / 1e3, end_at), {**told, **predicted}, parts)

    here = {"mooncake.node": attempt.prefill_node}
    if report is None:  # the prefill node has not told when it began
        return [Span("prefill", attempt.called_at, attempt.first_token_at or end_at, here)]
    times = report.timings
    queue = span("queue", attempt.called_at, times.queue_ms, "queue_ms", here)
    # The first step begins together with the load, and waits for it layer by layer.
    source: Attributes = {"mooncake.store": attempt.source_node, "mooncake.tokens": report.pool_cached_tokens}
    loads = [span("load", queue.end_at, times.load_ms, "fetch_ms", source)] if times.load_ms else []
    prefill = span("prefill", queue.end_at, times.prefill_ms, "prefill_ms", here, loads)
    spans, decode_from = [queue, prefill], attempt.first_token_at
    is_committed = attempt.handoff == COMMITTED
    if attempt.decode_node and (times.handoff_ms or not is_committed):
        sent: Attributes = {
            "mooncake.state": attempt.handoff,
            "mooncake.bytes": report.sent_bytes,
            "mooncake.transport": report.transport,
        }
        handoff_ms = times.handoff_ms if is_committed else math.inf
        spans.append(span("handoff", prefill.end_at, handoff_ms, "handoff_ms", sent))
        # The first step may be over before the prefill node hears that its hand-off is.
        decode_from = min(spans[-1].end_at, end_at - attempt.decode_ms / 1e3)
    if decode_from and (is_committed or not attempt.decode_node):
        spans.append(Span("decode", decode_from, end_at, _decoded(attempt)))
    return spans


def _decoded(attempt: AttemptRecord) -> dict[str, Value]:
    told: dict[str, Value] = {"mooncake.node": attempt.decode_node or attempt.prefill_node}
    if attempt.decode_node:
        told |= {"mooncake.decode_ms": attempt.decode_ms, "mooncake.preemptions": attempt.preemptions}
    if attempt.predicted_ms:
        told["mooncake.predicted_step_ms"] = attempt.predicted_ms["step_ms"]
    return told


def _ours(error: BaseException | None) -> MooncakeError | None:
    if error is None or isinstance(error, MooncakeError):
        return error
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return Cancelled("the client needs no more")
    return InternalError(repr(error))
