"""``mooncake bench conductor``: placement decisions per second on one core, compared with the design targets.

A decision is everything between a prompt's tokens (or hashes) and the two calls to nodes: hash, match against all
nodes, choose the pair, predict it, book it. It has no I/O, and the code is that of the live conductor. The cluster is
busy: queues on every prefill node, prompts that share system prompts with all others and conversations with a few, and
nodes that report samples all the time.
"""

from __future__ import annotations

import gc
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.progress import Progress

from conductor.placement.bookings import Booking
from conductor.placement.cost import CostModel, DecodeCost, PrefillCost, StartCosts, TransferCost
from conductor.placement.fleet import Fleet
from conductor.placement.policies import DEFAULT_POLICY, POLICIES
from conductor.placement.scheduler import PlacementScheduler
from conductor.placement.view import RequestFacts, Shape
from conductor.prefixes.index import PrefixIndex
from conductor.registry import NodeInfo, Registry
from mooncake.app.bench.report import Figure, Report, Value, tell
from mooncake.app.cli.flags import Flags, numbers
from mooncake.errors import ConfigError
from mooncake.hashing import chain_seed, extend_chain
from mooncake.types import BlockEvent, BlockKey, Role, SegmentAddress, TokenIds

BLOCK_TOKENS = 64
SHAPE = Shape(BLOCK_TOKENS, block_bytes=8 << 20, num_layers=32, chunk_tokens=2048)
START = StartCosts(
    PrefillCost(5.0, 0.03, 1e-6, is_known=True),
    DecodeCost(8.0, 0.1, 1e-4, is_known=True),
    TransferCost(0.2, 4e-8, is_known=True),
)
TARGETS = {100: 20_000.0, 1000: 5_000.0}  # decisions per second by number of nodes
HASHING_TARGET = 4_000.0  # with 100 nodes, including hashing the prompt
P99_TARGET_MS = 1.0
SYSTEM_PROMPTS = 20
OPEN_A_NODE = 4  # running requests per node
HEARTBEATS_EVERY = 20  # decisions between two reports of nodes


@dataclass(frozen=True, slots=True)
class Options:
    nodes: tuple[int, ...]
    blocks: int
    prompt_blocks: int
    decisions: int
    reps: int
    policy: str
    seed: int
    json: Path | None


def main(args: list[str]) -> None:
    """Raises ConfigError for a wrong option."""
    options = parse(args)
    config: dict[str, object] = {
        "policy": options.policy,
        "prompt_blocks": options.prompt_blocks,
        "block_tokens": BLOCK_TOKENS,
        "index_blocks": options.blocks,
        "targets": {**{f"decisions_per_s_{nodes}": rate for nodes, rate in TARGETS.items()}, "hashing": HASHING_TARGET},
    }
    report = Report("conductor", config, options.seed)
    with report.measuring("deciding") as shown:
        measure(options, report, shown)
    report.notes.append(
        "N nodes are N/2 prefill and N/2 decode nodes; each prefill host has a store. A ratio is the figure over its "
        "target: above 1 is better for decisions per second, below 1 for p99. Decisions per second are those of one "
        "core's CPU time; p50 and p99 are by the clock, and include other load on the machine."
    )
    report.finish(options.json)


def parse(args: list[str]) -> Options:
    flags = Flags("bench conductor", __doc__)
    add = flags.add
    add("--nodes", default="100,1000", help="prefill and decode nodes together, comma-separated")
    add("--blocks", type=int, default=1_000_000, help="blocks in the prefix index of the largest cluster")
    add("--prompt-blocks", type=int, default=250, metavar="BLOCKS", help="length of prompts")
    add("--decisions", type=int, default=3000, help="decisions per repetition")
    flags.reps(5)
    add("--policy", default=DEFAULT_POLICY, help=f"one of {', '.join(POLICIES)}")
    flags.seed()
    flags.json_file()
    given = flags.read(args)
    if given.policy not in POLICIES:
        raise ConfigError(f"no policy is called {given.policy!r}; there are: {', '.join(POLICIES)}")
    given.nodes = numbers("--nodes", given.nodes, 2)
    if min(given.decisions, given.prompt_blocks) < 1 or given.blocks < 0:
        raise ConfigError("--decisions and --prompt-blocks must be at least 1, --blocks at least 0")
    return Options(**vars(given))


def measure(options: Options, report: Report, shown: Progress) -> None:
    tell(shown, "memory of the index")
    _memory(report, options)
    for nodes in options.nodes:
        tell(shown, f"{nodes} nodes: filling the index")
        cluster = BusyCluster(nodes, options.blocks * nodes // max(options.nodes), options)
        tell(shown, f"{nodes} nodes")
        _decide(report, options, cluster, "hashes given", hashed=False)
        if nodes == 100:
            tell(shown, f"{nodes} nodes, hashing too")
            _decide(report, options, cluster, "hashed too", hashed=True)
        _applying(report, options, cluster)


def _decide(report: Report, options: Options, cluster: BusyCluster, name: str, hashed: bool) -> None:
    rates, p50s, p99s = [], [], []
    cluster.decide(options.decisions // 4 + 1, hashed)
    for _ in range(options.reps):
        times, core_s = cluster.decide(options.decisions, hashed)
        rates.append(len(times) / core_s)
        p50s.append(1e3 * float(np.quantile(times, 0.5)))
        p99s.append(1e3 * float(np.quantile(times, 0.99)))
    nodes = cluster.num_nodes
    params: dict[str, Value] = {"nodes": nodes, "prompt": name}
    rate = Figure("conductor", "decisions", "1/core-s", tuple(rates), more_is_better=True, params=params)
    p99 = Figure("conductor", "decision p99", "ms", tuple(p99s), params=params)
    report.add(rate, Figure("conductor", "decision p50", "ms", tuple(p50s), params=params), p99)
    if hashed:
        report.ratios["decisions_per_s_hashing"] = rate.best / HASHING_TARGET
        report.ratios["p99_hashing"] = p99.best / P99_TARGET_MS
    elif nodes in TARGETS:
        report.ratios[f"decisions_per_s_{nodes}"] = rate.best / TARGETS[nodes]
        report.ratios[f"p99_{nodes}"] = p99.best / P99_TARGET_MS


def _memory(report: Report, options: Options) -> None:
    """Memory of the process per block in an index of 1,000 nodes, with each block on two of them."""
    rng, index = random.Random(options.seed), PrefixIndex(max(options.blocks, 1))
    index.apply("warm", [BlockEvent(True, BlockKey(rng.randbytes(32))) for _ in range(1000)])
    before = _resident_bytes()
    while len(index) < options.blocks:
        events = [BlockEvent(True, BlockKey(rng.randbytes(32))) for _ in range(500)]
        for _ in range(2):
            index.apply(f"n{rng.randrange(1000)}", events)
        del events
    grown = _resident_bytes() - before
    report.add(Figure("index", "memory a block", "B", (grown / max(len(index), 1),), params={"blocks": len(index)}))


def _applying(report: Report, options: Options, cluster: BusyCluster) -> None:
    """Events of caches applied per second."""
    index, rng = cluster.scheduler.fleet.index, random.Random(options.seed)
    rates = []
    for _ in range(options.reps):
        keys = [BlockKey(rng.randbytes(32)) for _ in range(4000)]
        stored, removed = (
            [BlockEvent(what, key) for key in order] for what, order in ((True, keys), (False, keys[::-1]))
        )
        begin = time.perf_counter()
        index.apply("p0", stored)
        index.apply("p0", removed)
        rates.append(2 * len(keys) / (time.perf_counter() - begin))
    report.add(Figure("index", "events", "1/s", tuple(rates), more_is_better=True, params={"nodes": cluster.num_nodes}))


@dataclass(slots=True)
class Prompt:
    tokens: TokenIds
    keys: list[BlockKey]


@dataclass
class BusyCluster:
    """Nodes, caches, prompts and open requests, from one seed."""

    num_nodes: int
    num_blocks: int
    options: Options
    scheduler: PlacementScheduler = field(init=False)
    prompts: list[Prompt] = field(init=False)
    now: float = 1000.0
    number: int = 0
    open: list[Booking] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.options.seed)
        registry, index, costs = Registry("kv", BLOCK_TOKENS, 0.5, 1e9), PrefixIndex(), CostModel(START)
        half = self.num_nodes // 2
        for i in range(half):
            registry.register(_node(f"p{i}", Role.PREFILL, f"host{i}"), self.now)
            registry.register(_node(f"d{i}", Role.DECODE, f"decode{i}"), self.now)
            registry.register(_node(f"s{i}", Role.STORE, f"host{i}"), self.now)
        fleet = Fleet(registry, costs, index, SHAPE.chunk_tokens)
        self.scheduler = PlacementScheduler(
            fleet, SHAPE, POLICIES[self.options.policy], np.random.default_rng(self.options.seed)
        )
        fleet.view(self.now)
        self.prompts = self._make_prompts(rng)
        self._fill(rng)
        gc.collect()

    def decide(self, count: int, hashed: bool) -> tuple[list[float], float]:
        """Seconds of each decision by the clock, and CPU seconds of all, which exclude other programs. Requests end and
        nodes report between decisions, as in a live cluster."""
        seed, scheduler, times, core_s = chain_seed("kv"), self.scheduler, list[float](), 0.0
        for _ in range(count):
            self.number += 1
            self.now += 1e-4
            prompt = self.prompts[self.number * 7 % len(self.prompts)]
            core_begin, begin = time.thread_time(), time.perf_counter()
            keys = extend_chain(seed, prompt.tokens, BLOCK_TOKENS) if hashed else prompt.keys
            facts = RequestFacts(len(prompt.tokens), keys, 200.0, session=f"s{self.number % 5000}", number=self.number)
            placement = scheduler.place(facts, self.now)
            booking = scheduler.book(facts, placement, self.now)
            times.append(time.perf_counter() - begin)
            core_s += time.thread_time() - core_begin
            self.open.append(booking)
            self._live_on()
        return times, core_s

    def _live_on(self) -> None:
        """End requests and report samples of nodes."""
        if len(self.open) > OPEN_A_NODE * self.num_nodes:
            for booking in self.open[: self.num_nodes]:
                self.scheduler.close(booking, self.now)
            del self.open[: self.num_nodes]
        if self.number % HEARTBEATS_EVERY == 0:
            costs, at = self.scheduler.fleet.costs, self.number // HEARTBEATS_EVERY % (self.num_nodes // 2)
            costs.observe_prefill(f"p{at}", 8000, 8000, START.prefill.ms(8000, 8000, 4) * (1 + at % 7 / 20))
            costs.observe_decode(f"d{at}", 32, 256_000, START.decode.ms(32, 256_000))
            costs.observe_transfer(f"p{at}", f"d{self.number % (self.num_nodes // 2)}", 500 << 20, 21.0)

    def _make_prompts(self, rng: random.Random) -> list[Prompt]:
        seed, length = chain_seed("kv"), self.options.prompt_blocks * BLOCK_TOKENS
        draw = np.random.default_rng(self.options.seed)
        systems = [
            draw.integers(0, 100_000, rng.randint(10, 30) * BLOCK_TOKENS, np.uint32) for _ in range(SYSTEM_PROMPTS)
        ]
        prompts = []
        for _ in range(1000):
            system = systems[min(int(rng.paretovariate(1.0)) - 1, SYSTEM_PROMPTS - 1)][:length]
            tokens = np.concatenate([system, draw.integers(0, 100_000, length - len(system), np.uint32)])
            prompts.append(Prompt(tokens, extend_chain(seed, tokens, BLOCK_TOKENS)))
        for system in systems:  # all nodes have them
            keys = [BlockEvent(True, key) for key in extend_chain(seed, system[:length], BLOCK_TOKENS)]
            for info in self.scheduler.fleet.registry.nodes():
                self.scheduler.fleet.index.apply(info.info.node_id, keys)
        return prompts

    def _fill(self, rng: random.Random) -> None:
        """Fill the index: most prompts are cached on one to three hosts and a decode node; the rest are others."""
        index, half = self.scheduler.fleet.index, self.num_nodes // 2
        for number, prompt in enumerate(self.prompts[: len(self.prompts) * 4 // 5]):
            known = prompt.keys[: rng.randint(len(prompt.keys) // 8, len(prompt.keys))]
            events = [BlockEvent(True, key) for key in known]
            hosts = [rng.randrange(half) for _ in range(1 + number % 3)]
            for host in hosts:
                index.apply(f"s{host}", events)
            index.apply(f"p{hosts[0]}", events)
            index.apply(f"d{rng.randrange(half)}", events)
        while len(index) < self.num_blocks:
            events = [BlockEvent(True, BlockKey(rng.randbytes(32))) for _ in range(200)]
            index.apply(f"s{rng.randrange(half)}", events)
            index.apply(f"p{rng.randrange(half)}", events)


def _node(node_id: str, role: Role, host: str) -> NodeInfo:
    segment = SegmentAddress(node_id, 1, host, "@x", "127.0.0.1:1", SHAPE.block_bytes, 1)
    return NodeInfo(node_id, role, hash(node_id) & 0xFFFF, f"{host}:1", segment, "kv", BLOCK_TOKENS, 0)


def _resident_bytes() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
