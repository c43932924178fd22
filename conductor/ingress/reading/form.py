"""How one model writes its answers: detected from its chat template, or configured.

Names are those of vLLM's ``--reasoning-parser`` and ``--tool-call-parser``. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from conductor.ingress.reading.harmony import CHANNEL, HarmonyForm
from conductor.ingress.reading.json_calls import (
    DEEPSEEK,
    DEEPSEEK_NAME,
    GRANITE,
    HERMES,
    KIMI,
    KIMI_ARGUMENTS,
    LLAMA_3,
    MISTRAL,
    CallReader,
)
from conductor.ingress.reading.parts import OnceReader, PlainReader, Reader
from conductor.ingress.reading.python_calls import BEGIN, END, PythonCallReader
from conductor.ingress.reading.thought import Start, Tags, ThoughtReader, behind_thought
from conductor.ingress.reading.xml_calls import XmlCallReader
from conductor.ingress.tools import Tools
from mooncake.errors import ConfigError
from mooncake.types import Guide

THINK = Tags("<think>", "</think>")
TAGS = {
    "qwen3": THINK,
    "deepseek_r1": Tags("<think>", "</think>", is_first_left_out=True),
    "mistral": Tags("[THINK]", "[/THINK]"),
}


class Calls(StrEnum):
    """The formats of tool calls."""

    HERMES = "hermes"
    GRANITE = "granite"
    LLAMA_3 = "llama3_json"
    MISTRAL = "mistral"
    QWEN_XML = "qwen3_coder"
    PYTHON = "pythonic"
    KIMI = "kimi_k2"
    DEEPSEEK = "deepseek_v3"


_SIGNS = (  # signs in chat templates; the first match decides
    ("<arg_key>", None),  # GLM's tags resemble Hermes'
    ("<function=", Calls.QWEN_XML),
    ("<tool_call>", Calls.HERMES),
    (GRANITE.begin, Calls.GRANITE),
    (MISTRAL.begin, Calls.MISTRAL),
    (KIMI.begin, Calls.KIMI),
    (DEEPSEEK.begin, Calls.DEEPSEEK),
    (BEGIN, Calls.PYTHON),
    ("[func_name1(", Calls.PYTHON),
    (LLAMA_3.begin, Calls.LLAMA_3),
    ("dictionary of argument name and its value", Calls.LLAMA_3),
)
_ALIASES = {
    "qwen3_xml": Calls.QWEN_XML,
    "phi4_mini_json": Calls.GRANITE,
    "llama4_json": Calls.LLAMA_3,
    "llama4_pythonic": Calls.PYTHON,
    "deepseek_v31": Calls.DEEPSEEK,
}
REASONING_PARSERS = ("auto", "none", *TAGS, "openai_gptoss")
TOOL_CALL_PARSERS = ("auto", *Calls, *_ALIASES, "openai")
_JSON_FORMS = {Calls.HERMES: HERMES, Calls.GRANITE: GRANITE, Calls.LLAMA_3: LLAMA_3, Calls.MISTRAL: MISTRAL}
_MARKERS: dict[Calls, tuple[str, ...]] = {
    Calls.HERMES: (HERMES.begin, HERMES.end),
    Calls.QWEN_XML: (HERMES.begin, HERMES.end),
    Calls.GRANITE: (GRANITE.begin, GRANITE.end),
    Calls.MISTRAL: (MISTRAL.begin, "[ARGS]", "[CALL_ID]"),
    Calls.LLAMA_3: (LLAMA_3.begin,),
    Calls.PYTHON: (BEGIN, END),
    Calls.KIMI: (KIMI.begin, KIMI.end, KIMI_ARGUMENTS, *KIMI.silent),
    Calls.DEEPSEEK: (DEEPSEEK.begin, DEEPSEEK.end, DEEPSEEK_NAME, *DEEPSEEK.silent),
}


class AnswerForm(Protocol):
    """How one model writes its answers."""

    @property
    def thinks(self) -> bool: ...

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template describes tools in a format whose calls can be parsed."""
        ...

    @property
    def takes_calls(self) -> bool:
        """Whether it also renders earlier calls and their results."""
        ...

    def start(self, prompt: str, opening: str) -> Start:
        """Where an answer starts that follows a prompt ending in ``prompt``, or that continues from ``opening``."""
        ...

    def reader(self, tools: Tools | None, start: Start) -> Reader:
        """A new reader for one answer."""
        ...

    def markers(self, tools: Tools | None) -> frozenset[str]:
        """Strings that a reader needs to see even where they are control tokens."""
        ...

    def guide(self, guide: Guide, start: Start, token_of: Callable[[str], int | None]) -> Guide:
        """``guide`` applied only after a thought, if there may be one. ``token_of`` returns the control token that a
        marker is; None for one that is plain text."""
        ...


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """Answers with tags around thoughts (None: no thoughts) and around calls."""

    tags: Tags | None = None
    calls: Calls = Calls.HERMES
    takes_tools: bool = False
    takes_calls: bool = False

    @property
    def thinks(self) -> bool:
        return self.tags is not None

    def start(self, prompt: str, opening: str) -> Start:
        return Start.BEHIND if self.tags is None else self.tags.start(prompt, opening)

    def reader(self, tools: Tools | None, start: Start) -> Reader:
        answer = PlainReader() if tools is None else self._call_reader(tools)
        if self.tags is None or start is Start.BEHIND:
            return answer
        return ThoughtReader(self.tags, start is Start.WITHIN, answer)

    def _call_reader(self, tools: Tools) -> Reader:
        json_form = _JSON_FORMS.get(self.calls, HERMES)
        if tools.must_call:
            return CallReader(is_call=True, form=json_form)
        reader: Reader
        match self.calls:
            case Calls.QWEN_XML:
                reader = XmlCallReader(tools.schemas)
            case Calls.PYTHON:
                reader = PythonCallReader()
            case Calls.KIMI:
                reader = CallReader(form=KIMI)
            case Calls.DEEPSEEK:
                reader = CallReader(form=DEEPSEEK)
            case _:
                reader = CallReader(form=json_form)
        return OnceReader(reader) if tools.once else reader

    def markers(self, tools: Tools | None) -> frozenset[str]:
        tags = () if self.tags is None else (self.tags.begin, self.tags.end)
        return frozenset((*tags, *(_MARKERS[self.calls] if tools is not None else ())))

    def guide(self, guide: Guide, start: Start, token_of: Callable[[str], int | None]) -> Guide:
        if self.tags is None or start is Start.BEHIND:
            return guide
        return behind_thought(guide, self.tags, start is Start.WITHIN, token_of)


def answer_form(thoughts: str, calls: str, template: str, tells_tools: bool) -> AnswerForm:
    """From the names in ``conductor.reasoning_parser`` and ``conductor.tool_call_parser``, or, where these are
    "auto", from the chat template; ``tells_tools``: whether it describes tools. Raises ConfigError."""
    if (thoughts == "auto" and CHANNEL in template) or thoughts == "openai_gptoss" or calls == "openai":
        if thoughts not in ("auto", "openai_gptoss") or calls not in ("auto", "openai"):
            what = "of conductor.reasoning_parser and conductor.tool_call_parser, openai_gptoss and openai go together"
            raise ConfigError(f"{what}, got {thoughts!r} and {calls!r}")
        return HarmonyForm(tells_tools, tells_tools and "tool_calls" in template)
    tags, found = _tags(thoughts, template), _calls(calls)
    if calls == "auto" and tells_tools:
        found = next((form for sign, form in _SIGNS if sign in template), None)
    if found not in (None, Calls.HERMES) and not tells_tools:
        what = f"conductor.tool_call_parser {calls!r} needs a chat template that lists tools, and the model's does not"
        raise ConfigError(what)
    takes_tools = tells_tools and found is not None
    return TaggedForm(tags, found or Calls.HERMES, takes_tools, takes_tools and "tool_calls" in template)


def _calls(name: str) -> Calls | None:
    """None for "auto"."""
    found = _ALIASES.get(name) or next((form for form in Calls if form == name), None)
    if found is None and name != "auto":
        raise ConfigError(f"conductor.tool_call_parser must be one of {', '.join(TOOL_CALL_PARSERS)}, got {name!r}")
    return found


def _tags(name: str, template: str) -> Tags | None:
    match name:
        case "none":
            return None
        case "auto":
            return next((tags for tags in (THINK, TAGS["mistral"]) if tags.end in template), None)
    if name not in TAGS:
        raise ConfigError(f"conductor.reasoning_parser must be one of {', '.join(REASONING_PARSERS)}, got {name!r}")
    return TAGS[name]
