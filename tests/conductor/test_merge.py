"""Two streams become one without gap or repeat, whatever order they speak in. Pure."""

import itertools
import math
import random

import pytest

from conductor.api import Delta
from conductor.dispatch.lifecycle import HandoffPhase, handoff_lifecycle
from conductor.dispatch.merge import Merger
from mooncake.errors import BrokenPeer, HandoffFailed, NodeUnavailable, OutOfMemory
from mooncake.rpc import common_pb2, decode_pb2, prefill_pb2
from mooncake.types import FinishReason, SampledToken, TokenLogprob


def prefill_message(index: int = 0, finish: str = "") -> prefill_pb2.PrefillResponse:
    token = common_pb2.SampledToken(index=index, token_id=100 + index)
    return prefill_pb2.PrefillResponse(first_token=token, finish_reason=finish)


def report() -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(report=common_pb2.PrefillReport(local_cached_tokens=3))


def decode_message(*indices: int, finish: str = "") -> decode_pb2.DecodeResponse:
    tokens = [common_pb2.SampledToken(index=index, token_id=100 + index) for index in indices]
    return decode_pb2.DecodeResponse(tokens=tokens, finish_reason=finish)


def merger(expected_index: int = 0, handoff: bool = True) -> Merger:
    return Merger([expected_index], handoff_lifecycle("h") if handoff else None)


def indices(deltas: list[Delta | None]) -> list[int]:
    return [token.index for delta in deltas if delta for token in delta.tokens]


def test_every_interleaving_gives_the_same_stream() -> None:
    prefill = [prefill_message(), report()]
    decode = [decode_message(0), decode_message(1, 2), decode_message(3, finish="stop")]
    for order in set(itertools.permutations("pp" + "ddd")):
        merge, sides = merger(), {"p": iter(prefill), "d": iter(decode)}
        deltas = [
            merge.on_prefill_message(next(sides["p"])) if side == "p" else merge.on_decode_message(next(sides["d"]))  # type: ignore[arg-type]
            for side in order
        ]
        assert indices(deltas) == [0, 1, 2, 3], order
        ends = [delta for delta in deltas if delta and delta.finish_reason]
        assert [delta.finish_reason for delta in ends] == [FinishReason.STOP]
        assert merge.handoff is not None and merge.handoff.state is HandoffPhase.COMMITTED


def test_a_continued_answer_starts_at_the_client_s_next_token() -> None:
    merge = merger(expected_index=5)
    assert indices([merge.on_prefill_message(prefill_message(5)), merge.on_decode_message(decode_message(5, 6))]) == [
        5,
        6,
    ]


@pytest.mark.parametrize("seed", range(20))
def test_each_node_tells_its_tokens_in_order(seed: int) -> None:
    rng = random.Random(seed)
    merge, due = merger(), 0
    while due < 30:
        run = range(due, due + rng.randint(1, 4))
        assert indices([merge.on_decode_message(decode_message(*run))]) == list(run)
        due = run.stop
    for wrong in (due + 1, rng.randrange(due)):
        with pytest.raises(BrokenPeer, match=f"token {due} is missing: got {wrong}"):
            merge.on_decode_message(decode_message(wrong))


def alternative(token_id: int) -> decode_pb2.DecodeResponse:
    token = common_pb2.SampledToken(logprob=-0.5, top=[common_pb2.TopLogprob(token_id=token_id, logprob=-0.6)])
    return decode_pb2.DecodeResponse(tokens=[token])


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (decode_message(*range(9)), "9 tokens where at most 8 were asked for"),
        (decode_message(0, finish="bored"), "finish reason 'bored'"),
        (decode_message(0, finish="abort"), "finish reason 'abort'"),
        (decode_message(finish="stop"), "without a token"),
        (decode_pb2.DecodeResponse(choice=1, finish_reason="stop"), "no answer 1"),
        (decode_pb2.DecodeResponse(tokens=[common_pb2.SampledToken(token_id=200)]), "token 0 is 200"),
        (alternative(200), "alternatives to token 0"),
    ],
)
def test_what_cannot_be_part_of_the_answer_makes_no_sense(said: decode_pb2.DecodeResponse, complaint: str) -> None:
    merge = Merger([0], handoff_lifecycle("h"), end=8, vocab_size=200)
    with pytest.raises(BrokenPeer, match=complaint):
        merge.on_decode_message(said)
    assert merge.on_decode_message(alternative(199)) is not None


def test_the_end_of_an_answer_is_its_end() -> None:
    """Whatever else comes of it, such as the other node's first token."""
    merge = merger()
    assert indices([merge.on_decode_message(decode_message(0, finish="stop"))]) == [0]
    assert merge.on_decode_message(decode_message(1, finish="stop")) is None
    assert merge.on_prefill_message(prefill_message()) is None
    last = merge.on_prefill_message(report())
    assert last is not None and (last.tokens, last.finish_reason) == ((), FinishReason.STOP)


def test_nodes_that_do_not_agree_on_the_first_token_have_not_handed_it_over() -> None:
    merge = merger()
    merge.on_prefill_message(prefill_message())
    other = common_pb2.SampledToken(token_id=7)
    with pytest.raises(HandoffFailed, match="do not agree on the answer's first token"):
        merge.on_decode_message(decode_pb2.DecodeResponse(tokens=[other]))


def test_an_empty_message_is_a_failure_of_its_sender() -> None:
    """gRPC sends one where it has no memory for the bytes of a message: a token or the report was in it."""
    with pytest.raises(OutOfMemory, match="the prefill node sent an empty message"):
        merger().on_prefill_message(prefill_pb2.PrefillResponse())
    with pytest.raises(OutOfMemory, match="the decode node sent an empty message"):
        merger().on_decode_message(decode_pb2.DecodeResponse())


def test_the_prefill_call_matters_until_the_commit() -> None:
    with pytest.raises(NodeUnavailable):
        merger().on_prefill_end(NodeUnavailable("gone"))
    with pytest.raises(HandoffFailed, match="without a report"):
        merger().on_prefill_end(None)
    merge = merger()
    merge.on_decode_message(decode_message(0))
    assert merge.on_prefill_end(NodeUnavailable("gone")) is None
    last = merge.on_decode_message(decode_message(1, finish="length"))
    assert last is not None and last.finish_reason is FinishReason.LENGTH, "no report will come: do not wait for it"


def test_the_decode_call_matters_until_the_finish_reason() -> None:
    merge = merger()
    merge.on_decode_message(decode_message(0))
    with pytest.raises(HandoffFailed, match="without a finish reason"):
        merge.on_decode_end(None)
    merge.on_decode_message(decode_message(1, finish="stop"))
    merge.on_decode_end(NodeUnavailable("gone"))
    assert merge.waits_for_report


def test_a_late_report_is_waited_for_but_not_for_ever() -> None:
    merge = merger()
    assert merge.release() is None
    merge.on_decode_message(decode_message(0, finish="stop"))
    last = merge.release()
    assert last is not None and last.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_without_a_hand_off_the_prefill_node_gives_the_whole_answer(reason: FinishReason) -> None:
    for count in (1, 3):
        merge = merger(handoff=False)
        said = [prefill_message(index, finish=reason if index == count - 1 else "") for index in range(count)]
        deltas = [*map(merge.on_prefill_message, said), merge.on_prefill_message(report())]
        assert indices(deltas) == list(range(count))
        assert [delta.finish_reason for delta in deltas if delta and delta.finish_reason] == [reason]


def test_log_probabilities_of_a_prompt_are_read_where_they_are_needed() -> None:
    """Not on their way: that of a long prompt takes a second, in which no other answer goes on."""
    message = prefill_pb2.PrefillResponse(
        prompt_logprobs=common_pb2.PromptLogprobs(tokens=[common_pb2.SampledToken(index=1, token_id=7, logprob=-0.5)])
    )
    delta = Merger([0], handoff_lifecycle("h"), wants_prompt_logprobs=True).on_prefill_message(message)
    assert delta is not None and delta.prompt_logprobs is not None

    message.prompt_logprobs.tokens.add(index=2, token_id=8, logprob=-1.0)

    assert [token.token_id for token in delta.prompt_logprobs] == [7, 8]
    assert len(delta.prompt_logprobs) == 2 and SampledToken(1, 7, TokenLogprob(-0.5)) in delta.prompt_logprobs


def test_what_the_decode_node_measured_is_the_longest_answer_s() -> None:
    merge = Merger([0, 0], handoff_lifecycle("h"))
    merge.on_prefill_message(report())
    for choice, ms in enumerate((30.0, math.inf)):
        end = decode_message(0, finish="stop")
        end.choice, end.decode_ms, end.preemptions = choice, ms, choice
        merge.on_decode_message(end)
    assert (merge.decode_ms, merge.preemptions) == (30.0, 1)
