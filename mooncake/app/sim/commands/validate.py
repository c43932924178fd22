"""``mooncake validate``: a live cluster and the simulator play the same scaled trace, and their figures are compared.

One prefill and one decode node, each on its own core, with links slowed to the regime of a real cluster. They are
measured before and after the replay (``calibrate_pair``), described as a cluster file, and simulated. It refuses to run
if the two nodes would share a core, which would not separate them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from rich.markup import escape

from mooncake.app.bench.load.traffic import ServedByCluster, Traffic
from mooncake.app.bench.report import commit, machine, progress, tell
from mooncake.app.cli.flags import Flags, positive
from mooncake.app.cluster.local import LocalCluster
from mooncake.app.cluster.role_main import run_async, unless_stopped
from mooncake.app.console import duration, out, plain_table, print_json, remark
from mooncake.app.extras import require
from mooncake.app.latency import Outcome, Spread
from mooncake.app.load.report import metered
from mooncake.app.outputs import output_folder
from mooncake.app.sim.cluster import Cluster, Machines, Model, StepCurve
from mooncake.app.sim.commands.calibrate_pair import PairCosts, PairSamples
from mooncake.app.sim.output.summary import Summary
from mooncake.app.sim.output.summary import summarize as summarize_simulation
from mooncake.app.sim.requests import Results
from mooncake.app.sim.simulation import Run, Simulation
from mooncake.app.traces.files import load_any
from mooncake.app.traces.replay import Replay, ReplayOptions, ReplayReport
from mooncake.app.traces.shapes import generate
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, load_config
from mooncake.errors import ConfigError, InternalError
from mooncake.trace import TraceRequest, scale

TRACE_TICK_MS = 3000.0  # arrivals in published traces are in ticks; they are spread randomly, with the seed
P50_LIMIT, P99_LIMIT = 0.10, 0.20
Floats = npt.NDArray[np.float64]
SETTINGS = (
    "cluster.prefill=1",
    "cluster.decode=1",
    "cluster.pin=true",
    "prefill.threads=1",
    "decode.threads=1",
    "prefill.chunk_tokens=0",  # a prompt is one step
    "prefill.max_sequences=1",  # one prompt at a time
    "prefill.kv_gb=2.0",
    "decode.kv_gb=2.0",
    "store.dram_gb=1.0",
    "conductor.http_port=0",
    "conductor.grpc_port=0",
)


@dataclass(frozen=True, slots=True)
class Options:
    trace: Path | None
    requests: int
    tokens_per_block: int
    output_per_block: int
    rate_per_s: float
    link_mb_per_s: float
    seed: int
    overrides: tuple[str, ...]
    out: Path | None
    as_json: bool


class Compared(msgspec.Struct, frozen=True):
    """One figure of both in ms, and the simulator's error; ``limit`` 0: no limit."""

    what: str
    live: float
    simulated: float
    limit: float = 0.0

    @property
    def error(self) -> float:
        if not self.live:
            return math.inf if self.simulated else 0.0
        return self.simulated / self.live - 1.0

    @property
    def is_within(self) -> bool:
        return not self.limit or abs(self.error) <= self.limit


def main(args: list[str]) -> None:
    """Raises MooncakeError: a wrong option, too few cores, a cluster that does not start or answer."""
    options = parse(args)
    config = settings(options)
    trace = chosen_trace(options)
    costs, report = run_async(unless_stopped(live(config, options, trace)))
    described = described_cluster(config, costs, options.link_mb_per_s)
    run = Run(seed=options.seed, speed=1.0, jitter_s=0.0, tokens_per_block=options.tokens_per_block)
    simulation = Simulation(described, trace, run)
    simulation.run()
    name = options.trace.name if options.trace else "generated"
    rows = compare(report, summarize_simulation(simulation, name)) + compare_parts(report, simulation.results)
    show(rows, costs)
    line = {
        "validate": name,
        "commit": commit(),
        "machine": machine(),
        "config": {
            "requests": len(trace),
            "rate_per_s": options.rate_per_s,
            "tokens_per_block": options.tokens_per_block,
            "output_per_block": options.output_per_block,
            "link_mb_per_s": options.link_mb_per_s,
        },
        "seed": options.seed,
        "within": all(row.is_within for row in rows),
        "costs": asdict(costs),
        "results": [{**msgspec.to_builtins(row), "error": row.error} for row in rows],
    }
    if options.out is not None:
        write(options.out, line, rows, report, simulation.results)
    if options.as_json:
        print_json(line)


def write(folder: Path, line: dict[str, object], rows: list[Compared], live: ReplayReport, simulated: Results) -> None:
    """Write ``validation.json`` with every request of both, the table, and two plots. Raises MissingDependency."""
    from mooncake.app.plots import write_comparison

    folder.mkdir(parents=True, exist_ok=True)
    ttft_ms, tail_ms = (simulated.ttft_s * 1e3).tolist(), np.nan_to_num(simulated.tail_tbt_ms).tolist()
    requests = [
        {
            "prompt_tokens": result.prompt_tokens,
            "cached_tokens": [result.cached_tokens, int(simulated.cached_tokens[result.index])],
            "output_tokens": result.completion_tokens,
            "ttft_ms": [round(result.ttft_ms, 2), round(ttft_ms[result.index], 2)],
            "tail_tbt_ms": [round(result.tail_tbt_ms, 2), round(tail_ms[result.index], 2)],
        }
        for result in live.results
    ]
    text = msgspec.json.encode({**line, "requests": requests})
    (folder / "validation.json").write_bytes(msgspec.json.format(text, indent=1) + b"\n")
    (folder / "validation.md").write_text(markdown(line, rows))
    with_gaps = [result for result in live.results if result.gaps_ms]
    write_comparison(
        folder / "validation-ttft.png",
        "Time to first token",
        {"live": [result.ttft_ms for result in live.results], "simulated": ttft_ms},
    )
    write_comparison(
        folder / "validation-tbt.png",
        "Mean of the longest tenth of token gaps",
        {
            "live": [result.tail_tbt_ms for result in with_gaps],
            "simulated": [tail_ms[result.index] for result in with_gaps],
        },
    )


def markdown(line: Mapping[str, object], rows: Sequence[Compared]) -> str:
    config = line["config"]
    assert isinstance(config, dict)
    held = [row for row in rows if row.limit]
    within = sum(abs(row.error) <= row.limit for row in held)
    parts = [
        "# The simulator beside a live cluster\n\n",
        f"Made by `mooncake validate` from {line['validate']}, seed {line['seed']}: one prefill and one decode node,\n"
        "each on a core of its own, measured through the running cluster, then replayed and simulated. Every request\n"
        "of both is in `validation.json`. Conductor, store and client run beside them on the same cores.\n\n"
        f"Settings: {', '.join(f'{name} = {value}' for name, value in config.items())}.\n"
        f"The nodes are as the simulator has them, which is not their default: {', '.join(SETTINGS[:-2])}.\n\n"
        f"**{within} of the {len(held)} figures that have a limit are within it.**\n\n",
        "| | live, ms | simulated, ms | error | allowed |\n|---|---|---|---|---|\n",
    ]
    parts += [
        f"| {row.what} | {row.live:.1f} | {row.simulated:.1f} | {row.error:+.1%} | "
        f"{f'{row.limit:.0%}' if row.limit else ''} |\n"
        for row in rows
    ]
    parts.append("\n![TTFT](validation-ttft.png)\n![TBT](validation-tbt.png)\n")
    return "".join(parts)


def parse(args: list[str]) -> Options:
    flags = Flags("validate", __doc__)
    add = flags.add
    add("trace", nargs="?", type=Path, help="Mooncake JSONL or Azure CSV; default: a generated conversation trace")
    add("--requests", type=int, default=240, help="number of requests, from the start of the trace")
    add("--tokens-per-block", type=int, default=8, help="prompt tokens for each of the trace's blocks of 512")
    add("--output-per-block", type=int, default=32, help="the same for answers")
    add("--rate", type=positive("--rate"), default=0.6, help="requests a second")
    add("--link", type=positive("--link"), default=160.0, metavar="MB/S", help="limit on what each node sends")
    flags.seed()
    flags.overrides()
    add("--out", type=output_folder, metavar="DIR", help="write the figures and the plot there")
    flags.json_line()
    given = flags.read(args)
    if min(given.requests, given.tokens_per_block, given.output_per_block) < 1:
        raise ConfigError("--requests, --tokens-per-block and --output-per-block must be positive")
    if given.out is not None:
        require("matplotlib", "plots", "--out")
    return Options(
        given.trace,
        given.requests,
        given.tokens_per_block,
        given.output_per_block,
        given.rate,
        given.link,
        given.seed,
        tuple(given.set),
        given.out,
        given.json,
    )


def settings(options: Options) -> Config:
    own = (f"block.tokens={options.tokens_per_block}", f"transfer.max_mb_per_s={options.link_mb_per_s}")
    return load_config(None, [*SETTINGS, *own, *options.overrides])


def chosen_trace(options: Options) -> list[TraceRequest]:
    """The trace scaled to the model and to the requested mean rate, with arrivals spread over their ticks, in order."""
    found = (
        generate("conversation", options.requests, options.seed)
        if options.trace is None
        else load_any(options.trace, options.requests)
    )
    spread = random.Random(options.seed)
    moved = [(one.timestamp_ms + spread.uniform(0.0, TRACE_TICK_MS), one) for one in found]
    moved.sort(key=lambda pair: pair[0])
    first_ms, last_ms = moved[0][0], moved[-1][0]
    factor = len(moved) / options.rate_per_s * 1e3 / max(last_ms - first_ms, 1.0)
    return [
        replace(
            scale(one, options.tokens_per_block),
            output_length=scale(one, options.output_per_block).output_length,
            timestamp_ms=(at_ms - first_ms) * factor,
        )
        for at_ms, one in moved
    ]


async def live(config: Config, options: Options, trace: list[TraceRequest]) -> tuple[PairCosts, ReplayReport]:
    """Start the cluster, measure its nodes, replay the trace."""
    vocab = open_checkpoint(config.model.path).config.vocab_size
    async with LocalCluster(config, tell=remark) as cluster:
        served = ServedByCluster("cluster", cluster.grpc_address)
        traffic, samples = Traffic(vocab, options.seed), PairSamples()

        async def calibrate(title: str) -> None:
            with progress(title) as shown:
                longest = max(one.input_length for one in trace)
                await samples.measure(served, traffic, longest, lambda what: tell(shown, what))

        remark("ready; its nodes are measured, then the trace is replayed, then they are measured again")
        await calibrate("calibrating")
        replay_options = ReplayOptions(tokens_per_block=options.tokens_per_block, seed=options.seed, concurrency=256)
        with metered("replaying", len(trace)) as add:
            report = await Replay(cluster.grpc_address, replay_options, add).run(trace)
        await calibrate("calibrating once more")
        await served.close()
    bad = [result for result in report.results if result.outcome is not Outcome.OK]
    if bad:
        raise InternalError(f"{len(bad)} of {len(trace)} requests were not answered: {bad[0].error or bad[0].outcome}")
    return samples.costs(), report


def described_cluster(config: Config, costs: PairCosts, link_mb_per_s: float) -> Cluster:
    """The live cluster as a description for the simulator."""
    checkpoint = open_checkpoint(config.model.path)
    layout = checkpoint.kv_layout(config.block.tokens, config.precision().kv_dtype, config.model.keep_hidden)
    token_bytes = layout.block_bytes // config.block.tokens
    prefill, decode = costs.prefill, costs.decode
    curve = StepCurve(
        prefill_step_ms=prefill.step_ms,
        prefill_token_ms=prefill.token_ms,
        prefill_pair_ms=prefill.pair_ms,
        decode_step_ms=decode.step_ms,
        decode_sequence_ms=decode.sequence_ms,
        decode_context_ms=decode.context_ms,
        decode_tail=costs.decode_tail,
        source="mooncake validate",
    )
    link = link_mb_per_s / 1e3

    def tokens(gb: float) -> int:
        return int(gb * 1e9) // token_bytes

    return Cluster(
        name="live pair",
        model=Model(num_layers=layout.num_layers, token_bytes=token_bytes, block_tokens=config.block.tokens),
        curves={"here": curve},
        machines=(
            Machines(
                role="prefill",
                count=1,
                curve="here",
                store_tokens=tokens(config.prefill.kv_gb),
                nic_gb_per_s=link,
                load_gb_per_s=1e6,  # a node reads its own cache in place
                beside=costs.prefill_beside,
            ),
            Machines(
                role="decode",
                count=1,
                curve="here",
                kv_tokens=tokens(config.decode.kv_gb),
                max_sequences=config.decode.max_sequences,
                nic_gb_per_s=link,
                beside=costs.decode_beside,
            ),
        ),
        latency_ms=costs.handoff_ms,
        request_ms=costs.request_ms,
    )


def compare(report: ReplayReport, simulated: Summary) -> list[Compared]:
    live_summary = report.summary
    rows: list[Compared] = []
    pairs: Sequence[tuple[str, Spread, Spread, float]] = (
        ("TTFT", live_summary.ttft_ms, simulated.ttft_s, 1e3),
        ("TBT, longest tenth", live_summary.tail_tbt_ms, simulated.tail_tbt_ms, 1.0),
        ("TBT, mean of gaps", live_summary.mean_tbt_ms, simulated.mean_tbt_ms, 1.0),
    )
    for what, measured, found, factor in pairs:
        rows += [
            Compared(f"{what}, p50", measured.p50, found.p50 * factor, P50_LIMIT),
            Compared(f"{what}, p90", measured.p90, found.p90 * factor),
            Compared(f"{what}, p99", measured.p99, found.p99 * factor, P99_LIMIT),
            Compared(f"{what}, mean", measured.mean, found.mean * factor),
        ]
    return rows


def compare_parts(report: ReplayReport, simulated: Results) -> list[Compared]:
    """Compare the parts of TTFT, the wait for earlier requests and the request's own time, to explain an error."""
    live_s = np.array([(result.sent_s, result.ttft_ms / 1e3) for result in report.results])
    here = parts_ms(live_s[:, 0], live_s[:, 1])
    there = parts_ms(simulated.arrival_s, simulated.ttft_s)
    return [
        Compared(f"{what}, {share}", float(of(measured)), float(of(found)))
        for what, measured, found in zip(("TTFT: waiting", "TTFT: own work"), here, there, strict=True)
        for share, of in (("p50", np.median), ("p99", lambda each: np.quantile(each, 0.99)), ("mean", np.mean))
    ]


def parts_ms(sent_s: Floats, ttft_s: Floats) -> tuple[Floats, Floats]:
    """The two parts of TTFT, in ms, ``[requests]`` each, in order of sending: until the first token of the previous
    request, and from then on. One prefill node with one prompt at a time works only on this request in the second
    part."""
    order = np.argsort(sent_s, kind="stable")
    sent_s, first_s = sent_s[order], (sent_s + ttft_s)[order]
    begins_s = np.maximum(sent_s, np.append(-np.inf, np.maximum.accumulate(first_s)[:-1]))
    begins_s = np.minimum(begins_s, first_s)
    return (begins_s - sent_s) * 1e3, (first_s - begins_s) * 1e3


def show(rows: list[Compared], costs: PairCosts) -> None:
    prefill, decode = costs.prefill, costs.decode
    out.print(
        f"prefill {prefill.step_ms:.1f} + {prefill.token_ms:.3f}·new + {prefill.pair_ms:.2g}·pairs ms, "
        f"{costs.prefill_beside:.2f} times as slow beside decoding\n"
        f"decode {decode.step_ms:.1f} + {decode.sequence_ms:.2f}·batch + {decode.context_ms:.2g}·context ms, "
        f"{costs.decode_beside:.2f} times as slow beside prefill\n"
        f"a request {costs.request_ms:.1f} ms, a hand-off {costs.handoff_ms:.1f} ms beside\n"
    )
    table = plain_table("", "live", "simulated", "error", "allowed")
    for row in rows:
        allowed = f"{row.limit:.0%}" if row.limit else ""
        mark = "" if row.is_within else " !"
        table.add_row(escape(row.what), duration(row.live), duration(row.simulated), f"{row.error:+.1%}{mark}", allowed)
    out.print(table)
