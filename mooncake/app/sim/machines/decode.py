"""A decode machine whose steps are summarised instead of played one by one.

Between two changes of the batch every step is longer than the one before by the same small time (each sequence has one
more token of context), so the time of n steps has a closed form. Sequences join and leave at the ends of steps, as in
the real engine; a test compares the token times of both. The one difference: a sequence is admitted when its whole
answer fits, so nothing is ever preempted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from mooncake.app.sim.cluster import Machines, Model, StepCurve
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.machines.steps import StepRuns
from mooncake.app.sim.requests import SimRequest

_KEEP_RUNS = 256  # with more than this, old ones are removed


class DecodeMachine:
    """``on_end`` is called with a request and the mean of the longest tenth of its token gaps (ms)."""

    def __init__(
        self,
        group: Machines,
        curve: StepCurve,
        model: Model,
        agenda: Agenda,
        on_end: Callable[[SimRequest, float], None],
    ) -> None:
        self.slowdown = 1.0
        self.busy_s = 0.0
        self.tokens = 0
        self.waiting: deque[SimRequest] = deque()
        self.running: dict[SimRequest, None] = {}
        self.context = 0  # KV tokens of the running sequences at the first step of the current run
        self.kv_tokens = group.kv_tokens
        self.reserved_tokens = 0
        self._curve = curve
        self._block_tokens = model.block_tokens
        self._max_sequences = group.max_sequences
        self._agenda = agenda
        self._on_end = on_end
        self._ends: list[tuple[int, int, SimRequest]] = []  # heap: (step before which it is complete, order, request)
        self._order = 0
        self._step = 0  # first step of the current run of steps with one batch
        self._since = 0.0  # when it began
        self._first_ms = self._growth_ms = 0.0  # its first step; how much longer each next one is
        self._runs = StepRuns()
        self._version = 0
        self._is_disturbed = False  # the speed has changed during the current run of steps

    def join(self, request: SimRequest) -> None:
        """Its KV is here and its first token is known."""
        blocks = -(-(request.num_tokens + request.output_tokens) // self._block_tokens)
        request.reserved_tokens = blocks * self._block_tokens
        self.waiting.append(request)
        if self.running:
            self._plan()
        else:
            self._admit()

    def disturb(self, slowdown: float) -> None:
        """From the next step on everything takes this many times as long."""
        self.slowdown = slowdown
        self._is_disturbed = True
        self._plan()

    def fail(self) -> None:
        """The process dies. ``output_tokens`` and ``num_tokens`` of what was here say how far they got."""
        steps = self._steps_until(self._agenda.now, whole=True) if self.running else 0
        now_step = self._step + steps
        for request in self.running:
            made = min(now_step - request.start_step, request.output_tokens - 1)
            request.output_tokens -= made
            request.num_tokens += made
        self._step = now_step
        self.running.clear()
        self.waiting.clear()
        self._ends.clear()
        self._version += 1
        self.context = self.reserved_tokens = 0

    def cancel(self, request: SimRequest) -> None:
        """It does not join after all. A running one continues to its end."""
        if request in self.waiting:
            self.waiting.remove(request)

    @property
    def step_ms(self) -> float:
        """Duration of the current step."""
        return self._first_ms + self._growth_ms * max(self._steps_until(self._agenda.now, whole=True), 0)

    @property
    def context_now(self) -> int:
        if not self.running:
            return 0
        return self.context + len(self.running) * self._steps_until(self._agenda.now, whole=True)

    def _fits(self, request: SimRequest) -> bool:
        if not self.running:
            return True
        has_room = self.reserved_tokens + request.reserved_tokens <= self.kv_tokens
        return has_room and len(self.running) < self._max_sequences

    def _admit(self) -> None:
        """Between two steps: admit waiting sequences, and begin a new run of steps."""
        waiting, running, step = self.waiting, self.running, self._step
        self._is_disturbed = False
        while waiting and self._fits(waiting[0]):
            request = waiting.popleft()
            running[request] = None
            self.reserved_tokens += request.reserved_tokens
            self.context += request.num_tokens + 1
            request.start_step = step
            request.end_step = end_step = step + request.output_tokens - 1
            self._order += 1
            heappush(self._ends, (end_step, self._order, request))
        batch = len(running)
        self._since = self._agenda.now
        if not batch:
            self._version += 1
            return
        curve, slowdown = self._curve, self.slowdown
        self._first_ms = first_ms = curve.decode_ms(batch, self.context) * slowdown
        self._growth_ms = growth_ms = curve.decode_context_ms * batch * slowdown
        self._runs.begin(step, first_ms, growth_ms)
        if len(self._runs) > _KEEP_RUNS:
            self._runs.drop_before(min(request.start_step for request in self.running))
        self._plan()

    def _plan(self) -> None:
        """When this run of steps ends: a sequence is complete, one can join, or the machine's speed has changed."""
        if not self.running:
            return
        steps = self._ends[0][0] - self._step
        if self._is_disturbed or (self.waiting and self._fits(self.waiting[0])):
            steps = min(steps, self._steps_until(self._agenda.now, whole=False) or 1)
        self._version += 1
        self._agenda.at(self._since + self._span_ms(steps) / 1e3, self._end_run, steps, self._version)

    def _end_run(self, steps: int, version: int) -> None:
        if version != self._version:
            return
        self._step = step = self._step + steps
        tokens = steps * len(self.running)
        self.busy_s += self._agenda.now - self._since
        self.tokens += tokens
        self.context += tokens
        ends, ended = self._ends, []
        while ends and ends[0][0] <= step:
            ended.append(heappop(ends)[2])
        if not ended:  # only a waiting one
            self._admit()
            return
        for request in ended:
            del self.running[request]
            self.context -= request.num_tokens + request.output_tokens
            self.reserved_tokens -= request.reserved_tokens
        tails_ms = [self._tail_ms(request) for request in ended]  # before the runs of their steps are dropped
        self._admit()
        for request, tail_ms in zip(ended, tails_ms, strict=True):
            self._on_end(request, tail_ms)

    def _span_ms(self, steps: int) -> float:
        return steps * (self._first_ms + self._growth_ms * (steps - 1) / 2)

    def _steps_until(self, time_s: float, whole: bool) -> int:
        """Number of steps of the current run complete at ``time_s``; without ``whole`` the current one counts too."""
        passed = (time_s - self._since) * 1e3
        if passed <= 0 or not self._first_ms:
            return 0
        half, first = self._growth_ms / 2, self._first_ms - self._growth_ms / 2
        steps = (math.sqrt(first * first + 4 * half * passed) - first) / (2 * half) if half else passed / first
        # A time exactly at the end of a step differs from a later one by far more than rounding.
        return math.floor(steps + 1e-6) if whole else math.ceil(steps - 1e-6)

    def _tail_ms(self, request: SimRequest) -> float:
        """Mean of the longest tenth of the request's gaps. Its first gap began with the token sampled by prefill."""
        if request.end_step <= request.start_step:
            return math.nan
        lived_ms = (self._agenda.now - request.first_token_s) * 1e3
        return self._runs.tail_ms(request.start_step, request.end_step, lived_ms) * self._curve.decode_tail
