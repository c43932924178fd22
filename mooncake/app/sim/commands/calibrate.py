"""``mooncake calibrate``: a model's step times on this machine, as curves for conductor and simulator.

It runs the engine alone in this process over a grid of sizes, and fits the times with the same fit that the conductor
uses while it serves. It assumes nothing about the machine, and reports how well the curves fit.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.progress import Progress

from conductor.placement.calibration import calibration_toml
from conductor.placement.cost import ALL_NODES, CostModel, StartCosts
from mooncake.app.bench.peers.own import OwnEngine
from mooncake.app.bench.report import machine, progress, tell
from mooncake.app.cli.flags import Flags
from mooncake.app.cluster.preflight import available_cores
from mooncake.app.console import out, plain_table, print_json
from mooncake.app.outputs import output_file
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, load_config
from mooncake.engine.contract import EngineConfig
from mooncake.errors import ConfigError
from mooncake.precision import resolve_precision

PREFILL_TOKENS = (64, 128, 256, 512, 1024)
PREFIX_TOKENS = (0, 256)
BATCHES = (1, 2, 4, 8)
CONTEXTS = (64, 320)
DECODE_STEPS = 6
COPY_BYTES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
KV_GB = 1.0


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement, and the fitted curve's prediction."""

    what: str
    measured_ms: float
    fitted_ms: float = 0.0

    @property
    def error(self) -> float:
        return self.fitted_ms / self.measured_ms - 1.0


def main(args: list[str]) -> None:
    """Raises MooncakeError: a wrong option, a model that cannot be read, a file that cannot be written."""
    flags = Flags("calibrate", __doc__)
    add = flags.add
    flags.model("")  # default: the configuration's model
    flags.overrides()
    add("--name", default="here", help="name of the curve, for the simulator's cluster file")
    flags.threads()
    flags.reps(2)
    add("--max-tokens", type=int, default=512, help="longest prompt measured")
    add("--out", type=output_file, metavar="FILE", help="write the TOML to this file, for conductor.calibration")
    flags.json_line()
    given = flags.read(args)
    if not given.name.replace("-", "").replace("_", "").isalnum() or given.max_tokens < 64:
        raise ConfigError("--name takes letters, digits, - and _; --max-tokens at least 64")
    threads = given.threads or available_cores()
    config = load_config(None, given.set)
    model = given.model or config.model.path
    with progress("calibrating") as shown:
        costs, points = measure(model, config, threads, given.reps, given.max_tokens, shown)
    start = StartCosts(costs.prefill(ALL_NODES), costs.decode(ALL_NODES), costs.transfer_of_all())
    source = f"{model.rsplit('/', 1)[-1]}, {threads} threads, {machine()['cpu']}"
    typical = statistics.median(abs(point.error) for point in points) if points else math.nan
    show(points, typical)
    write(calibration_toml(given.name, start, source.replace('"', "'")), given.out)
    if given.json:
        print_json(to_json(start, points, typical))


def write(text: str, file: Path | None) -> None:
    """Write to the file, or to stdout if there is none. Raises ConfigError."""
    if file is None:
        out.print(text, markup=False, highlight=False)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None


def measure(
    model: str, config: Config, threads: int, reps: int, max_tokens: int, shown: Progress
) -> tuple[CostModel, list[Point]]:
    """The best of ``reps`` at each size: other load on the machine only adds time."""
    tell(shown, "loading the model")
    checkpoint = open_checkpoint(model)
    longest = max(max_tokens + max(PREFIX_TOKENS), max(CONTEXTS)) + DECODE_STEPS + 1
    settings = EngineConfig(
        block_tokens=config.block.tokens, chunk_tokens=0, max_sequences=max(BATCHES), max_model_len=longest
    )
    given = config.model
    precision = resolve_precision(given.dtype, given.kv_dtype, given.weights, stored=checkpoint.coding)
    engine = OwnEngine(checkpoint, precision, threads, settings, KV_GB)
    engine.run([[5] * 8], 2)
    grid = _Grid(engine, checkpoint.config.vocab_size, reps, shown)
    grid.measure_prefills(max_tokens)
    grid.measure_decodes()
    grid.measure_copies()
    return grid.costs, [Point(point.what, point.measured_ms, fitted()) for point, fitted in grid.points]


class _Grid:
    """Measurements of one engine. ``costs`` is fitted to them; ``points`` has each, and what the fit makes of it."""

    def __init__(self, engine: OwnEngine, vocab_size: int, reps: int, shown: Progress) -> None:
        self.costs = CostModel()
        self.points: list[tuple[Point, Callable[[], float]]] = []
        self._engine, self._vocab_size, self._reps, self._shown = engine, vocab_size, reps, shown
        self._rng = np.random.default_rng(0)

    def measure_prefills(self, max_tokens: int) -> None:
        for prefix in PREFIX_TOKENS:
            for tokens in (size for size in PREFILL_TOKENS if size <= max_tokens):
                tell(self._shown, f"prefill of {tokens} tokens behind {prefix}")
                known = self._prompt(prefix)
                if prefix:
                    self._engine.run([known], 1)
                ms = 1e3 * min(self._engine.run([known + self._prompt(tokens)], 1) for _ in range(self._reps))
                self.costs.observe_prefill(ALL_NODES, tokens, prefix, ms)
                point = Point(f"prefill {tokens} behind {prefix}", ms)
                self.points.append((point, partial(self._prefill_ms, tokens, prefix)))

    def measure_decodes(self) -> None:
        for context in CONTEXTS:
            prompts = [self._prompt(context) for _ in range(max(BATCHES))]
            for batch in BATCHES:
                tell(self._shown, f"decode of {batch} sequences of {context} tokens")
                self._engine.run(prompts[:batch], DECODE_STEPS)  # the shorter batches' prompts are cached
                steps = [1e3 * step.step_s for step in self._engine.decode_steps(batch)]
                if not steps:
                    continue
                ms, total = min(steps), batch * (context + DECODE_STEPS // 2)
                self.costs.observe_decode(ALL_NODES, batch, total, ms)
                self.points.append((Point(f"decode {batch} x {context}", ms), partial(self._decode_ms, batch, total)))

    def measure_copies(self) -> None:
        tell(self._shown, "copying")
        for size in COPY_BYTES:
            self.costs.observe_transfer(ALL_NODES, "", size, max(1e3 * _copy_s(size, self._reps), 1e-6))

    def _prompt(self, tokens: int) -> list[int]:
        return [int(token) for token in self._rng.integers(5, self._vocab_size, tokens)]

    def _prefill_ms(self, tokens: int, prefix: int) -> float:
        return self.costs.prefill(ALL_NODES).ms(tokens, prefix)

    def _decode_ms(self, batch: int, total: int) -> float:
        return self.costs.decode(ALL_NODES).ms(batch, total)


def show(points: list[Point], typical: float) -> None:
    table = plain_table("", "measured, ms", "fitted, ms", "error")
    for point in points:
        table.add_row(point.what, f"{point.measured_ms:.3g}", f"{point.fitted_ms:.3g}", f"{point.error:+.1%}")
    out.print(table)
    out.print(f"\nmedian error of the curves {typical:.1%}")


def to_json(start: StartCosts, points: list[Point], typical: float) -> dict[str, object]:
    return {
        "prefill": asdict(start.prefill),
        "decode": asdict(start.decode),
        "transfer": asdict(start.transfer),
        "median_error": typical,
        "points": [asdict(point) for point in points],
    }


def _copy_s(size: int, reps: int) -> float:
    """Seconds to copy ``size`` bytes once."""
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    times = []
    for _ in range(reps + 1):
        begin = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begin)
    return min(times[1:])
