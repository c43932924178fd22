"""``mooncake bench blend``: quality and time of prompts blended from chunks that were computed separately.

Prompts are windows of the Python language reference that CPython ships (``pydoc_data.topics``), cut into consecutive
chunks, so each chunk depends on those before it. The first chunk is a prefix, the others are reused, and a tail is
computed. Quality is the KL divergence (nats) between the next-token distributions in the tail and those of a full
prefill, and how often the most likely token is the same. Time is that of one forward pass over a whole prompt to its
last token's logits, with all chunks but the first and the last in the cache, compared with a full prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import Progress

from mooncake.app.bench.report import Figure, Report, tell, told
from mooncake.app.bench.shared.prompts import TEXT, text_windows
from mooncake.app.bench.shared.timing import in_turns, milliseconds
from mooncake.app.cli.flags import Flags
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.config import PrefillSection
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError
from mooncake.model import CausalLM, ForwardBatch, NoHook, load_model
from mooncake.model.batch import Reuse
from mooncake.precision import FLOAT32

BLOCK_TOKENS = 64
FULL, ALL_REUSED = "full prefill", "all reused"


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    prompts: int
    chunks: int
    chunk_tokens: int
    tail: int
    shares: tuple[float, ...]
    step_tokens: int
    time_tokens: int
    repeat: int
    threads: int
    json: Path | None


def main(args: list[str]) -> None:
    """Raises ConfigError, ModelError, Cancelled after Ctrl-C (what was measured is reported first)."""
    options = parse(args)
    torch.set_num_threads(options.threads)
    config = told(options, "shares", "time_tokens", "repeat", dtype="float32", text=TEXT)
    report = Report("blend", config, seed=0)
    checkpoint = open_checkpoint(options.model)
    with report.measuring("computing") as shown:
        model = load(checkpoint, options)
        measure_quality(checkpoint, model, options, report, shown)
        measure_time(checkpoint, model, options, report, shown)
    report.finish(options.json)


def _flags() -> Flags:
    flags = Flags("bench blend", __doc__)
    add = flags.add
    add("--model", default="smollm2", help="a Llama family model: an HF folder, a .gguf file, or smollm2")
    add("--prompts", type=int, default=24, help="prompts to measure quality on, from all over the text")
    add("--chunks", type=int, default=6, help="chunks per prompt")
    add("--chunk-tokens", type=int, default=256, help=f"a multiple of {BLOCK_TOKENS}")
    add(
        "--tail",
        type=int,
        default=32,
        metavar="TOKENS",
        help="tokens after the chunks, where distributions are compared",
    )
    add("--shares", default="0.15,0.3", help="fractions of reused tokens to recompute; comma-separated")
    add(
        "--step-tokens",
        type=int,
        default=0,
        help="tokens of blended prompts per step, which ranks only its own; 0: all",
    )
    add("--time-tokens", type=int, default=2048, help="length of the timed prompt; 0: none")
    add("--repeat", type=int, default=5, help="timings per measurement")
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of the compute library")
    flags.json_file()
    return flags


def parse(args: list[str]) -> Options:
    given = _flags().read(args)
    try:
        given.shares = tuple(float(share) for share in given.shares.split(","))
    except ValueError:
        raise ConfigError(f"--shares takes numbers, got {given.shares!r}") from None
    if not all(0 <= share <= 1 for share in given.shares):
        raise ConfigError("--shares are between 0 and 1")
    if given.chunk_tokens < BLOCK_TOKENS or given.chunk_tokens % BLOCK_TOKENS or given.time_tokens % given.chunk_tokens:
        raise ConfigError(f"--chunk-tokens is a multiple of {BLOCK_TOKENS}, and --time-tokens one of --chunk-tokens")
    if given.chunks < 2 or min(given.prompts, given.tail, given.repeat, given.threads) < 1 or given.step_tokens < 0:
        raise ConfigError(
            "--chunks must be at least 2, --prompts, --tail, --repeat, --threads at least 1, --step-tokens 0"
        )
    return Options(**vars(given))


def load(checkpoint: Checkpoint, options: Options) -> CausalLM:
    longest = max(options.chunks * options.chunk_tokens + options.tail, options.time_tokens)
    model = load_model(checkpoint, FLOAT32, longest, can_blend=True)
    assert isinstance(model, CausalLM)
    return model


class Prompt:
    """One prompt in the first blocks of a cache. The blocks after them hold its chunks except the first, each computed
    separately. The last ``tail`` tokens are in none; the logits of the last ``logits`` tokens are computed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: CausalLM,
        tokens: npt.NDArray[np.int64],
        chunk_tokens: int,
        tail: int,
        logits: int,
    ) -> None:
        self._model = model
        self._tokens = torch.from_numpy(tokens)
        self._logits = logits
        length, reused = len(tokens), len(tokens) - tail
        store = -(-length // BLOCK_TOKENS)
        self._cache = KVCache(checkpoint.kv_layout(BLOCK_TOKENS, "float32"), store + reused // BLOCK_TOKENS)
        self._sources = torch.full((length,), -1)
        self._shifts = torch.zeros(length, dtype=torch.int64)
        for start in range(chunk_tokens, reused, chunk_tokens):
            here = slice(start, start + chunk_tokens)
            self._compute(self._tokens[here], 0, store + start // BLOCK_TOKENS, 1, None)
            self._sources[here] = torch.arange(start, start + chunk_tokens) + store * BLOCK_TOKENS
            self._shifts[here] = start

    def full(self) -> torch.Tensor:
        """Log-probabilities ``[logits, V]`` of the last next tokens, with everything computed."""
        return self._compute(self._tokens, 0, 0, self._logits, None)

    def blended(self, share: float, first: int, step_tokens: int, ranks: torch.Tensor | None = None) -> torch.Tensor:
        """The same from blended chunks, in steps of ``step_tokens`` (0: one step). The KV of tokens before ``first`` is
        in the cache."""
        length, parts = len(self._tokens), []
        for start in range(first, length, step_tokens or length):
            end = min(start + (step_tokens or length), length)
            here = slice(start, end)
            reuse = Reuse(self._sources[here], self._shifts[here], share, None if ranks is None else ranks[here])
            last = max(end - max(start, length - self._logits), 0)
            parts.append(self._compute(self._tokens[:end], start, 0, last, reuse))
        return torch.cat(parts)

    def _compute(
        self, tokens: torch.Tensor, first: int, first_block: int, last: int, reuse: Reuse | None
    ) -> torch.Tensor:
        whole = ForwardBatch.of_prompt(tokens, BLOCK_TOKENS, torch.arange(len(tokens) - last, len(tokens)))
        batch = replace(
            whole.part(first, len(tokens)),
            block_tables=whole.block_tables + first_block,
            slots=whole.slots[first:] + first_block * BLOCK_TOKENS,
            reuse=reuse,
        )
        return self._model.forward(batch, self._cache.tensor, NoHook()).log_softmax(-1)


def measure_quality(checkpoint: Checkpoint, model: CausalLM, options: Options, report: Report, shown: Progress) -> None:
    length = options.chunks * options.chunk_tokens + options.tail
    windows = text_windows(checkpoint, options.prompts * length, length)
    separator = checkpoint.load_tokenizer().encode(PrefillSection().blend_separator)
    random = torch.Generator().manual_seed(report.seed)
    variants: dict[str, tuple[float, bool]] = {ALL_REUSED: (0.0, False)}
    for share in options.shares:
        variants |= {f"{share:.0%} that deviate": (share, False), f"{share:.0%} at random": (share, True)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for count, window in enumerate(windows):
        for start in range(0, length - options.tail + 1, options.chunk_tokens):
            window[start : start + len(separator)] = separator
        prompt = Prompt(checkpoint, model, window, options.chunk_tokens, options.tail, options.tail)
        wanted = prompt.full()  # also fills the cache with the prefix
        for name, (share, is_random) in variants.items():
            ranks = torch.rand(length, generator=random) if is_random else None
            got = prompt.blended(share, options.chunk_tokens, options.step_tokens, ranks)
            divergence = float((wanted.exp() * (wanted - got)).sum(-1).mean())
            found[name].append((divergence, float((wanted.argmax(-1) == got.argmax(-1)).float().mean())))
        tell(shown, f"{count + 1} of {len(windows)} prompts")
    lost = float(np.mean([divergence for divergence, _ in found[ALL_REUSED]]))
    for name, pairs in found.items():
        divergence, agreement = np.mean(pairs, axis=0).tolist()
        report.add(Figure(name, "KL from full prefill", "nats", (divergence,)))
        report.add(Figure(name, "same most likely token", "", (agreement,), more_is_better=True))
        if name != ALL_REUSED:
            report.ratios[f"kl_removed_{_ratio_name(name)}"] = 1 - divergence / lost
    report.notes.append(f"kl_removed: share of the KL divergence of full reuse; means over {len(windows)} prompts")


def measure_time(checkpoint: Checkpoint, model: CausalLM, options: Options, report: Report, shown: Progress) -> None:
    """The prompt has no cached prefix, and its last chunk is computed."""
    if not options.time_tokens:
        return
    window = text_windows(checkpoint, options.time_tokens, options.time_tokens)[0]
    prompt = Prompt(checkpoint, model, window, options.chunk_tokens, tail=options.chunk_tokens, logits=1)
    ways: dict[str, Callable[[], object]] = {FULL: prompt.full}
    for share in options.shares:
        ways[f"{share:.0%} that deviate"] = lambda share=share: prompt.blended(share, 0, options.step_tokens)  # type: ignore[misc]
    times = in_turns(ways, options.repeat, tell=lambda reps: tell(shown, f"{reps} of {options.repeat} timings"))
    for name, taken in times.items():
        report.add(Figure(name, "forward pass", "ms", milliseconds(taken), params={"tokens": options.time_tokens}))
        if name != FULL:
            report.compare_subjects(f"speedup_{_ratio_name(name)}", "forward pass", FULL, name)


def _ratio_name(variant: str) -> str:
    """``15`` for "15% that deviate", ``15_random`` for "15% at random"."""
    share, _, rest = variant.partition("%")
    return share + ("_random" if rest == " at random" else "")
