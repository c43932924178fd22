"""How commands word their help: what an option takes is N, NUMBER, TEXT or PATH, and an argument has its name alone.

Typer writes Python's types there, down to ``<list[Path]>``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

from mooncake.errors import shown

F = TypeVar("F", bound=Callable[..., Any])

_WORDS = {"int": "N", "float": "NUMBER", "str": "TEXT", "path": "PATH", "file": "FILE"}
_TYPE = re.compile(r"<(\w+)(?: range)?>")


class Commands(typer.Typer):
    """``typer.Typer`` whose commands are ``_Command``."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        return super().command(name, **{"cls": _Command} | settings)


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """An error also tells the value that it is about."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = getattr(error.param, "name", None)
            value = self.make_parser(ctx).parse_args(given)[0].get(name) if name else None
            if isinstance(value, str) and repr(value) not in error.message:
                error.message = f"{error.message.rstrip('.')}, got {shown(value)}"
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            params = [param for param in self.get_params(ctx) if param.param_type_name == kind]
            rows = [(_worded(row[0], kind), row[1]) for param in params if (row := param.get_help_record(ctx))]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _worded(name: str, kind: str) -> str:
    if kind == "argument":
        return name.partition(" <")[0]
    return _TYPE.sub(lambda found: _WORDS.get(found[1], found[0]), name)
