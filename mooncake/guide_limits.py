"""Limits on guides: how many expressions one text may have to match at once.

llguidance's time grows exponentially with that number, in a single step that ignores its own limits and cannot be
interrupted: while it compiles, or later, on the thread that generates the tokens. So they are counted first. The count
may be too high, for example for a union whose cases exclude each other, but never too low. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import unquote

from mooncake.errors import InvalidRequest

MAX_AT_ONCE = 6  # patterns and formats one string must match: milliseconds; 12 take seconds, 24 hours
MAX_INTERSECTIONS = 8  # characters & in a grammar, including the operator
MAX_VISITS = 300_000  # of parts of a schema: half a second of counting

Schema = dict[str, object]
_Place = frozenset["int | tuple[int, ...]"]
"""What holds for one value of an answer: schemas by number, and groups of which one alternative holds."""

_JSON = re.compile(r"%json\s*")


class GuideTooComplex(InvalidRequest):
    """The grammar engine would take too long for it."""

    code = "guide_too_complex"


def check_grammar(grammar: str) -> None:
    """Raises GuideTooComplex; ValueError for a schema in it that is not JSON."""
    if grammar.count("&") > MAX_INTERSECTIONS:
        what = f"a grammar may have {MAX_INTERSECTIONS} of the character & at most; in a text, \\x26 says the same"
        raise GuideTooComplex(what, "guide")
    for found in _JSON.finditer(grammar):
        check_schema(json.JSONDecoder().raw_decode(grammar, found.end())[0])


def check_schema(schema: object) -> None:
    """Raises GuideTooComplex. ``schema`` is JSON."""
    parts = list(_parts(schema))
    if len({regex for part in parts for regex in _regexes(part)}) > MAX_AT_ONCE and isinstance(schema, dict):
        _Places(schema, parts).check()


class _Places:
    """The values that answers to one schema may contain, each with all the schemas that apply to it."""

    def __init__(self, root: Schema, parts: list[Schema]) -> None:
        self._root = root
        self._schemas: list[Schema] = []
        self._numbers: dict[int, int] = {}  # by identity
        self._visits = 0
        draft_4 = any("draft-04" in str(part.get("$schema")) for part in parts)
        has_base = any(
            isinstance(part.get("$id"), str) or (draft_4 and isinstance(part.get("id"), str)) for part in parts[1:]
        )
        if has_base and any("$ref" in part for part in parts):  # "#/…" may point elsewhere there
            raise GuideTooComplex("a schema with so many patterns may have no $id within it", "guide")

    def check(self) -> None:
        """Visit every place once."""
        todo: list[_Place] = [frozenset((self._number(self._root),))]
        seen = set(todo)
        while todo:
            for schemas in self._alternatives(todo.pop()):
                if len({regex for schema in schemas for regex in _regexes(schema)}) > MAX_AT_ONCE:
                    what = f"a string has to match more than {MAX_AT_ONCE} patterns and formats at once"
                    raise GuideTooComplex(what, "guide")
                for place in self._inside(schemas):
                    if place and place not in seen:
                        seen.add(place)
                        todo.append(place)

    def _alternatives(self, place: _Place) -> Iterator[list[Schema]]:
        """The sets of schemas, one of which applies as a whole."""
        branches: list[tuple[set[int], list[int | tuple[int, ...]]]] = [(set(), list(place))]
        while branches:
            met, todo = branches.pop()
            while todo:
                self._visit(1)
                next_ = todo.pop()
                if isinstance(next_, tuple):
                    self._visit((len(met) + len(todo)) * len(next_))
                    branches += [(met.copy(), [*todo, number]) for number in next_]
                    break
                if next_ in met:
                    continue
                met.add(next_)
                schema = self._schemas[next_]
                todo += self._numbers_of(schema.get("allOf"))
                if "$ref" in schema:
                    todo.append(self._number(self._target(schema["$ref"])))
                todo += [group for name in ("anyOf", "oneOf") if (group := self._numbers_of(schema.get(name)))]
            else:
                yield [self._schemas[number] for number in met]

    def _inside(self, schemas: list[Schema]) -> Iterator[_Place]:
        """Properties by name, those of any other name, items by index, and later ones."""
        names = {name for schema in schemas for name in _dict(schema.get("properties"))}
        length = max((len(_first_items(schema)) for schema in schemas), default=0)
        self._visit((len(names) + length + 2) * len(schemas))
        for name in (*names, None):
            yield self._place(self._property(schema, name) for schema in schemas)
        for index in range(length + 1):
            yield self._place(self._item(schema, index) for schema in schemas)

    def _property(self, schema: Schema, name: str | None) -> list[object]:
        """Alternatives for it: a pattern is assumed to match any other name."""
        if name is not None and name in (named := _dict(schema.get("properties"))):
            return [named[name]]
        return [*_dict(schema.get("patternProperties")).values(), schema.get("additionalProperties")]

    def _item(self, schema: Schema, index: int) -> list[object]:
        first = _first_items(schema)
        if index < len(first):
            return [first[index]]
        return [schema.get("additionalItems"), schema.get("items")]

    def _place(self, parts: Iterator[list[object]]) -> _Place:
        groups = (self._numbers_of(part) for part in parts)
        return frozenset(group[0] if len(group) == 1 else group for group in groups if group)

    def _numbers_of(self, parts: object) -> tuple[int, ...]:
        """Identities of those that are objects; true and false do not constrain texts."""
        return tuple(self._number(part) for part in parts if isinstance(part, dict)) if isinstance(parts, list) else ()

    def _number(self, schema: Schema) -> int:
        number = self._numbers.setdefault(id(schema), len(self._schemas))
        if number == len(self._schemas):
            self._schemas.append(schema)
        return number

    def _target(self, ref: object) -> Schema:
        """Only within the schema: other documents are not known here."""
        found: object = self._root
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise GuideTooComplex("in a schema with so many patterns every $ref has to begin with #/", "guide")
        for step in unquote(ref).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(step)] if step.isdecimal() and int(step) < len(found) else None
            else:
                found = _dict(found).get(step)
        return _dict(found)

    def _visit(self, count: int) -> None:
        self._visits += count
        if self._visits > MAX_VISITS:
            raise GuideTooComplex("the schema has too many patterns in too many alternatives", "guide")


def _parts(tree: object) -> Iterator[Schema]:
    """Every object inside a schema, including itself, whatever its purpose."""
    todo = [tree]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield part
            todo += part.values()
        elif isinstance(part, list):
            todo += part


def _regexes(schema: Schema) -> list[tuple[str, str]]:
    return [(name, value) for name in ("pattern", "format") if isinstance(value := schema.get(name), str)]


def _first_items(schema: Schema) -> list[object]:
    """Those with a schema each; older drafts list them as ``items``."""
    for listed in (schema.get("prefixItems"), schema.get("items")):
        if isinstance(listed, list):
            return listed
    return []


def _dict(value: object) -> Schema:
    return value if isinstance(value, dict) else {}
