"""OpenAI's Responses API, as another wording of a chat.

It owns what a response's fields mean and how its items and events are worded; ``responses_input.py`` reads those that
come in. The computation is a chat's job (``intake.py``). Where responses are stored (``stored_responses.py``), an input
may be only what is new; otherwise it contains the whole conversation.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conductor.ingress.access import caller_of
from conductor.ingress.answers import Outcome, Piece
from conductor.ingress.apis.intake import Call, Intake, warning, with_warning
from conductor.ingress.apis.messages import Conversation
from conductor.ingress.apis.openai_answers import ContentLogprob
from conductor.ingress.apis.openai_checks import check_positive, check_top_logprobs
from conductor.ingress.apis.openai_choices import TokenDetails, content_logprob
from conductor.ingress.apis.openapi import Post
from conductor.ingress.apis.responses_input import conversation_of, input_items, input_messages
from conductor.ingress.apis.responses_types import (
    CallItem,
    ChosenTool,
    IncompleteDetails,
    InputDetails,
    InputTokens,
    MessageItem,
    OutputDetails,
    OutputItem,
    OutputText,
    Reasoning,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponseEvent,
    ResponseFailure,
    ResponsesRequest,
    ResponseUsage,
    TextConfig,
    TextFormat,
)
from conductor.ingress.apis.stored_responses import StoredResponse, StoredResponses
from conductor.ingress.apis.typed_events import stream_events, write_whole
from conductor.ingress.fields.generation_fields import JsonSchema, ResponseFormat, chosen_variables
from conductor.ingress.http.errors import NoSuchRoute, guarded, json_response
from conductor.ingress.http.event_stream import StreamingAnswer, event_frame
from conductor.ingress.parsers.parts import CallPart, ReasoningPart, joined_calls
from conductor.ingress.tools import (
    AllowedTools,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    Tools,
    tools_of,
)
from mooncake.errors import CallerError, InvalidRequest, MooncakeError, NotFound, TryLater, shown
from mooncake.sampling import SamplingParams
from mooncake.types import FinishReason, SampledToken

LOGPROBS = "message.output_text.logprobs"  # an element of ``include``
SETTING = "conductor.stored_responses_mb"
_NOT_OURS = ("max_tokens", "n", "response_format", "prompt_logprobs", "return_token_ids", "use_beam_search")
_MEANT = {"max_tokens": "max_output_tokens", "response_format": "text.format"}  # what chats call so
_OTHER_CALLS = ("compact", "render")  # of OpenAI and vLLM, at the place of a response's id


class ResponsesApi:
    """The routes of the Responses API."""

    def __init__(self, intake: Intake, keep_alive_s: float, stored: StoredResponses) -> None:
        self._intake = intake
        self._keep_alive_s = keep_alive_s
        self._stored = stored

    def routes(self) -> list[Route]:
        return [
            Post("/v1/responses", guarded(self.respond), ResponsesRequest),
            Post("/v1/responses/input_tokens", guarded(self.count), ResponsesRequest),
            Route("/v1/responses/{response_id:path}", guarded(self.earlier), methods=["GET", "POST", "DELETE"]),
        ]

    async def earlier(self, request: Request) -> Response:
        """Read or delete a stored response."""
        response_id = request.path_params["response_id"]
        if response_id in _OTHER_CALLS:
            raise NoSuchRoute(f"{request.url.path} is not offered here; POST /tokenize counts the tokens of a chat")
        if not self._stored:
            raise NotFound(f"responses are not stored here ({SETTING} is 0): each is sent once, when it is generated")
        if request.method == "POST" or "/" in response_id:
            raise NoSuchRoute(f"{request.url.path} is not offered here: a stored response is read, or deleted, whole")
        owner = caller_of(request.scope["headers"])
        if request.method == "DELETE":
            if not self._stored.remove(owner, response_id):
                raise NotFound(_gone(response_id))
            return json_response({"id": response_id, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") != "false":
            raise InvalidRequest("a stored response is not streamed again", "stream")
        if (stored := self._stored.get(owner, response_id)) is None:
            raise NotFound(_gone(response_id))
        return Response(stored.body, media_type="application/json")

    async def respond(self, request: Request) -> Response:
        intake = self._intake
        call, body = await intake.receive(request, ResponsesRequest, "resp_")
        check(body, may_continue=bool(self._stored))
        owner = caller_of(request.scope["headers"])
        body = self._continued(owner, body)
        conversation = _conversation(body)
        logprobs = (body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None
        fields = structs.replace(
            body,
            response_format=_response_format(body),
            truncate_prompt_tokens=-1 if body.truncation == "auto" else body.truncate_prompt_tokens,
        )
        call = replace(call, fields=fields, headers=call.headers if self._stored else _headers(call, body))
        job = await intake.chat_job(call, conversation, body.max_output_tokens, logprobs)
        intake.prompts.check_room(len(job.request.tokens), body.max_output_tokens, "max_output_tokens")
        head = _head(call, body, body.model or intake.pipeline.model.name, job.request.sampling)
        details = intake.token_details(body, logprobs is not None)
        keep = None
        if self._stored and body.store is not False:
            head = structs.replace(head, store=True)
            keep = partial(self._keep, owner, msgspec.msgpack.encode(input_items(body)))
        writer = ResponseWriter(head, details, sends_reasoning=body.include_reasoning is not False, keep=keep)
        if body.stream:
            produce = partial(stream_events, intake.pipeline, job, writer)
            return StreamingAnswer(produce, call.headers, self._keep_alive_s, last=b"", failed=writer.failed)
        await write_whole(intake.pipeline, job, writer, request)
        return json_response(writer.response, headers=call.headers)

    async def count(self, request: Request) -> Response:
        """The tokens that the prompt of a response would have."""
        body, ignored = await self._intake.decode(request, ResponsesRequest)
        self._intake.pipeline.model.adapter_of(body.model or "")
        check(body, may_continue=bool(self._stored))
        body = self._continued(caller_of(request.scope["headers"]), body)
        tokens = await self._intake.encode(_conversation(body))
        return json_response(InputTokens(len(tokens)), headers=warning(ignored))

    def _continued(self, owner: bytes, body: ResponsesRequest) -> ResponsesRequest:
        """With all that came before its input. Raises NoPreviousResponse."""
        if (response_id := body.previous_response_id) is None:
            return body
        if (stored := self._stored.get(owner, response_id)) is None:
            raise NoPreviousResponse(_gone(response_id), "previous_response_id")
        return structs.replace(body, input=[*conversation_of(stored), *input_items(body)])

    def _keep(self, owner: bytes, conversation: bytes, response: ResponseBody) -> None:
        self._stored.put(owner, response.id, StoredResponse(msgspec.json.encode(response), conversation))


class NoPreviousResponse(InvalidRequest):
    """A response that would be continued is not stored (any more)."""

    code = "previous_response_not_found"


def _gone(response_id: str) -> str:
    return (
        f"the response {shown(response_id)} is not stored here: it may be gone, of another API key or of another "
        "conductor; send the conversation so far as input"
    )


class ResponseWriter:
    """One response while it is generated: pieces in, events out; ``response`` is what is known so far. ``keep`` is
    called with a whole one."""

    def __init__(
        self,
        head: ResponseBody,
        details: TokenDetails,
        sends_reasoning: bool,
        keep: Callable[[ResponseBody], None] | None = None,
    ) -> None:
        self.response = head
        self._details = details
        self._keep = keep
        self._sends_reasoning = sends_reasoning
        self._events: list[ResponseEvent] = []  # not yet sent
        self._num_events = 0
        self._items: list[OutputItem] = []
        self._is_message_open = False  # the last item is a message
        self._is_reasoning_open = False  # the last item is reasoning
        self._call: list[CallPart] = []  # parts of the open call, the last item
        self._text = ""  # of the open message or reasoning
        self._logprobs: list[ContentLogprob] = []  # likewise
        self._tokens: list[tuple[SampledToken, bool]] = []  # not yet sent; whether they are reasoning
        self._num_tokens = 0
        self._num_reasoning = 0  # how many of them are reasoning

    def take(self, piece: Piece) -> list[ResponseEvent]:
        """See ``EventWriter``."""
        if not self._num_events:
            self._tell("response.created", response=self.response)
            self._tell("response.in_progress", response=self.response)
        self._tokens += zip(piece.tokens, piece.is_reasoning, strict=True)
        self._num_tokens += len(piece.tokens)
        self._num_reasoning += piece.num_reasoning
        is_cut = piece.outcome is not None and piece.outcome.finish_reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        for part in piece.parts:
            if isinstance(part, str):
                self._emit(part)
            elif isinstance(part, ReasoningPart):
                self._reasoning_parts(part.text)
            else:
                self._take_call(part)
        if piece.outcome is not None:
            if not self._items:
                self._open_message()
            self._close_thought(status)
            self._close_message(status)
            self._close_call("incomplete")
            self._finish(status, piece.outcome)
        events, self._events = self._events, []
        return events

    def failed(self, error: MooncakeError) -> bytes:
        """The last event of a stream that ends in an error."""
        is_ours = not isinstance(error, (CallerError, TryLater))
        failure = ResponseFailure("server_error" if is_ours else error.code, error.message)
        self._tell("response.failed", response=structs.replace(self.response, status="failed", error=failure))
        return event_frame(msgspec.json.encode(self._events[-1]), "response.failed")

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.append(ResponseEvent(type=kind, sequence_number=self._num_events, **fields))
        self._num_events += 1

    @property
    def _last(self) -> dict[str, Any]:
        """The position of the last item."""
        return {"output_index": len(self._items) - 1, "item_id": self._items[-1].id}

    def _add(self, item: OutputItem) -> None:
        self._items.append(item)
        self._tell("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _done(self, item: OutputItem) -> None:
        self._items[-1] = item
        self._tell("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _reasoning_parts(self, text: str) -> None:
        _, self._tokens = _first_run(self._tokens, of_thought=True)
        if not self._sends_reasoning:
            return
        if not self._is_reasoning_open:
            self._close_message("completed")
            self._is_reasoning_open, self._text = True, ""
            self._add(ReasoningItem(f"rs_{uuid.uuid4().hex}", "in_progress", []))
            self._tell("response.content_part.added", **self._last, content_index=0, part=ReasoningText(""))
        self._text += text
        self._tell("response.reasoning_text.delta", **self._last, content_index=0, delta=text)

    def _close_thought(self, status: str) -> None:
        if not self._is_reasoning_open:
            return
        self._is_reasoning_open = False
        part = ReasoningText(self._text)
        where = self._last | {"content_index": 0}
        self._tell("response.reasoning_text.done", **where, text=self._text)
        self._tell("response.content_part.done", **where, part=part)
        self._done(structs.replace(self._items[-1], status=status, content=[part]))

    def _open_message(self) -> None:
        self._close_thought("completed")
        self._is_message_open, self._text, self._logprobs = True, "", []
        self._add(MessageItem(f"msg_{uuid.uuid4().hex}", "in_progress", []))
        self._tell("response.content_part.added", **self._last, content_index=0, part=OutputText("", logprobs=[]))

    def _emit(self, text: str) -> None:
        if not self._is_message_open:
            self._open_message()
        tokens, self._tokens = _first_run(self._tokens, of_thought=False)
        logprobs = [content_logprob(token, self._details) for token in tokens] if self._details.logprobs else []
        self._text += text
        self._logprobs += logprobs
        self._tell("response.output_text.delta", **self._last, content_index=0, delta=text, logprobs=logprobs)

    def _close_message(self, status: str) -> None:
        if not self._is_message_open:
            return
        self._is_message_open = False
        part = OutputText(self._text, logprobs=self._logprobs)
        where = self._last | {"content_index": 0}
        self._tell("response.output_text.done", **where, text=self._text, logprobs=self._logprobs)
        self._tell("response.content_part.done", **where, part=part)
        self._done(structs.replace(self._items[-1], status=status, content=[part]))

    def _take_call(self, part: CallPart) -> None:
        self._tokens = []
        if part.name:
            self._close_thought("completed")
            self._close_message("completed")
            self._add(CallItem(f"fc_{uuid.uuid4().hex}", "in_progress", part.call_id, part.name, ""))
        self._call.append(part)
        if part.arguments:
            self._tell("response.function_call_arguments.delta", **self._last, delta=part.arguments)
        if part.is_end:
            self._close_call("completed")

    def _close_call(self, status: str) -> None:
        if not self._call:
            return
        [call], self._call = joined_calls(self._call), []
        kind = "response.function_call_arguments.done"
        self._tell(kind, **self._last, name=call.name, arguments=call.arguments)
        self._done(structs.replace(self._items[-1], status=status, arguments=call.arguments))

    def _finish(self, status: str, outcome: Outcome) -> None:
        usage = outcome.usage
        self.response = structs.replace(
            self.response,
            status=status,
            output=self._items,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            usage=ResponseUsage(
                usage.prompt_tokens,
                InputDetails(usage.cached_tokens, blended_tokens=outcome.summary.report.blended_tokens or UNSET),
                self._num_tokens,
                usage.prompt_tokens + self._num_tokens,
                OutputDetails(self._num_reasoning),
            ),
        )
        if self._keep is not None:
            self._keep(self.response)
        self._tell(f"response.{status}", response=self.response)


def _first_run(
    tokens: Sequence[tuple[SampledToken, bool]], of_thought: bool
) -> tuple[list[SampledToken], list[tuple[SampledToken, bool]]]:
    """The first tokens in a row that are all reasoning, or all not, and the tokens after them."""
    behind = list(itertools.dropwhile(lambda token: token[1] is not of_thought, tokens))
    run = [token for token, _ in itertools.takewhile(lambda token: token[1] is of_thought, behind)]
    return run, behind[len(run) :]


def check(body: ResponsesRequest, may_continue: bool = False) -> None:
    """Raises InvalidRequest for valid fields that are not supported. ``may_continue``: responses are stored."""
    for name in _NOT_OURS:
        if getattr(body, name) is not None:
            hint = f"; {meant} is meant" if (meant := _MEANT.get(name)) else ""
            raise InvalidRequest(f"{name} is not a field of a response{hint}", name)
    if body.previous_response_id is not None and not may_continue:
        what = f"responses are not stored here ({SETTING} is 0): send the conversation so far as input"
        raise InvalidRequest(what, "previous_response_id")
    if body.conversation is not None:
        raise InvalidRequest("conversations are not stored here: send the conversation so far as input", "conversation")
    if body.prompt is not None:
        raise InvalidRequest("prompts are not stored here: send its text as instructions and input", "prompt")
    if body.background:
        raise InvalidRequest(
            "responses are not made in the background here: keep the connection open, or stream them", "background"
        )
    if body.truncation not in (None, "auto", "disabled"):
        raise InvalidRequest("truncation is auto or disabled", "truncation")
    check_positive("max_output_tokens", body.max_output_tokens)
    check_top_logprobs(body.top_logprobs)


def _headers(call: Call, body: ResponsesRequest) -> dict[str, str]:
    """As in vLLM, ``store`` true is not an error: it is the clients' default."""
    return with_warning(call.headers, "responses are not stored") if body.store else call.headers


def _head(call: Call, body: ResponsesRequest, model: str, sampling: SamplingParams) -> ResponseBody:
    return ResponseBody(
        id=call.answer_id,
        created_at=call.created,
        status="in_progress",
        model=model,
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_logprobs=body.top_logprobs or 0,
        text=TextConfig((body.text and body.text.format) or TextFormat("text")),
        tools=body.tools or [],
        tool_choice=body.tool_choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
        reasoning=body.reasoning or Reasoning(),
        user=body.user,
        previous_response_id=body.previous_response_id,
    )


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return None
    if wanted.type not in ("text", "json_object", "json_schema"):
        known = "text, json_object, json_schema"
        raise InvalidRequest(f"the format {shown(wanted.type)} is not one of {known}", "text.format")
    if wanted.type == "json_schema" and wanted.schema is None:
        raise InvalidRequest("a json_schema needs its schema", "text.format.schema")
    return ResponseFormat(wanted.type, JsonSchema(wanted.schema))


def _conversation(body: ResponsesRequest) -> Conversation:
    effort = body.reasoning.effort if body.reasoning is not None else None
    variables = chosen_variables(body.chat_template_kwargs, effort)
    return Conversation(input_messages(body), _tools(body), variables, param="input")


def _tools(body: ResponsesRequest) -> Tools | None:
    for number, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise InvalidRequest("only tools of the type function are called here", f"tools[{number}].type")
        if tool.function is not None:
            what = "the name and parameters of a tool stand beside its type here, not in a function as in chats"
            raise InvalidRequest(what, f"tools[{number}]")
    tools = [Tool(Function(tool.name, tool.description, tool.parameters)) for tool in body.tools or ()]
    choice = body.tool_choice
    if isinstance(choice, ChosenTool):
        named = FunctionName(choice.name) if choice.type == "function" else None
        allowed = AllowedTools(choice.tools, choice.mode) if choice.type == "allowed_tools" else None
        return tools_of(tools, NamedTool(named, choice.type, allowed), body.parallel_tool_calls)
    return tools_of(tools, choice, body.parallel_tool_calls)
