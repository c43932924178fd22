"""Anthropic's Messages API, as another wording of a chat.

It owns what a message's fields mean and how its blocks, events and errors are worded. The computation is a chat's job
(``intake.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conductor.ingress.answers import Outcome, Piece
from conductor.ingress.apis.anthropic_types import (
    AnyBlock,
    Block,
    CountRequest,
    EndDelta,
    ErrorDetails,
    JsonDelta,
    MessageBody,
    MessageError,
    MessageErrorBody,
    MessageEvent,
    MessagesRequest,
    MessageUsage,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
    ToolUseBlock,
    Turn,
)
from conductor.ingress.apis.intake import Intake, warning
from conductor.ingress.apis.messages import Conversation, content_text
from conductor.ingress.apis.openai_types import ContentPart
from conductor.ingress.apis.openapi import Post
from conductor.ingress.apis.typed_events import stream_events, write_whole
from conductor.ingress.fields.generation_fields import JsonSchema, ResponseFormat, chosen_variables
from conductor.ingress.http.errors import error_headers, guarded, json_response
from conductor.ingress.http.event_stream import StreamingAnswer, event_frame
from conductor.ingress.parsers.parts import NOT_JSON, CallPart, read_json
from conductor.ingress.prompts import check_count
from conductor.ingress.tools import Function, FunctionName, NamedTool, Tool, Tools, tools_of
from mooncake.errors import ContextTooLong, DeadlineExceeded, InvalidRequest, MooncakeError, RetryElsewhere, shown
from mooncake.text.chat_template import ChatCall, ChatMessage
from mooncake.types import FinishReason

_NOT_OURS = ("n", "stop", "response_format", "stream_options", "prompt_logprobs", "return_token_ids", "use_beam_search")
_ROLES = ("user", "assistant", "system")
_OWNERS = {  # of blocks that only one role's turns may have
    **{kind: ("assistant", f"{kind} is the assistant's") for kind in ("thinking", "redacted_thinking", "tool_use")},
    "tool_result": ("user", "a tool_result is the user's"),
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

MESSAGES = "/v1/messages"
"""Where the API begins."""

VERSION_HEADER = "anthropic-version"
"""Its clients send it with every request."""


class NoThreads(InvalidRequest):
    """Clients that get this send the whole conversation instead; their loops over tools do so by themselves."""


class MessagesApi:
    """The routes of the Messages API."""

    def __init__(self, intake: Intake, keep_alive_s: float) -> None:
        self._intake = intake
        self._keep_alive_s = keep_alive_s

    def routes(self) -> list[Route]:
        return [
            Post(MESSAGES, guarded(self.answer, refusal), MessagesRequest),
            Post(f"{MESSAGES}/count_tokens", guarded(self.count, refusal), CountRequest),
        ]

    async def count(self, request: Request) -> Response:
        body, ignored = await self._intake.decode(request, CountRequest)
        self._intake.pipeline.model.adapter_of(body.model or "")
        tokens = await self._intake.encode(_conversation(body))
        return json_response(TokenCount(len(tokens)), headers=warning(ignored))

    async def answer(self, request: Request) -> Response:
        intake = self._intake
        call, body = await intake.receive(request, MessagesRequest, "msg_")
        check(body)
        fields = structs.replace(
            body,
            response_format=_response_format(body),
            stop=body.stop_sequences,
            thinking_token_budget=_thinking_budget(body, intake.reasoning_tokens is not None),
            user=body.metadata.user_id if body.metadata is not None else None,
        )
        call = replace(call, fields=fields)
        job = await intake.chat_job(call, _conversation(body), body.max_tokens, None)
        num_prompt = len(job.request.tokens)
        head = MessageBody(
            id=call.answer_id,
            model=body.model or intake.pipeline.model.name,
            content=[],
            usage=MessageUsage(num_prompt, 0, 0),
        )
        is_cut_short = body.max_tokens is not None and job.request.sampling.max_tokens < body.max_tokens
        cut_reason = "model_context_window_exceeded" if is_cut_short else "max_tokens"
        writer = MessageWriter(head, body.wants_thoughts, cut_reason)
        if body.stream:
            produce = partial(stream_events, intake.pipeline, job, writer)
            return StreamingAnswer(produce, call.headers, self._keep_alive_s, b"", failed=error_frame, refused=refusal)
        await write_whole(intake.pipeline, job, writer, request)
        return json_response(writer.message, headers=call.headers)


class MessageWriter:
    """One message while it is generated: pieces in, events out; ``message`` is what is known so far."""

    def __init__(self, head: MessageBody, sends_reasoning: bool, cut_reason: str) -> None:
        """``cut_reason`` is reported for an answer that reached its maximum number of tokens."""
        self.message = head
        self._sends_reasoning = sends_reasoning
        self._cut_reason = cut_reason
        self._events: list[MessageEvent] = []  # not yet sent
        self._has_begun = False
        self._blocks: list[AnyBlock] = []
        self._is_open = False  # the last block
        self._text = ""  # of the open block: its text, or a call's arguments
        self._ends_with_call = False  # a whole one, as far as calls are known
        self._num_tokens = 0

    def take(self, piece: Piece) -> list[MessageEvent]:
        """See ``EventWriter``."""
        if not self._has_begun:
            self._has_begun = True
            self._tell("message_start", message=self.message)
        self._num_tokens += len(piece.tokens)
        for part in piece.parts:
            if isinstance(part, str):
                self._add(TextBlock(""), part, TextDelta(part))
            elif isinstance(part, CallPart):
                self._take_call(part)
            elif self._sends_reasoning:
                self._add(ThinkingBlock(""), part.text, ThinkingDelta(part.text))
        if piece.outcome is not None:
            self._close()
            self._finish(piece.outcome)
        events, self._events = self._events, []
        return events

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.append(MessageEvent(type=kind, **fields))

    def _add(self, block: AnyBlock, text: str, delta: TextDelta | ThinkingDelta) -> None:
        """Add to the open block if it is of that kind, else open a new one."""
        if not self._is_open or type(self._blocks[-1]) is not type(block):
            self._open(block)
        self._text += text
        self._tell("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _take_call(self, part: CallPart) -> None:
        if part.name:
            self._open(ToolUseBlock(part.call_id, part.name, {}))
        self._text += part.arguments
        self._ends_with_call = part.is_end
        if part.arguments:
            self._tell("content_block_delta", index=len(self._blocks) - 1, delta=JsonDelta(part.arguments))

    def _open(self, block: AnyBlock) -> None:
        self._close()
        self._is_open, self._text = True, ""
        self._blocks.append(block)
        self._tell("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._blocks[-1] = _with_text(self._blocks[-1], self._text)
        self._tell("content_block_stop", index=len(self._blocks) - 1)

    def _finish(self, outcome: Outcome) -> None:
        usage = outcome.usage
        end = EndDelta(
            self._stop_reason(outcome), outcome.stop_reason if isinstance(outcome.stop_reason, str) else None
        )
        self.message = structs.replace(
            self.message,
            content=self._blocks,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=MessageUsage(usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens, self._num_tokens),
        )
        self._tell("message_delta", delta=end, usage=self.message.usage)
        self._tell("message_stop")

    def _stop_reason(self, outcome: Outcome) -> str:
        if outcome.finish_reason is FinishReason.LENGTH:
            return self._cut_reason
        if self._ends_with_call:  # a call that a stop sequence cut short has no arguments
            return "tool_use"
        return "stop_sequence" if isinstance(outcome.stop_reason, str) else "end_turn"


def _with_text(block: AnyBlock, text: str) -> AnyBlock:
    """The finished block. Arguments of a call that was cut short are unreadable and dropped."""
    match block:
        case TextBlock():
            return TextBlock(text)
        case ThinkingBlock():
            return ThinkingBlock(text)
        case ToolUseBlock(id, name):
            try:
                arguments = read_json(text or "{}")
            except NOT_JSON:
                arguments = {}
            return ToolUseBlock(id, name, arguments if isinstance(arguments, dict) else {})


# ---------------------------------------------------------------- errors


def refusal(error: MooncakeError) -> Response:
    """An error in this API's form."""
    return json_response(_error_body(error), error.http_status, error_headers(error))


def error_frame(error: MooncakeError) -> bytes:
    """The frame that ends a stream with an error."""
    return event_frame(msgspec.json.encode(_error_body(error)), "error")


def _error_body(error: MooncakeError) -> MessageErrorBody:
    kind = _TYPES.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "api_error")
    if isinstance(error, RetryElsewhere):
        kind = "overloaded_error"
    elif isinstance(error, DeadlineExceeded):
        kind = "timeout_error"
    param = error.param if isinstance(error, InvalidRequest) else None
    details = ErrorDetails("thread_unsupported_request", ("thread",)) if isinstance(error, NoThreads) else UNSET
    is_named = param is None or error.message.startswith(param) or isinstance(error, ContextTooLong)
    return MessageErrorBody(MessageError(kind, error.message if is_named else f"{param}: {error.message}", details))


# ---------------------------------------------------------------- in


def check(body: MessagesRequest) -> None:
    """Raises InvalidRequest for valid fields that are not supported."""
    for name in _NOT_OURS:
        if getattr(body, name) is not None:
            raise InvalidRequest("it is not a field of a message", name)
    if body.thread is not None:
        raise NoThreads("conversations are not stored here: send the whole of it as messages", "thread")
    if body.compaction is not None:
        raise InvalidRequest("conversations are not summarized here", "compaction")
    if body.max_tokens is None or body.max_tokens < 1:
        raise InvalidRequest("max_tokens must be given, and be at least 1", "max_tokens")


def _thinking_budget(body: MessagesRequest, can_limit: bool) -> int | None:
    """Clients send Anthropic's to all models, so it is no error where reasoning cannot be limited."""
    if body.thinking_token_budget is not None or body.thinking is None or not can_limit:
        return body.thinking_token_budget
    return body.thinking.budget_tokens if body.thinking.type == "enabled" else None


def _conversation(body: CountRequest) -> Conversation:
    """Raises InvalidRequest, naming the field."""
    check_count(body.messages, "messages")
    effort = body.output_config.effort if body.output_config is not None else None
    thinking = {"enable_thinking": body.thinking.type != "disabled"} if body.thinking is not None else {}
    variables = chosen_variables(thinking | (body.chat_template_kwargs or {}), effort)
    system = content_text(_texts(body.system, "system"), "system") if body.system else ""
    messages = [ChatMessage("system", system)] if system else []
    for number, turn in enumerate(body.messages):
        messages += _messages(turn, f"messages[{number}]")
    last = messages[-1] if messages else None
    is_begun = last is not None and last.role == "assistant" and not last.calls
    return Conversation(messages, _tools(body), variables, continue_final=is_begun)


def _messages(turn: Turn, where: str) -> list[ChatMessage]:
    """Results of calls arrive as part of the user's turn; a chat has a turn of its own for them."""
    if turn.role not in _ROLES:
        raise InvalidRequest(
            f"the role {shown(turn.role)} is not supported; known: {', '.join(_ROLES)}", f"{where}.role"
        )
    if isinstance(turn.content, str):
        return [ChatMessage(turn.role, turn.content)]
    results: list[ChatMessage] = []
    calls: list[ChatCall] = []
    texts: list[str] = []
    thoughts: list[str] = []
    for number, block in enumerate(turn.content):
        place = f"{where}.content[{number}]"
        owner, whose = _OWNERS.get(block.type, (turn.role, ""))
        if turn.role != owner:
            raise InvalidRequest(f"{whose}: it cannot be in a turn of the {turn.role}", place)
        match block.type:
            case "text":
                texts.append(content_text(block.text, f"{place}.text"))
            case "document":
                texts.append(_document(block, place))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use" if block.name:
                calls.append(ChatCall(block.id or "", block.name, block.input or {}))
            case "tool_use":
                raise InvalidRequest("a tool_use needs the tool's name", f"{place}.name")
            case "tool_result":
                content = content_text(_texts(block.content or "", place), f"{place}.content")
                results.append(ChatMessage("tool", content, call_id=block.tool_use_id or ""))
            case _:
                known = "only text, document, thinking, tool_use and tool_result are supported"
                raise InvalidRequest(f"{known}, this one is {shown(block.type)}", place)
    if results and not (texts or calls or thoughts):
        return results
    return [*results, ChatMessage(turn.role, "\n".join(texts), "\n".join(thoughts), tuple(calls))]


def _texts(content: str | Sequence[Block] | None, where: str) -> str | list[ContentPart] | None:
    """Convert to the content parts of a chat message."""
    if content is None or isinstance(content, str):
        return content
    return [_part(block, where) for block in content]


def _part(block: Block, where: str) -> ContentPart:
    is_document = block.type == "document"
    return ContentPart("text", _document(block, where)) if is_document else ContentPart(block.type, block.text)


def _document(block: Block, where: str) -> str:
    """Its title, what is said of it, and its text."""
    source = block.source
    if source is None or source.type not in ("text", "content"):
        what = "a document is a text here, in a source of the type text or content"
        raise InvalidRequest(what, f"{where}.source")
    given = source.data if source.type == "text" else source.content
    parts = [ContentPart(each.type, each.text) for each in given] if isinstance(given, list) else given
    return "\n".join(filter(None, (block.title, block.context, content_text(parts, f"{where}.source"))))


def _response_format(body: CountRequest) -> ResponseFormat | None:
    wanted = body.output_config.format if body.output_config is not None else None
    if wanted is None:
        return None
    if wanted.type != "json_schema" or wanted.schema is None:
        raise InvalidRequest("a format is a json_schema with its schema", "output_config.format")
    return ResponseFormat(wanted.type, JsonSchema(wanted.schema))


def _tools(body: CountRequest) -> Tools | None:
    for number, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise InvalidRequest("only a client's own tools are called here", f"tools[{number}].type")
    tools = [Tool(Function(tool.name, tool.description, tool.input_schema)) for tool in body.tools or ()]
    choice = body.tool_choice
    if choice is None:
        return tools_of(tools, None)
    parallel = not choice.disable_parallel_tool_use
    match choice.type:
        case "auto" | "none":
            return tools_of(tools, choice.type, parallel)
        case "any":
            return tools_of(tools, "required", parallel)
        case "tool":
            return tools_of(tools, NamedTool(FunctionName(choice.name)), parallel)
    raise InvalidRequest("tool_choice is auto, any, tool or none", "tool_choice.type")
