"""A storm over a whole cluster, after Jepsen: clients who know the answers ask while a nemesis does harm, all of it
drawn from one seed. What must hold: each answer is the known one, each request ends in time, and after the storm the
cluster is whole again and holds nothing of what was.

Run as a script it plays one storm after another: ``python tests/support/storm.py --seed 7 --count 3``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from drive import leaks, status
from live import SMALL
from redis_process import RedisProcess
from storm_faults import Fault, Nemesis, schedule
from storm_questions import (
    MODEL,
    WITHIN_AN_ANSWER,
    Answer,
    Cut,
    Question,
    Refused,
    Talk,
    ask,
    known_answers,
    make_talks,
)
from storm_traces import grown, held, processes_with
from tiny_lora import write_adapter
from tiny_model import write_tiny_model

from mooncake.app.cluster.local import LocalCluster
from mooncake.app.cluster.role_main import PARENT_ENV
from mooncake.config import Config, load_config
from mooncake.rpc import cluster_pb2 as pb
from mooncake.rpc.cluster_pb2_grpc import ClusterStub

NODES = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
STORES = ["store-0", "store-b"]
CLIENTS = 16
ANSWERED_S = 30.0  # how long the conductor works for a request at most
PATIENCE_S = 60.0  # of a client, with the longest pause and a restart of the conductor
OUTAGE_S = 25.0  # from a fault of the conductor to its answers, if it was killed repeatedly
HEALED_S = 60.0
IDLE_S = 30.0
MARK = "STORM"  # in the environment of all processes that a storm starts
GONE = {"unavailable", "handoff_failed", "stale_epoch", "kv_load_failed", "checksum_mismatch"}
REFUSALS = {  # by HTTP status: what is temporary, and so worth another try
    429: {"overloaded", "out_of_blocks"},
    503: GONE,
    504: {"deadline_exceeded"},
    WITHIN_AN_ANSWER: GONE | {"deadline_exceeded"},
}
SETTINGS = (
    *SMALL,
    "model.name=tiny",
    "block.tokens=16",
    "prefill.kv_gb=0.03",
    "decode.kv_gb=0.015",  # 230 blocks, so that some sequences are preempted
    "store.dram_gb=0.016",
    "store.ssd_gb=0.3",
    "store.lease_s=3",
    "store.reserve_timeout_s=5",
    "cluster.prefill=2",
    "cluster.decode=2",
    "conductor.heartbeat_interval_s=0.2",
    "conductor.node_timeout_s=3",
    "conductor.retries=3",
    f"conductor.request_timeout_s={ANSWERED_S}",
    "transfer.handoff_timeout_s=10",
    "directory.ttl_s=20",
    "health.confirm_s=1",
    "health.clear_s=1",
    "health.probation_s=2",
    "node.drain_s=3",
)
EXTRA = (  # each with one seed in two
    "transfer.transports=['tcp']",
    "cluster.switchable=true",
    "decode.speculative_tokens=4",
    "conductor.max_requests=10",
    "prefill.chunk_tokens=48",
    "decode.threads=2",  # on two cores, decode rests while prompts are computed
)


@dataclass
class Report:
    """What happened, and what ought not to have."""

    seed: int
    faults: Sequence[Fault] = ()
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def tell(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self.began:6.2f} {text}")

    def blame(self, text: str) -> None:
        self.wrong.append(text)
        self.tell(f"--- {text}")

    def blame_if(self, text: str) -> None:
        if text:
            self.blame(text)

    def __str__(self) -> str:
        """With all that it takes to run it again."""
        lines = [f"seed {self.seed}: {dict(self.outcomes)}"]
        if self.wrong:
            lines += [f"  wrong: {text}" for text in self.wrong[:20]]
            lines += [f"  {fault}" for fault in self.faults]
        return "\n".join(lines)


class StoreBeside:
    """A store with an SSD of its own, as on another host: no launcher knows it, and this one starts it again."""

    def __init__(self, node_id: str, ssd: Path, tell: Callable[[str], None]) -> None:
        self._settings = ["--set", f"node.id={node_id}", "--set", f"store.ssd_path={ssd}", "--log-level", "INFO"]
        self._tell = tell
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """0 if it is not running."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    @contextlib.asynccontextmanager
    async def running(self, config_file: Path) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch(["-P", "-m", "kvstore", "--config", str(config_file)]))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    async def _watch(self, command: list[str]) -> None:
        pipe: Any = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
        environment = os.environ | {PARENT_ENV: str(os.getpid())}
        while True:
            start = asyncio.create_subprocess_exec(sys.executable, *command, *self._settings, env=environment, **pipe)
            self._process = await start
            assert self._process.stdout is not None
            async for line in self._process.stdout:
                self._tell(line.decode(errors="replace").rstrip())
            await self._process.wait()
            await asyncio.sleep(0.25)


class Whole:
    """The cluster of a storm: started as `mooncake serve` does, with Redis and a second store."""

    def __init__(self, config: Config, folder: Path, redis: RedisProcess, tell: Callable[[str], None]) -> None:
        self.ssds = {node: folder / node for node in STORES}
        self._cluster = LocalCluster(config, restart=True, log_level="INFO", tell=tell, tell_log=tell)
        self._beside = StoreBeside(STORES[1], self.ssds[STORES[1]], tell)
        self.redis = redis
        self._channel: grpc.aio.Channel
        self.http_url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            self.redis.start()
            stack.callback(self.redis.stop)
            cluster = await stack.enter_async_context(self._cluster)
            await stack.enter_async_context(self._beside.running(cluster.config_file))
            self._channel = await stack.enter_async_context(grpc.aio.insecure_channel(cluster.grpc_address))
            self.http_url = cluster.http_url
            yield

    def pids(self) -> dict[str, int]:
        """Of what is running."""
        beside = {STORES[1]: self._beside.pid} if self._beside.pid else {}
        return self._cluster.pids | beside

    async def set_role(self, node_id: str, role: str) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):  # it may be gone, or not one that can
            await ClusterStub(self._channel).SetRole(pb.SetRoleRequest(node_id=node_id, role=role), timeout=5)

    async def why_not_whole(self, within_s: float) -> str:
        """What is missing after this long, or nothing as soon as all nodes are there and well."""
        return await _reason_after(within_s, self._not_whole)

    async def why_not_idle(self, within_s: float, before: Mapping[str, Counter[str]]) -> str:
        """What is held after this long although nothing runs, or nothing as soon as that is so. ``before``: what the
        processes held of the system's resources in the calm."""
        return await _reason_after(within_s, lambda: self._not_idle(before))

    async def _not_whole(self) -> str:
        now = await status(self._channel)
        found = {node.info.node_id: f"{node.state}, {node.health}: {node.health_reason}" for node in now.nodes}
        missing = [f"no {node}" for node in (*NODES, *STORES) if node not in found]
        ill = [f"{node}: {how}" for node, how in found.items() if not how.startswith("live, healthy")]
        return "; ".join([*missing, *ill, *(f"waiting for {role}" for role in now.waiting_for)])

    async def _not_idle(self, before: Mapping[str, Counter[str]]) -> str:
        now, levels = await status(self._channel), ("leases", "handoffs_waiting")
        found = leaks(now)
        for node in now.nodes:
            found += [f"{node.info.node_id}: {level}" for level in levels if node.load.counters.get(level)]
        for node, pid in self.pids().items():
            found += [f"{node} holds {what}" for what in grown(held(pid), before.get(node))]
        return "; ".join(found)


async def _reason_after(within_s: float, reason: Callable[[], Any]) -> str:
    began = time.monotonic()
    while True:
        try:
            if not (why := await reason()):
                return ""
        except grpc.aio.AioRpcError as error:
            why = f"the conductor does not answer: {error.details()}"
        if time.monotonic() - began > within_s:
            return str(why)
        await asyncio.sleep(0.1)


class Clients:
    """They ask over HTTP, and know what must be answered."""

    def __init__(
        self, http: httpx.AsyncClient, talks: Sequence[Talk], known: Mapping[str, Answer], report: Report
    ) -> None:
        self._http, self._talks, self._known, self._report = http, talks, known, report
        self.conductor_hit_at = -OUTAGE_S  # the last time

    async def ask_all(self) -> None:
        """Each question once; each must be answered."""
        gate = asyncio.Semaphore(8)

        async def one(question: Question) -> None:
            async with gate:
                if not await self._ask(question):
                    self._report.blame(f"{question.name} was not answered in the calm")

        await asyncio.gather(*(one(question) for talk in self._talks for question in talk))

    async def ask_until(self, end: asyncio.Task[None]) -> None:
        await asyncio.gather(
            *(self._talk_until(end, random.Random(f"{self._report.seed} {i}")) for i in range(CLIENTS))
        )

    async def _talk_until(self, end: asyncio.Task[None], rng: random.Random) -> None:
        while not end.done():
            options = {"cache_salt": f"s{rng.randrange(4)}", "priority": rng.randrange(-1, 2)}
            for question in rng.choice(self._talks):
                leave_after = rng.randrange(1, 12) if rng.random() < 0.15 else 0
                stream = leave_after > 0 or rng.random() < 0.5
                if not await self._ask(question, leave_after, stream=stream, **options):
                    await asyncio.sleep(rng.uniform(0.05, 0.3))
                    break

    async def _ask(self, question: Question, leave_after: int = 0, **options: object) -> bool:
        """Whether it was answered; whatever is wrong is reported."""
        report, began = self._report, time.monotonic()
        what = f"{question.name} {options}, asked at {began - report.began:.2f}"
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await ask(self._http, question, leave_after, **options)
        except TimeoutError:
            report.blame(f"{what} has not ended")
            outcome = "not ended"
        except Refused as error:
            outcome = f"{error.status} {error.code}"
            if error.code not in REFUSALS.get(error.status, ()):
                report.blame(f"{what}: {error}")
        except (Cut, httpx.TransportError) as error:
            outcome = type(error).__name__
            if began - self.conductor_hit_at > OUTAGE_S:
                report.blame(f"{what}: {error!r}, though the conductor was left alone")
        else:
            outcome = "left" if leave_after else "answered"
            if not leave_after and answer != self._known[question.name]:
                report.blame(f"{what}: {answer} instead of {self._known[question.name]}")
        report.outcomes[outcome] += 1
        return outcome in ("left", "answered")


async def play(seed: int, seconds: float, folder: Path, every_s: float = 2.0) -> Report:
    """One storm, in an empty folder, with a fault every ``every_s`` on average."""
    report = Report(seed)
    model = folder / "model"
    write_adapter(folder / "tuned", write_tiny_model(model, **MODEL), rank=2)
    settings = [*SETTINGS, f"model.path={model}", f"model.adapters=['tuned={folder / 'tuned'}']"]
    os.environ[MARK] = mark = f"{os.getpid()}.{seed}"
    try:
        talks, known = await _in_the_calm(seed, [*settings, "prefill.kv_gb=0.2"])
        await _in_the_storm(report, seconds, every_s, folder, settings, talks, known)
    finally:
        del os.environ[MARK]
    if left := processes_with(f"{MARK}={mark}"):
        report.blame(f"processes are left: {left}")
    for record in unexpected(report.log):
        report.blame(f"logged: {record}")
    return report


async def _in_the_calm(seed: int, settings: Sequence[str]) -> tuple[list[Talk], dict[str, Answer]]:
    """What will be asked, and the answers of one engine."""
    cluster = LocalCluster(load_config(None, [*settings, "cluster.coupled=1"]))
    async with cluster, _http(cluster.http_url) as http:
        talks = await make_talks(http, seed)
        return talks, await known_answers(http, talks)


async def _in_the_storm(
    report: Report,
    seconds: float,
    every_s: float,
    folder: Path,
    settings: Sequence[str],
    talks: list[Talk],
    known: dict[str, Answer],
) -> None:
    rng = random.Random(report.seed)
    redis = RedisProcess(folder)
    own = [f'directory.redis="{redis.url}"', f"store.ssd_path={folder / STORES[0]}"]
    extra = [setting for setting in EXTRA if rng.random() < 0.5]
    report.tell(f"=== with {extra}")
    report.faults = schedule(rng, seconds, every_s, NODES, STORES)
    whole = Whole(load_config(None, [*settings, *own, *extra]), folder, redis, report.tell)
    async with whole.running(), _http(whole.http_url) as http:
        clients = Clients(http, talks, known, report)

        def hit(fault: Fault) -> None:
            report.tell(f"=== {fault}")
            if fault.node == "conductor":
                clients.conductor_hit_at = time.monotonic()

        report.blame_if(await whole.why_not_whole(HEALED_S))
        await clients.ask_all()
        report.blame_if(await whole.why_not_idle(IDLE_S, {}))
        before = {node: held(pid) for node, pid in whole.pids().items()}
        nemesis = Nemesis(rng, whole.pids, whole.set_role, redis, whole.ssds, hit)
        raging = asyncio.create_task(nemesis.rage(report.faults))
        await clients.ask_until(raging)
        await raging
        report.tell("=== it is over")
        report.blame_if(await whole.why_not_whole(HEALED_S))
        await clients.ask_all()
        report.blame_if(await whole.why_not_idle(IDLE_S, before))


def _http(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=2 * PATIENCE_S, limits=limits, trust_env=False)


_OURS = re.compile(r" *[\d.]+ (\d{4}-\d\d-\d\d |===|---)")  # the first line of a record: with a date, or from here
_ALARMING = re.compile(r"Traceback|unexpected| ERROR |never retrieved|never awaited| a bug: ")
_GRPCS_OWN = re.compile(r"cygrpc: (Invalid encoding on|ExecuteBatchError)")  # of its sockets


def unexpected(log: Sequence[str]) -> list[str]:
    """Records, with their tracebacks, that tell of a bug."""
    records: list[str] = []
    for line in log:
        if _OURS.match(line) or not records:
            records.append(line)
        else:
            records[-1] += f"\n{line}"
    return [
        text for text in records if _ALARMING.search(text) and not _GRPCS_OWN.search(text) and "---" not in text[:12]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="seeds, one after another")
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two faults, on average")
    parser.add_argument("--logs", type=Path, help="a folder for what all processes said")
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        with tempfile.TemporaryDirectory() as folder:
            report = asyncio.run(play(seed, arguments.seconds, Path(folder), arguments.every))
        print(report, flush=True)
        if arguments.logs:
            (arguments.logs / f"{seed}.log").write_text("\n".join(report.log))


if __name__ == "__main__":
    main()
