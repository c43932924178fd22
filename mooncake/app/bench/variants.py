"""``mooncake bench variants``: quality lost and time saved by reading a variant's KV (DroidSpeak).

A model is fine-tuned (LoRA on every projection of every layer, merged) to name the record with the highest amount,
where amounts are words whose order is known only from training. The tuned model then answers with the KV of the untuned
one in all layers but some, which are chosen on separate prompts. Time is the TTFT of a live cluster of the receiver,
over a pool filled by a live cluster of the sender: with that KV, with it in the other order, and without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress

from mooncake.app.bench.report import Figure, Report, tell
from mooncake.app.cli.flags import Flags
from mooncake.app.variants.comparison import Comparison, Prompt, every_input
from mooncake.app.variants.profile import Search, judged, search
from mooncake.app.variants.serving import Serving, first_tokens
from mooncake.app.variants.task import MostOfAll, Question
from mooncake.app.variants.training import Training, tuned
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.errors import ConfigError
from mooncake.model import CausalLM
from mooncake.model.reading.weights import load_weights

BLOCK_TOKENS = 4  # small, so that nearly all of even short prompts is inherited
PROFILED_SEED, TESTED_SEED = 1 << 20, 1 << 21  # seeds of questions; those of training count from 0
BASE, TUNED, ALL_READ = "sender alone", "receiver alone", "all layers read"


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    training: Training
    folder: Path | None
    questions: int
    most_layers: int
    stride: int
    serving: Serving
    threads: int
    json: Path | None


def main(args: list[str]) -> None:
    """Raises ConfigError, ModelError, Cancelled after Ctrl-C (what was measured is reported first)."""
    options = parse(args)
    torch.set_num_threads(options.threads)
    training, serving = options.training, options.serving
    config: dict[str, object] = {
        "model": Path(options.model).name,
        "dtype": "float32",
        "threads": options.threads,
        "rank": training.rank,
        "steps": training.steps,
        "batch": training.batch,
        "records": training.records,
        "questions": options.questions,
        "most_layers": options.most_layers,
        "link_mb_per_s": serving.link_mb_per_s,
    }
    report = Report("variants", config, seed=training.seed)
    checkpoint = open_checkpoint(options.model)
    with report.measuring("computing") as shown:
        layers = measure_quality(checkpoint, options, report, shown) if options.questions else None
        if serving.prefix_tokens:
            timings = asyncio.run(
                first_tokens(
                    options.model, checkpoint, layers or serving.layers, serving, lambda what: tell(shown, what)
                )
            )
            tell_times(report, timings, serving)
    report.finish(options.json)


def _flags() -> Flags:
    flags = Flags("bench variants", __doc__)
    add = flags.add
    flags.model()
    add("--training", type=Path, metavar="DIR", help="folder of tuned weights: saved there, or reused")
    add("--steps", type=int, default=400, help="training steps")
    add("--batch", type=int, default=16, help="prompts per step")
    add("--rank", type=int, default=16, help="of the adapter that makes the variant")
    add("--rate", type=float, default=8e-4, help="learning rate")
    add("--records", type=int, default=12, help="records per prompt")
    add(
        "--questions",
        type=int,
        default=128,
        help="questions to answer, and as many to profile on; 0: do not measure quality",
    )
    add("--most-layers", type=int, default=10, help="maximum layers to recompute")
    add("--stride", type=int, default=2, help="step between the first layers, and sizes, of the groups to try")
    add("--layers", default="10-19", metavar="FIRST-LAST", help="layers to recompute if quality is not measured")
    add("--prefix-tokens", type=int, default=1024, help="prefix length of timed prompts; 0: none")
    add("--repeat", type=int, default=5, help="timings per measurement")
    add(
        "--link",
        type=float,
        default=0.0,
        metavar="MB/S",
        help="limit on the sender's pool, over TCP; 0: none",
    )
    add("--threads", type=int, default=torch.get_num_threads(), help="threads of the compute library")
    flags.json_file()
    return flags


def parse(args: list[str]) -> Options:
    given = _flags().read(args)
    first, dash, last = given.layers.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ConfigError(f"--layers is like 10-19, got {given.layers!r}")
    least = min(given.steps, given.batch, given.rank, given.records, given.most_layers, given.stride, given.repeat)
    if least < 1 or given.threads < 1 or min(given.questions, given.prefix_tokens) < 0 or given.link < 0:
        raise ConfigError("counts are at least 1; --questions, --prefix-tokens and --link at least 0")
    return Options(
        given.model,
        Training(given.rank, given.steps, given.batch, given.rate, given.records),
        given.training,
        given.questions,
        given.most_layers,
        given.stride,
        Serving(range(int(first), int(last) + 1), given.prefix_tokens, given.repeat, given.link, given.threads),
        given.threads,
        given.json,
    )


def measure_quality(checkpoint: Checkpoint, options: Options, report: Report, shown: Progress) -> range:
    """Returns the best group found."""
    task = MostOfAll(checkpoint.load_tokenizer(), options.training.records)
    weights = tuned(checkpoint, task, options.training, options.folder, lambda what: tell(shown, what))
    num_layers = checkpoint.config.num_layers
    sender = CausalLM(checkpoint.config, load_weights(checkpoint, "float32"), 512, keep_hidden=every_input(num_layers))
    receiver = CausalLM(checkpoint.config, weights, 512)

    def compared(seed: int) -> tuple[Comparison, list[Question]]:
        questions = task.questions(options.questions, seed)
        layout = checkpoint.kv_layout(BLOCK_TOKENS, "float32", every_input(num_layers))
        return Comparison(sender, receiver, layout, [Prompt(q.prompt, 1) for q in questions]), questions

    profiled, _ = compared(PROFILED_SEED)
    found = search(profiled, options.most_layers, options.stride, lambda what: tell(shown, what))
    best = found.pareto[-1]
    group = range(best.first, best.last + 1)
    scattered = most_telling(profiled, found, len(group), lambda what: tell(shown, what))
    del profiled
    tested, questions = compared(TESTED_SEED)
    together, apart = f"{len(group)} together", f"{len(group)} apart"
    answers = {
        BASE: tested.sender_alone(),
        TUNED: tested.full(),
        ALL_READ: tested.computed_anew(()),
        together: tested.computed_anew(group),
        apart: tested.computed_anew(scattered),
    }
    right = {name: accuracy(logits, questions) for name, logits in answers.items()}
    for name, share in right.items():
        report.add(Figure(name, "right answers", "", (share,), more_is_better=True))
        if name not in (BASE, TUNED):
            one = judged(range(0), answers[TUNED], answers[name])
            report.add(Figure(name, "KL from the receiver alone", "nats", (one.kl,)))
    gained = max(right[TUNED] - right[BASE], 1e-9)
    for ratio, name in (("kept_all_read", ALL_READ), ("kept_together", together), ("kept_apart", apart)):
        report.ratios[ratio] = (right[name] - right[BASE]) / gained
    report.notes += [
        f"kept: share of what tuning gained ({gained:.0%} of answers), over {options.questions} unseen questions",
        f"together: layers {group[0]} to {group[-1]}; apart: {', '.join(map(str, scattered))}; chosen by KL on other "
        "questions",
        f"tokens read: {tested.inherited_tokens / len(questions):.0f} of {len(questions[0].prompt)}",
    ]
    return group


def most_telling(comparison: Comparison, found: Search, count: int, tell_of: Callable[[str], None]) -> list[int]:
    """The layers that recover most of the loss when recomputed one at a time."""
    wanted = comparison.full()
    removed = []
    for layer in range(comparison.num_layers):
        tell_of(f"layer {layer} alone")
        removed.append(found.removed(judged(range(layer, layer + 1), wanted, comparison.computed_anew((layer,)))))
    return sorted(sorted(range(len(removed)), key=removed.__getitem__)[-count:])


def accuracy(logits: torch.Tensor, questions: list[Question]) -> float:
    return float((logits.argmax(-1) == torch.tensor([question.answer for question in questions])).float().mean())


def tell_times(report: Report, timings: dict[str, list[float]], serving: Serving) -> None:
    params = {"prefix": serving.prefix_tokens}
    for name, values in timings.items():
        report.add(Figure(name, "first token", "ms", tuple(values), params=params))
    full, inherited, kv_first = timings
    report.compare_subjects("speedup_first_token", "first token", full, inherited)
    report.compare_subjects("kv_first_over_inputs_first", "first token", kv_first, inherited)
