"""A request's body as its API's type: unknown fields are named, and an invalid body is explained."""

from __future__ import annotations

import codecs
import difflib
import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from conductor.ingress.fields.nested_fields import FIELD_NAME, unknown_nested
from conductor.ingress.fields.whole_numbers import with_whole_numbers
from mooncake.errors import InvalidRequest

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MAX_NAMED_FIELDS = 8
_MAX_FIELDS = 10_000  # of a body in which unknown ones are looked for: nobody else is served meanwhile

R = TypeVar("R", bound=msgspec.Struct)


def decode_request(body: bytes, form: type[R]) -> tuple[R, list[str]]:
    """The request, and the names of ignored fields, unless there may be far too many. Raises InvalidRequest, naming the
    field at fault."""
    body = body.removeprefix(codecs.BOM_UTF8)  # which some editors and shells write, and Python's json skips
    try:
        if not body:
            raise InvalidRequest("the body is empty")
        try:
            request = msgspec.json.decode(body, type=form)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error) or body.count(b":") > _MAX_FIELDS:
                raise
            body = with_whole_numbers(body, form)
            request = msgspec.json.decode(body, type=form)
        if body.count(b":") > _MAX_FIELDS:  # each has one, and texts have more
            return request, []
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        nested = unknown_nested(given, form)
    except msgspec.ValidationError as error:
        raise _explain(error) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    known = form.__struct_fields__
    unknown = sorted(name for name in given.keys() - set(known) if FIELD_NAME.fullmatch(name))
    num_more = len(unknown) + len(nested) - _MAX_NAMED_FIELDS
    more = [f"and {num_more} more"] if num_more > 0 else []
    named = [_with_nearest(name, known) for name in unknown[:_MAX_NAMED_FIELDS]]
    return request, (named + nested)[:_MAX_NAMED_FIELDS] + more


def _with_nearest(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"{name} (is {nearest[0]} meant?)" if nearest else name


def _explain(error: msgspec.ValidationError) -> InvalidRequest:
    text = str(error)
    path = _PATH.search(text)
    if path is None:
        missing = re.search(r"missing required field `(\w+)`", text)
        return InvalidRequest(text, missing.group(1) if missing else None)
    what = text[: path.start()]
    return InvalidRequest(f"{path.group(1)}: {what}" if path.group(1) else what, path.group(1) or None)
