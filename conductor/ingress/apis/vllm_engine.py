"""``vllm.grpc.engine.VllmEngine`` over the shared pipeline: the service by which gateways drive an engine.

To a gateway the whole cluster is one engine: token ids go in and come out, and the gateway sees to chats, tools and
texts. The service is another project's (smg), and its messages are in the package smg-grpc-proto: where that is not
installed, this module cannot be imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import NoReturn

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from conductor.ingress.answers import Job
from conductor.ingress.apis.grpc_intake import Context, GrpcCall, GrpcIntake
from conductor.ingress.apis.intake import guide_named
from conductor.ingress.apis.vllm_engine_wire import AnswerToWire, check_supported, fields_from_wire, input_logprobs
from conductor.ingress.cluster_load import ClusterLoad
from conductor.ingress.embedding import Vectors, pooling_of
from conductor.ingress.fields.generation_fields import sampling_of, stop_strings
from conductor.ingress.http.absent_paths import refused_because
from conductor.ingress.pipeline import Pipeline
from mooncake.errors import Cancelled
from mooncake.model_config import ModelConfig
from mooncake.sampling_defaults import NEUTRAL
from mooncake.text.tokenizer import Tokenizer

SERVICE = "vllm.grpc.engine.VllmEngine"
add_to_server = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server

NO_TOKENIZER_FILE = "/dev/null"  # smg looks for another path or name on its disk and on the hub before it asks for ours
CHUNK_BYTES = 1 << 20  # of a tokenizer, in a message
_NO_EVENTS = (
    "the conductor knows its nodes' blocks by their names, and routes by them itself; a gateway that routes among "
    "clusters would need their tokens, which nobody keeps"
)


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # its package has no types
    """One event loop. ``waiting_for`` is that of ``Ingress``."""

    def __init__(
        self,
        pipeline: Pipeline,
        model_config: ModelConfig,
        request_timeout_s: float,
        max_requests: int,
        load: Callable[[], Awaitable[ClusterLoad]],
        waiting_for: Callable[[], Sequence[str]],
    ) -> None:
        self._pipeline = pipeline
        self._prompts = pipeline.prompts
        self._model_config = model_config
        self._intake = GrpcIntake(pipeline, request_timeout_s)
        self._max_requests = max_requests
        self._load = load
        self._waiting_for = waiting_for
        self._started_at = pipeline.now()
        self._received_at = 0.0  # seconds since 1970
        self._archive = b""  # of the tokenizer, once somebody wanted it
        self._zipping = asyncio.Lock()
        self._running: set[str] = set()  # its own requests, of all that the pipeline runs

    # Generating

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        self._received_at = time.time()
        call = self._intake.receive(context, request.request_id)
        job = await self._job(call, request)
        answers = [AnswerToWire(job.request, index, request.stream) for index in range(job.request.sampling.n)]
        with self._intake.answering(call), self._abortable(call.request_id):
            self._pipeline.check_scores([job])
            with contextlib.suppress(Cancelled):
                async with contextlib.aclosing(self._pipeline.stream(job)) as pieces:
                    async for piece in pieces:
                        answer, scores = answers[piece.choice], None
                        if piece.prompt_logprobs is not None:
                            scores = await asyncio.to_thread(input_logprobs, job.request.tokens, piece.prompt_logprobs)
                        if (chunk := answer.take(piece, scores)) is not None:
                            yield chunk
                        if request.stream and answer.is_complete:
                            yield answer.end()
            for answer in answers:  # in order: smg takes them for the first, the second, …
                if not (request.stream and answer.is_complete):
                    yield answer.end()

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        for request_id in self._running.intersection(request.request_ids):
            self._pipeline.abort(request_id)
        return pb.AbortResponse()

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:  # noqa: N802
        self._received_at = time.time()
        call = self._intake.receive(context, request.request_id)
        settings = pooling_of(self._pipeline.model)
        tokens = self._prompts.check_tokens(request.tokenized.input_ids, "tokenized", num_answer=0)
        job = self._intake.embedding_job(call, tokens, settings)
        with self._abortable(call.request_id):
            vector, usage = await self._intake.embed(call, job, Vectors(settings))
        return pb.EmbedResponse(embedding=vector.tolist(), prompt_tokens=usage.prompt_tokens, embedding_dim=len(vector))

    # What a gateway asks about it

    async def HealthCheck(  # noqa: N802
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        if not self._pipeline.is_open:
            return pb.HealthCheckResponse(healthy=False, message="stopping")
        if waiting_for := ", ".join(self._waiting_for()):
            return pb.HealthCheckResponse(healthy=False, message=f"waiting for {waiting_for}")
        return pb.HealthCheckResponse(healthy=True)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        model, tokenizer = self._pipeline.model, self._prompts.tokenizer
        defaults = {name: value for name, value in asdict(model.sampling).items() if value != getattr(NEUTRAL, name)}
        pad = tokenizer.control_id(tokenizer.named_tokens.get("pad_token", ""))
        return pb.GetModelInfoResponse(
            model_path=model.root,
            tokenizer_path=NO_TOKENIZER_FILE,
            is_generation=model.has_head,
            max_context_length=self._prompts.context_len,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            model_type=self._model_config.architecture,
            eos_token_ids=tokenizer.eos_ids,
            pad_token_id=pad or 0,
            bos_token_id=self._model_config.bos_id or 0,
            max_req_input_len=self._prompts.context_len - 1,
            default_sampling_params_json=json.dumps(defaults),
        )

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            active_requests=self._pipeline.num_running,
            last_receive_timestamp=self._received_at,
            uptime_seconds=self._pipeline.now() - self._started_at,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=self._pipeline.model.block_tokens,
            max_num_seqs=self._max_requests,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:  # noqa: N802
        load, block_tokens = await self._load(), self._pipeline.model.block_tokens
        whole = pb.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=_int32(load.blocks_in_use * block_tokens),
            max_total_num_tokens=_int32(load.blocks_total * block_tokens),
            token_usage=load.usage,
            cache_hit_rate=load.hit_rate,
            max_running_requests=self._max_requests,
            num_waiting_uncached_tokens=_int32(load.waiting_tokens),
        )
        at = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=at, dp_rank_count=1, loads=[] if request.dp_rank else [whole])

    async def GetTokenizer(  # noqa: N802
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        async with self._zipping:
            self._archive = self._archive or await asyncio.to_thread(_zipped, self._prompts.tokenizer)
        archive = self._archive
        last = (len(archive) - 1) // CHUNK_BYTES
        for number in range(last + 1):
            data = archive[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            digest = hashlib.sha256(archive).hexdigest() if number == last else ""
            yield common_pb2.GetTokenizerChunk(data=data, sha256=digest)

    # What is not here

    async def FlushCache(  # noqa: N802
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        return await _refuse(context, refused_because("/flush_cache"))

    async def StartProfile(  # noqa: N802
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        return await _refuse(context, refused_because("/start_profile"))

    async def StopProfile(  # noqa: N802
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        return await _refuse(context, refused_because("/stop_profile"))

    async def SubscribeKvEvents(  # noqa: N802
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> None:
        """It yields nothing, not even the metadata of a stream that has been taken: smg would subscribe for ever."""
        await _refuse(context, _NO_EVENTS)

    async def _job(self, call: GrpcCall, request: pb.GenerateRequest) -> Job:
        """Raises InvalidRequest, naming the field."""
        check_supported(request)
        fields = fields_from_wire(request.sampling_params)
        keep = self._prompts.to_keep(fields.truncate_prompt_tokens, None, fields.max_tokens or 1)
        if request.WhichOneof("input") == "text":
            tokens = await self._prompts.encode(request.text, "text", keep)
        else:
            tokens = self._prompts.check_tokens(request.tokenized.input_ids, "tokenized", keep)
        self._prompts.check_room(len(tokens), fields.max_tokens, "max_tokens")
        max_tokens = self._prompts.max_tokens(len(tokens), fields.max_tokens, self._pipeline.model.sampling.max_tokens)
        logprobs = request.sampling_params.logprobs if request.sampling_params.HasField("logprobs") else None
        with guide_named(fields.guide_field):
            sampling = sampling_of(fields, self._pipeline.model.sampling, max_tokens, logprobs)
            await self._prompts.check_guide(sampling.guide)
        return self._pipeline.job(
            tokens,
            sampling,
            request_id=call.request_id,
            deadline=call.deadline,
            arrived_at=call.arrived_at,
            stop=stop_strings(fields.stop),
            include_stop=bool(fields.include_stop_str_in_output),
            skip_special=bool(fields.skip_special_tokens),
            session=call.session,
            trace=call.trace,
        )

    @contextlib.contextmanager
    def _abortable(self, request_id: str) -> Iterator[None]:
        """A second request with the id of one that runs is refused, and leaves that one abortable."""
        is_first = request_id not in self._running
        self._running.add(request_id)
        try:
            yield
        finally:
            if is_first:
                self._running.discard(request_id)


async def _refuse(context: Context, why: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, why)
    raise AssertionError("abort always raises")


def _int32(count: int) -> int:
    """Of tokens: a thousand large nodes cache more than the field holds."""
    return min(count, (1 << 31) - 1)


def _zipped(tokenizer: Tokenizer) -> bytes:
    """Its files; the same bytes for the same tokenizer."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as into:
        for name, text in tokenizer.exported().items():
            into.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
    return archive.getvalue()
