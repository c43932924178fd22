"""``mooncake cache-lab``: every policy, capacity and trace on several processes; a table, PNG files, JSON."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.markup import escape

from mooncake.app.console import amount, counted, err, out, plain_table, print_json
from mooncake.app.extras import require
from mooncake.app.outputs import writing
from mooncake.app.traces.cache_lab import BELADY, LAB_POLICIES, Lab, Rates, Rules
from mooncake.app.traces.cache_lab_report import PUBLISHED, cells, markdown
from mooncake.errors import ConfigError
from mooncake.trace import HitCount, expected_hits, load_trace


@dataclass(frozen=True, slots=True)
class LabOptions:
    policies: tuple[str, ...] = LAB_POLICIES
    capacities: tuple[int, ...] = ()  # blocks
    rules: Rules = Rules.POOL
    jobs: int = 1
    limit: int | None = None
    plots: Path | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        for name in self.policies:
            if name not in LAB_POLICIES:
                raise ConfigError(f"no policy is called {name!r}; there are: {', '.join(LAB_POLICIES)}")
        if min(self.capacities, default=1) < 1:
            raise ConfigError("a capacity is at least one block")


@dataclass(frozen=True, slots=True)
class Task:
    path: Path
    policy: str
    capacity: int


@dataclass(frozen=True, slots=True)
class Done:
    task: Task
    rates: Rates
    seconds: float


def cache_lab(paths: Sequence[Path], options: LabOptions) -> None:
    """Raises InvalidRequest for a broken trace, MissingDependency when plots need matplotlib."""
    if options.plots is not None:
        require("matplotlib", "plots", "--plots")
    endless = {path: expected_hits(load_trace(path, options.limit)) for path in paths}
    tasks = [Task(path, name, size) for path in paths for size in options.capacities for name in options.policies]
    done = _run(tasks, options)
    if options.as_json:
        print_json({"rules": options.rules, "traces": [_trace_json(path, endless[path], done) for path in paths]})
    else:
        for path in paths:
            _print(path, endless[path], options, done)
    if options.plots is not None:
        from mooncake.app.plots import write_hit_rates

        for path in paths:
            curves = {
                name: [(size, done[Task(path, name, size)].rates.block) for size in options.capacities]
                for name in options.policies
            }
            file = options.plots / f"hit_rate_{path.name.partition('.')[0]}.png"
            write_hit_rates(file, path.name, curves, endless[path].block_rate)
            err.print(f"plot: {escape(str(file))}", soft_wrap=True)


TITLES = {
    Rules.POOL: "as the pool evicts",
    Rules.TAIL_FIRST: "compared with an analysis that touches a prompt's last block first",
    Rules.HEAD_FIRST: "compared with the counts published with the trace, first block first",
}


def write_report(file: Path, paths: Sequence[Path], options: LabOptions) -> None:
    """Write a Markdown page: every policy under the pool's rules, and all published results of these traces beside
    ours."""
    parts = [
        "# What each eviction policy finds again\n\nShare of prompt blocks (512 tokens) found in a cache. In brackets "
        "the difference from the published number; **≠** where it is more than 0.005, with the reason below.\n"
    ]
    for path in paths:
        stem = path.name.partition(".")[0]
        for rules in Rules:
            sizes, rows = (options.capacities, options.policies)
            if rules is not Rules.POOL:
                if (stem, rules) not in PUBLISHED:
                    continue
                sizes, table = PUBLISHED[stem, rules]
                rows = tuple(table)
            tasks = [Task(path, name, size) for size in sizes for name in rows]
            done = _run(tasks, replace(options, rules=rules))
            rates = {(task.policy, task.capacity): entry.rates for task, entry in done.items()}
            parts.append(markdown(f"{stem}, {TITLES[rules]}", cells(stem, rules, rates)))
    with writing(file):
        file.write_text("\n".join(parts))
    err.print(f"report: {escape(str(file))}", soft_wrap=True)


def _run(tasks: Sequence[Task], options: LabOptions) -> dict[Task, Done]:
    """Run the tasks, the longest first, so that no process ends with a long one."""
    with counted("caches", len(tasks)) as advance:
        if options.jobs == 1:
            done = []
            for task in tasks:
                done.append(_serve(task, options))
                advance()
        else:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(options.jobs, mp_context=context) as pool, _ending_processes():
                ordered = sorted(tasks, key=lambda task: task.policy != "workload-aware")
                with _deaf_to_ctrl_c():
                    futures: list[Future[Done]] = [pool.submit(_serve, task, options) for task in ordered]
                done = []
                for future in as_completed(futures):
                    done.append(future.result())
                    advance()
    return {entry.task: entry for entry in done}


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Defer Ctrl-C until the end. Processes started meanwhile inherit the mask: without it they would die with a
    traceback. In this process a mask is not enough, because any other thread may receive the signal."""
    heard: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if heard:
        raise KeyboardInterrupt


@contextmanager
def _ending_processes() -> Iterator[None]:
    """End the processes after an error here, rather than wait for their results."""
    try:
        yield
    except BaseException:
        for process in multiprocessing.active_children():
            process.kill()
        raise


_labs: dict[tuple[Path, Rules, int | None], Lab] = {}  # a process reads each trace once


def _serve(task: Task, options: LabOptions) -> Done:
    key = (task.path, options.rules, options.limit)
    if key not in _labs:
        _labs[key] = Lab(load_trace(task.path, options.limit), options.rules)
        gc.collect()
        gc.freeze()  # the trace stays alive: the collector need not visit it
    started_s = time.perf_counter()
    rates = _labs[key].run(task.policy, task.capacity)
    return Done(task, rates, time.perf_counter() - started_s)


def _print(path: Path, endless: HitCount, options: LabOptions, done: dict[Task, Done]) -> None:
    out.print(
        f"\n[bold]{escape(path.name)}[/]: {amount(endless.requests, 'request')}; prompt blocks found in a cache, "
        f"share of {endless.blocks:,}; endless cache {endless.block_rate:.4f} (by token {endless.token_rate:.4f}, "
        f"mean of requests {endless.request_mean_rate:.4f}); rules: {options.rules}",
        soft_wrap=True,
    )
    table = plain_table("policy", *(f"{size:,}" for size in options.capacities), "seconds")
    best = {
        size: max((done[Task(path, n, size)].rates.block for n in options.policies if n != BELADY), default=0.0)
        for size in options.capacities
    }
    for name in options.policies:
        row = [done[Task(path, name, size)] for size in options.capacities]
        shares = [
            f"[bold]{entry.rates.block:.4f}[/]"
            if entry.rates.block == best[entry.task.capacity]
            else f"{entry.rates.block:.4f}"
            for entry in row
        ]
        table.add_row(
            name, *shares, f"{sum(entry.seconds for entry in row):.1f}", style="dim" if name == BELADY else None
        )
    out.print(table)


def _trace_json(path: Path, endless: HitCount, done: dict[Task, Done]) -> dict[str, object]:
    rows = [
        {
            "policy": task.policy,
            "capacity_blocks": task.capacity,
            **asdict(entry.rates),
            "seconds": round(entry.seconds, 3),
        }
        for task, entry in done.items()
        if task.path == path
    ]
    rows.sort(key=lambda row: (LAB_POLICIES.index(str(row["policy"])), row["capacity_blocks"]))
    return {
        "trace": path.name,
        "requests": endless.requests,
        "blocks": endless.blocks,
        "endless": {
            "block": endless.block_rate,
            "token": endless.token_rate,
            "request_mean": endless.request_mean_rate,
        },
        "hit_rates": rows,
    }
