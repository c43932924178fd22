"""One run: a trace against a cluster in virtual time, with the real conductor in the middle.

A request is placed, (fetches a prefix), is computed, handed over and decoded; its way is here, what machines do is in
``machines``, and all decisions are the conductor's (``conductor``). Failures are reported to the conductor as the live
dispatcher would, and the request continues elsewhere with the tokens it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from conductor.control.replication import TICK_S
from conductor.registry import NodeLoad
from mooncake.app.sim.cluster import Cluster
from mooncake.app.sim.conductor import Refused, SimConductor, store_id
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.fetches import Fetches
from mooncake.app.sim.links import Flow, Network
from mooncake.app.sim.machines.sim_machines import SimMachines
from mooncake.app.sim.replicas import Replicas
from mooncake.app.sim.requests import Fate, Results, RetryTime, SimRequest
from mooncake.app.sim.switching import Switching
from mooncake.app.sim.timeline import Timeline
from mooncake.config import ConductorSection
from mooncake.errors import ConfigError, NodeUnavailable, Overloaded, TryLater
from mooncake.trace import TRACE_BLOCK_TOKENS, ResampledTrace, TraceRequest
from mooncake.types import BlockKey

LOOK_BESIDE_S = 0.002  # how often machines that share a processor are checked
_LIVE = ConductorSection()  # patience and retries are those of a live cluster
DECODE_SAMPLE_BEATS = 10  # a decode machine's step time is sampled every tenth heartbeat: it has no noise here


@dataclass(frozen=True, slots=True)
class Run:
    """How a trace is played: ``speed`` 2 sends twice as many requests per second; ``jitter_s`` spreads each arrival
    over this much trace time (published traces have ticks of 3 s)."""

    seed: int = 0
    speed: float = 1.0
    jitter_s: float = 3.0
    max_output: int | None = None
    tokens_per_block: int = TRACE_BLOCK_TOKENS  # tokens per id of the trace; fewer in a scaled trace
    returns: int = 0  # how often a refused client returns after its retry time; its times then start over


@dataclass(frozen=True, slots=True)
class Fault:
    """A machine dies with all its memory and comes back empty after ``down_s``; or it is slower for that time."""

    at_s: float
    machine: str
    down_s: float
    slowdown: float = 0.0  # 0: it dies


class Simulation:
    """Build, ``run``, read ``results``. Everything random comes from ``run.seed``."""

    def __init__(
        self, cluster: Cluster, trace: Sequence[TraceRequest], run: Run = Run(), faults: Sequence[Fault] = ()
    ) -> None:
        self.cluster = cluster
        self.trace = trace
        self.options = run
        self.agenda = Agenda()
        self.network = Network(self.agenda, cluster.latency_ms / 1e3)
        self.results = Results(trace)
        self.timeline = Timeline()
        self._arrival_rng, conductor_rng = np.random.default_rng(run.seed).spawn(2)
        self.conductor = SimConductor(cluster, conductor_rng)
        self._block_tokens = cluster.model.block_tokens
        self._sample_every = cluster.conductor.sample_every
        self._stride = _ids_per_block(cluster.model.block_tokens, run.tokens_per_block)
        self._absent_since: float | None = None  # since when a role has no machine
        self._waiting: dict[SimRequest, None] = {}  # requests that wait for a machine to return
        self.machines = SimMachines(cluster, self.agenda, self.network, self.conductor, self)
        self.fetches = Fetches(cluster, self.agenda, self.network, self.conductor, self.machines)
        self.replicas = Replicas(cluster.model, self.agenda, self.network, self.conductor, self.machines)
        self._switching = Switching(
            self.agenda, self.conductor, self.machines, cluster.conductor.switch_s, self._is_unused
        )
        self._faults = faults
        self._open: dict[SimRequest, None] = {}  # requests in progress
        self._beats = 0
        self._next = 0  # index into the trace, by arrival
        self._order = self._arrivals()
        self._on_progress: Callable[[int], None] = lambda _: None

    # The run

    def run(self, on_progress: Callable[[int], None] | None = None) -> Results:
        """Play everything; ``on_progress`` is called with the number of requests that have arrived."""
        if on_progress is not None:
            self._on_progress = on_progress
        for fault in self._faults:
            if fault.machine not in self.machines:
                raise ConfigError(f"no machine is called {fault.machine!r}")
            self.agenda.at(fault.at_s, self._strike, fault)
        self._plan_arrival()
        self.agenda.after(self.cluster.conductor.heartbeat_s, self._heartbeats)
        if any(group.beside != 1.0 for group in self.cluster.machines):
            self._look_beside()
        if self.conductor.replicator is not None and self.cluster.count("prefill") > 1:
            self._look_for_replicas()
        self.agenda.run()
        return self.results

    def _arrivals(self) -> list[int]:
        results, options = self.results, self.options
        jitter = self._arrival_rng.uniform(0.0, options.jitter_s, results.size) if options.jitter_s else 0.0
        results.arrival_s = (results.arrival_s - results.arrival_s.min() + jitter) / options.speed
        if options.max_output is not None:
            results.output_tokens = np.minimum(results.output_tokens, options.max_output)
        order: list[int] = np.argsort(results.arrival_s, kind="stable").tolist()
        return order

    def _plan_arrival(self) -> None:
        if self._next < len(self._order):
            self.agenda.at(self.results.arrival_s.item(self._order[self._next]), self._arrive)
        self._on_progress(self._next)

    def _arrive(self) -> None:
        index = self._order[self._next]
        self._next += 1
        results, trace = self.results, self.trace
        keys = self.block_keys(*trace.original(index) if isinstance(trace, ResampledTrace) else (trace[index],))
        request = SimRequest(index, results.input_tokens.item(index), results.output_tokens.item(index), keys)
        self._open[request] = None
        self.conductor.stats.requests += 1
        self._place(request)
        self._plan_arrival()

    def block_keys(self, request: TraceRequest, offset: int = 0) -> list[BlockKey]:
        """Names of the prompt's full blocks when blocks are larger than the trace's. A trace's id names a block with
        everything before it, so a coarser block has the name of its last part."""
        full = request.input_length // self._block_tokens
        ids = request.hash_ids[self._stride - 1 :: self._stride][:full]
        return cast("list[BlockKey]", [(block + offset).to_bytes(16, "little") for block in ids])

    # Placement

    def _place(self, request: SimRequest) -> None:
        try:
            self.conductor.place(request, self.agenda.now)
        except Refused as refusal:
            self._refused(request, refusal.retry_after_s)
            return
        except NodeUnavailable:
            self._wait_for_machine(request)
            return
        except TryLater as error:
            retry_s = error.retry_after_s if isinstance(error, Overloaded) else math.nan
            self._end(request, Fate.FAILED if request.attempts else Fate.REJECTED, retry_s)
            return
        machines = (request.prefill_id, request.decode_id)
        missing = [name for name in machines if name in self.machines.down] if self.machines.down else ()
        if missing:  # the conductor has not noticed yet: its call fails, which does not count as a retry
            self._try_again(request, missing, is_free=True)
        elif self.machines.coupled:
            self.machines.coupled[request.prefill_id].submit(request)
        else:
            self.fetches.begin(request)
            self.machines.prefill[request.prefill_id].submit(request)

    def _refused(self, request: SimRequest, retry_s: float) -> None:
        if request.returns == self.options.returns or math.isnan(retry_s):
            self._end(request, Fate.REJECTED, retry_s)
            return
        request.returns += 1
        wait_s = math.ceil(retry_s)  # Retry-After has whole seconds
        self.results.retry_times.append(RetryTime(request.index, self.agenda.now, wait_s))
        self.agenda.after(wait_s, self._come_back, request)

    def _come_back(self, request: SimRequest) -> None:
        self.results.arrival_s[request.index] = self.agenda.now
        self._place(request)

    def _wait_for_machine(self, request: SimRequest) -> None:
        """All machines of a role are down: wait as long as live requests do, because usually they are being
        restarted."""
        now = self.agenda.now
        if self._absent_since is None:
            self._absent_since = now
        until = self._absent_since + _LIVE.node_wait_s
        if now >= until or not self.machines.down:
            self._end(request, Fate.FAILED if request.attempts else Fate.REJECTED, math.nan)
            return
        request.begin_attempt()  # discards the state of the last one
        self._waiting[request] = None
        self.agenda.at(until, self._give_up, self._absent_since)

    def _give_up(self, absent_since: float) -> None:
        """Fail all waiting requests when no machine has returned."""
        if self._absent_since == absent_since:
            waiting, self._waiting = list(self._waiting), {}
            for request in waiting:
                self._wait_for_machine(request)

    # Prefill

    def prefill_starts(self, request: SimRequest, work_s: float) -> None:
        assert request.placement is not None
        num_bytes = request.placement.sent_blocks * self._block_tokens * self.cluster.model.token_bytes
        if not request.decode_id or not num_bytes:
            request.is_handed_over = True
            return
        # Layers leave as they are computed, so the flow cannot be faster than the computation.
        done = partial(self._handed_over, request)
        flow = self.network.send(request.prefill_id, request.decode_id, num_bytes, done, num_bytes / work_s)
        request.transfers.append(flow)

    def pace_changed(self, request: SimRequest, left_s: float) -> None:
        for flow in request.transfers:  # its hand-off: fetched data arrived before it started
            self.network.finish_within(flow, left_s)

    def prefill_ends(self, request: SimRequest, work_s: float) -> None:
        machine = self.machines.prefill[request.prefill_id]
        new_tokens = request.num_tokens - request.cached_tokens
        computing_ms = work_s * 1e3 - machine.load_ms(request.cached_tokens)
        if request.index % self._sample_every == 0:
            self.conductor.costs.observe_prefill(request.prefill_id, new_tokens, request.cached_tokens, computing_ms)
        self.machines.tell_index(request.prefill_id)
        request.is_prefilled = True
        self.results.prefill_ms[request.index] += work_s * 1e3
        if not self.conductor.prefill_ended(request, self.agenda.now):
            self._clean_up(request)
            self._end(request, Fate.REJECTED_LATE, math.nan)
            return
        self._note_first_token(request)
        if not request.decode_id:
            self.finished(request, math.nan)
        elif request.is_handed_over:
            self._join_decode(request)

    def first_token(self, request: SimRequest, spent_s: float) -> None:
        """The first token, on a coupled machine."""
        self.results.prefill_ms[request.index] += spent_s * 1e3
        self.conductor.prefill_ended(request, self.agenda.now)
        self._note_first_token(request)

    def _note_first_token(self, request: SimRequest) -> None:
        """A retry's first token does not count: the client already has it."""
        if not math.isnan(request.first_token_s):
            return
        now, results, index = self.agenda.now, self.results, request.index
        request.first_token_s = now
        arrival_s = results.arrival_s.item(index)
        results.ttft_s[index] = now - arrival_s + self.cluster.request_ms / 1e3
        results.queue_s[index] = request.started_s - arrival_s
        results.predicted_ttft_s[index] = request.predicted_ttft_s
        results.cached_tokens[index] = request.cached_tokens
        results.fetched_tokens[index] = min(request.fetched_tokens, request.cached_tokens)
        if request.ssd_tokens:
            results.ssd_tokens[index] = min(request.ssd_tokens, request.cached_tokens)

    def _handed_over(self, request: SimRequest, flow: Flow) -> None:
        request.transfers.remove(flow)
        request.is_handed_over = True
        if request.is_prefilled:
            self._join_decode(request)

    def _join_decode(self, request: SimRequest) -> None:
        self.machines.decode[request.decode_id].join(request)

    # Endings

    def finished(self, request: SimRequest, tail_ms: float) -> None:
        now, results, index = self.agenda.now, self.results, request.index
        gaps = results.output_tokens.item(index) - 1
        if gaps:
            mean_ms = (now - request.first_token_s) * 1e3 / gaps
            results.mean_tbt_ms[index] = mean_ms
            # After a retry whose prefill gave the last token, no gaps were recorded.
            results.tail_tbt_ms[index] = mean_ms if math.isnan(tail_ms) else tail_ms
        self._end(request, Fate.DONE, math.nan)

    def _end(self, request: SimRequest, fate: Fate, retry_s: float) -> None:
        results, index, now = self.results, request.index, self.agenda.now
        if results.fate.item(index):
            raise AssertionError(f"request {index} ended twice")
        self.conductor.ended(request, results.output_tokens.item(index) if fate is Fate.DONE else 0, now)
        del self._open[request]
        results.fate[index] = fate
        results.end_s[index] = now
        if retry_s == retry_s:
            results.retry_after_s[index] = retry_s
        results.attempts[index] = request.attempts

    def _clean_up(self, request: SimRequest) -> None:
        """Stop everything that belongs to this attempt."""
        self.fetches.cancel(request)
        if request.prefill_id in self.machines.prefill:
            self.machines.prefill[request.prefill_id].cancel(request)
        if request.decode_id in self.machines.decode:
            self.machines.decode[request.decode_id].cancel(request)

    def _try_again(self, request: SimRequest, dead: Sequence[str], is_free: bool = False) -> None:
        """Its nodes died: the next attempt runs elsewhere and continues from the existing tokens."""
        now = self.agenda.now
        self._clean_up(request)
        if request.is_prefilled:  # the token that prefill gave; those of decoding were counted where they were made
            request.num_tokens += 1
            request.output_tokens -= 1
            request.is_prefilled = False
        request.dead |= {self.conductor.call_failed(name, now) for name in dead}
        self.conductor.ended(request, 0, now)
        request.retries += not is_free
        if not request.output_tokens:
            self.finished(request, math.nan)
        elif request.retries > _LIVE.retries:
            self._end(request, Fate.FAILED, math.nan)
        else:
            self._place(request)

    # Faults

    def _strike(self, fault: Fault) -> None:
        name = fault.machine
        if name in self.machines.down:
            return
        if fault.slowdown:
            self.machines.slow_down(name, fault.slowdown)
            self.agenda.after(fault.down_s, self.machines.slow_down, name, 1.0)
            return
        if name in self.machines.coupled:
            raise ConfigError("coupled machines cannot die in a simulation")
        self.machines.go_down(name)
        for request in [request for request in self._open if request.source_id == name]:
            self.fetches.lose_source(request)
        self.replicas.lose(name)
        on_it = [request for request in self._open if self._is_on(request, name)]
        self.machines.fail(name)
        for request in on_it:
            self._try_again(request, [name])
        self.agenda.after(fault.down_s, self._revive, name)

    def _is_on(self, request: SimRequest, name: str) -> bool:
        """Whether the request is affected if the machine dies."""
        gone_from_prefill = request.is_prefilled and request.is_handed_over
        return request.decode_id == name or (request.prefill_id == name and not gone_from_prefill)

    def _is_unused(self, name: str) -> bool:
        return not any(self._is_on(request, name) for request in self._open)

    def _revive(self, name: str) -> None:
        self.machines.revive(name)
        self._absent_since = None
        waiting, self._waiting = list(self._waiting), {}
        for request in waiting:
            self._place(request)

    def _look_beside(self) -> None:
        self.machines.look_beside()
        if self._open or self._next < len(self._order):
            self.agenda.after(LOOK_BESIDE_S, self._look_beside)

    def _look_for_replicas(self) -> None:
        self.replicas.look()
        if self._open or self._next < len(self._order):
            self.agenda.after(TICK_S, self._look_for_replicas)

    # What nodes report

    def _heartbeats(self) -> None:
        now, conductor = self.agenda.now, self.conductor
        self._beats += 1
        self.timeline.sample(self.machines, now)
        for name, machine in self.machines.decode.items():
            if name in self.machines.down or self.machines.role(name) != "decode":
                continue
            used = -(-machine.reserved_tokens // self._block_tokens)
            blocks = machine.kv_tokens // self._block_tokens
            load = NodeLoad(
                running=len(machine.running),
                waiting=len(machine.waiting),
                context_tokens=machine.context_now,
                blocks_total=blocks,
                blocks_free=max(blocks - used, 0),
            )
            conductor.heartbeat(name, load, now, self._switching.drains(name))
            conductor.fleet.heartbeat(name, load)
            if machine.running and self._beats % DECODE_SAMPLE_BEATS == 0:
                conductor.costs.observe_decode(name, len(machine.running), machine.context_now, machine.step_ms)
        self._switching.look()
        if self._faults:  # without faults no machine is ever missing
            for name in self.machines.prefill:
                if name not in self.machines.down:
                    if self.machines.role(name) == "prefill":
                        conductor.heartbeat(name, NodeLoad(), now, self._switching.drains(name))
                    conductor.heartbeat(store_id(name), NodeLoad(), now)
            conductor.tick(now)
        if self._open or self._next < len(self._order):
            if not len(self.agenda):
                raise AssertionError(f"{len(self._open)} requests wait for nothing")
            self.agenda.after(self.cluster.conductor.heartbeat_s, self._heartbeats)


def _ids_per_block(block_tokens: int, tokens_per_id: int) -> int:
    """Ids of the trace for each block of the cluster. Raises ConfigError when that is no whole number."""
    ids, rest = divmod(block_tokens, tokens_per_id)
    if rest or not ids:
        raise ConfigError(
            f"the cluster's blocks have {block_tokens} tokens, which is no multiple of the trace's {tokens_per_id}: "
            f"scale it with --tokens-per-block {math.gcd(block_tokens, TRACE_BLOCK_TOKENS)}"
        )
    return ids
