"""What the gRPC services share on the way in, as ``intake`` is for HTTP: a call's id, its time, its session and trace.

It knows neither the services nor their messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from conductor.ingress.answers import Job
from conductor.ingress.embedding import NO_ANSWER, Embedded, Vectors
from conductor.ingress.http.edge import TRACE_RESPONSE
from conductor.ingress.pipeline import DEADLINE_GRACE_S, NOT_TRACED, Pipeline
from conductor.ingress.trace import CallTrace
from mooncake.pooling import PoolingSettings
from mooncake.rpc.server import remaining_s
from mooncake.types import TokenIds

SESSION_KEY = "x-session-affinity"  # metadata: a hint which requests belong together
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class GrpcCall:
    """One call that may generate. ``deadline`` and ``arrived_at`` are on the pipeline's clock."""

    request_id: str
    arrived_at: float
    deadline: float
    session: str
    trace: CallTrace | None


class GrpcIntake:
    """For one pipeline, whose requests may take ``request_timeout_s``."""

    def __init__(self, pipeline: Pipeline, request_timeout_s: float) -> None:
        self.pipeline = pipeline
        self._request_timeout_s = request_timeout_s

    def receive(self, context: Context, request_id: str, model: str = "") -> GrpcCall:
        """Call it before anything is tokenized. Raises NotFound for an unknown model, NodeUnavailable while shutting
        down, and Overloaded when no request has room."""
        pipeline = self.pipeline
        arrived_at = pipeline.now()
        deadline = arrived_at + remaining_s(context, self._request_timeout_s)
        pipeline.check_open()
        pipeline.check_room()
        pipeline.model.adapter_of(model)
        request_id = request_id or f"gen-{uuid.uuid4().hex}"
        trace = pipeline.begin_trace(lambda: _texts(context), request_id, model, arrived_at)
        if trace is not None:
            context.set_trailing_metadata(((TRACE_RESPONSE, trace.traceparent),))
        return GrpcCall(request_id, arrived_at, deadline, _session(context), trace)

    @contextlib.contextmanager
    def answering(self, call: GrpcCall) -> Iterator[None]:
        """To be entered while the call is answered. An answer ends at its deadline by itself; this ends a call whose
        client has stopped reading, too."""
        task = asyncio.current_task()
        left_s = call.deadline + 2 * DEADLINE_GRACE_S - self.pipeline.now()
        timer = asyncio.get_running_loop().call_later(left_s, task.cancel) if task else None
        try:
            with call.trace or NOT_TRACED:
                yield
        finally:
            if timer is not None:
                timer.cancel()

    def embedding_job(
        self,
        call: GrpcCall,
        tokens: TokenIds,
        settings: PoolingSettings,
        salt: str = "",
        priority: int = 0,
        model: str = "",
    ) -> Job:
        """Raises InvalidRequest, naming the field."""
        return self.pipeline.job(
            tokens,
            NO_ANSWER,
            request_id=call.request_id,
            deadline=call.deadline,
            arrived_at=call.arrived_at,
            salt=salt,
            session=call.session,
            priority=priority,
            model=model,
            trace=call.trace,
            pooling=settings.kind,
        )

    async def embed(self, call: GrpcCall, job: Job, vectors: Vectors) -> Embedded:
        """Raises like ``Pipeline.stream``."""
        with self.answering(call):
            async with contextlib.aclosing(self.pipeline.stream(job)) as pieces:
                async for piece in pieces:
                    await vectors.take(0, piece)
        [embedded] = vectors.of(1)
        return embedded


def _session(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == SESSION_KEY:
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""


def _texts(context: Context) -> dict[str, str]:
    """The call's metadata, without what is binary."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
