"""The engine that both roles share: sequences in, steps of ragged batches, tokens out.

``Engine.step`` is all of it: plan, run, sample, advance, retire; ``run_ahead`` overlaps that with a device. One thread
owns an engine; only ``load`` and ``match`` may be called from others. It does not know where KV comes from or goes to:
that is the hook's business.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from itertools import repeat

import torch

from mooncake.engine.block_pool import BlockPool
from mooncake.engine.contract import (
    NO_HOOK,
    Cache,
    CausalModel,
    EngineConfig,
    EngineLoad,
    RecomputingModel,
    Reservation,
    StartingModel,
    StepHook,
    StepOutput,
)
from mooncake.engine.draft_model import DraftModel
from mooncake.engine.gate import Gate
from mooncake.engine.hidden_states import hidden_states_of
from mooncake.engine.roster import Roster
from mooncake.engine.run_ahead import RunAhead
from mooncake.engine.sampler import Sampler
from mooncake.engine.scheduler import Admission, Scheduler, StepEntry, StepPlan, num_prompt_tokens_left
from mooncake.engine.searches import Searches, first_candidates, handed_candidates, rows_of
from mooncake.engine.sequence import SCHEDULABLE, Sequence, SequenceState
from mooncake.engine.speculation import PromptLookup
from mooncake.engine.step_batch import BatchBuilder
from mooncake.engine.step_costs import StepCosts
from mooncake.engine.step_ends import Ends, ends_of, grown, score_prompts
from mooncake.errors import (
    Cancelled,
    ConfigError,
    HandoffFailed,
    InvalidRequest,
    KVLoadFailed,
    MooncakeError,
    NotFinite,
)
from mooncake.guides import Guides
from mooncake.types import BlockKey, FinishReason, SampledToken, TokenLogprob

__all__ = [
    "NO_HOOK",
    "Cache",
    "CausalModel",
    "Engine",
    "EngineConfig",
    "EngineLoad",
    "Reservation",
    "StepEntry",
    "StepHook",
    "StepOutput",
    "StepPlan",
]


class Engine:
    """Runs sequences over one paged cache."""

    def __init__(
        self,
        model: CausalModel,
        cache: Cache,
        config: EngineConfig,
        guides: Guides | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """``guides`` compiles guides for the model's vocabulary; without it, guided requests are refused.
        ``draft_model`` replaces prompt lookup where ``config.speculative_tokens`` allows guesses. Raises ConfigError
        if the model cannot compute ``config.own_layers`` alone."""
        if config.own_layers and not isinstance(model, RecomputingModel):
            raise ConfigError("prefill.variant is for the Llama family on CPUs")
        self.config = config
        self.cache = cache
        self.block_pool = BlockPool(cache.num_blocks, config.block_tokens, keep_events=config.keep_events)
        self.is_stalled = False  # the last step found nothing that could run before blocks are released
        self._model = model
        self._gate = Gate(model.config.vocab_size, config.max_model_len, guides)
        self._sampler = Sampler(guides)
        self._scheduler = Scheduler(
            self.block_pool,
            config.chunk_tokens,
            config.max_sequences,
            config.max_model_len,
            config.max_waiting,
            cache.num_places,
            config.groups,
        )
        usual_tokens = (config.chunk_tokens or config.max_model_len) + config.max_sequences
        self._batches = BatchBuilder(
            self._scheduler.block_manager.tables, config.block_tokens, usual_tokens, config.groups
        )
        self._roster = Roster()
        self._num_computed_tokens = self._num_blended_tokens = self._num_inherited_tokens = 0
        self._costs = StepCosts(config, self._scheduler.block_manager.swap)
        self._num_drafted = self._num_accepted = 0
        if config.speculative_tokens:
            drafter = draft_model or PromptLookup(config.speculative_tokens)
            self._scheduler.propose = self._costs.timed(drafter.propose)
        self._searches = Searches(self._fork, self._retire, self._break_off)
        self._ahead: RunAhead | None = None  # if the model can start steps
        if isinstance(model, StartingModel) and model.most_started:
            self._ahead = RunAhead(
                model, cache, self._scheduler, self._batches, self._costs, self._take_started, self._complete
            )
        self._not_announced: deque[Admission] = deque()
        self._outputs: list[StepOutput] = []  # produced outside a step; the next one returns them

    # Requests

    def add(self, sequence: Sequence) -> None:
        """Queue it. Raises InvalidRequest, ContextTooLong, OutOfBlocks when it can never run here, Overloaded."""
        self._check(sequence)
        try:
            self._roster.enter(sequence)
            self._scheduler.add(sequence)
        except BaseException:  # including KeyboardInterrupt, which can come anywhere
            self._scheduler.undo_add(sequence)
            self._roster.undo_add(sequence)
            raise

    def abort(self, request_id: str) -> None:
        """The request ends now, without (the rest of) its answers. Idempotent.

        A reserved one is left alone, because someone may still be writing into its blocks: use ``cancel_reserved``.
        """
        for sequence in self._roster.answers_to(request_id):
            if sequence.state is not SequenceState.RESERVED:
                self._end(sequence, Cancelled(f"request {request_id} was aborted"))

    def end_choice(self, request_id: str, choice: int) -> None:
        """One of several answers is no longer wanted; the others continue, and no output is produced. Idempotent."""
        for sequence in self._roster.answers_to(request_id):
            is_it = sequence.choice == choice and sequence.has_forked and not sequence.is_beam
            if is_it and sequence.state in SCHEDULABLE:
                self._retire(sequence)
                self._roster.close(request_id)

    def release(self, request_id: str) -> None:
        """Release the blocks kept by ``hold_blocks``. Idempotent."""
        sequence = self._roster.get(request_id)
        if sequence is not None and sequence.state is SequenceState.HELD:
            self._retire(sequence)

    def is_open(self, request_id: str) -> bool:
        """Whether some answer of the request has not ended."""
        return self._roster.is_open(request_id)

    # The receiving side of a hand-off

    def reserve(self, sequence: Sequence) -> Reservation:
        """Blocks for all its tokens, to be filled by someone else, except those that are cached here.

        Raises like ``add``; OutOfBlocks also when there is no room now.
        """
        self._check(sequence)
        first_block = self._scheduler.reserve(sequence)
        sequence.num_cached_tokens = first_block * self.config.block_tokens
        self._roster.enter(sequence)
        spans = self.config.groups.spans_behind(sequence.num_tokens, first_block, self.config.block_tokens)
        pages = [table[index] for table, span in zip(sequence.blocks.tables, spans, strict=True) for index in span]
        return Reservation(first_block, pages)

    def start_reserved(self, request_id: str, first_tokens: Rows[SampledToken]) -> None:
        """The KV of all its tokens is in place, and each of its answers begins with one of ``first_tokens``; the next
        step returns those tokens.

        Raises HandoffFailed when it is not reserved (any more), InvalidRequest when a token is not its next one.
        """
        sequence = self._roster.get(request_id)
        if sequence is None or sequence.state is not SequenceState.RESERVED:
            raise HandoffFailed(f"request {request_id} is not reserved here (any more)")
        self._gate.check_first_tokens(sequence, first_tokens)
        sequence.num_computed = sequence.num_tokens
        sequence.prompt_logprobs = None  # reported by the engine that computed the prompt
        self._seal(sequence)
        self._scheduler.start_reserved(sequence)
        if sequence.is_beam:
            self._give_out(self._searches.begin(sequence, handed_candidates(first_tokens[0])))
            return
        answers = self._answers_of(sequence)
        finished = []
        for answer, token in zip(answers, first_tokens, strict=True):
            self._outputs.append(grown(answer, token.token_id, token.logprob))
            if self._outputs[-1].finish_reason is not None:
                finished.append(answer)
        self._fork(sequence, [answer for answer in answers[1:] if answer not in finished])
        for answer in finished:
            self._complete(answer)

    def cancel_reserved(self, request_id: str) -> None:
        """Nobody writes into its blocks any more, and it will not run. Idempotent."""
        sequence = self._roster.get(request_id)
        if sequence is not None and sequence.state is SequenceState.RESERVED:
            self._end(sequence, Cancelled(f"the reservation of request {request_id} was cancelled"))

    # Failed loads

    def rewind(self, request_id: str) -> None:
        """Its blocks could not be loaded: start over and compute everything that is not cached here. Idempotent."""
        sequence = self._roster.get(request_id)
        if sequence is None:
            return
        sequence.reused.external_blocks = sequence.reused.variant_blocks = 0
        if sequence.state is SequenceState.RUNNING and sequence.blocks.is_loading:
            self._not_announced = deque(a for a in self._not_announced if a.sequence is not sequence)
            self._scheduler.requeue(sequence)

    def rewind_failed(self, error: KVLoadFailed) -> list[str]:
        """Rewind the sequences that an abandoned step's error names, or all that are loading. Returns their ids.

        Empty when none of them was loading: then the next step would fail in the same way.
        """
        loading = [sequence.request_id for sequence in self._scheduler.running if sequence.blocks.is_loading]
        failed = [request_id for request_id in loading if not error.request_ids or request_id in error.request_ids]
        for request_id in failed:
            self.rewind(request_id)
        return failed

    # The step

    @property
    def has_work(self) -> bool:
        """Whether a step may produce something. Reserved and held sequences are not work."""
        is_busy = self._ahead is not None and self._ahead.is_busy
        return bool(self._scheduler.running or self._scheduler.waiting or self._outputs or is_busy)

    def step(self, hook: StepHook = NO_HOOK) -> list[StepOutput]:
        """Run one step; returns nothing when nothing can run before blocks are released. ``take_ended`` returns
        failures.

        Raises KVLoadFailed from the hook: the step is abandoned, and the caller must call ``rewind_failed``. A step
        already running keeps the hook it was started with.
        """
        if self._ahead is not None and self._ahead.is_busy:
            self.is_stalled = False
            self._ahead.go_on()
        else:
            self._scheduler.uses_drafts = self._costs.drafts_pay
            plan = self._scheduler.plan(self._costs.budget)
            self._settle(plan)
            if plan.entries or plan.variant_entries:
                self._run(plan, hook)
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_ended(self) -> list[tuple[str, MooncakeError]]:
        """Sequences that ended without a last token since the last call, and why."""
        return self._roster.take_failures()

    def fail_all(self, error: MooncakeError, request_ids: Iterable[str] | None = None) -> None:
        """End these sequences (or all that run or wait) with ``error``: their step is impossible.

        Blocks that others may be reading or filling stay until ``release`` or ``abort``, as after a normal end.
        """
        wanted = None if request_ids is None else set(request_ids)
        self._give_up_ahead()
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            is_meant = wanted is None or sequence.request_id in wanted
            if is_meant and sequence.state in SCHEDULABLE:  # otherwise it ended with another beam of its search
                self._break_off(sequence)
                self._tell_end(sequence, error)
        self._roster.close_lost()  # answers that would have started with the step

    def match(self, keys: list[BlockKey]) -> int:
        """How many leading blocks need not be computed; from other threads only a hint."""
        return self._scheduler.block_manager.match(keys)

    def drop_cached(self) -> None:
        """Forget every block that no sequence holds."""
        self._give_up_ahead()
        self.block_pool.drop_cached()

    def load(self) -> EngineLoad:
        """A snapshot, from any thread; numbers may be one step apart."""
        running, waiting, pool = list(self._scheduler.running), list(self._scheduler.waiting), self.block_pool
        return EngineLoad(
            running=len(running),
            waiting=len(waiting),
            waiting_tokens=num_prompt_tokens_left(waiting) + num_prompt_tokens_left(running),
            context_tokens=sum(sequence.num_tokens for sequence in running),
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_in_use=pool.num_in_use,
            preemptions=self._scheduler.num_preemptions,
            swapped_blocks=self._scheduler.block_manager.num_swapped,
            forks=self._scheduler.block_manager.num_forks,
            shared_blocks=self._scheduler.block_manager.num_shared,
            copied_blocks=self._scheduler.block_manager.num_copies,
            computed_tokens=self._num_computed_tokens,
            inherited_tokens=self._num_inherited_tokens,
            blended_tokens=self._num_blended_tokens,
            drafted_tokens=self._num_drafted,
            accepted_tokens=self._num_accepted,
        )

    def _settle(self, plan: StepPlan) -> None:
        """Apply decisions of a plan that hold whether or not its step succeeds."""
        self.is_stalled = not (
            plan.entries or plan.variant_entries or plan.failures or plan.has_preempted or self._outputs
        )
        self._copy_blocks(plan.copies)
        self._not_announced += plan.admissions
        for sequence, error in plan.failures:
            self._forget(sequence, error)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        started_s = time.perf_counter()
        for source, target in copies:
            self.cache.copy_block(source, target)
        if copies:
            self._scheduler.block_manager.swap.note_copies(len(copies), (time.perf_counter() - started_s) * 1e3)

    def _run(self, plan: StepPlan, hook: StepHook) -> None:
        started_s = time.monotonic()
        self._announce(hook)
        hook.begin_step(plan)
        if self._ahead is not None and self._ahead.takes(plan, hook):
            self._ahead.run(plan, hook)
            return
        if plan.variant_entries:
            self._inherit(plan.variant_entries, hook)
            if not plan.entries:
                hook.end_step(plan)
                return
        batch, ended = self._batches.build(plan.entries)
        logits = self._model.forward(batch, self.cache.tensor, hook)
        num_tokens = batch.tokens.shape[0]
        self._advance(plan, num_tokens)
        if logits.shape[0] > len(ended):
            score_prompts(plan.entries, logits, self._sampler)
        ends = ends_of(ended, self._answers_of)
        finished = self._draw(ends, logits)
        beams = rows_of(ends.beams, logits)
        if batch.reuse is None and not plan.variant_entries:
            self._costs.note(plan.entries, num_tokens, (time.monotonic() - started_s) * 1e3)
        elif batch.reuse is not None:  # not comparable with other steps
            self._num_blended_tokens += batch.reuse.num_tokens
        finished += [self._hand_on(*beam) for beam in beams if beam[0].is_prefill_only]
        failed = (entry.sequence for entry in plan.entries if entry.sequence.failure is not None)
        finished += [sequence for sequence in failed if sequence not in finished]
        searches = self._searches.park([beam for beam in beams if not beam[0].is_prefill_only])
        try:
            hook.end_step(plan)
        finally:
            for sequence in finished:
                self._complete(sequence)
            for search in searches:
                self._give_out(self._searches.grow(search, search.take_candidates()))

    def _inherit(self, entries: list[StepEntry], hook: StepHook) -> None:
        """Compute our own layers of tokens with another model's KV. This stands even if the step fails: a sequence
        that cannot have the rest starts over."""
        assert isinstance(self._model, RecomputingModel) and self.config.own_layers is not None
        batch, _ = self._batches.build(entries)
        self._model.recompute(self.config.own_layers, batch, self.cache.tensor, hook, hidden_states_of(entries))
        self._num_inherited_tokens += len(batch.tokens)
        for entry in entries:
            entry.sequence.num_computed = entry.end

    def _draw(self, ends: Ends, logits: torch.Tensor) -> list[Sequence]:
        """Draw one token per answer, more where guesses are right. Returns the sequences that end with it, or cannot
        have it."""
        is_whole = ends.rows == list(range(logits.shape[0]))
        tokens = self._sampler.sample(logits if is_whole else logits[ends.rows], ends.answers) if ends.answers else []
        finished = self._take_tokens(ends.answers, tokens)
        for parent, *children in ends.families:
            self._fork(parent, [child for child in children if child not in finished])
        for sequence, draft, row in ends.drafts:
            if self._confirm(sequence, draft, logits[row:], sequence in finished):
                finished.append(sequence)
        return finished

    def _take_tokens(
        self, answers: Rows[Sequence], tokens: Iterable[tuple[int, TokenLogprob | None]]
    ) -> list[Sequence]:
        """Returns the sequences that end with their token, or cannot have it."""
        finished: list[Sequence] = []
        for sequence, (token_id, logprob) in zip(answers, tokens, strict=True):
            if sequence.failure is not None:
                finished.append(sequence)
                continue
            output = grown(sequence, token_id, logprob)
            self._outputs.append(output)
            if output.finish_reason is not None:
                finished.append(sequence)
        return finished

    def _take_started(self, plan: StepPlan, tokens: list[int], num_tokens: int) -> list[Sequence]:
        """Likewise, for a step that was started and is done."""
        self._advance(plan, num_tokens)
        return self._take_tokens([entry.sequence for entry in plan.entries], zip(tokens, repeat(None)))

    def _give_up_ahead(self) -> None:
        """Discard the running step; its tokens are computed again where still wanted."""
        if self._ahead is not None:
            self._ahead.give_up()

    def _confirm(self, sequence: Sequence, draft: list[int], logits: torch.Tensor, has_ended: bool) -> bool:
        """Continue drawing as long as the draws match the guesses: ``logits`` [≥ k, V] follow each guess. Returns
        whether the sequence ends."""
        num_accepted = 0
        ends = False
        for place, guess in enumerate(draft):
            if has_ended or ends or sequence.last_token != guess:
                break
            num_accepted += 1
            sequence.num_computed += 1
            ends = bool(self._take_tokens([sequence], self._sampler.sample(logits[place : place + 1], [sequence])))
        if (sequence.blocks.num_sealed + 1) * self.config.block_tokens <= sequence.num_computed:
            self._seal(sequence)
        self._scheduler.block_manager.free_rejected(sequence)
        assert sequence.draft_memory is not None
        sequence.draft_memory.judge(len(draft), num_accepted, sequence.num_tokens)
        self._num_drafted += len(draft)
        self._num_accepted += num_accepted
        return ends

    def _answers_of(self, sequence: Sequence) -> list[Sequence]:
        """The sequence, and, if its prompt has just been computed for several answers, the other answers, which have
        no blocks yet."""
        if sequence.has_forked:
            return [sequence]
        sequence.has_forked = True
        others = [sequence.fork_answer(choice) for choice in range(1, sequence.sampling.num_answers)]
        self._roster.expect(sequence.root_id, len(others))
        return [sequence, *others]

    def _hand_on(self, sequence: Sequence, row: torch.Tensor) -> Sequence:
        """Another engine continues the beam search of this prompt."""
        token = first_candidates(sequence, row)
        self._outputs.append(grown(sequence, token.token_id, token.logprob, FinishReason.LENGTH))
        return sequence

    def _give_out(self, found: list[StepOutput]) -> None:
        """Output all answers of a search that is over; otherwise nothing."""
        if found:
            self._outputs += found
            self._roster.close(found[0].request_id)

    def _fork(self, parent: Sequence, children: list[Sequence]) -> None:
        for child in children:
            self._scheduler.fork(parent, child)
            self._roster.join(child)

    def _announce(self, hook: StepHook) -> None:
        while self._not_announced:
            admission = self._not_announced.popleft()
            sequence = admission.sequence
            if sequence.state is SequenceState.RUNNING and sequence.blocks.block_table:
                hook.admitted(sequence, admission.to_load)

    def _advance(self, plan: StepPlan, num_tokens: int) -> None:
        """The step succeeded: its KV is valid."""
        self._num_computed_tokens += num_tokens
        block_tokens = self.config.block_tokens
        for sequence, first, count, num_draft in plan.entries:
            sequence.num_computed = num_computed = first + count - num_draft
            blocks = sequence.blocks
            blocks.is_loading = False
            if (blocks.num_sealed + 1) * block_tokens <= num_computed:
                self._seal(sequence)
            if num_computed >= blocks.out_of_window_at:
                self._scheduler.block_manager.free_out_of_window(sequence)

    def _seal(self, sequence: Sequence) -> None:
        """Let others share the blocks that are now full."""
        sequence.extend_keys(self.config.block_tokens)
        end = max(sequence.blocks.num_sealed, sequence.num_shareable // self.config.block_tokens)
        self._scheduler.block_manager.seal(sequence, end)

    def _complete(self, sequence: Sequence) -> None:
        """It has its last token, or cannot have it."""
        if sequence.failure is None:
            self._roster.close(sequence.root_id)
        elif sequence.state is SequenceState.FINISHED:  # with another beam of its search
            return
        else:
            if isinstance(sequence.failure, NotFinite):  # the content of its blocks may be the cause
                self._scheduler.block_manager.discard(sequence)
            self._tell_end(sequence, sequence.failure)
        if sequence.hold_blocks:
            self._scheduler.finish(sequence, hold=True)
        elif sequence.request_id in self._roster:
            self._retire(sequence)

    def _end(self, sequence: Sequence, error: MooncakeError) -> None:
        """It ends without its last token (or has it, if held: then nobody is told)."""
        if sequence.state is SequenceState.FINISHED:  # with another beam of its search
            return
        was_held = sequence.state is SequenceState.HELD
        self._retire(sequence)
        if not was_held:
            self._tell_end(sequence, error)

    def _forget(self, sequence: Sequence, error: MooncakeError) -> None:
        """The scheduler has finished it already."""
        self._roster.leave(sequence)
        self._tell_end(sequence, error)

    def _tell_end(self, sequence: Sequence, error: MooncakeError) -> None:
        self._searches.drop(sequence.root_id)
        self._roster.fail(sequence.root_id, error)

    def _break_off(self, sequence: Sequence) -> None:
        """It ends early; blocks that others may be reading or filling stay."""
        if sequence.state is SequenceState.RUNNING and (sequence.hold_blocks or sequence.blocks.is_loading):
            self._scheduler.finish(sequence, hold=True)
        else:
            self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        if self._ahead is not None:
            self._ahead.leave(sequence)
        self._scheduler.finish(sequence)
        self._roster.leave(sequence)

    def _check(self, sequence: Sequence) -> None:
        """Raises InvalidRequest, ContextTooLong."""
        if sequence.request_id in self._roster:
            raise InvalidRequest(f"request {sequence.request_id} is here already", "request_id")
        self._gate.check(sequence)
