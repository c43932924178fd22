"""Play a recorded trace against a running cluster with the trace's timing, and measure what its clients would see.

An open loop: a request is sent at its time, however slow the answers are, up to a limit of requests in flight. The hit
rate is reported together with the exact hit rate of an infinite cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import msgspec

from mooncake.api_keys import bearer, own_api_key
from mooncake.app.latency import SLO, HitRates, LoadSummary, Outcome, RequestResult, summarize
from mooncake.app.load.open_loop import OpenLoop
from mooncake.app.outputs import writing
from mooncake.errors import InternalError, MooncakeError, NotFound, TryLater
from mooncake.hashing import extend_chain
from mooncake.rpc import common_pb2, inference_pb2
from mooncake.rpc.errors import error_from_rpc
from mooncake.rpc.inference_pb2_grpc import InferenceStub
from mooncake.rpc.server import Channels
from mooncake.tls import own_tls
from mooncake.trace import HitCount, TraceRequest, expected_hits, trace_tokens

if TYPE_CHECKING:
    from mooncake.rpc.inference_pb2_grpc import InferenceAsyncStub


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """``speed`` 10 plays ten trace seconds per second; 0 sends everything as fast as ``concurrency`` allows.

    ``jitter_ms`` moves each arrival randomly (seeded) by up to so much trace time: published traces have ticks of 3 s.
    """

    tokens_per_block: int = 16
    speed: float = 1.0
    jitter_ms: float = 0.0
    seed: int = 0
    concurrency: int = 64
    timeout_s: float = 300.0
    slo: SLO = field(default_factory=SLO)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    model: str
    options: ReplayOptions
    summary: LoadSummary
    endless_cache: HitRates  # of the requests that succeeded, served one after the other by an infinite cache
    results: tuple[RequestResult, ...]  # of the requests that ended
    planned: int  # number of requests
    sent: int  # number of requests sent


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and its send time in seconds after the start."""

    index: int
    at_s: float
    request: TraceRequest


def plan_arrivals(requests: Sequence[TraceRequest], options: ReplayOptions) -> list[Arrival]:
    """The send time of each request. The first one is sent at once, whatever its timestamp."""
    rng = random.Random(options.seed)
    first_ms = requests[0].timestamp_ms if requests else 0.0
    per_ms = 1e-3 / options.speed if options.speed > 0 else 0.0
    times = [(request.timestamp_ms - first_ms + rng.uniform(0, options.jitter_ms)) * per_ms for request in requests]
    order = sorted(range(len(requests)), key=times.__getitem__)
    return [Arrival(index, times[index], requests[index]) for index in order]


class Replay(OpenLoop[Arrival]):
    """Against one cluster."""

    def __init__(
        self, address: str, options: ReplayOptions, on_result: Callable[[RequestResult], None] = lambda _: None
    ) -> None:
        super().__init__(options.concurrency, on_result)
        self._address = address
        self._options = options
        self._channels = Channels(tls=own_tls())
        self._metadata = bearer(own_api_key())
        self._model = inference_pb2.ModelInfo()

    async def run(self, requests: Sequence[TraceRequest]) -> ReplayReport:
        """Send all requests (scaled to ``tokens_per_block``) and wait until they end. Raises MooncakeError when the
        cluster cannot be reached at all."""
        try:
            self._model = await self._served_model()
            await self.send_all(plan_arrivals(requests, self._options))
            return self.report(requests)
        finally:
            await self._channels.close()

    def report(self, requests: Sequence[TraceRequest]) -> ReplayReport:
        """The results so far."""
        results = sorted(self.results, key=lambda result: result.index)
        block_tokens = self._model.block_tokens or self._options.tokens_per_block
        served = [requests[result.index] for result in results if result.outcome is Outcome.OK]
        return ReplayReport(
            model=self._model.id,
            options=self._options,
            summary=summarize(results, block_tokens, self.now_s, self._options.slo),
            endless_cache=endless_cache(served, self._options.tokens_per_block, self._model),
            results=tuple(results),
            planned=len(requests),
            sent=self.sent,
        )

    async def _served_model(self) -> inference_pb2.ModelInfo:
        try:
            response: inference_pb2.ListModelsResponse = await self._stub().ListModels(
                inference_pb2.ListModelsRequest(), timeout=10.0, metadata=self._metadata
            )
        except grpc.RpcError as failure:
            raise error_from_rpc(failure, f"conductor {self._address}") from None
        if not response.models:
            raise NotFound(f"the cluster at {self._address} serves no model yet")
        return response.models[0]

    def _stub(self) -> InferenceAsyncStub:
        return InferenceStub(self._channels.get(self._address))

    async def _measure(self, arrival: Arrival) -> RequestResult:
        request, sent_s = arrival.request, self.now_s

        def ended(outcome: Outcome, error: str = "") -> RequestResult:
            return RequestResult(
                arrival.index, arrival.at_s, sent_s, outcome, prompt_tokens=request.input_length, error=error
            )

        if request.input_length + request.output_length > self._model.max_model_len:
            return ended(Outcome.TOO_LONG)
        tokens = trace_tokens(request, self._options.tokens_per_block, self._model.vocab_size)
        message = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=tokens.tolist()),
            sampling=common_pb2.SamplingParams(
                max_tokens=request.output_length, temperature=0.0, ignore_eos=True, seed=arrival.index
            ),
        )
        try:
            return await self._stream(arrival, message, sent_s)
        except grpc.RpcError as failure:
            error = error_from_rpc(failure, self._address)
            return ended(Outcome.REJECTED if isinstance(error, TryLater) else Outcome.FAILED, error.message)
        except MooncakeError as error:
            return ended(Outcome.FAILED, error.message)

    async def _stream(self, arrival: Arrival, message: inference_pb2.GenerateRequest, sent_s: float) -> RequestResult:
        times_s: list[float] = []
        last = inference_pb2.GenerateResponse()
        self.sent += 1
        timeout_s = self._options.timeout_s
        async for last in self._stub().Generate(message, timeout=timeout_s, metadata=self._metadata):
            times_s.extend([self.now_s] * len(last.tokens))
        usage = last.usage
        if not times_s or len(times_s) != usage.completion_tokens:
            raise InternalError(f"{len(times_s)} tokens came, and the server reports {usage.completion_tokens}")
        result = self._answered(arrival, sent_s, times_s, usage.prompt_tokens, usage.cached_tokens)
        return replace(result, prefill_node=last.timings.prefill_node, decode_node=last.timings.decode_node)


def endless_cache(requests: Sequence[TraceRequest], tokens_per_block: int, model: inference_pb2.ModelInfo) -> HitRates:
    """Hit rates of an infinite cache with the cluster's blocks that serves the requests one after the other."""
    if not requests:
        return HitRates(0.0, 0.0, 0.0)
    blocks = [cluster_blocks(request, tokens_per_block, model) for request in requests]
    count: HitCount = expected_hits(blocks, None, model.block_tokens, whole_blocks_only=True)
    return HitRates(count.block_rate, count.token_rate, count.request_mean_rate)


def cluster_blocks(request: TraceRequest, tokens_per_block: int, model: inference_pb2.ModelInfo) -> TraceRequest:
    """The same request with one id per block of the cluster, not of the trace."""
    tokens = trace_tokens(request, tokens_per_block, model.vocab_size)
    keys = extend_chain(b"trace", tokens, model.block_tokens)
    ids = [int.from_bytes(key[:7], "little") for key in keys]
    if len(tokens) % model.block_tokens:
        ids.append(-1)  # a partial last block is never shared
    return TraceRequest(request.timestamp_ms, len(tokens), request.output_length, tuple(ids))


def write_json(report: ReplayReport, path: Path, trace: str) -> None:
    """Write the report with every request as JSON. Infinite limits are written as null."""
    text = msgspec.json.encode(
        {
            "bench": "replay",
            "trace": trace,
            "model": report.model,
            "config": _finite(asdict(report.options)),
            "seed": report.options.seed,
            "planned": report.planned,
            "sent": report.sent,
            "summary": asdict(report.summary),
            "endless_cache": asdict(report.endless_cache),
            "results": [asdict(result) for result in report.results],
        }
    )
    with writing(path):
        path.write_bytes(text + b"\n")


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
