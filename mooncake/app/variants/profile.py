"""``mooncake variants profile``: the adjacent layers that a model must compute itself when it reads a variant's KV.

All groups of adjacent layers within given bounds are tried on a few prompts. The table shows their sizes and the
remaining divergence from a full prefill. The smallest group that removes the requested share of the divergence is
written to the profile that prefill nodes read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from rich.markup import escape

from mooncake.app.bench.report import progress, tell
from mooncake.app.bench.shared.prompts import text_windows
from mooncake.app.console import err, out, plain_table
from mooncake.app.outputs import writable
from mooncake.app.variants.comparison import Comparison, Prompt, agreement, divergence, every_input
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.errors import ConfigError
from mooncake.model import CausalLM, load_model
from mooncake.precision import Precision, resolve_precision
from mooncake.variants import Candidate, Profile, write_profile

TEXT_TAIL = 64  # compared tokens per window of text


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a file of prompts."""

    prompt: str
    answer: str = ""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    sender: str
    receiver: str
    out: Path
    prompts: Path | None = None  # JSON lines of {"prompt", "answer"}; None: text shipped with Python
    num_prompts: int = 4  # windows of that text
    keep: float = 0.9  # share to remove of the divergence when everything is inherited
    most_layers: int = 0  # maximum layers of a group; 0: half of the model's
    stride: int = 2  # between the first layers of groups, and between their sizes
    dtype: str = "float32"
    block_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Search:
    """Results: KL and agreement when everything is inherited, and the Pareto-optimal groups."""

    all_inherited: Candidate
    pareto: tuple[Candidate, ...]

    def choose(self, keep: float) -> Candidate | None:
        """The smallest group that removes the share ``keep`` of the divergence."""
        return next((group for group in self.pareto if self.removed(group) >= keep), None)

    def removed(self, group: Candidate) -> float:
        return 1.0 - group.kl / max(self.all_inherited.kl, 1e-12)


def profile(options: ProfileOptions) -> None:
    """Raises ConfigError, ModelError."""
    writable(options.out)
    checkpoints = [open_checkpoint(path) for path in (options.sender, options.receiver)]
    precisions = [resolve_precision(options.dtype, stored=one.coding) for one in checkpoints]
    prompts = read_prompts(options, checkpoints[1])
    with progress("profiling") as shown:
        tell(shown, "loading")
        sender, receiver = load_pair(checkpoints, precisions, max(len(prompt.tokens) for prompt in prompts))
        num_layers = checkpoints[1].config.num_layers
        layout = checkpoints[1].kv_layout(options.block_tokens, precisions[1].kv_dtype, every_input(num_layers))
        found = search(
            Comparison(sender, receiver, layout, prompts),
            options.most_layers or num_layers // 2,
            options.stride,
            lambda what: tell(shown, what),
        )
    show(found)
    group = found.choose(options.keep)
    if group is None:
        raise ConfigError(
            f"no group of up to {options.most_layers or num_layers // 2} layers removes {options.keep:.0%} of the "
            "divergence: raise --most-layers or lower --keep"
        )
    keeps = (group.first,) if group.first else ()
    names = [one.identity(where.digest) for one, where in zip(precisions, checkpoints, strict=True)]
    write_profile(options.out, Profile(names[0], names[1], group.first, group.last, keeps, pareto=found.pareto))
    kept = f"the sender with model.keep_hidden={list(keeps)} and " if keeps else ""
    file = escape(str(options.out))
    err.print(f"written: {file}. Serve {escape(kept)}the receiver with prefill.variant={file}.", soft_wrap=True)


def load_pair(
    checkpoints: list[Checkpoint], precisions: list[Precision], max_model_len: int
) -> tuple[CausalLM, CausalLM]:
    """The sender, which keeps every layer's input, and the receiver. Raises ModelError; ConfigError if they are not
    variants of one model."""
    shapes = [
        (c.config.architecture, c.config.num_layers, c.config.hidden_size, c.config.num_kv_heads, c.config.head_dim)
        for c in checkpoints
    ]
    if shapes[0] != shapes[1]:
        raise ConfigError(f"{checkpoints[0].name} and {checkpoints[1].name} are not variants of one model")
    models = []
    for checkpoint, precision, keep in zip(checkpoints, precisions, (every_input(shapes[0][1]), ()), strict=True):
        form = replace(precision.weights, keeps_groups="")
        model = load_model(checkpoint, form, max_model_len, keep_hidden=keep)
        if not isinstance(model, CausalLM):
            raise ConfigError("variants share KV only in the Llama family")
        models.append(model)
    return models[0], models[1]


def read_prompts(options: ProfileOptions, checkpoint: Checkpoint) -> list[Prompt]:
    """Raises ConfigError."""
    if options.prompts is None:
        length = 8 * options.block_tokens + TEXT_TAIL
        windows = text_windows(checkpoint, options.num_prompts * length, length)
        return [Prompt(window.tolist(), TEXT_TAIL) for window in windows]
    tokenizer, found = checkpoint.load_tokenizer(), []
    try:
        lines = [line for line in options.prompts.read_bytes().splitlines() if line.strip()]
        for line in (msgspec.json.decode(line, type=Line) for line in lines):
            prompt, answer = tokenizer.encode(line.prompt).tolist(), tokenizer.encode(line.answer).tolist()
            found.append(Prompt(prompt + answer, len(answer) + 1))
    except OSError as error:
        raise ConfigError(f"cannot read {options.prompts}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f'{options.prompts} must have lines like {{"prompt": "…", "answer": "…"}}: {error}') from None
    too_short = [one for one in found if len(one.tokens) - one.num_compared < options.block_tokens]
    if too_short or not found:
        raise ConfigError(
            f"{options.prompts}: prompts must be longer than a block ({options.block_tokens} tokens); "
            f"{len(too_short)} of {len(found)} are not"
        )
    return found


def search(comparison: Comparison, most_layers: int, stride: int, tell_of: Callable[[str], None]) -> Search:
    wanted = comparison.full()
    nothing = judged(range(0), wanted, comparison.computed_anew(()))
    found: list[Candidate] = []
    num_layers = comparison.num_layers
    for first in range(0, num_layers, stride):
        lasts = sorted({min(first + size, num_layers) - 1 for size in range(stride, most_layers + 1, stride)})
        tell_of(f"groups from layer {first} of {num_layers}")
        found += [judged(layers, wanted, got) for layers, got in comparison.groups(first, lasts)]
    return Search(nothing, pareto(found))


def judged(layers: range, wanted: torch.Tensor, got: torch.Tensor) -> Candidate:
    """Compares log-probabilities ``[R, V]`` with ``layers`` recomputed to those of a full prefill."""
    return Candidate(layers.start, layers.stop - 1, divergence(wanted, got), agreement(wanted, got))


def pareto(groups: list[Candidate]) -> tuple[Candidate, ...]:
    """The Pareto-optimal groups: none with as few layers is as good. The smallest first."""
    best: list[Candidate] = []
    for group in sorted(groups, key=lambda one: (one.last - one.first, one.kl)):
        if not best or group.kl < best[-1].kl:
            best.append(group)
    return tuple(best)


def show(found: Search) -> None:
    table = plain_table("layers computed anew", "first", "last", "KL, nats", "removed", "same most likely token")
    nothing = found.all_inherited
    table.add_row("0", "", "", f"{nothing.kl:.4f}", "", f"{nothing.agreement:.0%}")
    for group in found.pareto:
        size = str(group.last - group.first + 1)
        removed = f"{found.removed(group):.0%}"
        table.add_row(size, str(group.first), str(group.last), f"{group.kl:.4f}", removed, f"{group.agreement:.0%}")
    out.print(table)
