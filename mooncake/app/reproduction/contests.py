"""Our defaults against all others: placement against the published formulas, admission against the paper's.

Placement and admission are scored only on the second half of each trace; the defaults (config.TBT_ROOM, the
constants of waits) were chosen on the first half. ``crowd`` and ``shift`` state in their set-up what they are scored
on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from conductor.admission.retry_after import MAX_RETRY_S
from conductor.placement.policies import DEFAULT_POLICY, POLICIES
from mooncake.app.reproduction import verdicts
from mooncake.app.reproduction.experiments import SEED, Trace, Traces, first_tokens, run
from mooncake.app.reproduction.findings import Finding, Row
from mooncake.app.reproduction.hindsight import ALIKE, RetryProbe, false_rejections, keep_placements, retry_time_errors
from mooncake.app.sim.cluster import Cluster, load_preset
from mooncake.app.sim.output.summary import Summary, summarize
from mooncake.app.sim.requests import Fate, Floats
from mooncake.app.sim.simulation import Run, Simulation
from mooncake.app.traces.files import one_after_another
from mooncake.trace import TRACE_BLOCK_TOKENS, TraceRequest

LOADS = (0.6, 0.9, 1.2)
FULL_SPEED = {"conversation": 2.1, "synthetic": 1.3}  # where the prefill machines of paper-16 are just busy
OVERLOAD = 2.0
ORACLE_REPLAYS = 200
RETURNS = 2  # times that a refused client returns: max_retries of OpenAI's client
RETRY_SHARE = 0.3  # fraction of refusals that are retried
FALSE_REJECTION = "at most; false: put back with all else as it was, it meets its limits and nobody else misses theirs"
DROPPED = "at most so much is asked: of who was computed and then refused, as arXiv 2407.00079 counts waste"
HINDSIGHT = f"what is right for most of the {ALIKE} refusals most like it: about what there is to know"
OTHER_SEEDS = (2, 3)
ADMISSIONS = ("none", "baseline", "early", "predicted", "lookahead")


def second_half(trace: Trace) -> list[TraceRequest]:
    return list(trace[len(trace) // 2 :])


def _rivals(name: str, load: float, traces: Traces) -> Finding:
    """Mean TTFT of every policy over that of Algorithm 1 as published, at one load."""
    trace = second_half(traces.conversation() if name == "conversation" else traces.synthetic())
    rows: list[Row] = []
    cluster = load_preset("paper-16")
    speed = load * FULL_SPEED[name]
    found = {policy: first_tokens(cluster.with_conductor(policy=policy), trace, speed) for policy in POLICIES}
    published = found["algorithm_1"]
    rows += [
        Row(
            f"{name} at {load:g}: {policy}",
            None,
            one.ttft_s.mean / published.ttft_s.mean,
            f"mean TTFT {one.ttft_s.mean:.3g} s, p99 {one.ttft_s.p99:.3g} s, inside 30 s {one.goodput:.1%}, "
            f"hit {one.hit_tokens:.1%}",
        )
        for policy, one in found.items()
    ]
    return Finding(
        f"rivals-{name}-{load:g}",
        f"Our default placement against the published formulas, {name} at load {load:g}: mean TTFT over Algorithm 1's",
        "8 prefill machines of paper-16, second half of the trace, answers cut to one token; load 1 is where prefill "
        "is just busy; rivals' formulas as published, of which Algorithm 1 alone fetches from other hosts",
        rows,
        *verdicts.rivals(rows, {policy: one.goodput for policy, one in found.items()}),
    )


def overload(traces: Traces) -> Finding:
    """Admission at twice the machines' capacity: goodput, waste, false rejections and retry times."""
    trace = second_half(traces.conversation())
    cluster = load_preset("paper-16").with_conductor(max_tokens=2000)
    options = Run(seed=SEED, speed=OVERLOAD * FULL_SPEED["conversation"])
    rows: list[Row] = []
    summaries: dict[str, Summary] = {}
    for admission in ADMISSIONS:
        simulation = Simulation(cluster.with_conductor(admission=admission), trace, options)
        if admission == "lookahead":
            probe = RetryProbe(simulation, RETRY_SHARE)
            keep_placements(simulation)
            judged = simulation
        simulation.run()
        summaries[admission] = summary = summarize(simulation, "")
        rows += _admitted(admission, simulation, summary)
    rows += [
        *_gains(summaries, cluster, trace, options),
        _false_rejections(judged),
        *_returning(cluster.with_conductor(admission="lookahead"), trace, options),
        *_waits(probe),
    ]
    return Finding(
        "overload",
        "Admission at twice the load that the machines can do",
        f"paper-16, second half of the conversation trace, {OVERLOAD * FULL_SPEED['conversation']:g} times its speed, "
        "TTFT 30 s, TBT 100 ms",
        rows,
        *verdicts.overload(rows),
    )


def _admitted(admission: str, simulation: Simulation, summary: Summary) -> list[Row]:
    """What a way to admit comes to."""
    results, slo = simulation.results, simulation.cluster.slo
    missed = (results.fate == Fate.DONE) & (
        (results.ttft_s > slo.ttft_s) | (np.nan_to_num(results.tail_tbt_ms) > slo.tbt_ms)
    )
    useless_ms = float(results.prefill_ms[missed | (results.fate == Fate.REJECTED_LATE)].sum())
    useless = useless_ms / max(float(results.prefill_ms.sum()), 1.0)
    return [
        Row(f"{admission}: goodput, %", None, 100 * summary.goodput),
        Row(f"{admission}: rejected, %", None, 100 * (summary.rejected + summary.rejected_late) / summary.requests),
        Row(f"{admission}: prefill of rejected requests, %", None, 100 * summary.wasted_prefill),
        Row(f"{admission}: prefill of requests outside the limits, %", None, 100 * useless),
        Row(f"{admission}: mean TTFT, s", None, summary.ttft_s.mean),
    ]


def _gains(summaries: Mapping[str, Summary], cluster: Cluster, trace: Trace, options: Run) -> list[Row]:
    """Look-ahead's goodput over that of others, with other seeds too, and what it wastes."""

    def gain(ours: float, theirs: float) -> float:
        return ours / max(theirs, 1e-9)

    def with_seed(admission: str, seed: int) -> float:
        return run(cluster.with_conductor(admission=admission), trace, replace(options, seed=seed))[1].goodput

    none, early, ours = (summaries[admission].goodput for admission in ("none", "early", "lookahead"))
    worst = min(gain(with_seed("lookahead", seed), with_seed("early", seed)) for seed in OTHER_SEEDS)
    dropped = summaries["lookahead"].wasted_prefill
    return [
        Row("goodput, look-ahead / none", 1.5, gain(ours, none)),
        Row("goodput, look-ahead / early", 1.1, gain(ours, early)),
        Row("the same, the worst of other seeds", 1.1, worst, f"seeds {', '.join(map(str, OTHER_SEEDS))}"),
        Row("lookahead: prefill of dropped requests, %", 2.0, 100 * dropped, DROPPED),
    ]


def _false_rejections(judged: Simulation) -> Row:
    wrong = false_rejections(judged, ORACLE_REPLAYS, SEED)
    share = float(wrong.mean()) if len(wrong) else 0.0
    return Row(f"lookahead: false rejections of {len(wrong)} replayed, %", 5.0, 100 * share, FALSE_REJECTION)


def _waits(probe: RetryProbe) -> list[Row]:
    """How right the retry times are that nobody keeps."""

    def median(errors: Floats) -> float:
        return 100 * float(np.median(errors)) if len(errors) else 0.0

    errors, at_best = probe.errors(), probe.errors_with_hindsight()
    is_soon = np.isfinite(list(probe.waits_s.values()))
    return [
        Row(
            "nobody comes back: retry time, median error, %",
            None,
            median(errors),
            f"of {len(errors)} that are asked again every second and never let in: what a stranger would find",
        ),
        Row("of those who would be let in within that time", None, median(errors[is_soon]), f"{is_soon.sum()}"),
        Row(
            "of all, had each been told by all others' true waits",
            None,
            median(at_best),
            HINDSIGHT,
        ),
    ]


def _returning(cluster: Cluster, trace: Trace, options: Run) -> list[Row]:
    """The same with clients that return after their retry time, like OpenAI's: capacity is reserved for them."""
    simulation, summary = run(cluster, trace, replace(options, returns=RETURNS))
    results = simulation.results
    wait_s = np.array([retry_time.wait_s for retry_time in results.retry_times])
    errors, has_reservation = retry_time_errors(results), wait_s < MAX_RETRY_S
    return [
        Row(
            "clients come back: retry time, median error, %",
            25.0,
            100 * float(np.median(errors)),
            f"of {len(errors)}, told to clients that come back {RETURNS} times; at most. In whole seconds as "
            f"Retry-After has them; told, and true, {MAX_RETRY_S} where it is more",
        ),
        Row("of those told less, median, %", None, 100 * float(np.median(errors[has_reservation]))),
        Row("of those told less, mean, %", None, 100 * float(errors[has_reservation].mean())),
        Row("of those told less, let in when they came, %", None, 100 * float((errors[has_reservation] == 0.0).mean())),
        Row("clients come back: goodput, %", None, 100 * summary.goodput, "times count from when they came"),
    ]


CROWD_LOAD, CROWD_FROM_S, CROWD_S, CROWD_BLOCKS = 0.4, 240.0, 120.0, 40
CROWD_UNTIL_S = CROWD_FROM_S + CROWD_S
CROWD_TOKENS = CROWD_BLOCKS * TRACE_BLOCK_TOKENS + 100
AFTER_CROWD_S = 180.0  # time in which copies that are not used any more must be dropped
CROWD_BLOCK_ID = 10**9  # ids from here on are not in the trace


class _Watch:
    """What the machines have done and hold when the crowd comes, when it goes, and later."""

    def __init__(self, simulation: Simulation, burst_request: TraceRequest) -> None:
        self.busy_s: list[list[float]] = []  # at each of those times, by machine
        self.replicas: list[int] = []  # likewise: machines that hold the burst's prefix
        self._machines = simulation.machines.prefill.values()
        self._keys = simulation.block_keys(burst_request)
        for at_s in (CROWD_FROM_S, CROWD_UNTIL_S, CROWD_UNTIL_S + AFTER_CROWD_S):
            simulation.agenda.at(at_s, self._look)

    def _look(self) -> None:
        self.busy_s.append([machine.busy_s for machine in self._machines])
        self.replicas.append(sum(machine.cache.match(self._keys) > 0 for machine in self._machines))


def _with_crowd(trace: Trace) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """The beginning of the trace with a burst in it, and the burst alone."""
    speed = CROWD_LOAD * FULL_SPEED["conversation"]
    steady = [
        replace(one, timestamp_ms=one.timestamp_ms / speed)
        for one in trace
        if one.timestamp_ms / speed < 1e3 * (CROWD_UNTIL_S + AFTER_CROWD_S)
    ]
    gap_ms = 1e3 * CROWD_UNTIL_S / sum(one.timestamp_ms < 1e3 * CROWD_UNTIL_S for one in steady) / 10
    prefix = tuple(range(CROWD_BLOCK_ID, CROWD_BLOCK_ID + CROWD_BLOCKS))
    burst = [
        TraceRequest(1e3 * CROWD_FROM_S + at * gap_ms, CROWD_TOKENS, 1, (*prefix, CROWD_BLOCK_ID + CROWD_BLOCKS + at))
        for at in range(int(1e3 * CROWD_S / gap_ms))
    ]
    first = replace(burst[0], timestamp_ms=500.0 * CROWD_FROM_S)  # so that one machine holds the prefix
    return sorted([*steady, first, *burst], key=lambda one: one.timestamp_ms), burst


def _with_policy(policy: str, trace: Trace, burst_request: TraceRequest) -> list[Row]:
    cluster = load_preset("paper-16").with_conductor(policy=policy, replicates=policy == DEFAULT_POLICY)
    simulation = Simulation(cluster, trace, Run(seed=SEED, max_output=1, jitter_s=0.0))
    watch = _Watch(simulation, burst_request)
    results = simulation.run()
    work = np.array(watch.busy_s[1]) - np.array(watch.busy_s[0])
    before = results.arrival_s < CROWD_FROM_S
    during = ~before & (results.arrival_s < CROWD_UNTIL_S)
    before_s, during_s = (float(np.quantile(results.ttft_s[part], 0.99)) for part in (before, during))
    most = float(work.max() / work.mean())
    gone, later = watch.replicas[1:]
    sent = f"1 before; {simulation.replicas.made} were sent it ahead of need"
    return [
        Row(f"{policy}: most / mean work of a machine", 1.3, most, "at most so much is asked of us"),
        Row(f"{policy}: p99 TTFT over that before", 2.0, during_s / before_s, f"{before_s:.2f} s before"),
        Row(f"{policy}: machines that hold the prefix when the crowd has gone", None, gone),
        Row(f"{policy}: machines that hold it {AFTER_CROWD_S:g} s later", 1, later, sent),
    ]


def crowd(traces: Traces) -> Finding:
    """Ten times the usual arrivals for two minutes, all with one long prefix that one machine holds."""
    trace, burst = _with_crowd(traces.conversation())
    policies = (DEFAULT_POLICY, "algorithm_1", "longest_prefix")
    rows = [row for policy in policies for row in _with_policy(policy, trace, burst[0])]
    return Finding(
        "crowd",
        "A flash crowd on one prefix: ten times the usual arrivals for two minutes",
        f"8 prefill machines of paper-16, the first minutes of the conversation trace at load {CROWD_LOAD:g}, then "
        f"{len(burst):,} requests of {CROWD_TOKENS:,} tokens that share all but 100, and the trace for "
        f"{AFTER_CROWD_S:g} s more; answers cut to one token. With our default, copies may be made ahead, and nodes "
        "give the prefix up when nobody has asked for it for 120 s; the published formulas have neither",
        rows,
        *verdicts.crowd(rows),
    )


SHIFT_SPEED, SHIFT_FROM_MS, SHIFT_PART_MS = 2.0, 6e5, 9e5


def shift(traces: Traces) -> Finding:
    """A quarter of an hour of Azure's code trace and then one of its conversation trace, on 8 machines."""
    whole = [traces.azure(name) for name in ("code", "conv")]
    parts = [_part(trace) for trace in whole]
    joined = one_after_another(parts)
    base = load_preset("paper-16").with_slo(ttft_s=2.0)
    options = Run(seed=SEED, speed=SHIFT_SPEED, jitter_s=0.0)
    fixed = {
        prefill: run(base.with_counts(prefill=prefill, decode=8 - prefill), joined, options)[1].goodput
        for prefill in (2, 3, 4, 5, 6)
    }
    balanced = base.with_counts(prefill=4, decode=4).with_conductor(balances_roles=True)
    simulation, summary = run(balanced, joined, options)
    steady_simulation, steady = run(balanced, whole[1], options)
    best = max(fixed.values())
    gain = summary.goodput / max(best, 1e-9)
    switches = _switches(simulation)
    hourly = _switches(steady_simulation) * 3600 / float(steady_simulation.results.arrival_s.max())
    rows = [Row(f"fixed {prefill}P{8 - prefill}D: goodput, %", None, 100 * value) for prefill, value in fixed.items()]
    rows += [
        Row("roles change: goodput, %", None, 100 * summary.goodput),
        Row("goodput over the best fixed split", 1.2, gain),
        Row("switches", None, switches),
        Row(
            "the whole conversation trace alone: switches an hour", 6.0, hourly, "from 4P4D; at most so many are asked"
        ),
        Row("the whole conversation trace alone: goodput, %", None, 100 * steady.goodput),
    ]
    return Finding(
        "shift",
        "A shift of load: Azure's code trace and then its conversation trace, roles fixed or changing",
        f"8 machines of paper-16, {SHIFT_PART_MS / 6e4:g} minutes of each, {SHIFT_SPEED:g} times as fast, about what "
        "the better split of each half can do; TTFT 2 s, TBT 100 ms. The controller's limits were chosen with these "
        "parts in sight, and with others of both traces; on generated traces see "
        "tests/bench/results/balance-limits-generated.json",
        rows,
        *verdicts.shift(rows),
    )


def _part(trace: Trace) -> list[TraceRequest]:
    """The part of the trace that is used, shifted to time 0."""
    part = [one for one in trace if SHIFT_FROM_MS <= one.timestamp_ms < SHIFT_FROM_MS + SHIFT_PART_MS]
    return [replace(one, timestamp_ms=one.timestamp_ms - part[0].timestamp_ms) for one in part]


def _switches(simulation: Simulation) -> float:
    balancer = simulation.conductor.balancer
    return float(balancer.switches) if balancer is not None else 0.0


CONTESTS: dict[str, Callable[[Traces], Finding]] = {
    **{f"rivals-{name}-{load:g}": partial(_rivals, name, load) for name in FULL_SPEED for load in LOADS},
    "crowd": crowd,
    "overload": overload,
    "shift": shift,
}
