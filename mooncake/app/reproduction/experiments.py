"""The paper's experiments, one function each: the set-up, and a table of results beside the published ones
(``published``).

Each function's text describes its set-up and what the paper leaves open. Tables are judged by rules (``verdicts``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from conductor.placement.policies import POLICIES
from conductor.placement.view import Choice, PlacementQuery
from mooncake.app.reproduction import verdicts
from mooncake.app.reproduction.findings import Finding, Row
from mooncake.app.sim.cluster import Cluster, load_preset
from mooncake.app.sim.output import published
from mooncake.app.sim.output.summary import Summary, meets, summarize
from mooncake.app.sim.simulation import Run, Simulation
from mooncake.app.traces.files import load_any
from mooncake.app.traces.shapes import generate
from mooncake.errors import ConfigError
from mooncake.trace import TRACE_BLOCK_TOKENS, TraceRequest, expected_hits

Trace = Sequence[TraceRequest]
SEED = 1


@dataclass(frozen=True, slots=True)
class Traces:
    """The folder of published traces. If the tool&agent trace is missing, a generated one is used."""

    folder: Path
    limit: int | None = None
    used: dict[str, None] = field(default_factory=dict)  # descriptions of the traces used so far, in order
    _loaded: dict[str, Trace] = field(default_factory=dict)

    @property
    def has_toolagent(self) -> bool:
        return self._path("toolagent_trace.jsonl") is not None

    def azure(self, name: str) -> Trace:
        return self._load(f"AzureLLMInferenceTrace_{name}.csv")

    def conversation(self) -> Trace:
        return self._load("conversation_trace.jsonl")

    def synthetic(self) -> Trace:
        return self._load("synthetic_trace.jsonl")

    def toolagent(self) -> Trace:
        if self.has_toolagent:
            return self._load("toolagent_trace.jsonl")
        self.used[f"tool&agent, generated of its measured shape, seed {SEED}"] = None
        if "toolagent" not in self._loaded:
            self._loaded["toolagent"] = generate("toolagent", self.limit, SEED)
        return self._loaded["toolagent"]

    def _path(self, name: str) -> Path | None:
        """The trace's file, plain or compressed."""
        forms = (self.folder / f"{name}{end}" for end in ("", ".xz", ".gz"))
        return next((path for path in forms if path.exists()), None)

    def _load(self, name: str) -> Trace:
        path = self._path(name)
        if path is None:
            raise ConfigError(
                f"{self.folder} lacks {name}, plain, .xz or .gz; deploy/docs/simulation.md says who has it"
            )
        if name not in self._loaded:
            self._loaded[name] = load_any(path, self.limit)
        self.used[f"{path.name}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"] = None
        return self._loaded[name]


def run(cluster: Cluster, trace: Trace, options: Run = Run(seed=SEED)) -> tuple[Simulation, Summary]:
    simulation = Simulation(cluster, trace, options)
    simulation.run()
    return simulation, summarize(simulation, "")


def first_tokens(cluster: Cluster, trace: Trace, speed: float = 1.0) -> Summary:
    """A run without decoding: answers have one token."""
    return run(cluster, trace, Run(seed=SEED, speed=speed, max_output=1))[1]


def scheduling(traces: Traces) -> Finding:
    """Fig. 5: mean TTFT of four ways to place, as ratios to the global cache-aware one."""
    cluster = load_preset("paper-16")
    mean = {
        policy: first_tokens(cluster.with_conductor(policy=policy), traces.conversation()).ttft_s.mean
        for policy in (*published.FIG5_RATIOS, "algorithm_1", "milliseconds", "longest_prefix")
    }
    pooled_s = mean["algorithm_1"]
    absolute = "absolute: P/D split of the paper not said"
    rows = [
        *(Row(f"{policy} / global", ratio, mean[policy] / pooled_s) for policy, ratio in published.FIG5_RATIOS.items()),
        Row("global (Algorithm 1), mean TTFT s", published.FIG5_GLOBAL_TTFT_S, pooled_s, absolute),
        Row("our default / global", None, mean["milliseconds"] / pooled_s),
        Row("longest match wins, mean TTFT s", None, mean["longest_prefix"], "herds: every prompt shares block 0"),
    ]
    return Finding(
        "fig5",
        "FAST'25 Fig. 5: scheduling, conversation trace",
        "8 prefill machines of 8xA800, 3M tokens of KV each; answers cut to one token; arrivals spread over ticks of "
        "3 s",
        rows,
        *verdicts.scheduling(rows),
    )


def capacity(traces: Traces) -> Finding:
    """Figs 6 and 7: the share of requests inside TTFT 30 s and a TBT limit, against coupled baselines."""
    rows: list[Row] = []
    limits_ms = published.FIG6_TBT_MS
    for name, trace in (("conversation", traces.conversation()[:4000]), ("synthetic", traces.synthetic()[:2000])):
        shares: dict[str, list[float]] = {}
        for preset, values in published.FIG6_SHARES[name].items():
            simulation = run(load_preset(preset), trace)[0]
            slos = [simulation.cluster.with_slo(tbt_ms=float(tbt_ms)).slo for tbt_ms in limits_ms]
            shares[preset] = [100 * float(meets(simulation.results, slo).mean()) for slo in slos]
            rows += [
                Row(f"{name}, {preset}, TBT <= {tbt_ms} ms, %", value, share)
                for tbt_ms, value, share in zip(limits_ms, values, shares[preset], strict=True)
            ]
        ours = shares.pop("paper-16")
        for at, (tbt_ms, gain) in enumerate(zip(limits_ms, published.FIG6_GAINS[name], strict=True)):
            best = max(baseline[at] for baseline in shares.values())
            found = 100 * (ours[at] / max(best, 1e-9) - 1)
            rows.append(Row(f"{name}, gain over the best baseline at {tbt_ms} ms, %", gain, found))
    return Finding(
        "fig6",
        "FAST'25 Figs 6 and 7: effective request capacity against coupled baselines",
        "first 4,000 conversation and 2,000 synthetic requests at the trace's rate, 16 machines each; baselines take "
        "requests round robin and run the shipped batching code step by step on the same curve",
        rows,
        *verdicts.capacity(rows),
    )


def hit_rates(traces: Traces) -> Finding:
    """Fig. 9: hit rate of one LRU cache by capacity in tokens."""
    rows: list[Row] = []
    for name, trace in (("conversation", traces.conversation()), ("synthetic", traces.synthetic())):
        for tokens, value in zip(published.FIG9_TOKENS, published.FIG9_RATES[name], strict=True):
            blocks = None if tokens is None else int(tokens // TRACE_BLOCK_TOKENS)
            label = "endless" if tokens is None else f"{tokens:.0e}"
            rows.append(Row(f"{name}, {label} tokens", value, expected_hits(trace, blocks).token_rate))
    return Finding(
        "fig9",
        "FAST'25 Fig. 9: hit rate of one LRU cache by capacity",
        "token rate, prompts in file order, blocks of 512 tokens",
        rows,
        *verdicts.hit_rates(rows),
    )


def local_and_global(traces: Traces) -> Finding:
    """Fig. 10: one cache per machine, or one pool over all."""
    cluster = load_preset("paper-16").with_counts(prefill=10, decode=6)
    rows: list[Row] = []
    toolagent = "toolagent" if traces.has_toolagent else "toolagent (generated)"
    for name, trace in (
        ("conversation", traces.conversation()),
        ("synthetic", traces.synthetic()),
        (toolagent, traces.toolagent()),
    ):
        by_load, aware, pooled = (
            first_tokens(cluster.with_conductor(policy=policy), trace)
            for policy in ("least_loaded", "local_cache_aware", "algorithm_1")
        )
        local, pool, time = published.FIG10[name.partition(" ")[0]]
        single = expected_hits(trace, 3_000_000 // TRACE_BLOCK_TOKENS).token_rate
        rows += [
            Row(f"{name}, local, by load alone, hit %", local, 100 * by_load.hit_tokens),
            Row(f"{name}, local, cache-aware, hit %", local, 100 * aware.hit_tokens),
            Row(f"{name}, one cache of 3M tokens, hit %", local, 100 * single),
            Row(f"{name}, global, hit %", pool, 100 * pooled.hit_tokens),
            Row(f"{name}, machine time, global / by load alone", time, pooled.prefill_ms / by_load.prefill_ms),
            Row(f"{name}, machine time, global / cache-aware", time, pooled.prefill_ms / aware.prefill_ms),
        ]
    return Finding(
        "fig10",
        "FAST'25 Fig. 10: local caches against a global one, 10 prefill machines, 3M tokens each",
        "answers cut to one token; what is generated counts in no verdict",
        rows,
        *verdicts.local_and_global(rows),
    )


def _forced_fetch(query: PlacementQuery, rng: np.random.Generator) -> Choice:
    """The least loaded prefill node, which always fetches what it lacks: only for Fig. 13, not a useful policy."""
    choice = POLICIES["least_loaded"](query, rng)
    sources = query.sources(1)
    return Choice(choice.prefill, choice.decode, sources[0]) if sources else choice


def bandwidth(traces: Traces) -> Finding:
    """Fig. 13: mean TTFT by network speed, with congestion, when prefixes are always fetched."""
    base = load_preset("paper-16")
    trace = traces.synthetic()
    POLICIES.setdefault("forced_fetch", _forced_fetch)
    try:
        mean = {}
        for gbps in published.FIG13_TTFT_S:
            cluster = base.with_machines(nic_gb_per_s=gbps / 8 * 0.87).with_conductor(policy="forced_fetch")
            mean[gbps] = first_tokens(cluster, trace).ttft_s.mean
    finally:
        del POLICIES["forced_fetch"]
    without_pool = base.with_machines("prefill", store_tokens=0).with_conductor(policy="least_loaded")
    anew_s = first_tokens(without_pool, trace).ttft_s.mean
    *slower, fastest = published.FIG13_TTFT_S
    figures = published.FIG13_TTFT_S
    rows = [
        *(Row(f"{gbps} Gbps, mean TTFT s", value, mean[gbps]) for gbps, value in figures.items()),
        *(Row(f"{g} / {fastest} Gbps", figures[g] / figures[fastest], mean[g] / mean[fastest]) for g in slower),
        Row("everything computed anew, mean TTFT s", published.FIG13_ANEW_TTFT_S, anew_s),
    ]
    return Finding(
        "fig13",
        "FAST'25 Fig. 13: how much bandwidth the pool needs, synthetic trace",
        "8 prefill machines; the least loaded one always fetches the longest prefix; max-min fair links, 87 % of "
        "the line; answers cut to one token, for with hand-offs on the same links 24 Gbps would not carry the trace",
        rows,
        *verdicts.bandwidth(rows),
    )


def ratio(traces: Traces) -> Finding:
    """Fig. 15: the split of 16 machines, synthetic trace, TTFT 10 s and TBT 100 ms."""
    rows: list[Row] = []
    for prefill, (share, ttft_s, tbt_ms) in published.FIG15.items():
        cluster = load_preset("paper-16").with_counts(prefill=prefill, decode=16 - prefill).with_slo(ttft_s=10.0)
        summary = run(cluster, traces.synthetic())[1]
        rows += [
            Row(f"{prefill}P{16 - prefill}D effective, %", share, 100 * summary.goodput),
            Row(f"{prefill}P{16 - prefill}D mean TTFT, s", ttft_s, summary.ttft_s.mean),
            Row(f"{prefill}P{16 - prefill}D mean TBT (longest tenth), ms", tbt_ms, summary.tail_tbt_ms.mean),
        ]
    return Finding(
        "fig15",
        "FAST'25 Fig. 15: prefill to decode ratio, synthetic trace",
        "16 machines, TTFT 10 s, TBT 100 ms, our default policy",
        rows,
        *verdicts.ratio(rows),
    )


OVERLOAD_SPEED, OVERLOAD_TBT_MS, REJECTIONS_LOOKED_AT = 2.0, 49.0, 8_000


def rejections(traces: Traces) -> Finding:
    """arXiv Table 3: rejected requests at twice the speed, by admission."""
    counts = published.TABLE3_REJECTED
    trace = traces.toolagent()[:REJECTIONS_LOOKED_AT]
    cluster = load_preset("paper-16").with_slo(ttft_s=30.0, tbt_ms=OVERLOAD_TBT_MS)
    found: dict[str, Summary] = {}
    swing: dict[str, float] = {}
    for admission in (*counts, "lookahead"):
        chosen = cluster.with_conductor(admission=admission, max_tokens=2000)
        simulation, found[admission] = run(chosen, trace, Run(seed=SEED, speed=OVERLOAD_SPEED))
        swing[admission] = decode_swing(simulation)
    calm_s = run(load_preset("paper-16"), trace)[1].ttft_s.mean
    rejected = {name: float(one.rejected + one.rejected_late) for name, one in found.items()}
    base = max(rejected["baseline"], 1.0)
    share = {name: 100 * count / published.TABLE3_REQUESTS for name, count in counts.items()}
    rows = [
        *(Row(f"{n}, rejected / baseline", counts[n] / counts["baseline"], rejected[n] / base) for n in counts),
        *(Row(f"{name}, rejected, %", share.get(name), 100 * rejected[name] / len(trace)) for name in rejected),
        *(Row(f"{name}, goodput %", None, 100 * one.goodput) for name, one in found.items()),
        *(Row(f"{name}, wasted prefill %", None, 100 * one.wasted_prefill) for name, one in found.items()),
        *(Row(f"{name}, deviation of decode load", None, value) for name, value in swing.items()),
        Row("of the baseline's, rejected after their prefill, %", None, 100 * (found["baseline"].rejected_late / base)),
        Row("nobody refused, the trace's own speed: mean TTFT, s", published.FIG8_TTFT_S, calm_s, "arXiv Fig. 8"),
    ]
    return Finding(
        "table3",
        "arXiv 2407.00079 Table 3 and Fig. 9: rejections under overload, and the swing of decode load",
        f"8 prefill and 8 decode machines, the first {len(trace):,} requests of "
        f"{'the tool&agent trace' if traces.has_toolagent else 'a trace generated of the tool&agent shape'} at "
        f"{OVERLOAD_SPEED:g} times its speed, TTFT 30 s, TBT {OVERLOAD_TBT_MS:g} ms (the published limits are not "
        "said; this one refuses as many as published with the baseline)",
        rows,
        *verdicts.rejections(rows),
    )


def decode_swing(simulation: Simulation) -> float:
    """Standard deviation of the mean decode batch over its mean, while requests arrive, without the slow trend."""
    last = float(simulation.results.arrival_s.max())
    timeline = simulation.timeline
    batch = np.array([b for at, b in zip(timeline.at_s, timeline.batch, strict=True) if 60.0 <= at <= last])
    if len(batch) < 120 or not batch.mean():
        return 0.0
    trend = np.convolve(batch, np.ones(61) / 61, mode="same")
    return float((batch - trend)[30:-30].std() / batch.mean())


SWING_PREFILL, SWING_DECODE = 18, 2  # the published 20 machines; decoding is the bottleneck
SWING_TOKENS, SWING_OUTPUT = 65_536, 512  # as in the paper's simulated data
SWING_RATE = 1.7  # requests per second, about twice the capacity of two decode machines
SWING_FROM_S, SWING_UNTIL_S = 120.0, 1200.0


def oscillation(_: Traces) -> Finding:
    """arXiv Figs 9 and 10: admission by the current decode load oscillates, because the load has changed by the time a
    request reaches decoding."""
    rng = np.random.default_rng(SEED)
    arrivals_s = np.cumsum(rng.exponential(1 / SWING_RATE, round(SWING_RATE * SWING_UNTIL_S)))
    blocks = SWING_TOKENS // TRACE_BLOCK_TOKENS
    trace = [
        TraceRequest(1e3 * at_s, SWING_TOKENS, SWING_OUTPUT, tuple(range(number * blocks, (number + 1) * blocks)))
        for number, at_s in enumerate(arrivals_s.tolist())
    ]
    cluster = load_preset("paper-16").with_counts(prefill=SWING_PREFILL, decode=SWING_DECODE)
    cluster = cluster.with_machines("decode", kv_tokens=10_000_000)
    rows: list[Row] = []
    deviation: dict[str, float] = {}
    for admission in ("early", "predicted", "lookahead"):
        chosen = cluster.with_conductor(admission=admission, max_tokens=2000)
        simulation, summary = run(chosen, trace, Run(seed=SEED, jitter_s=0.0))
        timeline = simulation.timeline
        looked_at = [SWING_FROM_S <= at_s <= SWING_UNTIL_S for at_s in timeline.at_s]
        prefill, decode = np.array(timeline.prefill_load)[looked_at], np.array(timeline.batch)[looked_at]
        deviation[admission] = float(decode.std() / decode.mean())
        rows += [
            Row(f"{admission}: deviation of decode load, share of its mean", None, deviation[admission]),
            Row(f"{admission}: deviation of prefill load, share of the machines", None, float(prefill.std())),
            Row(f"{admission}: correlation of both", None, float(np.corrcoef(prefill, decode)[0, 1])),
            Row(f"{admission}, goodput %", None, 100 * summary.goodput),
        ]
    damped = deviation["lookahead"] / deviation["early"]
    rows.append(Row("deviation of decode load, look-ahead / early", 0.6, damped, "at most so much is asked of us"))
    return Finding(
        "oscillation",
        "arXiv 2407.00079 Figs 9 and 10: early rejection makes the loads swing, prediction calms them",
        f"{SWING_PREFILL} prefill and {SWING_DECODE} decode machines, as many as published, the split is ours; prompts "
        f"of {SWING_TOKENS:,} tokens and answers of {SWING_OUTPUT}, as in the paper's simulated data, {SWING_RATE:g} a "
        "second at random times, for 20 minutes, of which the first two are left out; TTFT 30 s, TBT 100 ms; KV has "
        "room enough",
        rows,
        *verdicts.oscillation(rows),
    )


EXPERIMENTS: dict[str, Callable[[Traces], Finding]] = {
    "fig5": scheduling,
    "fig6": capacity,
    "fig9": hit_rates,
    "fig10": local_and_global,
    "fig13": bandwidth,
    "fig15": ratio,
    "table3": rejections,
    "oscillation": oscillation,
}
