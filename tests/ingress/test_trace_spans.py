"""The spans of a call are made from what ingress and core know of it. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conductor.api import AttemptRecord, InferenceRequest
from conductor.ingress.trace import CallTrace, Span, attempt_span
from mooncake.errors import HandoffFailed, Overloaded
from mooncake.sampling import SamplingParams
from mooncake.types import FinishReason, PrefillReport, Timings, Usage

REPORT = PrefillReport(
    prompt_tokens=300,
    local_cached_tokens=64,
    pool_cached_tokens=128,
    sent_bytes=9000,
    pool_bytes=4000,
    transport="shm",
    timings=Timings(queue_ms=20, load_ms=30, prefill_ms=100, handoff_ms=10),
)
ATTEMPT = AttemptRecord(
    request_id="chatcmpl-1-0",
    asked_at=1.0,
    placing_at=1.5,
    called_at=1.502,
    first_token_at=1.63,
    ended_at=3.0,
    prefill_node="prefill-0",
    decode_node="decode-0",
    source_node="store-0",
    predicted_ms={"queue_ms": 5.0, "fetch_ms": 25.0, "prefill_ms": 80.0, "handoff_ms": 8.0, "step_ms": 12.0},
    report=REPORT,
    handoff="committed",
    decode_ms=1300.0,
    preemptions=2,
    error=None,
)


def timeline(span: Span) -> list[tuple[str, float, float]]:
    """Its parts, in milliseconds since the attempt was asked for."""
    return [(part.name, round(1e3 * part.start_at - 1e3), round(1e3 * part.end_at - 1e3)) for part in span.parts]


def test_an_attempt_tells_where_its_time_went() -> None:
    span = attempt_span(ATTEMPT)
    assert timeline(span) == [
        ("admission", 0, 500),
        ("placement", 500, 502),
        ("queue", 502, 522),
        ("prefill", 522, 622),
        ("handoff", 622, 632),
        ("decode", 632, 2000),
    ]
    _, _, queue, prefill, handoff, decode = span.parts
    assert timeline(prefill) == [("load", 522, 552)]
    [load] = prefill.parts
    predicted = [part.attributes["mooncake.predicted_ms"] for part in (queue, load, prefill, handoff)]
    assert predicted == [5, 25, 80, 8]
    assert (load.attributes["mooncake.store"], load.attributes["mooncake.tokens"]) == ("store-0", 128)
    assert (handoff.attributes["mooncake.bytes"], handoff.attributes["mooncake.transport"]) == (9000, "shm")
    assert decode.attributes == {
        "mooncake.node": "decode-0",
        "mooncake.decode_ms": 1300,
        "mooncake.preemptions": 2,
        "mooncake.predicted_step_ms": 12,
    }
    assert span.attributes["mooncake.predicted_ttft_ms"] == 110
    assert span.attributes["mooncake.ttft_ms"] == pytest.approx(130)
    assert span.attributes["mooncake.local_cached_tokens"] == 64


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        pytest.param(
            {"predicted_ms": {}}, ["queue", "prefill", "handoff", "decode"], id="predictions without measures"
        ),
        pytest.param(
            {"report": None, "first_token_at": 0.0, "handoff": "failed"}, ["prefill"], id="the prefill node died"
        ),
        pytest.param(
            {"report": replace(REPORT, timings=Timings(20, 0, 100)), "handoff": "expired"},
            ["queue", "prefill", "handoff"],
            id="the decode node did not take it",
        ),
        pytest.param(
            {"report": replace(REPORT, timings=Timings(20, 0, 100))},
            ["queue", "prefill", "decode"],
            id="the client needed no more before the report came",
        ),
        pytest.param(
            {"decode_node": "", "handoff": "", "report": replace(REPORT, timings=Timings(20, 0, 100, 1300))},
            ["queue", "prefill", "decode"],
            id="the prefill node generated, too",
        ),
    ],
)
def test_an_attempt_tells_what_is_known_of_it(changes: dict[str, object], names: list[str]) -> None:
    attempt = replace(ATTEMPT, **changes)  # type: ignore[arg-type]
    span = attempt_span(attempt)
    assert [part.name for part in span.parts] == ["admission", "placement", *names]
    assert all(span.start_at <= part.start_at <= part.end_at <= span.end_at for part in span.parts)
    assert ("mooncake.predicted_ttft_ms" in span.attributes) == bool(attempt.predicted_ms)


def test_decoding_may_begin_before_the_prefill_node_hears_that_its_hand_off_is_over() -> None:
    assert timeline(attempt_span(replace(ATTEMPT, decode_ms=1371.0)))[-2:] == [
        ("handoff", 622, 632),
        ("decode", 629, 2000),
    ]


def test_a_node_that_tells_more_time_than_passed_here_ends_with_its_attempt() -> None:
    """Its clock may be faster, and an attempt may be given up."""
    span = attempt_span(replace(ATTEMPT, ended_at=1.6, handoff="failed"))
    assert timeline(span)[-2:] == [("prefill", 522, 600), ("handoff", 600, 600)]


class Told:
    """A call's trace, and the root span that it made."""

    def __init__(self) -> None:
        self.now = 1.0
        self.spans: list[Span] = []
        self.trace = CallTrace("chatcmpl-1", "model", 0.9, "", lambda: self.now, self.spans.append)
        tokens = np.arange(300, dtype=np.uint32)
        self.trace.requests.append(InferenceRequest("chatcmpl-1-0", tokens, SamplingParams(temperature=0.5), 9.0))

    @property
    def root(self) -> Span:
        [root] = self.spans
        return root


def test_the_root_has_what_vllm_s_has() -> None:
    told = Told()
    with told.trace as trace:
        trace.attempts += [
            replace(ATTEMPT, ended_at=2.0, report=None, handoff="failed", error=HandoffFailed("no")),
            replace(ATTEMPT, asked_at=2.0, placing_at=2.1, called_at=2.1, first_token_at=2.3),
        ]
        trace.answered(0, FinishReason.STOP, Usage(300, 40, 192))
        trace.answered(1, FinishReason.LENGTH, Usage(300, 50, 192))
        told.now = 3.1
    assert [part.name for part in told.root.parts] == ["receive", "attempt", "attempt"]
    assert told.root.events == {"first_token": 1.63}
    assert told.root.error is None and told.root.parts[1].error is not None
    seconds = {key: value for key, value in told.root.attributes.items() if key.startswith("gen_ai.latency")}
    assert seconds == pytest.approx(
        {
            "gen_ai.latency.e2e": 2.2,
            "gen_ai.latency.time_to_first_token": 0.73,
            "gen_ai.latency.time_in_queue": 1.12,  # until the prompt was computed whose tokens were the answer's
            "gen_ai.latency.time_in_model_prefill": 0.1,
            "gen_ai.latency.time_in_model_decode": 0.7,
            "gen_ai.latency.time_in_model_inference": 0.88,
        }
    )
    others = {key: value for key, value in told.root.attributes.items() if key not in seconds}
    assert others == {
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.response.model": "model",
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.n": 1,
        "gen_ai.usage.prompt_tokens": 300,
        "gen_ai.usage.input_tokens": 300,
        "gen_ai.usage.completion_tokens": 90,
        "gen_ai.usage.output_tokens": 90,
        "gen_ai.usage.cache_read.input_tokens": 192,
        "gen_ai.response.finish_reasons": ["stop", "length"],
        "mooncake.failed_attempts": 1,
    }


def test_a_refused_call_shows_how_long_it_waited() -> None:
    told = Told()
    with pytest.raises(Overloaded), told.trace:
        told.now = 1.4
        raise Overloaded("full", 1.0)
    assert [(part.name, part.start_at, part.end_at) for part in told.root.parts] == [
        ("receive", 0.9, 1.0),
        ("admission", 1.0, 1.4),
    ]
    assert told.root.error is not None and told.root.error.code == Overloaded.code
    assert "gen_ai.latency.time_to_first_token" not in told.root.attributes


@pytest.mark.parametrize(("error", "code"), [(GeneratorExit(), "cancelled"), (ValueError("bug"), "internal_error")])
def test_how_a_call_ended_has_our_names(error: BaseException, code: str) -> None:
    told = Told()
    with pytest.raises(type(error)), told.trace:
        raise error
    assert told.root.error is not None and told.root.error.code == code
