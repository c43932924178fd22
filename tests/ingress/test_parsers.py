"""Readers of answers: wherever a text is cut, the same thoughts, calls and texts come out, and nothing is lost."""

from __future__ import annotations

import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.ingress.parsers.harmony import HarmonyParser
from conductor.ingress.parsers.json_calls import DEEPSEEK, GRANITE, KIMI, LLAMA_3, MISTRAL, JsonCallParser
from conductor.ingress.parsers.output_format import TAGS, THINK, CallFormat, output_format
from conductor.ingress.parsers.parts import CallPart, PlainParser, ReasoningPart, joined_calls, merged
from conductor.ingress.parsers.python_calls import PythonicCallParser
from conductor.ingress.parsers.reasoning import ReasoningParser, Start
from conductor.ingress.parsers.xml_calls import XmlCallParser
from conductor.ingress.tools import Function, Tools
from mooncake.errors import ConfigError
from mooncake.sampling import Guide, GuideKind

TEXT = "<think>\nHm, a <b> or\n\n</thin… \n</think>\n\nBecause <think> is a tag."


def parsed(parser, pieces):
    """The parts that a parser returns, in order: texts, thoughts, and calls with whether they ended."""
    parts = [part for at, piece in enumerate(pieces) for part in parser.push(piece, is_last=at == len(pieces) - 1)]
    told = []
    for part in merged(parts):
        if isinstance(part, CallPart) and not part.name:
            told[-1].append(part)
        else:
            told.append([part] if isinstance(part, CallPart) else part)
    return [call_of(part) if isinstance(part, list) else part for part in told]


def call_of(parts):
    [call] = joined_calls(parts)
    return (call.name, call.arguments) if call.is_end else (call.name, call.arguments, "cut")


def in_three(text):
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1, 3):
            yield [text[:first], text[first:second], text[second:]]


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "answer"),
    [
        (TEXT, False, "Hm, a <b> or\n\n</thin…", "Because <think> is a tag."),
        (TEXT, True, "Hm, a <b> or\n\n</thin…", "Because <think> is a tag."),  # a tag that the prompt has is no thought
        ("a b </think> c", True, "a b", "c"),
        ("a </think> c </think>", True, "a", "c </think>"),
        (" \n<think> a </think> c", False, "a", "c"),
        ("<think>\n\n</think>\n\nc", False, "", "c"),
        (" c <think>a</think>", False, "", " c <think>a</think>"),
        ("<thin", False, "", "<thin"),
        ("<thin", True, "<thin", ""),
        ("<think>a </th", False, "a </th", ""),
        ("a \n", True, "a", ""),
        (" " * 80 + "<think>a", False, "", " " * 80 + "<think>a"),
        ("a" + " " * 80 + "</think>b", True, "a" + " " * 16, "b"),
        ("", False, "", ""),
        ("<think>", False, "", ""),
        ("<think></think>  ", False, "", ""),
    ],
)
def test_a_thought_is_told_apart_wherever_it_is_cut(text, is_open, thought, answer):
    expected = [*([ReasoningPart(thought)] if thought else []), *([answer] if answer else [])]
    for pieces in in_three(text):
        assert parsed(ReasoningParser(THINK, is_open), pieces) == expected


@given(
    text=st.text("<>/think \n{}", max_size=40).map(lambda text: text.replace("think", "<think>")),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    is_open=st.booleans(),
)
def test_any_text_cut_anywhere_says_the_same(text, cuts, is_open):
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    parsers = (ReasoningParser(THINK, is_open, JsonCallParser()) for _ in range(2))
    assert parsed(next(parsers), pieces) == parsed(next(parsers), [text])


def test_the_form_is_read_from_the_template_or_named():
    def tags(template: str, name: str = "auto"):
        return output_format(name, "auto", template, False).tags

    assert tags("{{ '<think>' }} x.split('</think>')") is THINK and tags("<|im_start|>") is None
    assert output_format("auto", "auto", "tools <tool_call> <arg_key>", True).takes_tools is False
    assert output_format("auto", "auto", "tools <｜tool▁call▁begin｜>", True).calls is CallFormat.DEEPSEEK
    assert output_format("auto", "deepseek_v31", "tools", True).calls is CallFormat.DEEPSEEK
    assert tags("[THINK] [/THINK]") is TAGS["mistral"] and tags("</think>", "none") is None
    assert tags("", "deepseek_r1").start("<|im_start|>assistant", "") is Start.WITHIN
    assert tags("", "deepseek_r1").start("<think>\n\n</think>\n\n", "") is Start.AFTER
    assert tags("", "qwen3").start("<|im_start|>assistant", "") is Start.BEFORE
    with pytest.raises(ConfigError, match="openai_gptoss and openai go together, got 'qwen3' and 'openai'"):
        output_format("qwen3", "openai", "", True)
    with pytest.raises(ConfigError, match=r"conductor.reasoning_parser must be one of auto, none, qwen3.*got 'qwen'"):
        tags("", "qwen")


def test_tags_that_are_control_tokens_are_tokens_of_a_guide():
    guide = output_format("mistral", "auto", "", False).guide(
        Guide(GuideKind.REGEX, "a"), Start.WITHIN, {"[THINK]": 34, "[/THINK]": 35}.get, None
    )
    assert "<[35]>" in guide.lead and "[/THINK]" not in guide.lead and guide.text == "a"


ONE = '{"name": "f", "parameters": {"x": "}\\"{"}}'
CALLED = [ReasoningPart("Hm, <b>."), ("f", '{"x": 1}')]
LIST = '[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ONE, [("f", '{"x": "}\\"{"}')]),
        (f" \n{ONE}\n", [("f", '{"x": "}\\"{"}')]),
        (f"<|python_tag|>{ONE}", [("f", '{"x": "}\\"{"}')]),
        (f"So: <|python_tag|>{ONE}", ["So: ", ("f", '{"x": "}\\"{"}')]),
        (f"{ONE}; {ONE}", [("f", '{"x": "}\\"{"}')] * 2),
        (f"{ONE}\n<|python_tag|>{ONE}", [("f", '{"x": "}\\"{"}')] * 2),
        (f"{ONE} So.", [("f", '{"x": "}\\"{"}'), "So."]),
        ('{"type": "function", "name": "f", "parameters": {"x": 1}}', [("f", '{"x": 1}')]),
        ('{"parameters": {"x": 1}, "name": "f"}', [("f", '{"x": 1}')]),
        ('{"name": "f", "parameters": {"x": ', [("f", '{"x": ', "cut")]),
        # no calls
        ("Hello {", ["Hello {"]),
        (f"Say {ONE}", [f"Say {ONE}"]),
        ('{"name": "Ann", "age": 3}', ['{"name": "Ann", "age": 3}']),
        ('{"city": "Bern"} <|python_tag|>x', ['{"city": "Bern"} <|python_tag|>x']),
        ("[a](b) {", ["[a](b) {"]),
        ('<|python_tag|>print("x")', ['<|python_tag|>print("x")']),
        ("<|python_t", ["<|python_t"]),
        ('{"na', ['{"na']),
        ("  ", ["  "]),
    ],
)
def test_llama_calls_bare_or_behind_its_tag(text, told):
    for pieces in in_three(text):
        assert parsed(JsonCallParser(form=LLAMA_3), pieces) == told


def test_what_begins_like_a_call_is_told_as_soon_as_it_is_none():
    text = '{"city": "Bern", "name": "f"}'
    parser = JsonCallParser(form=LLAMA_3)
    told = [parser.push(char, is_last=False) for char in text]
    assert told[:2] == [[], []] and merged(part for parts in told for part in parts) == [text]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"[TOOL_CALLS] {LIST}", [("f", '{"x": 1}'), ("g", "{}")]),
        ('[TOOL_CALLS]f{"x": {"y": "}"}}', [("f", '{"x": {"y": "}"}}')]),
        ('So.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g-2 [ARGS] {}', ["So.", ("f", '{"x": 1}'), ("g-2", "{}")]),
        ('[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"x": 1}', [("f", '{"x": 1}')]),
        ('[TOOL_CALLS]f[ARGS]{"x": ', [("f", '{"x": ', "cut")]),
        ("[TOOL_CALLS]f{} And?", [("f", "{}"), "And?"]),
        ("[TOOL_CALLS] none", ["[TOOL_CALLS] none"]),
        ("[TOOL_CALLS][{]", ["[TOOL_CALLS][{]"]),
        ("[TOOL_", ["[TOOL_"]),
        ("[1] is [TOOL", ["[1] is [TOOL"]),
    ],
)
def test_mistral_calls_as_a_list_or_each_behind_its_tag(text, told):
    for pieces in in_three(text):
        assert parsed(JsonCallParser(form=MISTRAL), pieces) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"So.<|tool_call|>{LIST}<|/tool_call|>!", ["So.", ("f", '{"x": 1}'), ("g", "{}"), "!"]),
        (f"<|tool_call|>{LIST}", [("f", '{"x": 1}'), ("g", "{}")]),
        ('<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|>', [("f", "{}")]),
        ("<|tool_call|>none<|/tool_call|>", ["<|tool_call|>none<|/tool_call|>"]),
    ],
)
def test_granite_s_and_phi_s_calls_are_parsed_wherever_the_text_is_cut(text, told):
    for pieces in in_three(text):
        assert parsed(JsonCallParser(form=GRANITE), pieces) == told


def kimi(name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


KIMI_CALLS = kimi("functions.f:0", ' {"x": 1}') + kimi("functions.g:1", "{}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            f"So.<|tool_calls_section_begin|>{KIMI_CALLS}<|tool_calls_section_end|>",
            ["So.", ("f", '{"x": 1}'), ("g", "{}")],
        ),
        (kimi("f", "{}"), [("f", "{}")]),
        ("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{", [("f", "{", "cut")]),
        ("<|tool_call_begin|>none<|tool_call_end|>", ["<|tool_call_begin|>none<|tool_call_end|>"]),
        ("a <|tool_calls_section", ["a <|tool_calls_section"]),
    ],
)
def test_kimi_s_calls_are_parsed_wherever_the_text_is_cut(text, told):
    for pieces in in_three(text):
        assert parsed(JsonCallParser(form=KIMI), pieces) == told


def test_kimi_s_calls_have_the_ids_that_it_gave_them():
    parser = output_format("auto", "auto", "tools <|tool_call_begin|>", True).parser(
        Tools((Function("f"),)), Start.AFTER
    )
    told = [part for part in parser.push(KIMI_CALLS, is_last=True) if isinstance(part, CallPart)]
    assert [part.call_id for part in told if part.name] == ["functions.f:0", "functions.g:1"]
    told = [
        part for part in JsonCallParser(form=KIMI).push(kimi("f", "{}") * 2, is_last=True) if isinstance(part, CallPart)
    ]
    assert len({part.call_id for part in told if part.name}) == 2, "a name alone names no call"


def deepseek(inside: str) -> str:
    return f"<｜tool▁call▁begin｜>{inside}<｜tool▁call▁end｜>"


V3 = (
    deepseek('function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```')
    + "\n"
    + deepseek("function<｜tool▁sep｜>g\n```json\n{}\n```")
)
V31 = deepseek('f<｜tool▁sep｜>{"x": 1}') + deepseek("g<｜tool▁sep｜>{}")


@pytest.mark.parametrize("calls", [V3, V31], ids=["V3", "V3.1"])
def test_deepseek_s_calls_are_parsed_wherever_the_text_is_cut(calls):
    for pieces in in_three(f"So.<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"):
        assert parsed(JsonCallParser(form=DEEPSEEK), pieces) == ["So.", ("f", '{"x": 1}'), ("g", "{}")]
    assert parsed(JsonCallParser(form=DEEPSEEK), [deepseek("none")]) == [deepseek("none")]


def test_mistral_s_templates_take_the_ids_of_its_calls():
    form = output_format("auto", "auto", "tools [TOOL_CALLS]", True)
    written = form.parser(Tools((Function("f"),)), Start.AFTER).push(f"[TOOL_CALLS]{LIST}", is_last=True)
    demanded = form.parser(Tools((Function("f"),), must_call=True), Start.AFTER).push(LIST[1:-1], is_last=True)
    ids = [part.call_id for part in (*written, *demanded) if isinstance(part, CallPart) and part.name]
    assert len(set(ids)) == 3 and all(len(each) == 9 and each.isalnum() for each in ids)


SCHEMAS = {
    "f": {
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "l": {"type": "array"},
            "b": {"type": "boolean"},
            "o": {"type": ["string", "null"]},
            "any": {"anyOf": [{"type": "object"}]},
        }
    }
}
F, END = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"


def parameter(key, value):
    return f"<parameter={key}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{F}{parameter('s', 'Zürich')}{END}", [("f", '{"s": "Zürich"}')]),
        (f"So.\n{F}{parameter('n', '3')}{parameter('b', 'True')}{END}", ["So.\n", ("f", '{"n": 3, "b": true}')]),
        (f"{F}{parameter('l', '[1, {}]')}{parameter('any', '{}')}{END}!", [("f", '{"l": [1, {}], "any": {}}'), "!"]),
        (f"{F}{parameter('o', 'null')}{parameter('o', '5')}{END}", [("f", '{"o": null, "o": "5"}')]),
        (f"{F}{parameter('any', 'NaN')}{END}", [("f", '{"any": "NaN"}')]),
        (f"{F}{parameter('n', 'many')}{parameter('x', '5')}{END}", [("f", '{"n": "many", "x": "5"}')]),
        (f"{F}{parameter('s', 'a')}{END} {F}{END}", [("f", '{"s": "a"}'), ("f", "{}")]),
        (f"<function=f>{parameter('s', '')}</function>", [("f", '{"s": ""}')]),
        # its text is what stands between, without the line breaks next to the tags
        (
            f"{F}{parameter('s', '  if a < b:' + chr(10) * 2 + '</p> ' + chr(34))}{END}",
            [("f", '{"s": "  if a < b:\\n\\n</p> \\""}')],
        ),
        (f"{F}<parameter=s>a</parameter>{END}", [("f", '{"s": "a"}')]),
        # ends that are missing
        (f"{F}<parameter=s>\na\n<parameter=n>\n1\n{END}", [("f", '{"s": "a", "n": 1}')]),
        (f"{F}{parameter('s', 'a')}</tool_call>b", [("f", '{"s": "a"}'), "b"]),
        (f"{F}{parameter('s', 'a')}", [("f", '{"s": "a"}')]),
        (f"{F}<parameter=s>\nab", [("f", '{"s": "ab', "cut")]),
        (f"{F}<parameter=n>\n12", [("f", '{"n": ', "cut")]),
        (f"{F}?<b>{parameter('n', '1')}?{END}", [("f", '{"n": 1}')]),
        # no calls
        ("<tool_call>\n<fun", ["<tool_call>\n<fun"]),
        ("<tool_call>f</tool_call>", ["<tool_call>f</tool_call>"]),
        ("a < b <function= <function=>", ["a < b <function= <function=>"]),
        ("<<tool_call", ["<<tool_call"]),
    ],
)
def test_calls_as_functions_and_parameters(text, told):
    for pieces in in_three(text):
        assert parsed(XmlCallParser(SCHEMAS), pieces) == told


def test_a_string_parameter_is_told_as_it_is_written():
    parser = XmlCallParser(SCHEMAS)
    parts = [part for char in f"{F}{parameter('s', 'abcdef')}" for part in parser.push(char, is_last=False)]
    assert [part.arguments for part in parts if part.arguments.isalpha()] == list("abcdef")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '[f(x=1, s="a]\\")", l=[{"b": True}]), g()]',
            [("f", '{"x": 1, "s": "a]\\")", "l": [{"b": true}]}'), ("g", "{}")],
        ),
        ("<|python_start|>[f(x=-1.5)]<|python_end|> So.", [("f", '{"x": -1.5}'), "So."]),
        (" [f(a=true, b=null, c=None,),\n] ", [("f", '{"a": true, "b": null, "c": null}')]),
        ("[f(x=1), then", [("f", '{"x": 1}'), "then"]),
        ("[f(x=1), g(1)]", [("f", '{"x": 1}'), "g(1)]"]),
        ("[f(x=1), g()()]", [("f", '{"x": 1}'), ("g", "{}"), "()]"]),
        ("[f(x=1), (f)(), 1]", [("f", '{"x": 1}'), "(f)(), 1]"]),
        # no calls
        ("[f(x=", ["[f(x="]),
        ("[f(x=y)]", ["[f(x=y)]"]),
        ("[f(**{})]", ["[f(**{})]"]),
        ("[f(x=1e999)]", ["[f(x=1e999)]"]),
        ("[a](b)", ["[a](b)"]),
        ("[1, 2]", ["[1, 2]"]),
        ("So [f()]", ["So [f()]"]),
        ("<|python_start|>x", ["<|python_start|>x"]),
        ("[", ["["]),
    ],
)
def test_calls_as_a_list_of_python_s(text, told):
    for pieces in in_three(text):
        assert parsed(PythonicCallParser(), pieces) == told


def test_a_call_of_python_s_that_nests_without_end_is_none():
    for depth in (300, 50_000):
        text = f"[f(x={'(' * depth}{')' * depth})]"
        assert parsed(PythonicCallParser(), [text]) == [text]


ANALYSIS = "<|channel|>analysis<|message|>Hm, <b>.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
COMMENTARY = "<|start|>assistant<|channel|>commentary"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{ANALYSIS}{FINAL}It <|is|> so.<|return|>", [ReasoningPart("Hm, <b>."), "It <|is|> so."]),
        (f"{ANALYSIS}{FINAL}It", [ReasoningPart("Hm, <b>."), "It"]),
        ("<|channel|>final<|message|>So.", ["So."]),
        (f"{ANALYSIS}{COMMENTARY} to=functions.f <|constrain|>json<|message|>" + '{"x": 1}<|call|>', CALLED),
        (f"{ANALYSIS}<|start|>assistant to=functions.f<|channel|>commentary json<|message|>" + ' {"x": 1}', CALLED),
        (f"{ANALYSIS}{COMMENTARY} to=f<|message|>" + '{"x": 1} }<|end|>', CALLED),
        (' to=functions.f<|channel|>commentary<|message|>{"x": ', [("f", '{"x": ', "cut")]),
        (f' to=functions.f<|channel|>commentary<|message|>{{"x": <|end|>{FINAL}So.', [("f", '{"x": '), "So."]),
        (f"{ANALYSIS}{COMMENTARY}<|message|>I look.<|end|>{FINAL}So.", [ReasoningPart("Hm, <b>."), "I look.\n\nSo."]),
        (f"{ANALYSIS}<|start|>assistant{ANALYSIS}", [ReasoningPart("Hm, <b>.\n\nHm, <b>.")]),
        ("<|channel|>analysis<|message|>Hm{FINAL}".replace("{FINAL}", FINAL) + "So.", [ReasoningPart("Hm"), "So."]),
        (f"{ANALYSIS}{COMMENTARY} to=browser.search<|message|>x", [ReasoningPart("Hm, <b>."), "x"]),
        # cut in a header, and what has none
        ("<|channel|>ana", []),
        (f"{ANALYSIS}<|start|>assist", [ReasoningPart("Hm, <b>.")]),
        ("So.", ["So."]),
        ("to be", ["to be"]),
        ("to", ["to"]),
        ("<|chan", ["<|chan"]),
        (f"{ANALYSIS} So.", [ReasoningPart("Hm, <b>."), "So."]),
        ("", []),
    ],
)
def test_harmony_s_channels_are_thoughts_texts_and_calls(text, told):
    for pieces in in_three(text):
        assert parsed(HarmonyParser(PlainParser(), calls=True), pieces) == told


def test_harmony_answers_to_who_offers_no_tools_and_to_who_demands_a_call():
    form = output_format("auto", "auto", "tools <|channel|> tool_calls", True)
    assert form.has_reasoning and form.takes_calls
    call = f'{ANALYSIS}{COMMENTARY} to=functions.f<|message|>{{"x": 1}}'
    assert parsed(form.parser(None, Start.BEFORE), [call]) == [ReasoningPart("Hm, <b>."), '{"x": 1}']
    demanded = f'{ANALYSIS}{FINAL}{{"name": "f", "arguments": {{"x": 1}}}}'
    tools = Tools((Function("f"),), must_call=True)
    assert parsed(form.parser(tools, Start.BEFORE), [demanded]) == CALLED
    assert parsed(form.parser(None, form.start("<|message|>", "")), ["So.<|return|>"]) == ["So."]
    with_once = form.parser(Tools((Function("f"),), once=True), Start.BEFORE)
    assert parsed(with_once, [f"{call}<|call|>{FINAL}So."]) == CALLED


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (JsonCallParser(), '<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>'),
        (JsonCallParser(), '<tool_call>{"arguments": "\\ud800", "name": "f\\ud800"}</tool_call>'),
        (JsonCallParser(), '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'),
        (HarmonyParser(PlainParser(), calls=True), f'{COMMENTARY} to=functions.f<|message|>{{"x": "\\uDC00"}}<|call|>'),
        (PythonicCallParser(), "[f(x='\\ud800')]"),
        (
            XmlCallParser({"f": {"properties": {"x": {"type": "object"}}}}),
            '<function=f><parameter=x>{"y": "\\ud800"}</parameter></function>',
        ),
    ],
)
def test_halves_of_surrogate_pairs_are_told_as_what_utf_8_can_say(parser, text):
    [(name, arguments)] = parsed(parser, [text])
    assert "?" in f"{name}{arguments}" and f"{name}{arguments}".encode()
    assert r"\u" not in arguments


def test_arguments_are_told_as_written_but_for_halves_of_surrogate_pairs():
    """Wherever the text is cut: an escape is decided when it is complete, the first half of a pair with the second."""
    written = r'{"x": "\ud83d \\ud800 \ud83d\ude00 \ud83d\n \ude00 \u00e9 \\\ud800\ud83d\ude00 \ud800"}'
    sayable = r'{"x": "? \\ud800 \ud83d\ude00 ?\n ? \u00e9 \\?\ud83d\ude00 ?"}'
    for pieces in in_three(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'):
        assert parsed(JsonCallParser(), pieces) == [("f", sayable)]


READERS = {
    "harmony": (
        lambda: HarmonyParser(PlainParser(), calls=True),
        [ANALYSIS, FINAL, f"{COMMENTARY} to=functions.f", "<|message|>", "<|end|>", "<|start|>", '{"x": {}}', "to="],
    ),
    "llama": (lambda: JsonCallParser(form=LLAMA_3), ["<|python_tag|>", ONE, "; ", '{"name": "f"', "}", "{"]),
    "mistral": (lambda: JsonCallParser(form=MISTRAL), ["[TOOL_CALLS]", LIST, "f", "[ARGS]", "{}", "[CALL_ID]a", "{"]),
    "kimi": (
        lambda: JsonCallParser(form=KIMI),
        [*KIMI.silent, KIMI.begin, KIMI.end, "functions.f:0", "<|tool_call_argument_begin|>", '{"x": 1}', "{", "\n"],
    ),
    "deepseek": (
        lambda: JsonCallParser(form=DEEPSEEK),
        [
            *DEEPSEEK.silent,
            DEEPSEEK.begin,
            DEEPSEEK.end,
            "function",
            "<｜tool▁sep｜>",
            "f",
            "\n```json\n",
            "{}",
            "\n```",
        ],
    ),
    "hermes": (
        JsonCallParser,
        ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "{", "\n", "\\ud83d", "\\ude00", "\\"],
    ),
    "xml": (
        lambda: XmlCallParser(SCHEMAS),
        [F, END, parameter("s", "a<"), parameter("n", "1"), "</parameter>", "<parameter=s>", "\n"],
    ),
    "python": (PythonicCallParser, ["[", "f(", "x=1", ")", "]", ", ", "g()", "'", "<|python_end|>"]),
    "thought": (
        lambda: ReasoningParser(THINK, False, JsonCallParser()),
        ["<think>", "</think>", "\n", '<tool_call>{"name": "f", "arguments": {}}', "a"],
    ),
}


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_whatever_is_written_says_the_same_wherever_it_is_cut(name, data):
    make, words = READERS[name]
    text = "".join(data.draw(st.lists(st.sampled_from([*words, " ", "a", "<", '"']), max_size=9)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    ends = sorted({*cuts, len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert parsed(make(), pieces) == parsed(make(), [text])
    letters = [*text, ""]
    assert parsed(make(), letters) == parsed(make(), [text])


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("more", ["a", " ", "{", "<", "(", '"', "\n"])
def test_no_answer_takes_more_time_with_each_piece(name, more):
    """Clients can make a model generate anything, and one event loop parses for all."""
    make, words = READERS[name]
    starts = (f"{F}<parameter=n>", f"{F}<parameter=s>", "[f(", '{"name": "f", "parameters": {"x": "', "<|channel|>")
    states = set()
    for start in (words[0], "", *starts):
        parser = make()
        parser.push(start, is_last=False)
        if (state := pickle.dumps(parser)) in states:
            continue  # a text like another, of which nothing is left: it would go on as that one does
        states.add(state)
        for _ in range(20):
            parser.push(more * 2, is_last=False)
        before = pickle.dumps(parser)
        parser.push(more * 2, is_last=False)
        if pickle.dumps(parser) == before:
            continue  # nothing is kept: the next one takes as long as this one did
        began = time.process_time()
        for _ in range(7_500):
            parser.push(more * 2, is_last=False)
        assert time.process_time() - began < 0.5, start  # tens of milliseconds
