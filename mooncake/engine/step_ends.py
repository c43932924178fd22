"""What follows a step: which rows of its logits belong to whom, and the outputs.

It knows neither how tokens are drawn, nor what happens to sequences that end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from mooncake.engine.contract import StepOutput
from mooncake.engine.sampler import Sampler
from mooncake.engine.scheduler import StepEntry
from mooncake.engine.sequence import Sequence
from mooncake.types import FinishReason, SampledToken, TokenLogprob


class Ends(NamedTuple):
    """The entries that reach the end of their tokens, by what follows. Each has one row of logits, followed by one
    per guess."""

    answers: list[Sequence]  # a token is drawn for each
    rows: list[int]  # from these rows
    families: list[list[Sequence]]  # the answers to one prompt; all but the first start here
    drafts: list[tuple[Sequence, list[int], int]]  # guesses, and the row that the first is checked against
    beams: list[tuple[Sequence, int]]
    num_rows: int


def ends_of(ended: list[StepEntry], answers_of: Callable[[Sequence], list[Sequence]]) -> Ends:
    """All answers to a prompt draw from its last row; ``answers_of`` creates the others."""
    answers: list[Sequence] = []
    rows: list[int] = []
    families: list[list[Sequence]] = []
    drafts: list[tuple[Sequence, list[int], int]] = []
    beams: list[tuple[Sequence, int]] = []
    row = 0
    for sequence, _, _, num_draft in ended:
        if sequence.is_beam:
            beams.append((sequence, row))
        elif sequence.has_forked:
            answers.append(sequence)
            rows.append(row)
        else:
            families.append(answers_of(sequence))
            answers += families[-1]
            rows += [row] * len(families[-1])
        row += 1
        if num_draft:  # copied before tokens are written over them
            draft = sequence.window(sequence.num_tokens, sequence.num_tokens + num_draft).tolist()
            drafts.append((sequence, draft, row))
            row += num_draft
    return Ends(answers, rows, families, drafts, beams, row)


def grown(
    sequence: Sequence, token_id: int, logprob: TokenLogprob | None, why_last: FinishReason | None = None
) -> StepOutput:
    """Append a token and return its output; ``why_last``: why this is the last token, whatever it is."""
    token = SampledToken(sequence.num_tokens - sequence.num_prompt, token_id, logprob)
    scores, reason = sequence.prompt_logprobs, sequence.append(token_id) or why_last
    if scores is None:
        return StepOutput(sequence.root_id, token, reason, sequence.choice)
    sequence.prompt_logprobs = None
    return StepOutput(sequence.root_id, token, reason, sequence.choice, tuple(scores))


def score_prompts(entries: list[StepEntry], logits: torch.Tensor, sampler: Sampler) -> None:
    """The log-probability of each prompt token given those before it: the last rows of ``logits`` [R, V] are those
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
