"""OpenAI's HTTP API over the shared pipeline: models, completions, chat, and vLLM's tokenize and detokenize.

It knows what each field means and how answers are worded. It knows no sockets (``http_server.py``), and generates
nothing itself (``pipeline.py``).
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conductor.ingress.answers import Job, Piece
from conductor.ingress.choices import AnyChoice, ChatWriter, ChoiceWriter, CompletionWriter, EchoWriter, Extras
from conductor.ingress.event_stream import EventStream, StreamingAnswer
from conductor.ingress.http_client import read_json_body, unless_gone, with_body
from conductor.ingress.http_errors import ClientGone, error_response, json_response, known_error
from conductor.ingress.messages import TEMPLATE_ROLES, Conversation, chat_messages
from conductor.ingress.openai_answers import (
    DetokenizeResponse,
    Envelope,
    ModelCard,
    ModelList,
    ModelPermission,
    PromptLogprobs,
    TokenizeResponse,
    TokenizerInfo,
    UsageBody,
    usage_body,
)
from conductor.ingress.openai_checks import check_chat, check_chat_batch, check_completion, num_choices
from conductor.ingress.openai_types import (
    BatchChatRequest,
    ChatFields,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    Message,
    R,
    TokenizeRequest,
    decode_request,
    sampling_of,
    stop_strings,
    template_variables,
)
from conductor.ingress.parsers.output_format import OutputFormat
from conductor.ingress.parsers.reasoning import Start
from conductor.ingress.pipeline import COMPLETION_MAX_TOKENS, MAX_CHOICES, Pipeline
from conductor.ingress.prompts import Keep
from conductor.ingress.tools import Tools, tools_of
from mooncake.errors import InvalidRequest, MooncakeError, shown
from mooncake.types import SamplingParams, ThinkingBudget, TokenIds

F = TypeVar("F", bound=GenerationFields)
WARNING_HEADER = "x-mooncake-warning"
PROMPT_END_TOKENS = 32  # last tokens of a prompt that show whether its template opens the reasoning
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Wording:
    """What differs only in name between the two kinds of answers."""

    id_prefix: str
    whole: str
    chunk: str


CHAT = Wording("chatcmpl-", "chat.completion", "chat.completion.chunk")
COMPLETION = Wording("cmpl-", "text_completion", "text_completion")


@dataclass(frozen=True, slots=True)
class Call:
    """One decoded POST: where it came from, and what every answer to it repeats."""

    request: Request
    fields: GenerationFields
    arrived_at: float
    answer_id: str
    created: int
    headers: dict[str, str]

    @property
    def session(self) -> str:
        """A hint which requests belong together, never an identity."""
        headers = self.request.headers
        return headers.get("x-session-affinity") or headers.get("x-correlation-id") or self.fields.session


class PromptHead(NamedTuple):
    """What a chat's answer, or the first chunk of it, tells of its prompt."""

    token_ids: list[int] | UnsetType = UNSET
    text: str | UnsetType = UNSET


class Invocation(msgspec.Struct, frozen=True):
    """Enough of a request to know whether it is a chat."""

    messages: msgspec.Raw | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run and how to report it. ``writers`` are numbered like the answers, across all ``jobs``."""

    call: Call
    wording: Wording
    jobs: list[Job]
    writers: Sequence[ChoiceWriter]
    prompt_token_ids: list[int] | UnsetType = UNSET  # chat only; completions have them per choice
    prompt_text: str | UnsetType = UNSET  # chat only

    @property
    def usage(self) -> UsageBody:
        """A prompt counts once, however many choices it has. Its reused tokens are those of its first choice."""
        prompt_tokens = sum(len(job.request.tokens) for job in self.jobs)
        cached_tokens = blended_tokens = first = 0
        for job in self.jobs:
            if (outcome := self.writers[first].outcome) is not None:
                cached_tokens += outcome.usage.cached_tokens
                blended_tokens += outcome.summary.report.blended_tokens
            first += job.request.sampling.n
        written = sum(writer.num_tokens for writer in self.writers)
        reasoning_tokens = sum(writer.num_reasoning for writer in self.writers)
        return usage_body(prompt_tokens, written, cached_tokens, blended_tokens, reasoning_tokens)


class OpenAIApi:
    """The API's routes. Every handler returns a response, whatever the input."""

    def __init__(
        self, pipeline: Pipeline, output_format: OutputFormat, request_timeout_s: float, keep_alive_s: float
    ) -> None:
        self.pipeline = pipeline
        self.prompts = pipeline.prompts
        self.output_format = output_format
        self.keep_alive_s = keep_alive_s
        self._request_timeout_s = request_timeout_s

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", guarded(self.list_models), methods=["GET"]),
            Route("/v1/models/", guarded(self.list_models), methods=["GET"]),  # otherwise: the model with an empty name
            Route("/v1/models/{model:path}", guarded(self.get_model), methods=["GET"]),
            Route("/v1/completions", guarded(self.complete), methods=["POST"]),
            Route("/v1/chat/completions", guarded(self.chat), methods=["POST"]),
            Route("/v1/chat/completions/batch", guarded(self.chat_batch), methods=["POST"]),
            Route("/tokenize", guarded(self.tokenize), methods=["POST"]),
            Route("/detokenize", guarded(self.detokenize), methods=["POST"]),
            Route("/tokenizer_info", guarded(self.tokenizer_info), methods=["GET"]),
            Route("/invocations", guarded(self.invoke), methods=["POST"]),
        ]

    async def list_models(self, request: Request) -> Response:
        return json_response(ModelList([self._card(name) for name in self.pipeline.model.names]))

    async def get_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self.pipeline.model.adapter_of(name)
        return json_response(self._card(name))

    async def complete(self, request: Request) -> Response:
        call, body = await self.receive(request, CompletionRequest, COMPLETION.id_prefix)
        check_completion(body)
        max_new = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        keep = self.prompts.to_keep(body.truncate_prompt_tokens, body.truncation_side, max_new)
        prompts = await self._prompts(body.prompt or "", keep, body.add_special_tokens is not False)
        n = num_choices(body, len(prompts), body.best_of or 0)
        jobs: list[Job] = []
        writers: list[ChoiceWriter] = []
        extras = self.extras(body, body.logprobs is not None, body.stream_interval)
        is_echo_alone = bool(body.echo) and body.max_tokens == 0  # evaluations ask for a text's likelihood like this
        max_new = 1 if is_echo_alone else max_new
        bad_words = self.prompts.bad_words(body.bad_words or ())
        writer = EchoWriter if is_echo_alone else CompletionWriter
        for tokens in prompts:
            self.prompts.check_room(len(tokens), body.max_tokens, "max_tokens")
            max_tokens = self.prompts.max_tokens(len(tokens), max_new, None)
            scores = body.logprobs if body.echo else None
            with _guide_named(body.guide_field):
                sampling = sampling_of(
                    body, self.pipeline.model.sampling, max_tokens, body.logprobs, body.best_of or 0, scores, bad_words
                )
                await self.prompts.check_guide(sampling.guide)
            jobs.append(self._job(call, tokens, sampling, len(jobs)))
            echo = await self.prompts.decode(tokens, body.skip_special_tokens is not False) if body.echo else ""
            ids = tokens.tolist()
            writers += [writer(len(writers) + i, extras, ids, echo) for i in range(n)]
        return await self._answer(Plan(call=call, wording=COMPLETION, jobs=jobs, writers=writers))

    async def chat(self, request: Request) -> Response:
        call, body = await self.receive(request, ChatRequest, CHAT.id_prefix)
        check_chat(body)
        tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        n = num_choices(body, 1)
        job = await self._conversation_job(call, body, body.messages, tools)
        return await self._answer(
            Plan(
                call=call,
                wording=CHAT,
                jobs=[job],
                writers=self._chat_writers(body, n),
                prompt_token_ids=job.request.tokens.tolist() if body.return_token_ids else UNSET,
                prompt_text=await self.prompts.decode(job.request.tokens, False) if body.return_prompt_text else UNSET,
            )
        )

    async def chat_batch(self, request: Request) -> Response:
        """vLLM's: several conversations, each answered by the choice of its number."""
        call, body = await self.receive(request, BatchChatRequest, CHAT.id_prefix)
        check_chat_batch(body)
        jobs = [
            await self._conversation_job(call, body, messages, None, number, f"messages[{number}]")
            for number, messages in enumerate(body.messages)
        ]
        writers = self._chat_writers(body, len(jobs))
        return await self._answer(Plan(call=call, wording=CHAT, jobs=jobs, writers=writers))

    async def _conversation_job(
        self,
        call: Call,
        body: ChatFields,
        messages: Sequence[Message],
        tools: Tools | None,
        number: int = 0,
        param: str = "messages",
    ) -> Job:
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        is_begun = bool(body.continue_final_message)
        conversation = Conversation(
            chat_messages(messages, param), tools, template_variables(body), is_begun, param=param
        )
        job = await self.chat_job(call, conversation, body.most_tokens, logprobs, number)
        self.prompts.check_room(len(job.request.tokens), body.most_tokens, body.most_tokens_field)
        return job

    def _chat_writers(self, body: ChatFields, count: int) -> list[ChatWriter]:
        extras = self.extras(body, bool(body.logprobs), body.stream_interval)
        has_reasoning, is_told = self.output_format.has_reasoning, body.include_reasoning is not False
        return [ChatWriter(index, extras, has_reasoning, is_told) for index in range(count)]

    async def encode(self, conversation: Conversation, keep: Keep | None = None) -> TokenIds:
        """A chat's prompt, or its tokens to ``keep``. Raises like ``Pipeline.encode_chat``."""
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
        keep = self.prompts.to_keep(fields.truncate_prompt_tokens, fields.truncation_side, max_tokens or 1)
        tokens = await self.encode(conversation, keep)
        max_tokens = self.prompts.max_tokens(len(tokens), max_tokens, self.pipeline.model.sampling.max_tokens)
        bad_words = self.prompts.bad_words(fields.bad_words or ())
        tokenizer = self.prompts.tokenizer
        start = self.output_format.start(
            tokenizer.decode(tokens[-PROMPT_END_TOKENS:], skip_special=False), conversation.opening
        )
        with _guide_named(fields.guide_field):
            sampling = sampling_of(fields, self.pipeline.model.sampling, max_tokens, logprobs, bad_words=bad_words)
            guide = sampling.guide
        if tools is not None and (call_guide := tools.guide()) is not None:
            if guide is not None:
                raise InvalidRequest("a tool must be called: no other guide with it", "tool_choice")
            guide = call_guide
        if guide is not None:
            with _guide_named("tools" if sampling.guide is None else fields.guide_field):
                sampling = replace(sampling, guide=self.output_format.guide(guide, start, tokenizer.control_id))
                await self.prompts.check_guide(sampling.guide)
        budget = self._thinking_budget(fields.thinking_token_budget, start)
        job = self._job(call, tokens, replace(sampling, thinking_budget=budget), number)
        return replace(
            job, kept=self.output_format.markers(tools), parser=lambda: self.output_format.parser(tools, start)
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
        begin, end = self.reasoning_tokens
        return (
            None if start is Start.AFTER else ThinkingBudget(num_tokens, end, None if start is Start.WITHIN else begin)
        )

    async def tokenize(self, request: Request) -> Response:
        body, ignored = await self._decode(request, TokenizeRequest)
        self.pipeline.model.adapter_of(body.model or "")
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", "prompt")
        if body.messages is not None:
            tools = tools_of(body.tools, body.tool_choice)
            is_begun = bool(body.continue_final_message)
            conversation = Conversation(chat_messages(body.messages), tools, template_variables(body), is_begun)
            tokens = await self.encode(conversation)
        else:
            tokens = await self.prompts.encode(body.prompt or "", add_special=body.add_special_tokens is not False)
        name = self.prompts.tokenizer.token_name
        names = [name(token_id) for token_id in tokens.tolist()] if body.return_token_strs else UNSET
        answer = TokenizeResponse(len(tokens), self.prompts.context_len, tokens.tolist(), names)
        return json_response(answer, headers=_warning(ignored))

    async def detokenize(self, request: Request) -> Response:
        body, _ = await self._decode(request, DetokenizeRequest)
        self.pipeline.model.adapter_of(body.model or "")
        tokens = self.prompts.as_tokens(body.tokens, "tokens")
        text = await self.prompts.decode(tokens, skip_special=False)  # detokenize shows control tokens
        return json_response(DetokenizeResponse(text))

    async def tokenizer_info(self, request: Request) -> Response:
        """vLLM's; lm-eval's remote tokenizer reads it."""
        tokenizer = self.prompts.tokenizer
        named = tokenizer.named_tokens
        info = TokenizerInfo(
            model_max_length=self.prompts.context_len,
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token") or next(map(tokenizer.token_name, tokenizer.eos_ids), None),
            pad_token=named.get("pad_token"),
            unk_token=named.get("unk_token"),
            chat_template=tokenizer.template_source or None,
        )
        return json_response(info)

    async def invoke(self, request: Request) -> Response:
        """SageMaker's one path: a chat if there are messages, else a completion."""
        self.pipeline.check_open()
        body = await read_json_body(request)
        given, _ = decode_request(body, Invocation)
        answer = self.complete if given.messages is UNSET else self.chat
        return await answer(with_body(request, body))

    # ------------------------------------------------------------ in

    async def _decode(self, request: Request, form: type[R]) -> tuple[R, list[str]]:
        self.pipeline.check_open()
        return decode_request(await read_json_body(request), form)

    async def receive(self, request: Request, form: type[F], id_prefix: str) -> tuple[Call, F]:
        arrived_at = self.pipeline.now()
        body, ignored = await self._decode(request, form)
        self.pipeline.model.adapter_of(body.model or "")
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
        answer_id = f"{id_prefix}{body.request_id or uuid.uuid4().hex}"
        return Call(request, body, arrived_at, answer_id, int(time.time()), _warning(ignored)), body

    async def _prompts(
        self, prompt: str | list[str | int | list[int]], keep: Keep | None, add_special: bool
    ) -> list[TokenIds]:
        """The four forms OpenAI allows: a text, texts, token ids, or lists of those; of each, those to
        ``keep``."""
        if isinstance(prompt, str):
            return [await self.prompts.encode(prompt, keep=keep, add_special=add_special)]
        if not prompt:
            raise InvalidRequest("the prompt is empty", "prompt")
        if ids := [item for item in prompt if isinstance(item, int)]:
            if len(ids) < len(prompt):
                raise InvalidRequest("a prompt mixes token ids with something else", "prompt")
            return [self.prompts.check_tokens(ids, keep=keep)]
        if len(prompt) > MAX_CHOICES:
            raise InvalidRequest(f"at most {MAX_CHOICES} prompts are allowed", "prompt")
        return [
            await self.prompts.encode(item, keep=keep, add_special=add_special)
            if isinstance(item, str)
            else self.prompts.check_tokens(_ids(item), keep=keep)
            for item in prompt
        ]

    def _job(self, call: Call, tokens: TokenIds, sampling: SamplingParams, number: int) -> Job:
        return self.pipeline.job(
            tokens,
            sampling,
            request_id=f"{call.answer_id}-{number}",
            deadline=call.arrived_at + self._request_timeout_s,
            arrived_at=call.arrived_at,
            stop=stop_strings(call.fields.stop),
            include_stop=bool(call.fields.include_stop_str_in_output),
            skip_special=call.fields.skip_special_tokens is not False,
            salt=call.fields.cache_salt or "",
            session=call.session,
            priority=call.fields.priority or 0,
            model=call.fields.model or "",
        )

    def extras(self, fields: GenerationFields, logprobs: bool, interval: int | None = None) -> Extras:
        tokenizer = self.prompts.tokenizer
        return Extras(
            bytes_of=lambda token_id: tokenizer.token_bytes(token_id, skip_special=False),
            stream=lambda: tokenizer.stream(fields.skip_special_tokens is not False),
            logprobs=logprobs,
            token_ids=bool(fields.return_token_ids),
            prompt_logprobs=fields.prompt_logprobs,
            names_ids=bool(fields.return_tokens_as_token_ids),
            interval=interval or 1,
        )

    # ------------------------------------------------------------ out

    async def _answer(self, plan: Plan) -> Response:
        if plan.call.fields.stream:
            return StreamingAnswer(lambda stream: self._stream(plan, stream), plan.call.headers, self.keep_alive_s)

        async def take(number: int, piece: Piece) -> None:
            plan.writers[number].take(piece)

        await unless_gone(plan.call.request.receive, self.pipeline.run(plan.jobs, take))
        choices = [writer.whole() for writer in plan.writers]
        scores = plan.writers[0].prompt_scores() if plan.wording is CHAT else UNSET  # completions have them per choice
        head = PromptHead(plan.prompt_token_ids, plan.prompt_text)
        whole = self._envelope(plan, plan.wording.whole, choices, plan.usage, head, scores)
        return json_response(whole, headers=plan.call.headers)

    async def _stream(self, plan: Plan, stream: EventStream) -> None:
        options = plan.call.fields.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        wants_running_usage = wants_usage and options is not None and bool(options.continuous_usage_stats)
        head = PromptHead(plan.prompt_token_ids, plan.prompt_text)

        async def tell(number: int, piece: Piece) -> None:
            nonlocal head
            for choice in plan.writers[number].chunks(piece):
                usage = (plan.usage if wants_running_usage else None) if wants_usage else UNSET
                chunk = self._envelope(plan, plan.wording.chunk, [choice], usage, head)
                head = PromptHead()  # sent once
                await stream.event(msgspec.json.encode(chunk))

        await self.pipeline.run(plan.jobs, tell)
        if wants_usage:
            await stream.event(msgspec.json.encode(self._envelope(plan, plan.wording.chunk, [], plan.usage)))

    def _envelope(
        self,
        plan: Plan,
        kind: str,
        choices: Sequence[AnyChoice],
        usage: UsageBody | UnsetType | None,
        head: PromptHead = PromptHead(),
        prompt_logprobs: PromptLogprobs | UnsetType = UNSET,
    ) -> Envelope:
        model = self.pipeline.model
        call = plan.call
        return Envelope(
            id=call.answer_id,
            object=kind,
            created=call.created,
            model=call.fields.model or model.name,
            choices=choices,
            system_fingerprint=model.fingerprint,
            usage=usage,
            prompt_token_ids=head.token_ids,
            prompt_text=head.text,
            prompt_logprobs=prompt_logprobs,
        )

    def _card(self, name: str) -> ModelCard:
        """An adapter's entry names its base model, as vLLM's does."""
        model = self.pipeline.model
        parent = None if name == model.name else model.name
        permission = [ModelPermission(f"modelperm-{name}", model.created)]
        return ModelCard(name, model.created, self.prompts.context_len, model.root_of(name), permission, parent=parent)


def guarded(handler: Handler, refused: Callable[[MooncakeError], Response] = error_response) -> Handler:
    """Every error becomes an error body, OpenAI's or another API's; a client that disconnected gets nothing."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGone as error:
            return Response(status_code=error.http_status)
        except Exception as error:
            return refused(known_error(error, request.url.path))

    return endpoint


@contextlib.contextmanager
def _guide_named(field: str) -> Iterator[None]:
    """Report an error in the guide as one of the field it comes from."""
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(error.message, field) if error.param == "guide" else error from None


def _warning(ignored: Sequence[str]) -> dict[str, str]:
    return {WARNING_HEADER: f"ignored unknown fields: {', '.join(ignored)}"} if ignored else {}


def _ids(item: int | list[int]) -> list[int]:
    return [item] if isinstance(item, int) else item
