"""Addresses on which nodes listen and are reached: IPv6, and all addresses of a machine under one name."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from drive import ask, status, wait_idle
from in_process import InProcessCluster
from tiny_model import write_tiny_model

from decode_node.node import DecodeNode
from kvstore.__main__ import build as build_store
from mooncake.addresses import split_address
from mooncake.app.cluster.compute_node.node import ComputeNode
from prefill_node.node import PrefillNode

PROMPT = [7 * i % 101 + 1 for i in range(200)]


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("settings", "reached_at"),
    [
        pytest.param(
            ["node.host='::1'", "conductor.host='::1'"],
            "::1",
            marks=pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here"),
        ),
        (["node.host=0.0.0.0", "node.advertise=localhost"], "localhost"),
    ],
    ids=["IPv6", "advertised"],
)
async def test_nodes_find_each_other(tmp_path: Path, settings: list[str], reached_at: str) -> None:
    write_tiny_model(tmp_path / "model")
    cluster = InProcessCluster(tmp_path / "model", "transfer.transports=['tcp']", "cluster.switchable=true", *settings)
    await cluster.start()
    nodes = [
        await cluster.join(build_store, "store-0"),
        await cluster.join(PrefillNode, "prefill-0"),
        await cluster.join(ComputeNode, "prefill-1"),
        await cluster.join(DecodeNode, "decode-0"),
    ]
    try:
        for node in (await status(cluster.channel)).nodes:
            addresses = {node.info.control_address, node.info.segment.tcp_address} - {""}
            assert {split_address(address)[0] for address in addresses} == {reached_at}
        answers = [await ask(cluster.channel, [*PROMPT, n], 4) for n in range(1, 5)]
        assert [len(answer.tokens) for answer in answers] == [4] * 4
        assert all(answer.timings.prefill_node and answer.timings.decode_node for answer in answers)
        await wait_idle(cluster.channel)
        load = {node.info.node_id: node.load for node in (await status(cluster.channel)).nodes}
        assert load["store-0"].blocks_cached == len(PROMPT) // 64
    finally:
        for node in reversed(nodes):
            await node.stop()
        await cluster.stop()
