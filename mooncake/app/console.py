"""Output of commands: one console for results, one for everything else, and common formats.

Results go to stdout, so that a pipe gets only them; progress and remarks go to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from mooncake.client import RequestTimings
from mooncake.types import Usage

PIPE_WIDTH = 160  # a pipe has no width, and nothing should be cut there
PROSE_WIDTH = 100  # sentences in a table are read in lines of this length at most


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, and let the caller decide; Rich would end the process."""
        raise


out = _Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
err = _Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else PIPE_WIDTH)


def remark(sentence: str) -> None:
    """Print a sentence on stderr about what a long command does."""
    err.print(f"[dim]{escape(sentence)}[/]", soft_wrap=True)


class Advance(Protocol):
    def __call__(self, steps: int = 1, note: str = "") -> None:
        """So many steps more are done; ``note`` is shown beside them."""
        ...


@contextmanager
def counted(title: str, total: int, *columns: ProgressColumn) -> Iterator[Advance]:
    """A progress bar of ``total`` steps on a terminal, with further ``columns``."""
    bar = Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *columns,
        TextColumn("{task.fields[note]}"),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=total, note="")
        yield lambda steps=1, note="": bar.update(task, advance=steps, note=note)


def print_json(value: object) -> None:
    """One line of JSON on stdout."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def plain_table(*columns: str, title: str | None = None) -> Table:
    """A table with its first column left-aligned and the others right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(
            column,
            justify="left" if index == 0 else "right",
            header_style="dim",
            overflow="fold",  # nothing is hidden on a narrow screen
        )
    return table


def duration(value_ms: float) -> str:
    """Milliseconds, or seconds where there are many, with a sensible number of digits."""
    if value_ms < 9.95:
        return f"{value_ms:.1f} ms"
    if value_ms < 999.5:
        return f"{value_ms:.0f} ms"
    seconds = value_ms / 1e3
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:,.1f} s"


def amount(count: int, thing: str, things: str = "") -> str:
    """Such as "1 request" and "2,000 requests"."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {things or thing + 's'}"


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def answer_line(usage: Usage, timings: RequestTimings) -> str:
    """The figures of one request in one line, shown after an answer."""
    report = timings.prefill
    parts = [f"TTFT {duration(timings.ttft_ms)}"]
    if usage.completion_tokens > 1:
        parts.append(f"TBT {duration(timings.mean_tbt_ms)}")
        parts.append(f"{tokens_per_s(timings):.1f} tokens/s")
    parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens reused")
    if timings.prefill_node:
        # a coupled node has no hand-off
        nodes = " → ".join(filter(None, (timings.prefill_node, timings.decode_node)))
        parts.append(nodes + (f" ({report.transport})" if report.transport else ""))
    return " · ".join(parts)


def tokens_per_s(timings: RequestTimings) -> float:
    """Decoding speed of one request, without the wait for its first token."""
    return 1000 / timings.mean_tbt_ms if timings.mean_tbt_ms > 0 else 0.0
