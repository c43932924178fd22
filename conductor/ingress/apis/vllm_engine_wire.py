"""What ``vllm.grpc.engine`` calls a generation, to this project's own types and back. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from conductor.api import InferenceRequest
from conductor.ingress.answers import Outcome, Piece
from conductor.ingress.fields.generation_fields import GenerationFields, StructuredOutputs
from mooncake.errors import InvalidRequest
from mooncake.types import FinishReason, SampledToken, TokenIds, TokenLogprob

_MEDIA = "models take and generate text here"
_HANDOFF = "prefill and decode nodes hand KV over by themselves; to a gateway their conductor is one engine for both"
_REFUSED = {
    "mm_inputs": _MEDIA,
    "extra_mm_inputs": _MEDIA,
    "media_refs": _MEDIA,
    "kv_transfer_params": _HANDOFF,
    "kv_transfer_params_json": _HANDOFF,
}


def check_supported(request: pb.GenerateRequest) -> None:
    """Raises InvalidRequest, naming the field that is not for this engine."""
    for name, why in _REFUSED.items():
        if any(field.name == name for field, _ in request.ListFields()):
            raise InvalidRequest(f"{name} is not taken: {why}", name)
    if request.data_parallel_rank:
        raise InvalidRequest("data_parallel_rank is not taken: the conductor places each request", "data_parallel_rank")


def fields_from_wire(params: pb.SamplingParams) -> GenerationFields:
    """As the other APIs name them. What is left out is off: the model's defaults are put in by the gateway, which knows
    them from ``GetModelInfo``. Only a missing temperature and length are recognised as such."""

    def given(name: str) -> Any:
        return getattr(params, name) if params.HasField(name) else None

    constraint = params.WhichOneof("constraint")
    return GenerationFields(
        n=params.n or 1,
        max_tokens=given("max_tokens"),
        min_tokens=params.min_tokens,
        temperature=given("temperature"),
        top_p=params.top_p or 1.0,
        top_k=params.top_k or -1,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        seed=given("seed"),
        stop=list(params.stop),
        stop_token_ids=list(params.stop_token_ids),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        ignore_eos=params.ignore_eos,
        prompt_logprobs=given("prompt_logprobs"),
        truncate_prompt_tokens=given("truncate_prompt_tokens"),
        structured_outputs=_constraint(constraint, getattr(params, constraint)) if constraint else None,
    )


def _constraint(kind: str, value: Any) -> StructuredOutputs | None:
    match kind:
        case "json_schema":
            return StructuredOutputs(json=value)
        case "choice":
            return StructuredOutputs(choice=list(value.choices))
        case "json_object":
            return StructuredOutputs(json_object=True) if value else None
        case _:
            return StructuredOutputs(**{kind: value})  # regex, grammar, structural_tag


class AnswerToWire:
    """One of a request's answers: pieces in, messages out. As long as it is not complete, it ends as aborted."""

    def __init__(self, request: InferenceRequest, index: int, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._end = pb.GenerateComplete(
            finish_reason=str(FinishReason.ABORT), prompt_tokens=len(request.tokens), index=index
        )
        self.is_complete = False

    def take(self, piece: Piece, input_logprobs: pb.InputLogProbs | None) -> pb.GenerateResponse | None:
        """Returns what a stream tells of the piece, if anything."""
        end = self._end
        ids = [token.token_id for token in piece.tokens]
        output_logprobs = _output_logprobs(ids, piece.tokens)
        end.output_ids.extend(ids)
        end.completion_tokens += len(ids)
        if piece.outcome is not None:
            self._complete(piece.outcome)
        if self._is_stream:
            if not ids and input_logprobs is None:
                return None
            chunk = pb.GenerateStreamChunk(
                token_ids=ids,
                prompt_tokens=end.prompt_tokens,
                completion_tokens=end.completion_tokens,
                output_logprobs=output_logprobs,
                input_logprobs=input_logprobs,
                index=end.index,
            )
            return pb.GenerateResponse(chunk=chunk)
        if output_logprobs is not None:  # a stream's end does not repeat what a message might not hold
            end.output_logprobs.MergeFrom(output_logprobs)
        if input_logprobs is not None:
            end.input_logprobs.CopyFrom(input_logprobs)
        return None

    def end(self) -> pb.GenerateResponse:
        """The message that ends it, with all its tokens."""
        return pb.GenerateResponse(complete=self._end)

    def _complete(self, outcome: Outcome) -> None:
        self.is_complete = True
        self._end.finish_reason = str(outcome.finish_reason)
        self._end.cached_tokens = outcome.usage.cached_tokens
        match outcome.stop_reason:
            case int(token_id):
                self._end.matched_token_id = token_id
            case str(text):
                self._end.matched_stop_str = text


def _output_logprobs(ids: Sequence[int], tokens: Sequence[SampledToken]) -> pb.OutputLogProbs | None:
    scores = [token.logprob for token in tokens if token.logprob is not None]
    if not scores:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[score.logprob for score in scores], token_ids=ids, top_logprobs=map(_top, scores)
    )


def input_logprobs(prompt: TokenIds, scores: Collection[SampledToken]) -> pb.InputLogProbs:
    """``scores`` are of all tokens but the first, which has none. For long prompts, call it in a thread."""
    found = [token.logprob or TokenLogprob(0.0) for token in scores]
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=score.logprob) for score in found)],
        token_ids=prompt,
        top_logprobs=[pb.TopLogProbs(), *map(_top, found)],
    )


def _top(score: TokenLogprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(token_ids=[token_id for token_id, _ in score.top], values=[value for _, value in score.top])
