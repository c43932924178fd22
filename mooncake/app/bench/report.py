"""The report of every benchmark: a table for people, then one line of JSON for scripts.

The JSON is ``{"bench", "commit", "machine", "config", "seed", "results", "ratios"}``. A ratio compares two figures of
the same run. Nothing in it names a machine, a user or a path. It must not import torch.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from mooncake.app.console import err, out, plain_table, print_json
from mooncake.errors import Cancelled, ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TABLE_WIDTH = 160  # at least, even if it does not fit: a truncated table is useless
PLAIN_S = 30.0  # between two lines of progress where there is no terminal
Value = str | int | float | bool
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing measured several times. ``subject`` is who was measured, ``params`` what distinguishes it (a batch
    size)."""

    subject: str
    name: str
    unit: str
    values: tuple[float, ...]  # one per repetition, in order
    more_is_better: bool = False
    params: Mapping[str, Value] = field(default_factory=dict)

    @property
    def best(self) -> float:
        return max(self.values) if self.more_is_better else min(self.values)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def label(self) -> str:
        """The distinguishing parameters: ``batch 8, context 256``."""
        return ", ".join(f"{key} {value}" for key, value in self.params.items())

    def to_json(self) -> dict[str, object]:
        numbers = {"best": self.best, "median": self.median}
        rounded = {key: _round(value) for key, value in numbers.items()}
        values = [_round(value) for value in self.values]
        return {
            "subject": self.subject,
            "name": self.name,
            "unit": self.unit,
            **self.params,
            **rounded,
            "values": values,
        }


@dataclass(slots=True)
class Report:
    bench: str
    config: dict[str, object]
    seed: int
    figures: list[Figure] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    is_complete: bool = True

    @contextmanager
    def measuring(self, title: str) -> Iterator[Progress]:
        """Show what is being measured. Ctrl-C only ends the measurement: what was measured so far can still be
        reported."""
        try:
            with progress(title) as shown:
                yield shown
        except (Cancelled, KeyboardInterrupt):
            self.is_complete = False
            self.notes.append("stopped before the end")

    def add(self, *figures: Figure) -> None:
        self.figures += figures

    def add_value(
        self, subject: str, name: str, unit: str, value: float, more_is_better: bool = False, **params: Value
    ) -> None:
        """One repetition's value of a figure, which begins with the first of them."""
        for index, figure in enumerate(self.figures):
            if (figure.subject, figure.name, figure.unit, figure.params) == (subject, name, unit, params):
                self.figures[index] = replace(figure, values=(*figure.values, value))
                return
        self.add(Figure(subject, name, unit, (value,), more_is_better, params))

    def find(self, subject: str, name: str, **params: Value) -> Figure | None:
        for figure in self.figures:
            if (figure.subject, figure.name) == (subject, name) and params.items() <= figure.params.items():
                return figure
        return None

    def compare(self, ratio: str, ours: Figure | None, theirs: Figure | None) -> None:
        """Best over best, because other load on the machine only adds time. Omitted if one was not measured."""
        if ours is not None and theirs is not None and theirs.best > 0:
            self.ratios[ratio] = ours.best / theirs.best

    def compare_subjects(self, ratio: str, name: str, ours: str, theirs: str, **params: Value) -> None:
        """The same for one figure of two subjects."""
        self.compare(ratio, self.find(ours, name, **params), self.find(theirs, name, **params))

    def finish(self, file: Path | None) -> None:
        """Print the table and the JSON line; write the line to ``file`` too. The line is the last one on stdout.

        Raises Cancelled when not everything was measured, ConfigError when the file cannot be written.
        """
        out.print(figure_table(self.figures), width=max(out.width, TABLE_WIDTH), crop=False)
        if self.ratios:
            table = plain_table("ratio, best over best", "")
            for name, value in self.ratios.items():
                table.add_row(name, f"{value:.2f}")
            out.print()
            out.print(table)
        for note in self.notes:
            out.print(f"[dim]{escape(note)}[/]", soft_wrap=True)
        out.print()
        line = self.to_json()
        print_json(line)  # first: an error with the file must not lose the results
        if file is not None:
            try:
                file.write_bytes(msgspec.json.encode(line) + b"\n")
            except OSError as error:
                raise ConfigError(f"cannot write {file}: {error.strerror or error}") from None
        if not self.is_complete:
            raise Cancelled("stopped before the end of the benchmark")

    def to_json(self) -> dict[str, object]:
        return {
            "bench": self.bench,
            "commit": commit(),
            "machine": machine() | {"load_before": self.load_before, "load_after": os.getloadavg()[0]},
            "config": self.config,
            "seed": self.seed,
            "results": [figure.to_json() for figure in self.figures],
            "ratios": {name: _round(value) for name, value in self.ratios.items()},
            "notes": self.notes,
        }


def told(options: DataclassInstance, *left_out: str, **more: object) -> dict[str, object]:
    """The options of a run and ``more``, for its report: the model is named without its path, and what a report has
    elsewhere (seed, file) is left out, too."""
    names = (field.name for field in fields(options) if field.name not in ("seed", "json", *left_out))
    config = {name: getattr(options, name) for name in names}
    return config | ({"model": Path(config["model"]).name} if "model" in config else {}) | more


def figure_table(figures: Iterable[Figure]) -> Table:
    """One row per figure, one column per subject: best and median."""
    figures = list(figures)
    subjects = list(dict.fromkeys(figure.subject for figure in figures))
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for figure in figures:
        cell = _digits(figure.best)
        if len(figure.values) > 1:
            cell += f" / {_digits(figure.median)}"
        rows.setdefault((figure.name, figure.label, figure.unit), {})[figure.subject] = cell
    table = plain_table("best / median", "", "", *subjects)
    for column in table.columns:
        column.no_wrap = True
    for row, cells in rows.items():
        table.add_row(*row, *(cells.get(subject, "") for subject in subjects))
    return table


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A line on a terminal that says what is being measured; a new line each ``PLAIN_S`` when stderr is not one."""
    shown = Progress(
        SpinnerColumn(),
        TextColumn(f"{title}: {{task.description}}"),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    with shown:
        shown.add_task("starting", title=title, told_s=time.monotonic())
        yield shown


def tell(shown: Progress, what: str) -> None:
    for task in shown.tasks:
        shown.update(task.id, description=what)
        now_s = time.monotonic()
        if not err.is_terminal and now_s - task.fields["told_s"] >= PLAIN_S:
            err.print(f"{task.fields['title']}: {what}", markup=False)
            shown.update(task.id, told_s=now_s)


def machine() -> dict[str, object]:
    """What the numbers depend on, in general terms."""
    info = _cpu_info()
    flags = set(info.get("flags", "").split())
    return {
        "cpu": info.get("model name", platform.machine()),
        "cpu_family_model_stepping": "/".join(info.get(key, "?") for key in ("cpu family", "model", "stepping")),
        "features": [name for name in CPU_FEATURES if name in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": _version("torch"),
    }


def commit() -> str:
    """The checkout's commit, ``-dirty`` when files differ from it; the installed version when there is no checkout."""
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        try:
            head = _git(root, "rev-parse", "--short=12", "HEAD")
            return head + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
        except (OSError, subprocess.SubprocessError):
            pass
    return _version("mooncake-cluster")


def _git(root: Path, *command: str) -> str:
    run = subprocess.run(["git", "-C", root, *command], capture_output=True, text=True, timeout=10, check=True)
    return run.stdout.strip()


def _cpu_info() -> dict[str, str]:
    """The first processor's entry; later ones have the same keys."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    first = text.split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _round(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
