"""A machine that computes prompts and decodes in the same steps: the real batching code, played step by step.

The engine's own scheduler decides what runs in a step, over its own block pool; here a step takes the time of the
measured curve instead of computing anything. It simulates the coupled baselines, and machines with summarised steps are
tested against it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

import numpy as np

from mooncake.app.latency import longest_tenth_mean
from mooncake.app.sim.cluster import Machines, Model, StepCurve
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.requests import SimRequest
from mooncake.engine.cache.block_pool import BlockPool
from mooncake.engine.scheduler import StepScheduler
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import StepPlan
from mooncake.hashing import Chain
from mooncake.sampling import SamplingParams
from mooncake.types import BlockKey, FinishReason

MAX_MODEL_LEN = 1 << 18
MAX_WAITING = 1 << 20
_NO_TOKENS = np.zeros(1, dtype=np.uint32)


class CountedSequence(Sequence):
    """A sequence whose tokens are only counted: its prompt's block names are given, its answer has none."""

    __slots__ = ("gaps_s", "last_token_s", "length", "request")

    def __init__(self, request: SimRequest, number: int) -> None:
        sampling = SamplingParams(max_tokens=request.output_tokens)
        super().__init__(str(number), _NO_TOKENS, 1, sampling, Chain(b""), eos_ids=(), max_model_len=MAX_MODEL_LEN)
        self.request = request
        self.num_tokens = self.num_prompt = request.num_tokens
        self.block_keys: list[BlockKey] = list(request.keys)
        self.length = request.num_tokens + request.output_tokens
        self.last_token_s = math.nan
        self.gaps_s = array("d")

    def extend_keys(self, block_tokens: int) -> None:
        """Does nothing: all keys are known."""

    def append(self, token_id: int) -> FinishReason | None:
        self.num_tokens += 1
        return FinishReason.LENGTH if self.num_tokens >= self.length else None


class CoupledMachine:
    """``on_first`` is called with a request at its first token, ``on_end`` with the mean of its longest tenth of gaps
    (ms) at its last one."""

    def __init__(
        self,
        group: Machines,
        curve: StepCurve,
        model: Model,
        agenda: Agenda,
        on_first: Callable[[SimRequest, float], None],
        on_end: Callable[[SimRequest, float], None],
    ) -> None:
        self.curve = curve
        self.pool = BlockPool(group.kv_tokens // model.block_tokens, model.block_tokens)
        limits = (group.chunk_tokens, group.max_sequences, MAX_MODEL_LEN, MAX_WAITING)
        self.scheduler = StepScheduler(self.pool, *limits, shares_parts=False)  # no trace tells what is in a block
        self.busy_s = 0.0
        self.tokens = 0
        self.slowdown = 1.0
        self.keeps = group.prefix_caching
        self._block_tokens = model.block_tokens
        self._agenda = agenda
        self._on_first = on_first
        self._on_end = on_end
        self._is_running = False
        self._number = 0

    def submit(self, request: SimRequest) -> None:
        self._number += 1
        self.scheduler.add(CountedSequence(request, self._number))
        if not self._is_running:
            self._begin_step()

    def receive(self, request: SimRequest) -> None:
        """Take over a sequence prefilled elsewhere, as a decode node does: tests compare ``DecodeMachine`` with it."""
        sequence = CountedSequence(request, self._number)
        self._number += 1
        self.scheduler.reserve(sequence)
        sequence.num_computed = sequence.num_tokens
        sequence.append(0)
        sequence.last_token_s = request.first_token_s
        self.scheduler.start_reserved(sequence)
        if not self._is_running:
            self._begin_step()

    def _begin_step(self) -> None:
        plan = self.scheduler.plan()
        self._is_running = bool(plan.entries)
        if not plan.entries:
            return
        work_ms = self._step_ms(plan) * self.slowdown
        self._agenda.after(work_ms / 1e3, self._end_step, plan, work_ms)

    def _step_ms(self, plan: StepPlan) -> float:
        """Linear layers are bound by reading weights or by computing, whichever takes longer; attention is added to
        that."""
        curve = self.curve
        new = batch = context = 0
        attention_ms = 0.0
        for entry in plan.entries:
            if entry.num_tokens == 1 and entry.sequence.is_decoding:
                batch += 1
                context += entry.end
            else:
                new += entry.num_tokens
                attention_ms += curve.prefill_pair_ms * entry.num_tokens * (entry.first + entry.num_tokens / 2)
                attention_ms += curve.prefill_step_ms
        if batch:
            attention_ms += curve.decode_sequence_ms * batch + curve.decode_context_ms * context
        return max(curve.decode_step_ms, curve.prefill_token_ms * new) + attention_ms

    def _end_step(self, plan: StepPlan, work_ms: float) -> None:
        """What the engine does after a step: count its KV, share full blocks, and give a new token to each sequence
        that is fully computed."""
        now = self._agenda.now
        self.busy_s += work_ms / 1e3
        prefill_tokens = sum(e.num_tokens for e in plan.entries if not (e.num_tokens == 1 and e.sequence.is_decoding))
        for entry in plan.entries:
            sequence = entry.sequence
            assert isinstance(sequence, CountedSequence)
            is_prompt = not (entry.num_tokens == 1 and sequence.is_decoding)
            if is_prompt:  # a prompt accounts for the time that it adds to the step
                request = sequence.request
                share = entry.num_tokens / prefill_tokens
                request.spent_s += share * max(work_ms - self.curve.decode_step_ms, 0.0) / 1e3
                if math.isnan(request.started_s):
                    request.started_s = now - work_ms / 1e3
                    request.cached_tokens = sequence.num_cached_tokens
            sequence.num_computed = entry.end
            if self.keeps:
                self._seal(sequence)
            if sequence.num_computed == sequence.num_tokens:
                self._token(sequence, now)
        self.pool.take_events()
        self._begin_step()

    def _seal(self, sequence: CountedSequence) -> None:
        keys, blocks = sequence.block_keys, sequence.blocks
        first = blocks.num_sealed
        end = min(sequence.num_computed // self._block_tokens, len(keys))
        if first < end:
            self.pool.seal(blocks.block_table, keys, first, end)
            blocks.num_sealed = end

    def _token(self, sequence: CountedSequence, now: float) -> None:
        self.tokens += 1
        ended = sequence.append(0)
        request = sequence.request
        if math.isnan(request.first_token_s):
            self._on_first(request, request.spent_s)
        else:
            sequence.gaps_s.append(now - sequence.last_token_s)
        sequence.last_token_s = now
        if ended:
            self.scheduler.finish(sequence)
            self._on_end(request, longest_tenth_mean(sequence.gaps_s) * 1e3 if sequence.gaps_s else math.nan)
