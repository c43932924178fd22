"""A request for an embedding: one node, no hand-off, and the same retries, deadlines and refusals as an answer."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conductor.api import Delta, InferenceRequest
from conductor.dispatch.merge import Merger
from mooncake.errors import BrokenPeer, DeadlineExceeded, InvalidRequest, NodeUnavailable, NotFinite
from mooncake.hashing import Chain
from mooncake.pooling import Pooling
from mooncake.rpc import common_pb2, prefill_pb2
from mooncake.rpc.convert import vector_to_wire
from mooncake.types import BlockEvent, FinishReason
from tests.conductor.conftest import states_of

PROMPT = [5, 6, 7, 8, 9]


def request_of(
    cluster: Any, prompt: list[int] = PROMPT, pooling: Pooling = Pooling.LAST, timeout_s: float = 20.0
) -> InferenceRequest:
    return replace(cluster.request(prompt, 1, timeout_s, temperature=0.0), pooling=pooling)


async def embed(cluster: Any, request: InferenceRequest) -> Delta:
    tokens, deltas = await cluster.generate(request)
    assert not tokens and deltas[-1].finish_reason is FinishReason.STOP
    np.testing.assert_array_equal(deltas[-1].pooled, states_of(request.tokens.tolist()))
    last: Delta = deltas[-1]
    return last


async def test_a_prefill_node_alone_embeds(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    last = await embed(cluster, request_of(cluster))
    assert (last.summary.prefill_node, last.summary.decode_node) == ("p0", "")
    assert last.summary.report.local_cached_tokens == 4
    asked = cluster.prefill[0].last_request
    assert (asked.pooling, asked.decode_address) == ("last", "")
    assert cluster.decode[0].calls == 0
    stats = cluster.core.dispatcher.stats
    assert (stats.finished, stats.output_tokens, stats.prompt_tokens) == (1, 0, 5)
    assert not stats.handoffs
    assert stats.recent_output_tokens.mean() is None, "it says nothing of the length of answers"
    await cluster.is_quiet()


async def test_it_needs_no_decode_node(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 0)
    await embed(cluster, request_of(cluster))


@pytest.mark.parametrize("error", [NodeUnavailable("draining"), NotFinite("no")])
async def test_a_failed_node_is_retried_elsewhere(start_cluster: Any, error: Exception) -> None:
    cluster = await start_cluster(2, 1)
    cluster.prefill[0].script.error = error
    last = await embed(cluster, request_of(cluster))
    assert (last.summary.prefill_node, last.summary.retries) == ("p1", 1)
    await cluster.is_quiet()


async def test_a_node_that_dies_midway_is_survived(start_cluster: Any) -> None:
    cluster = await start_cluster(2, 1)
    cluster.prefill[0].script.hang = True
    waiting = asyncio.create_task(embed(cluster, request_of(cluster)))
    await cluster.eventually(lambda: cluster.prefill[0].running == 1)
    await cluster.prefill[0].die()
    last = await waiting
    assert (last.summary.prefill_node, last.summary.retries) == ("p1", 1)


@pytest.mark.parametrize("said", [b"", b"abc", vector_to_wire(np.array([1, np.nan], np.float32))])
async def test_what_is_no_vector_is_not_passed_on(start_cluster: Any, said: bytes) -> None:
    cluster = await start_cluster(2, 1)
    cluster.prefill[0].script.pooled = said
    last = await embed(cluster, request_of(cluster))
    assert (last.summary.prefill_node, last.summary.retries) == ("p1", 1)
    await cluster.is_quiet()


async def test_a_node_that_answers_instead_is_not_believed(start_cluster: Any) -> None:
    """One of an older version does not know that states are wanted."""
    cluster = await start_cluster(1, 1)
    cluster.prefill[0].script.knows_no_pooling = True
    with pytest.raises(BrokenPeer, match="a token where hidden states were asked for"):
        await cluster.generate(request_of(cluster))
    with pytest.raises(BrokenPeer, match="nobody asked for"):
        Merger([0], None).on_prefill_message(prefill_pb2.PrefillResponse(pooled=b"abcd"))


async def test_what_the_node_refuses_is_not_retried(start_cluster: Any) -> None:
    cluster = await start_cluster(2, 1)
    for node in cluster.prefill:
        node.script.error = InvalidRequest("pipeline stages give no hidden states", "input")
    with pytest.raises(InvalidRequest, match="pipeline stages"):
        await cluster.generate(request_of(cluster))
    assert sum(node.calls for node in cluster.prefill) == 1


async def test_the_deadline_and_a_client_that_goes_away_end_it(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    cluster.prefill[0].script.hang = True
    with pytest.raises(DeadlineExceeded):
        await cluster.generate(request_of(cluster, timeout_s=0.3))
    await cluster.is_quiet()
    waiting = asyncio.create_task(cluster.generate(request_of(cluster)))
    await cluster.eventually(lambda: cluster.prefill[0].running == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await cluster.is_quiet()


async def test_a_mean_is_placed_as_uncached(start_cluster: Any) -> None:
    """All of its prompt is computed; the last token's state needs only what is not cached."""
    cluster = await start_cluster(1, 1)
    prompt = list(range(10, 30))
    keys = Chain.of("kv").keys(np.array(prompt, dtype=np.uint32), 4)
    cluster.prefill[0].events.append([BlockEvent(True, key) for key in keys[:3]])
    await cluster.eventually(lambda: cluster.core.index.num_blocks("p0") == 3)
    new_tokens: list[int] = []
    cluster.core.dispatcher.placer.on_arrival.append(lambda _, placement, now: new_tokens.append(placement.new_tokens))
    for pooling in Pooling:
        await embed(cluster, request_of(cluster, prompt, pooling))
    assert new_tokens == [20 - 3 * 4, 20]


def test_a_report_that_comes_later_changes_nothing() -> None:
    merge = Merger([0], None, wants_pooled=True)
    delta = merge.on_prefill_message(prefill_pb2.PrefillResponse(pooled=vector_to_wire(np.ones(3, np.float32))))
    assert delta is not None and delta.pooled is not None and merge.is_prefilled
    assert merge.on_prefill_message(prefill_pb2.PrefillResponse(report=common_pb2.PrefillReport())) is None
    assert merge.on_prefill_end(None) is None
