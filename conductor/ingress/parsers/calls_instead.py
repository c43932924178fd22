"""The part of a guide's lead by which an answer may be calls of tools instead of what the guide describes.

A client that gives tools and a format means the format for answers in text. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from conductor.ingress.parsers.reasoning import spelled
from mooncake.guides import inline_schema

RULE = "calls"
TokenOf = Callable[[str], int | None]
"""The control token that a tag is; None for one that is plain text."""


def form_of_calls(names: Sequence[str], arguments: str) -> dict[str, object]:
    """The schema of a call of one of ``names``, whose arguments, named ``arguments``, are any object: as without a
    format, they are not held to the tools' own schemas, which can be long, and such as no guide can follow."""
    return {
        "type": "object",
        "properties": {"name": {"enum": list(names)}, arguments: {"type": "object"}},
        "required": ["name", arguments],
    }


def tagged_calls(begin: str, end: str, form: dict[str, object], token_of: TokenOf) -> tuple[str, ...]:
    """Rules of a grammar for ``RULE``: JSON of this ``form`` between two tags, once or more often."""
    opened, closed = (spelled(tag, token_of(tag)) for tag in (begin, end))
    return f"{RULE}: ({opened} space call space {closed} space)+", r"space: /\n{0,2}/", f"call: {inline_schema(form)}"


def free_calls(
    begins: Iterable[str], markers: Iterable[str], token_of: TokenOf, form: dict[str, object] | None = None
) -> tuple[str, ...]:
    """Rules of a grammar for ``RULE``: one of ``begins``, and then any text, as without a format, in which those of
    ``markers`` that are control tokens may occur; or JSON of this ``form``, if there is one."""
    opened = " | ".join(spelled(tag, token_of(tag)) for tag in begins)
    control = [spelled(tag, token) for tag in sorted(markers) if (token := token_of(tag)) is not None]
    rest = f"free (({' | '.join(control)}) free)*" if control else "free"
    rules = (f"{RULE}: ({opened}) {rest}", "free: /(?s:.*)/")
    if form is None:
        return rules
    return f"{rules[0]} | bare", rules[1], f"bare: {inline_schema(form)}"
