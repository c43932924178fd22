"""Guides that would block the grammar engine forever are refused in advance, and no others."""

from __future__ import annotations

import json
import time

import pytest

from mooncake.checkpoint import open_checkpoint
from mooncake.guide_limits import GuideTooComplex, check_grammar, check_schema
from mooncake.guides import Guides
from mooncake.sampling import Guide, GuideKind

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def pattern(number: int, inner: str = "[a-z]{3,}") -> dict[str, object]:
    return {"type": "string", "pattern": f"{inner}{LETTERS[number % 26]}"}


def named(count: int, start: int = 0) -> dict[str, object]:
    """An object with ``count`` properties, each with its own pattern."""
    return {"type": "object", "properties": {f"p{number}": pattern(number) for number in range(start, start + count)}}


def at_once(count: int) -> dict[str, object]:
    return {"allOf": [pattern(number) for number in range(count)]}


CHAIN = {
    f"c{number}": pattern(number) | {"properties": {"x": {"$ref": f"#/$defs/c{number + 1}"}}} for number in range(9)
}
NEST: dict[str, object] = {"type": "string"}
for depth in range(9):
    NEST = pattern(depth) | {"anyOf": [NEST, {"type": "integer"}]}


@pytest.fixture(scope="module")
def guides() -> Guides:
    checkpoint = open_checkpoint("smollm2")
    return Guides(checkpoint.load_tokenizer, checkpoint.config.vocab_size)


@pytest.mark.parametrize(
    "guide",
    [
        Guide(GuideKind.JSON_SCHEMA, json.dumps(at_once(20))),
        Guide(
            GuideKind.JSON_SCHEMA, json.dumps({"allOf": [pattern(number, "^a$|^b.*[a-z]{2}") for number in range(20)]})
        ),
        Guide(
            GuideKind.GRAMMAR, "start: A\nA: " + " & ".join(f"/(.|\\n)*[a-z]{{2}}{c}(.|\\n)*/" for c in LETTERS[:20])
        ),
        Guide(GuideKind.GRAMMAR, f"start: a\na: %json {json.dumps(at_once(20))}"),
    ],
)
def test_what_would_take_for_ever_is_refused_at_once(guides: Guides, guide: Guide) -> None:
    begun_at = time.monotonic()
    with pytest.raises(GuideTooComplex):
        guides.compile(guide)
    assert time.monotonic() - begun_at < 1.0


@pytest.mark.parametrize(
    "schema",
    [
        at_once(7),
        {"$ref": "#/$defs/all", "$defs": {"all": at_once(7)}},
        {"type": "object", "properties": {"deep": {"items": {"additionalProperties": at_once(7)}}}},
        NEST,
        {"allOf": [{"additionalProperties": pattern(number)} for number in range(6)] + [named(1, 6)]},
        {"allOf": [{"patternProperties": {"^x": pattern(number)}} for number in range(7)]},
        {"allOf": [{"items": pattern(number)} for number in range(6)] + [{"prefixItems": [pattern(6)]}]},
        {"allOf": [{"items": [pattern(number)]} for number in range(6)] + [{"items": pattern(6)}]},
        {"allOf": [{"oneOf": [pattern(number), {"type": "null"}]} for number in range(7)]},
        {"allOf": [{"$ref": "#/$defs/c0"}, {"properties": {"x": {"$ref": "#"}}}], "$defs": CHAIN},
        {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": at_once(7)}},
        {"$ref": "#/$defs/b", "$defs": {"b": {"$id": "https://b", "$ref": "#/$defs/c", "$defs": {"c": at_once(7)}}}},
        {"$ref": "#name", "$defs": {"a": {"$anchor": "name"} | at_once(7)}},
        {"allOf": [{"anyOf": [named(1, 2 * i), named(1, 2 * i + 1)]} for i in range(40)]},
    ],
)
def test_expressions_that_meet_in_one_text_are_found_wherever_they_come_from(schema: object) -> None:
    with pytest.raises(GuideTooComplex):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        at_once(6),
        {"allOf": [{"format": "date"}] * 9},
        named(1000),
        {"anyOf": [named(3, 3 * number) for number in range(100)]},
        {"allOf": [{"$ref": "#/$defs/base"}, named(20, 20)], "$defs": {"base": named(20)}},
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "base": named(20),
                "node": {
                    "allOf": [
                        {"$ref": "#/$defs/base"},
                        {"properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}},
                    ]
                },
            },
        },
        named(7) | {"patternProperties": {f"^{letter}": pattern(number) for number, letter in enumerate(LETTERS)}},
        {"type": "array", "prefixItems": [pattern(number) for number in range(20)], "items": pattern(21)},
        {"$ref": "#"},
        True,
        [],
    ],
)
def test_as_many_expressions_as_one_likes_are_taken_that_do_not_meet(schema: object) -> None:
    check_schema(schema)


def test_an_intersection_or_two_are_taken() -> None:
    check_grammar("start: LINES\nLINES: /[a-z \\n]*/ & ~/(?s:.*)\\n\\n(?s:.*)/")
