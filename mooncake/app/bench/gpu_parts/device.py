"""The device under test of ``mooncake bench gpu``: timing, failures, and the fastest launch of each kernel.

``tuned`` times a few launches of a kernel, and later measurements use the fastest. Failures are kept with their
tracebacks, and the rest goes on. It must not know what any part measures.
"""

from __future__ import annotations

import contextlib
import gc
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

import torch

from mooncake.app.bench.report import Figure, Report
from mooncake.kernels.gpu.attention import DECODE_ROWS, PREFILL_ROWS, Launch, attention_launch
from mooncake.kernels.gpu.triton_launch import INTERPRETED, DoesNotFit
from mooncake.model.gpu.planned_kernels import PlannedKernels

REPETITION_S = 0.2
RUNS_A_LAP = 8  # minimum runs in a captured graph
TUNED_HEAD_DIM, TUNED_BLOCK = 128, 64  # launches are chosen for this shape
DECODE, DECODE_INT8, PREFILL = "decode", "decode int8", "prefill"
TUNED = {(DECODE_ROWS, False): DECODE, (DECODE_ROWS, True): DECODE_INT8, (PREFILL_ROWS, False): PREFILL}
OTHERS = {
    DECODE: (
        Launch(DECODE_ROWS, keys=64, num_warps=4, num_stages=7, per_processor=2),  # three iterations in flight, not two
        Launch(DECODE_ROWS, keys=64, num_warps=4, num_stages=5, per_processor=3),
        Launch(DECODE_ROWS, keys=128, num_warps=8, num_stages=5, per_processor=1),
    ),
    DECODE_INT8: (
        Launch(DECODE_ROWS, keys=64, num_warps=4, num_stages=7, per_processor=2),
        Launch(DECODE_ROWS, keys=64, num_warps=4, num_stages=4, per_processor=2),
        Launch(DECODE_ROWS, keys=128, num_warps=8, num_stages=5, per_processor=1),
    ),
    PREFILL: (
        Launch(PREFILL_ROWS, keys=64, num_warps=8, num_stages=5, per_processor=1),
        Launch(PREFILL_ROWS, keys=128, num_warps=8, num_stages=5, per_processor=1),
    ),
}
"""Launches timed in addition to ``attention_launch``. All of them fit (``tests/kernels/compile_for_gpu.py`` builds
them)."""
WORTH = 0.98  # another launch is used if it takes less than this share of the default launch's time
TRACEBACK_CHARS = 4000
SMI_FIELDS = (
    *("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "temperature.gpu"),
    *("power.draw", "power.limit", "clocks_event_reasons.active", "pcie.link.gen.current", "pcie.link.width.current"),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the shapes are; ``tiny`` exercises every line in seconds, on a CPU too."""

    tiny: bool

    def size(self, real: int, tiny: int) -> int:
        return tiny if self.tiny else real


class Gpu:
    def __init__(
        self,
        scale: Scale,
        reps: int,
        launches: Mapping[str, Launch] | None = None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """``launches`` were chosen by earlier parts; keys are the names in TUNED. ``keep`` writes what has been found;
        it is called after each thing that was tried: a process that crashes or hangs in the driver has no later one."""
        self.kernels = PlannedKernels()
        self.kernels.choose_launch = self._launch
        self.device = self.kernels.device
        self.scale = scale
        self.reps = 1 if self.device.type == "cpu" else reps
        self.dtype = torch.float32 if INTERPRETED else torch.bfloat16
        self.launches = dict(launches or {})
        self.failures: dict[str, str] = {}  # tracebacks by what was tried
        self.missing: list[str] = []  # failures of what was asked for
        self._keep = keep

    @contextlib.contextmanager
    def trying(self, what: str, is_asked_for: bool = True) -> Iterator[None]:
        """Record a failure of the body and go on. After a fault of the GPU itself, everything later in this process
        fails too."""
        try:
            yield
        except Exception:
            traceback.print_exc(file=sys.stderr)
            self.failures[what] = traceback.format_exc()[-TRACEBACK_CHARS:]
            if is_asked_for:
                self.missing.append(what)
        self._keep()
        self.free()

    def tuned(self, report: Report, kind: str, timed: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Time the launches of ``kind`` and keep the fastest from now on; returns its seconds. Launches that do not fit
        are skipped."""
        rows = next(rows for (rows, scaled), name in TUNED.items() if name == kind)
        usual = attention_launch(rows, TUNED_HEAD_DIM, TUNED_BLOCK, wide=False, scaled=kind == DECODE_INT8)
        found: dict[Launch, tuple[float, ...]] = {}
        try:
            for launch in (usual, *OTHERS[kind][: self.scale.size(len(OTHERS[kind]), 1)]):
                with self.trying(f"{kind}: {launch}", launch == usual), contextlib.suppress(DoesNotFit):
                    self.launches[kind] = launch
                    found[launch] = timed()
        finally:  # also when interrupted
            best = min(found, key=lambda launch: min(found[launch]), default=usual)
            is_worth_it = usual not in found or min(found[best]) < WORTH * min(found[usual])
            self.launches[kind] = kept = best if is_worth_it else usual
        for launch, seconds in found.items():
            report.add(Figure("ours", f"launch, {kind}", "ms", tuple(1e3 * s for s in seconds), params=asdict(launch)))
        if not found:
            raise RuntimeError(f"no launch of {kind} attention ran")
        return found[kept]

    def _launch(self, tile_rows: int, head_dim: int, block_tokens: int, wide: bool, scaled: bool) -> Launch:
        usual = attention_launch(tile_rows, head_dim, block_tokens, wide, scaled)
        if wide or (head_dim, block_tokens) != (TUNED_HEAD_DIM, TUNED_BLOCK):
            return usual
        return self.launches.get(TUNED.get((tile_rows, scaled), ""), usual)

    def timed_s(self, run: Callable[[int], object], rotate: int = 1, captured: bool = False) -> tuple[float, ...]:
        """Seconds of ``run(i)``, with i cycling through ``range(rotate)``, between two CUDA events.

        ``captured``: as a CUDA graph, so that the host's launch time is not measured.
        """
        if self.device.type == "cpu":
            started = time.perf_counter()
            run(0)
            return (time.perf_counter() - started,)
        turns = [index % rotate for index in range(max(rotate, RUNS_A_LAP))] if captured else list(range(rotate))
        for index in turns[: max(rotate, 3)] * 2:
            run(index)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        kept: list[object] = []  # outputs of the graph
        if captured:
            with torch.cuda.graph(graph):
                kept += [run(index) for index in turns]

        def laps_s(count: int) -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(count):
                if captured:
                    graph.replay()
                else:
                    for index in turns:
                        run(index)
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        count = min(max(round(REPETITION_S / laps_s(1)), 1), 100)
        return tuple(laps_s(count) / count / len(turns) for _ in range(self.reps))

    def fits(self, num_bytes: float) -> bool:
        """Whether so many bytes fit in free device memory, with a gigabyte to spare."""
        return self.device.type == "cpu" or num_bytes + 1e9 < torch.cuda.mem_get_info(self.device)[0]

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def rate(subject: str, name: str, unit: str, amount: float, seconds: Sequence[float], **params: str | int) -> Figure:
    return Figure(subject, name, unit, tuple(amount / s for s in seconds), more_is_better=True, params=params)


def check(report: Report, name: str, actual: torch.Tensor, expected: torch.Tensor, most: float) -> None:
    """Report the relative error. Raises AssertionError when it is above ``most`` or NaN."""
    error = float((actual.float() - expected.float()).norm() / expected.float().norm())
    if math.isfinite(error):  # JSON has no other numbers
        report.ratios[f"{name}_error"] = error
    assert error <= most, f"{name} is wrong by {error:.3g} of its norm"


def state() -> dict[str, str]:
    """State of the GPU from the driver, and versions of torch, CUDA and Triton."""
    versions = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda), "triton": version("triton")}
    if not torch.cuda.is_available():
        return versions
    own = torch.cuda.get_device_properties(torch.cuda.current_device())  # its number there may be another one
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader", f"--id=GPU-{own.uuid}"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return versions | {"nvidia-smi": repr(error)}
    return versions | dict(zip(SMI_FIELDS, (part.strip() for part in run.stdout.split(",")), strict=False))
