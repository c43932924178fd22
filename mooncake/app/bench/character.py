"""``mooncake bench character``: quality and KV size of sliding windows, shared keys and values, and one KV head.

Five small models of one shape (``character_twins``) are trained in the same way on the Python language reference that
CPython ships, and kept in ``--models``. All have one KV head. *full* has full attention in every layer; *sharing* has
KV in every second layer; *hybrid* has one global layer in six, and windows in the others; *character* has both, like
Character.AI's models; *local* has windows only. Our engine then serves each of them. Measured are the loss on unseen
text, the share of needles found beyond the reach of windows, and the bytes of KV per token.

The prefill time saved when the second half of the layers shares KV is measured on random weights of a larger shape,
since the time of a forward pass does not depend on the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress

from mooncake import LLM, SamplingParams
from mooncake.app.bench.character_twins import (
    NUM_SLOTS,
    QUESTION_TOKENS,
    Corpus,
    Shape,
    Training,
    Twin,
    description,
    train,
    twins,
    write,
)
from mooncake.app.bench.quality import window_losses
from mooncake.app.bench.report import Figure, Report, tell
from mooncake.app.bench.shared.prompts import TEXT, python_reference
from mooncake.app.bench.shared.timing import in_turns, milliseconds
from mooncake.app.cli.flags import Flags, positive, whole
from mooncake.app.outputs import output_folder
from mooncake.checkpoint import open_checkpoint, weight_shapes
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError
from mooncake.json_file import read_json
from mooncake.model import CausalLM, ForwardBatch, NoHook, load_model
from mooncake.model_config import ModelConfig
from mooncake.precision import FLOAT32, has_native_bf16
from mooncake.types import KVLayout

BLOCK_TOKENS = 16
HEAD_DIM = 32
BASELINE = "full"
TRAINED = "trained.json"  # in each folder: how the model was trained


@dataclass(frozen=True, slots=True)
class Options:
    models: Path
    shape: Shape
    training: Training
    windows: int  # windows of text to measure the loss on
    needles: int
    prompt_tokens: int
    prompt_hidden: int
    reps: int
    json: Path | None


def main(args: list[str]) -> None:
    """Raises ConfigError, ModelError, Cancelled after Ctrl-C (what was measured is reported first)."""
    options = parse(args)
    corpus = Corpus.of(python_reference())
    config: dict[str, object] = {
        "layers": options.shape.layers,
        "hidden": options.shape.hidden,
        "heads": options.shape.heads,
        "window": options.shape.window,
        "length": options.shape.length,
        "steps": options.training.steps,
        "batch": options.training.batch,
        "rate": options.training.rate,
        "training_dtype": options.training.dtype,
        "threads": torch.get_num_threads(),
        "windows": options.windows,
        "needles": options.needles,
        "text": f"{TEXT}, the last tenth for validation",
    }
    report = Report("character", config, options.training.seed)
    with report.measuring("training") as shown:
        for name, twin in twins(options.shape).items():
            made_once(options, corpus, name, twin, shown)
        for name in twins(options.shape):
            measure(options, corpus, name, report, shown)
        compare(report)
        measure_prefill(options, report, shown)
    report.finish(options.json)


def _flags() -> Flags:
    flags = Flags("bench character", __doc__)
    flags.add("--models", type=output_folder, required=True, metavar="DIR", help="folder for trained models")
    flags.add("--layers", type=whole("--layers", 6), default=12, help="layers of the trained models")
    flags.add("--hidden", type=whole("--hidden", 64), default=128, help="their width")
    flags.add("--window", type=whole("--window", 2), default=16, metavar="BYTES", help="window of local layers")
    flags.add("--length", type=whole("--length", 64), default=256, metavar="BYTES", help="length of training texts")
    flags.add("--steps", type=whole("--steps", 1), default=600, help="training steps per model")
    flags.add(
        "--batch",
        type=whole("--batch", 1),
        default=8,
        help="windows of text per step; in the first half of the steps four times as many, and shorter ones",
    )
    flags.add("--rate", type=positive("--rate"), default=3e-3, help="peak learning rate")
    flags.add("--windows", type=whole("--windows", 1), default=150, help="windows of text to measure the loss on")
    flags.add("--needles", type=whole("--needles", 1), default=100, help="questions about text far back")
    flags.add(
        "--prompt-tokens", type=whole("--prompt-tokens", 0), default=2048, help="length of the timed prompt; 0: none"
    )
    flags.add("--prompt-hidden", type=whole("--prompt-hidden", 64), default=768, help="width of the timed model")
    flags.reps(5, "timings of each prompt")
    flags.threads()
    flags.seed()
    flags.json_file()
    return flags


def parse(args: list[str]) -> Options:
    given = _flags().read(args)
    if given.threads:
        torch.set_num_threads(given.threads)
    for flag, width in (("--hidden", given.hidden), ("--prompt-hidden", given.prompt_hidden)):
        if width % HEAD_DIM:
            raise ConfigError(f"{flag} must be a multiple of {HEAD_DIM}, got {width}")
    heads = given.hidden // HEAD_DIM
    shape = Shape(given.layers, given.hidden, heads, mlp_width(given.hidden), given.window, given.length)
    if farthest_needle(shape) < 1:
        raise ConfigError(
            f"{shape.layers} layers with --window {shape.window} reach back {shape.reach} bytes: "
            f"--length {shape.length} leaves no place for a needle farther away"
        )
    dtype = "bfloat16" if has_native_bf16() else "float32"
    training = Training(given.steps, given.batch, given.rate, given.seed, dtype)
    return Options(
        given.models,
        shape,
        training,
        given.windows,
        given.needles,
        given.prompt_tokens,
        given.prompt_hidden,
        given.reps,
        given.json,
    )


def mlp_width(hidden: int) -> int:
    """8/3 of ``hidden``, as in Llama, rounded to whole vectors."""
    return -(-hidden * 8 // 3 // 32) * 32


def farthest_needle(shape: Shape) -> int:
    """Number of positions at the start of a window that local layers cannot reach from its end."""
    return shape.length - QUESTION_TOKENS - shape.reach


# Training


def made_once(options: Options, corpus: Corpus, name: str, twin: Twin, shown: Progress) -> None:
    """Train the model unless the folder has it. Raises ConfigError when it was trained with other options."""
    folder = options.models / name
    digest = hashlib.sha256(corpus.training.tobytes()).hexdigest()
    wanted = json.loads(json.dumps(description(options.shape, twin, options.training, digest)))
    if (folder / TRAINED).exists():
        if read_json(folder / TRAINED) != wanted:
            raise ConfigError(
                f"{folder} holds a model that was trained with other options: change the flags or --models"
            )
        return
    losses: list[float] = []

    def hear(step: int, loss: float) -> None:
        losses.append(loss)
        if step % 10 == 0:
            tell(shown, f"{name}: step {step} of {options.training.steps}, loss {np.mean(losses[-50:]):.3f}")

    write(folder, options.shape, twin, train(options.shape, twin, corpus, options.training, hear))
    (folder / TRAINED).write_text(json.dumps(wanted, indent=1))


# Serving


def measure(options: Options, corpus: Corpus, name: str, report: Report, shown: Progress) -> None:
    tell(shown, f"{name}: text and needles")
    folder = str(options.models / name)
    checkpoint = open_checkpoint(folder)
    layout = checkpoint.kv_layout(BLOCK_TOKENS, "float32")
    report.add(Figure(name, "KV of a token", "bytes", (layout.block_bytes / BLOCK_TOKENS,)))
    model = load_model(checkpoint, FLOAT32, options.shape.length)
    assert isinstance(model, CausalLM)
    count = min(options.windows, len(corpus.validation) // options.shape.length)
    windows = corpus.validation[: count * options.shape.length].reshape(count, -1)
    loss = sum(window_losses(model, layout, windows)) / (count * (options.shape.length - 1))
    report.add(Figure(name, "loss of text", "nats a byte", (loss,), params={"windows": count}))
    found = share_of_needles(options, corpus, folder)
    report.add(Figure(name, "needles found", "", (found,), more_is_better=True, params={"needles": options.needles}))


def share_of_needles(options: Options, corpus: Corpus, folder: str) -> float:
    """Share of needles found: each letter, given those before it, is the most likely token."""
    random = np.random.default_rng(options.training.seed + 1)
    plain = options.shape.length - NUM_SLOTS - QUESTION_TOKENS
    prompts, wanted = [], []
    for start in random.integers(0, len(corpus.validation) - plain, options.needles):
        needle, at = corpus.needle(random), random.integers(farthest_needle(options.shape), size=1)
        window = corpus.with_needle(corpus.validation[start : start + plain], needle, at)
        ends = len(window) - QUESTION_TOKENS + 1 + 2 * np.arange(NUM_SLOTS)
        prompts += [window[:end].astype(np.uint32) for end in ends]
        wanted.append(needle)
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    with LLM(folder, kv_gb=0.1, block_tokens=BLOCK_TOKENS, chunk_tokens=128) as llm:
        answers = [one.token_ids[0] for one in llm.generate(prompts, greedy, use_tqdm=False)]
    is_right = np.array(answers).reshape(-1, NUM_SLOTS) == np.array(wanted)
    return float(is_right.all(1).mean())


def compare(report: Report) -> None:
    for name in ("sharing", "hybrid", "character", "local"):
        for ratio, figure in (("loss", "loss of text"), ("kv_bytes", "KV of a token")):
            report.compare_subjects(f"{ratio}_{name}_vs_{BASELINE}", figure, name, BASELINE)
    report.notes.append(f"a needle: {NUM_SLOTS} letters, farther back than windows reach through all layers")
    report.notes.append("bytes of KV are those of pages; freeing pages outside the window saves more")


# Prompts


PREFILL_LAYERS = 12


def measure_prefill(options: Options, report: Report, shown: Progress) -> None:
    """Alternately: KV in all layers, and only in the first half of them."""
    if not options.prompt_tokens:
        return
    half = PREFILL_LAYERS // 2
    passes = {
        "KV in all layers": prompt_pass(options, ()),
        "KV in the first half": prompt_pass(options, tuple(min(layer, half - 1) for layer in range(PREFILL_LAYERS))),
    }
    times = in_turns(passes, options.reps, tell=lambda reps: tell(shown, f"prompts: {reps} of {options.reps} timings"))
    for name, taken in times.items():
        report.add(Figure(name, "prompt", "ms", milliseconds(taken), params={"tokens": options.prompt_tokens}))
    report.compare_subjects("prefill_speedup_half", "prompt", *passes)


def prompt_pass(options: Options, sources: tuple[int, ...]) -> Callable[[], object]:
    """A forward pass of a prompt through a model with random weights, for the logits of its last token."""
    config = ModelConfig(
        architecture="llama",
        num_layers=PREFILL_LAYERS,
        hidden_size=options.prompt_hidden,
        intermediate_size=mlp_width(options.prompt_hidden),
        num_heads=options.prompt_hidden // HEAD_DIM,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        vocab_size=512,
        max_model_len=options.prompt_tokens,
        rope_theta=10_000.0,
        rope_scaling=None,
        rms_eps=1e-6,
        tie_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        sliding_window=None,
        bos_id=None,
        eos_ids=(),
        kv_sources=sources,
    )
    generator = torch.Generator().manual_seed(options.training.seed)
    weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in weight_shapes(config).items()}
    model = CausalLM(config, weights)
    layout = KVLayout(len(config.kv_owners), config.num_kv_heads, BLOCK_TOKENS, config.head_dim, "float32")
    cache = KVCache(layout, -(-options.prompt_tokens // BLOCK_TOKENS))
    tokens = torch.randint(512, (options.prompt_tokens,), generator=generator)
    batch = ForwardBatch.of_prompt(tokens, BLOCK_TOKENS, torch.tensor([options.prompt_tokens - 1]))
    return lambda: model.forward(batch, cache.tensor, NoHook())
