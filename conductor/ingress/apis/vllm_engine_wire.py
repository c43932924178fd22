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
    """One of a request's answers: pieces in, messages out."""

    def __init__(self, request: InferenceRequest, index: int, is_stream: bool) -> None:
        self._num_prompt = len(request.tokens)
        self._has_logprobs = request.sampling.logprobs is not None
        self._index = index
        self._is_stream = is_stream
        self._tokens: list[SampledToken] = []
        self._input_logprobs: pb.InputLogProbs | None = None
        self._outcome: Outcome | None = None

    @property
    def is_complete(self) -> bool:
        return self._outcome is not None

    def take(self, piece: Piece, input_logprobs: pb.InputLogProbs | None) -> pb.GenerateResponse | None:
        """Returns what a stream tells of the piece, if anything."""
        self._tokens += piece.tokens
        self._outcome = piece.outcome
        if not self._is_stream:
            self._input_logprobs = self._input_logprobs or input_logprobs
        if not (self._is_stream and (piece.tokens or input_logprobs)):
            return None
        chunk = pb.GenerateStreamChunk(
            token_ids=[token.token_id for token in piece.tokens],
            prompt_tokens=self._num_prompt,
            completion_tokens=len(self._tokens),
            output_logprobs=self._output_logprobs(piece.tokens),
            input_logprobs=input_logprobs,
            index=self._index,
        )
        return pb.GenerateResponse(chunk=chunk)

    def whole(self) -> pb.GenerateResponse:
        """The message that ends it; an answer that is not complete has been aborted."""
        outcome = self._outcome
        complete = pb.GenerateComplete(
            output_ids=[token.token_id for token in self._tokens],
            finish_reason=str(FinishReason.ABORT if outcome is None else outcome.finish_reason),
            prompt_tokens=self._num_prompt,
            completion_tokens=len(self._tokens),
            cached_tokens=0 if outcome is None else outcome.usage.cached_tokens,
            output_logprobs=self._output_logprobs(self._tokens),
            input_logprobs=self._input_logprobs,
            index=self._index,
        )
        match None if outcome is None else outcome.stop_reason:
            case int(token_id):
                complete.matched_token_id = token_id
            case str(text):
                complete.matched_stop_str = text
        return pb.GenerateResponse(complete=complete)

    def _output_logprobs(self, tokens: Sequence[SampledToken]) -> pb.OutputLogProbs | None:
        if not (self._has_logprobs and tokens):
            return None
        scores = [token.logprob or TokenLogprob(0.0) for token in tokens]
        return pb.OutputLogProbs(
            token_logprobs=[score.logprob for score in scores],
            token_ids=[token.token_id for token in tokens],
            top_logprobs=map(_top, scores),
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
