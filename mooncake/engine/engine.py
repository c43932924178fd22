"""The engine that both roles share: sequences in, steps of ragged batches, tokens out.

``Engine.step`` is all of it: schedule, run the model, process its outputs; ``overlap`` does so while a device computes.
One thread owns an engine; only ``load`` and ``match`` may be called from others. It does not know where KV comes from
or goes to: that is the hook's business.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from itertools import repeat

from mooncake.engine.cache.block_pool import BlockPool
from mooncake.engine.contract import (
    NO_HOOK,
    AsyncModel,
    Cache,
    CausalModel,
    EngineConfig,
    EngineLoad,
    HiddenStateModel,
    RecomputingModel,
    Reservation,
    StepHook,
    StepOutput,
)
from mooncake.engine.decoding.draft_model import DraftModel
from mooncake.engine.decoding.sampler import Sampler
from mooncake.engine.decoding.speculation import PromptLookup
from mooncake.engine.hidden_states import hidden_states_of
from mooncake.engine.outputs import OutputProcessor
from mooncake.engine.overlap import OverlappedSteps
from mooncake.engine.request_checks import RequestChecks
from mooncake.engine.requests import Requests
from mooncake.engine.scheduler import StepScheduler, num_prompt_tokens_left
from mooncake.engine.sequence import SCHEDULABLE, Sequence, SequenceState
from mooncake.engine.step_batch import BatchBuilder
from mooncake.engine.step_costs import StepCosts
from mooncake.engine.step_plan import Admission, StepEntry, StepPlan
from mooncake.errors import (
    Cancelled,
    ConfigError,
    HandoffFailed,
    InvalidRequest,
    KVLoadFailed,
    MooncakeError,
)
from mooncake.guides import Guides
from mooncake.model_config import ModelConfig
from mooncake.types import BlockKey, SampledToken


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
        ``draft_model`` replaces prompt lookup where ``config.speculative_tokens`` allows drafts. Raises ConfigError
        if the model cannot compute ``config.own_layers`` alone, or keeps states that ``config.groups`` does not know
        of."""
        if config.own_layers and not isinstance(model, RecomputingModel):
            raise ConfigError("prefill.variant is for the Llama family on CPUs")
        if isinstance(model.config, ModelConfig) and model.config.recurrence and not config.groups.has_states:
            raise ConfigError("the groups are not those of a model with recurrent layers: states would change twice")
        self.config = config
        self.cache = cache
        self.block_pool = BlockPool(cache.num_blocks, config.block_tokens, keep_events=config.keep_events)
        self.is_stalled = False  # the last step found nothing that could run before blocks are released
        self._model = model
        self._scheduler = StepScheduler(
            self.block_pool,
            config.chunk_tokens,
            config.max_sequences,
            config.max_model_len,
            config.max_waiting,
            cache.num_places,
            config.groups,
        )
        blocks = self._scheduler.block_manager
        hidden_size = model.hidden_size if isinstance(model, HiddenStateModel) else 0
        has_head = not isinstance(model.config, ModelConfig) or model.config.has_head
        self._checks = RequestChecks(model.config.vocab_size, config.max_model_len, guides, bool(hidden_size), has_head)
        self.generates = has_head
        self._batches = BatchBuilder(blocks.tables, config.block_tokens, config.groups, hidden_size)
        self._requests = Requests(self._scheduler, self._retain_blocks)
        self._processor = OutputProcessor(self._requests, blocks, Sampler(guides))
        self._costs = StepCosts(config, blocks.swap)
        self._num_computed_tokens = self._num_blended_tokens = self._num_inherited_tokens = 0
        drafter = draft_model or PromptLookup(config.speculative_tokens)
        self._propose = self._costs.timed(drafter.propose)
        self._overlap: OverlappedSteps | None = None  # if the model can start steps
        if isinstance(model, AsyncModel) and model.max_async_sequences:
            self._overlap = OverlappedSteps(
                model, cache, self._scheduler, self._batches, self._costs, self._take_overlapped, self._requests.finish
            )
        self._not_announced: deque[Admission] = deque()

    # Requests

    def add(self, sequence: Sequence) -> None:
        """Queue it. Raises InvalidRequest, ContextTooLong, OutOfBlocks when it can never run here, Overloaded."""
        self._check(sequence)
        self._requests.add(sequence)

    def abort(self, request_id: str) -> None:
        """The request ends now, without (the rest of) its answers; held blocks are freed. Idempotent.

        A reserved one is left alone, because someone may still be writing into its blocks: use ``cancel_reserved``.
        """
        for sequence in self._requests.sequences_of(request_id):
            if sequence.state is not SequenceState.RESERVED:
                self._requests.fail(sequence, Cancelled(f"request {request_id} was aborted"))

    def end_choice(self, request_id: str, choice: int) -> None:
        """One of several answers is no longer wanted; the others continue, and no output is produced. Idempotent.

        Blocks that others may be reading or filling stay until ``abort``, as after a normal end.
        """
        for sequence in self._requests.sequences_of(request_id):
            is_it = sequence.choice == choice and sequence.has_forked and not sequence.is_beam
            if is_it and sequence.state in SCHEDULABLE:
                self._requests.stop_early(sequence)
                self._requests.close(request_id)

    def is_open(self, request_id: str) -> bool:
        """Whether some answer of the request has not ended."""
        return self._requests.is_open(request_id)

    # The receiving side of a hand-off

    def reserve(self, sequence: Sequence) -> Reservation:
        """Blocks for all its tokens, to be filled by someone else, except those that are cached here.

        Raises like ``add``; OutOfBlocks also when there is no room now.
        """
        self._check(sequence)
        first_block = self._requests.reserve(sequence)
        sequence.num_cached_tokens = first_block * self.config.block_tokens
        spans = self.config.groups.spans_behind(sequence.num_tokens, first_block, self.config.block_tokens)
        pages = [table[index] for table, span in zip(sequence.blocks.tables, spans, strict=True) for index in span]
        return Reservation(first_block, pages)

    def start_reserved(self, request_id: str, first_tokens: list[SampledToken]) -> None:
        """The KV of all its tokens is in place, and each of its answers begins with one of ``first_tokens``; the next
        step returns those tokens.

        Raises HandoffFailed when it is not reserved (any more), InvalidRequest when a token is not its next one.
        """
        sequence = self._requests.get(request_id)
        if sequence is None or sequence.state is not SequenceState.RESERVED:
            raise HandoffFailed(f"request {request_id} is not reserved here (any more)")
        self._checks.check_first_tokens(sequence, first_tokens)
        sequence.num_computed = sequence.num_tokens
        sequence.prompt_logprobs = None  # reported by the engine that computed the prompt
        self._scheduler.block_manager.seal_full(sequence)
        self._scheduler.start_reserved(sequence)
        self._processor.start_answers(sequence, first_tokens)

    def cancel_reserved(self, request_id: str) -> None:
        """Nobody writes into its blocks any more, and it will not run. Idempotent."""
        sequence = self._requests.get(request_id)
        if sequence is not None and sequence.state is SequenceState.RESERVED:
            self._requests.fail(sequence, Cancelled(f"the reservation of request {request_id} was cancelled"))

    # Failed loads

    def rewind(self, request_id: str) -> None:
        """Its blocks could not be loaded: start over and compute everything that is not cached here. Idempotent."""
        sequence = self._requests.get(request_id)
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
        is_busy = self._overlap is not None and self._overlap.is_busy
        return bool(self._scheduler.running or self._scheduler.waiting or self._processor.outputs or is_busy)

    def step(self, hook: StepHook = NO_HOOK) -> list[StepOutput]:
        """Run one step; returns nothing when nothing can run before blocks are released. ``take_ended`` returns
        failures.

        Raises KVLoadFailed from the hook: the step is abandoned, and the caller must call ``rewind_failed``. A step
        already running keeps the hook it was started with.
        """
        if self._overlap is not None and self._overlap.is_busy:
            self.is_stalled = False
            self._overlap.advance()
        else:
            propose = self._propose if self._costs.drafts_pay else None
            plan = self._scheduler.plan(self._costs.prompt_budget, propose)
            self._apply(plan)
            if plan.entries or plan.variant_entries:
                self._run(plan, hook)
        outputs, self._processor.outputs = self._processor.outputs, []
        return outputs

    def take_ended(self) -> list[tuple[str, MooncakeError]]:
        """Sequences that ended without a last token since the last call, and why."""
        return self._requests.take_failures()

    def fail_all(self, error: MooncakeError, request_ids: Iterable[str] | None = None) -> None:
        """End these sequences (or all that run or wait) with ``error``: their step is impossible.

        Blocks that others may be reading or filling stay until ``abort``, as after a normal end.
        """
        self._discard_overlapped()
        self._requests.fail_scheduled(error, None if request_ids is None else set(request_ids))

    def match(self, keys: list[BlockKey]) -> int:
        """How many leading blocks need not be computed; from other threads only a hint."""
        return self._scheduler.block_manager.match(keys)

    def drop_cached(self) -> None:
        """Forget every block that no sequence holds."""
        self._discard_overlapped()
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
            drafted_tokens=self._processor.num_drafted,
            accepted_tokens=self._processor.num_accepted,
        )

    def _apply(self, plan: StepPlan) -> None:
        """Apply decisions of a plan that hold whether or not its step succeeds."""
        has_output = plan.entries or plan.variant_entries or plan.failures or self._processor.outputs
        self.is_stalled = not (has_output or plan.has_preempted)
        self._copy_blocks(plan.copies)
        self._not_announced += plan.admissions
        for sequence, error in plan.failures:
            self._requests.forget(sequence, error)
        if plan.failures:  # with one beam, the others of its search end
            plan.entries = [entry for entry in plan.entries if entry.sequence.state is SequenceState.RUNNING]

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        started_s = time.perf_counter()
        for source, target in copies:
            self.cache.copy_block(source, target)
        if copies:
            self._scheduler.block_manager.swap.note_copies(len(copies), (time.perf_counter() - started_s) * 1e3)

    def _run(self, plan: StepPlan, hook: StepHook) -> None:
        started_s = time.monotonic()
        self._announce_admissions(hook)
        hook.begin_step(plan)
        if self._overlap is not None and self._overlap.can_run(plan, hook):
            self._overlap.run(plan, hook)
            return
        if plan.variant_entries:
            self._recompute(plan.variant_entries, hook)
            if not plan.entries:
                hook.end_step(plan)
                return
        batch, complete = self._batches.build(plan.entries)
        logits = self._model.forward(batch, self.cache.tensor, hook)
        num_tokens = batch.tokens.shape[0]
        self._advance(plan, num_tokens)
        logits = logits[: len(batch.logit_rows) - batch.num_hidden]
        finished, searches = self._processor.process(plan.entries, complete, logits, batch.hidden)
        if batch.reuse is not None:  # not comparable with other steps
            self._num_blended_tokens += batch.reuse.num_tokens
        elif not plan.variant_entries:
            self._costs.note(plan.entries, num_tokens, (time.monotonic() - started_s) * 1e3)
        try:
            hook.end_step(plan)
        finally:
            self._processor.finish(finished, searches)

    def _announce_admissions(self, hook: StepHook) -> None:
        while self._not_announced:
            admission = self._not_announced.popleft()
            sequence = admission.sequence
            if sequence.state is SequenceState.RUNNING and sequence.blocks.block_table:
                hook.admitted(sequence, admission.to_load)

    def _recompute(self, entries: list[StepEntry], hook: StepHook) -> None:
        """Compute our own layers of tokens with another model's KV. This stands even if the step fails: a sequence
        that cannot have the rest starts over."""
        assert isinstance(self._model, RecomputingModel) and self.config.own_layers is not None
        batch, _ = self._batches.build(entries)
        self._model.recompute(self.config.own_layers, batch, self.cache.tensor, hook, hidden_states_of(entries))
        self._num_inherited_tokens += len(batch.tokens)
        for entry in entries:
            entry.sequence.num_computed = entry.end

    def _advance(self, plan: StepPlan, num_tokens: int) -> None:
        """The step succeeded: its KV is valid."""
        self._num_computed_tokens += num_tokens
        block_tokens = self.config.block_tokens
        for sequence, first, count, num_draft in plan.entries:
            sequence.num_computed = num_computed = first + count - num_draft
            blocks = sequence.blocks
            blocks.is_loading = False
            if (blocks.num_sealed + 1) * block_tokens <= num_computed:
                self._scheduler.block_manager.seal_full(sequence)
            if num_computed >= blocks.out_of_window_at:
                self._scheduler.block_manager.free_out_of_window(sequence)

    # Overlapped steps

    def _take_overlapped(self, plan: StepPlan, tokens: list[int], num_tokens: int) -> list[Sequence]:
        """A step that was in flight is done. Returns the sequences that end with it."""
        self._advance(plan, num_tokens)
        return self._processor.append_sampled([entry.sequence for entry in plan.entries], zip(tokens, repeat(None)))

    def _retain_blocks(self, sequence: Sequence) -> None:
        if self._overlap is not None:
            self._overlap.retain_blocks(sequence)

    def _discard_overlapped(self) -> None:
        """Tokens of the step in flight are computed again where they are still wanted."""
        if self._overlap is not None:
            self._overlap.discard()

    def _check(self, sequence: Sequence) -> None:
        """Raises InvalidRequest, ContextTooLong."""
        if sequence.request_id in self._requests:
            raise InvalidRequest(f"request {sequence.request_id} is here already", "request_id")
        self._checks.check(sequence)
