"""``mooncake bench serve``: a cluster of processes on this machine, as its clients see it, compared with one engine
that does prefill and decode in one process, under the same traffic.

Clients, conductor and nodes share this machine's cores, while real nodes have their own machines. The gain of
separation shows in TBT; throughput here can at best equal that of the single engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from msgspec.structs import replace
from rich.progress import Progress

from mooncake.app.bench.load.options import FIRST_TOKENS, LoadOptions, add_load_flags, load_options
from mooncake.app.bench.load.traffic import Answer, Run, ServedByCluster, ServedByEngine, Traffic, Watched
from mooncake.app.bench.peers.engine import PeerEngine
from mooncake.app.bench.peers.hf_folder import hf_folder
from mooncake.app.bench.peers.own import OwnEngine
from mooncake.app.bench.report import Figure, Report, Value, tell
from mooncake.app.cli.flags import Flags, names
from mooncake.app.cluster.local import LocalCluster
from mooncake.app.cluster.preflight import available_cores
from mooncake.app.cluster.role_main import run_async, unless_stopped
from mooncake.app.latency import percentile
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.contract import EngineConfig
from mooncake.errors import ConfigError
from mooncake.types import PrefillReport

COUPLED = ServedByEngine.name
SMALL_TOKENS = 16
LONG_ANSWERS = 8  # factor on the answer length when all answers must run at the same time
KV_GB = 1.5


@dataclass(frozen=True, slots=True)
class Options:
    load: LoadOptions
    transports: tuple[str, ...]
    small_requests: int


def main(args: list[str]) -> None:
    """Raises MooncakeError for a wrong option, an unreadable model, or a cluster that does not start or fails.

    Raises Cancelled after Ctrl-C, once the results so far are reported.
    """
    options = parse(args)
    report = Report("serve", _config(options.load), options.load.seed)
    with report.measuring("measuring") as shown:
        run_async(unless_stopped(measure(options, report, shown)))
        measure_vllm(options, report, shown)
    compare(report, options)
    report.finish(options.load.json)


def parse(args: list[str]) -> Options:
    flags = Flags("bench serve", __doc__)
    vllm = "compare TTFT with vLLM in this interpreter's environment"
    quick = "a minute instead of ten: shm, 1 and 4 clients, short prompts"
    add_load_flags(flags, requests=2, reps="long prompts", vllm=vllm, quick=quick)
    flags.transports("shm,tcp", "transports of the hand-off, each in its own cluster")
    flags.add("--small", type=int, default=20, help="requests of one token, for the conductor's own time")
    given = flags.read(args)
    if given.quick:
        given.transports, given.concurrency, given.prompt, given.new = "shm", "1,4", 64, 8
        given.long, given.requests, given.small, given.reps = 512, 1, 3, 1
    if given.small < 1:
        raise ConfigError("--small must be at least 1")
    needed = given.prompt + LONG_ANSWERS * given.new  # by requests sent after minutes
    load = load_options(given, needed, f"--prompt plus {LONG_ANSWERS} times --new")
    return Options(load, names("--transports", given.transports, ("shm", "tcp")), given.small)


def _config(load: LoadOptions) -> dict[str, object]:
    """Everything that affects the results, without paths."""
    threads = {"prefill_threads": load.config.prefill.threads, "decode_threads": load.config.decode.threads}
    return load.told() | threads | {"engine_threads": available_cores()}


async def measure(options: Options, report: Report, shown: Progress) -> None:
    model = options.load.config.model
    checkpoint = open_checkpoint(model.path, model.max_model_len)
    tell(shown, "loading the model")
    engine = ServedByEngine(_own_engine(checkpoint, options))
    try:
        await ServeBench(engine, checkpoint.config.vocab_size, options, report, shown).run()
    finally:
        await engine.close()
    for transport in options.transports:
        tell(shown, f"starting a cluster over {transport}")
        config = replace(options.load.config, transfer=replace(options.load.config.transfer, transports=(transport,)))
        async with LocalCluster(config) as cluster:
            threads = {
                "prefill_threads": cluster.config.prefill.threads,
                "decode_threads": cluster.config.decode.threads,
            }
            report.config |= threads
            served = ServedByCluster(_cluster(transport), cluster.grpc_address)
            try:
                await ServeBench(served, checkpoint.config.vocab_size, options, report, shown).run()
            finally:
                await served.close()


def _own_engine(checkpoint: Checkpoint, options: Options) -> OwnEngine:
    config = options.load.config
    engine = EngineConfig(
        block_tokens=config.block.tokens,
        chunk_tokens=config.prefill.chunk_tokens,
        max_sequences=config.decode.max_sequences,
        max_model_len=config.model.max_model_len,
        keep_events=False,
    )
    return OwnEngine(checkpoint, config.precision(checkpoint.coding), available_cores(), engine, KV_GB)


def _cluster(transport: str) -> str:
    return f"cluster, {transport}"


@dataclass(slots=True)
class ServeBench:
    """All measurements of one server: a cluster or the single engine."""

    served: Watched
    vocab_size: int
    options: Options
    report: Report
    shown: Progress

    async def run(self) -> None:
        traffic = Traffic(self.vocab_size, self.options.load.seed)  # the same prompts for every server
        for _ in range(2):  # warm-up
            await self.served.ask(traffic.prompt(self.options.load.prompt_tokens), FIRST_TOKENS)
        await self._measure_small(traffic)
        await self._measure_ttft(traffic)
        for clients in self.options.load.concurrency:
            await self._measure_load(traffic, clients)
        await self._measure_disturbed(traffic)

    async def _measure_small(self, traffic: Traffic) -> None:
        """Requests of one token: the overhead of a request, with little to compute."""
        self._tell("requests of one token")
        answers = [await self.served.ask(traffic.prompt(SMALL_TOKENS), 1) for _ in range(self.options.small_requests)]
        shape = {"prompt": SMALL_TOKENS}
        self._add("one-token request", "ms", [answer.total_ms for answer in answers], shape)
        outside = [answer.total_ms - _node_ms(answer.report) for answer in answers if answer.report is not None]
        self._add("one-token request outside of the prefill node", "ms", outside, shape)

    async def _measure_ttft(self, traffic: Traffic) -> None:
        cold: list[Answer] = []
        hit: list[Answer] = []
        for _ in range(self.options.load.reps):
            self._tell("long prompts")
            prompt = traffic.prompt(self.options.load.long_tokens)
            cold.append(await self.served.ask(prompt, FIRST_TOKENS))
            hit.append(await self.served.ask(prompt, FIRST_TOKENS))
        shape = {"prompt": self.options.load.long_tokens}
        for kind, answers in (("cold", cold), ("repeated", hit)):
            reports = [answer.report for answer in answers if answer.report is not None]
            self._add(f"TTFT, {kind}", "ms", [answer.ttft_ms for answer in answers], shape)
            self._add(f"KV handed over, {kind}", "MB", [report.sent_bytes / 1e6 for report in reports], shape)
            exposed = [report.timings.handoff_ms for report in reports]
            self._add(f"hand-off not hidden by prefill, {kind}", "ms", exposed, shape)

    async def _measure_load(self, traffic: Traffic, clients: int) -> None:
        load = self.options.load
        self._tell(f"{clients} clients")
        sizes = (load.requests, load.prompt_tokens, load.new_tokens)
        run = await traffic.closed_loop(self.served, clients, *sizes)
        shape = {"clients": clients}
        self._add("output", "tok/s", [run.tokens_per_s], shape, more_is_better=True)
        self._add("requests", "/s", [run.requests_per_s], shape, more_is_better=True)
        self._add("TTFT p50", "ms", [_percentile([answer.ttft_ms for answer in run.answers], 0.5)], shape)
        self._add_gaps(run, shape)

    async def _measure_disturbed(self, traffic: Traffic) -> None:
        """Token gaps of running answers while a long prompt is computed."""
        load = self.options.load
        clients = min(8, max(load.concurrency))
        self._tell("a long prompt arrives")
        sizes = (load.prompt_tokens, LONG_ANSWERS * load.new_tokens, load.long_tokens)
        run, num_running = await traffic.disturbed(self.served, clients, *sizes)
        shape = {"clients": clients, "arriving": load.long_tokens}
        self._add("answers under way when it arrives", "", [num_running], shape, more_is_better=True)
        self._add_gaps(run, shape)

    def _add_gaps(self, run: Run, shape: Mapping[str, int]) -> None:
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            self._add(f"TBT {name}", "ms", [_percentile(run.gaps_ms, share)], shape)

    def _add(
        self, name: str, unit: str, values: Sequence[float], shape: Mapping[str, int], *, more_is_better: bool = False
    ) -> None:
        if values:
            self.report.add(Figure(self.served.name, name, unit, tuple(values), more_is_better, dict(shape)))

    def _tell(self, what: str) -> None:
        tell(self.shown, f"{self.served.name}, {what}")


def _node_ms(report: PrefillReport) -> float:
    """The time of a request in the prefill node, by its own report."""
    timings = report.timings
    return timings.queue_ms + timings.prefill_ms + timings.handoff_ms


def _percentile(values: Sequence[float], share: float) -> float:
    return percentile(sorted(values), share)


def measure_vllm(options: Options, report: Report, shown: Progress) -> None:
    """TTFT of long prompts in vLLM, right after ours and in the same dtype."""
    if not options.load.vllm_python:
        return
    checkpoint = open_checkpoint(options.load.config.model.path)
    traffic = Traffic(checkpoint.config.vocab_size, options.load.seed)
    with ExitStack() as stack:
        dtype = options.load.config.model.dtype
        model = stack.enter_context(hf_folder(checkpoint.path, dtype, options.load.peer_model))
        tell(shown, "starting vllm")
        peer = PeerEngine("vllm", options.load.vllm_python, model, dtype, available_cores())
        stack.enter_context(peer)
        peer.run([traffic.prompt(64)], 4)
        cold, hit = [], []
        for _ in range(options.load.reps):
            tell(shown, "vllm, long prompts")
            prompts = [traffic.prompt(options.load.long_tokens)]
            cold.append(1e3 * peer.run(prompts, 1))
            hit.append(1e3 * peer.run(prompts, 1))
    shape: dict[str, Value] = {"prompt": options.load.long_tokens}
    report.add(Figure("vllm", "TTFT, cold", "ms", tuple(cold), params=shape))
    report.add(Figure("vllm", "TTFT, repeated", "ms", tuple(hit), params=shape))
    report.config["vllm"] = peer.facts


def compare(report: Report, options: Options) -> None:
    """Add the ratios to the report. ``cluster`` without a transport is the first transport's."""
    first = _cluster(options.transports[0])
    most, add = max(options.load.concurrency), report.compare_subjects
    for ratio, name in (("ttft", "TTFT, cold"), ("ttft_prefix", "TTFT, repeated")):
        add(f"{ratio}_cluster_vs_engine", name, first, COUPLED)
        add(f"{ratio}_vs_vllm", name, first, "vllm")
    for clients in options.load.concurrency:
        add(f"output_{clients}_cluster_vs_engine", "output", first, COUPLED, clients=clients)
        add(f"ttft_p50_{clients}_cluster_vs_engine", "TTFT p50", first, COUPLED, clients=clients)
        add(f"tbt_p99_{clients}_cluster_vs_engine", "TBT p99", first, COUPLED, clients=clients)
    add("tbt_p99_disturbed_cluster_vs_engine", "TBT p99", first, COUPLED, arriving=options.load.long_tokens)
    if {"shm", "tcp"} <= set(options.transports):
        add("handoff_tcp_vs_shm", "hand-off not hidden by prefill, cold", _cluster("tcp"), _cluster("shm"))
        add(f"output_{most}_tcp_vs_shm", "output", _cluster("tcp"), _cluster("shm"), clients=most)
    report.notes.append(
        f"{available_cores()} cores for everything: the cluster's nodes, its conductor and the clients share them"
    )
