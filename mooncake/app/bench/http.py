"""``mooncake bench http``: OpenAI servers under the same load, as clients of their HTTP API see them.

A cluster of ours with separate prefill and decode nodes, one with a coupled node that does both, and vLLM's server, in
turns on the same cores. Only one of them runs at a time; clients share its cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace
from rich.progress import Progress

from mooncake.app.bench.load.http_client import ChatsByHttp, ServedByHttp
from mooncake.app.bench.load.options import FIRST_TOKENS, LoadOptions, add_load_flags, load_options
from mooncake.app.bench.load.traffic import Served, Traffic
from mooncake.app.bench.peers.hf_folder import hf_folder
from mooncake.app.bench.peers.server import PeerServer
from mooncake.app.bench.report import Report, tell
from mooncake.app.bench.shared.processor_time import cpu_s
from mooncake.app.cli.flags import Flags
from mooncake.app.cluster.local import LocalCluster
from mooncake.app.cluster.preflight import available_cores
from mooncake.app.cluster.role_main import run_async, unless_stopped
from mooncake.app.latency import percentile
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.errors import ConfigError, InternalError, MooncakeError, NodeUnavailable

CLUSTER, COUPLED, VLLM = "cluster", "coupled", "vllm"
MODEL_NAME = "model"
SPREAD = 0.5
STREAMS, STREAM_PROMPT = 32, 16  # at once, and the tokens of their prompts, where the front's time is measured
STREAM_ANSWERS = 4  # times ``--new`` tokens
CLIENTS, REQUESTS = 16, 8  # at once, and of each one after the other, where the front's time for a request is measured
COMPLETION, CHAT = "completion", "chat"
SHORT = ((COMPLETION, 128, 1), (CHAT, 96, 1), (CHAT, 96, 2))  # tokens or words of prompts, tokens of answers
SETTLE_S = 5.0  # after the start of ours, whose memory is provided meanwhile
FRONT, FRONT_REQUEST = "front, CPU a token", "front, CPU a request"
NOTES = (
    "output: tokens a second of all clients, each sending its next request when it has its answer",
    "prompts and answers are up to half longer or shorter",
    f"{FRONT}: processor time of the process that clients speak to (our conductor, vLLM's API server) for {STREAMS} "
    f"streams with prompts of {STREAM_PROMPT} tokens, from their requests to their ends, over all tokens",
    f"{FRONT_REQUEST}: likewise, over requests of {CLIENTS} clients for one token to prompts of some 128, as ids or in "
    "chats; in a cluster such a request goes to a prefill node alone, and one for two tokens to both nodes",
    "one server runs at a time, on all cores, which clients share; ratios of rates are better above 1, of times below",
)


def main(args: list[str]) -> None:
    """Raises MooncakeError for a wrong option, an unreadable model, or a server that does not start or fails.

    What was measured before a server failed, or before Ctrl-C (Cancelled), is reported first.
    """
    options = parse(args)
    checkpoint = open_checkpoint(options.config.model.path, options.config.model.max_model_len)
    dtype = options.config.precision(checkpoint.coding).weights.dtype
    report = Report("http", options.told() | {"dtype": dtype}, options.seed, notes=list(NOTES))
    failure: MooncakeError | None = None
    with report.measuring("measuring") as shown, ExitStack() as stack:
        peer = _start_vllm(options, checkpoint, dtype, stack, report, shown) if options.vllm_python else None
        try:
            run_async(unless_stopped(_HttpBench(options, checkpoint, peer, report, shown).run()))
        except (NodeUnavailable, InternalError) as error:
            failure = error
            report.notes.append(f"ended before all turns: {error.message}")
    compare(report, options)
    report.finish(options.json)
    if failure is not None:
        raise failure


def parse(args: list[str]) -> LoadOptions:
    flags = Flags("bench http", __doc__)
    vllm = "compare with the server of vLLM in this interpreter's environment"
    quick = "a minute instead of ten: 1 and 4 clients, short prompts, one turn"
    add_load_flags(flags, requests=4, reps="turns of each server", vllm=vllm, quick=quick)
    given = flags.read(args)
    if given.quick:
        given.concurrency, given.prompt, given.new, given.long = "1,4", 64, 8, 512
        given.requests, given.reps = 1, 1
    needed = int((1 + SPREAD) * (given.prompt + given.new))
    what = "one and a half times --prompt plus --new"
    if (streamed := STREAM_PROMPT + STREAM_ANSWERS * given.new) > needed:
        needed, what = streamed, f"{STREAM_ANSWERS} times --new and a prompt"
    load = load_options(given, needed, what)
    if load.config.conductor.ssl_certfile:
        raise ConfigError("bench http does not encrypt: it takes no conductor.ssl_certfile")
    return load


def _start_vllm(
    options: LoadOptions, checkpoint: Checkpoint, dtype: str, stack: ExitStack, report: Report, shown: Progress
) -> PeerServer:
    tell(shown, "starting vllm")
    peer = PeerServer(
        options.vllm_python,
        stack.enter_context(hf_folder(checkpoint.path, dtype, options.peer_model)),
        MODEL_NAME,
        dtype,
        threads=available_cores(),
        max_model_len=options.config.model.max_model_len,
    )
    stack.enter_context(peer)
    report.config[VLLM] = peer.facts
    return peer


@dataclass(slots=True)
class _HttpBench:
    """Measures every server once in each turn, with new prompts of the same lengths."""

    options: LoadOptions
    checkpoint: Checkpoint
    peer: PeerServer | None
    report: Report
    shown: Progress

    async def run(self) -> None:
        for turn in range(self.options.reps):
            for name in (CLUSTER, COUPLED, *([VLLM] if self.peer else [])):
                self._tell(name, turn, "starting")
                async with self._served(name) as served:
                    await self._measure(served, turn)

    @asynccontextmanager
    async def _served(self, name: str) -> AsyncIterator[ServedByHttp]:
        if name == VLLM:
            assert self.peer is not None
            with self.peer.awake():
                yield ServedByHttp(name, self.peer.port, MODEL_NAME, self.peer.pid)
            return
        config = self.options.config
        config = replace(config, model=replace(config.model, name=MODEL_NAME))
        if name == COUPLED:
            config = replace(config, cluster=replace(config.cluster, coupled=1, switchable=False))
        async with LocalCluster(config) as cluster:
            await asyncio.sleep(SETTLE_S)
            pid = cluster.pids["conductor"]
            yield ServedByHttp(name, cluster.config.conductor.http_port, MODEL_NAME, pid)

    async def _measure(self, served: ServedByHttp, turn: int) -> None:
        options = self.options
        traffic = Traffic(self.checkpoint.config.vocab_size, f"{options.seed} {turn}")  # the same for every server
        self._tell(served.name, turn, "warming up")
        for _ in range(2):
            await served.ask(traffic.prompt(options.prompt_tokens), FIRST_TOKENS)
        for clients in options.concurrency:
            self._tell(served.name, turn, f"{clients} clients")
            await self._measure_load(served, traffic, clients)
        if served.pid:
            self._tell(served.name, turn, f"{STREAMS} streams")
            await self._measure_front(served, traffic)
            self._tell(served.name, turn, "short answers")
            for asked, length, new in SHORT:
                await self._measure_front_request(served, traffic, asked, length, new)
        self._tell(served.name, turn, "long prompts")
        prompt = traffic.prompt(options.long_tokens)
        for kind in ("cold", "repeated"):
            answer = await served.ask(prompt, FIRST_TOKENS)
            self.report.add_value(served.name, f"TTFT, {kind}", "ms", answer.ttft_ms, prompt=options.long_tokens)

    async def _measure_load(self, served: Served, traffic: Traffic, clients: int) -> None:
        options, add = self.options, partial(self.report.add_value, served.name, clients=clients)
        sizes = (options.requests, options.prompt_tokens, options.new_tokens)
        run = await traffic.closed_loop(served, clients, *sizes, SPREAD)
        add("output", "tok/s", run.tokens_per_s, more_is_better=True)
        firsts_ms, gaps_ms = sorted(answer.ttft_ms for answer in run.answers), sorted(run.gaps_ms)
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            add(f"TTFT {name}", "ms", percentile(firsts_ms, share))
            add(f"TBT {name}", "ms", percentile(gaps_ms, share))

    async def _measure_front(self, served: ServedByHttp, traffic: Traffic) -> None:
        before_s = cpu_s(served.pid)
        run = await traffic.closed_loop(
            served.without_counts(), STREAMS, 1, STREAM_PROMPT, STREAM_ANSWERS * self.options.new_tokens
        )
        taken_s = cpu_s(served.pid) - before_s
        self.report.add_value(served.name, FRONT, "µs", 1e6 * taken_s / run.num_tokens, streams=STREAMS)

    async def _measure_front_request(
        self, served: ServedByHttp, traffic: Traffic, asked: str, prompt: int, new: int
    ) -> None:
        before_s = cpu_s(served.pid)
        run = await traffic.closed_loop(
            ChatsByHttp(served) if asked == CHAT else served, CLIENTS, REQUESTS, prompt, new
        )
        taken_s = cpu_s(served.pid) - before_s
        value = 1e6 * taken_s / len(run.answers)
        self.report.add_value(served.name, FRONT_REQUEST, "µs", value, asked=asked, tokens=new)

    def _tell(self, name: str, turn: int, what: str) -> None:
        tell(self.shown, f"turn {turn + 1} of {self.options.reps}: {name}, {what}")


def compare(report: Report, options: LoadOptions) -> None:
    """Add the ratios to the report."""
    for ours in (CLUSTER, COUPLED):
        for clients in options.concurrency:
            for ratio, name in (("output", "output"), ("ttft_p50", "TTFT p50"), ("tbt_p99", "TBT p99")):
                report.compare_subjects(f"{ratio}_{clients}_{ours}_vs_vllm", name, ours, VLLM, clients=clients)
        for ratio, name in (("front_cpu", FRONT), ("ttft", "TTFT, cold"), ("ttft_prefix", "TTFT, repeated")):
            report.compare_subjects(f"{ratio}_{ours}_vs_vllm", name, ours, VLLM)
        for asked, _, new in SHORT:
            ratio = f"front_{asked}_{new}_cpu_{ours}_vs_vllm"
            report.compare_subjects(ratio, FRONT_REQUEST, ours, VLLM, asked=asked, tokens=new)
