"""The beam searches in an engine: which sequence computes which beam, and when a search can advance.

``beams`` decides which beams continue and which are finished; blocks are shared and freed through functions that the
engine passes. It knows neither steps, where logits come from nor who waits for the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

import torch

from mooncake.engine.contract import StepOutput
from mooncake.engine.decoding.beams import Beams, Candidate, best_candidates, num_candidates
from mooncake.engine.sequence import SCHEDULABLE, Sequence
from mooncake.types import SampledToken, TokenLogprob

Row = torch.Tensor  # logits [V] float32
Score = Callable[[torch.Tensor, Rows[int], Rows[int], Rows[int]], list[TokenLogprob]]  # ``Sampler.score``


@dataclass(slots=True)
class SearchState:
    """The running beams of one request, the sequence of each, and the logits of those already computed."""

    beams: Beams
    sequences: list[Sequence]
    prompt_logprobs: list[TokenLogprob] | None  # reported with the first token
    rows: dict[str, Row] = field(default_factory=dict)  # by sequence
    num_forks: int = 0

    def take_candidates(self, score: Score) -> list[Candidate]:
        """``score`` tells of each what the request asked for, if it asked."""
        rows = [self.rows[sequence.request_id] for sequence in self.sequences]
        self.rows.clear()
        best = best_candidates(rows, self.beams.scores, self.beams.keep)
        num_top = self.sequences[0].sampling.logprobs
        if num_top is None:
            return best
        of_beam, token_ids = [each.beam for each in best], [each.token_id for each in best]
        told = score(torch.stack(rows), of_beam, token_ids, [num_top] * len(best))
        return [replace(each, told=logprob) for each, logprob in zip(best, told, strict=True)]


class BeamSearches:
    """By request. A search that ends outputs its answers and is forgotten."""

    def __init__(
        self,
        fork: Callable[[Sequence, list[Sequence]], None],
        remove: Callable[[Sequence], None],
        stop_early: Callable[[Sequence], None],
    ) -> None:
        """``fork`` starts sequences from the blocks of another one; ``remove`` frees a sequence's blocks, and so does
        ``stop_early``, except for blocks that somebody else may still be filling."""
        self._fork = fork
        self._remove = remove
        self._stop_early = stop_early
        self._searches: dict[str, SearchState] = {}

    def start(self, sequence: Sequence, candidates: list[Candidate]) -> list[StepOutput]:
        """A search whose prompt was computed elsewhere, with the candidates that ``first_candidates`` returned
        there."""
        search = self._search_of(sequence)
        return self.advance(search, candidates[: search.beams.keep])

    def park(self, computed: list[tuple[Sequence, Row]]) -> list[SearchState]:
        """These beams are computed: each keeps its row of logits, and waits for the other beams of its search, which
        may be computed in other steps. Returns the searches that are complete now."""
        searches: dict[str, SearchState] = {}
        for sequence, row in computed:
            search = searches[sequence.root_id] = self._search_of(sequence)
            search.rows[sequence.request_id] = row.clone()
            sequence.is_parked = True
        return [search for search in searches.values() if len(search.rows) == len(search.sequences)]

    def advance(self, search: SearchState, candidates: list[Candidate]) -> list[StepOutput]:
        """By one token: beams that continue the same one share its blocks; beams without continuation end.

        Returns everything the search found, once it is over.
        """
        continuing = search.beams.advance(candidates)
        if not continuing:
            return self._finish(search)
        old, search.sequences = search.sequences, []
        continued: set[int] = set()
        for candidate in continuing:
            parent = old[candidate.beam]
            if candidate.beam in continued:  # fork before the parent itself continues
                search.num_forks += 1
                search.sequences.append(parent.fork_beam(search.num_forks, candidate.token_id))
            else:
                search.sequences.append(parent)
            continued.add(candidate.beam)
        for candidate, sequence in zip(continuing, search.sequences, strict=True):
            if sequence is not old[candidate.beam]:
                self._fork(old[candidate.beam], [sequence])
        for candidate, sequence in zip(continuing, search.sequences, strict=True):
            sequence.is_parked = False
            if sequence is old[candidate.beam]:
                sequence.append(candidate.token_id)
        for beam, sequence in enumerate(old):
            if beam not in continued:
                self._remove(sequence)
        return []

    def drop(self, root_id: str) -> None:
        """End the request's search, if it has one. Idempotent."""
        search = self._searches.pop(root_id, None)
        for sequence in search.sequences if search else ():
            if sequence.state in SCHEDULABLE:
                self._stop_early(sequence)

    def _search_of(self, sequence: Sequence) -> SearchState:
        search = self._searches.get(sequence.root_id)
        if search is None:
            sampling = sequence.sampling
            assert sampling.beam_search is not None
            beams = Beams(sampling.beam_search, sampling.n, sequence.stop_ids, sequence.max_new_tokens)
            search = self._searches[sequence.root_id] = SearchState(beams, [sequence], sequence.prompt_logprobs)
        return search

    def _finish(self, search: SearchState) -> list[StepOutput]:
        """Everything it found is output at once, best first."""
        first, scores = search.sequences[0], search.prompt_logprobs
        outputs: list[StepOutput] = []
        for choice, answer in enumerate(search.beams.finished):
            tokens = answer.tokens(first.sampling.logprobs is not None)
            for token in tokens:
                reason = answer.finish_reason if token is tokens[-1] else None
                prompt_logprobs = tuple(scores) if scores is not None and not outputs else None
                outputs.append(StepOutput(first.root_id, token, reason, choice, prompt_logprobs))
        self.drop(first.root_id)
        return outputs


def beam_rows(beams: list[tuple[Sequence, int]], logits: torch.Tensor) -> list[tuple[Sequence, Row]]:
    """Each beam's row of ``logits`` [R, V]. A beam without a best token there gets its ``failure`` set, as by the
    sampler."""
    rows: list[tuple[Sequence, Row]] = []
    for sequence, row in beams:
        if not math.isfinite(float(logits[row].max())):
            sequence.fail_not_finite()
        elif sequence.failure is None:
            rows.append((sequence, logits[row]))
    return rows


def first_candidates(sequence: Sequence, row: Row) -> SampledToken:
    """What the engine that continues the search gets instead of a token: its first candidates, as log-probabilities
    of the best one; more, where as many log-probabilities are asked for."""
    count = max(num_candidates(sequence.sampling.n, len(sequence.stop_ids)), sequence.sampling.logprobs or 0)
    best = best_candidates([row], [0.0], count)
    top = tuple((candidate.token_id, candidate.score) for candidate in best)
    return SampledToken(sequence.num_generated, best[0].token_id, TokenLogprob(best[0].score, top))


def handed_candidates(token: SampledToken, num_top: int | None = None) -> list[Candidate]:
    """What ``first_candidates`` put into a token in another engine; empty for ordinary tokens. Its candidates are the
    most likely tokens there are, so ``num_top`` log-probabilities and the ranks are known from them."""
    best = token.logprob.top if token.logprob else ()
    return [
        Candidate(0, token_id, score, None if num_top is None else TokenLogprob(score, best[:num_top], rank))
        for rank, (token_id, score) in enumerate(best, 1)
    ]
