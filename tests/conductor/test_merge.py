"""Two streams become one without gap or repeat, whatever order they speak in. Pure."""

import itertools
import random

import pytest

from conductor.api import Delta
from conductor.lifecycle import HandoffState, handoff_lifecycle
from conductor.merge import Merger
from mooncake.errors import HandoffFailed, InternalError, NodeUnavailable
from mooncake.rpc import common_pb2, decode_pb2, prefill_pb2
from mooncake.types import FinishReason


def first(index: int = 0, token_id: int = 100, finish: str = "") -> prefill_pb2.PrefillResponse:
    token = common_pb2.SampledToken(index=index, token_id=token_id)
    return prefill_pb2.PrefillResponse(first_token=token, finish_reason=finish)


def report() -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(report=common_pb2.PrefillReport(local_cached_tokens=3))


def says(*indices: int, finish: str = "") -> decode_pb2.DecodeResponse:
    tokens = [common_pb2.SampledToken(index=index, token_id=100 + index) for index in indices]
    return decode_pb2.DecodeResponse(tokens=tokens, finish_reason=finish)


def merger(expected_index: int = 0, handoff: bool = True) -> Merger:
    return Merger([expected_index], handoff_lifecycle("h") if handoff else None)


def indices(deltas: list[Delta | None]) -> list[int]:
    return [token.index for delta in deltas if delta for token in delta.tokens]


def test_every_interleaving_gives_the_same_stream() -> None:
    prefill = [first(), report()]
    decode = [says(0), says(1, 2), says(3, finish="stop")]
    for order in set(itertools.permutations("pp" + "ddd")):
        merge, sides = merger(), {"p": iter(prefill), "d": iter(decode)}
        deltas = [
            merge.prefill_said(next(sides["p"])) if side == "p" else merge.decode_said(next(sides["d"]))  # type: ignore[arg-type]
            for side in order
        ]
        assert indices(deltas) == [0, 1, 2, 3], order
        ends = [delta for delta in deltas if delta and delta.finish_reason]
        assert [delta.finish_reason for delta in ends] == [FinishReason.STOP]
        assert merge.handoff is not None and merge.handoff.state is HandoffState.COMMITTED


def test_a_continued_answer_starts_where_the_client_is() -> None:
    merge = merger(expected_index=5)
    assert indices([merge.prefill_said(first(5)), merge.decode_said(says(5, 6))]) == [5, 6]


@pytest.mark.parametrize("seed", range(20))
def test_repeats_are_dropped_and_gaps_are_our_bug(seed: int) -> None:
    rng = random.Random(seed)
    merge, expected = merger(), 0
    while expected < 30:
        start = rng.randint(0, expected)
        run = list(range(start, expected + rng.randint(0, 3) + 1))
        assert indices([merge.decode_said(says(*run))]) == [i for i in run if i >= expected]
        expected = max(expected, run[-1] + 1)
    with pytest.raises(InternalError, match=f"token {expected} is missing"):
        merge.decode_said(says(expected + 1))


def test_prefill_matters_until_the_commit() -> None:
    with pytest.raises(NodeUnavailable):
        merger().prefill_ended(NodeUnavailable("gone"))
    with pytest.raises(HandoffFailed, match="without a report"):
        merger().prefill_ended(None)
    merge = merger()
    merge.decode_said(says(0))
    assert merge.prefill_ended(NodeUnavailable("gone")) is None
    last = merge.decode_said(says(1, finish="length"))
    assert last is not None and last.finish_reason is FinishReason.LENGTH, "no report will come: do not wait for it"


def test_decode_matters_to_its_last_word() -> None:
    merge = merger()
    merge.decode_said(says(0))
    with pytest.raises(HandoffFailed, match="without a finish reason"):
        merge.decode_ended(None)
    merge.decode_said(says(1, finish="stop"))
    merge.decode_ended(NodeUnavailable("gone"))
    assert merge.waits_for_report


def test_a_late_report_is_waited_for_and_then_not() -> None:
    merge = merger()
    assert merge.report_is_late() is None
    merge.decode_said(says(0, finish="stop"))
    last = merge.report_is_late()
    assert last is not None and last.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_without_a_hand_off_the_prefill_node_gives_the_whole_answer(reason: FinishReason) -> None:
    for count in (1, 3):
        merge = merger(handoff=False)
        said = [first(index, finish=reason if index == count - 1 else "") for index in range(count)]
        deltas = [*map(merge.prefill_said, said), merge.prefill_said(report())]
        assert indices(deltas) == list(range(count))
        assert [delta.finish_reason for delta in deltas if delta and delta.finish_reason] == [reason]


def test_a_finish_reason_that_does_not_exist_is_our_bug() -> None:
    with pytest.raises(InternalError, match="bored"):
        merger().decode_said(says(0, finish="bored"))
