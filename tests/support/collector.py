"""A collector of OpenTelemetry's traces on loopback, as operators have one: what it was sent, as trees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2
from waiting import until


@dataclass
class Received:
    """A span, with its children in order of their start."""

    span: trace_pb2.Span
    parts: list[Received] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        return {pair.key: _plain(pair.value) for pair in self.span.attributes}

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def ms(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e6

    @property
    def names(self) -> list[str]:
        return [part.name for part in self.parts]

    def all(self, name: str) -> list[Received]:
        return [part for part in self.parts if part.name == name]

    def one(self, name: str) -> Received:
        [part] = self.all(name)
        return part

    def walk(self) -> Iterator[Received]:
        yield self
        for part in self.parts:
            yield from part.walk()


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind or "")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[trace_pb2.Span] = []
        self.resources: list[dict[str, Any]] = []

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            self.resources.append({pair.key: _plain(pair.value) for pair in resource.resource.attributes})
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def roots(self) -> list[Received]:
        """Spans whose parent was not sent, in order of their start."""
        received = {span.span_id: Received(span) for span in sorted(self.spans, key=lambda s: s.start_time_unix_nano)}
        roots = []
        for one in received.values():
            parent = received.get(one.span.parent_span_id)
            (roots if parent is None else parent.parts).append(one)
        return roots

    async def root_of(self, call_id: str) -> Received:
        """The trace of a call, once it has come."""

        def found() -> list[Received]:
            return [root for root in self.roots if root.attributes.get("gen_ai.request.id") == call_id]

        await until(found)
        [root] = found()
        return root


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
