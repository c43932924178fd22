"""What the HTTP APIs share on the way in: a POST becomes a ``Call``, its fields and its conversation a checked job.

Each API (``openai.py``, ``responses.py``, ``anthropic.py``) translates what is its own into ``GenerationFields``, and
words the answers itself. This module knows neither routes nor what answers look like.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from msgspec import structs
from starlette.requests import Request

from conductor.ingress.answers import Job
from conductor.ingress.apis.messages import TEMPLATE_ROLES, Conversation
from conductor.ingress.apis.openai_choices import TokenDetails
from conductor.ingress.fields.generation_fields import GenerationFields, sampling_of, stop_strings
from conductor.ingress.fields.request_json import R, decode_request
from conductor.ingress.http.edge import TRACE
from conductor.ingress.http.request import read_json_body
from conductor.ingress.parsers.output_format import OutputFormat
from conductor.ingress.parsers.reasoning import Start
from conductor.ingress.pipeline import Pipeline
from conductor.ingress.prompts import Keep
from conductor.ingress.trace import CallTrace
from mooncake.errors import InvalidRequest, shown
from mooncake.sampling import SamplingParams, ThinkingBudget
from mooncake.types import TokenIds

F = TypeVar("F", bound=GenerationFields)
WARNING_HEADER = "x-mooncake-warning"
PROMPT_END_TOKENS = 32  # last tokens of a prompt that show whether its template opens the reasoning


@dataclass(frozen=True, slots=True)
class Call:
    """One decoded POST: where it came from, and what every answer to it repeats."""

    request: Request
    fields: GenerationFields
    arrived_at: float
    answer_id: str
    created: int
    headers: dict[str, str]
    trace: CallTrace | None

    @property
    def session(self) -> str:
        """A hint which requests belong together, never an identity."""
        headers = self.request.headers
        return headers.get("x-session-affinity") or headers.get("x-correlation-id") or self.fields.session


class Intake:
    """For one pipeline, whose requests may take ``request_timeout_s``."""

    def __init__(self, pipeline: Pipeline, output_format: OutputFormat, request_timeout_s: float) -> None:
        self.pipeline = pipeline
        self.prompts = pipeline.prompts
        self.output_format = output_format
        self._request_timeout_s = request_timeout_s

    async def decode(self, request: Request, form: type[R]) -> tuple[R, list[str]]:
        """The body, and the names of its unknown fields. Raises like ``read_json_body`` and ``decode_request``."""
        self.pipeline.check_open()
        return decode_request(await read_json_body(request), form)

    async def receive(self, request: Request, form: type[F], id_prefix: str) -> tuple[Call, F]:
        """The call, and its fields as the API's own type. Raises like ``decode``, NotFound for an unknown model, and
        Overloaded, before anything is decoded, when no request has room."""
        arrived_at = self.pipeline.now()
        body, ignored = await self.take(request, form)
        self.pipeline.model.adapter_of(body.model or "")
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
        answer_id = f"{id_prefix}{body.request_id or uuid.uuid4().hex}"
        trace = self.trace(request, answer_id, body.model, arrived_at)
        return Call(request, body, arrived_at, answer_id, int(time.time()), warning(ignored), trace), body

    async def take(self, request: Request, form: type[R]) -> tuple[R, list[str]]:
        """As ``decode``, for what will take a place. Raises Overloaded, before anything is decoded, when there is
        none."""
        self.pipeline.check_open()
        raw = await read_json_body(request)
        self.pipeline.check_room()
        return decode_request(raw, form)

    def trace(self, request: Request, answer_id: str, model: str | None, arrived_at: float) -> CallTrace | None:
        trace = self.pipeline.begin_trace(lambda: request.headers, answer_id, model or "", arrived_at)
        if trace is not None:
            request.scope[TRACE] = trace
        return trace

    def deadline(self, arrived_at: float) -> float:
        """Of a request that arrived then, in seconds of the same clock."""
        return arrived_at + self._request_timeout_s

    async def encode(self, conversation: Conversation, keep: Keep | None = None) -> TokenIds:
        """A chat's prompt, or its tokens to ``keep``. Raises like ``Prompts.encode_chat``."""
        try:
            messages, variables = conversation.for_template(self.output_format)
            return await self.prompts.encode_chat(
                messages, conversation.param, keep, variables, conversation.continue_final, TEMPLATE_ROLES
            )
        except RecursionError:  # JSON that could only just be parsed
            raise InvalidRequest("the arguments of a call nest too deeply", conversation.param) from None

    async def chat_job(
        self, call: Call, conversation: Conversation, max_tokens: int | None, logprobs: int | None, number: int = 0
    ) -> Job:
        """The checked job of a chat, ``number`` of those of a request. Raises InvalidRequest, naming the field."""
        fields, tools = call.fields, conversation.tools
        if tools is not None and tools.must_call:
            fields = structs.replace(fields, response_format=None)  # that is for a text, and there will be none
        keep = self.prompts.to_keep(fields.truncate_prompt_tokens, fields.truncation_side, max_tokens or 1)
        tokens = await self.encode(conversation, keep)
        max_tokens = self.prompts.max_tokens(len(tokens), max_tokens, self.pipeline.model.sampling.max_tokens)
        bad_words = await self.prompts.bad_words(fields.bad_words or ())
        tokenizer = self.prompts.tokenizer
        end = tokens[-PROMPT_END_TOKENS:] if self.output_format.has_reasoning else tokens[:0]
        start = self.output_format.start(tokenizer.decode(end, skip_special=False), conversation.opening)
        with guide_named(fields.guide_field):
            sampling = sampling_of(fields, self.pipeline.model.sampling, max_tokens, logprobs, bad_words=bad_words)
            guide = sampling.guide
        if tools is not None and (call_guide := tools.guide()) is not None:
            if guide is not None:
                raise InvalidRequest("a tool must be called: no other guide may be given", "tool_choice")
            guide = call_guide
        if guide is not None:
            with guide_named("tools" if sampling.guide is None else fields.guide_field):
                may_call = tools if fields.has_format else None
                guide = self.output_format.guide(guide, start, tokenizer.control_id, may_call)
                sampling = replace(sampling, guide=guide)
                await self.prompts.check_guide(sampling.guide)
        budget = self._thinking_budget(fields.thinking_token_budget, start)
        if budget is not None:
            sampling = replace(sampling, thinking_budget=budget)
        job = self.job(call, tokens, sampling, number)
        return replace(
            job, kept=self.output_format.markers(tools), parser=lambda: self.output_format.parser(tools, start)
        )

    def job(self, call: Call, tokens: TokenIds, sampling: SamplingParams, number: int) -> Job:
        """The call's job for its prompt of this ``number``."""
        if call.fields.cache_salt == "":
            raise InvalidRequest("cache_salt is empty, and separates nothing: leave it out", "cache_salt")
        return self.pipeline.job(
            tokens,
            sampling,
            request_id=f"{call.answer_id}-{number}",
            deadline=self.deadline(call.arrived_at),
            arrived_at=call.arrived_at,
            stop=stop_strings(call.fields.stop),
            include_stop=bool(call.fields.include_stop_str_in_output),
            skip_special=call.fields.skip_special_tokens is not False,
            salt=call.fields.cache_salt or "",
            session=call.session,
            priority=call.fields.priority or 0,
            model=call.fields.model or "",
            trace=call.trace,
        )

    def token_details(self, fields: GenerationFields, logprobs: bool, interval: int | None = None) -> TokenDetails:
        """What the answers tell of their tokens besides the text; a chunk of a stream has ``interval`` of them."""
        tokenizer = self.prompts.tokenizer
        return TokenDetails(
            bytes_of=lambda token_id: tokenizer.token_bytes(token_id, skip_special=False),
            stream=lambda: tokenizer.stream(fields.skip_special_tokens is not False),
            logprobs=logprobs,
            token_ids=bool(fields.return_token_ids),
            prompt_logprobs=fields.prompt_logprobs,
            names_ids=bool(fields.return_tokens_as_token_ids),
            interval=interval or 1,
        )

    @property
    def reasoning_tokens(self) -> tuple[int, int] | None:
        """The token that opens the model's reasoning and the one that closes it, if it has such tokens."""
        tags, token_of = self.output_format.reasoning_tags, self.prompts.tokenizer.only_token
        begin, end = (None, None) if tags is None else (token_of(tags.begin), token_of(tags.end))
        return None if begin is None or end is None else (begin, end)

    def _thinking_budget(self, num_tokens: int | None, start: Start) -> ThinkingBudget | None:
        """Raises InvalidRequest for a model whose reasoning cannot be counted."""
        if num_tokens is None or num_tokens == -1:
            return None
        if self.reasoning_tokens is None:
            what = "the model's reasoning has no budget: no single token opens it, or none closes it"
            raise InvalidRequest(what, "thinking_token_budget")
        if num_tokens < 0:
            what = f"thinking_token_budget must be -1 or at least 0, got {shown(num_tokens)}"
            raise InvalidRequest(what, "thinking_token_budget")
        if start is Start.AFTER:
            return None
        begin, end = self.reasoning_tokens
        return ThinkingBudget(num_tokens, end, None if start is Start.WITHIN else begin)


@contextlib.contextmanager
def guide_named(field: str) -> Iterator[None]:
    """Report an error in the guide as one of the field it comes from."""
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(error.message, field) if error.param == "guide" else error from None


def warning(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names unknown fields, if there are any."""
    return {WARNING_HEADER: f"ignored unknown fields: {', '.join(ignored)}"} if ignored else {}


def with_warning(headers: dict[str, str], sentence: str) -> dict[str, str]:
    """``headers`` with one more warning, in ASCII."""
    return headers | {WARNING_HEADER: "; ".join(filter(None, (headers.get(WARNING_HEADER), sentence)))}
