"""Nodes that can do both: roles follow the load, and short rests of prompts are computed where they decode."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from drive import ask, ask_all, status, wait_idle

from mooncake.app.cluster.local import LocalCluster
from mooncake.config import load_config

SETTINGS = [
    "cluster.switchable=true",
    "cluster.prefill=1",
    "cluster.decode=2",
    "conductor.balance=true",
    "conductor.balance_smoothing_s=2",
    "conductor.balance_dwell_s=1",
    "conductor.http_port=0",
    "conductor.grpc_port=0",
    "conductor.heartbeat_interval_s=0.1",
    "prefill.kv_gb=0.5",
    "decode.kv_gb=0.5",
    "store.dram_gb=0.4",
    "prefill.threads=1",
    "decode.threads=1",
]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_node_follows_the_load_and_no_request_is_lost() -> None:
    async with (
        LocalCluster(load_config(None, SETTINGS)) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        kept = [list(range(500 * k, 500 * k + 200)) for k in range(1, 4)]
        before = await ask_all(channel, kept, 8, at_once=3)
        sent = 0
        until_s = time.monotonic() + 200.0
        while not (now := await status(channel)).role_switches:
            assert time.monotonic() < until_s, f"no node changed its role within {sent} requests: {now}"
            prompts = [list(range(7 + sent + k, 407 + sent + k)) for k in range(6)]  # long, and answers short
            sent += 6
            answers = await ask_all(channel, prompts, 2, at_once=6, timeout=120.0)
            assert all(len(answer.tokens) == 2 for answer in answers)
        roles = sorted(node.info.role for node in now.nodes)
        assert roles == ["decode", "prefill", "prefill", "store"]

        after = await ask_all(channel, kept, 8, at_once=3)
        assert [answer.tokens for answer in after] == [answer.tokens for answer in before]
        assert all(answer.cached_tokens >= 128 for answer in after), "what was cached is still found"
        assert (await status(channel)).requests_failed == 0
        await wait_idle(channel)
        took_ms = (await status(channel)).last_switch_ms
        assert took_ms > 0.0
        print(f"the switch took {took_ms:.1f} ms of control work")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_local_prefill_where_a_conversation_is_decoded() -> None:
    settings = [*SETTINGS, "cluster.decode=1", "conductor.balance=false"]
    async with (
        LocalCluster(load_config(None, settings)) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        turns = [list(range(500 * k, 500 * k + 200)) for k in range(1, 5)]
        for turn in turns:
            answer = await ask(channel, turn, 60)
            assert answer.timings.decode_node == "decode-0"
            await wait_idle(channel)
            turn += [*answer.tokens, 17, 18, 19]  # what the user says next is short
        # Prefill has work for seconds, so that how fast this machine is decides nothing.
        longer = [list(range(20_000 + 1000 * k, 20_800 + 1000 * k)) for k in range(4)]
        under_way = asyncio.create_task(ask_all(channel, longer, 1, at_once=4, timeout=3600.0))
        async with asyncio.timeout(60):
            while not any(n.load.waiting_tokens for n in (await status(channel)).nodes):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        there = [await ask(channel, turn, 24) for turn in turns]
        await under_way
        cold = [await ask(channel, turn, 24, salt="elsewhere") for turn in turns]
        assert [answer.tokens for answer in there] == [answer.tokens for answer in cold]
        assert {answer.timings.prefill_node for answer in cold} == {"prefill-0"}
        assert {answer.timings.prefill_node for answer in there[:1]} == {"decode-0"}
        assert all(answer.cached_tokens >= 192 for answer in there)
        await wait_idle(channel)
