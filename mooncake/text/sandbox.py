"""Jinja's immutable sandbox plus what it lacks: limits on time and sizes.

A template comes with a model's files. Neither it nor a prompt that exploits it may exhaust this process. Every loop
iteration and macro call checks the clock, and operations that multiply text are measured before they run. Knows nothing
of chats.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_INT_BITS = 64


class TemplateRefusal(TemplateError):
    """The template called raise_exception: it rejects this input."""


class LimitExceeded(TemplateError):
    """The template ran too long or built too much."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may still use: a deadline on the monotonic clock, and the characters of any single value."""

    deadline: float
    max_chars: int

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise LimitExceeded("it runs too long")

    def check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise LimitExceeded(f"it builds a value of more than {self.max_chars} characters or items")

    def check_value(self, value: object) -> None:
        if isinstance(value, (str, bytes, list, tuple, dict)):
            self.check_size(len(value))
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise LimitExceeded("it computes with huge numbers")


_limits: ContextVar[Limits] = ContextVar("template_limits")


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment as chat templates expect it (block trimming, loop controls, ``raise_exception``, ``tojson``)."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters |= {name: _measured(name, function) for name, function in self.filters.items()}
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = time.strftime

    def compile_template(self, tree: nodes.Template) -> Template:
        """Raises TemplateError for a template that cannot be compiled."""
        return self.from_string(_Metered().visit(tree))

    def run(self, template: Template, variables: Mapping[str, object], max_s: float, max_chars: int) -> str:
        """Render within the limits. Raises TemplateError; other exceptions only for mistakes in the template."""
        limits = Limits(time.monotonic() + max_s, max_chars)
        token = _limits.set(limits)
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in template.generate(variables):
                num_chars += len(piece)
                limits.check_size(num_chars)
                limits.check_time()
                pieces.append(piece)
        finally:
            _limits.reset(token)
        return "".join(pieces)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        limits = _limits.get()
        if operator == "**":
            raise LimitExceeded("it computes powers")
        if operator == "*":
            text, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(count, int) and isinstance(text, (str, bytes, list, tuple)):
                limits.check_size(len(text) * count)
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            limits.check_size(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        value = super().call_binop(context, operator, left, right)
        limits.check_value(value)
        return value

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        _check_call(name, (owner, *args) if isinstance(owner, str) else args, kwargs)
        value = super().call(context, function, *args, **kwargs)
        _limits.get().check_value(value)
        return value

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def tick(self) -> None:
        _limits.get().check_time()

    def concat_values(self, *parts: object) -> str:
        texts = [str(part) for part in parts]
        _limits.get().check_size(sum(map(len, texts)))
        return "".join(texts)


class _Metered(NodeTransformer):
    """Adds a clock check to every loop and macro, and routes joins (``~``) through the environment."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self._tick_first(node)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self._tick_first(node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return self._call("concat_values", node.nodes)

    def _tick_first(self, node: nodes.For | nodes.Macro) -> None:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("tick", [])))

    def _call(self, method: str, args: list[nodes.Expr]) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


def _measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter with the check of a call. ``wraps`` preserves the attributes by which Jinja passes the context."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_call(name, args[skip:], kwargs)
        value = function(*args, **kwargs)
        _limits.get().check_value(value)
        return value

    return checked


def _check_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check a call in advance. ``args`` begins with the text whose method is called, or the filtered value."""
    limits = _limits.get()
    limits.check_time()
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            limits.check_size(abs(value))  # a width, a count
    text = args[0] if args and isinstance(args[0], str) else ""
    if name == "format":  # the filter
        _check_format(text)
    elif name == "replace" and len(args) > 2 and isinstance(args[1], str) and isinstance(args[2], str):
        limits.check_size(len(text) + text.count(args[1]) * len(args[2]))
    elif name == "join" and len(args) > 1 and isinstance(args[1], (list, tuple)):
        _check_join(limits, text, args[1])
    elif name == "join" and args and isinstance(args[0], (list, tuple)):  # the filter
        _check_join(limits, str(args[1]) if len(args) > 1 else str(kwargs.get("d", "")), args[0])


def _check_join(limits: Limits, separator: str, items: Iterable[object]) -> None:
    limits.check_size(sum(len(separator) + (len(item) if isinstance(item, str) else 32) for item in items))


def _check_format(pattern: str) -> None:
    if re.search(r"\d{4,}|\*", pattern):
        raise LimitExceeded("it formats with a width of thousands, or a computed one")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: object) -> None:
    raise TemplateRefusal(str(message))
