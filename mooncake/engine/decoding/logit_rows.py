"""Which rows of a step's logits belong to whom, and what follows from each: a sampled token, a verified draft, a beam.

It knows neither how tokens are sampled, nor what happens to sequences that end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mooncake.engine.contract import StepOutput
from mooncake.engine.decoding.sampler import Sampler
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import StepEntry
from mooncake.types import FinishReason, SampledToken, TokenLogprob


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens of a sequence; the first one follows its newest token, and has its logits in ``row``."""

    sequence: Sequence
    token_ids: list[int]
    row: int


class LogitRows(NamedTuple):
    """The sequences that need a next token, by how they get it. Each has one row of logits, then one per draft token.
    (A tuple: one is made in every step.)"""

    sampled: list[Sequence]  # a token is sampled for each of these
    rows: list[int]  # from these rows
    forks: list[list[Sequence]]  # prompts with several answers: the first answer, and the others, which start here
    drafts: list[Draft]
    beams: list[tuple[Sequence, int]]


def assign_rows(complete: list[StepEntry], answers_of: Callable[[Sequence], list[Sequence]]) -> LogitRows:
    """``complete`` are the entries that reach the end of their tokens. All answers to a prompt are sampled from its
    last row; ``answers_of`` creates the others."""
    sampled: list[Sequence] = []
    rows: list[int] = []
    forks: list[list[Sequence]] = []
    drafts: list[Draft] = []
    beams: list[tuple[Sequence, int]] = []
    row = 0
    for sequence, _, _, num_draft in complete:
        if sequence.is_beam:
            beams.append((sequence, row))
        elif sequence.has_forked:
            sampled.append(sequence)
            rows.append(row)
        else:
            forks.append(answers_of(sequence))
            sampled += forks[-1]
            rows += [row] * len(forks[-1])
        row += 1
        if num_draft:  # copied before tokens are written over them
            token_ids = sequence.token_slice(sequence.num_tokens, sequence.num_tokens + num_draft).tolist()
            drafts.append(Draft(sequence, token_ids, row))
            row += num_draft
    return LogitRows(sampled, rows, forks, drafts, beams)


def append_token(
    sequence: Sequence, token_id: int, logprob: TokenLogprob | None, why_last: FinishReason | None = None
) -> StepOutput:
    """Append a token and return its output; ``why_last``: why this is the last token, whatever it is."""
    token = SampledToken(sequence.num_tokens - sequence.num_prompt, token_id, logprob)
    scores, reason = sequence.prompt_logprobs, sequence.append(token_id) or why_last
    if scores is None:
        return StepOutput(sequence.root_id, token, reason, sequence.choice)
    sequence.prompt_logprobs = None
    return StepOutput(sequence.root_id, token, reason, sequence.choice, tuple(scores))


def add_prompt_logprobs(entries: list[StepEntry], logits: torch.Tensor, sampler: Sampler) -> None:
    """Add the log-probability of each prompt token, given those before it: the last rows of ``logits`` [R, V] are those
    of the scored positions, in order. A prompt with a non-finite row gets its ``failure`` set."""
    found: list[Sequence] = []  # the sequence of each scored position
    rows: list[int] = []
    token_ids: list[int] = []
    num_tops: list[int] = []
    first_row = logits.shape[0] - sum(len(entry.scored) for entry in entries)
    for entry in entries:
        scored, scores, num_top = entry.scored, entry.sequence.prompt_logprobs, entry.sequence.sampling.prompt_logprobs
        if not scored:
            continue
        assert scores is not None and num_top is not None
        first = max(scored.start, len(scores))  # earlier ones were reported before a preemption
        count = scored.stop - first
        found += [entry.sequence] * count
        rows += range(first_row + first - scored.start, first_row + len(scored))
        token_ids += entry.sequence.tokens[first + 1 : scored.stop + 1].tolist()
        num_tops += [num_top] * count
        first_row += len(scored)
    if not found:
        return
    for sequence, score in zip(found, sampler.score(logits, rows, token_ids, num_tops), strict=True):
        if math.isfinite(score.logprob):
            assert sequence.prompt_logprobs is not None
            sequence.prompt_logprobs.append(score)
        else:
            sequence.fail_not_finite()
