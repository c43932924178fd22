"""Our values over the wire and back: nothing lost, nothing rounded, and what is out of range refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.errors import InvalidRequest
from mooncake.rpc import cluster_pb2, prefill_pb2
from mooncake.rpc import common_pb2 as pb
from mooncake.rpc.convert import (
    check_scores,
    event_from_wire,
    event_to_wire,
    prompt_logprobs_to_wire,
    report_from_wire,
    report_to_wire,
    sampled_from_wire,
    sampled_to_wire,
    sampling_from_wire,
    sampling_to_wire,
    segment_from_wire,
    segment_to_wire,
    tokens_from_wire,
    tokens_to_wire,
)
from mooncake.rpc.json_form import json_form
from mooncake.sampling import Guide, GuideKind, RepetitionDetection, SamplingParams, ThinkingBudget
from mooncake.types import BlockEvent, BlockKey, PrefillReport, SampledToken, SegmentAddress, Timings, TokenLogprob

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
texts = st.text(max_size=8)


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 1 << 20))
    guide = draw(st.none() | st.builds(Guide, st.sampled_from(GuideKind), texts, texts))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=0 if guide else draw(st.integers(0, max_tokens)),
        temperature=draw(floats(0, 100)),
        top_k=draw(st.integers(0, 1 << 31)),
        top_p=draw(floats(1e-6, 1)),
        min_p=draw(floats(0, 1)),
        repetition_penalty=draw(floats(1e-3, 100)),
        presence_penalty=draw(floats(-2, 2)),
        frequency_penalty=draw(floats(-2, 2)),
        logit_bias=tuple(draw(st.lists(st.tuples(u32, floats(-100, 100)), max_size=4))),
        allowed_token_ids=tuple(draw(st.lists(u32, max_size=4))),
        bad_words=tuple(draw(st.lists(st.lists(u32, min_size=1, max_size=3).map(tuple), max_size=3))),
        seed=draw(u64),
        stop_token_ids=tuple(draw(st.lists(u32, max_size=4))),
        ignore_eos=guide is None and draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, 20)),
        guide=guide,
        repetition_detection=draw(
            st.none() | st.builds(RepetitionDetection, st.integers(8, 64), st.integers(2, 64), st.integers(1, 8))
        ),
        thinking_budget=draw(st.none() | st.builds(ThinkingBudget, st.integers(0, 1 << 20), u32, st.none() | u32)),
    )


@given(sampling=samplings())
def test_sampling_parameters_arrive_as_they_were_sent(sampling: SamplingParams) -> None:
    assert through_bytes(sampling_to_wire(sampling)) == sampling


def through_bytes(message: pb.SamplingParams) -> SamplingParams:
    return sampling_from_wire(pb.SamplingParams.FromString(message.SerializeToString()))


def test_what_a_client_leaves_out_takes_the_default_and_a_seed_of_its_own() -> None:
    one, other = sampling_from_wire(pb.SamplingParams()), sampling_from_wire(pb.SamplingParams())
    assert one.seed != other.seed
    assert SamplingParams(seed=one.seed) == one
    explicit = sampling_from_wire(pb.SamplingParams(temperature=0.0, seed=0, logprobs=0))
    assert (explicit.temperature, explicit.seed, explicit.logprobs) == (0.0, 0, 0), "zero is not nothing"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (pb.SamplingParams(max_tokens=0), "max_tokens"),
        (pb.SamplingParams(max_tokens=(1 << 20) + 1), "max_tokens"),
        (pb.SamplingParams(max_tokens=3, min_tokens=4), "min_tokens"),
        (pb.SamplingParams(temperature=-0.1), "temperature"),
        (pb.SamplingParams(temperature=float("nan")), "temperature"),
        (pb.SamplingParams(temperature=float("inf")), "temperature"),
        (pb.SamplingParams(top_p=-0.1), "top_p"),
        (pb.SamplingParams(min_p=1.5), "min_p"),
        (pb.SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (pb.SamplingParams(presence_penalty=3.0), "presence_penalty"),
        (pb.SamplingParams(logit_bias=[pb.LogitBias(token_id=1, bias=101.0)]), "logit_bias"),
        (pb.SamplingParams(logit_bias=[pb.LogitBias()] * 1025), "logit_bias"),
        (pb.SamplingParams(stop_token_ids=[1] * 65), "stop_token_ids"),
        (pb.SamplingParams(logprobs=21), "logprobs"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(message: pb.SamplingParams, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        through_bytes(message)
    assert refused.value.param == param


@given(ids=st.lists(u32, max_size=50))
def test_tokens_travel_as_bytes(ids: list[int]) -> None:
    data = tokens_to_wire(np.array(ids, dtype=np.uint32))
    assert len(data) == 4 * len(ids)
    back = tokens_from_wire(data)
    assert (back.dtype, back.tolist()) == (np.uint32, ids)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_part_of_a_token_is_refused(length: int) -> None:
    with pytest.raises(InvalidRequest, match="multiple of 4"):
        tokens_from_wire(b"x" * length)


float32s = st.floats(width=32, allow_nan=False)


@given(
    token=st.builds(
        SampledToken,
        index=u32,
        token_id=u32,
        logprob=st.none()
        | st.builds(TokenLogprob, float32s, st.lists(st.tuples(u32, float32s), max_size=4).map(tuple), u32),
    )
)
def test_sampled_tokens_arrive_with_their_probabilities_or_without(token: SampledToken) -> None:
    assert sampled_from_wire(pb.SampledToken.FromString(sampled_to_wire(token).SerializeToString())) == token


@pytest.mark.parametrize("num_top", [0, 20])
def test_the_scores_of_as_long_a_prompt_as_is_taken_fit_into_a_message(num_top: int) -> None:
    room = 1 << 18
    with pytest.raises(InvalidRequest, match=f"prompt_logprobs of {num_top} is for prompts of at most") as refused:
        check_scores(room, num_top, room)
    most = int(refused.value.message.split(" tokens")[0].split()[-1])
    check_scores(most, num_top, room)
    score = TokenLogprob(-1e-9, ((2**32 - 1, -1.5),) * num_top, 2**32 - 1)
    message = prompt_logprobs_to_wire(np.full(most + 1, 2**32 - 1, np.uint32), [score] * most)
    assert 0.7 * room < prefill_pb2.PrefillResponse(prompt_logprobs=message).ByteSize() <= room


@given(
    event=st.builds(
        BlockEvent, st.booleans(), st.binary(min_size=32, max_size=32).map(BlockKey), st.binary(max_size=32)
    )
)
def test_events_arrive_as_they_were_sent(event: BlockEvent) -> None:
    assert event_from_wire(pb.BlockEvent.FromString(event_to_wire(event).SerializeToString())) == event


text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)


@given(address=st.builds(SegmentAddress, text, u64, text, text, text, u32, u32))
def test_addresses_of_segments_arrive_as_they_were_sent(address: SegmentAddress) -> None:
    assert segment_from_wire(pb.SegmentAddress.FromString(segment_to_wire(address).SerializeToString())) == address


ms = st.floats(0, 1e11)


@given(
    report=st.builds(
        PrefillReport,
        u32,
        u32,
        u32,
        u64,
        u64,
        text,
        st.builds(Timings, ms, ms, ms, ms, ms),
    )
)
def test_reports_arrive_as_they_were_sent(report: PrefillReport) -> None:
    assert report_from_wire(pb.PrefillReport.FromString(report_to_wire(report).SerializeToString())) == report


@pytest.mark.parametrize("ms", [math.nan, math.inf, -1.0, 1e300])
def test_a_time_that_is_none_does_not_come_into_sums(ms: float) -> None:
    times = pb.Timings(queue_ms=ms, load_ms=ms, prefill_ms=2.0, handoff_ms=ms, decode_ms=ms)
    assert report_from_wire(pb.PrefillReport(timings=times)).timings == Timings(prefill_ms=2.0)


def test_in_json_counts_are_numbers_and_what_only_names_something_is_text() -> None:
    node = cluster_pb2.NodeStatus(indexed_blocks=8)
    node.info.incarnation = 5
    node.info.settings["block.tokens"] = "64"
    node.load.counters["leases"] = 3
    node.transports.add(peer="b", bytes=1 << 40, gb_per_s=1.5)
    said = json_form(cluster_pb2.StatusResponse(nodes=[node], requests_total=7, waiting_for=["1"]))
    [of_node] = said["nodes"]  # type: ignore[misc]
    assert (said["requests_total"], said["requests_failed"], said["waiting_for"]) == (7, 0, ["1"])
    assert (of_node["info"]["incarnation"], of_node["info"]["settings"]) == ("5", {"block.tokens": "64"})
    assert (of_node["indexed_blocks"], of_node["load"]["counters"]) == (8, {"leases": 3})
    assert [(link["peer"], link["bytes"], link["gb_per_s"]) for link in of_node["transports"]] == [("b", 1 << 40, 1.5)]
