"""Objects of a schema that name their properties get no others, and a schema that says more of them stays as it is."""

from __future__ import annotations

import pytest

from mooncake import LLM, SamplingParams
from mooncake.closed_objects import closed
from mooncake.sampling_params import StructuredOutputsParams

TEXT = {"type": "string"}


def named(**more: object) -> dict[str, object]:
    return {"type": "object", "properties": {"a": TEXT}, **more}


CLOSED = named(additionalProperties=False)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (named(), CLOSED),
        (named(required=["a"]), named(required=["a"], additionalProperties=False)),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": named()}, {"type": "array", "items": CLOSED}),
        ({"prefixItems": [named(), TEXT]}, {"prefixItems": [CLOSED, TEXT]}),
        ({"items": [named()], "additionalItems": named()}, {"items": [CLOSED], "additionalItems": CLOSED}),
        ({"additionalProperties": named()}, {"additionalProperties": CLOSED}),
        ({"anyOf": [named(), {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [named()], "description": "d"}, {"allOf": [CLOSED], "description": "d"}),
        (
            {"$ref": "#/$defs/P", "$defs": {"P": named()}, "title": "t"},
            {"$ref": "#/$defs/P", "$defs": {"P": CLOSED}, "title": "t"},
        ),
    ],
)
def test_what_is_not_named_is_not_allowed(schema: object, expected: object) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        named(additionalProperties=True),
        named(additionalProperties=TEXT),
        named(patternProperties={"^x": TEXT}),
        named(propertyNames={"pattern": "^[ab]$"}),
        named(minProperties=2),
        named(required=["a", "b"]),
        {"properties": {"one": {"const": named()}, "two": {"enum": [named()], "default": named()}}, "minProperties": 1},
    ],
)
def test_what_says_more_of_other_properties_stays_as_it_is(schema: object) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [named(), {"properties": {"b": TEXT}}]},
        {"allOf": [{"$ref": "#/$defs/P"}], "properties": {"b": TEXT}, "$defs": {"P": named()}},
        {"$ref": "#/$defs/P", "properties": {"b": TEXT}, "$defs": {"P": named()}},
        named(anyOf=[{"required": ["a"]}, {"properties": {"b": TEXT}}]),
        {"items": named(), "if": {"properties": {"b": TEXT}}},
        named(unevaluatedProperties=TEXT),
        {"properties": {"x": named()}, "not": {"required": ["y"]}},
    ],
)
def test_several_schemas_of_one_object_stay_as_they_are(schema: object) -> None:
    assert closed(schema) == schema


def test_an_answer_ends_after_the_properties_that_are_asked_for() -> None:
    """With others, SmolLM2 went on until it was cut."""
    person = {
        "type": "object",
        "properties": {"name": TEXT, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    sampling = SamplingParams(max_tokens=60, temperature=0.0, structured_outputs=StructuredOutputsParams(json=person))
    with LLM("smollm2", kv_gb=0.1, threads=1) as llm:
        [answer] = llm.chat([{"role": "user", "content": "Describe a person as JSON"}], sampling)
    assert (answer.text, answer.finish_reason) == ('{"name": "Mike", "age": 25}', "stop")
