"""The command line: names, flags and exit codes. Each command is in its own module, imported when it runs, so that
``mooncake --help`` answers at once.

Exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 a missing dependency, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import os
import sys
from collections.abc import Mapping
from json import dumps as json_text  # JSON strings and numbers are also valid TOML
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooncake.api_keys import API_KEY_ENV
from mooncake.app.cli_traces import AsJson, JitterMs, Limit, TokensPerBlock, TraceFile
from mooncake.app.cli_traces import app as traces_app
from mooncake.app.extras import MissingDependency
from mooncake.app.outputs import writable, writable_folder
from mooncake.config import Config, load_config
from mooncake.errors import CallerError, Cancelled, ConfigError, MooncakeError

if TYPE_CHECKING:
    from mooncake.types import SamplingParams

# Errors of output: the disk is full, the file size limit is reached, the terminal or the reader of a pipe is gone.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE}

app = typer.Typer(
    name="mooncake",
    help="Serve large language models with prefill and decode on different nodes around one shared KV-cache pool.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="The configuration and where it comes from.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(traces_app)
variants_app = typer.Typer(help="Models that read each other's KV.", no_args_is_help=True)
app.add_typer(variants_app, name="variants")

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
MaxTokens = Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")]
Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same answer; 0: random.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text to stop at; may be repeated.", show_default=False)]
System = Annotated[str, typer.Option(help="A system message.", show_default=False)]
Adapter = Annotated[
    str, typer.Option("--model", metavar="NAME", help="An adapter of --lora.", show_default="the model itself")
]
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


@app.command()
def serve(
    named_model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="A folder, a .gguf file, or smollm2.", show_default="from the configuration")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, or auto, the faster one here.", show_default="float32")
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=1, help="Prefill nodes.", show_default="1")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Decode nodes.", show_default="1")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its name for clients.", show_default="the model's own")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of prompt plus answer.", show_default="the model's own")
    ] = None,
    generation_config: Annotated[
        str | None,
        typer.Option(metavar="auto|none", help="Sampling defaults: the model's own, or none.", show_default="auto"),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="How thoughts are separated from answers; vLLM's names.", show_default="auto"
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="How tool calls are parsed; vLLM's names.", show_default="auto"),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    http_port: Annotated[
        int | None, typer.Option("--http-port", "--port", help="OpenAI HTTP; 0: any.", show_default="8000")
    ] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC; 0: any.", show_default="50051")] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="A PEFT LoRA adapter; may be repeated.", show_default=False),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="A key that callers send; may be repeated. MOONCAKE_API_KEY and conductor.api_keys keep it out of ps.",
            show_default=False,
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin of web pages that may call (CORS), or *; may be repeated.",
            show_default=False,
        ),
    ] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Certificate for HTTPS and gRPC over TLS.")
    ] = None,
    ssl_keyfile: Annotated[str | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    ssl_ca_certs: Annotated[str | None, typer.Option(metavar="FILE", help="The CA of client certificates.")] = None,
    ssl_cert_reqs: Annotated[
        int | None, typer.Option(min=0, max=2, help="Client certificates: 0 none, 1 optional, 2 required.")
    ] = None,
    restart: Annotated[bool, typer.Option(help="Restart processes that died.")] = True,
    ray: Annotated[bool, typer.Option("--ray", help="Start the nodes as Ray actors.")] = False,
    log_level: Annotated[str, typer.Option(help="Log level of the nodes: DEBUG, INFO, WARNING or ERROR.")] = "WARNING",
) -> None:
    """Start a cluster on this machine and keep it until Ctrl-C. `mooncake config show` lists what --set can set."""
    if named_model and model and named_model != model:
        raise ConfigError(f"got two models, {named_model} and {model}: a cluster serves one")
    flags = {
        "model.path": named_model or model,
        "model.dtype": dtype,
        "model.name": served_model_name,
        "model.max_model_len": max_model_len,
        "model.generation_config": generation_config,
        "conductor.reasoning_parser": reasoning_parser,
        "conductor.tool_call_parser": tool_call_parser,
        "conductor.host": host,
        "conductor.allowed_origins": allowed_origin,
        "cluster.prefill": prefill,
        "cluster.decode": decode,
        "conductor.http_port": http_port,
        "conductor.grpc_port": grpc_port,
        "model.adapters": lora,
        "conductor.api_keys": api_key,
        "conductor.ssl_certfile": ssl_certfile,
        "conductor.ssl_keyfile": ssl_keyfile,
        "conductor.ssl_ca_certs": ssl_ca_certs,
        "conductor.ssl_cert_reqs": ssl_cert_reqs,
    }
    settings = _load(config, overrides, flags)
    log_level = log_level.upper()
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
        _address(address, config, overrides),
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
    converse(TalkOptions(_address(address, config, overrides), sampling, tuple(stop or ()), system, model=model))


@app.command()
def status(
    config: ConfigFile = None, overrides: Overrides = None, address: Address = "", as_json: AsJson = False
) -> None:
    """Show a running cluster: nodes, load, reused tokens."""
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
    """Make a prefill node a decode node, or the reverse. Needs nodes started with cluster.switchable."""
    from mooncake.app.switch import switch_role

    switch_role(_address(address, config, overrides), node, to)


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
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every request.", show_default=False, callback=writable)
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw PNG files.", show_default=False, callback=writable_folder),
    ] = None,
) -> None:
    """Play a recorded trace against a running cluster. The report is what its clients would see."""
    from mooncake.app.latency import SLO
    from mooncake.app.replay import ReplayOptions
    from mooncake.app.replay_command import ReplayOutput, replay_trace

    options = ReplayOptions(
        tokens_per_block, speed, jitter_ms, seed, concurrency, timeout_s, SLO(ttft_slo_ms, tbt_slo_ms)
    )
    replay_trace(trace, _address(address, config, overrides), limit, max_output, options, ReplayOutput(json, plots))


@app.command(context_settings=_PASS_FLAGS_ON)
def calibrate(context: typer.Context) -> None:
    """Measure how long a model's steps take on this machine."""
    from mooncake.app.calibrate import main as measure

    measure(context.args)


@app.command("key-scales")
def key_scales(
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")],
    model: Annotated[str, typer.Option(help="A folder, a .gguf file, or smollm2.")] = "smollm2",
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
    sender: Annotated[str, typer.Argument(help="Model whose KV is read: a folder, a .gguf file, or smollm2.")],
    receiver: Annotated[str, typer.Argument(help="Model that reads it.")],
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
    from mooncake.app.variant_profile import ProfileOptions, profile

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
    from mooncake.app.validate import main as compare

    compare(context.args)


@app.command()
def demo(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Start a cluster, ask it twice, and replay a small trace."""
    from mooncake.app.demo import demo as show_demo
    from mooncake.app.role_main import run_async

    any_ports = ["conductor.http_port=0", "conductor.grpc_port=0"]  # another cluster may be running
    run_async(show_demo(_load(config, [*any_ports, *(overrides or [])], {})))


@app.command(context_settings=_PASS_FLAGS_ON)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)] = "",
) -> None:
    """Run a benchmark: a table, then one line of JSON."""
    if name in ("", "-h", "--help"):
        typer.echo("Usage: mooncake bench NAME [OPTIONS]; mooncake bench NAME --help lists its options\n")
        typer.echo("\n".join(f"  {each:<12} {what}" for each, what in BENCHES.items()))
        raise typer.Exit(0 if name else 2)
    if name not in BENCHES:
        raise ConfigError(f"no benchmark is called {name!r}; there are: {', '.join(BENCHES)}")
    importlib.import_module(f"mooncake.app.bench_{name}").main(context.args)


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
    as_json: AsJson = False,
) -> None:
    """Show every value that a cluster would start with."""
    from mooncake.app.show import show_config

    show_config(config, overrides or [], origin, as_json)


def _load(path: Path | None, overrides: list[str] | None, flags: Mapping[str, str | int | list[str] | None]) -> Config:
    """Flags win over --set, --set over the file, the file over the defaults."""
    given = [f"{name}={json_text(value)}" for name, value in flags.items() if value is not None]
    config = load_config(path, [*(overrides or []), *given])
    if config.conductor.api_key:
        os.environ[API_KEY_ENV] = config.conductor.api_key  # clients read it there
    if config.conductor.ssl_certfile or config.node.ssl_ca_certs:
        from mooncake.tls import tls_of  # imports gRPC

        if tls := tls_of(config):
            os.environ.update(tls.environment())
    return config


def _address(address: str, path: Path | None, overrides: list[str] | None) -> str:
    from mooncake.rpc.server import check_address

    settings = _load(path, overrides, {})  # also with an address: the configuration may have the API key
    return check_address(address or settings.conductor_address)


def _sampling(max_tokens: int, temperature: float, top_p: float, seed: int) -> SamplingParams:
    from mooncake.types import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)


def exit_code(error: MooncakeError) -> int:
    if isinstance(error, MissingDependency):
        return 3
    if isinstance(error, Cancelled):
        return 130
    return 2 if isinstance(error, (ConfigError, CallerError)) else 1


def main() -> None:
    """The console script. User errors are one sentence on stderr, never a traceback."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # while an error can still be reported
    except MooncakeError as error:
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
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
