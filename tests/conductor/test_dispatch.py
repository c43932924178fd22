"""One request's progress against nodes that work, fail, hang, die and come late."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from nonsense import Nonsense

from conductor.api import InferenceRequest
from conductor.dispatch.dispatcher import DEMAND_EVERY_S
from conductor.placement.view_keeper import COSTS_REFRESH_S
from conductor.registry import Health, NodeState
from mooncake.errors import (
    BrokenPeer,
    ContextTooLong,
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    KVLoadFailed,
    MooncakeError,
    NodeUnavailable,
    NotFinite,
    OutOfBlocks,
    Overloaded,
)
from mooncake.hashing import Chain, chain_seed, extend_chain
from mooncake.sampling import SamplingParams
from mooncake.types import BlockEvent, FinishReason

PROMPT = [5, 6, 7, 8, 9]


async def test_an_answer_comes_through_both_nodes(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 8))
    assert tokens == cluster.answer(PROMPT, 8)
    last = deltas[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert (last.summary.prefill_node, last.summary.decode_node) == ("p0", "d0")
    assert last.summary.report.transport == "shm"
    assert last.summary.retries == 0
    stats = cluster.core.dispatcher.stats
    assert (stats.requests, stats.finished, stats.failed, stats.retries) == (1, 1, 0, 0)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.block_queries, stats.block_hits) == (5, 4, 1, 1)
    assert dict(stats.handoffs) == {"committed": 1}
    await cluster.is_quiet()


async def test_both_nodes_get_the_same_hand_off(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    await cluster.generate(cluster.request(PROMPT, 3))
    await cluster.generate(cluster.request(PROMPT, 3))
    prefill, decode = cluster.prefill[0].last_request, cluster.decode[0].last_request
    assert prefill.handoff_id == decode.handoff_id
    assert prefill.epoch == decode.epoch
    assert prefill.epoch >> 32 == cluster.core.incarnation & 0xFFFF_FFFF
    assert prefill.epoch & 0xFFFF_FFFF == 2, "it counts up"
    assert prefill.decode_address == cluster.decode[0].address
    assert decode.expected_ms == 0, "nobody knows"
    cluster.core.costs.observe_prefill("p0", 1000, 0, 1000.0)
    await asyncio.sleep(2 * COSTS_REFRESH_S)  # until predictions rest on it
    await cluster.generate(cluster.request(PROMPT, 3))
    assert cluster.decode[0].last_request.expected_ms > 0


async def test_one_token_needs_no_decode_node(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 1))
    assert tokens == cluster.answer(PROMPT, 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert deltas[-1].summary.decode_node == ""
    assert cluster.decode[0].calls == 0
    await cluster.is_quiet()


async def test_one_token_that_ends_the_answer_is_a_stop(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    cluster.prefill[0].script.answer_eos_at = 0
    _, deltas = await cluster.generate(cluster.request(PROMPT, 1))
    assert deltas[-1].finish_reason is FinishReason.STOP
    _, deltas = await cluster.generate(cluster.request(PROMPT, 1, ignore_eos=True))
    assert deltas[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("at", [0, 3])
async def test_the_end_of_sequence_ends_the_stream(start_cluster: Any, at: int) -> None:
    cluster = await start_cluster(1, 1)
    for node in cluster.nodes:
        node.script.answer_eos_at = at
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 8))
    assert len(tokens) == at + 1
    assert deltas[-1].finish_reason is FinishReason.STOP
    await cluster.is_quiet()


@pytest.mark.parametrize(
    "error",
    [KVLoadFailed("no"), HandoffFailed("no"), NodeUnavailable("draining"), OutOfBlocks("no"), NotFinite("no")],
)
async def test_a_failed_prefill_is_retried_elsewhere(start_cluster: Any, error: MooncakeError) -> None:
    cluster = await start_cluster(2, 2)
    cluster.prefill[0].script.error = error
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 8))
    assert tokens == cluster.answer(PROMPT, 8)
    assert (deltas[-1].summary.prefill_node, deltas[-1].summary.retries) == ("p1", 1)
    stats = cluster.core.dispatcher.stats
    assert (stats.retries, stats.failed) == (1, 0)
    assert dict(stats.handoffs) == {"failed": 1, "committed": 1}
    await cluster.is_quiet()


@pytest.mark.parametrize("after", [1, 3])
async def test_a_decode_node_that_fails_midway_loses_and_repeats_no_token(start_cluster: Any, after: int) -> None:
    cluster = await start_cluster(2, 2)
    script = cluster.decode[0].script
    script.error, script.tokens_first = HandoffFailed("engine broke"), after
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 8))
    assert tokens == cluster.answer(PROMPT, 8)
    assert deltas[-1].summary.decode_node == "d1"
    second = cluster.decode[1].last_request
    assert second.num_prompt_tokens == len(PROMPT)
    sent = np.frombuffer(second.tokens, dtype="<u4").tolist()
    assert sent == PROMPT + cluster.answer(PROMPT, 8)[: 1 + after]
    await cluster.is_quiet()


async def test_a_retry_with_one_token_left_needs_no_decode_node(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    script = cluster.decode[0].script
    script.error, script.tokens_first = HandoffFailed("engine broke"), 2
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 4))
    assert tokens == cluster.answer(PROMPT, 4)
    assert (deltas[-1].finish_reason, cluster.decode[0].calls) == (FinishReason.LENGTH, 1)


async def test_an_answer_whose_end_was_lost_is_not_continued(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    cluster.decode[0].script.cut_finish = True
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 4))
    assert tokens == cluster.answer(PROMPT, 4)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert cluster.prefill[0].calls == 1
    await cluster.is_quiet()


async def test_the_same_pair_is_retried_when_it_is_alive_and_the_only_one(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    script = cluster.decode[0].script
    script.error, script.tokens_first, script.times = HandoffFailed("checksum"), 2, 1
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 8))
    assert tokens == cluster.answer(PROMPT, 8)
    assert deltas[-1].summary.retries == 1
    await cluster.is_quiet()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_suspect_is_tried_where_all_others_have_failed_the_request(start_cluster: Any, role: str) -> None:
    """As where two machines have lost each other: each is in order for all the rest of the cluster."""
    cluster = await start_cluster(2, 2)
    failing, suspect = getattr(cluster, role)
    failing.script.error = HandoffFailed("the other node cannot be reached")
    cluster.core.registry.set_health(suspect.node_id, Health.SUSPECTED, "its steps are slow")
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 8))
    assert tokens == cluster.answer(PROMPT, 8)
    assert deltas[-1].summary.retries == 1
    assert failing.calls == suspect.calls == 1
    await cluster.is_quiet()


async def test_nodes_that_do_not_reach_each_other_are_not_used_together_for_a_while(
    start_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await start_cluster(2, 2)
    for prefill in cluster.prefill:
        prefill.script.loses = (cluster.decode[0].address,)
    for number in range(8):
        prompt = [*PROMPT, number]
        tokens, _ = await cluster.generate(cluster.request(prompt, 8))
        assert tokens == cluster.answer(prompt, 8)
    stats = cluster.core.dispatcher.stats
    assert 0 < stats.retries <= 2 * 2, "two for each pair"
    assert sum("are not used together for a while" in line for line in caplog.messages) == stats.retries // 2
    await cluster.is_quiet()


async def test_nodes_that_do_not_reach_each_other_are_used_together_where_there_is_nobody_else(
    start_cluster: Any,
) -> None:
    cluster = await start_cluster(1, 1)
    script = cluster.prefill[0].script
    script.loses = (cluster.decode[0].address,)
    for _ in range(2):
        with pytest.raises(NodeUnavailable, match="decode node: failed to connect"):
            await cluster.generate(cluster.request(PROMPT, 8))
    script.loses = ()
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 8))
    assert tokens == cluster.answer(PROMPT, 8) and deltas[-1].summary.retries == 0
    await cluster.is_quiet()


async def test_when_every_attempt_fails_the_caller_gets_the_typed_error(start_cluster: Any) -> None:
    cluster = await start_cluster(2, 2)
    for node in cluster.prefill:
        node.script.error = KVLoadFailed("the pool is broken")
    with pytest.raises(KVLoadFailed, match="the pool is broken"):
        await cluster.generate(cluster.request())
    assert sum(node.calls for node in cluster.prefill) == 2
    assert cluster.core.dispatcher.stats.failures == {KVLoadFailed.code: 1}
    await cluster.is_quiet()


async def test_an_invalid_request_is_not_retried(start_cluster: Any) -> None:
    cluster = await start_cluster(2, 2)
    cluster.prefill[0].script.error = ContextTooLong("5 tokens do not fit")
    with pytest.raises(ContextTooLong, match="do not fit"):
        await cluster.generate(cluster.request())
    assert sum(node.calls for node in cluster.prefill) == 1
    await cluster.is_quiet()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_node_that_dies_midway_is_survived_and_gets_no_more_work(start_cluster: Any, role: str) -> None:
    cluster = await start_cluster(2, 2, node_timeout_s=30.0)
    victim = getattr(cluster, role)[0]
    victim.script.token_s = 0.02
    if role == "prefill":
        victim.script.gate = asyncio.Event()
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 20)))
    if role == "prefill":
        await cluster.eventually(lambda: victim.running == 1)
    else:
        await cluster.eventually(lambda: cluster.core.dispatcher.stats.output_tokens > 3)
    await victim.die()
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 20)
    assert getattr(deltas[-1].summary, f"{role}_node") != victim.node_id

    calls = victim.calls
    await asyncio.gather(*(cluster.generate(cluster.request()) for _ in range(4)))
    assert victim.calls == calls, "unreachable: no work at once, long before its heartbeats time out"
    await cluster.is_quiet()


async def test_nodes_that_die_together_cost_one_retry(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 3, node_timeout_s=30.0)
    for victim in cluster.decode:
        victim.script.token_s = 0.02
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 20)))
    await cluster.eventually(lambda: cluster.core.dispatcher.stats.output_tokens > 3)
    there = next(number for number, node in enumerate(cluster.decode) if node.running)
    await asyncio.gather(*(victim.die() for victim in cluster.decode))
    await cluster.eventually(lambda: cluster.core.waiting_for() == ["decode"])
    await cluster.restart_decode(there)
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 20)
    assert deltas[-1].summary.retries == 1
    assert cluster.core.dispatcher.stats.failed_attempts == {"unavailable": 3}
    await cluster.is_quiet()


@pytest.mark.parametrize("told", [HandoffFailed("no blocks"), NodeUnavailable("decode node: Socket closed")])
async def test_a_hand_off_whose_decode_node_is_gone_is_that_nodes_loss_whoever_tells_of_it_first(
    start_cluster: Any, told: MooncakeError
) -> None:
    cluster = await start_cluster(1, 2, node_timeout_s=30.0)
    prefill = cluster.prefill[0].script
    prefill.gate, prefill.error = asyncio.Event(), told
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 8)))
    await cluster.eventually(lambda: any(node.running for node in cluster.decode) and cluster.prefill[0].running > 0)
    victim = next(node for node in cluster.decode if node.running)
    prefill.gate.set()
    await cluster.eventually(lambda: not cluster.prefill[0].running)  # it has told what it knows
    prefill.error = None
    await victim.die()
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 8)
    assert deltas[-1].summary.retries == 1
    assert cluster.core.dispatcher.stats.failed_attempts == {"unavailable": 1}
    await cluster.is_quiet()


async def test_a_node_with_heartbeats_that_cannot_be_reached_ends_the_request_soon(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1, node_wait_s=60)
    cluster.prefill[0].script.gate = asyncio.Event()  # it would notice, too, and whoever is first is believed
    await cluster.decode[0].relay.kill()  # its heartbeats take another way
    with pytest.raises(NodeUnavailable, match="d0"):
        await cluster.generate(cluster.request(PROMPT, 8, timeout_s=60))
    assert cluster.core.dispatcher.stats.failed_attempts == {"unavailable": 3}
    await cluster.is_quiet()


async def test_requests_of_a_node_that_times_out_are_retried_elsewhere(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 2, node_timeout_s=0.5)
    victim = cluster.decode[0]
    victim.script.hang = True
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 8)))
    await cluster.eventually(lambda: victim.running == 1)
    victim.membership._task.cancel()  # its connections stay up, its heartbeat stops
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 8)
    assert deltas[-1].summary.decode_node == "d1"
    await cluster.is_quiet()


async def test_a_node_that_restarts_under_its_id_gets_its_own_requests_again(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    cluster.decode[0].script.hang = True
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 8)))
    await cluster.eventually(lambda: cluster.decode[0].running == 1)
    await cluster.restart_decode(0)
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 8)
    assert (deltas[-1].summary.decode_node, deltas[-1].summary.retries) == ("d0", 1)
    await cluster.is_quiet()


async def test_a_dead_node_takes_nothing_from_another_that_has_its_address(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1, node_timeout_s=0.5)
    node = cluster.decode[0]
    node.script.token_s = 0.02
    here = cluster.core.registry.get("d0").info
    cluster.core.register(replace(here, node_id="decode-123", incarnation=99))  # is not heard of again
    cluster.core.registry.call_failed(replace(here, node_id="decode-123", incarnation=99), cluster.core.clock())
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 60)))
    await cluster.eventually(lambda: cluster.core.registry.get("decode-123") is None)
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 60)
    assert deltas[-1].summary.retries == 0
    await cluster.is_quiet()


async def test_nodes_that_drain_one_after_the_other_cost_no_retry(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 3, retries=0)
    for node in cluster.decode:
        node.script.token_s = 0.01
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 60)))
    for number in range(3):
        told = cluster.core.dispatcher.stats.output_tokens
        await cluster.eventually(lambda told=told: cluster.core.dispatcher.stats.output_tokens > told + 3)
        await cluster.decode[number].leave()
        await cluster.restart_decode(number)
        cluster.decode[number].script.token_s = 0.01
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 60)
    assert deltas[-1].summary.retries == 0
    assert cluster.core.dispatcher.stats.failed_attempts.total() >= 2
    await cluster.is_quiet()


async def test_a_failure_that_the_other_node_reports_of_a_draining_one_costs_no_retry(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 2, retries=0)
    cluster.prefill[0].script.gate = gate = asyncio.Event()
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 8)))
    await cluster.eventually(lambda: cluster.prefill[0].running == 1 and any(node.running for node in cluster.decode))
    leaving = next(node for node in cluster.decode if node.running)
    leaving.membership.draining = True
    await leaving.membership.announce()
    leaving.script.error = HandoffFailed("it stops")
    leaving.script.tokens_first = 1
    gate.set()
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 8)
    assert deltas[-1].summary.retries == 0
    await cluster.is_quiet()


async def test_an_uncounted_retry_is_not_a_new_request(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 2, retries=0, ttft_limit_ms=60_000)
    dispatcher, arrivals = cluster.core.dispatcher, []
    dispatcher.placer.on_arrival.append(lambda query, placement, now: arrivals.append(placement.decode.node_id))
    cluster.prefill[0].script.gate = gate = asyncio.Event()  # it would notice, too
    await cluster.decode[0].relay.kill()  # its heartbeats take another way
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 8)))
    await cluster.eventually(lambda: dispatcher.stats.failed_attempts.total() == 1)
    gate.set()
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 8)
    assert (deltas[-1].summary.decode_node, deltas[-1].summary.retries) == ("d1", 0)
    assert arrivals == ["d0"], "whoever counts demand hears of it once"
    assert dispatcher.stats.admission.admitted == 1, "who was let in once may try again"
    await cluster.is_quiet()


async def test_an_answer_that_has_begun_is_not_refused_by_prediction(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 2, retries=0)
    for node in cluster.decode:
        node.script.token_s = 0.02
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 40, timeout_s=20)))
    await cluster.eventually(lambda: cluster.core.dispatcher.stats.output_tokens > 3)
    for size in (10, 100, 1000):
        cluster.core.costs.observe_prefill("p0", size, 0, 60_000.0)
    await next(node for node in cluster.decode if node.running).leave()
    tokens, _ = await answer
    assert tokens == cluster.answer(PROMPT, 40)
    await cluster.is_quiet()


async def test_the_node_wait_begins_when_the_last_node_is_gone_not_when_it_drains(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1, node_wait_s=0.4, retries=0)
    last = cluster.decode[0]
    last.membership.draining = True
    await last.membership.announce()
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 8)))
    await asyncio.sleep(0.8)
    assert not answer.done()
    leaves_at = time.monotonic()
    await last.leave()
    with pytest.raises(NodeUnavailable, match="no decode node"):
        await answer
    assert time.monotonic() - leaves_at >= 0.4
    assert last.calls == 0
    await cluster.is_quiet()


async def test_an_answer_continues_when_its_only_node_comes_back(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    victim = cluster.decode[0]
    victim.script.token_s = 0.02
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 30)))
    await cluster.eventually(lambda: cluster.core.dispatcher.stats.output_tokens > 3)
    await victim.die()
    meanwhile = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 4)))
    await cluster.eventually(lambda: cluster.core.waiting_for() == ["decode"])
    await cluster.restart_decode(0)
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 30)
    assert deltas[-1].summary.retries == 1
    assert (await meanwhile)[0] == cluster.answer(PROMPT, 4)
    await cluster.is_quiet()


async def test_a_loss_that_the_other_node_saw_first_is_one_failure_not_two(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    victim = cluster.decode[0]
    victim.script.error = HandoffFailed("the other one went away")
    victim.script.dies_at_call = 2  # the try after it finds out which node it was
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 8)))
    await cluster.eventually(lambda: cluster.core.waiting_for() == ["decode"])
    await cluster.restart_decode(0)
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 8)
    assert deltas[-1].summary.retries == 1
    assert cluster.core.dispatcher.stats.failed_attempts == {"handoff_failed": 1, "unavailable": 1}
    await cluster.is_quiet()


async def test_a_node_whose_connection_broke_is_used_again_after_a_heartbeat(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    node = cluster.decode[0]
    node.script.token_s = 0.02
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 30)))
    await cluster.eventually(lambda: cluster.core.dispatcher.stats.output_tokens > 3)
    await node.relay.cut()
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 30)
    assert deltas[-1].summary.retries == 1
    await cluster.is_quiet()


async def test_a_client_that_reads_late_finds_a_node_that_is_long_back(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    node = cluster.decode[0]
    node.script.token_s = 0.02

    def state() -> NodeState:
        return cluster.core.registry.get("d0").state

    stream = cluster.core.dispatcher.generate(cluster.request(PROMPT, 30))
    deltas = [await anext(stream) for _ in range(3)]
    await node.relay.cut()
    await cluster.eventually(lambda: state() is NodeState.SUSPECT)
    await cluster.eventually(lambda: state() is NodeState.LIVE)
    await asyncio.sleep(0.3)  # whoever waited for it has been told
    async with asyncio.timeout(5):
        deltas += [delta async for delta in stream]
    assert [token.token_id for delta in deltas for token in delta.tokens] == cluster.answer(PROMPT, 30)
    await cluster.is_quiet()


async def test_without_another_node_its_death_is_a_typed_error(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1, node_wait_s=0)
    victim = cluster.decode[0]
    victim.script.token_s = 0.02
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 50)))
    await cluster.eventually(lambda: cluster.core.dispatcher.stats.output_tokens > 3)
    await victim.die()
    with pytest.raises(NodeUnavailable, match="d0"):
        await answer
    await cluster.is_quiet()


async def test_a_prefill_node_that_dies_after_the_commit_is_harmless(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    cluster.prefill[0].script.silent_report = True
    cluster.decode[0].script.token_s = 0.02
    answer = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 15)))
    await cluster.eventually(lambda: cluster.core.dispatcher.stats.output_tokens > 2)
    await cluster.prefill[0].die()
    tokens, deltas = await answer
    assert tokens == cluster.answer(PROMPT, 15)
    assert deltas[-1].summary.retries == 0
    await cluster.is_quiet()


async def test_a_missing_report_does_not_hold_the_answer_back(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    cluster.prefill[0].script.silent_report = True
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 4))
    assert tokens == cluster.answer(PROMPT, 4)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    await cluster.is_quiet()


async def test_what_was_reused_of_a_prompt_is_told_with_the_first_token(start_cluster: Any) -> None:
    """A stop string may be there already, and then nobody waits for the report that comes after the hand-off."""
    cluster = await start_cluster(1, 1)
    cluster.prefill[0].script.silent_report = True
    deltas = cluster.core.dispatcher.generate(cluster.request(PROMPT, 500))
    first = await anext(deltas)
    await deltas.aclose()
    assert first.tokens and first.summary.report.cached_tokens == 4
    stats = cluster.core.dispatcher.stats
    assert (stats.prompt_tokens, stats.cached_tokens) == (5, 4)
    await cluster.is_quiet()


@pytest.mark.parametrize("phase", ["queued at prefill", "decoding"])
async def test_a_client_that_goes_away_frees_both_nodes_within_a_second(start_cluster: Any, phase: str) -> None:
    cluster = await start_cluster(1, 1)
    cluster.decode[0].script.token_s = 0.02
    if phase == "queued at prefill":
        cluster.prefill[0].script.hang = True
        waiting = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 500)))
        await cluster.eventually(lambda: all(node.running == 1 for node in cluster.nodes))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        stream = cluster.core.dispatcher.generate(cluster.request(PROMPT, 500))
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
    await cluster.is_quiet()
    assert cluster.core.dispatcher.stats.cancelled == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_deadline_ends_a_request_on_nodes_that_hang(start_cluster: Any, role: str) -> None:
    cluster = await start_cluster(1, 1)
    getattr(cluster, role)[0].script.hang = True
    started = cluster.core.clock()
    with pytest.raises(DeadlineExceeded):
        await cluster.generate(cluster.request(timeout_s=0.4))
    assert 0.3 < cluster.core.clock() - started < 1.4
    assert cluster.core.dispatcher.stats.handoffs == {"expired": 1}
    await cluster.is_quiet()


async def test_a_deadline_in_the_past_costs_nothing(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    with pytest.raises(DeadlineExceeded):
        await cluster.generate(cluster.request(timeout_s=-1.0))
    assert [node.calls for node in cluster.nodes] == [0, 0]
    await cluster.is_quiet()


async def test_a_hand_off_that_is_never_committed_expires_and_is_retried_elsewhere(start_cluster: Any) -> None:
    cluster = await start_cluster(2, 2, handoff_timeout_s=0.3)
    cluster.decode[0].script.hang = True
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 5))
    assert tokens == cluster.answer(PROMPT, 5)
    assert (deltas[-1].summary.decode_node, deltas[-1].summary.retries) == ("d1", 1)
    assert cluster.core.dispatcher.stats.handoffs == {"expired": 1, "committed": 1}
    await cluster.is_quiet()


async def test_more_requests_than_allowed_are_refused_with_a_retry_time(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1, max_requests=2)
    arrivals: list[float] = []
    cluster.core.dispatcher.placer.on_arrival.append(
        lambda query, placement, now: arrivals.append(query.facts.num_tokens)
    )
    cluster.prefill[0].script.gate = gate = asyncio.Event()
    running = [asyncio.create_task(cluster.generate(cluster.request())) for _ in range(2)]
    await cluster.eventually(lambda: cluster.prefill[0].running == 2)
    with pytest.raises(Overloaded) as refused:
        await cluster.generate(cluster.request())
    assert refused.value.retry_after_s > 0
    assert arrivals == [len(PROMPT)] * 3, "it would have been work like the others"
    gate.set()
    await asyncio.gather(*running)
    await cluster.generate(cluster.request())
    await cluster.is_quiet()


async def test_of_requests_without_room_only_a_few_are_let_through_to_be_counted_as_demand(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1, max_requests=1)
    dispatcher = cluster.core.dispatcher
    for _ in range(100):
        dispatcher.check_room()
    assert dispatcher.stats.requests == 0, "there is room"

    cluster.prefill[0].script.gate = gate = asyncio.Event()
    running = asyncio.create_task(cluster.generate(cluster.request()))
    await cluster.eventually(lambda: cluster.prefill[0].running == 1)
    begun, refusals = time.monotonic(), []
    for _ in range(1000):
        try:
            dispatcher.check_room()
        except Overloaded as refusal:
            refusals.append(refusal)
    most = 1 + (time.monotonic() - begun) / DEMAND_EVERY_S
    assert 1 <= 1000 - len(refusals) <= most
    assert all(refusal.retry_after_s > 0 for refusal in refusals)
    assert dispatcher.stats.requests == 1 + len(refusals), "a refused request is one that came"
    assert dispatcher.stats.failures == {"overloaded": len(refusals)}

    gate.set()
    await running
    dispatcher.check_room()
    await cluster.is_quiet()


async def test_a_request_refused_for_its_deadline_still_counts_as_demand(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    arrivals: list[float] = []
    cluster.core.dispatcher.placer.on_arrival.append(
        lambda query, placement, now: arrivals.append(placement.new_tokens)
    )
    for size in (10, 100, 1000):
        cluster.core.costs.observe_prefill("p0", size, 0, 60_000.0)
    with pytest.raises(Overloaded, match="after the request's deadline"):
        await cluster.generate(cluster.request(PROMPT, 8, timeout_s=5))
    assert arrivals == [len(PROMPT)]
    assert cluster.prefill[0].calls == 0
    await cluster.is_quiet()


async def test_no_node_no_service(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 0, node_wait_s=0)
    with pytest.raises(NodeUnavailable, match="no decode node"):
        await cluster.generate(cluster.request())
    assert cluster.core.waiting_for() == ["decode"]
    await cluster.is_quiet()


async def test_an_empty_prompt_is_refused(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    request = InferenceRequest("r", np.array([], dtype=np.uint32), SamplingParams(), cluster.core.clock() + 5)
    with pytest.raises(InvalidRequest):
        await cluster.generate(request)


async def test_prompt_logprobs_too_large_for_a_message_are_refused_at_once(start_cluster: Any) -> None:
    """Such a prompt was once computed twice, and the client was told to retry."""
    cluster = await start_cluster(1, 1)
    with pytest.raises(InvalidRequest, match="prompts of at most 45100 tokens, this one has 46000"):
        await cluster.generate(cluster.request([5] * 46_000, 8, prompt_logprobs=20))
    assert cluster.prefill[0].calls == 0
    await cluster.is_quiet()


async def test_a_request_too_large_for_a_message_leaves_nothing_booked(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1, ttft_limit_ms=60_000)
    with pytest.raises(ValueError, match="range"):  # front doors check it
        await cluster.generate(replace(cluster.request(PROMPT, 8), priority=1 << 40))
    assert len(cluster.core.dispatcher.admission_queue.admission.inflight) == 0
    await cluster.is_quiet()


@pytest.mark.parametrize("nonsense", Nonsense)
async def test_an_answer_goes_on_elsewhere_where_a_decode_node_makes_no_sense(
    start_cluster: Any, nonsense: Nonsense
) -> None:
    cluster = await start_cluster(2, 2)
    cluster.decode[0].script.nonsense = nonsense
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 8))
    assert tokens == cluster.answer(PROMPT, 8)
    summary = deltas[-1].summary
    assert (summary.prefill_node, summary.decode_node, summary.retries) == ("p0", "d1", 1), "only one is to blame"
    await cluster.is_quiet()


async def test_more_tokens_than_were_asked_for_are_not_passed_on(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    cluster.decode[0].script.is_endless = True
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 8))
    assert tokens == cluster.answer(PROMPT, 8)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    await cluster.is_quiet()


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_a_prompt_is_computed_elsewhere_where_a_prefill_node_makes_no_sense(
    start_cluster: Any, max_tokens: int
) -> None:
    cluster = await start_cluster(2, 2)
    cluster.prefill[0].script.nonsense = Nonsense.VOCABULARY
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, max_tokens))
    assert tokens == cluster.answer(PROMPT, max_tokens)
    assert (deltas[-1].summary.prefill_node, deltas[-1].summary.retries) == ("p1", 1)
    await cluster.is_quiet()


async def test_a_node_that_is_alone_in_its_role_and_makes_no_sense_is_named(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    cluster.decode[0].script.skip_index = True
    with pytest.raises(BrokenPeer, match="what decode node d0 says makes no sense: token "):
        await cluster.generate(cluster.request())
    await cluster.is_quiet()


@pytest.mark.parametrize("message", [0, 3])
async def test_an_answer_goes_on_elsewhere_from_the_token_before_a_message_that_came_empty(
    start_cluster: Any, message: int
) -> None:
    """gRPC sends one where it has no memory for the bytes of a message."""
    cluster = await start_cluster(1, 2)
    cluster.decode[0].script.loses_message = message
    tokens, deltas = await cluster.generate(cluster.request(PROMPT, 8))
    assert tokens == cluster.answer(PROMPT, 8)
    assert (deltas[-1].summary.decode_node, deltas[-1].summary.retries) == ("d1", 1)
    await cluster.is_quiet()


async def test_requests_follow_the_blocks_that_a_node_announces(start_cluster: Any) -> None:
    cluster = await start_cluster(3, 3)
    prompt = list(range(10, 30))
    keys = extend_chain(chain_seed("kv"), np.array(prompt, dtype=np.uint32), 4)
    cluster.core.costs.observe_prefill("p0", 1000, 0, 1000.0)
    cluster.prefill[2].events.append([BlockEvent(True, key) for key in keys[:3]])
    cluster.decode[1].events.append([BlockEvent(True, key) for key in keys[:2]])
    cluster.core.costs.observe_transfer("p0", "d0", 1024, 5.0)
    await cluster.eventually(lambda: cluster.core.index.num_blocks("p2") == 3 and len(cluster.core.index) == 3)
    await cluster.eventually(lambda: cluster.core.index.num_blocks("d1") == 2)
    _, deltas = await cluster.generate(cluster.request(prompt, 3))
    assert (deltas[-1].summary.prefill_node, deltas[-1].summary.decode_node) == ("p2", "d1")
    assert deltas[-1].summary.predicted_ttft_ms > 0
    assert len(cluster.core.dispatcher.stats.recent_ttft_errors_ms) == 1

    cluster.prefill[2].events.append([BlockEvent(False, key) for key in keys[:3]])
    await cluster.eventually(lambda: cluster.core.index.num_blocks("p2") == 0)


async def test_a_prompt_with_prompt_logprobs_is_placed_as_uncached(start_cluster: Any) -> None:
    """All of it is computed. Once, a decode node that held it got it as a short tail, and delayed its answers."""
    cluster = await start_cluster(1, 1)
    prompt = list(range(10, 30))
    keys = Chain.of("kv").keys(np.array(prompt, dtype=np.uint32), 4)
    cluster.prefill[0].events.append([BlockEvent(True, key) for key in keys[:3]])
    await cluster.eventually(lambda: cluster.core.index.num_blocks("p0") == 3)
    new_tokens: list[int] = []
    cluster.core.dispatcher.placer.on_arrival.append(lambda _, placement, now: new_tokens.append(placement.new_tokens))
    await cluster.generate(cluster.request(prompt, 3))
    await cluster.generate(cluster.request(prompt, 3, prompt_logprobs=0))
    assert new_tokens == [20 - 3 * 4, 20]


async def test_an_adapter_that_begins_within_a_prompt_is_placed_by_the_models_own_blocks(start_cluster: Any) -> None:
    """And in a retry, which continues from the tokens already sent, the adapter starts at the same token."""
    cluster = await start_cluster(2, 2)
    prompt = list(range(10, 30))
    cluster.core.costs.observe_prefill("p0", 1000, 0, 1000.0)
    keys = Chain.of("kv").keys(np.array(prompt, dtype=np.uint32), 4)
    cluster.prefill[1].events.append([BlockEvent(True, key) for key in keys[:3]])
    await cluster.eventually(lambda: cluster.core.index.num_blocks("p1") == 3)
    for node in cluster.decode:
        node.script.error, node.script.tokens_first = HandoffFailed("engine broke"), 2
    request = replace(cluster.request(prompt, 8), adapter="digest", adapter_start=14)
    with pytest.raises(HandoffFailed):
        await cluster.generate(request)
    assert cluster.prefill[1].calls > 0, "the blocks before it are the model's own"
    for node in (*cluster.prefill, *cluster.decode):
        if (last := node.last_request) is not None:
            assert (last.adapter, last.adapter_start, last.num_prompt_tokens) == ("digest", 14, len(prompt))
    assert max(len(node.last_request.tokens) for node in cluster.decode) > 4 * len(prompt), "nobody went on"


async def test_a_storm_leaves_nothing_behind(start_cluster: Any) -> None:
    cluster = await start_cluster(3, 3, retries=2)
    cluster.prefill[0].script.error = HandoffFailed("always")
    cluster.decode[0].script.error, cluster.decode[0].script.tokens_first = HandoffFailed("always"), 2
    cluster.decode[1].script.token_s = 0.002

    async def client(number: int) -> str:
        prompt = [number, number + 1, 3, 4, 5, 6, 7, 8]
        stream = cluster.core.dispatcher.generate(cluster.request(prompt, 12))
        got: list[int] = []
        try:
            async for delta in stream:
                got.extend(token.token_id for token in delta.tokens)
                if number % 5 == 0 and len(got) >= 3:
                    return "left"
        except MooncakeError as error:
            return error.code
        finally:
            await stream.aclose()
        assert got == cluster.answer(prompt, 12)
        return "done"

    ends = await asyncio.gather(*(client(number) for number in range(60)))
    assert ends.count("left") >= 8
    assert ends.count("done") >= 30, ends
    await cluster.is_quiet()
    stats = cluster.core.dispatcher.stats
    assert stats.requests == stats.finished + stats.cancelled + stats.failed == 60
