"""Parses tool calls written as JSON out of an answer while it is generated.

A call is reported as it is written: its name once its arguments begin, then the arguments as they arrive. The formats
differ in the tags around calls: those of Hermes (``tools.py``), Granite, Mistral, Kimi, DeepSeek, and Llama 3, whose
answers may be calls without tags. The result does not depend on how the text is cut into pieces. Pure; it knows no wire
form of answers.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from conductor.ingress.parsers.parts import NOT_JSON, CallPart, SurrogateFilter, new_call_id, overlap, read_json
from conductor.ingress.parsers.step_parser import StepParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_START = '{"name": "'  # of a call as its guide writes it
# A call up to its arguments, alone or in a list. Other orders of its members are parsed when it is complete.
_NAME = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_KIND = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
_HEAD = rf'\s*+(?P<list>\[?)\s*+\{{\s*{_KIND}"name"\s*:\s*(?P<name>{_NAME})\s*,\s*"(?:arguments|parameters)"\s*:\s*'
_NEXT = re.compile(r"\s*+\}\s*+[,;]?\s*+(?=\{)")  # from a call's arguments to the next call after the same tag
_END = re.compile(r"\s*+\}?\s*+[,;]?\s*+")  # what ``_NEXT`` matches, or its beginning
_MAX_HEAD_CHARS = 1024  # of either pattern: they are retried with each piece of text
_FIRST_KEY = re.compile(r'\s*+\[?\s*+(?:\{\s*+(?:"(?P<key>\w*+)(?P<end>"?))?)?')
_KEYS = ("name", "type", "arguments", "parameters")  # the keys a call may begin with


def _mistral_id() -> str:
    """The only form that Mistral's templates accept."""
    return secrets.token_hex(5)[:9]


@dataclass(frozen=True, slots=True)
class JsonCallFormat:
    """The text around calls: a tag before one or several, and a tag after or none. With ``is_bare`` an answer may
    begin with a call that has no tag. ``silent`` tags, around all calls of an answer, are dropped."""

    begin: str
    end: str = ""
    is_bare: bool = False
    head: re.Pattern[str] = re.compile(_HEAD)
    new_id: Callable[[], str] = new_call_id
    silent: tuple[str, ...] = ()


HERMES = JsonCallFormat(OPEN, CLOSE)
GRANITE = JsonCallFormat("<|tool_call|>", "<|/tool_call|>")  # Phi-4-mini's too; Granite writes no closing tag
LLAMA_3 = JsonCallFormat("<|python_tag|>", is_bare=True)
# Older models write a list of objects, newer ones a tag before each call: its name, then its arguments.
MISTRAL = JsonCallFormat(
    "[TOOL_CALLS]",
    head=re.compile(rf"{_HEAD}|\s*+(?P<word>[\w.-]+)\s*+(?:\[CALL_ID\]\s*+\w+\s*+)?(?:\[ARGS\])?\s*+(?=\{{)"),
    new_id=_mistral_id,
)
KIMI_ARGUMENTS, DEEPSEEK_NAME = "<|tool_call_argument_begin|>", "<｜tool▁sep｜>"
# A call has its id before its arguments, with the name in it: functions.NAME:0.
KIMI = JsonCallFormat(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    head=re.compile(
        rf"{_HEAD}|\s*+(?P<id>(?:functions\.)?(?P<word>[\w-]{{1,128}})(?P<number>:\d{{1,9}})?)\s*+"
        rf"{re.escape(KIMI_ARGUMENTS)}\s*+(?=\{{)"
    ),
    silent=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
# V3 and R1 write a kind, a name and then a code block; V3.1 a name and then the arguments.
DEEPSEEK = JsonCallFormat(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    head=re.compile(
        rf"{_HEAD}|\s*+(?:function{DEEPSEEK_NAME}(?P<word>[\w.-]{{1,128}})\s*+```json"
        rf"|(?P<alone>[\w.-]{{1,128}}){DEEPSEEK_NAME})\s*+(?=\{{)"
    ),
    silent=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)


class _State(Enum):
    """The parser's state."""

    TEXT = auto()
    HEAD = auto()  # of a call, after its tag
    ARGUMENTS = auto()
    REST = auto()  # between a call's arguments and the closing tag


@dataclass(slots=True)
class JsonCallParser(StepParser):
    """Parses one answer. Text that may start a tag or a call is held; if it turns out not to, it is text.

    With ``is_call`` the whole answer is one call without tags, or a list of them, as its guide writes it. The closing
    tag may be missing, and several calls may follow one tag.
    """

    is_call: bool = False
    form: JsonCallFormat = HERMES
    _state: _State = field(init=False)
    _tag: str = ""  # before the calls being read
    _depth: int = 1  # open brackets around the arguments: an object, and maybe a list
    _is_further: bool = False  # a call after this tag has been reported
    _name: str = ""  # not yet reported
    _call_id: str = ""  # likewise
    _arguments: JsonValue | None = None
    _surrogates: SurrogateFilter = field(default_factory=SurrogateFilter)

    def __post_init__(self) -> None:
        self._state = _State.HEAD if self.is_call or self.form.is_bare else _State.TEXT

    def _step(self, is_last: bool) -> bool:
        match self._state:
            case _State.TEXT:
                return self._text(is_last)
            case _State.HEAD:
                return self._head(is_last)
            case _State.ARGUMENTS:
                return self._value()
        return self._rest(is_last)

    def _text(self, is_last: bool) -> bool:
        self._skip_space_after_call()
        before, tag, after = self._held.partition(self.form.begin)
        if tag:
            self._emit(before)
            self._go(_State.HEAD, after)
            self._tag, self._is_further = tag, False
            return True
        cut = len(self._held) - (0 if is_last else overlap(self._held, self.form.begin, *self.form.silent))
        self._emit(self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _head(self, is_last: bool) -> bool:
        is_open = self._num_searched < _MAX_HEAD_CHARS  # beyond that the pattern has been tried on all it may match
        head = self.form.head.match(self._held, 0, _MAX_HEAD_CHARS) if is_open else None
        begins = self._held[head.end() :][:1] if head else ""
        if head and (begins == "{" or (self.is_call and (begins or is_last))) and (name := _name_in(head)):
            self._depth = 2 if head["list"] else 1 if head["name"] else 0
            self._name, self._arguments, self._surrogates = name, JsonValue(end=self.form.end), SurrogateFilter()
            has_id = head.groupdict().get("number")  # a name alone could belong to another call as well
            self._call_id = head["id"] if has_id else self.form.new_id()
            self._go(_State.ARGUMENTS, self._held[head.end() :])
            return True
        if self.is_call:
            return self._without_name(is_last)
        if not self._tag and not self._is_further and not _may_call(self._held):
            self._state = _State.TEXT
            return True
        return self._whole(is_last)

    def _without_name(self, is_last: bool) -> bool:
        """An answer cut short before the name is dropped if it could have become a call; otherwise it is text."""
        if is_last:
            text = self._held.lstrip().removeprefix("[").lstrip()
            self._emit("" if self._is_further or _START.startswith(text[: len(_START)]) else self._held)
            self._held = ""
        return False

    def _whole(self, is_last: bool) -> bool:
        """Tagged text that does not begin like most calls: parse it as a whole."""
        at, tag = self._find([self.form.end] if self.form.end else [])
        if not tag and not is_last:
            return False
        inside = self._held[:at]
        self._go(_State.TEXT, self._held[at + len(tag) :])
        is_text = not self._take_forms(inside) and not (self._is_further and self._tag)
        if is_text:
            self._emit(self._tag + inside + tag)
        self._is_after_call = not is_text
        return True

    def _take_forms(self, text: str) -> bool:
        """Report ``text`` if it is a call or a list of calls. Returns whether it is."""
        try:
            found = read_json(text)
            forms = found if isinstance(found, list) else [found]
            if not forms or not all(_is_call(form, is_tagged=bool(self._tag)) for form in forms):
                return False
            self._parts += [CallPart(self.form.new_id(), form["name"], _arguments(form)) for form in forms]
        except NOT_JSON:
            return False
        return True

    def _value(self) -> bool:
        assert self._arguments is not None
        num_chars = self._arguments.take(self._held)
        part, self._held = self._surrogates.take(self._held[:num_chars]), self._held[num_chars:]
        is_end = self._arguments.is_whole
        if self._name or part or is_end:
            self._parts.append(CallPart(self._call_id, self._name, part, is_end))
            self._name = self._call_id = ""
        if is_end:
            self._go(_State.REST, self._held)
        return is_end

    def _rest(self, is_last: bool) -> bool:
        may_follow = self._depth == 2 if self.is_call else self._depth > 0
        if may_follow and (following := _NEXT.match(self._held, 0, _MAX_HEAD_CHARS)):
            self._go(_State.HEAD, ("[" if self._depth == 2 else "") + self._held[following.end() :])
            self._is_further = True
            return True
        if self.is_call:  # the whole answer: what follows it is dropped
            is_open = may_follow and len(self._held) < _MAX_HEAD_CHARS and _END.fullmatch(self._held)
            self._held = self._held if is_open and not is_last else ""
            return False
        begin, end = self.form.begin, self.form.end
        at, tag = self._find([begin, end] if end else [begin])
        if not tag and not is_last:
            return False
        if tag != end or not tag:  # the closing tag is missing or cut short
            self._emit(self._after_call(self._held[:at]))
        self._go(_State.TEXT, self._held[at + len(end) :] if tag == end else self._held[at:])
        self._is_after_call = True
        return True

    def _after_call(self, text: str) -> str:
        """The part of ``text``, which follows a call's arguments, that follows the end of the call or of its list."""
        end = JsonValue(self._depth, self.form.end)
        num_chars = end.take(text) if self._depth else 0
        after = text[num_chars:] if end.is_whole or not self._depth else ""
        return after[: len(after) - (overlap(after, self.form.end) if self.form.end else 0)].lstrip()

    def _go(self, state: _State, held: str) -> None:
        self._state = state
        self._hold(held)

    def _emit(self, text: str) -> None:
        for tag in self.form.silent:
            text = text.replace(tag, "")
        StepParser._emit(self, text)  # dataclasses with slots have no super()


@dataclass(slots=True)
class JsonValue:
    """Finds the end of a JSON value inside an object; ``depth`` brackets are open before it begins.

    The tag ``end`` also ends it, where no JSON could contain one. After a line break inside a string, which JSON does
    not allow, even the string can be ended.
    """

    depth: int = 0
    end: str = ""
    is_whole: bool = False
    _is_text: bool = False
    _is_escaped: bool = False
    _is_torn: bool = False  # the open string contains a line break

    def take(self, text: str) -> int:
        """How many characters of ``text`` belong to the value. Unless it is complete, the caller passes the others
        again."""
        for at, char in enumerate(text):
            may_end = char == self.end[:1] and (self._is_torn or not self._is_text)
            if may_end and self.end.startswith(text[at : at + len(self.end)]):
                self.is_whole = text.startswith(self.end, at)
                return at
            if self._is_text:
                self._is_text = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
                self._is_torn = self._is_text and (self._is_torn or char == "\n")
            elif char == '"':
                self._is_text = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth < 1:
                    self.is_whole = True
                    return at + 1 + self.depth
        return len(text)


def _is_call(form: object, is_tagged: bool) -> bool:
    """Behind a tag, a name is enough."""
    if not isinstance(form, dict) or not isinstance(name := form.get("name"), str) or not name:
        return False
    return is_tagged or "arguments" in form or "parameters" in form


def _arguments(form: dict[str, object]) -> str:
    arguments = form.get("arguments", form.get("parameters", {}))
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _may_call(text: str) -> bool:
    """Whether an answer that begins with ``text`` may be a call."""
    found = _FIRST_KEY.match(text, 0, _MAX_HEAD_CHARS)
    assert found is not None
    if (key := found["key"]) is None:
        return found.end() == min(len(text), _MAX_HEAD_CHARS)
    return key in _KEYS if found["end"] else any(known.startswith(key) for known in _KEYS)


def _name_in(head: re.Match[str]) -> str:
    """The call's name; "" if it is not a call."""
    literal: str | None = head["name"]
    words = head.groupdict()
    return _text_of(literal) if literal is not None else words.get("word") or words.get("alone") or ""


def _text_of(literal: str) -> str:
    """The value of a JSON string; "" if it is not one."""
    try:
        return str(read_json(literal))
    except ValueError:
        return ""
