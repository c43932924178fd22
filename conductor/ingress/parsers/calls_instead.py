"""The part of a guide's lead by which an answer may be calls of tools instead of what the guide describes.

A client that gives tools and a format means the format for answers in text. Once a call is begun, its text is as free
as without a format: its parser reads it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from conductor.ingress.parsers.reasoning import spelled
from mooncake.guides import inline_schema

RULE = "calls"


def call_rules(
    begins: Iterable[str],
    markers: Iterable[str],
    token_of: Callable[[str], int | None],
    form: dict[str, object] | None = None,
) -> tuple[str, ...]:
    """Rules of a grammar for ``RULE``: one of ``begins``, and then text in which those of ``markers`` that are control
    tokens may occur; or JSON of this ``form``. ``token_of`` returns the control token that a tag is; None for one that
    is plain text."""
    opened = " | ".join(spelled(tag, token_of(tag)) for tag in begins)
    control = [spelled(tag, token) for tag in sorted(markers) if (token := token_of(tag)) is not None]
    rest = f"free (({' | '.join(control)}) free)*" if control else "free"
    rules = (f"{RULE}: ({opened}) {rest}", "free: /(?s:.*)/")
    if form is None:
        return rules
    return f"{rules[0]} | bare", rules[1], f"bare: {inline_schema(form)}"
