"""``mooncake trace stats``: lengths and rates of a recorded trace, and what LRU caches would have hit."""

from __future__ import annotations

import math
from pathlib import Path

from rich.markup import escape

from mooncake.app.console import out, plain_table, print_json
from mooncake.app.latency import mean, percentile
from mooncake.trace import TRACE_BLOCK_TOKENS, TraceRequest, expected_hits, load_trace

CAPACITIES = (None, 100_000, 50_000, 30_000, 10_000, 1_000)  # blocks, as in the published analyses


def show_trace(path: Path, limit: int | None, as_json: bool) -> None:
    """Lengths, rates, and hit rates of an LRU cache of several sizes."""
    trace = load_trace(path, limit)
    facts = trace_facts(trace)
    hits = {capacity: expected_hits(trace, capacity) for capacity in CAPACITIES}
    if as_json:
        rates = [
            {
                "capacity_blocks": capacity,
                "block": count.block_rate,
                "token": count.token_rate,
                "request_mean": count.request_mean_rate,
            }
            for capacity, count in hits.items()
        ]
        print_json({"trace": str(path), **facts, "lru_hit_rates": rates})
        return
    table = plain_table(escape(path.name), "")
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    out.print(table)
    table = plain_table(f"LRU cache, blocks of {TRACE_BLOCK_TOKENS}", "by block", "by token", "mean of requests")
    for capacity, count in hits.items():
        name = "endless" if capacity is None else f"{capacity:,}"
        table.add_row(name, *(f"{r:.4f}" for r in (count.block_rate, count.token_rate, count.request_mean_rate)))
    out.print()
    out.print(table)


def trace_facts(trace: list[TraceRequest]) -> dict[str, int | float]:
    inputs = sorted(request.input_length for request in trace)
    outputs = sorted(request.output_length for request in trace)
    duration_s = (trace[-1].timestamp_ms - trace[0].timestamp_ms) / 1000
    return {
        "requests": len(trace),
        "duration_s": duration_s,
        "requests_per_s": len(trace) / duration_s if duration_s else math.inf,
        "input_tokens": sum(inputs),
        "input_mean": mean(inputs),
        "input_p50": percentile(inputs, 0.5),
        "input_p90": percentile(inputs, 0.9),
        "input_p99": percentile(inputs, 0.99),
        "input_max": inputs[-1],
        "output_tokens": sum(outputs),
        "output_mean": mean(outputs),
        "output_p50": percentile(outputs, 0.5),
        "output_p90": percentile(outputs, 0.9),
        "output_p99": percentile(outputs, 0.99),
        "output_max": outputs[-1],
        "block_references": sum(len(request.hash_ids) for request in trace),
        "distinct_blocks": len({block for request in trace for block in request.hash_ids}),
    }
