"""Overlapped decode steps (asynchronous scheduling): the device computes one step while the host prepares the next.

Positions, slots and block tables of a decode step are known before its tokens are, and the device has those itself. So
while step n is computed, step n + 1 is planned and started; then the tokens of n are collected. Sequences certain to
end with n are left out of n + 1; for one that ends unexpectedly, one token is computed in vain.

A step in flight holds a reference to every block that it touches: when a sequence is removed meanwhile, the step keeps
its blocks, and the token sampled for it is ignored. So sequences may come and go between two steps, and freed blocks be
allocated again, without waiting for the device.

It knows neither how steps are computed nor what happens to tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from mooncake.engine.contract import AsyncModel, Cache, StartedStep, StepHook
from mooncake.engine.decoding.sampling_inputs import SamplingInputs
from mooncake.engine.scheduler import StepScheduler
from mooncake.engine.sequence import Sequence, SequenceState
from mooncake.engine.step_batch import BatchBuilder
from mooncake.engine.step_costs import StepCosts
from mooncake.engine.step_plan import StepEntry, StepPlan

ON_HOST = -1  # the batch has the token itself


@dataclass(slots=True)
class _InFlight:
    entries: list[StepEntry]
    hook: StepHook
    step: StartedStep
    started_s: float  # monotonic; when the previous step ended, if that was later
    retained: list[list[int]] = field(default_factory=list)  # blocks of sequences that were removed

    def plan(self) -> StepPlan:
        """The plan without sequences that were removed."""
        return StepPlan([entry for entry in self.entries if entry.sequence.state is SequenceState.RUNNING])


class OverlappedSteps:
    """At most one step is in flight between two calls."""

    def __init__(
        self,
        model: AsyncModel,
        cache: Cache,
        scheduler: StepScheduler,
        batches: BatchBuilder,
        costs: StepCosts,
        take_tokens: Callable[[StepPlan, list[int], int], list[Sequence]],
        finish: Callable[[Sequence], None],
    ) -> None:
        """``take_tokens`` gets a step's plan, its tokens and how many were computed, and returns the sequences that end
        with theirs; ``finish`` removes such a sequence."""
        self.num_steps = 0  # steps started before the previous one was collected
        self._model = model
        self._cache = cache
        self._scheduler = scheduler
        self._batches = batches
        self._costs = costs
        self._take_tokens = take_tokens
        self._finish = finish
        self._sampling_inputs = SamplingInputs()
        self._in_flight: _InFlight | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight: then ``advance`` must be called next, whatever else there is to do."""
        return self._in_flight is not None

    def can_run(self, plan: StepPlan, hook: StepHook) -> bool:
        """Whether the plan can be overlapped. The hook must have begun it."""
        return (
            len(plan.entries) <= self._model.max_async_sequences
            and not hook.wants_layers
            and all(entry.num_tokens == 1 and _is_sampled_on_device(entry.sequence) for entry in plan.entries)
        )

    def run(self, plan: StepPlan, hook: StepHook) -> None:
        """Start this step and the next one, and collect it. Raises what the model and the hook raise."""
        self._in_flight = self._start(plan.entries, [ON_HOST] * len(plan.entries), hook)
        self.advance()

    def advance(self) -> None:
        """Start the next step, if it is known already, and collect the one in flight.

        On failure nothing is in flight any more, and sequences whose tokens were not taken are unchanged.
        """
        current, self._in_flight = self._in_flight, None
        assert current is not None
        try:
            self._in_flight = self._start_next(current)
            self._collect(current)
        except BaseException:
            self._discard(current)
            if self._in_flight is not None:
                self._discard(self._in_flight)
                self._in_flight = None
            raise

    def retain_blocks(self, sequence: Sequence) -> None:
        """Its blocks are about to be freed: the step in flight keeps them, if it may touch them."""
        step, pages = self._in_flight, sequence.blocks.pages
        if step is not None and pages and any(entry.sequence is sequence for entry in step.entries):
            self._scheduler.pool.retain(pages)
            step.retained.append(pages)

    def discard(self) -> None:
        """Wait for the step in flight and ignore its tokens."""
        if self._in_flight is not None:
            self._discard(self._in_flight)
            self._in_flight = None

    # One step

    def _start(self, entries: list[StepEntry], newest: list[int], hook: StepHook) -> _InFlight:
        started_s = time.monotonic()
        batch, _ = self._batches.build(entries)
        sequences, positions = [entry.sequence for entry in entries], [entry.first + 1 for entry in entries]
        draws = self._sampling_inputs.build(sequences, positions)
        is_ahead = max(newest) != ON_HOST
        step = self._model.start(batch, self._cache.tensor, draws, newest if is_ahead else None)
        return _InFlight(entries, hook, step, started_s)

    def _start_next(self, current: _InFlight) -> _InFlight | None:
        if current.hook.wants_layers or self._costs.drafts_pay:
            return None
        entries, newest = self._next_entries(current)
        if not entries or len(entries) > self._model.max_async_sequences or not self._scheduler.make_room(entries):
            return None
        self.num_steps += 1
        return self._start(entries, newest, current.hook)

    def _next_entries(self, current: _InFlight) -> tuple[list[StepEntry], list[int]]:
        """The decodes of the step after ``current``, and the row of ``current`` that samples each one's token. No
        entries when that step may contain anything else."""
        rows = {id(entry.sequence): row for row, entry in enumerate(current.entries)}
        entries: list[StepEntry] = []
        newest: list[int] = []
        running, waiting = self._scheduler.running, self._scheduler.waiting
        for sequence in running:
            row = rows.get(id(sequence), ON_HOST)
            if row != ON_HOST:
                if sequence.num_left > 1:  # otherwise it certainly ends with the token being sampled
                    entries.append(StepEntry(sequence, sequence.num_tokens, 1))
                    newest.append(row)
            elif sequence.is_decoding and not sequence.is_parked and _is_sampled_on_device(sequence):
                entries.append(StepEntry(sequence, sequence.num_computed, 1))
                newest.append(ON_HOST)
            else:
                return [], []
        if waiting and (len(entries) < len(running) or self._scheduler.may_admit):
            return [], []
        return entries, newest

    def _collect(self, current: _InFlight) -> None:
        tokens = current.step.tokens()
        plan = current.plan()
        if len(plan.entries) < len(tokens):
            rows = {id(entry.sequence): row for row, entry in enumerate(current.entries)}
            tokens = [tokens[rows[id(entry.sequence)]] for entry in plan.entries]
        if min(tokens, default=0) < 0:
            for entry, token in zip(plan.entries, tokens, strict=True):
                if token < 0:
                    entry.sequence.fail_not_finite()
        if tokens:
            finished = self._take_tokens(plan, tokens, len(current.entries))
            self._costs.note(current.entries, len(current.entries), (time.monotonic() - current.started_s) * 1e3)
            try:
                current.hook.end_step(plan)
            finally:
                for sequence in finished:
                    self._finish(sequence)
        self._release(current)
        following = self._in_flight
        if following is not None:
            following.started_s = time.monotonic()
            if following.plan().entries:
                following.hook.begin_step(following.plan())

    def _discard(self, step: _InFlight) -> None:
        with suppress(Exception):  # the failure is already known, or nobody asks
            step.step.tokens()
        self._release(step)

    def _release(self, step: _InFlight) -> None:
        while step.retained:
            self._scheduler.pool.release(step.retained.pop())


def _is_sampled_on_device(sequence: Sequence) -> bool:
    """Whether only its newest token is to be computed, and the next one depends only on logits and a random number."""
    return (
        sequence.num_computed + 1 == sequence.num_tokens
        and not sequence.blocks.is_loading
        and sequence.has_forked
        and not sequence.is_beam
        and not sequence.edits_logits
        and sequence.pooling is None
        and sequence.sampling.logprobs is None
        and sequence.adapter < 0
    )
