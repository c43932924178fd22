"""The public gRPC service ``mooncake.v1.Inference`` over the shared pipeline.

Converts wire formats only. Status codes, health and reflection come from ``mooncake.rpc.server``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc

from conductor.ingress.answers import Job, Outcome, Piece
from conductor.ingress.apis.grpc_intake import GrpcCall, GrpcIntake
from conductor.ingress.embedding import Vectors, pooling_of
from conductor.ingress.pipeline import COMPLETION_MAX_TOKENS, Pipeline
from mooncake.errors import InvalidRequest
from mooncake.rpc import common_pb2, inference_pb2_grpc
from mooncake.rpc import inference_pb2 as pb
from mooncake.rpc.convert import UnreadScores, report_to_wire, sampled_to_wire, sampling_from_wire
from mooncake.text.chat_template import ChatMessage
from mooncake.types import TokenIds, Usage

SERVICE = "mooncake.v1.Inference"


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, pipeline: Pipeline, request_timeout_s: float) -> None:
        self._pipeline = pipeline
        self._prompts = pipeline.prompts
        self._intake = GrpcIntake(pipeline, request_timeout_s)

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> AsyncIterator[pb.GenerateResponse]:
        call = self._intake.receive(context, request.request_id, request.model)
        job = await self._job(call, request)
        with self._intake.answering(call):
            self._pipeline.check_scores([job])
            async with contextlib.aclosing(self._pipeline.stream(job)) as pieces:
                async for piece in pieces:
                    yield piece_to_wire(job.request.request_id, piece)

    async def Embed(  # noqa: N802
        self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext[pb.EmbedRequest, pb.EmbedResponse]
    ) -> pb.EmbedResponse:
        call = self._intake.receive(context, request.request_id, request.model)
        dimensions = request.dimensions if request.HasField("dimensions") else None
        settings = pooling_of(self._pipeline.model, dimensions)
        match request.WhichOneof("input"):
            case "text":
                tokens = await self._prompts.encode_whole(request.text, "text")
            case "token_ids":
                tokens = self._prompts.check_tokens(request.token_ids.ids, "token_ids", num_answer=0)
            case _:
                raise InvalidRequest("one of text and token_ids must be set", "input")
        job = self._intake.embedding_job(call, tokens, settings, request.cache_salt, request.priority, request.model)
        vector, usage = await self._intake.embed(call, job, Vectors(settings, dimensions))
        return pb.EmbedResponse(request_id=call.request_id, embedding=vector.tolist(), usage=_usage_to_wire(usage))

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse]
    ) -> pb.TokenizeResponse:
        self._pipeline.model.adapter_of(request.model)
        match request.WhichOneof("input"):
            case "text":
                tokens = await self._prompts.encode(request.text, "text")
            case "chat":
                tokens = await self._prompts.encode_chat(chat_from_wire(request.chat))
            case _:
                raise InvalidRequest("one of text and chat must be set", "input")
        return pb.TokenizeResponse(ids=tokens.tolist())

    async def Detokenize(  # noqa: N802
        self,
        request: pb.DetokenizeRequest,
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        self._pipeline.model.adapter_of(request.model)
        tokens = self._prompts.as_tokens(request.ids, "ids")
        return pb.DetokenizeResponse(text=await self._prompts.decode(tokens, skip_special=False))

    async def ListModels(  # noqa: N802
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        model = self._pipeline.model
        infos = [
            pb.ModelInfo(
                id=name,
                max_model_len=self._prompts.context_len,
                vocab_size=model.vocab_size,
                block_tokens=model.block_tokens,
                dtype=model.dtype,
            )
            for name in self._pipeline.model.names
        ]
        return pb.ListModelsResponse(models=infos)

    async def _job(self, call: GrpcCall, request: pb.GenerateRequest) -> Job:
        tokens, default = await self._prompt(request)
        wanted = common_pb2.SamplingParams()
        wanted.CopyFrom(request.sampling)
        requested = wanted.max_tokens if wanted.HasField("max_tokens") else None
        self._prompts.check_room(len(tokens), requested, "max_tokens")
        wanted.max_tokens = self._prompts.max_tokens(len(tokens), requested, default)
        bad_words = await self._prompts.bad_words(request.bad_words)
        wanted.bad_words.extend(common_pb2.TokenRun(ids=word) for word in bad_words)
        sampling = sampling_from_wire(wanted, self._pipeline.model.sampling)
        await self._prompts.check_guide(sampling.guide)
        return self._pipeline.job(
            tokens,
            sampling,
            request_id=call.request_id,
            deadline=call.deadline,
            arrived_at=call.arrived_at,
            stop=request.stop,
            include_stop=request.include_stop_str_in_output,
            salt=request.cache_salt,
            session=call.session,
            priority=request.priority,
            model=request.model,
            trace=call.trace,
        )

    async def _prompt(self, request: pb.GenerateRequest) -> tuple[TokenIds, int | None]:
        """The prompt's ids, and the default length of its answer; None: as long as fits."""
        match request.WhichOneof("prompt"):
            case "text":
                return await self._prompts.encode(request.text, "text"), COMPLETION_MAX_TOKENS
            case "token_ids":
                return self._prompts.check_tokens(request.token_ids.ids, "token_ids"), COMPLETION_MAX_TOKENS
            case "chat":
                tokens = await self._prompts.encode_chat(chat_from_wire(request.chat))
                return tokens, self._pipeline.model.sampling.max_tokens
            case _:
                raise InvalidRequest("one of text, chat and token_ids must be set", "prompt")


def chat_from_wire(chat: pb.ChatMessages) -> list[ChatMessage]:
    return [ChatMessage(message.role, message.content) for message in chat.messages]


def piece_to_wire(request_id: str, piece: Piece) -> pb.GenerateResponse:
    response = pb.GenerateResponse(
        request_id=request_id,
        tokens=[sampled_to_wire(token) for token in piece.tokens],
        text=piece.text,
        choice=piece.choice,
        prompt_logprobs=_prompt_logprobs_to_wire(piece),
    )
    if piece.outcome is not None:
        response.MergeFrom(_outcome_to_wire(piece.outcome))
    return response


def _prompt_logprobs_to_wire(piece: Piece) -> common_pb2.PromptLogprobs | None:
    scores = piece.prompt_logprobs
    if scores is None or isinstance(scores, UnreadScores):
        return None if scores is None else scores.message
    return common_pb2.PromptLogprobs(tokens=[sampled_to_wire(token) for token in scores])


def _usage_to_wire(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _outcome_to_wire(outcome: Outcome) -> pb.GenerateResponse:
    usage, latency, summary = outcome.usage, outcome.latency, outcome.summary
    return pb.GenerateResponse(
        finish_reason=str(outcome.finish_reason),
        usage=_usage_to_wire(usage),
        timings=pb.RequestTimings(
            ttft_ms=latency.ttft_ms,
            mean_tbt_ms=latency.mean_tbt_ms,
            p90_tail_tbt_ms=latency.tail_tbt_ms,
            total_ms=latency.total_ms,
            prefill=report_to_wire(summary.report),
            prefill_node=summary.prefill_node,
            decode_node=summary.decode_node,
        ),
    )
