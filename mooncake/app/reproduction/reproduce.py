"""``mooncake reproduce``: the paper's experiments in virtual time, one JSON file each, and one table of comparison.

Experiments can be run one at a time; the table has all results in the folder.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from rich.markup import escape

from mooncake.app.bench.report import commit
from mooncake.app.console import err, out, plain_table
from mooncake.app.reproduction.contests import CONTESTS
from mooncake.app.reproduction.experiments import EXPERIMENTS, Traces
from mooncake.app.reproduction.findings import Finding
from mooncake.errors import ConfigError

ALL = EXPERIMENTS | CONTESTS
_HEAD = """# The paper's figures, replayed

Made by `mooncake reproduce TRACES`. Every number is from virtual time on described machines (`paper-16`: step curves
fitted to FAST'25 Fig. 14 and 15), with the real conductor's decisions. In `mooncake/app/reproduction`:
`experiments.py` (the paper's) and `contests.py` (our own requirements). Verdicts follow from the tables by the rules in
`verdicts.py`. Each part names its traces; if the tool&agent trace was missing, a generated one of its measured shape
was used.

"""


def reproduce(folder: Path, target: Path, only: list[str]) -> None:
    """Raises ConfigError for an unknown experiment or a missing folder."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; it is to hold the published traces")
    for name in only:
        if name not in ALL:
            raise ConfigError(f"no experiment is called {name!r}; there are: {', '.join(ALL)}")
    traces, made_by = Traces(folder), commit()
    if made_by.endswith("-dirty"):
        err.print("[yellow]there are uncommitted changes: the results will say so[/]")
    for name in only or list(ALL):
        started_s = time.perf_counter()
        traces.used.clear()
        finding = msgspec.structs.replace(ALL[name](traces), traces=tuple(traces.used))
        line = {"commit": made_by, **msgspec.to_builtins(finding)}
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(line), indent=1) + b"\n")
        err.print(f"{name}: {finding.verdict} ({time.perf_counter() - started_s:.0f} s)")
        show(finding)
        write_page(target)


def write_page(target: Path) -> None:
    """Write the table of all results in the folder."""
    (target / "README.md").write_text(page(target))


def page(folder: Path) -> str:
    text = markdown(load(folder))
    if (folder / "validation.md").exists():  # by mooncake validate
        text += "\nHow the simulator compares with a live pair of nodes: [validation.md](validation.md).\n"
    return text


def load(folder: Path) -> list[Finding]:
    """The results in the folder, in the order of the experiments."""
    files = [folder / f"{name}.json" for name in ALL]
    return [msgspec.json.decode(file.read_bytes(), type=Finding) for file in files if file.exists()]


def show(finding: Finding) -> None:
    table = plain_table(escape(finding.title), "published", "here")
    for row in finding.rows:
        table.add_row(escape(row.what), _number(row.published), _number(row.measured))
    out.print(table)
    out.print(f"[bold]{finding.verdict}[/]: {escape(finding.why)}\n")


def markdown(findings: list[Finding]) -> str:
    parts = [_HEAD, "| experiment | verdict | why |\n|---|---|---|\n"]
    parts += [f"| [{f.title}](#{f.name}) | **{f.verdict}** | {f.why} |\n" for f in findings]
    for finding in findings:
        parts.append(f'\n<a id="{finding.name}"></a>\n## {finding.title}\n\n{finding.setup}.\n\n')
        column = "asked" if finding.name in CONTESTS else "published"
        parts.append(f"| | {column} | here | |\n|---|---|---|---|\n")
        parts += [f"| {r.what} | {_number(r.published)} | {_number(r.measured)} | {r.note} |\n" for r in finding.rows]
        parts.append(f"\n**{finding.verdict}**: {finding.why}.\n")
        if finding.traces:
            parts.append(f"\nMade of {'; '.join(finding.traces)}.\n")
    return "".join(parts)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"
