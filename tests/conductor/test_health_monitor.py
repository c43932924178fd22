"""A sick node in a running cluster: found by what its requests and probes show, taken out, and taken back."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import pytest
from nonsense import Garbler, Nonsense

from conductor.control.health import PROBES_NEEDED
from conductor.control.health_monitor import CORRUPT_COUNTER
from conductor.core import TICK_S
from conductor.registry import Fault, Health, NodeInfo, NodeState
from mooncake.config import load_config
from mooncake.errors import ChecksumMismatch
from mooncake.rpc import cluster_pb2
from mooncake.types import Role

FAST = {
    "health.confirm_s": 0.2,
    "health.clear_s": 0.3,
    "health.probation_s": 0.5,
    "health.probe_interval_s": 0.05,
}


@pytest.fixture
async def cluster(fake_cluster_of):
    return await fake_cluster_of(
        load_config(
            overrides=[
                "conductor.grpc_port=0",
                "conductor.heartbeat_interval_s=0.05",
                "conductor.retries=3",
                *(f"{key}={value}" for key, value in FAST.items()),
            ]
        ),
        prefill=3,
        decode=3,
    )


async def test_a_node_with_checksum_errors_is_isolated_and_returns(cluster, caplog) -> None:
    caplog.set_level(logging.INFO, "conductor.control.health_monitor")
    bad = cluster.prefill[0]
    bad.script.error = ChecksumMismatch("bytes differ")
    expected = cluster.answer([5, 6, 7, 8, 9], 4)

    def health() -> Health:
        return cluster.core.health.tracker.state(bad.node_id)

    for _ in range(20):
        tokens, _ = await cluster.generate(cluster.request(max_tokens=4))
        assert tokens == expected, "a request that met the bad node was answered by another one"
    await cluster.eventually(lambda: health() in (Health.ISOLATED, Health.PROBATION))
    assert "checksum errors" in cluster.core.registry.get(bad.node_id).health_reason
    status = {node.info.node_id: node for node in cluster.servicer.status()().nodes}
    assert status[bad.node_id].health in ("isolated", "probation")

    bad.script.error = None  # it was repaired; probes find it well
    await cluster.eventually(lambda: health() is Health.HEALTHY, within_s=20)
    assert cluster.core.registry.get(bad.node_id).effective_state is NodeState.LIVE
    assert cluster.core.registry.get(bad.node_id).health_reason == ""
    assert f"{bad.node_id} is healthy: it is well again" in caplog.messages


async def test_a_node_that_makes_no_sense_is_isolated(cluster) -> None:
    bad = cluster.decode[0]
    bad.script.nonsense = Nonsense.VOCABULARY
    expected = cluster.answer([5, 6, 7, 8, 9], 4)
    for _ in range(20):
        tokens, _ = await cluster.generate(cluster.request(max_tokens=4))
        assert tokens == expected, "a request that met the bad node was answered by another one"
    await cluster.eventually(lambda: cluster.core.health.tracker.state(bad.node_id) is not Health.HEALTHY)
    assert "messages without sense" in cluster.core.registry.get(bad.node_id).health_reason


async def test_a_slow_node_is_compared_with_its_healthy_baseline_not_with_the_adapted_cost_model(cluster) -> None:
    monitor, costs = cluster.core.health, cluster.core.costs

    def report(node_id: str, ms: float) -> None:
        samples = cluster_pb2.CostSamples(
            prefill=[cluster_pb2.PrefillSample(new_tokens=64, prefix_tokens=64 * k, ms=ms + k) for k in range(4)]
        )
        monitor.heartbeat(node_id, samples, {})
        for sample in samples.prefill:
            costs.observe_prefill(node_id, sample.new_tokens, sample.prefix_tokens, sample.ms)

    for _ in range(20):
        for node in cluster.prefill:
            report(node.node_id, 20.0)
    for _ in range(60):  # for long enough that the cost model expects it
        report("p1", 200.0)
        report("p0", 20.0)
        report("p2", 20.0)
        monitor.tick(time.monotonic())
    assert costs.prefill("p1").ms(64, 0) > 100.0
    await cluster.eventually(lambda: monitor.tracker.state("p1") is not Health.HEALTHY)
    assert [monitor.tracker.is_slow(name) for name in ("p0", "p1", "p2")] == [False, True, False]


@pytest.mark.timeout(30)
async def test_a_store_may_report_any_number_of_checksum_errors(cluster) -> None:
    health = cluster.core.health
    cluster.core.register(NodeInfo("s0", Role.STORE, 1, "here:1"), [])
    for count in (0, 1 << 63, 0, (1 << 64) - 1):
        health.heartbeat("s0", cluster_pb2.CostSamples(), {CORRUPT_COUNTER: count})
    health.tick(time.monotonic())
    assert health.tracker.state("s0") is Health.SUSPECTED


async def test_a_conductor_that_stood_still_has_not_watched_a_suspect_meanwhile(fake_cluster_of) -> None:
    """Nothing runs in this process meanwhile, as on a machine that stands still."""
    settings = ["conductor.grpc_port=0", "conductor.heartbeat_interval_s=0.05", "health.confirm_s=2.0"]
    cluster = await fake_cluster_of(load_config(overrides=settings), 2, 2)
    health, [bad, _] = cluster.core.health, cluster.decode
    for _ in range(2):
        health.has_fault([cluster.core.registry.get(bad.node_id).info], Fault.CHECKSUM)
    await cluster.eventually(lambda: health.tracker.state(bad.node_id) is Health.SUSPECTED)
    time.sleep(2.5)  # noqa: ASYNC251
    await asyncio.sleep(4 * TICK_S)
    assert health.tracker.state(bad.node_id) is Health.SUSPECTED
    await cluster.eventually(lambda: health.tracker.state(bad.node_id) is not Health.SUSPECTED)


async def test_a_node_that_does_not_answer_probes_is_suspected(cluster) -> None:
    await cluster.decode[1].relay.kill()  # it heartbeats, and nobody reaches it
    await cluster.eventually(lambda: cluster.core.health.tracker.state("d1") is not Health.HEALTHY, within_s=20)
    assert "probes" in cluster.core.registry.get("d1").health_reason


@pytest.fixture
async def garbler() -> AsyncIterator[Garbler]:
    garbler = Garbler()
    yield garbler
    await garbler.stop()


async def test_a_node_that_answers_probes_with_bytes_that_are_no_message_is_suspected(cluster, garbler) -> None:
    await cluster.decode[1].relay.lead_to(await garbler.start())
    await cluster.eventually(lambda: cluster.core.health.tracker.state("d1") is not Health.HEALTHY, within_s=20)
    assert "probes" in cluster.core.registry.get("d1").health_reason


async def test_bytes_that_are_no_message_bring_no_node_back(cluster, garbler) -> None:
    """An isolated node is given a prompt to compute."""
    for _ in range(2):
        cluster.core.health.has_fault([cluster.core.registry.get("p0").info], Fault.CHECKSUM)
    await cluster.prefill[0].relay.lead_to(await garbler.start())
    await cluster.eventually(lambda: garbler.calls["Run"] > 2 * PROBES_NEEDED, within_s=20)
    assert cluster.core.health.tracker.state("p0") is Health.ISOLATED


async def test_a_node_that_leaves_is_not_suspected_and_told_as_one_that_left(cluster, caplog) -> None:
    """Its probes fail from then on, long before it is forgotten."""
    caplog.set_level(logging.INFO, "conductor")
    await cluster.decode[1].leave()
    await cluster.eventually(lambda: cluster.core.registry.get("d1") is None, within_s=20)
    of_it = [(record.levelname, record.message) for record in caplog.records if "d1" in record.getMessage()]
    assert of_it == [("INFO", "decode node d1 has left")]
