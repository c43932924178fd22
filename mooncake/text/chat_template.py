"""Chat templates with control tokens that messages cannot forge.

The string ``<|im_start|>`` in a rendered prompt may come from the template or from a user, and only the template's may
open a turn. So the template is compiled with every control token in its own literals replaced by an alias: a few
private-use characters drawn at random, which no message can contain. Messages are passed unchanged, and templates may
trim, test and slice them freely. In the output an alias is a control token; everything else, whatever it spells, is
text. Knows nothing of token ids.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Template, TemplateError, meta, nodes

from mooncake.errors import InvalidRequest, ModelError
from mooncake.text.sandbox import LimitExceeded, Sandbox, TemplateRefusal

MAX_TEMPLATE_CHARS = 1 << 20
MAX_RENDER_S = 2.0
MAX_GROWTH_CHARS = 1 << 20  # how much a template may add to its messages
MAX_MESSAGE_CHARS = 64 << 20
MAX_VARIABLE_CHARS = 1 << 20  # of a user's variables, including tools, as JSON

# A private-use plane: not white space, without case, and not used in real texts.
_ALIAS_FIRST, _ALIAS_LAST = 0xF0000, 0xFFFFD
_NONCE_CHARS = 8  # 16 bits each

_PROBES = (  # harmless conversations; every template accepts at least one of them
    (("user", "one"), ("assistant", "two"), ("user", "three")),
    (("system", "zero"), ("user", "one"), ("assistant", "two"), ("user", "three")),
    (("user", "one"),),
)


ROLES = ("assistant", "system", "user")


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A call of a tool in an earlier turn."""

    call_id: str
    name: str
    arguments: Mapping[str, object]

    def as_read(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """``thought`` and ``calls`` are an assistant's; a "tool" answers the call ``call_id``."""

    role: str  # of ROLES, or "tool" where the template knows it
    content: str
    thought: str = ""
    calls: tuple[ChatCall, ...] = ()
    call_id: str = ""

    def as_read(self) -> dict[str, object]:
        """As a template reads it. Missing fields are left out, because templates test for their presence."""
        read: dict[str, object] = {"role": self.role, "content": self.content}
        if self.thought:  # under every name that templates use
            read |= {"reasoning_content": self.thought, "reasoning": self.thought}
            if not (self.calls and self.content):  # gpt-oss's template takes at most one of them with calls
                read["thinking"] = self.thought
        if self.calls:
            read["tool_calls"] = [call.as_read() for call in self.calls]
        if self.call_id:
            read["tool_call_id"] = self.call_id
        return read

    @property
    def beside(self) -> str:
        """Everything but the content, as one text."""
        calls = json.dumps([call.as_read() for call in self.calls], ensure_ascii=False) if self.calls else ""
        return f"{self.role}{self.thought}{calls}{self.call_id}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a rendered prompt: text, whatever it spells, or one control token that the template itself wrote."""

    text: str
    is_control: bool = False


class ChatTemplate:
    """A model's template, or one in its place. ``variables`` are those it may read besides the messages: bos_token and
    the like."""

    def __init__(self, source: str, control_tokens: Sequence[str], variables: Mapping[str, str]) -> None:
        """Raises ModelError for a template that cannot be compiled, or that assembles control tokens from parts: those
        could not be distinguished from a user's text."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template has more than {MAX_TEMPLATE_CHARS} characters")
        self.source = source
        self._sandbox = Sandbox()
        self.takes_tools = False
        nonce = "".join(chr(_ALIAS_FIRST + secrets.randbelow(0xFFFD)) for _ in range(_NONCE_CHARS))
        self._nonce = nonce
        tokens = sorted(control_tokens, key=len, reverse=True)  # the longest first: one may begin with another
        self._alias_of = {token: f"{nonce}{chr(_ALIAS_FIRST + number)}" for number, token in enumerate(tokens)}
        self._token_of = {alias: token for token, alias in self._alias_of.items()}
        self._control = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self._alias = re.compile(f"({re.escape(nonce)}[{chr(_ALIAS_FIRST)}-{chr(_ALIAS_LAST)}])")
        self._variables = {name: self._aliased(value) for name, value in variables.items()}
        try:
            self._template = self._sandbox.compile_template(self._with_literals(source, self._aliased))
            tree = self._sandbox.parse(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(tree)
            plain = self._sandbox.compile_template(tree)
        except (TemplateError, RecursionError, SyntaxError) as error:
            raise ModelError(f"the chat template is broken: {error}") from None
        for probe in _PROBES:
            messages = [ChatMessage(role, content) for role, content in probe]
            try:
                expected = self._run(plain, messages, variables)
                pieces = self.render(messages)
            except InvalidRequest:
                continue
            if pieces != self._split_plain(expected):
                raise ModelError("the chat template builds control tokens out of parts, which is not supported")

    def render(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, object] | None = None,
        continue_final: bool = False,
    ) -> list[Piece]:
        """The prompt of a conversation; the template may also read the user's ``variables`` (JSON). With
        ``continue_final`` it ends where the last message does, for the model to continue it.

        Raises InvalidRequest when the template refuses it or exceeds its limits.
        """
        if any(self._nonce in message.content or self._nonce in message.beside for message in messages):
            raise InvalidRequest("a message holds characters that are not allowed", "messages")
        num_chars = self._check_variables(variables or {})
        variables = {**(variables or {}), **self._variables}
        if continue_final:
            variables["add_generation_prompt"] = False
        text = self._run(self._template, messages, variables, num_chars)
        if continue_final:
            text = _up_to_last(text, messages)
        pieces: list[Piece] = []
        for number, part in enumerate(self._alias.split(text)):
            if number % 2:
                pieces.append(Piece(self._token_of.get(part, ""), is_control=part in self._token_of))
            elif part:
                pieces.append(Piece(part))
        return pieces

    def _check_variables(self, variables: Mapping[str, object]) -> int:
        """Checks them, and returns their number of characters."""
        if taken := sorted(variables.keys() & {"messages", *self._variables}):
            raise InvalidRequest(f"a request cannot set {taken[0]}", "chat_template_kwargs")
        try:
            text = json.dumps(variables, ensure_ascii=False)
        except (RecursionError, TypeError, ValueError):
            raise InvalidRequest("chat_template_kwargs must be a JSON object", "chat_template_kwargs") from None
        if len(text) > MAX_VARIABLE_CHARS:
            what = f"chat_template_kwargs have at most {MAX_VARIABLE_CHARS} characters"
            raise InvalidRequest(what, "chat_template_kwargs")
        if self._nonce in text:
            raise InvalidRequest("a variable holds characters that are not allowed", "chat_template_kwargs")
        return len(text)

    def _run(
        self, template: Template, messages: Sequence[ChatMessage], variables: Mapping[str, object], num_chars: int = 0
    ) -> str:
        """``num_chars``: of the user's variables."""
        num_chars += sum(len(message.beside) + len(message.content) for message in messages)
        if num_chars > MAX_MESSAGE_CHARS:
            raise InvalidRequest(f"the messages hold more than {MAX_MESSAGE_CHARS} characters", "messages")
        context: dict[str, object] = {
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            **variables,
            "messages": [message.as_read() for message in messages],
        }
        try:
            # The largest value that a template may build: its messages a few times over, plus its own additions.
            return self._sandbox.run(template, context, MAX_RENDER_S, 4 * num_chars + MAX_GROWTH_CHARS)
        except TemplateRefusal as error:
            raise self._refused(f"the chat template refuses these messages: {error}") from None
        except LimitExceeded as error:
            raise self._refused(f"the chat template was stopped: {error}") from None
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._refused(f"the chat template fails on these messages: {error}") from None
        except (RecursionError, MemoryError):
            raise self._refused("the chat template was stopped: it nests or grows without end") from None

    def _refused(self, message: str) -> InvalidRequest:
        spelled = self._alias.sub(lambda match: self._token_of.get(match[1], ""), message)  # aliases stay secret
        return InvalidRequest(spelled[:500], "messages")

    def _aliased(self, literal: str) -> str:
        return self._control.sub(lambda match: self._alias_of[match[0]], literal)

    def _with_literals(self, source: str, change: Callable[[str], str]) -> nodes.Template:
        tree = self._sandbox.parse(source)
        for data in tree.find_all(nodes.TemplateData):
            data.data = change(data.data)
        for const in tree.find_all(nodes.Const):
            if isinstance(const.value, str):
                const.value = change(const.value)
        return tree

    def _split_plain(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        at = 0
        for match in self._control.finditer(text):
            if match.start() > at:
                pieces.append(Piece(text[at : match.start()]))
            pieces.append(Piece(match[0], is_control=True))
            at = match.end()
        return [*pieces, Piece(text[at:])] if at < len(text) else pieces


def _up_to_last(text: str, messages: Sequence[ChatMessage]) -> str:
    """``text`` up to the end of the last message, with the trailing space that the template kept."""
    content = messages[-1].content if messages else ""
    at = text.rfind(content.strip())
    if not content.strip() or at < 0:
        what = "continue_final_message needs a last message whose text the chat template writes as it is"
        raise InvalidRequest(what, "continue_final_message")
    whole = content.lstrip()
    return text[: at + len(whole if text.startswith(whole, at) else content.strip())]
