"""A prefill machine as one server: prompts are computed whole, one at a time, in the order in which they can start.

A prompt can start when what it fetches has arrived; it may overtake those that still wait. Its time is the measured
curve plus reading the reused prefix from host memory. How blocks are kept is up to the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mooncake.app.sim.cluster import Machines, Model, StepCurve
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.machines.cache import Cache
from mooncake.app.sim.requests import SimRequest


class PrefillMachine:
    """``on_start`` is called when a prompt's first layer runs, with its duration (s); ``on_pace``, when the speed
    changes, with the remaining time; ``on_end`` after the last layer, when its blocks are in the cache."""

    def __init__(
        self,
        group: Machines,
        curve: StepCurve,
        model: Model,
        agenda: Agenda,
        cache: Cache,
        on_start: Callable[[SimRequest, float], None],
        on_pace: Callable[[SimRequest, float], None],
        on_end: Callable[[SimRequest, float], None],
    ) -> None:
        self.cache = cache
        self.curve = curve
        self.slowdown = 1.0
        self.busy_s = 0.0
        self.queue: deque[SimRequest] = deque()
        self.running: SimRequest | None = None
        self._block_tokens = model.block_tokens
        self._load_token_ms = model.token_bytes / group.load_gb_per_s / 1e6
        self._agenda = agenda
        self._on_start = on_start
        self._on_pace = on_pace
        self._on_end = on_end
        self._ends_at = 0.0
        self._life = 0

    def submit(self, request: SimRequest) -> None:
        self.queue.append(request)
        if self.running is None:
            self._start_next()

    def make_ready(self) -> None:
        """Something awaited has arrived."""
        if self.running is None:
            self._start_next()

    def fail(self) -> None:
        """The process dies, with everything that was here."""
        self._life += 1
        for request in self.queue if self.running is None else (self.running, *self.queue):
            self.cache.release(request.held)
            request.held = []
        self.queue.clear()
        self.running = None

    def cancel(self, request: SimRequest) -> None:
        """It is no longer wanted; if it runs, its step is abandoned."""
        if request is self.running:
            self._life += 1
            self.running = None
        elif request in self.queue:
            self.queue.remove(request)
        else:
            return
        self.cache.release(request.held)
        request.held = []
        if self.running is None:
            self._start_next()

    def disturb(self, slowdown: float) -> None:
        """From now on everything takes this many times as long."""
        change, self.slowdown = slowdown / self.slowdown, slowdown
        if self.running is not None:
            left_s = (self._ends_at - self._agenda.now) * change
            self._end_after(left_s)
            self._on_pace(self.running, left_s)

    def load_ms(self, tokens: int) -> float:
        """Time to read this much KV from this host's memory."""
        return tokens * self._load_token_ms

    def _start_next(self) -> None:
        for request in self.queue:
            if request.is_ready:
                break
        else:
            return
        self.queue.remove(request)
        self.running = request
        usable = (request.num_tokens - 1) // self._block_tokens  # the last token is always computed
        cache, keys, held = self.cache, request.keys, request.held
        found = cache.match(keys[:usable])
        request.held = cache.hold(keys, found)
        if held:
            cache.release(held)
        request.cached_tokens = cached = found * self._block_tokens
        work_ms = self.curve.prefill_ms(request.num_tokens - cached, cached)
        work_s = work_ms * self.slowdown / 1e3 + self.load_ms(cached) / 1e3
        request.started_s = self._agenda.now
        self._end_after(work_s)
        self._on_start(request, work_s)

    def _end_after(self, left_s: float) -> None:
        self._life += 1
        self._ends_at = self._agenda.now + left_s
        self._agenda.at(self._ends_at, self._end, self._life)

    def _end(self, life: int) -> None:
        request = self.running
        if life != self._life or request is None:
            return
        work_s = self._agenda.now - request.started_s
        self.busy_s += work_s
        self.running = None
        held, request.held = request.held, []
        # as prefill nodes offer what their stores were too slow to read
        was_cut = request.placement is not None and request.placement.pool_tokens is not None
        self.cache.add(request.keys, held, into_dram=was_cut)
        self._on_end(request, work_s)
        if self.running is None:
            self._start_next()
