"""Several answers to one prompt are one request, until a failure makes them continue as different prompts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

from conductor.admission.lengths import Kind
from conductor.api import Delta, InferenceRequest
from mooncake.errors import HandoffFailed, KVLoadFailed, NodeUnavailable
from mooncake.sampling import BeamSearch
from mooncake.types import FinishReason

PROMPT = [5, 6, 7, 8, 9]


async def answers(cluster: Any, request: InferenceRequest) -> dict[int, list[int]]:
    """Token ids by answer; each must end once, after its last token, without gap or repeat."""
    tokens: dict[int, list[int]] = {}
    ended: set[int] = set()
    async for delta in cluster.core.dispatcher.generate(request):
        assert delta.choice not in ended
        told = tokens.setdefault(delta.choice, [])
        for token in delta.tokens:
            assert token.index == len(told)
            told.append(token.token_id)
        if delta.finish_reason is not None:
            ended.add(delta.choice)
    assert ended == set(tokens)
    return tokens


async def test_several_answers_are_one_request_of_each_node(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    got = await answers(cluster, cluster.request(PROMPT, 8, n=3, seed=7))
    assert got == dict.fromkeys(range(3), cluster.answer(PROMPT, 8))
    assert (cluster.prefill[0].calls, cluster.decode[0].calls) == (1, 1)
    assert cluster.decode[0].last_request.sampling.n == 3
    assert dict(cluster.core.dispatcher.stats.handoffs) == {"committed": 1}
    await cluster.is_quiet()


async def test_first_tokens_can_be_the_whole_answers(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    got = await answers(cluster, cluster.request(PROMPT, 1, n=3))
    assert got == dict.fromkeys(range(3), cluster.answer(PROMPT, 1))
    assert cluster.decode[0].calls == 0


async def test_answers_that_have_begun_continue_separately_after_a_failure(start_cluster: Any) -> None:
    cluster = await start_cluster(2, 2, retries=5)
    for decode in cluster.decode:
        decode.script.error, decode.script.tokens_first, decode.script.times = NodeUnavailable("out"), 2, 1
    got = await answers(cluster, cluster.request(PROMPT, 12, n=3, seed=7))
    assert got == dict.fromkeys(range(3), cluster.answer(PROMPT, 12))
    seeds = sorted(node.last_request.sampling.seed for node in cluster.decode if node.last_request.sampling.n == 1)
    assert seeds and set(seeds) <= {7, 8, 9}, "an answer keeps its own seed"
    assert cluster.core.dispatcher.stats.finished == 1
    await cluster.is_quiet()


async def test_a_beam_search_holds_its_prefill_node_no_longer_than_other_requests(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1, ttft_limit_ms=60_000)
    cluster.prefill[0].script.gate, cluster.decode[0].script.gate = computed, decoded = asyncio.Event(), asyncio.Event()
    request = cluster.request(PROMPT, 6, n=2, temperature=0.0, beam_search=BeamSearch())
    searching = asyncio.create_task(answers(cluster, request))
    await cluster.eventually(lambda: cluster.core.fleet.booked("p0").prefills)
    computed.set()
    await cluster.eventually(lambda: not cluster.core.fleet.booked("p0").prefills)
    assert cluster.core.fleet.booked("d0").decodes == 1
    assert cluster.core.dispatcher.admission_queue.admission.inflight.is_decoding.sum() == 1
    assert not searching.done()
    decoded.set()
    assert await searching == dict.fromkeys(range(2), cluster.answer(PROMPT, 6))
    await cluster.is_quiet()


async def test_separately_continued_answers_that_fail_leave_no_task_behind(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1, retries=1)
    cluster.decode[0].script.error, cluster.decode[0].script.tokens_first = HandoffFailed("out"), 2
    told = 0
    with pytest.raises(KVLoadFailed):
        async for delta in cluster.core.dispatcher.generate(cluster.request(PROMPT, 12, n=3, seed=7)):
            told += len(delta.tokens)
            cluster.prefill[0].script.error = KVLoadFailed("out")  # for whoever goes on alone
    assert told == 9
    assert not [task for task in asyncio.all_tasks() if "Queue.get" in repr(task.get_coro())]
    await cluster.is_quiet()


async def test_a_failure_before_the_first_token_tries_all_together(start_cluster: Any) -> None:
    cluster = await start_cluster(2, 2)
    cluster.prefill[0].script.error = NodeUnavailable("out")
    got = await answers(cluster, cluster.request(PROMPT, 6, n=3))
    assert got == dict.fromkeys(range(3), cluster.answer(PROMPT, 6))


async def test_an_unneeded_answer_ends_on_its_node_and_the_others_continue(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    cluster.decode[0].script.token_s = 0.01
    dispatcher = cluster.core.dispatcher
    deltas: list[Delta] = []
    is_ended = False
    async for delta in dispatcher.generate(cluster.request(PROMPT, 20, n=2)):
        deltas.append(delta)
        if delta.choice == 0 and len(deltas) > 2 and not is_ended:
            dispatcher.end_choice("r", 0)
            is_ended = True
    [(_, ended)] = cluster.decode[0].ended_choices
    assert ended == 0
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    others = [token.token_id for delta in deltas if delta.choice == 1 for token in delta.tokens]
    assert others == cluster.answer(PROMPT, 20)
    assert len([token for delta in deltas if delta.choice == 0 for token in delta.tokens]) < 20
    await cluster.is_quiet()


async def test_an_answer_that_was_ended_from_outside_is_a_finished_one(start_cluster: Any) -> None:
    """Ingress ends it at a stop string; its length is used for predictions like any other."""
    cluster = await start_cluster(1, 1, tbt_limit_ms=1e6)
    dispatcher = cluster.core.dispatcher
    deltas = dispatcher.generate(cluster.request(PROMPT, 50))
    async with contextlib.aclosing(deltas):
        while (await anext(deltas)).tokens[-1].index < 4:
            pass
        dispatcher.end_choice("r", 0)
    stats = dispatcher.stats
    assert (stats.finished, stats.cancelled) == (1, 0)
    lengths = dispatcher.admission_queue.admission.lengths
    assert 4 <= lengths.sample(Kind(b"", len(PROMPT)), 50, 200, np.random.default_rng(0)).mean() <= 6
    assert not cluster.decode[0].ended_choices, "the end of the attempt tells the node"
    await cluster.is_quiet()


async def test_separately_continued_answers_finish_the_request_once_all_have_ended(
    start_cluster: Any,
) -> None:
    """As ingress takes them: it closes the generator at the last delta."""
    cluster = await start_cluster(2, 2, retries=5)
    for decode in cluster.decode:
        decode.script.error, decode.script.tokens_first, decode.script.times = NodeUnavailable("out"), 2, 1
    open_answers = {0, 1, 2}
    async with contextlib.aclosing(cluster.core.dispatcher.generate(cluster.request(PROMPT, 12, n=3))) as deltas:
        while open_answers:
            delta = await anext(deltas)
            if delta.finish_reason is not None:
                open_answers.discard(delta.choice)
    stats = cluster.core.dispatcher.stats
    assert stats.retries
    assert (stats.finished, stats.cancelled) == (1, 0)
    await cluster.is_quiet()


async def test_prompt_logprobs_are_sent_once_though_the_beam_search_starts_over(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    cluster.decode[0].script.hang = True
    search = cluster.request(PROMPT, 6, n=2, temperature=0.0, beam_search=BeamSearch(), prompt_logprobs=0)
    scores: list[list[int]] = []
    async for delta in cluster.core.dispatcher.generate(search):
        if delta.prompt_logprobs is not None:
            if not scores:
                await cluster.restart_decode(0)
            scores.append([token.token_id for token in delta.prompt_logprobs])
    assert scores == [PROMPT[1:]]
    assert cluster.prefill[0].calls == 2


async def test_the_logprobs_of_a_long_prompt_come_before_its_answer(start_cluster: Any) -> None:
    """Scores are megabytes, and the decode node's first messages are small and overtake them."""
    cluster = await start_cluster(1, 1)
    prompt = [5 + at % 900 for at in range(200_000)]
    deltas = [delta async for delta in cluster.core.dispatcher.generate(cluster.request(prompt, 4, prompt_logprobs=0))]
    [place] = [at for at, delta in enumerate(deltas) if delta.prompt_logprobs is not None]
    assert not any(delta.tokens for delta in deltas[:place])
    assert [token.token_id for delta in deltas for token in delta.tokens] == cluster.answer(prompt, 4)
