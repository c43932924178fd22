"""The command line: names, flags and exit codes. Each command is in its own module, imported when it runs, so that
``mooncake --help`` answers at once.

Exit codes: 0 ok, 1 failed, 2 usage, configuration or model, 3 a missing dependency, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooncake.app.cli.adapters import app as adapters_app
from mooncake.app.cli.commands import Commands
from mooncake.app.cli.config import Address, ConfigFile, HttpAddress, Overrides, address_of, http_url_of, load
from mooncake.app.cli.foreign_flags import refuse_foreign_flags
from mooncake.app.cli.load import load as load_command
from mooncake.app.cli.serve import KINDS_OF_MODEL, serve
from mooncake.app.cli.traces import AsJson, JitterMs, Limit, TokensPerBlock, TraceFile
from mooncake.app.cli.traces import app as traces_app
from mooncake.app.extras import MissingDependency
from mooncake.app.outputs import writable, writable_folder
from mooncake.errors import CallerError, Cancelled, ConfigError, ModelError, MooncakeError

if TYPE_CHECKING:
    from mooncake.sampling_params import SamplingParams

# Errors of output: the disk is full, the file size limit is reached, the terminal or the reader of a pipe is gone.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE}

app = Commands(
    name="mooncake",
    help="Serve large language models with prefill and decode on different nodes around one shared KV-cache pool.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = Commands(help="The configuration and where it comes from.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(traces_app)
app.add_typer(adapters_app, name="adapters")
variants_app = Commands(help="Models that read each other's KV.", no_args_is_help=True)
app.add_typer(variants_app, name="variants")

MaxTokens = Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")]
Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same answer; 0: random.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Text to stop at; may be repeated.", show_default=False)
]
System = Annotated[str, typer.Option(help="A system message.", show_default=False)]
Adapter = Annotated[str, typer.Option("--model", metavar="NAME", help="An adapter.", show_default="the model itself")]
TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens that make up this probability.")]

# their flags, including --help, are parsed by the command's module
_PASS_FLAGS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
BENCHES = {
    "blend": "prompts blended from cached chunks, compared with full prefill",
    "character": "windows, shared KV and one KV head: quality, bytes, time of prompts",
    "chunked": "running answers while a long prompt arrives",
    "conductor": "placement decisions a second, memory of the prefix index",
    "context": "a long prompt over several processes, compared with one",
    "engine": "one engine against this machine's limits and other engines",
    "gpu": "GPU kernels against the limits of the card",
    "http": "OpenAI servers under load: a cluster, a coupled node, vLLM's server",
    "layout": "KV read into another layout",
    "pipeline": "prompts through pipeline stages, compared with one process",
    "quality": "what narrow formats cost in perplexity",
    "rdma": "one-sided writes and reads, compared with perftest",
    "serve": "a cluster as its clients see it, compared with one engine",
    "speculation": "answers with and without guesses",
    "ssd": "the SSD tier, compared with fio",
    "store": "the pool's put, get and exists, compared with Mooncake's store",
    "transfer": "the data plane, compared with Mooncake's transfer engine",
    "variants": "KV of a model's variant, read instead of a full prefill",
}


app.command()(serve)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to ask; - reads it from standard input.")],
    config: ConfigFile = None,
    overrides: Overrides = None,
    address: Address = "",
    model: Adapter = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text directly, without the chat template.")] = False,
    system: System = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="Seconds to wait for the whole answer.", show_default="the cluster's limit for a request"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask once and stream the answer. TTFT, speed and reused tokens follow."""
    from mooncake.app.talk import TalkOptions
    from mooncake.app.talk import generate as generate_once

    options = TalkOptions(
        address_of(address, config, overrides),
        _sampling(max_tokens, temperature, top_p, seed),
        tuple(stop or ()),
        system,
        timeout_s,
        model,
    )
    generate_once(sys.stdin.read() if prompt == "-" else prompt, options, raw, as_json)


@app.command()
def chat(
    config: ConfigFile = None,
    overrides: Overrides = None,
    address: Address = "",
    model: Adapter = "",
    system: System = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    stop: Stop = None,
) -> None:
    """Chat in turns; each turn reuses the blocks of those before."""
    from mooncake.app.talk import TalkOptions
    from mooncake.app.talk import chat as converse

    sampling = _sampling(max_tokens, temperature, top_p, seed)
    converse(TalkOptions(address_of(address, config, overrides), sampling, tuple(stop or ()), system, model=model))


@app.command()
def status(
    config: ConfigFile = None, overrides: Overrides = None, address: Address = "", as_json: AsJson = False
) -> None:
    """Show a running cluster: nodes, load, reused tokens."""
    from mooncake.app.show import show_status

    show_status(address_of(address, config, overrides), as_json)


@app.command()
def role(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node of `mooncake status`.", show_default=False)],
    to: Annotated[str, typer.Argument(metavar="prefill|decode", show_default=False)],
    config: ConfigFile = None,
    overrides: Overrides = None,
    address: Address = "",
) -> None:
    """Make a prefill node a decode node, or the reverse. Needs nodes started with cluster.switchable."""
    from mooncake.app.switch import switch_role

    switch_role(address_of(address, config, overrides), node, to)


@app.command()
def replay(
    trace: TraceFile,
    config: ConfigFile = None,
    overrides: Overrides = None,
    address: Address = "",
    speed: Annotated[float, typer.Option(min=0.0, help="Trace seconds per real second; 0: as fast as possible.")] = 1.0,
    limit: Limit = None,
    tokens_per_block: TokensPerBlock = 16,
    max_output: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens per answer.", show_default="as recorded, scaled")
    ] = None,
    jitter_ms: JitterMs = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the jitter.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Maximum requests in flight.")] = 64,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Timeout of one request.")] = 300.0,
    ttft_slo_ms: Annotated[float, typer.Option(min=0.0, help="Limit on TTFT, for goodput.")] = math.inf,
    tbt_slo_ms: Annotated[
        float, typer.Option(min=0.0, help="Limit on the mean of the longest tenth of gaps, for goodput.")
    ] = math.inf,
    requests: Annotated[
        Path | None,
        typer.Option(
            "--requests", "--json", metavar="FILE", help="Write every request.", show_default=False, callback=writable
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw PNG files.", show_default=False, callback=writable_folder),
    ] = None,
) -> None:
    """Play a recorded trace against a running cluster. The report is what its clients would see."""
    from mooncake.app.latency import SLO
    from mooncake.app.traces.replay import ReplayOptions
    from mooncake.app.traces.replay_command import ReplayOutput, replay_trace

    options = ReplayOptions(
        tokens_per_block, speed, jitter_ms, seed, concurrency, timeout_s, SLO(ttft_slo_ms, tbt_slo_ms)
    )
    replay_trace(
        trace, address_of(address, config, overrides), limit, max_output, options, ReplayOutput(requests, plots)
    )


app.command("load")(load_command)


@app.command("run-batch")
def run_batch(
    input_file: Annotated[Path, typer.Option("-i", "--input-file", metavar="FILE", help="A request a line.")],
    output_file: Annotated[
        Path, typer.Option("-o", "--output-file", metavar="FILE", help="A result a line.", callback=writable)
    ],
    config: ConfigFile = None,
    overrides: Overrides = None,
    address: HttpAddress = "",
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Maximum requests in flight.")] = 32,
) -> None:
    """Answer a file of requests in OpenAI's batch format."""
    from mooncake.app.run_batch import run_batch as run

    if not run(input_file, output_file, http_url_of(address, config, overrides), concurrency):
        raise typer.Exit(1)


@app.command(context_settings=_PASS_FLAGS_ON)
def calibrate(context: typer.Context) -> None:
    """Measure how long a model's steps take on this machine."""
    from mooncake.app.sim.commands.calibrate import main as measure

    measure(context.args)


@app.command("key-scales")
def key_scales(
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")],
    model: Annotated[str, typer.Option(help=f"{KINDS_OF_MODEL}.")] = "smollm2",
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to measure on.", show_default="a module of Python's own")
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, max=8192, help="Tokens of the text to use.")] = 512,
) -> None:
    """Measure factors for the channels of int8 keys."""
    from mooncake.app.key_scales import ScaleOptions, measure

    measure(ScaleOptions(model, out, text, tokens))


@variants_app.command("profile")
def profile_variants(
    sender: Annotated[str, typer.Argument(metavar="SENDER", help=f"Model whose KV is read. {KINDS_OF_MODEL}.")],
    receiver: Annotated[str, typer.Argument(metavar="RECEIVER", help="Model that reads it.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write the profile to.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='Lines of {"prompt", "answer"} to compare on.', show_default="text of Python's own"
        ),
    ] = None,
    keep: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share to recover of the quality lost when all KV is read.")
    ] = 0.9,
    most_layers: Annotated[int, typer.Option(min=0, help="Maximum layers of a group; 0: half of the model's.")] = 0,
    stride: Annotated[int, typer.Option(min=1, help="Step between the first layers, and sizes, of groups.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, as both are served.")] = "float32",
    block_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Same as block.tokens.")] = 64,
) -> None:
    """Find the layers to recompute when a model reads a variant's KV."""
    from mooncake.app.variants.profile import ProfileOptions, profile

    profile(
        ProfileOptions(
            sender,
            receiver,
            out,
            prompts=prompts,
            keep=keep,
            most_layers=most_layers,
            stride=stride,
            dtype=dtype,
            block_tokens=block_tokens,
        )
    )


@app.command(context_settings=_PASS_FLAGS_ON)
def validate(context: typer.Context) -> None:
    """Play a trace live and in the simulator, and compare."""
    from mooncake.app.sim.commands.validate import main as compare

    compare(context.args)


@app.command()
def demo(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Start a cluster, ask it twice, and replay a small trace."""
    from mooncake.app.cluster.role_main import run_async
    from mooncake.app.demo import demo as show_demo

    any_ports = ["conductor.http_port=0", "conductor.grpc_port=0"]  # another cluster may be running
    run_async(show_demo(load(config, [*any_ports, *(overrides or [])], {})))


@app.command(context_settings=_PASS_FLAGS_ON)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)] = "",
) -> None:
    """Run a benchmark: a table, then one line of JSON."""
    if name in ("", "-h", "--help"):
        typer.echo("Usage: mooncake bench NAME [OPTIONS]; mooncake bench NAME --help lists its options\n")
        typer.echo("\n".join(f"  {each:<12} {what}" for each, what in BENCHES.items()))
        typer.echo("\nmooncake load measures a server that is running.")
        raise typer.Exit(0 if name else 2)
    if name not in BENCHES:
        raise ConfigError(f"no benchmark is called {name!r}; there are: {', '.join(BENCHES)}")
    importlib.import_module(f"mooncake.app.bench.{name}").main(context.args)


def _tell_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the installed version.")
    ] = False,
) -> None: ...


@app.command()
def version() -> None:
    """Show the installed version."""
    import platform
    from importlib.metadata import version as installed

    typer.echo(f"mooncake {installed('mooncake-cluster')} (Python {platform.python_version()})")


@config_app.command("show")
def config_show(
    config: ConfigFile = None,
    overrides: Overrides = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    as_toml: Annotated[
        bool, typer.Option("--toml", help="Print a file for --config that explains each setting.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show every value that a cluster would start with."""
    from mooncake.app.show import show_config

    if as_toml and (origin or as_json):
        raise ConfigError("--toml goes with neither --origin nor --json")
    show_config(config, overrides or [], origin, as_json, as_toml)


def _sampling(max_tokens: int, temperature: float, top_p: float, seed: int) -> SamplingParams:
    from mooncake.sampling_params import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed or None)


def exit_code(error: MooncakeError) -> int:
    if isinstance(error, MissingDependency):
        return 3
    if isinstance(error, Cancelled):
        return 130
    return 2 if isinstance(error, (ConfigError, ModelError, CallerError)) else 1


def main() -> None:
    """The console script. User errors are one sentence on stderr, never a traceback."""
    try:
        try:
            refuse_foreign_flags("".join(sys.argv[1:2]), sys.argv[2:])
            app()
        finally:
            sys.stdout.flush()  # while an error can still be reported
    except MooncakeError as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"mooncake: {error.message}\n")
        raise SystemExit(exit_code(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at exit
        with contextlib.suppress(OSError):
            sys.stderr.write(f"mooncake: {f'{error.filename}: ' if error.filename else ''}{error.strerror}\n")
        raise SystemExit(getattr(error.__context__, "exit_code", 1)) from None  # of a wrong command line, not told


if __name__ == "__main__":
    main()
