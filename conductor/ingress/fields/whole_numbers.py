"""Whole numbers that a client wrote as floats, such as 8.0: clients compute with floats, and to other servers both are
the same number.

It knows the wire types only by their annotations. What has no declared type, such as a JSON schema, stays as it is.
"""

from __future__ import annotations

import functools

import msgspec
from msgspec import inspect

_MOST_BYTES = 1 << 14  # of a field that is rewritten: nobody else is served meanwhile
_MOST = 1 << 63


def with_whole_numbers(body: bytes, form: type[msgspec.Struct]) -> bytes:
    """The body with an integer wherever the ``form`` has one and the body a whole float. Raises DecodeError."""
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name, kind in _whole_fields(form).items():
        raw = given.get(name)
        if raw is not None and len(memoryview(raw)) <= _MOST_BYTES:
            given[name] = msgspec.Raw(msgspec.json.encode(_whole(msgspec.json.decode(raw), kind)))
    return msgspec.json.encode(given)


@functools.cache
def _whole_fields(form: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    described = inspect.type_info(form)
    assert isinstance(described, inspect.StructType)
    return {field.encode_name: field.type for field in described.fields if _has_whole(field.type, frozenset())}


def _has_whole(kind: inspect.Type, around: frozenset[type]) -> bool:
    """``around`` are the structs that it is a part of: some contain themselves."""
    match kind:
        case inspect.IntType():
            return True
        case inspect.UnionType(types):
            return any(_has_whole(one, around) for one in types)
        case inspect.ListType(item_type=item):
            return _has_whole(item, around)
        case inspect.StructType(cls=form, fields=fields) if form not in around:
            return any(_has_whole(field.type, around | {form}) for field in fields)
    return False


def _whole(value: object, kind: inspect.Type) -> object:
    match kind:
        case inspect.IntType() if isinstance(value, float) and value.is_integer() and abs(value) < _MOST:
            return int(value)
        case inspect.UnionType(types):
            for one in types:
                value = _whole(value, one)
        case inspect.ListType(item_type=item) if isinstance(value, list):
            return [_whole(part, item) for part in value]
        case inspect.StructType(fields=fields) if isinstance(value, dict):
            known = {field.encode_name: field.type for field in fields if field.encode_name in value}
            return value | {name: _whole(value[name], one) for name, one in known.items()}
    return value
