"""Objects of a JSON schema that name their properties and say nothing of others get no others, as with vLLM, SGLang and
llama.cpp.

JSON Schema allows any others, which is how people check JSON, not how they ask for it: a small model then goes on with
properties that nobody wants, until its answer is cut. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, object]

_BY_NAME = ("properties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_PARTS_OF_ONE = ("properties", "$ref", "anyOf", "oneOf", "allOf")
_CONDITIONS = ("if", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")
_OTHERS = ("additionalProperties", "patternProperties", "propertyNames", "minProperties")


def closed(schema: Schema) -> Schema:
    """``schema`` with ``additionalProperties: false`` where that only takes unnamed properties away. One in which
    several schemas describe the same object stays as it is: each would forbid what another one names."""
    found: Schema = schema if any(map(_is_combined, _schemas(schema))) else _closed(schema)
    return found


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in _BY_NAME:
        if isinstance(named := schema.get(name), dict):
            found[name] = {key: _closed(part) for key, part in named.items()}
    for name in _SINGLE:
        if name in schema:
            found[name] = _closed(schema[name])
    for name in _LISTED:
        if isinstance(listed := schema.get(name), list):
            found[name] = [_closed(part) for part in listed]
    if _is_open(schema):
        found["additionalProperties"] = False
    return found


def _schemas(schema: object) -> Iterator[Schema]:
    """Every schema in ``schema``, itself included; not what constants and defaults look like."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name in _BY_NAME:
            todo += named.values() if isinstance(named := part.get(name), dict) else ()
        for name in _LISTED:
            todo += listed if isinstance(listed := part.get(name), list) else ()
        todo += [part[name] for name in _SINGLE if name in part]


def _is_combined(schema: Schema) -> bool:
    of_all = schema.get("allOf")
    several = isinstance(of_all, list) and len(of_all) > 1
    return several or sum(name in schema for name in _PARTS_OF_ONE) > 1 or any(name in schema for name in _CONDITIONS)


def _is_open(schema: Schema) -> bool:
    """Whether it names properties, and neither says nor implies anything of others."""
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or any(name in schema for name in _OTHERS) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in named for name in required)
