"""The command line: names, flags and exit codes. What a command does lives in its own module, imported when it runs,
so that ``mooncake --help`` answers at once.

Exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 a missing dependency, 130 interrupted.
"""

from __future__ import annotations

import importlib
import math
import secrets
import sys
from collections.abc import Mapping
from json import dumps as json_text  # a JSON string or number is one of TOML too
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooncake.app.extras import MissingDependency
from mooncake.config import Config, load_config
from mooncake.errors import CallerError, Cancelled, ConfigError, MooncakeError

if TYPE_CHECKING:
    from mooncake.types import SamplingParams

app = typer.Typer(
    name="mooncake",
    help="Serve large language models with prefill and decode on different nodes around one shared KV-cache pool.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="The configuration and where it comes from.", no_args_is_help=True)
trace_app = typer.Typer(help="Recorded request traces.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(trace_app, name="trace")

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The cluster's TOML file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one value; may be repeated.", show_default=False),
]
Address = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="gRPC address of the cluster.", show_default="from the configuration")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed gives the same answer.", show_default="random")]
Stop = Annotated[list[str] | None, typer.Option(help="Text to stop at; may be repeated.", show_default=False)]
System = Annotated[str, typer.Option(help="A system message.", show_default=False)]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this probability.")]


def _preset(context: typer.Context, name: str) -> str:
    """``help`` is an answer of its own, whatever else is missing."""
    if name == "help" and not context.resilient_parsing:  # which completion is
        from mooncake.app.simulate import list_presets

        list_presets()
        raise typer.Exit
    return name


Preset = Annotated[
    str,
    typer.Option(
        help="A described cluster; --preset help lists them.", show_default=False, is_eager=True, callback=_preset
    ),
]

BENCHES = {
    "chunked": "mooncake.app.bench_chunked",
    "conductor": "mooncake.app.bench_conductor",
    "engine": "mooncake.app.bench_engine",
    "gpu": "mooncake.app.bench_gpu",
    "layout": "mooncake.app.bench_layout",
    "quality": "mooncake.app.bench_quality",
    "rdma": "mooncake.app.bench_rdma",
    "serve": "mooncake.app.bench_serve",
    "ssd": "mooncake.app.bench_ssd",
    "store": "mooncake.app.bench_store",
    "speculation": "mooncake.app.bench_speculation",
    "transfer": "mooncake.app.bench_transfer",
}


@app.command()
def serve(
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="A folder, a .gguf file, or smollm2.", show_default="from the configuration")
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="Prefill nodes.", show_default="1")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Decode nodes.", show_default="1")] = None,
    http_port: Annotated[int | None, typer.Option(help="OpenAI HTTP; 0: any.", show_default="8000")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC; 0: any.", show_default="50051")] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="A LoRA adapter of PEFT; may be repeated.", show_default=False),
    ] = None,
    restart: Annotated[bool, typer.Option(help="Start a process that died again.")] = True,
    ray: Annotated[bool, typer.Option("--ray", help="Start the nodes as Ray actors.")] = False,
    log_level: Annotated[str, typer.Option(help="Of the nodes: DEBUG, INFO, WARNING or ERROR.")] = "WARNING",
) -> None:
    """Start a cluster on this machine and keep it until Ctrl-C."""
    flags = {
        "model.path": model,
        "cluster.prefill": prefill,
        "cluster.decode": decode,
        "conductor.http_port": http_port,
        "conductor.grpc_port": grpc_port,
        "model.adapters": lora,
    }
    settings = _load(config, overrides, flags)
    if log_level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"--log-level must be DEBUG, INFO, WARNING or ERROR, got {log_level!r}")
    from mooncake.app.role_main import run_async
    from mooncake.app.serve import serve as serve_here
    from mooncake.app.serve import serve_on_ray

    run_async(serve_on_ray(settings, log_level) if ray else serve_here(settings, restart, log_level))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    config: ConfigFile = None,
    overrides: Overrides = None,
    address: Address = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: System = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the whole answer.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Ask once and stream the answer; then its TTFT, speed and reused tokens."""
    from mooncake.app.talk import TalkOptions
    from mooncake.app.talk import generate as generate_once

    options = TalkOptions(
        _address(address, config, overrides),
        _sampling(max_tokens, temperature, top_p, seed),
        tuple(stop or ()),
        system,
        timeout_s,
    )
    generate_once(sys.stdin.read() if prompt == "-" else prompt, options, raw, as_json)


@app.command()
def chat(
    config: ConfigFile = None,
    overrides: Overrides = None,
    address: Address = "",
    system: System = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """A conversation in which each turn reuses the blocks of the turns before."""
    from mooncake.app.talk import TalkOptions
    from mooncake.app.talk import chat as converse

    sampling = _sampling(max_tokens, temperature, top_p, seed)
    converse(TalkOptions(_address(address, config, overrides), sampling, tuple(stop or ()), system))


@app.command()
def status(
    config: ConfigFile = None, overrides: Overrides = None, address: Address = "", as_json: AsJson = False
) -> None:
    """The nodes of a running cluster, their load, and what was reused."""
    from mooncake.app.show import show_status

    show_status(_address(address, config, overrides), as_json)


@app.command()
def role(
    node: Annotated[str, typer.Argument(help="A node of `mooncake status`.", show_default=False)],
    to: Annotated[str, typer.Argument(metavar="prefill|decode", show_default=False)],
    config: ConfigFile = None,
    overrides: Overrides = None,
    address: Address = "",
) -> None:
    """Make a prefill node a decode node, or the other way (for nodes started with cluster.switchable)."""
    from mooncake.app.show import switch_role

    switch_role(_address(address, config, overrides), node, to)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL, plain, .xz or .gz.", show_default=False)],
    config: ConfigFile = None,
    overrides: Overrides = None,
    address: Address = "",
    speed: Annotated[float, typer.Option(min=0.0, help="Trace seconds played in one; 0: as fast as it goes.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.", show_default="all")] = None,
    tokens_per_block: Annotated[
        int, typer.Option(min=1, max=512, help="Tokens for each of the trace's blocks of 512.")
    ] = 16,
    max_output: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer.", show_default="as recorded, scaled")
    ] = None,
    jitter_ms: Annotated[float, typer.Option(min=0.0, help="Spread arrivals by up to this much trace time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Most requests in flight.")] = 64,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Of one request.")] = 300.0,
    ttft_slo_ms: Annotated[float, typer.Option(min=0.0, help="Limit on TTFT, for goodput.")] = math.inf,
    tbt_slo_ms: Annotated[
        float, typer.Option(min=0.0, help="Limit on the mean of the longest tenth of gaps, for goodput.")
    ] = math.inf,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every request.", show_default=False)] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw PNG files.", show_default=False)] = None,
) -> None:
    """Play a recorded trace against a running cluster and report what its clients would see."""
    from mooncake.app.latency import SLO
    from mooncake.app.replay import ReplayOptions
    from mooncake.app.replay_command import ReplayOutput, replay_trace

    options = ReplayOptions(
        tokens_per_block, speed, jitter_ms, seed, concurrency, timeout_s, SLO(ttft_slo_ms, tbt_slo_ms)
    )
    replay_trace(trace, _address(address, config, overrides), limit, max_output, options, ReplayOutput(json, plots))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def calibrate(context: typer.Context) -> None:
    """Measure how long a model's steps take on this machine; --out FILE for the conductor and the simulator."""
    from mooncake.app.calibrate import main as measure

    measure(context.args)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def validate(context: typer.Context) -> None:
    """Play a trace on a live pair of nodes and in the simulator, and compare."""
    from mooncake.app.validate import main as compare

    compare(context.args)


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL or Azure CSV, plain, .xz or .gz.", show_default=False)],
    preset: Preset = "",
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A cluster file of your own (TOML).", show_default=False)
    ] = None,
    policy: Annotated[str, typer.Option(help="Placement policy.", show_default="the cluster's")] = "",
    prefill: Annotated[int | None, typer.Option(min=1, help="Prefill machines.", show_default="the cluster's")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Decode machines.", show_default="the cluster's")] = None,
    admission: Annotated[str, typer.Option(help="How requests are refused.", show_default="the cluster's")] = "",
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    speed: Annotated[float, typer.Option(min=0.01, help="Trace seconds played in one.")] = 1.0,
    jitter_ms: Annotated[float, typer.Option(min=0.0, help="Spread arrivals by up to this much trace time.")] = 3000.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.", show_default="all")] = None,
    resample: Annotated[
        int | None, typer.Option(min=1, help="So many requests, from copies of the trace.", show_default=False)
    ] = None,
    max_output: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer.", show_default="as recorded")
    ] = None,
    tokens_per_block: Annotated[
        int, typer.Option(min=1, max=512, help="Tokens for each of the trace's blocks of 512.")
    ] = 512,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page.", show_default=False)] = None,
    requests: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every request as JSONL.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play a recorded trace on a described cluster in virtual time, with the shipped conductor deciding."""
    from mooncake.app import simulate as command
    from mooncake.app.sim.simulation import Run

    chosen = command.choose_cluster(preset, cluster)
    chosen = command.changed(chosen, policy, admission, prefill, decode)
    run = Run(seed, speed, jitter_ms / 1e3, max_output, tokens_per_block)
    command.simulate(trace, limit, resample, chosen, run, command.Output(as_json, report, requests))


@app.command()
def sweep(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL or Azure CSV, plain, .xz or .gz.", show_default=False)],
    vary: Annotated[str, typer.Option(help="policy, admission, split, nodes, bandwidth, capacity or load.")],
    values: Annotated[str, typer.Option(help="With commas between: 0.5,1,2 or 5:11,8:8 or random,milliseconds.")],
    preset: Preset = "",
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A cluster file of your own (TOML).", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    speed: Annotated[float, typer.Option(min=0.01, help="Trace seconds played in one.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.", show_default="all")] = None,
    max_output: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer.", show_default="as recorded")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a trace again and again with one thing varied."""
    from mooncake.app.sim.simulation import Run
    from mooncake.app.simulate import choose_cluster
    from mooncake.app.simulate_sweep import sweep as run_all
    from mooncake.app.trace_tools import load_any

    chosen = choose_cluster(preset, cluster)
    setting = chosen, Run(seed, speed, max_output=max_output)
    run_all(load_any(trace, limit), trace.name, setting, vary, values.split(","), as_json, plot)


@app.command()
def reproduce(
    traces: Annotated[Path, typer.Argument(help="The folder with the published traces.", show_default=False)],
    target: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where results and the table go.")] = Path(
        "deploy/reproduction"
    ),
    only: Annotated[list[str] | None, typer.Option(help="Only this experiment; may be repeated.")] = None,
) -> None:
    """The paper's experiments in virtual time, in one table beside the published figures."""
    from mooncake.app.simulate_reproduce import reproduce as run_experiments

    run_experiments(traces, target, only or [])


@app.command()
def demo(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Start a cluster, ask it, ask again with what it remembers, replay a small trace, and show where time went."""
    from mooncake.app.demo import demo as show_demo
    from mooncake.app.role_main import run_async

    run_async(show_demo(_load(config, overrides, {})))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(BENCHES)}.", show_default=False)],
) -> None:
    """Measure: a table, then one line of JSON. Flags after the name go to the benchmark."""
    if name not in BENCHES:
        raise ConfigError(f"no benchmark is called {name!r}; there are: {', '.join(BENCHES)}")
    importlib.import_module(BENCHES[name]).main(context.args)


def _tell_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="The version of this installation.")
    ] = False,
) -> None: ...


@app.command()
def version() -> None:
    """The version of this installation."""
    import platform
    from importlib.metadata import version as installed

    typer.echo(f"mooncake {installed('mooncake-cluster')} (Python {platform.python_version()})")


@app.command("cache-lab")
def cache_lab(
    traces: Annotated[list[Path], typer.Argument(help="Mooncake JSONL, plain, .xz or .gz.", show_default=False)],
    capacity: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Blocks in the cache; may be repeated.", show_default="1000 to 50000, in five steps"),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only this policy; may be repeated.", show_default="all")
    ] = None,
    rules: Annotated[
        str,
        typer.Option(
            help="pool: as our pool evicts; tail-first, head-first: as two published analyses count, which touch a "
            "prompt's last or first block first (deploy/reproduction/eviction.md)."
        ),
    ] = "pool",
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.", show_default="all")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw PNG files.", show_default=False)] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="All rules, beside what was published, as Markdown.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Hit rate against capacity for every eviction policy, on recorded traces."""
    from mooncake.app.cache_lab import CAPACITIES, LAB_POLICIES, Rules
    from mooncake.app.cache_lab_command import LabOptions, write_report
    from mooncake.app.cache_lab_command import cache_lab as compare

    if rules not in tuple(Rules):
        raise ConfigError(f"--rules must be one of {', '.join(Rules)}, got {rules!r}")
    sizes = tuple(capacity or CAPACITIES)
    options = LabOptions(tuple(policy or LAB_POLICIES), sizes, Rules(rules), jobs, limit, plots, as_json)
    if report is not None:
        write_report(report, traces, options)
    else:
        compare(traces, options)


@config_app.command("show")
def config_show(
    config: ConfigFile = None,
    overrides: Overrides = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value came from.")] = False,
    as_json: AsJson = False,
) -> None:
    """Every value that a cluster would start with."""
    from mooncake.app.show import show_config

    show_config(config, overrides or [], origin, as_json)


@trace_app.command("stats")
def trace_stats(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL, plain, .xz or .gz.", show_default=False)],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.", show_default="all")] = None,
    as_json: AsJson = False,
) -> None:
    """Lengths, rates, and the hit rates of LRU caches of several sizes."""
    from mooncake.app.show import show_trace

    show_trace(trace, limit, as_json)


@trace_app.command("scale")
def trace_scale(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL or Azure CSV, plain, .xz or .gz.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="Where to write; .xz and .gz compress.", show_default=False)],
    requests: Annotated[
        int | None, typer.Option(min=1, help="So many, from copies with users of their own.", show_default="as many")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Make it so much faster.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of when each copy begins.")] = 0,
) -> None:
    """The same trace with more requests, or faster."""
    from mooncake.app.trace_tools import scale_trace

    scale_trace(trace, target, requests, speed, seed)


@trace_app.command("generate")
def trace_generate(
    target: Annotated[Path, typer.Argument(help="Where to write; .xz and .gz compress.", show_default=False)],
    shape: Annotated[str, typer.Option(help="conversation or toolagent: measured on the published traces.")],
    requests: Annotated[int | None, typer.Option(min=1, help="How many.", show_default="as published")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same trace.")] = 0,
) -> None:
    """A trace of a published one's measured shape: lengths, arrivals, and what was there before."""
    from mooncake.app.trace_tools import generate_trace

    generate_trace(shape, target, requests, seed)


def _load(path: Path | None, overrides: list[str] | None, flags: Mapping[str, str | int | list[str] | None]) -> Config:
    """Flags win over --set, --set over the file, the file over the defaults."""
    given = [f"{name}={json_text(value)}" for name, value in flags.items() if value is not None]
    return load_config(path, [*(overrides or []), *given])


def _address(address: str, path: Path | None, overrides: list[str] | None) -> str:
    from mooncake.rpc.server import check_address

    return check_address(address or _load(path, overrides, {}).conductor_address)


def _sampling(max_tokens: int, temperature: float, top_p: float, seed: int | None) -> SamplingParams:
    """The client sends a whole SamplingParams, so a seed that was not given is drawn here."""
    from mooncake.types import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=secrets.randbits(63) if seed is None else seed,
    )


def exit_code(error: MooncakeError) -> int:
    if isinstance(error, MissingDependency):
        return 3
    if isinstance(error, Cancelled):
        return 130
    return 2 if isinstance(error, (ConfigError, CallerError)) else 1


def main() -> None:
    """The console script. Whatever a user can cause is one sentence on stderr, never a traceback."""
    try:
        app()
    except MooncakeError as error:
        sys.stderr.write(f"mooncake: {error.message}\n")
        raise SystemExit(exit_code(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
