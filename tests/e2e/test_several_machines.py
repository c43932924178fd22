"""Nodes on several machines: the guide as it stands, over a real network, and machines that lose each other."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from machines import Machine, apart, machines, missing
from tiny_model import write_tiny_model

GUIDE = Path(__file__).parents[2] / "deploy" / "docs" / "operating.md"
CONDUCTOR, PREFILL, DECODE, OTHER_DECODE = (f"10.0.0.{number}" for number in range(1, 5))
KEY = "sk-test"
SMALL = 'model.path="{model}"', "prefill.kv_gb=0.01", "decode.kv_gb=0.01", "store.dram_gb=0.01"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=f"several machines need networks of their own: {missing()}"),
]


class Cluster:
    """What the guide says, on machines of its addresses, with one more decode node."""

    def __init__(self, folder: Path, found: list[Machine]) -> None:
        write_tiny_model(folder / "model")
        self.machines = {machine.address: machine for machine in found}
        self._folder = folder
        settings, commands = guide()
        self._file = folder / "cluster.toml"
        self._file.write_text(settings.replace("sk-…", KEY))
        for address, command in commands:
            self.start(address, command)
        one_more = shlex.split("python -m decode_node --config cluster.toml --set node.id=decode-d")
        self.start(OTHER_DECODE, one_more, f"node.host={OTHER_DECODE}")

    def start(self, address: str, command: list[str], *settings: str) -> None:
        settings = (*(each.format(model=self._folder / "model") for each in SMALL), *settings)
        argv = [sys.executable, *command[1:], *(part for each in settings for part in ("--set", each))]
        self.machines[address].start(argv, self._folder, self._folder / "log", environment())

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer of the conductor to a client on its machine, as JSON."""

        def call() -> Any:
            connection = http.client.HTTPConnection(CONDUCTOR, 8000, timeout=100)
            headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
            connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            content = json.loads(response.read())
            connection.close()
            assert response.status == 200, content
            return content

        return self.machines[CONDUCTOR].call(call)

    def ask(self, prompt: list[int]) -> str:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        text: str = self.get("/v1/completions", body)["choices"][0]["text"]
        return text

    def ask_all(self, prompts: list[list[int]]) -> list[str]:
        with ThreadPoolExecutor(4) as clients:
            return list(clients.map(self.ask, prompts))

    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/status.json")["nodes"]
        return found

    def until_ready(self, num_nodes: int) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                if sum(node["state"] == "live" for node in self.nodes()) == num_nodes:
                    return
            except (OSError, AssertionError):
                pass
            assert time.monotonic() < deadline, (self._folder / "log").read_text()
            time.sleep(0.2)

    def until_idle(self) -> None:
        """Nothing is held anywhere, and no block is lost."""
        deadline = time.monotonic() + 60
        while True:
            loads = {node["info"]["node_id"]: node["load"] for node in self.nodes()}
            sums = [each["blocks_free"] + each["blocks_cached"] + each["blocks_in_use"] for each in loads.values()]
            assert sums == [each["blocks_total"] for each in loads.values()]
            held = {
                name: each
                for name, each in loads.items()
                if each["blocks_in_use"] or each["running"] or each["counters"].get("blocks_quarantined")
            }
            if not held:
                return
            assert time.monotonic() < deadline, held
            time.sleep(0.1)


def guide() -> tuple[str, list[tuple[str, list[str]]]]:
    """Its configuration, and its commands, each with the address where it is to run."""
    section = GUIDE.read_text().split("## Several machines")[1]
    settings, commands = re.findall(r"```(?:toml)?\n(.*?)```", section, re.DOTALL)[:2]
    address, found = "", []
    for line in commands.strip().splitlines():
        command, _, place = line.partition("# on ")
        address = place.strip() or address
        found.append((address, shlex.split(command)))
    return settings, [(place or found[i + 1][0], command) for i, (place, command) in enumerate(found)]


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("machines")
    with machines(folder, CONDUCTOR, PREFILL, DECODE, OTHER_DECODE) as found:
        cluster = Cluster(folder, found)
        cluster.until_ready(num_nodes=5)
        yield cluster


def prompts(first: int) -> list[list[int]]:
    return [[7 * i % 101 + 3 for i in range(150)] + [first + number] for number in range(8)]


def test_the_guide_is_a_cluster_that_answers_over_tcp(cluster: Cluster) -> None:
    wanted = cluster.ask_all(prompts(100))
    assert cluster.ask_all(prompts(100)) == wanted
    cluster.until_idle()
    used: dict[str, str] = {}
    while not used:  # until a heartbeat tells of what was just sent
        [prefill] = [node for node in cluster.nodes() if node["info"]["role"] == "prefill"]
        used = {each["peer"]: each["transport"] for each in prefill.get("transports", ())}
    assert used.pop("store-b") == "shm", "a store beside the node"
    assert set(used.values()) == {"tcp"}


def test_requests_of_machines_that_have_lost_each_other_go_elsewhere(cluster: Cluster) -> None:
    wanted = cluster.ask_all(prompts(200))
    for lost in (DECODE, OTHER_DECODE):
        with apart(cluster.machines[PREFILL], cluster.machines[lost]):
            started = time.monotonic()
            assert cluster.ask_all(prompts(200)) == wanted
            assert time.monotonic() - started < 60
    assert cluster.ask_all(prompts(200)) == wanted
    cluster.until_idle()


def test_requests_go_elsewhere_where_only_the_connections_for_kv_are_lost(cluster: Cluster) -> None:
    """As when a firewall on the way forgets them: calls of the same machines arrive, and nobody is suspected."""
    wanted = cluster.ask_all(prompts(250))
    segments = [node["info"]["segment"] for node in cluster.nodes() if node["info"]["role"] == "decode"]
    for address, _, port in (segment["tcp_address"].partition(":") for segment in segments):
        machine = cluster.machines[address]
        machine.mute(port)
        started = time.monotonic()
        assert cluster.ask_all(prompts(250)) == wanted
        assert time.monotonic() - started < 60
        machine.unmute(port)
    assert cluster.ask_all(prompts(250)) == wanted
    cluster.until_idle()


def test_a_machine_that_everybody_has_lost_for_a_while_serves_again(cluster: Cluster) -> None:
    wanted = cluster.ask_all(prompts(300))
    gone = cluster.machines[DECODE]
    with contextlib.ExitStack() as stack:
        for address in (CONDUCTOR, PREFILL, OTHER_DECODE):
            stack.enter_context(apart(gone, cluster.machines[address]))
        assert cluster.ask_all(prompts(300)) == wanted
        while len(cluster.nodes()) != 3:
            time.sleep(0.1)
    cluster.until_ready(num_nodes=5)
    assert cluster.ask_all(prompts(300)) == wanted
    cluster.until_idle()
