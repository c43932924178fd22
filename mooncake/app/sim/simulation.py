"""One run: a trace against a cluster in virtual time, with the shipped conductor in the middle.

Placement, booking, cost fitting and the prefix index are the conductor's own classes, given virtual time. Machines,
links and clients are simulated here. A request's way: placed, (fetches a prefix), computed, handed over, decoded; each
step calls the conductor exactly where the live dispatcher does.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from conductor.cost import CostModel, DecodeCost, PrefillCost, StartCosts, TransferCost
from conductor.fleet import Fleet
from conductor.policies import POLICIES
from conductor.prefix_index import PrefixIndex
from conductor.registry import NodeInfo, NodeLoad, Registry
from conductor.scheduler import Placement, Scheduler
from conductor.stats import DispatchStats
from conductor.view import RequestFacts, Shape
from mooncake.app.sim.cache import HostCache
from mooncake.app.sim.cluster import Cluster, Machines
from mooncake.app.sim.coupled import CoupledMachine
from mooncake.app.sim.decode import DecodeMachine
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.links import Flow, Network
from mooncake.app.sim.prefill import PrefillMachine
from mooncake.app.sim.requests import Fate, Flight, Results
from mooncake.app.sim.timeline import Timeline
from mooncake.errors import ConfigError, Overloaded, TryLater
from mooncake.trace import TRACE_BLOCK_TOKENS, TraceRequest
from mooncake.types import BlockKey, Role, SegmentAddress

MAX_ATTEMPTS = 4
DECODE_SAMPLE_BEATS = 10  # a decode machine's step time is learnt from every tenth heartbeat: it is without noise here
FINGERPRINT = "simulated"


@dataclass(frozen=True, slots=True)
class Run:
    """How a trace is played: ``speed`` 2 sends twice as many requests in a second; ``jitter_s`` spreads each arrival
    over so much trace time (published traces come in ticks of 3 s)."""

    seed: int = 0
    speed: float = 1.0
    jitter_s: float = 3.0
    max_output: int | None = None


class Simulation:
    """Build, ``run``, read ``results``. Everything random comes from ``run.seed``."""

    def __init__(self, cluster: Cluster, trace: Sequence[TraceRequest], run: Run = Run()) -> None:
        if cluster.conductor.policy not in POLICIES:
            raise ConfigError(f"no policy is called {cluster.conductor.policy!r}; there are: {', '.join(POLICIES)}")
        self.cluster = cluster
        self.trace = trace
        self.options = run
        self.agenda = Agenda()
        self.network = Network(self.agenda, cluster.latency_ms / 1e3)
        self.results = Results(trace)
        self.timeline = Timeline()
        model = cluster.model
        self._block_tokens = model.block_tokens
        self._stride = model.block_tokens // TRACE_BLOCK_TOKENS
        self._arrival_rng, policy_rng = (
            np.random.default_rng(seed) for seed in np.random.SeedSequence(run.seed).spawn(2)
        )
        self.registry = Registry(FINGERPRINT, model.block_tokens, cluster.conductor.heartbeat_s, math.inf)
        self.index = PrefixIndex()
        self.costs = CostModel(_start_costs(cluster))
        self.fleet = Fleet(self.registry, self.costs, self.index)
        shape = Shape(model.block_tokens, model.block_tokens * model.token_bytes, model.num_layers)
        self.scheduler = Scheduler(self.fleet, shape, POLICIES[cluster.conductor.policy], policy_rng)
        self.stats = DispatchStats()
        self.stats.recent_output_tokens.append(round(cluster.conductor.expected_output_tokens))
        self.prefill: dict[str, PrefillMachine] = {}
        self.decode: dict[str, DecodeMachine] = {}
        self.coupled: dict[str, CoupledMachine] = {}
        self._names: Counter[str] = Counter()  # how many machines of each role there were
        self._incarnations = itertools.count(1)
        self._open = 0  # requests under way
        self._beats = 0
        self._next = 0  # of the trace, in order of arrival
        self._order = self._arrivals()
        self._has_decode = cluster.count("decode") > 0
        self._on_progress: Callable[[int], None] = lambda _: None
        for group in cluster.machines:
            for _ in range(group.count):
                self._add_machine(group)

    # The run

    def run(self, on_progress: Callable[[int], None] | None = None) -> Results:
        """Play everything; ``on_progress`` hears how many requests have arrived, every now and then."""
        if on_progress is not None:
            self._on_progress = on_progress
        self._plan_arrival()
        self.agenda.after(self.cluster.conductor.heartbeat_s, self._heartbeats)
        self.agenda.run()
        return self.results

    def _arrivals(self) -> list[int]:
        results, options = self.results, self.options
        jitter = self._arrival_rng.uniform(0.0, options.jitter_s, results.size) if options.jitter_s else 0.0
        results.arrival_s = (results.arrival_s - results.arrival_s.min() + jitter) / options.speed
        if options.max_output is not None:
            results.output_tokens = np.minimum(results.output_tokens, options.max_output)
        return [int(index) for index in np.argsort(results.arrival_s, kind="stable")]

    def _plan_arrival(self) -> None:
        if self._next < len(self._order):
            self.agenda.at(float(self.results.arrival_s[self._order[self._next]]), self._arrive)
        self._on_progress(self._next)

    def _arrive(self) -> None:
        index = self._order[self._next]
        self._next += 1
        flight = Flight(
            index,
            int(self.results.input_tokens[index]),
            int(self.results.output_tokens[index]),
            self._block_keys(self.trace[index]),
        )
        self._open += 1
        self.stats.requests += 1
        self._place(flight)
        self._plan_arrival()

    def _block_keys(self, request: TraceRequest) -> list[BlockKey]:
        """Names of the prompt's full blocks. A trace's id names a block with all before it, so of coarser blocks every
        so many-th id is the name."""
        full = request.input_length // self._block_tokens
        ids = request.hash_ids[self._stride - 1 :: self._stride][:full]
        return [BlockKey(block.to_bytes(16, "little")) for block in ids]

    # Placement

    def _place(self, flight: Flight) -> None:
        now = self.agenda.now
        facts = self._facts(flight)
        try:
            placement = self.scheduler.place(facts, now)
        except TryLater as refusal:
            retry_s = refusal.retry_after_s if isinstance(refusal, Overloaded) else math.nan
            self._end(flight, Fate.REJECTED if flight.attempts == 0 else Fate.FAILED, retry_s)
            return
        flight.begin_attempt()
        flight.attempts += 1
        flight.placement = placement
        flight.ticket = self.scheduler.book(facts, placement, now)
        if flight.attempts == 1:
            flight.predicted_ttft_s = placement.predicted_ttft_ms / 1e3
        flight.prefill_id = placement.prefill.node_id
        flight.decode_id = placement.decode.node_id if placement.decode else ""
        if self.coupled:
            self.coupled[flight.prefill_id].submit(flight)
            return
        self._fetch(flight, placement)
        self.prefill[flight.prefill_id].submit(flight)

    def _facts(self, flight: Flight) -> RequestFacts:
        return RequestFacts(
            num_tokens=flight.num_tokens,
            keys=flight.keys,
            expected_tokens=self.stats.expected_output_tokens(1 << 20),
            needs_decode=self._has_decode and flight.output_tokens > 1,
            session=flight.session,
            number=self.stats.requests,
        )

    def _fetch(self, flight: Flight, placement: Placement) -> None:
        """Start moving the prefix that another host has; without one the prompt is ready."""
        source = placement.pools[0].host_id if placement.pools else ""
        if not placement.fetched_tokens or source == placement.prefill.host_id:
            flight.is_ready = True
            return
        store = self.prefill[source].cache
        run = min(store.match(flight.keys), (placement.local_tokens + placement.fetched_tokens) // self._block_tokens)
        own = self.prefill[flight.prefill_id].cache.match(flight.keys[:run])
        if run <= own:
            flight.is_ready = True
            return
        flight.source_held = store.hold(flight.keys, run)
        flight.fetched_tokens = (run - own) * self._block_tokens
        num_bytes = flight.fetched_tokens * self.cluster.model.token_bytes

        def arrived(flow: Flow) -> None:
            self._fetched(flight, source, run, flow)

        flight.transfers.append(self.network.send(source, placement.prefill.host_id, num_bytes, arrived))

    def _fetched(self, flight: Flight, source: str, run: int, flow: Flow) -> None:
        self.prefill[source].cache.release(flight.source_held)
        flight.source_held = []
        flight.transfers.remove(flow)
        self._tell_index(source)
        machine = self.prefill[flight.prefill_id]
        machine.cache.add(flight.keys[:run])
        flight.held = machine.cache.hold(flight.keys, machine.cache.match(flight.keys[:run]))
        self._tell_index(machine.name)
        took_ms = (self.agenda.now - flow.started_s) * 1e3
        self.costs.observe_transfer(flight.prefill_id, _store_id(source), int(flow.num_bytes), took_ms)
        flight.is_ready = True
        machine.make_ready()

    # Prefill

    def _prefill_starts(self, flight: Flight, work_s: float) -> None:
        if not flight.decode_id:
            flight.is_handed_over = True
            return
        assert flight.placement is not None
        num_bytes = flight.placement.sent_blocks * self._block_tokens * self.cluster.model.token_bytes
        if not num_bytes:
            flight.is_handed_over = True
            return

        def arrived(flow: Flow) -> None:
            self._handed_over(flight, flow)

        # Layers leave as they are computed, so the flow cannot be faster than the computation is.
        limit = num_bytes / work_s
        flight.transfers.append(self.network.send(flight.prefill_id, flight.decode_id, num_bytes, arrived, limit))

    def _prefill_ends(self, flight: Flight, work_s: float) -> None:
        now, results, index = self.agenda.now, self.results, flight.index
        assert flight.ticket is not None
        self.scheduler.prefill_done(flight.ticket, now)
        new_tokens = flight.num_tokens - flight.cached_tokens
        machine = self.prefill[flight.prefill_id]
        computing_ms = work_s * 1e3 - machine.load_ms(flight.cached_tokens)
        self.costs.observe_prefill(flight.prefill_id, new_tokens, flight.cached_tokens, computing_ms)
        self._tell_index(flight.prefill_id)
        flight.is_prefilled = True
        results.prefill_ms[index] += work_s * 1e3
        if math.isnan(flight.first_token_s):
            flight.first_token_s = now
            results.ttft_s[index] = now - results.arrival_s[index]
            results.queue_s[index] = flight.started_s - results.arrival_s[index]
            results.predicted_ttft_s[index] = flight.predicted_ttft_s
            results.cached_tokens[index] = flight.cached_tokens
            results.fetched_tokens[index] = min(flight.fetched_tokens, flight.cached_tokens)
        if not flight.decode_id:
            self._finished(flight, math.nan)
        elif flight.is_handed_over:
            self._join_decode(flight)

    def _first_token(self, flight: Flight, spent_s: float) -> None:
        """Of a coupled machine."""
        now, results, index = self.agenda.now, self.results, flight.index
        assert flight.ticket is not None
        self.scheduler.prefill_done(flight.ticket, now)
        flight.first_token_s = now
        results.prefill_ms[index] += spent_s * 1e3
        results.ttft_s[index] = now - results.arrival_s[index]
        results.queue_s[index] = flight.started_s - results.arrival_s[index]
        results.cached_tokens[index] = flight.cached_tokens

    def _handed_over(self, flight: Flight, flow: Flow) -> None:
        flight.transfers.remove(flow)
        flight.is_handed_over = True
        if flight.is_prefilled:
            self._join_decode(flight)

    def _join_decode(self, flight: Flight) -> None:
        self.decode[flight.decode_id].join(flight)

    # Endings

    def _finished(self, flight: Flight, tail_ms: float) -> None:
        now, results, index = self.agenda.now, self.results, flight.index
        gaps = int(results.output_tokens[index]) - 1
        if gaps:
            results.tail_tbt_ms[index] = tail_ms
            results.mean_tbt_ms[index] = (now - flight.first_token_s) * 1e3 / gaps
        self.stats.recent_output_tokens.append(int(results.output_tokens[index]))
        self._end(flight, Fate.DONE, math.nan)

    def _end(self, flight: Flight, fate: Fate, retry_s: float) -> None:
        now, results, index = self.agenda.now, self.results, flight.index
        if flight.ticket is not None:
            self.scheduler.close(flight.ticket, now)
        assert results.fate[index] == Fate.OPEN, "a request ended twice"
        results.fate[index] = fate
        results.end_s[index] = now
        results.retry_after_s[index] = retry_s
        results.attempts[index] = flight.attempts
        self._open -= 1

    # What nodes report

    def _heartbeats(self) -> None:
        now = self.agenda.now
        self._beats += 1
        self._look(now)
        for name, machine in self.decode.items():
            node = self.registry.get(name)
            if node is None:
                continue
            blocks = machine.kv_tokens // self._block_tokens
            used = -(-machine.reserved_tokens // self._block_tokens)
            load = NodeLoad(
                running=len(machine.running),
                waiting=len(machine.waiting),
                context_tokens=machine.context_now,
                blocks_total=blocks,
                blocks_free=max(blocks - used, 0),
            )
            self.registry.heartbeat(name, node.info.incarnation, load, False, now)
            self.fleet.heard(name, load)
            if machine.running and self._beats % DECODE_SAMPLE_BEATS == 0:
                self.costs.observe_decode(name, len(machine.running), machine.context_now, machine.step_ms)
        if self._open or self._next < len(self._order):
            self.agenda.after(self.cluster.conductor.heartbeat_s, self._heartbeats)

    def _look(self, now: float) -> None:
        timeline, num_prefill, num_decode = self.timeline, max(len(self.prefill), 1), max(len(self.decode), 1)
        running = [machine for machine in self.decode.values() if machine.running]
        timeline.at_s.append(now)
        timeline.prefill_load.append(sum(m.running is not None for m in self.prefill.values()) / num_prefill)
        timeline.queued.append(sum(len(m.queue) for m in self.prefill.values()) / num_prefill)
        timeline.batch.append(sum(len(m.running) for m in running) / num_decode / 64)
        timeline.step_ms.append(sum(m.step_ms for m in running) / max(len(running), 1))

    def _tell_index(self, machine: str) -> None:
        events = self.prefill[machine].cache.take_events()
        if events:
            self.index.apply(_store_id(machine), events)

    # Machines

    def _add_machine(self, group: Machines) -> None:
        curve, model = self.cluster.curves[group.curve], self.cluster.model
        name = f"{group.role}-{self._names[group.role]}"
        self._names[group.role] += 1
        self.network.join(name, group.nic_gb_per_s * 1e9)
        if group.role == "coupled":
            self.coupled[name] = CoupledMachine(
                name, group, curve, model, self.agenda, self._first_token, self._finished
            )
            self._register(name, name, Role.PREFILL, 0)
            return
        if group.role == "decode":
            self.decode[name] = DecodeMachine(name, group, curve, model, self.agenda, self._finished)
            self._register(name, name, Role.DECODE, group.max_sequences)
            return
        cache = HostCache(group.store_tokens // model.block_tokens, model.block_tokens)
        self.prefill[name] = PrefillMachine(
            name, group, curve, model, self.agenda, cache, self._prefill_starts, self._prefill_ends
        )
        self._register(name, name, Role.PREFILL, 0)
        self._register(_store_id(name), name, Role.STORE, 0)
        load_ms = 1e3 / (group.load_gb_per_s * 1e9)
        for num_bytes in (10**8, 10**9, 10**10):  # a node has read from its own host's memory before
            self.costs.observe_transfer(name, _store_id(name), num_bytes, num_bytes * load_ms)

    def _register(self, node_id: str, host: str, role: Role, max_sequences: int) -> None:
        incarnation = next(self._incarnations)
        segment = SegmentAddress(node_id, incarnation, host, "", "", 0, 0)
        info = NodeInfo(node_id, role, incarnation, node_id, segment, FINGERPRINT, self._block_tokens, max_sequences)
        self.registry.register(info, self.agenda.now)
        self.index.join(node_id)


def _store_id(host: str) -> str:
    return f"store-{host}"


def _start_costs(cluster: Cluster) -> StartCosts:
    """What ``mooncake calibrate`` would have found on the first machine of each role."""
    prefill, decode = PrefillCost(), DecodeCost()
    for group in reversed(cluster.machines):
        curve = cluster.curves[group.curve]
        if group.role != "decode":
            prefill = PrefillCost(curve.prefill_step_ms, curve.prefill_token_ms, curve.prefill_pair_ms, True)
        if group.role != "prefill":
            decode = DecodeCost(curve.decode_step_ms, curve.decode_sequence_ms, curve.decode_context_ms, True)
    speed = min(group.nic_gb_per_s for group in cluster.machines)
    return StartCosts(prefill, decode, TransferCost(cluster.latency_ms, 1e-6 / speed, True))
