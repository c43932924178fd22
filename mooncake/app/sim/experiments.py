"""The paper's experiments again, one function each: what was published, what the simulator gives, what to make of it.

Each function says in its text what its set-up is and what the published one leaves open. A verdict is by a rule that
stands in the code, never by eye.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from conductor.policies import POLICIES
from conductor.view import Choice, Question
from mooncake.app.sim.cluster import Cluster, load_preset
from mooncake.app.sim.simulation import Run, Simulation
from mooncake.app.sim.summary import Summary, meets, summarize
from mooncake.app.trace_shapes import generate
from mooncake.app.trace_tools import load_any
from mooncake.trace import TraceRequest, expected_hits

Trace = Sequence[TraceRequest]
SEED = 1


class Row(msgspec.Struct, frozen=True):
    """One figure. ``measured`` is compared as the finding's rule says; ``published`` None: there is none."""

    what: str
    published: float | None  # or asked of us, where the finding is our own
    measured: float
    note: str = ""


class Finding(msgspec.Struct, frozen=True):
    name: str
    title: str
    setup: str
    rows: list[Row]
    verdict: str  # "reproduced", "partly" or "not reproduced"; "met", "partly met" or "missed" what is asked of us
    why: str
    traces: tuple[str, ...] = ()  # that it was made of: name and SHA-256, or how it was generated


@dataclass(frozen=True, slots=True)
class Traces:
    """Where the published traces are. The tool&agent trace may be missing; its generated stand-in is used then."""

    folder: Path
    limit: int | None = None
    used: dict[str, None] = field(default_factory=dict)  # what has been asked for, in words; in order
    _loaded: dict[str, Trace] = field(default_factory=dict)

    @property
    def has_toolagent(self) -> bool:
        return (self.folder / "toolagent_trace.jsonl").exists()

    def azure(self, name: str) -> Trace:
        return self._load(f"AzureLLMInferenceTrace_{name}.csv.xz")

    def conversation(self) -> Trace:
        return self._load("conversation_trace.jsonl.xz")

    def synthetic(self) -> Trace:
        return self._load("synthetic_trace.jsonl")

    def toolagent(self) -> Trace:
        if self.has_toolagent:
            return self._load("toolagent_trace.jsonl")
        self.used[f"tool&agent, generated of its measured shape, seed {SEED}"] = None
        if "toolagent" not in self._loaded:
            self._loaded["toolagent"] = generate("toolagent", self.limit, SEED)
        return self._loaded["toolagent"]

    def _load(self, name: str) -> Trace:
        path = self.folder / name
        if name not in self._loaded:
            self._loaded[name] = load_any(path, self.limit)
        self.used[f"{name}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"] = None
        return self._loaded[name]


def run(cluster: Cluster, trace: Trace, options: Run = Run(seed=SEED)) -> tuple[Simulation, Summary]:
    simulation = Simulation(cluster, trace, options)
    simulation.run()
    return simulation, summarize(simulation, "")


def first_tokens(cluster: Cluster, trace: Trace, speed: float = 1.0) -> Summary:
    """Without decoding: answers of one token."""
    return run(cluster, trace, Run(seed=SEED, speed=speed, max_output=1))[1]


# Placement


def scheduling(traces: Traces) -> Finding:
    """Fig. 5: mean TTFT of four ways to place, as ratios to the global cache-aware one."""
    cluster = load_preset("paper-16")
    published = {"random": 6.4, "least_loaded": 1.72, "local_cache_aware": 1.17}
    mean = {
        policy: first_tokens(cluster.with_conductor(policy=policy), traces.conversation()).ttft_s.mean
        for policy in (*published, "algorithm_1", "milliseconds", "longest_prefix")
    }
    rows = [Row(f"{policy} / global", ratio, mean[policy] / mean["algorithm_1"]) for policy, ratio in published.items()]
    rows += [
        Row(
            "global (Algorithm 1), mean TTFT s", 3.07, mean["algorithm_1"], "absolute: P/D split of the paper not said"
        ),
        Row("our default / global", None, mean["milliseconds"] / mean["algorithm_1"]),
        Row("longest match wins, mean TTFT s", None, mean["longest_prefix"], "herds: every prompt shares block 0"),
    ]
    ratios = [row.measured for row in rows[:3]]
    in_order = ratios[0] > ratios[1] > ratios[2] > 1.0
    near = all(abs(row.measured / row.published - 1) <= 0.2 for row in rows[:3] if row.published)
    why = "order kept" if in_order else "order differs"
    why += ", each ratio within 20 %" if near else ", not every ratio within 20 %"
    return Finding(
        "fig5",
        "FAST'25 Fig. 5: scheduling, conversation trace",
        "8 prefill machines of 8xA800, 3M tokens of KV each; answers cut to one token; arrivals spread over ticks of "
        "3 s",
        rows,
        _verdict(in_order and near, in_order),
        why + "; absolutes differ because the split of the 16 nodes is not published",
    )


def capacity(traces: Traces) -> Finding:
    """Figs 6 and 7: the share of requests inside TTFT 30 s and a TBT limit, against coupled baselines."""
    published = {
        "conversation": {
            "paper-16": (96.9, 100, 100),
            "vllm-16": (16.4, 39.1, 63.0),
            "vllm-prefix-16": (15.4, 34.6, 56.2),
            "vllm-chunked-16": (9.7, 29.1, 55.6),
        },
        "synthetic": {
            "paper-16": (99.9, 100, 100),
            "vllm-16": (61.6, 71.2, 78.3),
            "vllm-prefix-16": (61.2, 71.1, 77.5),
            "vllm-chunked-16": (46.8, 57.6, 69.7),
        },
    }
    rows: list[Row] = []
    lead: list[float] = []
    for name, trace in (("conversation", traces.conversation()[:4000]), ("synthetic", traces.synthetic()[:2000])):
        shares: dict[str, list[float]] = {}
        for preset in published[name]:
            simulation = run(load_preset(preset), trace)[0]
            limits = [simulation.cluster.with_slo(tbt_ms=tbt).slo for tbt in (100.0, 200.0, 300.0)]
            shares[preset] = [100 * float(meets(simulation.results, slo).mean()) for slo in limits]
            rows += [
                Row(f"{name}, {preset}, TBT <= {tbt} ms, %", value, share)
                for tbt, value, share in zip((100, 200, 300), published[name][preset], shares[preset], strict=True)
            ]
        for at, gain in enumerate({"conversation": (498, 157, 59), "synthetic": (62, 40, 28)}[name]):
            best = max(shares[preset][at] for preset in shares if preset != "paper-16")
            found = 100 * (shares["paper-16"][at] / max(best, 1e-9) - 1)
            rows.append(Row(f"{name}, gain over the best baseline at {100 * (at + 1)} ms, %", gain, found))
            lead.append(found)
    coupled = [row for row in rows if row.what.startswith(("synthetic, vllm-16", "synthetic, vllm-prefix"))]
    near = all(abs(row.measured - (row.published or 0.0)) <= 5.0 for row in coupled)
    wins, num_ties = min(lead) >= -0.5, sum(abs(found) <= 0.5 for found in lead)
    gains = all(row.measured >= 0.5 * (row.published or 0.0) for row in rows if "gain" in row.what)
    return Finding(
        "fig6",
        "FAST'25 Figs 6 and 7: effective request capacity against coupled baselines",
        "first 4,000 conversation and 2,000 synthetic requests at the trace's rate, 16 machines each; baselines take "
        "requests round robin and run the shipped batching code step by step on the same curve",
        rows,
        _verdict(wins and near and gains, wins),
        f"disaggregated {'first' if wins else 'not first'} at every limit, "
        f"by less than half a percent at {num_ties} of {len(lead)}"
        + (
            "; the plain and the prefix-caching baseline on synthetic are within 5 points of the paper's"
            if near
            else "; the baselines' shares differ"
        )
        + ". The size of the gain is not: with chunked prefill the shipped batching code keeps its steps below 100 ms "
        "on this curve, which vLLM 0.5.1 did not; on conversation our baselines are faster than the paper's, too",
    )


def hit_rates(traces: Traces) -> Finding:
    """Fig. 9: hit rate of one LRU cache by capacity in tokens."""
    capacities = (1e4, 1e5, 1e6, 2e6, 4e6, 5e6, 8e6, 1e7, 5e7, None)
    published = {
        "conversation": (0.047, 0.075, 0.089, 0.122, 0.217, 0.249, 0.302, 0.328, 0.400, 0.403),
        "synthetic": (0.002, 0.014, 0.148, 0.237, 0.382, 0.437, 0.547, 0.590, 0.660, 0.660),
    }
    rows: list[Row] = []
    for name, trace in (("conversation", traces.conversation()), ("synthetic", traces.synthetic())):
        for tokens, value in zip(capacities, published[name], strict=True):
            blocks = None if tokens is None else int(tokens // 512)
            label = "endless" if tokens is None else f"{tokens:.0e}"
            rows.append(Row(f"{name}, {label} tokens", value, expected_hits(trace, blocks).token_rate))
    apart = {
        name: max(abs(row.measured - (row.published or 0.0)) for row in rows if row.what.startswith(name))
        for name in published
    }
    good = apart["synthetic"] <= 0.015
    return Finding(
        "fig9",
        "FAST'25 Fig. 9: hit rate of one LRU cache by capacity",
        "token rate, prompts in file order, blocks of 512 tokens",
        rows,
        _verdict(good and apart["conversation"] <= 0.045, good),
        f"synthetic within {apart['synthetic']:.3f}; conversation within {apart['conversation']:.3f}, always lower: "
        "every prompt starts with the same ~890 tokens, of which blocks of 512 can show only the first 512",
    )


def local_and_global(traces: Traces) -> Finding:
    """Fig. 10: every machine its own cache, or one pool over all."""
    cluster = load_preset("paper-16").with_counts(prefill=10, decode=6)
    published = {"conversation": (17.0, 38.0, 0.76), "synthetic": (26.5, 62.5, 0.52), "toolagent": (42.0, 58.0, 0.74)}
    rows: list[Row] = []
    apart: dict[str, list[float]] = {"global": [], "load": [], "aware": []}  # points from what was published
    toolagent = "toolagent" if traces.has_toolagent else "toolagent (generated)"
    for name, trace in (
        ("conversation", traces.conversation()),
        ("synthetic", traces.synthetic()),
        (toolagent, traces.toolagent()),
    ):
        found = {
            policy: first_tokens(cluster.with_conductor(policy=policy), trace)
            for policy in ("least_loaded", "local_cache_aware", "algorithm_1")
        }
        local, pool, time = published[name.partition(" ")[0]]
        hit = {policy: 100 * summary.hit_tokens for policy, summary in found.items()}
        if name != "toolagent (generated)":  # made to be like the trace
            for kind, policy, value in (
                ("global", "algorithm_1", pool),
                ("load", "least_loaded", local),
                ("aware", "local_cache_aware", local),
            ):
                apart[kind].append(abs(hit[policy] - value))
        single = 100 * expected_hits(trace, 3_000_000 // 512).token_rate
        ratio = found["algorithm_1"].prefill_ms / found["least_loaded"].prefill_ms
        rows += [
            Row(f"{name}, local, by load alone, hit %", local, hit["least_loaded"]),
            Row(f"{name}, local, cache-aware, hit %", local, hit["local_cache_aware"]),
            Row(f"{name}, one cache of 3M tokens, hit %", local, single),
            Row(f"{name}, global, hit %", pool, hit["algorithm_1"]),
            Row(f"{name}, machine time, global / by load alone", time, ratio),
            Row(
                f"{name}, machine time, global / cache-aware",
                time,
                found["algorithm_1"].prefill_ms / found["local_cache_aware"].prefill_ms,
            ),
        ]
    return Finding(
        "fig10",
        "FAST'25 Fig. 10: local caches against a global one, 10 prefill machines, 3M tokens each",
        "answers cut to one token; what is generated counts in no verdict",
        rows,
        _verdict(
            max(apart["global"]) <= FIG10_POINTS and max(apart["aware"]) <= FIG10_POINTS,
            max(apart["global"]) <= FIG10_POINTS,
        ),
        f"global hit rates within {max(apart['global']):.1f} points; local ones are {max(apart['load']):.0f} points "
        f"off when placed by load alone and {max(apart['aware']):.0f} when placement asks the caches, which leaves "
        "less of the published 2.2-2.4x: the published local bars equal the rate of one single 3M cache, so that "
        "baseline hardly used affinity",
    )


FIG10_POINTS = 5.0  # that a hit rate may be off


def _forced_fetch(question: Question, rng: np.random.Generator) -> Choice:
    """The least loaded prefill node, which always fetches what it lacks: Fig. 13's question, not a policy to use."""
    choice = POLICIES["least_loaded"](question, rng)
    sources = question.sources(1)
    return Choice(choice.prefill, choice.decode, sources[0]) if sources else choice


def bandwidth(traces: Traces) -> Finding:
    """Fig. 13: mean TTFT by network speed, with congestion, when prefixes are always fetched."""
    published = {24: 5.12, 40: 2.42, 80: 1.75, 100: 1.62, 160: 1.43, 320: 1.26}
    base = load_preset("paper-16")
    trace = traces.synthetic()
    POLICIES.setdefault("forced_fetch", _forced_fetch)
    try:
        mean = {}
        for gbps in published:
            cluster = base.with_machines(nic_gb_per_s=gbps / 8 * 0.87).with_conductor(policy="forced_fetch")
            mean[gbps] = first_tokens(cluster, trace).ttft_s.mean
    finally:
        del POLICIES["forced_fetch"]
    recompute = first_tokens(base.with_machines("prefill", store_tokens=0).with_conductor(policy="least_loaded"), trace)
    rows = [Row(f"{gbps} Gbps, mean TTFT s", value, mean[gbps]) for gbps, value in published.items()]
    rows += [
        Row(f"{gbps} / 320 Gbps", value / published[320], mean[gbps] / mean[320])
        for gbps, value in published.items()
        if gbps < 320
    ]
    anew_s = recompute.ttft_s.mean
    rows.append(Row("everything computed anew, mean TTFT s", 2.6, anew_s))
    falls = all(mean[a] >= mean[b] for a, b in zip(list(mean), list(mean)[1:], strict=False))
    near = all(abs(row.measured / row.published - 1) <= 0.25 for row in rows if "/" in row.what and row.published)
    anew_near = abs(anew_s / 2.6 - 1) <= 0.25
    return Finding(
        "fig13",
        "FAST'25 Fig. 13: how much bandwidth the pool needs, synthetic trace",
        "8 prefill machines; the least loaded one always fetches the longest prefix; max-min fair links, 87 % of "
        "the line; answers cut to one token, for with hand-offs on the same links 24 Gbps would not carry the trace",
        rows,
        _verdict(falls and near and anew_near, falls),
        "falls with bandwidth and levels off above ~100 Gbps"
        + (", ratios within 25 %" if near else ", ratios differ")
        + (
            ""
            if anew_near
            else f"; computing everything anew takes {anew_s / 2.6:.0f} times the published time: without reuse the "
            "trace is more than these 8 machines can do, and the published set-up for that bar is not said"
        ),
    )


def ratio(traces: Traces) -> Finding:
    """Fig. 15: the split of 16 machines, synthetic trace, TTFT 10 s and TBT 100 ms."""
    published = {
        5: (77.7, 5.75, 31.6),
        6: (97.3, 1.73, 31.9),
        7: (99.1, 1.32, 33.0),
        8: (99.0, 1.20, 35.1),
        9: (99.2, 1.14, 38.4),
        10: (98.5, 1.12, 44.3),
        11: (86.2, 1.15, 58.4),
    }
    rows: list[Row] = []
    good: dict[int, float] = {}
    for prefill, (share, ttft, tbt) in published.items():
        cluster = load_preset("paper-16").with_counts(prefill=prefill, decode=16 - prefill).with_slo(ttft_s=10.0)
        summary = run(cluster, traces.synthetic())[1]
        good[prefill] = 100 * summary.goodput
        rows += [
            Row(f"{prefill}P{16 - prefill}D effective, %", share, good[prefill]),
            Row(f"{prefill}P{16 - prefill}D mean TTFT, s", ttft, summary.ttft_s.mean),
            Row(f"{prefill}P{16 - prefill}D mean TBT (longest tenth), ms", tbt, summary.tail_tbt_ms.mean),
        ]
    flat = min(good[p] for p in (7, 8, 9)) >= max(good.values()) - 2.0
    best = max(good.values())
    few, many = good[5] < best - 1.0, good[11] < best - 1.0
    tbt_near = all(abs(r.measured / r.published - 1) <= 0.15 for r in rows if "TBT" in r.what and r.published)
    return Finding(
        "fig15",
        "FAST'25 Fig. 15: prefill to decode ratio, synthetic trace",
        "16 machines, TTFT 10 s, TBT 100 ms, our default policy",
        rows,
        _verdict(flat and few and many and tbt_near, flat and few),
        ("best around one to one" if flat else "not best around one to one")
        + ("; falls with too few prefill machines" if few else "; does not fall with few prefill machines")
        + (", and with too few decode machines" if many else ", but not with few decode machines: five keep up here")
        + ("; TBT within 15 %" if tbt_near else "; TBT not within 15 % everywhere"),
    )


def rejections(traces: Traces) -> Finding:
    """arXiv Table 3: rejected requests at twice the speed, by admission."""
    published = {"baseline": 4183.0, "early": 3771.0, "predicted": 3589.0}
    trace = traces.toolagent()[:REJECTIONS_LOOKED_AT]
    cluster = load_preset("paper-16").with_slo(ttft_s=30.0, tbt_ms=OVERLOAD_TBT_MS)
    found: dict[str, Summary] = {}
    swing: dict[str, float] = {}
    for admission in (*published, "lookahead"):
        chosen = cluster.with_conductor(admission=admission, max_tokens=2000)
        simulation, found[admission] = run(chosen, trace, Run(seed=SEED, speed=OVERLOAD_SPEED))
        swing[admission] = decode_swing(simulation)
    rejected = {name: float(one.rejected + one.rejected_late) for name, one in found.items()}
    base = max(rejected["baseline"], 1.0)
    rows = [Row(f"{name}, rejected / baseline", published[name] / 4183.0, rejected[name] / base) for name in published]
    share = {name: 100 * count / 23_000 for name, count in published.items()}
    rows += [Row(f"{name}, rejected, %", share.get(name), 100 * rejected[name] / len(trace)) for name in rejected]
    rows += [Row(f"{name}, goodput %", None, 100 * one.goodput) for name, one in found.items()]
    rows += [Row(f"{name}, wasted prefill %", None, 100 * one.wasted_prefill) for name, one in found.items()]
    rows += [Row(f"{name}, deviation of decode load", None, value) for name, value in swing.items()]
    late = found["baseline"].rejected_late / base
    rows.append(Row("of the baseline's, rejected after their prefill, %", None, 100 * late))
    calm = run(load_preset("paper-16"), trace)[1].ttft_s.mean
    rows.append(Row("nobody refused, the trace's own speed: mean TTFT, s", CALM_TTFT_S, calm, "arXiv Fig. 8"))
    in_order = rejected["baseline"] > rejected["early"] > rejected["predicted"]
    near = all(abs(row.measured - (row.published or 0)) <= 0.05 for row in rows[1:3])
    calmer = swing["predicted"] < swing["early"] or swing["lookahead"] < swing["early"]
    return Finding(
        "table3",
        "arXiv 2407.00079 Table 3 and Fig. 9: rejections under overload, and the swing of decode load",
        f"8 prefill and 8 decode machines, the first {len(trace):,} requests of "
        f"{'the tool&agent trace' if traces.has_toolagent else 'a trace generated of the tool&agent shape'} at "
        f"{OVERLOAD_SPEED:g} times its speed, TTFT 30 s, TBT {OVERLOAD_TBT_MS:g} ms (the published limits are not "
        "said; this one refuses as many as published with the baseline)",
        rows,
        _verdict(in_order and near, in_order),
        ("order of the rejections kept" if in_order else "order of the rejections differs")
        + f", though goodput is {100 * found['baseline'].goodput:.0f} % with the baseline, "
        f"{100 * found['early'].goodput:.0f} % with early and {100 * found['predicted'].goodput:.0f} % with predicted "
        f"rejection (look-ahead: {100 * found['lookahead'].goodput:.0f} %)"
        + ("; prediction or look-ahead damps the swing" if calmer else "; the swing is not damped")
        + f"; the shares are not: {late:.0%} of the baseline's rejections are for decoding here, which is where the "
        f"rules differ, and the published machines, with {CALM_TTFT_S / calm:.0f} times our mean TTFT before any "
        "overload, were probably short of prefill as well, for which all rules reject alike",
    )


OVERLOAD_SPEED, OVERLOAD_TBT_MS, REJECTIONS_LOOKED_AT = 2.0, 49.0, 8_000
CALM_TTFT_S = 6.26  # published of 8 prefill and 8 decode machines and 23,000 requests


def decode_swing(simulation: Simulation) -> float:
    """Standard deviation of the mean decode batch over its mean, while requests arrive, its slow trend taken out."""
    last = float(simulation.results.arrival_s.max())
    timeline = simulation.timeline
    batch = np.array([b for at, b in zip(timeline.at_s, timeline.batch, strict=True) if 60.0 <= at <= last])
    if len(batch) < 120 or not batch.mean():
        return 0.0
    trend = np.convolve(batch, np.ones(61) / 61, mode="same")
    return float((batch - trend)[30:-30].std() / batch.mean())


EXPERIMENTS: dict[str, Callable[[Traces], Finding]] = {
    "fig5": scheduling,
    "fig6": capacity,
    "fig9": hit_rates,
    "fig10": local_and_global,
    "fig13": bandwidth,
    "fig15": ratio,
    "table3": rejections,
}


def _verdict(full: bool, part: bool) -> str:
    return "reproduced" if full else "partly" if part else "not reproduced"
