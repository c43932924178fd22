"""Summary of a run. Everything but ``wall_s`` and ``peak_memory_gb`` is a function of the cluster, the trace and the
seed, byte for byte."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake.app.latency import Spread
from mooncake.app.sim.cluster import SLO, Cluster
from mooncake.app.sim.requests import Fate, Floats, Results
from mooncake.app.sim.simulation import Run, Simulation

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Summary:
    """Latencies and hit rates are over the requests that were answered in full."""

    cluster: str
    policy: str
    trace: str
    seed: int
    speed: float
    requests: int
    done: int
    rejected: int
    rejected_late: int
    failed: int
    duration_s: float
    ttft_s: Spread
    queue_s: Spread
    mean_tbt_ms: Spread
    tail_tbt_ms: Spread
    hit_tokens: float  # share of prompt tokens reused
    hit_requests: float  # mean over requests of the share reused
    hit_dram: float  # part of hit_tokens that was in memory, here or on another host
    hit_ssd: float  # part of hit_tokens that only an SSD had
    fetched_tokens: float  # share of prompt tokens that came from another host
    prefill_ms: float  # of machine time, mean of all requests
    wasted_prefill: float  # share of that time spent on requests that were not answered
    goodput: float  # share of all requests inside both limits
    goodput_per_s: float
    ttft_error: float  # median |predicted / measured - 1| of the first token
    prefill_use: float  # mean share of time that a machine of the role works
    prefill_use_max: float
    decode_use: float
    bytes_moved_gb: float
    copies_made: int  # of hot prefixes, ahead of need
    copies_given_up: int  # of those, and of prefixes fetched by the requests that made them hot
    ssd_read_gb: float
    ssd_written_gb: float  # including copies within the log


def meets(results: Results, slo: SLO) -> Mask:
    """Whether each request was answered in full with TTFT and the longest tenth of gaps inside the limits."""
    done = results.fate == Fate.DONE
    tails = np.nan_to_num(results.tail_tbt_ms, nan=0.0)
    within: Mask = done & (results.ttft_s <= slo.ttft_s) & (tails <= slo.tbt_ms)
    return within


def summarize(simulation: Simulation, trace_name: str) -> Summary:
    results, cluster = simulation.results, simulation.cluster
    done = results.fate == Fate.DONE
    duration_s = max(float(np.nanmax(results.end_s)), 1e-9)
    good = meets(results, cluster.slo)
    spent_ms = max(float(results.prefill_ms.sum()), 1e-9)
    predicted = done & ~np.isnan(results.predicted_ttft_s) & (results.ttft_s > 0)
    errors = np.abs(results.predicted_ttft_s[predicted] / results.ttft_s[predicted] - 1)
    coupled = [machine.busy_s for machine in simulation.machines.coupled.values()]
    busy = {
        "prefill": [machine.busy_s for machine in simulation.machines.prefill.values()] + coupled,
        "decode": [machine.busy_s for machine in simulation.machines.decode.values()] + coupled,
    }
    return Summary(
        cluster=cluster.name,
        policy=cluster.conductor.policy,
        trace=trace_name,
        seed=simulation.options.seed,
        speed=simulation.options.speed,
        requests=results.size,
        done=int(done.sum()),
        rejected=int((results.fate == Fate.REJECTED).sum()),
        rejected_late=int((results.fate == Fate.REJECTED_LATE).sum()),
        failed=int((results.fate == Fate.FAILED).sum()),
        duration_s=duration_s,
        ttft_s=_spread(results.ttft_s[done]),
        queue_s=_spread(results.queue_s[done]),
        mean_tbt_ms=_spread(results.mean_tbt_ms[done]),
        tail_tbt_ms=_spread(results.tail_tbt_ms[done]),
        hit_tokens=_share(results.cached_tokens[done].sum(), results.input_tokens[done].sum()),
        hit_dram=_share((results.cached_tokens - results.ssd_tokens)[done].sum(), results.input_tokens[done].sum()),
        hit_ssd=_share(results.ssd_tokens[done].sum(), results.input_tokens[done].sum()),
        hit_requests=float(np.mean(results.cached_tokens[done] / results.input_tokens[done])) if done.any() else 0.0,
        fetched_tokens=_share(results.fetched_tokens[done].sum(), results.input_tokens[done].sum()),
        prefill_ms=float(results.prefill_ms.mean()),
        wasted_prefill=float(results.prefill_ms[~done].sum()) / spent_ms,
        goodput=float(good.mean()),
        goodput_per_s=float(good.sum()) / duration_s,
        ttft_error=float(np.median(errors)) if len(errors) else 0.0,
        prefill_use=_mean(busy["prefill"]) / duration_s,
        prefill_use_max=max(busy["prefill"], default=0.0) / duration_s,
        decode_use=_mean(busy["decode"]) / duration_s,
        bytes_moved_gb=simulation.network.bytes_moved / 1e9,
        copies_made=simulation.replicas.made,
        copies_given_up=simulation.replicas.dropped,
        ssd_read_gb=sum(disk.bytes_read for disk in simulation.machines.disks.values()) / 1e9,
        ssd_written_gb=sum(disk.bytes_written for disk in simulation.machines.disks.values()) / 1e9,
    )


def to_json(summary: Summary, cluster: Cluster, run: Run) -> dict[str, object]:
    """JSON with numbers of six significant digits; the rest is rounding noise."""
    rounded = _round(asdict(summary))
    assert isinstance(rounded, dict)
    facts = {name: msgspec.to_builtins(getattr(cluster, name)) for name in ("machines", "conductor", "slo", "curves")}
    return {"simulate": cluster.name, **rounded, "run": asdict(run), **facts}


def _spread(values: Floats) -> Spread:
    """``Spread.of`` (nearest rank) for large arrays."""
    values = np.sort(values[~np.isnan(values)])
    if not len(values):
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0)
    ranks = [max(0, int(np.ceil(share * len(values))) - 1) for share in (0.5, 0.9, 0.99, 1.0)]
    return Spread(float(values.mean()), *(float(values[rank]) for rank in ranks))


def _share(part: float, whole: float) -> float:
    return float(part) / max(float(whole), 1.0)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _round(value: object) -> object:
    if isinstance(value, dict):
        return {key: _round(item) for key, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value
