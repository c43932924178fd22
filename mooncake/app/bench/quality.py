"""``mooncake bench quality``: perplexity and bytes of narrow formats.

The text is the Python language reference that CPython ships (``pydoc_data.topics``), cut into windows. Each format
computes the same windows through its own paged cache, so that narrow keys and values are read back as in serving. With
``--resume FILE`` the loss of each window is saved, and an interrupted run continues. It must not time anything.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from rich.progress import Progress

import mooncake.kernels as kernels
import mooncake.model as models
from mooncake.app.bench.engine_parts.kernels import weight_bytes
from mooncake.app.bench.report import Figure, Report, tell, told
from mooncake.app.bench.shared.prompts import TEXT, text_windows
from mooncake.app.cli.flags import Flags, names
from mooncake.app.key_scales import measured
from mooncake.app.outputs import output_file
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError
from mooncake.model import CausalLM, ForwardBatch, NoHook, load_model
from mooncake.precision import Precision, resolve_precision
from mooncake.types import KVLayout

BLOCK_TOKENS = 64
BASELINE = "float32"
SCALED = "kv-int8-key-scales"  # key scales are measured here, on another text
FORMATS: dict[str, Precision] = {
    BASELINE: resolve_precision("float32"),
    "bfloat16": resolve_precision("bfloat16"),
    "kv-bfloat16": resolve_precision("float32", "bfloat16"),
    "kv-int8": resolve_precision("float32", "int8"),
    SCALED: resolve_precision("float32", "int8"),
    "int8": resolve_precision("float32", weights="int8"),
    "w8a8": resolve_precision("float32", weights="w8a8"),
    "stored_a8": resolve_precision("float32", weights="stored_a8"),
    "w8a8-kv-int8": resolve_precision("float32", "int8", "w8a8"),
}


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    formats: tuple[str, ...]
    tokens: int
    window: int
    threads: int
    resume: Path | None
    json: Path | None


class Begun(msgspec.Struct):
    """Saved results: for each format, the losses of its first windows, computed by the same code on the same text."""

    origin: dict[str, str | int]
    losses: dict[str, list[float]] = msgspec.field(default_factory=dict)


def main(args: list[str]) -> None:
    """Raises ConfigError, ModelError, Cancelled after Ctrl-C (what was computed is reported first)."""
    options = parse(args)
    torch.set_num_threads(options.threads)
    report = Report("quality", told(options, "formats", "threads", "resume", text=TEXT), seed=0)
    with report.measuring("computing") as shown:
        measure(options, report, shown)
    compare(report, options)
    report.finish(options.json)


def parse(args: list[str]) -> Options:
    flags = Flags("bench quality", __doc__)
    add = flags.add
    flags.model()
    add("--formats", default="kv-int8,int8,w8a8", help=f"beside {BASELINE}, comma-separated: {', '.join(FORMATS)}")
    add("--tokens", type=int, default=50_176, help="tokens of text")
    add("--window", type=int, default=512, metavar="TOKENS", help="each token sees the tokens before it in its window")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of the compute library")
    add("--resume", type=output_file, metavar="FILE", help="save results in this file, and continue from it")
    flags.json_file()
    given = flags.read(args)
    if given.window < 2 or given.tokens < given.window or given.threads < 1:
        raise ConfigError("--window must be at least 2, --tokens at least --window, --threads at least 1")
    formats = names("--formats", given.formats, FORMATS, may_be_none=True)
    given.formats = tuple(dict.fromkeys((BASELINE, *formats)))
    return Options(**vars(given))


def measure(options: Options, report: Report, shown: Progress) -> None:
    checkpoint = open_checkpoint(options.model)
    windows = text_windows(checkpoint, options.tokens, options.window)
    origin: dict[str, str | int] = {"weights": checkpoint.digest, "window": options.window, "code": code_digest()}
    begun = read_begun(options.resume, origin)
    for name in options.formats:
        precision = FORMATS[name]
        layout = checkpoint.kv_layout(BLOCK_TOKENS, precision.kv_dtype)
        report.add(
            Figure(name, "KV of a token", "bytes", (layout.block_bytes / layout.block_tokens,)),
            Figure(name, "weights read by a decode step", "MB", (matrix_bytes(checkpoint, precision) / 1e6,)),
        )
        losses = begun.losses.setdefault(name, [])
        if len(losses) < len(windows):
            tell(shown, f"{name}: loading")
            scales = measured(checkpoint) if name == SCALED else None
            model = load_model(checkpoint, precision.weights, options.window, key_scales=scales)
            if not isinstance(model, CausalLM):
                raise ConfigError(
                    f"formats are compared for the Llama family, not for {checkpoint.config.architecture}"
                )
            for loss in window_losses(model, layout, windows[len(losses) :]):
                losses.append(loss)
                write_begun(options.resume, begun)
                tell(shown, f"{name}: {len(losses)} of {len(windows)} windows")
        perplexity = math.exp(sum(losses[: len(windows)]) / (len(windows) * (options.window - 1)))
        report.add(Figure(name, "perplexity", "", (perplexity,), params={"tokens": windows.size}))


def code_digest() -> str:
    """Digest of the code that computes a loss: kernels and models."""
    files = [path for package in (kernels, models) for path in Path(package.__path__[0]).rglob("*") if path.is_file()]
    sources = sorted(path for path in files if path.suffix in (".py", ".cpp", ".h"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def read_begun(file: Path | None, origin: dict[str, str | int]) -> Begun:
    """Saved results. Raises ConfigError when they are from another model, window or version of the code."""
    if file is None or not file.exists():
        return Begun(origin)
    try:
        begun = msgspec.json.decode(file.read_bytes(), type=Begun)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} does not hold a run of this benchmark: {error}") from None
    if changed := [name for name, value in origin.items() if begun.origin.get(name) != value]:
        raise ConfigError(f"{file} holds results with a different {', '.join(changed)}; remove it to start over")
    return begun


def write_begun(file: Path | None, begun: Begun) -> None:
    if file is not None:
        part = file.with_name(file.name + ".part")
        part.write_bytes(msgspec.json.encode(begun))
        part.replace(file)


def matrix_bytes(checkpoint: Checkpoint, precision: Precision) -> int:
    itemsize = 1 if precision.weights.coding else 4 if precision.weights.dtype == "float32" else 2
    in_groups, group_bytes = checkpoint.groups if precision.weights.keeps_groups == "a8" else (0, 0)
    return itemsize * (weight_bytes(checkpoint.config, 1) - in_groups) + group_bytes


def window_losses(model: CausalLM, layout: KVLayout, windows: npt.NDArray[np.int64]) -> Iterator[float]:
    """Negative log-likelihood of each window: of its tokens after the first, each given those before it."""
    length = windows.shape[1]
    num_blocks = -(-length // layout.block_tokens)
    cache = KVCache(layout, num_blocks)
    rows = torch.arange(length - 1)
    for window in windows:
        tokens = torch.from_numpy(window)
        logits = model.forward(ForwardBatch.of_prompt(tokens, layout.block_tokens, rows), cache.tensor, NoHook())
        chosen = logits.gather(1, tokens[1:, None]).squeeze(1)
        yield float((logits.logsumexp(1) - chosen).double().sum())


def compare(report: Report, options: Options) -> None:
    for name in options.formats[1:]:
        for ratio, figure in (
            ("perplexity", "perplexity"),
            ("kv_bytes", "KV of a token"),
            ("weight_bytes", "weights read by a decode step"),
        ):
            report.compare_subjects(f"{ratio}_{name}_vs_{BASELINE}", figure, name, BASELINE)
    report.notes.append("perplexity: ratio to float32's on the same text; 1.005 is half a percent more")
