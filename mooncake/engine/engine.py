"""The engine that both roles share: sequences in, steps of ragged batches, tokens out.

``Engine.step`` is the whole of it: plan, run, sample, advance, retire. One thread owns an engine; only ``load`` and
``block_pool.match`` may be called from others. It must not know where KV comes from or goes to: that is the hook's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from mooncake.engine.block_pool import BlockPool
from mooncake.engine.kv_cache import KVCache
from mooncake.engine.sampler import Sampler
from mooncake.engine.scheduler import Admission, Scheduler, StepEntry, StepPlan, num_prompt_tokens_left
from mooncake.engine.sequence import Sequence, SequenceState
from mooncake.engine.step_batch import BatchBuilder
from mooncake.errors import Cancelled, HandoffFailed, InternalError, InvalidRequest, KVLoadFailed, MooncakeError
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook
from mooncake.types import BlockKey, FinishReason, SampledToken, TokenLogprob

__all__ = [
    "NO_HOOK",
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


class HasVocabulary(Protocol):
    @property
    def vocab_size(self) -> int: ...


class CausalModel(Protocol):
    """What the engine needs of a model (``mooncake.model``)."""

    @property
    def config(self) -> HasVocabulary: ...

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """Float32 logits [R, V] of the batch's logit rows. Raises what the hook raises."""
        ...


class StepHook(LayerHook, Protocol):
    """What happens around steps, on the engine's thread.

    A KVLoadFailed from any method but ``end_step`` abandons the step: no sequence advances.
    """

    def admitted(self, sequence: Sequence, to_load: list[tuple[int, int, BlockKey]]) -> None:
        """The sequence has its blocks. ``to_load`` must be filled before their layers are read: (index in the
        sequence, block id, key). Called once for each admission, also when there is nothing to load."""

    def begin_step(self, plan: StepPlan) -> None:
        """The step's first layer is next. Called again for the same sequences after a step that was abandoned."""

    def end_step(self, plan: StepPlan) -> None:
        """Its tokens and KV count; full blocks are sealed. Sequences that end here still have their blocks."""


class _NoStepHook(NoHook):
    def admitted(self, sequence: Sequence, to_load: list[tuple[int, int, BlockKey]]) -> None:
        if to_load:
            raise KVLoadFailed("there is nothing to load blocks with", (sequence.request_id,))

    def begin_step(self, plan: StepPlan) -> None:
        pass

    def end_step(self, plan: StepPlan) -> None:
        pass


NO_HOOK: StepHook = _NoStepHook()


@dataclass(frozen=True, slots=True)
class EngineConfig:
    block_tokens: int = 64
    chunk_tokens: int = 256  # most prompt tokens computed in one step; 0: whole prompts
    max_sequences: int = 64  # running at once
    max_model_len: int = 2048  # tokens of prompt and answer
    max_waiting: int = 1024  # sequences; more are refused
    keep_events: bool = True  # whether someone takes the block pool's events


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A new token. ``finish_reason`` is set on the last one of the sequence."""

    request_id: str
    token: SampledToken
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Reservation:
    """``block_ids`` are to be filled with the sequence's blocks ``first_block``, ``first_block + 1``, …"""

    first_block: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    running: int  # sequences
    waiting: int
    waiting_tokens: int  # of prompts, not computed yet
    context_tokens: int  # of running sequences
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_in_use: int
    preemptions: int  # since the start


class Engine:
    """Runs sequences over one paged cache."""

    def __init__(self, model: CausalModel, cache: KVCache, config: EngineConfig) -> None:
        self.config = config
        self.cache = cache
        self.block_pool = BlockPool(cache.num_blocks, config.block_tokens, keep_events=config.keep_events)
        self.is_stalled = False  # the last step found nothing that could run before blocks are given back
        self._model = model
        self._vocab_size = model.config.vocab_size
        self._sampler = Sampler()
        self._scheduler = Scheduler(
            self.block_pool, config.chunk_tokens, config.max_sequences, config.max_model_len, config.max_waiting
        )
        usual_tokens = (config.chunk_tokens or config.max_model_len) + config.max_sequences
        self._batches = BatchBuilder(self._scheduler.tables, config.block_tokens, usual_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._not_announced: deque[Admission] = deque()
        self._outputs: list[StepOutput] = []  # made outside of a step; the next one gives them out
        self._ended: list[tuple[str, MooncakeError]] = []

    # Requests

    def add(self, sequence: Sequence) -> None:
        """Queue it. Raises InvalidRequest, ContextTooLong, OutOfBlocks when it can never run here, Overloaded."""
        self._check(sequence)
        self._scheduler.add(sequence)
        self._sequences[sequence.request_id] = sequence

    def abort(self, request_id: str) -> None:
        """The sequence ends now, without an answer. Idempotent.

        A reserved one is left as it is: someone may still be writing into its blocks, so it takes ``cancel_reserved``.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.state is not SequenceState.RESERVED:
            self._end(sequence, Cancelled(f"request {request_id} was aborted"))

    def release(self, request_id: str) -> None:
        """Give back what ``hold_blocks`` kept. Idempotent."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.state is SequenceState.HELD:
            self._retire(sequence)

    def fork(self, request_id: str, sequence: Sequence) -> None:
        """Run ``sequence``, with whose tokens the running sequence ``request_id`` begins, over the same blocks.

        For several answers to one prompt. Raises InvalidRequest when it does not fit, OutOfBlocks when too many run.
        """
        self._check(sequence)
        parent = self._sequences.get(request_id)
        if parent is None or parent.state is not SequenceState.RUNNING or parent.num_computed < sequence.num_tokens:
            raise InvalidRequest(f"request {request_id} does not run or has not computed as much")
        same_tokens = np.array_equal(parent.tokens[: sequence.num_tokens], sequence.tokens)
        if not same_tokens or parent.chain_seed != sequence.chain_seed:
            raise InvalidRequest(f"request {request_id} does not begin with the tokens of {sequence.request_id}")
        self._scheduler.fork(parent, sequence)
        self._sequences[sequence.request_id] = sequence

    # The receiving side of a hand-off

    def reserve(self, sequence: Sequence) -> Reservation:
        """Blocks for all its tokens, to be filled by someone else; what is cached here is not asked for.

        Raises as ``add`` does; OutOfBlocks also when there is no room now.
        """
        self._check(sequence)
        first_block = self._scheduler.reserve(sequence)
        sequence.num_cached_tokens = first_block * self.config.block_tokens
        sequence.num_sealed = first_block
        sequence.admitted_s = time.monotonic()
        self._sequences[sequence.request_id] = sequence
        return Reservation(first_block, sequence.block_table[first_block:])

    def start_reserved(self, request_id: str, first_token: SampledToken) -> None:
        """The KV of all its tokens is in place and ``first_token`` follows them; the next step gives that token out.

        Raises HandoffFailed when it is not reserved (any more), InvalidRequest when the token is not its next one.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.state is not SequenceState.RESERVED:
            raise HandoffFailed(f"request {request_id} is not reserved here (any more)")
        if first_token.index != sequence.num_generated or not 0 <= first_token.token_id < self._vocab_size:
            raise InvalidRequest(f"token {first_token.index} is not the next one of request {request_id}")
        sequence.num_computed = sequence.num_tokens
        self._seal(sequence)
        self._scheduler.start_reserved(sequence)
        finish_reason = sequence.append(first_token.token_id)
        self._outputs.append(StepOutput(request_id, first_token, finish_reason))
        if finish_reason is not None:
            self._complete(sequence)

    def cancel_reserved(self, request_id: str) -> None:
        """Nobody writes into its blocks any more, and it shall not run. Idempotent."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.state is SequenceState.RESERVED:
            self._end(sequence, Cancelled(f"the reservation of request {request_id} was cancelled"))

    # Loads that failed

    def rewind(self, request_id: str) -> None:
        """Its blocks could not be loaded: start over and compute everything that is not cached here. Idempotent."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        sequence.external_blocks = 0
        if sequence.state is SequenceState.RUNNING and sequence.is_loading:
            self._not_announced = deque(a for a in self._not_announced if a.sequence is not sequence)
            self._scheduler.put_back(sequence)

    def rewind_failed(self, error: KVLoadFailed) -> list[str]:
        """Rewind the sequences that an abandoned step's error names, or all that are loading. Returns their ids.

        Empty when none of them was loading: then running on would fail in the same way again.
        """
        loading = [sequence.request_id for sequence in self._scheduler.running if sequence.is_loading]
        failed = [request_id for request_id in loading if not error.request_ids or request_id in error.request_ids]
        for request_id in failed:
            self.rewind(request_id)
        return failed

    # The step

    @property
    def has_work(self) -> bool:
        """Whether a step may give something. Reserved and held sequences are not work."""
        return bool(self._scheduler.running or self._scheduler.waiting or self._outputs)

    def step(self, hook: StepHook = NO_HOOK) -> list[StepOutput]:
        """Run one step; empty when nothing can run before blocks are given back. ``take_ended`` has the failures.

        Raises KVLoadFailed from the hook: the step is abandoned and ``rewind_failed`` is next.
        """
        plan = self._scheduler.plan()
        self._settle(plan)
        if plan.entries:
            self._run(plan, hook)
        outputs, self._outputs = self._outputs, []
        return outputs

    def knows(self, request_id: str) -> bool:
        return request_id in self._sequences

    def take_ended(self) -> list[tuple[str, MooncakeError]]:
        """Sequences that ended without a last token since the last call, and why."""
        ended, self._ended = self._ended, []
        return ended

    def fail_all(self, error: MooncakeError, request_ids: Iterable[str] | None = None) -> None:
        """End these sequences (or all that run or wait) with ``error``: their step cannot be done.

        Blocks that others may be reading or filling stay until ``release`` or ``abort``, as after a good end.
        """
        wanted = None if request_ids is None else set(request_ids)
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            if wanted is not None and sequence.request_id not in wanted:
                continue
            if sequence.state is SequenceState.RUNNING and (sequence.hold_blocks or sequence.is_loading):
                self._scheduler.finish(sequence, hold=True)
                self._ended.append((sequence.request_id, error))
            else:
                self._end(sequence, error)

    def drop_cached(self) -> None:
        """Forget every block that no sequence holds."""
        self.block_pool.drop_cached()

    def load(self) -> EngineLoad:
        """A snapshot, from any thread; numbers may be one step apart from each other."""
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
        )

    def _settle(self, plan: StepPlan) -> None:
        """Do what a plan has decided already, whether or not its step succeeds."""
        now = time.monotonic()
        self.is_stalled = not (plan.entries or plan.failures or plan.has_preempted or self._outputs)
        for source, target in plan.copies:
            self.cache.copy_block(source, target)
        for admission in plan.admissions:
            admission.sequence.admitted_s = admission.sequence.admitted_s or now
        self._not_announced += plan.admissions
        for sequence, error in plan.failures:
            self._forget(sequence, error)

    def _run(self, plan: StepPlan, hook: StepHook) -> None:
        started_s = time.monotonic()
        self._announce(hook)
        hook.begin_step(plan)
        batch, complete = self._batches.build(plan.entries)
        with torch.inference_mode():
            logits = self._model.forward(batch, self.cache.tensor, hook)
        sampled = [plan.entries[index].sequence for index in complete]
        tokens = self._sampler.sample(logits, sampled) if sampled else []
        self._advance(plan, started_s)
        outputs = [_append(sequence, *token) for sequence, token in zip(sampled, tokens, strict=True)]
        self._outputs += outputs
        try:
            hook.end_step(plan)
        finally:
            for output, sequence in zip(outputs, sampled, strict=True):
                if output.finish_reason is not None:
                    self._complete(sequence)

    def _announce(self, hook: StepHook) -> None:
        while self._not_announced:
            admission = self._not_announced.popleft()
            sequence = admission.sequence
            if sequence.state is SequenceState.RUNNING and sequence.block_table:
                hook.admitted(sequence, admission.to_load)

    def _advance(self, plan: StepPlan, started_s: float) -> None:
        """The step succeeded: its KV counts."""
        now = time.monotonic()
        block_tokens = self.config.block_tokens
        for entry in plan.entries:
            sequence = entry.sequence
            sequence.num_computed = entry.first + entry.num_tokens
            sequence.is_loading = False
            sequence.first_step_s = sequence.first_step_s or started_s
            sequence.last_step_s = now
            if (sequence.num_sealed + 1) * block_tokens <= sequence.num_computed:
                self._seal(sequence)

    def _seal(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full now."""
        sequence.extend_keys(self.config.block_tokens)
        keys = sequence.block_keys
        for index in range(sequence.num_sealed, sequence.num_computed // self.config.block_tokens):
            self.block_pool.seal(sequence.block_table[index], keys[index], keys[index - 1] if index else b"")
            sequence.num_sealed = index + 1

    def _complete(self, sequence: Sequence) -> None:
        """It has its last token."""
        if sequence.hold_blocks:
            self._scheduler.finish(sequence, hold=True)
        else:
            self._retire(sequence)

    def _end(self, sequence: Sequence, error: MooncakeError) -> None:
        """It will not get its last token (or has it, when it is held: then nobody is told)."""
        was_held = sequence.state is SequenceState.HELD
        self._retire(sequence)
        if not was_held:
            self._ended.append((sequence.request_id, error))

    def _forget(self, sequence: Sequence, error: MooncakeError) -> None:
        """The scheduler has finished it already."""
        del self._sequences[sequence.request_id]
        self._ended.append((sequence.request_id, error))

    def _retire(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        del self._sequences[sequence.request_id]

    def _check(self, sequence: Sequence) -> None:
        """Refuse what would break a step. Raises InvalidRequest, ContextTooLong."""
        if sequence.request_id in self._sequences:
            raise InvalidRequest(f"request {sequence.request_id} is here already", "request_id")
        if sequence.state is not SequenceState.WAITING:
            raise InternalError(f"sequence {sequence.request_id} is {sequence.state} already")
        if int(sequence.tokens.max()) >= self._vocab_size:
            raise InvalidRequest(f"a token id is not below the vocabulary's size, {self._vocab_size}", "prompt")
        if any(not 0 <= token_id < self._vocab_size for token_id, _ in sequence.sampling.logit_bias):
            raise InvalidRequest(f"logit_bias names a token that is not below {self._vocab_size}", "logit_bias")
        sequence.limit_length(self.config.max_model_len)


def _append(sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> StepOutput:
    token = SampledToken(sequence.num_generated, token_id, logprob)
    return StepOutput(sequence.request_id, token, sequence.append(token_id))
