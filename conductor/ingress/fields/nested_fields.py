"""Which fields inside a request's fields nobody reads: a mistyped one would otherwise vanish without a word.

It knows the wire types only by their annotations, and by ``without_effect``: the fields that clients of OpenAI and
Anthropic send as a matter of course, and that change nothing here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import inspect

FIELD_NAME = re.compile(r"\w{1,64}", re.ASCII)


def unknown_nested(given: Mapping[str, msgspec.Raw], form: type[msgspec.Struct]) -> list[str]:
    """Paths such as ``messages[].nmae``, sorted, each once, of a body that has the ``form``.

    Raises RecursionError for one that nests too deeply.
    """
    found: set[str] = set()
    for name, kind in _nested_fields(form).items():
        if name in given:
            found.update(_unknown(msgspec.json.decode(given[name]), kind, name))
    return sorted(found)


@functools.cache
def _nested_fields(form: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    """The fields that contain structs; the others need not be parsed again."""
    described = inspect.type_info(form)
    assert isinstance(described, inspect.StructType)
    return {field.encode_name: field.type for field in described.fields if _has_struct(field.type)}


def _has_struct(kind: inspect.Type) -> bool:
    match kind:
        case inspect.UnionType(types):
            return any(map(_has_struct, types))
        case inspect.ListType(item_type=item):
            return _has_struct(item)
    return isinstance(kind, inspect.StructType)


def _unknown(value: object, kind: inspect.Type, path: str) -> Iterator[str]:
    """No union here has two kinds of structs, so an object is the one that there is."""
    match kind:
        case inspect.UnionType(types):
            for one in types:
                yield from _unknown(value, one, path)
        case inspect.ListType(item_type=item) if isinstance(value, list):
            for part in value:
                yield from _unknown(part, item, f"{path}[]")
        case inspect.StructType(cls=form) if isinstance(value, dict):
            for name in value.keys() - _known_names(form):
                if FIELD_NAME.fullmatch(name):
                    yield f"{path}.{name}"
            for name, inner in _nested_fields(form).items():
                if name in value:
                    yield from _unknown(value[name], inner, f"{path}.{name}")


@functools.cache
def _known_names(form: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(form.__struct_encode_fields__) | getattr(form, "without_effect", frozenset())
