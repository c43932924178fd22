"""Admission, live: limits refuse or delay requests, waiting ones are admitted when there is room, and none is lost."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from placing import Cluster

from conductor.admission.queue import POLL_S, AdmissionQueue
from conductor.api import InferenceRequest
from conductor.ingress.metrics import Metrics
from conductor.placement.scheduler import PlacementScheduler
from conductor.stats import AdmissionStats
from mooncake.config import ConductorSection
from mooncake.errors import ConfigError, DeadlineExceeded, NodeUnavailable, Overloaded
from mooncake.hashing import chain_seed, extend_chain
from mooncake.rpc.cluster_pb2 import StatusResponse

PROMPT = [5, 6, 7, 8, 9]


async def full_cluster(start_cluster: Any, requests: int = 2, **settings: Any) -> tuple[Any, list[asyncio.Task[Any]]]:
    """A decode node whose steps may not hold more than two sequences, and ``requests`` that decode there for long."""
    cluster = await start_cluster(1, 1, **{"tbt_limit_ms": 12.5, "admission": "early", **settings})
    for batch in (1, 2, 4, 8):
        cluster.core.costs.observe_prefill("p0", 10 * batch, 0, 0.1 * batch)
        cluster.core.costs.observe_decode("d0", batch, 100 * batch, 10.0 + batch)
    cluster.decode[0].script.token_s = 0.02
    running = [asyncio.create_task(cluster.generate(cluster.request(PROMPT, 40))) for _ in range(requests)]
    await cluster.eventually(
        lambda: cluster.core.dispatcher.admission_queue.admission.inflight.decoding_on("d0")[0] == requests
    )
    return cluster, running


async def test_a_hard_limit_refuses_with_a_retry_time_and_costs_nothing(start_cluster: Any) -> None:
    cluster, running = await full_cluster(start_cluster)
    calls = cluster.prefill[0].calls
    with pytest.raises(Overloaded, match="time between tokens") as refused:
        await cluster.generate(cluster.request(PROMPT, 8))
    assert 0.05 <= refused.value.retry_after_s <= 60.0
    assert cluster.prefill[0].calls == calls
    await asyncio.gather(*running)
    await cluster.generate(cluster.request(PROMPT, 8))
    await cluster.is_quiet()


async def test_what_is_only_counted_is_told(start_cluster: Any) -> None:
    cluster, running = await full_cluster(start_cluster, admission_mode="off")
    tokens, _ = await cluster.generate(cluster.request(PROMPT, 8))
    assert tokens == cluster.answer(PROMPT, 8)
    page = Metrics("m", lambda: StatusResponse, cluster.core.dispatcher.stats).page()()[0].decode()
    assert 'mooncake_admission_total{decision="refused"} 1.0' in page
    assert 'mooncake_admission_total{decision="admitted"} 2.0' in page
    await asyncio.gather(*running)
    await cluster.is_quiet()


@pytest.mark.parametrize("mode", ["hard", "soft"])
async def test_the_baseline_refuses_after_the_prefill(start_cluster: Any, mode: str) -> None:
    """In soft mode the request is not refused, although it is counted."""
    cluster, running = await full_cluster(start_cluster, admission="baseline", admission_mode=mode)
    stats = cluster.core.dispatcher.stats.admission
    assert stats.refused_after_prefill == 0
    prefills = cluster.prefill[0].calls
    if mode == "hard":
        with pytest.raises(Overloaded, match="time between tokens") as refused:
            await cluster.generate(cluster.request(PROMPT, 8))
        assert refused.value.retry_after_s > 0.0
    else:
        tokens, _ = await cluster.generate(cluster.request(PROMPT, 8))
        assert tokens == cluster.answer(PROMPT, 8)
    assert (cluster.prefill[0].calls, stats.refused_after_prefill) == (prefills + 1, 1)
    await asyncio.gather(*running)
    await cluster.is_quiet()


async def test_admission_learns_the_length_of_the_previous_answer(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1, tbt_limit_ms=1e6)
    prompt = list(range(2, 11))  # two blocks, and one token more
    answer, _ = await cluster.generate(cluster.request(prompt, 23))
    keys = extend_chain(chain_seed("kv"), np.array([*prompt, *answer, 5, 6, 7, 8], dtype=np.uint32), 4)
    assert cluster.core.dispatcher.admission_queue.admission.turns.kind(keys, 99).parent_tokens == 23


async def test_a_soft_limit_queues_until_there_is_room(start_cluster: Any) -> None:
    cluster, running = await full_cluster(start_cluster, admission_mode="soft")
    waiting = [asyncio.create_task(cluster.generate(cluster.request(PROMPT, 4))) for _ in range(3)]
    await cluster.eventually(lambda: cluster.core.dispatcher.admission_queue.num_waiting == 3)
    await asyncio.gather(*running)
    for tokens, _ in await asyncio.gather(*waiting):
        assert tokens == cluster.answer(PROMPT, 4)
    assert cluster.core.dispatcher.admission_queue.num_waiting == 0
    await cluster.is_quiet()


async def test_a_soft_limit_that_no_step_can_keep_admits_one_request_at_a_time(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1, tbt_limit_ms=1.0, admission="early", admission_mode="soft")
    for batch in (1, 2, 4, 8):
        cluster.core.costs.observe_prefill("p0", 10 * batch, 0, 0.1 * batch)
        cluster.core.costs.observe_decode("d0", batch, 100 * batch, 10.0 + batch)
    answers = await asyncio.gather(*(cluster.generate(cluster.request(PROMPT, 4)) for _ in range(3)))
    assert [tokens for tokens, _ in answers] == [cluster.answer(PROMPT, 4)] * 3
    await cluster.is_quiet()


async def test_a_request_that_times_out_or_is_cancelled_leaves_the_queue(start_cluster: Any) -> None:
    cluster, running = await full_cluster(start_cluster, admission_mode="soft")
    queue = cluster.core.dispatcher.admission_queue
    gone = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 4)))
    late = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 4, timeout_s=0.2)))
    await cluster.eventually(lambda: queue.num_waiting == 2)
    gone.cancel()
    with pytest.raises(DeadlineExceeded):
        await late
    assert queue.num_waiting == 0
    await asyncio.gather(*running)
    await cluster.is_quiet()


async def test_a_queued_request_that_can_no_longer_meet_its_deadline_does_not_block_others(start_cluster: Any) -> None:
    cluster, running = await full_cluster(start_cluster, admission_mode="soft")
    queue = cluster.core.dispatcher.admission_queue
    first = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 4, timeout_s=10.0)))
    second = asyncio.create_task(cluster.generate(cluster.request(PROMPT, 4, timeout_s=100.0)))
    await cluster.eventually(lambda: queue.num_waiting == 2)
    for _ in range(50):  # the prefill node has become slow
        cluster.core.costs.observe_prefill("p0", len(PROMPT), 0, 20_000.0)
    with pytest.raises(Overloaded, match="after the request's deadline"):
        await asyncio.wait_for(first, 5.0)
    tokens, _ = await second
    assert tokens == cluster.answer(PROMPT, 4)
    await asyncio.gather(*running)
    await cluster.is_quiet()


async def test_a_request_that_left_the_queue_still_counts_as_demand(start_cluster: Any) -> None:
    cluster, running = await full_cluster(start_cluster, admission_mode="soft")
    queue, arrivals = cluster.core.dispatcher.admission_queue, []
    cluster.core.dispatcher.placer.on_arrival.append(lambda query, placement, now: arrivals.append(query.facts.session))

    def asked(name: str, timeout_s: float) -> asyncio.Task[Any]:
        request = replace(cluster.request(PROMPT, 4, timeout_s=timeout_s), session=name)
        return asyncio.create_task(cluster.generate(request))

    gone, late, patient = asked("gone", 20.0), asked("late", 0.2), asked("patient", 20.0)
    await cluster.eventually(lambda: queue.num_waiting == 3)
    gone.cancel()
    with pytest.raises(DeadlineExceeded):
        await late
    assert arrivals == ["gone", "late"]
    await asyncio.gather(patient, *running)
    assert arrivals == ["gone", "late", "patient"], "each of them once"
    await cluster.is_quiet()


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_queued_request_waits_for_a_missing_role_like_any_other(start_cluster: Any, comes_back: bool) -> None:
    cluster, running = await full_cluster(start_cluster, admission_mode="soft", node_wait_s=20.0 if comes_back else 0.1)
    queue, node = cluster.core.dispatcher.admission_queue, cluster.decode[0].membership
    timeout_s = 20.0 if comes_back else 2.0
    queued = [asyncio.create_task(cluster.generate(cluster.request(PROMPT, 4, timeout_s))) for _ in range(3)]
    await cluster.eventually(lambda: queue.num_waiting == 3)
    node.draining = True  # it goes on with what it has, and takes nobody
    await cluster.eventually(lambda: queue.num_waiting == 0)
    node.draining = not comes_back
    for ended in await asyncio.gather(*queued, return_exceptions=True):
        assert ended[0] == cluster.answer(PROMPT, 4) if comes_back else isinstance(ended, NodeUnavailable)
    await asyncio.gather(*running)
    await cluster.is_quiet()


async def test_urgent_requests_go_first_and_batch_work_waits_for_an_idle_cluster(start_cluster: Any) -> None:
    cluster, running = await full_cluster(start_cluster, admission_mode="soft")
    order: list[int] = []

    async def ask(priority: int) -> None:
        request: InferenceRequest = cluster.request(PROMPT, 2)
        await cluster.generate(
            InferenceRequest(
                "r", request.tokens, request.sampling, request.deadline, priority=priority, salt=f"{priority + 5}"
            )
        )
        order.append(priority)

    asked = []
    for number, priority in enumerate((100, 0, -1)):
        asked.append(asyncio.create_task(ask(priority)))
        await cluster.eventually(
            lambda number=number: cluster.core.dispatcher.admission_queue.num_waiting == number + 1
        )
    await asyncio.gather(*running, *asked)
    assert order[0] == -1
    await cluster.is_quiet()


async def test_batch_work_that_fits_and_is_held_back_is_counted_once_it_enters(start_cluster: Any) -> None:
    """It is decided again and again. Retry times follow from how many enter in a minute."""
    cluster, running = await full_cluster(start_cluster, tbt_limit_ms=18.0)
    queue, stats = cluster.core.dispatcher.admission_queue, cluster.core.dispatcher.stats.admission
    batch = asyncio.create_task(cluster.generate(replace(cluster.request(PROMPT, 2), priority=100)))
    await cluster.eventually(lambda: queue.num_waiting == 1)
    await asyncio.sleep(4 * POLL_S)
    assert (queue.num_waiting, stats.admitted, stats.refused) == (1, 2, 0)
    await asyncio.gather(batch, *running)
    assert (stats.admitted, stats.refused) == (3, 0)
    await cluster.is_quiet()


async def test_without_limits_every_request_is_admitted(start_cluster: Any) -> None:
    cluster = await start_cluster(1, 1)
    assert cluster.core.dispatcher.admission_queue.is_unlimited
    await cluster.generate(cluster.request(PROMPT, 4))
    assert cluster.core.dispatcher.stats.admission.admitted == 0


@pytest.mark.parametrize("wrong", [{"admission": "maybe"}, {"admission_mode": "rude"}])
def test_a_wrong_name_is_one_sentence(wrong: dict[str, str], scheduler: PlacementScheduler) -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        AdmissionQueue(scheduler, ConductorSection(**wrong), lambda: 0.0, AdmissionStats())


@pytest.fixture
def scheduler() -> PlacementScheduler:
    return Cluster().scheduler
