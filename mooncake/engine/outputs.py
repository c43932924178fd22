"""From a step's logits to its outputs: tokens are sampled, drafts verified, answers forked, beam searches advanced.

It knows neither how logits are computed nor what the next step is.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from mooncake.engine.cache.block_manager import BlockManager
from mooncake.engine.contract import StepOutput
from mooncake.engine.decoding.beam_search import SearchState, beam_rows, first_candidates, handed_candidates
from mooncake.engine.decoding.logit_rows import Draft, LogitRows, add_prompt_logprobs, append_token, assign_rows
from mooncake.engine.decoding.sampler import Sampler
from mooncake.engine.requests import Requests
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import StepEntry
from mooncake.pooling import Pooling, Vector
from mooncake.types import FinishReason, SampledToken, TokenLogprob

_NO_TOKEN = SampledToken(0, 0)  # of a sequence that is pooled


class OutputProcessor:
    """Appends tokens to sequences, and collects them as outputs until they are taken."""

    def __init__(self, requests: Requests, block_manager: BlockManager, sampler: Sampler) -> None:
        self.outputs: list[StepOutput] = []
        self.num_drafted = self.num_accepted = 0  # draft tokens
        self._requests = requests
        self._searches = requests.searches
        self._blocks = block_manager
        self._sampler = sampler

    def process(
        self,
        entries: list[StepEntry],
        complete: list[StepEntry],
        logits: torch.Tensor,
        hidden: torch.Tensor | None = None,
    ) -> tuple[list[Sequence], list[SearchState]]:
        """``complete`` are the entries that reach the end of their tokens; ``logits`` [R, V] are in the order of
        ``BatchBuilder.build``, and so are ``hidden`` states [P, hidden] of sequences that are pooled.

        Returns what ``finish`` gets once the step's hook is done: sequences that end, with their last token or because
        they cannot have it, and beam searches that can advance.
        """
        if logits.shape[0] > len(complete):
            add_prompt_logprobs(entries, logits, self._sampler)
        rows = assign_rows(complete, self._answers_of)
        finished = self._sample(rows, logits)
        searches = self._park_beams(rows.beams, logits, finished) if rows.beams else []
        if hidden is not None:
            finished += self._pool(entries, hidden)
        failed = (entry.sequence for entry in entries if entry.sequence.failure is not None)
        finished += [sequence for sequence in failed if sequence not in finished]
        return finished, searches

    def finish(self, finished: list[Sequence], searches: list[SearchState]) -> None:
        """The second half of ``process``, when nobody reads the finished sequences' blocks any more."""
        for sequence in finished:
            self._requests.finish(sequence)
        for search in searches:
            self._output_search(self._searches.advance(search, search.take_candidates(self._sampler.score)))

    def append_sampled(
        self, sequences: list[Sequence], tokens: Iterable[tuple[int, TokenLogprob | None]]
    ) -> list[Sequence]:
        """Append each sequence's token. Returns those that end with it, or cannot have it."""
        finished: list[Sequence] = []
        for sequence, (token_id, logprob) in zip(sequences, tokens, strict=True):
            if sequence.failure is not None:
                finished.append(sequence)
                continue
            output = append_token(sequence, token_id, logprob)
            self.outputs.append(output)
            if output.finish_reason is not None:
                finished.append(sequence)
        return finished

    def start_answers(self, sequence: Sequence, first_tokens: list[SampledToken]) -> None:
        """The prompt was computed by another engine, which also sampled the first token of each answer."""
        if sequence.is_beam:
            candidates = handed_candidates(first_tokens[0], sequence.sampling.logprobs)
            self._output_search(self._searches.start(sequence, candidates))
            return
        answers = self._answers_of(sequence)
        finished = []
        for answer, token in zip(answers, first_tokens, strict=True):
            self.outputs.append(append_token(answer, token.token_id, token.logprob))
            if self.outputs[-1].finish_reason is not None:
                finished.append(answer)
        self._requests.fork(sequence, [answer for answer in answers[1:] if answer not in finished])
        for answer in finished:
            self._requests.finish(answer)

    def _sample(self, rows: LogitRows, logits: torch.Tensor) -> list[Sequence]:
        """Sample a token per answer, and more where draft tokens are right. Returns the sequences that end with it, or
        cannot have it."""
        tokens = self._sampler.sample(logits, rows.sampled, rows.rows) if rows.sampled else []
        finished = self.append_sampled(rows.sampled, tokens)
        for parent, *children in rows.forks:
            self._requests.fork(parent, [child for child in children if child not in finished])
        for draft in rows.drafts:
            if self._verify(draft, logits, draft.sequence in finished):
                finished.append(draft.sequence)
        return finished

    def _verify(self, draft: Draft, logits: torch.Tensor, has_ended: bool) -> bool:
        """Accept draft tokens as long as each is the token that is sampled anyway. Returns whether the sequence
        ends."""
        sequence, row, num_accepted, ends = draft.sequence, draft.row, 0, False
        for token_id in draft.token_ids:
            if has_ended or ends or sequence.last_token != token_id:
                break
            sequence.num_computed += 1
            ends = bool(self.append_sampled([sequence], self._sampler.sample(logits, [sequence], [row])))
            row += 1
            num_accepted += 1
        self._blocks.seal_full(sequence)
        self._blocks.free_rejected(sequence)
        assert sequence.draft_memory is not None
        sequence.draft_memory.note_verified(len(draft.token_ids), num_accepted, sequence.num_tokens)
        self.num_drafted += len(draft.token_ids)
        self.num_accepted += num_accepted
        return ends

    def _answers_of(self, sequence: Sequence) -> list[Sequence]:
        """The sequence, and, if its prompt has just been computed for several answers, the other answers, which have
        no blocks yet."""
        if sequence.has_forked:
            return [sequence]
        sequence.has_forked = True
        others = [sequence.fork_answer(choice) for choice in range(1, sequence.sampling.num_answers)]
        self._requests.expect(sequence.root_id, len(others))
        return [sequence, *others]

    def _pool(self, entries: list[StepEntry], hidden: torch.Tensor) -> list[Sequence]:
        """Take each sequence's states. Returns those that are complete."""
        finished, row = [], 0
        for entry in entries:
            sequence, count = entry.sequence, len(entry.pooled)
            states, row = hidden[row : row + count], row + count
            if not count:
                continue
            pooled = states[-1].numpy()
            if sequence.pooling is Pooling.MEAN:
                pooled = self._add_to_mean(sequence, states[max(sequence.num_summed - entry.first, 0) :], entry.end)
            if entry.end < sequence.num_tokens:
                continue
            if not np.isfinite(pooled).all():
                sequence.fail_not_finite()
                continue
            output = StepOutput(sequence.root_id, _NO_TOKEN, FinishReason.STOP, pooled=pooled.copy())
            self.outputs.append(output)
            finished.append(sequence)
        return finished

    def _add_to_mean(self, sequence: Sequence, states: torch.Tensor, end: int) -> Vector:
        """``states`` are those of its next tokens before ``end``, summed so exactly that it does not matter where
        chunks end."""
        total: npt.NDArray[np.float64] = states.double().sum(0).numpy()
        sequence.hidden_sum = total if sequence.hidden_sum is None else sequence.hidden_sum + total
        sequence.num_summed = max(sequence.num_summed, end)
        return (sequence.hidden_sum / sequence.num_summed).astype(np.float32)

    # Beam searches

    def _park_beams(
        self, beams: list[tuple[Sequence, int]], logits: torch.Tensor, finished: list[Sequence]
    ) -> list[SearchState]:
        """Give each beam its row. Returns the searches of which all beams have theirs; prompts whose search another
        engine continues are ``finished`` instead."""
        parked = []
        for sequence, row in beam_rows(beams, logits):
            if sequence.is_prefill_only:
                token = first_candidates(sequence, row)
                self.outputs.append(append_token(sequence, token.token_id, token.logprob, FinishReason.LENGTH))
                finished.append(sequence)
            else:
                parked.append((sequence, row))
        return self._searches.park(parked)

    def _output_search(self, found: list[StepOutput]) -> None:
        """Output the answers that a search has found, if it is over."""
        if found:
            self.outputs += found
            self._requests.close(found[0].request_id)
