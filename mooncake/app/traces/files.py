"""Trace files: reading either format, scaling what was recorded, and writing generated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from mooncake.app.console import amount, out
from mooncake.app.traces.shapes import SHAPES, generate
from mooncake.errors import ConfigError
from mooncake.trace import ResampledTrace, TraceRequest, load_azure, load_trace, save_trace


def load_any(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Load Mooncake's JSONL or an Azure CSV, depending on the file name. Raises InvalidRequest."""
    is_csv = ".csv" in path.suffixes
    return load_azure(path, limit) if is_csv else load_trace(path, limit)


def faster(trace: Sequence[TraceRequest], speed: float) -> list[TraceRequest]:
    """The same requests in 1/``speed`` of the time."""
    return [replace(request, timestamp_ms=request.timestamp_ms / speed) for request in trace]


def one_after_another(traces: Sequence[Sequence[TraceRequest]]) -> list[TraceRequest]:
    """Traces played one after the other, each with its own ids: a shift of load."""
    joined: list[TraceRequest] = []
    start_ms, first_id = 0.0, 0
    for trace in traces:
        for request in trace:
            ids = tuple(block + first_id for block in request.hash_ids)
            joined.append(replace(request, timestamp_ms=request.timestamp_ms + start_ms, hash_ids=ids))
        start_ms = joined[-1].timestamp_ms
        first_id += 1 + max(max(request.hash_ids) for request in trace)
    return joined


def scale_trace(path: Path, target: Path, requests: int | None, speed: float, seed: int) -> None:
    trace = load_any(path)
    found: Sequence[TraceRequest] = trace if requests is None else ResampledTrace(trace, requests, seed)
    save_trace(faster(found, speed), target)
    out.print(f"wrote {amount(len(found), 'request')} to {escape(str(target))}")


def generate_trace(shape: str, target: Path, requests: int | None, seed: int) -> None:
    """Raises ConfigError for an unknown shape."""
    if shape not in SHAPES:
        raise ConfigError(f"no shape is called {shape!r}; there are: {', '.join(SHAPES)}")
    trace = generate(shape, requests, seed)
    save_trace(trace, target)
    out.print(f"wrote {amount(len(trace), 'request')} of the shape {shape} to {escape(str(target))}")
