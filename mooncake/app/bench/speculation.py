"""``mooncake bench speculation``: the same answers with and without guesses, for repetitive and for free text.

Both alternate over the same prompts. There are two engines of each, opened and asked in the order A B B A: of two equal
engines in one process, the one opened later is often some per cent slower. Answers are checked to be equal, token for
token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from mooncake.app.bench.report import Report, tell, told
from mooncake.app.cli.flags import Flags
from mooncake.errors import ConfigError, InternalError
from mooncake.in_process.llm import LLM
from mooncake.sampling_params import SamplingParams

PASSAGE = (
    "The lighthouse keeper wrote down the weather every evening: the wind, the height of the waves, the colour of the "
    "sky at dusk, and the names of the ships that passed. On the first of March the wind came from the north-east and "
    "three ships went by, the Aurora, the Halcyon and the Mary Celeste, all of them heading south with the tide. "
)
COPYING = (
    f"Repeat the text between the marks word for word.\n---\n{PASSAGE}---\nHere is the text again:\n---\n{PASSAGE}---\n"
    "And once more:\n---\n"
)
FREE = ("Once upon a time there was", "The best way to learn a new language is", "In the year 2150, cities")
NOTES = (
    "copying: greedy, a passage is repeated; free: sampled at temperature 1, which seldom repeats itself",
    "every answer with guesses was equal to the one without, token for token",
)


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    dtype: str
    tokens: int
    guesses: int
    reps: int
    max_s: float
    threads: int
    seed: int
    json: Path | None


def main(args: list[str]) -> None:
    """Raises ConfigError, InternalError when an answer differs, Cancelled after Ctrl-C."""
    options = parse(args)
    report = Report("speculation", told(options), options.seed, notes=list(NOTES))
    with report.measuring("speculation") as shown:
        tell(shown, "loading")
        engines = [
            (name, _engine(options, options.guesses if name == "guesses" else 0))
            for name in ("plain", "guesses", "guesses", "plain")
        ]
        greedy = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
        drawn = replace(greedy, temperature=1.0)
        for batch in (1, 4):
            _measure(report, engines, "copying", [COPYING] * batch, greedy, options)
            free = [FREE[i % len(FREE)] for i in range(batch)]
            _measure(report, engines, "free", free, drawn, options)
            tell(shown, f"batch {batch} is done")
    for batch in (1, 4):
        for task in ("copying", "free"):
            report.compare_subjects(f"{task}_b{batch}", task, "guesses", "plain", batch=batch)
    report.finish(options.json)


def parse(args: list[str]) -> Options:
    flags = Flags("bench speculation", __doc__)
    add = flags.add
    flags.model()
    flags.plain_dtype()
    add("--tokens", type=int, default=64, help="tokens per answer")
    add("--guesses", type=int, default=16, help="maximum guesses per step")
    flags.reps(3, "turns of each")
    flags.turns_within()
    flags.threads()
    flags.seed()
    flags.json_file()
    options = Options(**vars(flags.read(args)))
    if min(options.tokens, options.guesses) < 1:
        raise ConfigError("--tokens and --guesses must be positive")
    return options


def _engine(options: Options, guesses: int) -> LLM:
    return LLM(
        options.model,
        options.dtype,
        kv_gb=0.4,
        max_model_len=2048,
        threads=options.threads,
        speculative_tokens=guesses,
    )


def _measure(
    report: Report,
    engines: list[tuple[str, LLM]],
    task: str,
    prompts: list[str],
    sampling: SamplingParams,
    options: Options,
) -> None:
    """Tokens per second over whole answers; a warm-up turn caches the prompt."""
    wanted: list[list[int]] | None = None
    samplings = [replace(sampling, seed=options.seed + 1 + number) for number in range(len(prompts))]
    deadline_s = time.monotonic() + options.max_s / 4  # there are four tasks
    for rep in range(options.reps + 1):
        if rep > 1 and time.monotonic() > deadline_s:
            break
        for name, llm in engines:
            began_s = time.perf_counter()
            answers = [answer.token_ids for answer in llm.generate(prompts, samplings, use_tqdm=False)]
            elapsed_s = time.perf_counter() - began_s
            if wanted is not None and answers != wanted:
                raise InternalError(f"answers with {name} differ from those without")
            wanted = answers
            if rep:
                rate = sum(map(len, answers)) / elapsed_s
                report.add_value(name, task, "tok/s", rate, more_is_better=True, batch=len(prompts))
