"""What the core tells of each attempt at a request, to whoever asks: when, where, what was predicted, how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from conductor.api import AttemptRecord
from conductor.placement.view_keeper import COSTS_REFRESH_S
from mooncake.errors import NodeUnavailable, NotFinite

PROMPT = [5, 6, 7, 8, 9]


async def records(cluster: Any, max_tokens: int = 8, **sampling: Any) -> list[AttemptRecord]:
    told: list[AttemptRecord] = []
    request = replace(cluster.request(PROMPT, max_tokens, **sampling), attempts=told)
    assert [delta async for delta in cluster.core.dispatcher.generate(request)]
    return told


def times(record: AttemptRecord) -> Sequence[float]:
    return record.asked_at, record.placing_at, record.called_at, record.first_token_at, record.ended_at


async def test_an_attempt_that_went_well(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    began_at = cluster.core.clock()
    [record] = await records(cluster)
    assert all(before <= after for before, after in pairwise([began_at, *times(record), cluster.core.clock()]))
    assert (record.request_id, record.prefill_node, record.decode_node) == ("r", "p0", "d0")
    assert (record.handoff, record.error) == ("committed", None)
    assert record.report is not None and record.report.transport == "shm"
    assert record.predicted_ms == {}, "nobody knows yet"


async def test_what_was_predicted_is_told_with_what_came_true(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    cluster.core.costs.observe_prefill("p0", 1000, 0, 1000.0)
    await asyncio.sleep(2 * COSTS_REFRESH_S)  # until predictions rest on it
    [record] = await records(cluster)
    assert record.predicted_ms["prefill_ms"] > 0
    assert set(record.predicted_ms) == {"queue_ms", "fetch_ms", "prefill_ms", "handoff_ms", "step_ms"}


async def test_a_retry_is_an_attempt_of_its_own(start_cluster: Any) -> None:
    cluster = await start_cluster(2, 2)
    for node in cluster.decode:
        node.script.error, node.script.tokens_first = NotFinite("nan"), 2
    told: list[AttemptRecord] = []
    with pytest.raises(NotFinite):
        await cluster.generate(replace(cluster.request(PROMPT), attempts=told))
    first, second = told
    assert isinstance(first.error, NotFinite) and isinstance(second.error, NotFinite)
    assert first.handoff == "committed" and first.ended_at <= second.asked_at
    assert {first.decode_node, second.decode_node} == {"d0", "d1"}
    assert first.first_token_at < second.first_token_at


async def test_a_node_that_is_gone_before_it_computes_tells_nothing(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 2)
    cluster.prefill[0].script.loses = (cluster.decode[0].address,)
    told = await records(cluster) + await records(cluster)  # one of them comes to the pair without a way
    lost = [record for record in told if record.error is not None]
    assert lost
    for record in lost:
        assert isinstance(record.error, NodeUnavailable)
        assert (record.decode_node, record.handoff, record.report, record.first_token_at) == ("d0", "failed", None, 0)


async def test_answers_that_continue_separately_are_told_by_their_numbers(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    script = cluster.decode[0].script
    script.error, script.tokens_first, script.times = NotFinite("nan"), 2, 1
    first, *others = await records(cluster, n=2)
    assert first.request_id == "r" and {record.request_id for record in others} == {"r#0", "r#1"}


async def test_whoever_stops_reading_ends_the_attempt(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    cluster.decode[0].script.token_s = 0.01
    told: list[AttemptRecord] = []
    deltas = cluster.core.dispatcher.generate(replace(cluster.request(PROMPT, 100), attempts=told))
    await anext(deltas)
    await deltas.aclose()
    [record] = told
    assert (record.error, record.decode_ms) == (None, 0)
    await cluster.is_quiet()
