"""OpenAI's HTTP API over the shared pipeline: completions and chat.

It knows what each field means and how answers are worded. It knows no sockets (``http``), and generates
nothing itself (``pipeline.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conductor.ingress.answers import Job, Piece
from conductor.ingress.apis.intake import Call, Intake, guide_named, with_warning
from conductor.ingress.apis.messages import Conversation, chat_messages
from conductor.ingress.apis.openai_answers import (
    Envelope,
    PromptLogprobs,
    UsageBody,
    usage_body,
)
from conductor.ingress.apis.openai_checks import check_chat, check_chat_batch, check_completion, num_choices
from conductor.ingress.apis.openai_choices import AnyChoice, ChatWriter, ChoiceWriter, CompletionWriter, EchoWriter
from conductor.ingress.apis.openai_types import (
    BatchChatRequest,
    ChatFields,
    ChatRequest,
    CompletionRequest,
    Message,
    template_variables,
)
from conductor.ingress.apis.openapi import Post
from conductor.ingress.fields.generation_fields import sampling_of
from conductor.ingress.fields.request_json import decode_request
from conductor.ingress.http.errors import guarded, json_response
from conductor.ingress.http.event_stream import EventStream, StreamingAnswer
from conductor.ingress.http.request import read_json_body, unless_gone, with_body
from conductor.ingress.pipeline import COMPLETION_MAX_TOKENS, MAX_CHOICES
from conductor.ingress.prompts import Keep
from conductor.ingress.tools import Tools, tools_of
from mooncake.errors import InvalidRequest
from mooncake.types import TokenIds


@dataclass(frozen=True, slots=True)
class Wording:
    """What differs only in name between the two kinds of answers."""

    id_prefix: str
    whole: str
    chunk: str


CHAT = Wording("chatcmpl-", "chat.completion", "chat.completion.chunk")
COMPLETION = Wording("cmpl-", "text_completion", "text_completion")


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

    def __init__(self, intake: Intake, keep_alive_s: float) -> None:
        """``keep_alive_s`` is how long a stream may be silent before it gets a comment."""
        self._intake = intake
        self._keep_alive_s = keep_alive_s
        self._pipeline = intake.pipeline
        self._prompts = intake.prompts

    def routes(self) -> list[Route]:
        return [
            Post("/v1/completions", guarded(self.complete), CompletionRequest),
            Post("/v1/chat/completions", guarded(self.chat), ChatRequest),
            Post("/v1/chat/completions/batch", guarded(self.chat_batch), BatchChatRequest),
            Route("/invocations", guarded(self.invoke), methods=["POST"]),
        ]

    async def complete(self, request: Request) -> Response:
        call, body = await self._intake.receive(request, CompletionRequest, COMPLETION.id_prefix)
        check_completion(body)
        max_new = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        keep = self._prompts.to_keep(body.truncate_prompt_tokens, body.truncation_side, max_new)
        prompts = await self._prompts_of(body.prompt or "", keep, body.add_special_tokens is not False)
        n = num_choices(body, len(prompts), body.best_of or 0)
        if spelled := self._prompts.spelled_control(body.prompt or ""):
            call = replace(call, headers=with_warning(call.headers, spelled))
        jobs: list[Job] = []
        writers: list[ChoiceWriter] = []
        details = self._intake.token_details(body, body.logprobs is not None, body.stream_interval)
        is_echo_alone = bool(body.echo) and body.max_tokens == 0  # evaluations ask for a text's likelihood like this
        max_new = 1 if is_echo_alone else max_new
        bad_words = await self._prompts.bad_words(body.bad_words or ())
        writer = EchoWriter if is_echo_alone else CompletionWriter
        for tokens in prompts:
            self._prompts.check_room(len(tokens), body.max_tokens, "max_tokens")
            max_tokens = self._prompts.max_tokens(len(tokens), max_new, None)
            scores = body.logprobs if body.echo else None
            with guide_named(body.guide_field):
                sampling = sampling_of(
                    body, self._pipeline.model.sampling, max_tokens, body.logprobs, body.best_of or 0, scores, bad_words
                )
                await self._prompts.check_guide(sampling.guide)
            jobs.append(self._intake.job(call, tokens, sampling, len(jobs)))
            echo = await self._prompts.decode(tokens, body.skip_special_tokens is not False) if body.echo else None
            ids = tokens.tolist()
            writers += [writer(len(writers) + i, details, ids, echo) for i in range(n)]
        return await self._answer(Plan(call=call, wording=COMPLETION, jobs=jobs, writers=writers))

    async def chat(self, request: Request) -> Response:
        call, body = await self._intake.receive(request, ChatRequest, CHAT.id_prefix)
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
                prompt_text=await self._prompts.decode(job.request.tokens, False) if body.return_prompt_text else UNSET,
            )
        )

    async def chat_batch(self, request: Request) -> Response:
        """vLLM's: several conversations, each answered by the choice of its number."""
        call, body = await self._intake.receive(request, BatchChatRequest, CHAT.id_prefix)
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
        job = await self._intake.chat_job(call, conversation, body.most_tokens, logprobs, number)
        self._prompts.check_room(len(job.request.tokens), body.most_tokens, body.most_tokens_field)
        return job

    def _chat_writers(self, body: ChatFields, count: int) -> list[ChatWriter]:
        details = self._intake.token_details(body, bool(body.logprobs), body.stream_interval)
        has_reasoning, is_told = self._intake.output_format.has_reasoning, body.include_reasoning is not False
        return [ChatWriter(index, details, has_reasoning, is_told) for index in range(count)]

    async def invoke(self, request: Request) -> Response:
        """SageMaker's one path: a chat if there are messages, else a completion."""
        self._pipeline.check_open()
        body = await read_json_body(request)
        given, _ = decode_request(body, Invocation)
        answer = self.complete if given.messages is UNSET else self.chat
        return await answer(with_body(request, body))

    async def _prompts_of(
        self, prompt: str | list[str | int | list[int]], keep: Keep | None, add_special: bool
    ) -> list[TokenIds]:
        """The four forms OpenAI allows: a text, texts, token ids, or lists of those; of each, those to
        ``keep``."""
        if isinstance(prompt, str):
            return [await self._prompts.encode(prompt, keep=keep, add_special=add_special)]
        if not prompt:
            raise InvalidRequest("the prompt is empty", "prompt")
        if ids := [item for item in prompt if isinstance(item, int)]:
            if len(ids) < len(prompt):
                raise InvalidRequest("a prompt mixes token ids with something else", "prompt")
            return [self._prompts.check_tokens(ids, keep=keep)]
        if len(prompt) > MAX_CHOICES:
            raise InvalidRequest(f"at most {MAX_CHOICES} prompts are allowed", "prompt")
        return [
            await self._prompts.encode(item, keep=keep, add_special=add_special)
            if isinstance(item, str)
            else self._prompts.check_tokens(_ids(item), keep=keep)
            for item in prompt
        ]

    # Answers

    async def _answer(self, plan: Plan) -> Response:
        if plan.call.fields.stream:
            return StreamingAnswer(lambda stream: self._stream(plan, stream), plan.call.headers, self._keep_alive_s)

        async def take(number: int, piece: Piece) -> None:
            plan.writers[number].take(piece)

        await unless_gone(plan.call.request.receive, self._pipeline.run(plan.jobs, take))
        asked = plan.jobs[0].request.sampling
        if asked.logprobs is not None or asked.prompt_logprobs is not None:  # many words for each token
            return await asyncio.to_thread(self._whole, plan)
        return self._whole(plan)

    def _whole(self, plan: Plan) -> Response:
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

        def words(number: int, piece: Piece) -> list[bytes]:
            nonlocal head
            events = []
            for choice in plan.writers[number].chunks(piece):
                usage = (plan.usage if wants_running_usage else None) if wants_usage else UNSET
                chunk = self._envelope(plan, plan.wording.chunk, [choice], usage, head)
                head = PromptHead()  # sent once
                events.append(msgspec.json.encode(chunk))
            return events

        async def tell(number: int, piece: Piece) -> None:
            is_long = plan.writers[number].tells_prompt(piece)  # never with a head, which is of chats
            for event in await asyncio.to_thread(words, number, piece) if is_long else words(number, piece):
                await stream.event(event)

        await self._pipeline.run(plan.jobs, tell)
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
        model = self._pipeline.model
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


def _ids(item: int | list[int]) -> list[int]:
    return [item] if isinstance(item, int) else item
