"""How one model writes reasoning and tool calls in its answers: detected from its chat template, or configured.

Names are those of vLLM's ``--reasoning-parser`` and ``--tool-call-parser``. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from conductor.ingress.parsers.calls_instead import RULE, form_of_calls, free_calls, tagged_calls
from conductor.ingress.parsers.harmony import CHANNEL, HarmonyFormat
from conductor.ingress.parsers.json_calls import (
    DEEPSEEK,
    DEEPSEEK_NAME,
    GRANITE,
    HERMES,
    KIMI,
    KIMI_ARGUMENTS,
    LLAMA_3,
    MISTRAL,
    JsonCallParser,
)
from conductor.ingress.parsers.parts import FirstCallParser, OutputParser, PlainParser
from conductor.ingress.parsers.python_calls import BEGIN, END, PythonicCallParser
from conductor.ingress.parsers.reasoning import ReasoningParser, Start, Tags, after_reasoning, led
from conductor.ingress.parsers.xml_calls import XmlCallParser
from conductor.ingress.tools import Tools
from mooncake.errors import ConfigError
from mooncake.sampling import Guide

THINK = Tags("<think>", "</think>")
TAGS = {
    "qwen3": THINK,
    "deepseek_r1": Tags("<think>", "</think>", is_first_left_out=True),
    "mistral": Tags("[THINK]", "[/THINK]"),
}


class CallFormat(StrEnum):
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
    ("<function=", CallFormat.QWEN_XML),
    ("<tool_call>", CallFormat.HERMES),
    (GRANITE.begin, CallFormat.GRANITE),
    (MISTRAL.begin, CallFormat.MISTRAL),
    (KIMI.begin, CallFormat.KIMI),
    (DEEPSEEK.begin, CallFormat.DEEPSEEK),
    (BEGIN, CallFormat.PYTHON),
    ("[func_name1(", CallFormat.PYTHON),
    (LLAMA_3.begin, CallFormat.LLAMA_3),
    ("dictionary of argument name and its value", CallFormat.LLAMA_3),
)
_ALIASES = {
    "qwen3_xml": CallFormat.QWEN_XML,
    "phi4_mini_json": CallFormat.GRANITE,
    "llama4_json": CallFormat.LLAMA_3,
    "llama4_pythonic": CallFormat.PYTHON,
    "deepseek_v31": CallFormat.DEEPSEEK,
}
REASONING_PARSERS = ("auto", "none", *TAGS, "openai_gptoss")
TOOL_CALL_PARSERS = ("auto", *CallFormat, *_ALIASES, "openai")
_JSON_FORMATS = {
    CallFormat.HERMES: HERMES,
    CallFormat.GRANITE: GRANITE,
    CallFormat.LLAMA_3: LLAMA_3,
    CallFormat.MISTRAL: MISTRAL,
}
_BEGINS: dict[CallFormat, tuple[str, ...]] = {
    CallFormat.QWEN_XML: (HERMES.begin,),
    CallFormat.GRANITE: (GRANITE.begin,),
    CallFormat.MISTRAL: (MISTRAL.begin,),
    CallFormat.LLAMA_3: (LLAMA_3.begin,),  # or without: see ``form_of_calls``
    CallFormat.PYTHON: (BEGIN, "[NAME("),
    CallFormat.KIMI: (KIMI.silent[0], KIMI.begin),
    CallFormat.DEEPSEEK: (DEEPSEEK.silent[0], DEEPSEEK.begin),
}
"""How an answer begins that is a call, in all formats but Hermes'; NAME stands for that of each tool."""

_MARKERS: dict[CallFormat, tuple[str, ...]] = {
    CallFormat.HERMES: (HERMES.begin, HERMES.end),
    CallFormat.QWEN_XML: (HERMES.begin, HERMES.end),
    CallFormat.GRANITE: (GRANITE.begin, GRANITE.end),
    CallFormat.MISTRAL: (MISTRAL.begin, "[ARGS]", "[CALL_ID]"),
    CallFormat.LLAMA_3: (LLAMA_3.begin,),
    CallFormat.PYTHON: (BEGIN, END),
    CallFormat.KIMI: (KIMI.begin, KIMI.end, KIMI_ARGUMENTS, *KIMI.silent),
    CallFormat.DEEPSEEK: (DEEPSEEK.begin, DEEPSEEK.end, DEEPSEEK_NAME, *DEEPSEEK.silent),
}


class OutputFormat(Protocol):
    """How one model writes its answers."""

    @property
    def has_reasoning(self) -> bool: ...

    @property
    def reasoning_tags(self) -> Tags | None:
        """The tags around reasoning, if the model writes it between two tags."""
        ...

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

    def parser(self, tools: Tools | None, start: Start) -> OutputParser:
        """A new parser for one answer."""
        ...

    def markers(self, tools: Tools | None) -> frozenset[str]:
        """Strings that a parser needs to see even where they are control tokens."""
        ...

    def guide(self, guide: Guide, start: Start, token_of: Callable[[str], int | None], tools: Tools | None) -> Guide:
        """``guide`` applied only after the reasoning, if there may be some, and only where none of ``tools`` is called.
        ``token_of`` returns the control token that a marker is; None for one that is plain text."""
        ...


@dataclass(frozen=True, slots=True)
class TaggedFormat:
    """Answers with tags around reasoning (None: no reasoning) and around calls."""

    tags: Tags | None = None
    calls: CallFormat = CallFormat.HERMES
    takes_tools: bool = False
    takes_calls: bool = False

    @property
    def has_reasoning(self) -> bool:
        return self.tags is not None

    @property
    def reasoning_tags(self) -> Tags | None:
        return self.tags

    def start(self, prompt: str, opening: str) -> Start:
        return Start.AFTER if self.tags is None else self.tags.start(prompt, opening)

    def parser(self, tools: Tools | None, start: Start) -> OutputParser:
        answer = PlainParser() if tools is None else self._call_parser(tools)
        if self.tags is None or start is Start.AFTER:
            return answer
        return ReasoningParser(self.tags, start is Start.WITHIN, answer)

    def _call_parser(self, tools: Tools) -> OutputParser:
        json_form = _JSON_FORMATS.get(self.calls, HERMES)
        if tools.must_call:
            return JsonCallParser(is_call=True, form=json_form)
        parser: OutputParser
        match self.calls:
            case CallFormat.QWEN_XML:
                parser = XmlCallParser(tools.schemas)
            case CallFormat.PYTHON:
                parser = PythonicCallParser()
            case CallFormat.KIMI:
                parser = JsonCallParser(form=KIMI)
            case CallFormat.DEEPSEEK:
                parser = JsonCallParser(form=DEEPSEEK)
            case _:
                parser = JsonCallParser(form=json_form)
        return FirstCallParser(parser) if tools.once else parser

    def markers(self, tools: Tools | None) -> frozenset[str]:
        tags = () if self.tags is None else (self.tags.begin, self.tags.end)
        return frozenset((*tags, *(_MARKERS[self.calls] if tools is not None else ())))

    def guide(self, guide: Guide, start: Start, token_of: Callable[[str], int | None], tools: Tools | None) -> Guide:
        calls = () if tools is None else self._call_rules(tools, token_of)
        answer = f"@answer | {RULE}" if calls else "@answer"
        if self.tags is not None and start is not Start.AFTER:
            return led(guide, (*after_reasoning(self.tags, start is Start.WITHIN, token_of, answer), *calls))
        return led(guide, (f"start: {answer}", *calls)) if calls else guide

    def _call_rules(self, tools: Tools, token_of: Callable[[str], int | None]) -> tuple[str, ...]:
        names = [function.name for function in tools.functions]
        if self.calls is CallFormat.HERMES:
            return tagged_calls(HERMES.begin, HERMES.end, form_of_calls(names, "arguments"), token_of)
        begins = dict.fromkeys(tag.replace("NAME", name) for tag in _BEGINS[self.calls] for name in names)
        form = form_of_calls(names, "parameters") if self.calls is CallFormat.LLAMA_3 else None
        return free_calls(begins, _MARKERS[self.calls], token_of, form)


def output_format(reasoning: str, calls: str, template: str, tells_tools: bool) -> OutputFormat:
    """From the names in ``conductor.reasoning_parser`` and ``conductor.tool_call_parser``, or, where these are
    "auto", from the chat template; ``tells_tools``: whether it describes tools. Raises ConfigError."""
    if (reasoning == "auto" and CHANNEL in template) or reasoning == "openai_gptoss" or calls == "openai":
        if reasoning not in ("auto", "openai_gptoss") or calls not in ("auto", "openai"):
            what = "of conductor.reasoning_parser and conductor.tool_call_parser, openai_gptoss and openai go together"
            raise ConfigError(f"{what}, got {reasoning!r} and {calls!r}")
        return HarmonyFormat(tells_tools, tells_tools and "tool_calls" in template)
    tags, found = _tags(reasoning, template), _calls(calls)
    if calls == "auto" and tells_tools:
        found = next((form for sign, form in _SIGNS if sign in template), None)
    if found not in (None, CallFormat.HERMES) and not tells_tools:
        what = f"conductor.tool_call_parser {calls!r} needs a chat template that lists tools, and the model's does not"
        raise ConfigError(what)
    takes_tools = tells_tools and found is not None
    return TaggedFormat(tags, found or CallFormat.HERMES, takes_tools, takes_tools and "tool_calls" in template)


def _calls(name: str) -> CallFormat | None:
    """None for "auto"."""
    found = _ALIASES.get(name) or next((form for form in CallFormat if form == name), None)
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
