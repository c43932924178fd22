"""``mooncake load``: its flags. Those of vLLM's ``bench serve`` are taken, too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from mooncake.app.cli.config import ConfigFile, HttpAddress, Overrides, http_url_of
from mooncake.app.cli.traces import AsJson, Speed, TokensPerBlock
from mooncake.app.outputs import writable, writable_folder
from mooncake.errors import ConfigError

BACK_TO_BACK = 64  # requests in flight, where one is sent as soon as another ends
MOST_IN_FLIGHT = 4096


def load(
    config: ConfigFile = None,
    overrides: Overrides = None,
    address: HttpAddress = "",
    model: Annotated[str, typer.Option(metavar="NAME", help="What requests name.", show_default="the first one")] = "",
    rate: Annotated[
        float,
        typer.Option(
            "--rate",
            "--request-rate",
            min=0.001,
            help="Requests a second, at random times.",
            show_default="as fast as --concurrency allows",
        ),
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(
            min=0.01, help="Of their times, the shape of gamma-distributed gaps: 1 is Poisson, less comes in bursts."
        ),
    ] = 1.0,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "--max-concurrency",
            min=1,
            max=MOST_IN_FLIGHT,
            help="Maximum requests in flight.",
            show_default=f"{BACK_TO_BACK}, or {MOST_IN_FLIGHT} where requests have times",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", "--num-prompts", min=1, help="Requests.", show_default="100, or all of a file"),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", "--random-input-len", min=1, max=1 << 20, help="Length of prompts.")
    ] = 512,
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", "--random-output-len", min=1, max=1 << 20, help="Length of answers.")
    ] = 128,
    spread: Annotated[
        float,
        typer.Option("--spread", "--random-range-ratio", min=0.0, max=1.0, help="Share by which both lengths vary."),
    ] = 0.0,
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", min=0, help="Of each prompt, the first so many are those of all.")
    ] = 0,
    vocabulary: Annotated[
        int, typer.Option(min=64, help="Token ids of random prompts and of traces are below it.")
    ] = 10_000,
    chat: Annotated[
        bool, typer.Option("--chat", help="Random prompts are messages, of so many words; others are token ids.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='Lines of {"prompt": …} or {"messages": …} to send instead.', show_default=False
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Mooncake trace to play instead.", show_default=False)
    ] = None,
    speed: Speed = 1.0,
    tokens_per_block: TokensPerBlock = 16,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Send only fields of OpenAI's own API: answers may be shorter than asked for."),
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Timeout of one request.")] = 300.0,
    ttft_slo_ms: Annotated[float, typer.Option(min=0.0, help="Limit on TTFT, for goodput.")] = math.inf,
    tbt_slo_ms: Annotated[
        float, typer.Option(min=0.0, help="Limit on the mean of the longest tenth of gaps, for goodput.")
    ] = math.inf,
    total_slo_ms: Annotated[float, typer.Option(min=0.0, help="Limit on a whole answer, for goodput.")] = math.inf,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    requests: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write every request.", show_default=False, callback=writable),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw PNG files.", show_default=False, callback=writable_folder),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put any OpenAI server under load. The report is what its clients would see."""
    from mooncake.app.latency import SLO
    from mooncake.app.load.command import LoadOptions, LoadOutput
    from mooncake.app.load.command import load as run
    from mooncake.app.load.requests import Shape

    if prompts is not None and trace is not None:
        raise ConfigError("--prompts and --trace both say what is sent: give one of them")
    if trace is not None and math.isfinite(rate):
        raise ConfigError("a trace has times of its own: --speed changes them, --rate does not go with it")
    if chat and (prompts is not None or trace is not None):
        raise ConfigError("--chat is for random prompts: lines of a file say what they are, and a trace is token ids")
    if burstiness != 1.0 and not math.isfinite(rate):
        raise ConfigError("--burstiness says how the times of --rate vary: give a rate, too")
    is_timed = trace is not None or math.isfinite(rate)
    options = LoadOptions(
        model,
        rate,
        burstiness,
        concurrency or (MOST_IN_FLIGHT if is_timed else BACK_TO_BACK),
        count,
        Shape(prompt_tokens, answer_tokens, prefix_tokens, spread, vocabulary, chat),
        prompts,
        trace,
        speed,
        tokens_per_block,
        plain,
        timeout_s,
        SLO(ttft_slo_ms, tbt_slo_ms, total_slo_ms),
        seed,
    )
    run(http_url_of(address, config, overrides), options, LoadOutput(as_json, requests, plots))
