"""Traces of calls, sent to a collector of OpenTelemetry by OTLP over gRPC.

The one module that knows OpenTelemetry, and imported only where traces are wanted. The SDK samples, and reads the
environment's ``OTEL_…`` for that, for headers and for certificates; its thread sends in batches what a bounded queue
holds. No request waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OpenSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from conductor.ingress.trace import CallTrace, Span

log = logging.getLogger(__name__)

FLUSH_S = 2.0  # for spans that are left when the conductor stops
# Where the SDK says, of each batch, that the collector is not there, and of each span, that the queue is full.
_REPETITIVE = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")
_TELL_EVERY_S = 60.0
_W3C = TraceContextTextMapPropagator()


class OtlpTracer:
    """See ``conductor.ingress.trace.Tracer``. One event loop."""

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        """``endpoint`` is a collector's "http://host:port", or https, or "host:port" for TLS unless
        ``OTEL_EXPORTER_OTLP_TRACES_INSECURE`` is true. Connects later."""
        self._clock = clock
        self._exporter = OTLPSpanExporter(endpoint)
        resource = (
            Resource.create().merge(Resource({"service.name": "mooncake"})).merge(OTELResourceDetector().detect())
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("mooncake")
        self._rarely = _Rarely(clock)
        for name in _REPETITIVE:
            logging.getLogger(name).addFilter(self._rarely)

    def begin(self, headers: Mapping[str, str], call_id: str, model: str, arrived_at: float) -> CallTrace | None:
        """See ``Tracer``."""
        epoch_ns = time.time_ns() - round(self._clock() * 1e9)
        start_ns = epoch_ns + round(arrived_at * 1e9)
        root = self._tracer.start_span("llm_request", _W3C.extract(headers), SpanKind.SERVER, start_time=start_ns)
        if not root.is_recording():
            return None
        told: dict[str, str] = {}
        _W3C.inject(told, set_span_in_context(root))
        tell = partial(self._end, root, epoch_ns)
        return CallTrace(call_id, model, arrived_at, told["traceparent"], self._clock, tell)

    async def close(self) -> None:
        """See ``Tracer``."""
        flushing = threading.Thread(target=self._flush, name="flush spans", daemon=True)
        flushing.start()
        await asyncio.to_thread(flushing.join, FLUSH_S)
        if flushing.is_alive():
            self._exporter.shutdown()  # ends what the thread waits for

    def _flush(self) -> None:
        self._provider.shutdown()
        for name in _REPETITIVE:
            logging.getLogger(name).removeFilter(self._rarely)

    def _end(self, root: OpenSpan, epoch_ns: int, span: Span) -> None:
        """A bug must cost this trace, not the answer."""
        try:
            self._fill(root, epoch_ns, span)
        except Exception:
            log.exception("the trace of a request is lost")

    def _fill(self, opened: OpenSpan, epoch_ns: int, span: Span) -> None:
        for name, at in span.events.items():
            opened.add_event(name, timestamp=epoch_ns + round(at * 1e9))
        opened.set_attributes(span.attributes)
        if span.error is not None:
            opened.set_attribute("error.type", span.error.code)
            opened.set_status(Status(StatusCode.ERROR, span.error.message))
        context = set_span_in_context(opened)
        for part in span.parts:
            start_ns = epoch_ns + round(part.start_at * 1e9)
            self._fill(self._tracer.start_span(part.name, context, start_time=start_ns), epoch_ns, part)
        opened.end(epoch_ns + round(span.end_at * 1e9))


class _Rarely(logging.Filter):
    """Lets a message pass now and then. That an export is tried again is none: if that fails, too, there is another."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._quiet_until = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        if now < self._quiet_until or (record.levelno < logging.ERROR and record.name == _REPETITIVE[0]):
            return False
        self._quiet_until = now + _TELL_EVERY_S
        return True
