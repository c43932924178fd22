"""Commands on recorded traces: simulation, eviction policies, statistics, scaling.

They need no cluster. As in ``cli``, each command is in its own module, imported when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mooncake.app.cli.commands import Commands
from mooncake.app.outputs import writable, writable_folder
from mooncake.errors import ConfigError

app = Commands()
trace_app = Commands(help="Recorded request traces.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")

TraceFile = Annotated[
    Path, typer.Argument(metavar="TRACE", help="Mooncake JSONL, plain, .xz or .gz.", show_default=False)
]
AnyTraceFile = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="Mooncake JSONL or Azure CSV, plain, .xz or .gz.", show_default=False),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first requests.", show_default="all")]
MaxOutput = Annotated[int | None, typer.Option(min=1, help="Maximum tokens per answer.", show_default="as recorded")]
TokensPerBlock = Annotated[int, typer.Option(min=1, max=512, help="Tokens for each of the trace's blocks of 512.")]
JitterMs = Annotated[float, typer.Option(min=0.0, help="Move arrivals randomly by up to so much trace time.")]
Speed = Annotated[float, typer.Option(min=0.01, help="Trace seconds per second.")]
Seed = Annotated[int, typer.Option(min=0, help="Of everything random.")]
ClusterFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A file that describes the cluster (TOML).", show_default=False)
]
Page = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write an HTML page.", show_default=False, callback=writable)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


def _preset(context: typer.Context, name: str) -> str:
    """``help`` lists the presets and exits, even if required arguments are missing."""
    if name == "help" and not context.resilient_parsing:  # set during shell completion
        from mooncake.app.sim.commands.simulate import list_presets

        list_presets()
        raise typer.Exit
    return name


Preset = Annotated[
    str,
    typer.Option(
        help="A described cluster; --preset help lists them.", show_default=False, is_eager=True, callback=_preset
    ),
]


@app.command()
def simulate(
    trace: AnyTraceFile,
    preset: Preset = "",
    cluster: ClusterFile = None,
    policy: Annotated[str, typer.Option(help="Placement policy.", show_default="the cluster's")] = "",
    prefill: Annotated[int | None, typer.Option(min=1, help="Prefill machines.", show_default="the cluster's")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Decode machines.", show_default="the cluster's")] = None,
    admission: Annotated[str, typer.Option(help="How requests are refused.", show_default="the cluster's")] = "",
    seed: Seed = 0,
    speed: Speed = 1.0,
    jitter_ms: JitterMs = 3000.0,
    limit: Limit = None,
    resample: Annotated[
        int | None, typer.Option(min=1, help="Number of requests, from copies of the trace.", show_default=False)
    ] = None,
    max_output: MaxOutput = None,
    tokens_per_block: TokensPerBlock = 512,
    returns: Annotated[int, typer.Option(min=0, help="How often a refused request is sent again when told to.")] = 0,
    report: Page = None,
    requests: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write every request as JSONL.", show_default=False, callback=writable),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play a recorded trace on a described cluster in virtual time. The real conductor decides."""
    from mooncake.app.sim.commands import simulate as command
    from mooncake.app.sim.simulation import Run

    chosen = command.choose_cluster(preset, cluster)
    chosen = command.changed(chosen, policy, admission, prefill, decode)
    run = Run(seed, speed, jitter_ms / 1e3, max_output, tokens_per_block, returns)
    command.simulate(trace, limit, resample, chosen, run, command.Output(as_json, report, requests))


@app.command()
def sweep(
    trace: AnyTraceFile,
    vary: Annotated[
        str,
        typer.Option(
            help="policy, admission, split (5:11, prefill and decode machines), nodes (machines in all), bandwidth "
            "(Gbit/s of each), capacity (tokens of KV in a prefill machine's memory), ssd (on its SSD) or load (times "
            "the trace's speed)."
        ),
    ],
    values: Annotated[str, typer.Option(help="Comma-separated: 0.5,1,2 or 5:11,8:8 or random,milliseconds.")],
    preset: Preset = "",
    cluster: ClusterFile = None,
    seed: Seed = 0,
    speed: Speed = 1.0,
    limit: Limit = None,
    max_output: MaxOutput = None,
    tokens_per_block: TokensPerBlock = 512,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", "--plot", metavar="FILE", help="Write an HTML page.", show_default=False, callback=writable
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a trace once per value of one parameter."""
    from mooncake.app.sim.commands.simulate import choose_cluster, load_scaled
    from mooncake.app.sim.commands.sweep import sweep as run_all
    from mooncake.app.sim.simulation import Run

    chosen = choose_cluster(preset, cluster)
    setting = chosen, Run(seed, speed, max_output=max_output, tokens_per_block=tokens_per_block)
    run_all(load_scaled(trace, limit, tokens_per_block), trace.name, setting, vary, values.split(","), as_json, report)


@app.command()
def reproduce(
    traces: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder with the published traces.", show_default=False)
    ],
    target: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where results and the table go.", callback=writable_folder)
    ] = Path("deploy/reproduction"),
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this experiment; may be repeated.")
    ] = None,
) -> None:
    """Run the paper's experiments in virtual time. One table compares them with the published figures."""
    from mooncake.app.reproduction.reproduce import reproduce as run_experiments

    run_experiments(traces, target, only or [])


@app.command("cache-lab")
def cache_lab(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE", help="Mooncake JSONL, plain, .xz or .gz.", show_default=False),
    ],
    capacity: Annotated[
        list[int] | None,
        typer.Option(
            metavar="BLOCKS",
            min=1,
            help="Blocks in the cache; may be repeated.",
            show_default="1000 to 50000, in five steps",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this policy; may be repeated.", show_default="all")
    ] = None,
    rules: Annotated[
        str,
        typer.Option(
            help="pool: as our pool evicts; tail-first, head-first: as two published analyses count, which touch a "
            "prompt's last or first block first (deploy/reproduction/eviction.md)."
        ),
    ] = "pool",
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes.")] = 1,
    limit: Limit = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw PNG files.", show_default=False, callback=writable_folder),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a Markdown page: all rules, compared with published results.",
            show_default=False,
            callback=writable,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the hit rate by capacity of every eviction policy."""
    from mooncake.app.traces.cache_lab import CAPACITIES, LAB_POLICIES, Rules
    from mooncake.app.traces.cache_lab_command import LabOptions, write_report
    from mooncake.app.traces.cache_lab_command import cache_lab as compare

    if rules not in tuple(Rules):
        raise ConfigError(f"--rules must be one of {', '.join(Rules)}, got {rules!r}")
    if report is not None and (plots is not None or as_json):
        raise ConfigError("--report writes one page and nothing else: leave --plots and --json out")
    sizes = tuple(capacity or CAPACITIES)
    options = LabOptions(tuple(policy or LAB_POLICIES), sizes, Rules(rules), jobs, limit, plots, as_json)
    if report is not None:
        write_report(report, traces, options)
    else:
        compare(traces, options)


@trace_app.command("stats")
def trace_stats(
    trace: TraceFile,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Show lengths, rates, and hit rates of LRU caches."""
    from mooncake.app.traces.stats import show_trace

    show_trace(trace, limit, as_json)


@trace_app.command("scale")
def trace_scale(
    trace: AnyTraceFile,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="Where to write; .xz and .gz compress.", show_default=False)
    ],
    requests: Annotated[
        int | None, typer.Option(min=1, help="Number of requests, from copies of the trace.", show_default="as many")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Factor on the request rate.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the time at which each copy begins.")] = 0,
) -> None:
    """Write the same trace with more requests, or faster."""
    from mooncake.app.traces.files import scale_trace

    scale_trace(trace, target, requests, speed, seed)


@trace_app.command("generate")
def trace_generate(
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="Where to write; .xz and .gz compress.", show_default=False)
    ],
    shape: Annotated[str, typer.Option(help="conversation or toolagent: measured on the published traces.")],
    requests: Annotated[int | None, typer.Option(min=1, help="How many.", show_default="as published")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same trace.")] = 0,
) -> None:
    """Write a synthetic trace. It has the lengths, arrivals and prefix reuse measured on a published one."""
    from mooncake.app.traces.files import generate_trace

    generate_trace(shape, target, requests, seed)
