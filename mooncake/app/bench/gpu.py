"""``mooncake bench gpu`` (``make gpu``): our GPU kernels, compared with the limits of the GPU and with torch's kernels.

Each shape is timed in the same run as its limit: a measured read-only stream, matrix product or host link. Every part
has its own process, since a fault on a GPU ends everything a process does there, and its own time limit. The file is
written after each part; one that is interrupted, crashes or hangs keeps what it has measured. Parts with TARGETS come
first, since GPU time is short. ``--resume`` keeps the results in a file and runs the parts that failed, were left out,
or were measured with other code or on another GPU.
``--tiny`` runs every path once at small shapes, also in Triton's interpreter without a GPU. Its times mean nothing, and
the report says so.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from mooncake.app.bench.report import Figure, Report
from mooncake.app.console import err
from mooncake.app.outputs import output_file
from mooncake.durable import rename_whole
from mooncake.errors import ConfigError, InternalError, MooncakeError

TARGETS = {
    "decode_64x8k_vs_stream": 0.80,
    "decode_64x8k_vs_3400_gb_per_s": 1.0,
    "decode_1x128k_vs_stream": 0.75,
    "decode_ragged_vs_stream": 0.70,
    "int8_kv_vs_bf16": 1.7,
    "cascade_64x32k_vs_flat": 20.0,
    "prefill_2k_at_32k_vs_788_tflops": 0.55,
    "model_decode_64x8k_vs_roofline": 0.80,
    "model_decode_1_vs_roofline": 0.65,
    "engine_64x2k_vs_model": 0.95,
    "page_copy_vs_link": 0.80,
    "latent_16_64x8k_vs_stream": 0.70,
    "latent_16_1x128k_vs_stream": 0.60,
    "latent_128_64x8k_vs_788_tflops": 0.30,
    "latent_128_prefill_2k_at_8k_vs_788_tflops": 0.30,
    "experts_decode_64_vs_roofline": 0.75,
    "experts_decode_1_vs_roofline": 0.45,
    "experts_prefill_8k_vs_788_tflops": 0.40,
    "int8_64_vs_bf16": 1.40,
    "w8a8_64_vs_bf16": 1.20,
    "w8a8_4k_vs_bf16": 1.20,
    "w8a8_4k_vs_1979_tops": 0.40,
    "delta_rule_prefill_tokens_vs_chunks": 4.0,
    "two_gpus_decode_1_vs_one": 1.35,
    "two_gpus_decode_64x2k_vs_one": 1.40,
}
"""Targets for an H200, or for two."""

PREDICTED = {
    "decode_64x8k_vs_stream": 0.85,
    "decode_64x8k_vs_3400_gb_per_s": 1.07,
    "decode_1x128k_vs_stream": 0.78,
    "decode_ragged_vs_stream": 0.80,
    "int8_kv_vs_bf16": 1.6,
    "cascade_64x32k_vs_flat": 15.0,
    "prefill_2k_at_32k_vs_788_tflops": 0.55,
    "model_decode_64x8k_vs_roofline": 0.80,
    "model_decode_1_vs_roofline": 0.75,
    "engine_64x2k_vs_model": 0.97,
    "page_copy_vs_link": 0.85,
    "latent_16_64x8k_vs_stream": 0.75,
    "latent_16_1x128k_vs_stream": 0.65,
    "latent_128_64x8k_vs_788_tflops": 0.24,
    "latent_128_prefill_2k_at_8k_vs_788_tflops": 0.24,
    "experts_decode_64_vs_roofline": 0.82,
    "experts_decode_1_vs_roofline": 0.52,
    "experts_prefill_8k_vs_788_tflops": 0.40,
    "int8_64_vs_bf16": 1.60,
    "w8a8_64_vs_bf16": 1.35,
    "w8a8_4k_vs_bf16": 1.20,
    "w8a8_4k_vs_1979_tops": 0.42,
    "delta_rule_prefill_tokens_vs_chunks": 7.0,
    "two_gpus_decode_1_vs_one": 1.45,
    "two_gpus_decode_64x2k_vs_one": 1.50,
}
"""Predictions made before any of it had run on a GPU, reported beside the results, right or wrong.

Decode attention, bfloat16: two programs per multiprocessor with 64 KB in flight each (132 x 128 KB) are four times what
4.8 TB/s needs at 0.8 µs of latency, so long contexts should run at memory speed. One sequence of 128k loses time in the
merge and the tail.
int8 pages: half the bytes, but a warp issues 555 instructions for 64 keys, bfloat16 only 325. For 1.7 times the speed,
half of all cycles must issue one, with eight warps per multiprocessor (248 registers per thread) and six barriers per
loop iteration.
Prefill: Hopper's warpgroup products (2,048 cycles per iteration of 128 keys, and 1,212 to issue the rest) without
overlapping softmax, which FlashAttention 3 shows to be worth a third.
Cascade of 64: limited by computing. 34 GFLOP at the prefill rate are 80 µs, in one piece per program; launches, own
keys and the merge take 25 µs, compared with 2.3 ms of reads from memory, 22 times as long. Read flat, 33 sequences are
at the same pages at a time and find them in an L2 of 5.5 TB/s, in 1.6 ms; with a prefix each they find nothing there.
Model: a step at batch 1 reads 15 GB of weights in cuBLAS.
Engine: its milliseconds per step are hidden behind a step of 7 ms; a few small copies between steps remain.

Latent attention, 16 heads: runs at memory speed. Two programs with 37 KB in flight each are 2.5 times what 4.8 TB/s
needs, and a warp issues 428 instructions for 16 keys, in half of the cycles that loading them takes.
Latent attention, 128 heads: limited by computing, in tiles of 32 rows with products per warp, not per warpgroup. An
iteration of 32 keys takes 1,400 cycles of products at the two thirds of the peak that they reach, 1,440 of shared
memory (each row is read by two rows of warps, as key and as value) and 1,170 to issue. One program per multiprocessor
overlaps little of that: 2,800 cycles for 2.2 MFLOP are 190 TFLOP/s, a third of FlashMLA.
Experts: a layer of 128 reads 1.2 GB for 64 tokens in 280 µs; four launches, each program's look-up of its tile and the
last programs of both products take 40 to 60 µs. One token reads 75 MB in 18 µs, and the rest takes as long. A prompt's
tiles of 128 rows and columns reach 350 TFLOP/s from an L2 of 5.5 TB/s; sorting 64k pairs and partly filled tiles cost a
tenth.
int8 products, 64 tokens: 59 MB of weights take 12 µs of reads, bfloat16's twice as long. At three quarters of the speed
they are 16 µs, cuBLAS at seven eighths 28; W8A8's activations pass through two kernels before, 4 to 5 µs. 4,096 tokens:
481 GFLOP are 0.69 ms, if cuBLAS comes to 700 TFLOP/s. The peak of int8 is twice bfloat16's (1,979 TOPS, dense, by the
data sheet). If products come to half of it, they take 0.49 ms; turning and quantising activations move 120 MB in about
0.04 ms, and the scales of rows and columns take as long.
Gated delta rule, 2,048 tokens of one prompt: ``walk`` issues 2,900 instructions a warp and chunk, two warps on each
scheduler, so 64 chunks are 0.2 ms; what needs no state takes 0.1 ms, on all multiprocessors. Token by token, each waits
for the one before: 2,048 times about 1 µs.
Two GPUs: each reads half of the 8 GB that a step of 16 layers reads: 2.5 ms for one sequence, and with pages 4.8 ms for
64. In a graph 33 sums take 12 µs each for 8 KB and 22 µs for 512 KB; gathering logits and drawing tokens take 30 to
60 µs. A step's two messages to the other rank take the host 0.2 ms, while the previous step is computed.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the benchmark: ``work`` ("module:function" of ``gpu_parts``), or ``tests`` for pytest."""

    name: str
    limit_s: float
    work: str = ""
    tests: tuple[str, ...] = ()


_KERNEL_TESTS = (
    *("test_gpu_kernels.py", "test_gpu_latent.py", "test_gpu_experts.py", "test_gpu_model.py"),
    *("test_gpu_offsets.py", "test_device_cache.py", "test_device_sampler.py"),
)
LIMITS = "limits"
DATASHEET_STREAM = 4.8e12  # bytes per second that an H200 reads: what the rest has where the limits have failed
PARTS = (
    Part(LIMITS, 90, "kernels:limits"),
    Part("decode attention", 150, "kernels:decode_attention"),
    Part("prefill attention", 90, "kernels:prefill_attention"),
    Part("cascade", 90, "kernels:cascade"),
    Part("latent attention", 120, "latent:latent_attention"),
    Part("page copies", 90, "kernels:page_copies"),
    Part("whole model", 180, "model:whole_model"),
    Part("experts", 90, "experts:experts"),
    Part("engine", 180, "engine:engine_steps"),
    Part("two GPUs", 240, "ranks:two_gpus"),
    Part("kernel tests", 200, tests=tuple(f"tests/kernels/{name}" for name in _KERNEL_TESTS)),
    Part("elementwise", 60, "kernels:elementwise"),
    Part("int8 products", 90, "kernels:int8_products"),
    Part("recurrent layers", 90, "recurrent:recurrent"),
    Part("hand-off", 150, "model:handed_off"),
    Part("FlexAttention", 150, "kernels:flex_attention"),
    Part("node tests", 240, tests=("tests/e2e/test_gpu_nodes.py",)),
)
MIN_PART_S = 20.0  # with less time left, no part is started
OUTPUT_CHARS = 8000
TESTS_AT_ONCE = 6
MEASURED = ("mooncake/kernels", "mooncake/model", "mooncake/engine", "mooncake/app")
END_S = 5.0  # for an interrupted part to write its results, and then for a killed one to end
ROOT = Path(__file__).resolve().parents[3]


class PartResult(msgspec.Struct):
    """Results of a part, or why it has none."""

    took_s: float = 0.0
    failure: str = ""
    code: str = ""
    gpu: str = ""
    state: dict[str, str] = {}
    figures: list[Figure] = []
    ratios: dict[str, float] = {}
    notes: list[str] = []
    launches: dict[str, dict[str, int]] = {}  # chosen by this part and those before it
    kernels: list[dict[str, str | int]] = []
    failures: dict[str, str] = {}  # tracebacks
    output: str = ""  # the last part of the output, if it failed

    @property
    def reason(self) -> str:
        """Of its failure: how the process ended, and what went wrong first. CUDA's errors go on for lines."""
        told = self.output.strip().splitlines()[-1:]
        for text in self.failures.values():
            _, is_whole, frames = text.rpartition("Traceback (most recent call last):\n")  # else it begins in a line
            lines = frames.splitlines()[not is_whole :]
            told = [line for line in lines if line and not line[0].isspace()][:1]
            break
        return ": ".join([self.failure, *told])


class _Saved(msgspec.Struct):
    parts: dict[str, PartResult] = {}


class _Run:
    """One run of the benchmark, with the results of all its parts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._done: dict[str, PartResult] = {}
        if options.resume and options.out is not None and options.out.exists():
            try:
                saved = msgspec.json.decode(options.out.read_bytes(), type=_Saved)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{options.out} does not hold a run of this benchmark: {error}") from None
            self._done = saved.parts
        self._code, self._gpu = code(), gpu_name()

    def run(self, part: Part, limit_s: float) -> None:
        """Run a part that is not done yet. Earlier results of the part are kept until it has new ones."""
        done = self._done.get(part.name)
        if done is not None and not done.failure and self._is_of_now(done):
            return
        err.print(f"{part.name} (up to {limit_s:.0f} s)")
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found, output = Path(folder, "part.json"), Path(folder, "output")
            failure = _failure(self._command(part, found), limit_s, output)
            result = msgspec.json.decode(found.read_bytes(), type=PartResult) if found.exists() else PartResult()
            result.output = output.read_text(errors="replace")[-OUTPUT_CHARS:] if failure else ""
        result.failure, result.took_s = failure, round(time.monotonic() - started, 1)
        result.code, result.gpu = self._code, self._gpu
        if failure and not result.figures and done is not None:
            result.figures, result.ratios, result.code, result.gpu = done.figures, done.ratios, done.code, done.gpu
        self._done[part.name] = result
        self.save()

    def _is_of_now(self, part: PartResult) -> bool:
        return (part.code, part.gpu) == (self._code, self._gpu)

    def _command(self, part: Part, found: Path) -> list[str]:
        if part.tests:  # warnings are no errors here: newer versions of torch or Triton may deprecate something
            quiet = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-W", "default"]
            at_once = ["-n", str(TESTS_AT_ONCE)] if importlib.util.find_spec("xdist") else []  # compilers take long
            return [sys.executable, "-m", "pytest", *quiet, *at_once, *part.tests]
        options = ["--tiny"] if self._options.tiny else []
        if part.name != LIMITS:
            chosen = {kind: launch for done in self._done.values() for kind, launch in done.launches.items()}
            options += ["--stream", str(self._stream()), "--launches", msgspec.json.encode(chosen).decode()]
        own = [sys.executable, "-m", "mooncake.app.bench.gpu", "--part", part.name, "--out", str(found)]
        return [*own, "--reps", str(self._options.reps), *options]

    def _stream(self) -> float:
        from mooncake.app.bench.gpu_parts.kernels import stream_of

        return stream_of(self.report()) or DATASHEET_STREAM

    def report(self) -> Report:
        report = Report(
            "gpu", {"gpu": self._gpu, "tiny": self._options.tiny, "date": time.strftime("%Y-%m-%d")}, seed=0
        )
        for part in self._done.values():
            report.add(*part.figures)
            report.ratios |= part.ratios
            report.notes += part.notes
        if self._options.tiny:
            report.notes.append("tiny shapes: every path ran, and no time here means anything")
        else:
            report.notes += [
                f"{ratio}: {report.ratios[ratio]:.2f}, target {target:.2f}, predicted {PREDICTED[ratio]:.2f}"
                for ratio, target in TARGETS.items()
                if ratio in report.ratios
            ]
        report.notes += [f"failed: {name}: {part.reason}" for name, part in self._done.items() if part.failure]
        report.notes += [
            f"measured with other code or on another GPU: {name}"
            for name, part in self._done.items()
            if not self._is_of_now(part)
        ]
        return report

    def save(self) -> None:
        if self._options.out is not None:
            _write(self._options.out, self.report().to_json() | {"parts": self._done})

    def finish(self, left_out: list[str]) -> None:
        report = self.report()
        report.notes += [f"left out, no time left: {name} (--resume runs it)" for name in left_out]
        report.finish(None)
        failed = [f"{name} ({part.reason})" for name, part in self._done.items() if part.failure]
        if failed:
            raise InternalError(f"failed: {', '.join(failed)}; their output is above")


def code() -> str:
    """Digest of the measured code; it needs no repository."""
    digest = hashlib.sha256()
    for folder in MEASURED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def gpu_name() -> str:
    """Of the device that is measured, as torch names it."""
    import torch

    from mooncake.kernels.gpu.triton_launch import INTERPRETED

    return "none (interpreter)" if INTERPRETED else torch.cuda.get_device_name()


def _failure(command: list[str], limit_s: float, output: Path) -> str:
    """Run a command, and interrupt it after ``limit_s``, or when this process is told to end. Returns why it failed, ""
    if it did not. Its output goes to the file ``output``, and to stderr once it has ended."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for number in (signal.SIGINT, signal.SIGTERM):  # background jobs of a shell inherit the first as ignored
        signal.signal(number, signal.default_int_handler)
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:.0f} s"
    finally:
        _end(process)
        sys.stderr.write(output.read_text(errors="replace"))
    return f"exit status {status}" if status else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End ``process`` and all it started; a running one gets SIGINT and ``END_S`` to end by itself. One that the driver
    holds even then is left behind: the other parts do not wait for it."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)


def run_part(name: str, tiny: bool, reps: int, stream: float, launches: dict[str, dict[str, int]], out: Path) -> None:
    """Run a part in this process; results from before a failure are written too. Raises InternalError on failure."""
    import torch

    from mooncake.app.bench.gpu_parts.device import Gpu, Scale, state
    from mooncake.kernels.gpu.attention import Launch
    from mooncake.kernels.gpu.triton_launch import built_kernels

    [part] = [part for part in PARTS if part.name == name]
    module, _, function = part.work.partition(":")
    torch.manual_seed(0)
    report = Report("gpu", {}, seed=0)
    found = PartResult(figures=report.figures, ratios=report.ratios, notes=report.notes)
    if stream == DATASHEET_STREAM:
        report.notes.append(f"{name}: compared with reads of {stream / 1e9:,.0f} GB/s, an H200's by its data sheet")

    def keep() -> None:
        found.launches = {kind: asdict(launch) for kind, launch in gpu.launches.items()}
        found.failures = gpu.failures
        _write(out, found)

    gpu = Gpu(Scale(tiny), reps, {kind: Launch(**fields) for kind, fields in launches.items()}, keep)
    try:
        with torch.inference_mode(), gpu.trying(name):
            getattr(importlib.import_module(f"mooncake.app.bench.gpu_parts.{module}"), function)(gpu, report, stream)
    finally:  # also when interrupted
        keep()
    with gpu.trying("what it ran on"):  # fails with the GPU
        found.state, found.kernels = state(), list(built_kernels())
    if gpu.missing:
        raise InternalError(f"failed: {'; '.join(gpu.missing)}")


def _write(file: Path, result: object) -> None:
    """Whoever is killed meanwhile leaves what was there before."""
    line = msgspec.json.encode(msgspec.to_builtins(result)) + b"\n"
    if file.exists() and not file.is_file():  # a device
        file.write_bytes(line)
        return
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(line)
    rename_whole(part, file)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "mooncake bench gpu", description=(__doc__ or "").replace("``", "`"), allow_abbrev=False
    )
    parser.add_argument("--reps", type=int, default=5, help="repetitions of each measurement; the best one counts")
    parser.add_argument(
        "--out", type=output_file, metavar="OUT", help="write the JSON line to this file, updated after every part"
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes, even without a GPU; times mean nothing")
    parser.add_argument("--only", action="append", help="only parts whose name contains this; may be repeated")
    parser.add_argument("--resume", action="store_true", help="keep this commit's results in --out, and run the rest")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="start no part after this time, and stop the last one"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--stream", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--launches", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    _check(options.tiny)
    if options.part:
        launches = msgspec.json.decode(options.launches, type=dict[str, dict[str, int]])
        run_part(options.part, options.tiny, options.reps, options.stream, launches, options.out)
        return
    run, left_out, deadline = _Run(options), [], time.monotonic() + options.minutes * 60
    for part in PARTS:
        wanted = part.name == LIMITS or not options.only or any(text in part.name for text in options.only)
        if not wanted or (part.tests and (options.tiny or not (ROOT / "tests").exists())):
            continue
        left_s = deadline - time.monotonic()
        if left_s < MIN_PART_S:
            left_out.append(part.name)
        else:
            run.run(part, left_s if options.tiny else min(part.limit_s, left_s))
    run.finish(left_out)


def _check(tiny: bool) -> None:
    import torch

    if importlib.util.find_spec("triton") is None:
        raise ConfigError("the kernels need Triton, which is not installed")
    from mooncake.kernels.gpu.triton_launch import INTERPRETED

    if not INTERPRETED and not torch.cuda.is_available():
        raise ConfigError(
            "this machine has no GPU that torch can use; TRITON_INTERPRET=1 … --tiny runs the code without one"
        )
    if INTERPRETED and not tiny:
        raise ConfigError("Triton's interpreter is on (TRITON_INTERPRET=1): use --tiny with it")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MooncakeError as error:
        sys.exit(error.message)
