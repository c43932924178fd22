"""Refusals judged in hindsight, as only a simulation can: the same run again with the refused request admitted, and the
time at which the conductor would first have admitted it. It does not affect the run that it judges.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from conductor.admission.retry_after import MAX_RETRY_S, WAITS_S
from mooncake.app.sim.output.summary import meets
from mooncake.app.sim.requests import Fate, Results, SimRequest
from mooncake.app.sim.simulation import Simulation

AFTER_S = 90.0  # a refused request could disturb arrivals within this time: more than a queue and an answer take
EVENTS_A_LOOK = 1000
NEWS_S = 0.5  # interval of checks for new refusals; less than a second
ALIKE = 20  # number of similar refusals that a prediction in hindsight uses
EXACT = 0.25  # a predicted wait is right if its error is at most this share of the true one

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def keep_placements(simulation: Simulation) -> None:
    """Call it before a run whose refusals will be judged."""
    simulation.conductor.kept = {}


def false_rejections(judged: Simulation, count: int, seed: int) -> Mask:
    """For each of ``count`` refused requests (at most all) of a finished run: whether it was a false rejection. It was
    if the request, admitted alone where it would have been placed, meets both limits and causes no other request to
    miss them.

    The run is played again with the same admissions and placements, so that nothing differs by chance. When one of the
    chosen requests arrives, the process forks; the branch admits it and continues until all arrivals of the next
    ``AFTER_S`` have ended. Branches run on all processors.
    """
    refused = np.flatnonzero(judged.results.fate == Fate.REJECTED)
    looked_at = np.random.default_rng(seed).choice(refused, min(count, len(refused)), replace=False)
    return _Branches(judged, refused, looked_at).compare()


class _Branches:
    """The run played again, with a branch for each of ``looked_at``."""

    def __init__(self, judged: Simulation, refused: Indices, looked_at: Indices) -> None:
        if judged.conductor.kept is None:
            raise ValueError("the placements of the run were not kept")
        # No samples: the replay decides nothing.
        unasked = judged.cluster.with_conductor(admission="none", sample_every=judged.results.size)
        self._simulation = Simulation(unasked, judged.trace, judged.options)
        self._simulation.conductor.script = judged.conductor.kept
        self._simulation.conductor.turned_away = set(refused.tolist())
        self._without = meets(judged.results, judged.cluster.slo)
        self._looked_at: list[int] = looked_at.tolist()
        self._is_branch = False
        self._running: list[tuple[int, int, int]] = []  # request, process id, pipe
        self._met: dict[int, Mask] = {}  # by request

    def compare(self) -> Mask:
        """For each of ``looked_at``: whether it met its limits and no other request missed them because of it."""
        simulation = self._simulation
        for one in self._looked_at:
            simulation.agenda.at(simulation.results.arrival_s.item(one), self._fork, one)
        simulation.run()
        while self._running:
            self._wait_for_one()
        if (meets(simulation.results, simulation.cluster.slo) != self._without).any():
            raise AssertionError("the replay is not the run that it replays")
        return np.array([self._was_wrong(one) for one in self._looked_at], dtype=np.bool_)

    def _was_wrong(self, one: int) -> bool:
        met, others = self._met[one], self._came_before(one)
        return bool(met[one]) and not (self._without & ~met & others).any()

    def _came_before(self, one: int) -> Mask:
        """The requests that this one could disturb."""
        arrival_s = self._simulation.results.arrival_s
        before: Mask = arrival_s < arrival_s[one] + AFTER_S
        return before

    def _fork(self, one: int) -> None:
        if self._is_branch:
            return
        if len(self._running) >= len(os.sched_getaffinity(0)):
            self._wait_for_one()
        reads, writes = os.pipe()
        process = os.fork()
        if process:
            os.close(writes)
            self._running.append((one, process, reads))
            return
        status = 1
        try:
            self._is_branch = True
            os.close(reads)
            met = self._play(one)
            with os.fdopen(writes, "wb") as pipe:
                pipe.write(np.packbits(met).tobytes())
            status = 0
        finally:
            os._exit(status)

    def _play(self, one: int) -> Mask:
        """Play the rest of the run with the request admitted."""
        simulation, wanted = self._simulation, self._came_before(one)
        simulation.conductor.turned_away.discard(one)
        while (simulation.results.fate[wanted] == Fate.OPEN).any():
            simulation.agenda.run(EVENTS_A_LOOK)
        return meets(simulation.results, simulation.cluster.slo)

    def _wait_for_one(self) -> None:
        one, process, reads = self._running.pop(0)
        with os.fdopen(reads, "rb") as pipe:
            packed = pipe.read()
        _, status = os.waitpid(process, 0)
        size = self._simulation.results.size
        if status or len(packed) * 8 < size:
            raise RuntimeError(f"the branch for request {one} failed")
        self._met[one] = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=size).astype(np.bool_)


class RetryProbe:
    """For some refused requests, checks at every whole second after the refusal (the unit of ``Retry-After``) whether
    they would be admitted now, without admitting them.

    ``waits_s``: by request, the time until then; ``inf`` if longer than the longest retry time. Requests refused so
    late that arrivals ended meanwhile are not in it.
    """

    def __init__(self, simulation: Simulation, share: float = 1.0) -> None:
        self.waits_s: dict[int, float] = {}
        self._simulation = simulation
        self._seen: Mask = np.zeros(simulation.results.size, dtype=bool)
        self._is_wanted: Mask = np.random.default_rng(simulation.options.seed).random(simulation.results.size) < share
        self._until_s = float(simulation.results.arrival_s.max()) - MAX_RETRY_S
        simulation.agenda.after(NEWS_S, self._look)

    def errors(self) -> Floats:
        """|predicted / true - 1| of each, both in whole seconds and at most the longest retry time."""
        return self._errors(np.ceil(self._simulation.results.retry_after_s[list(self.waits_s)]))

    def errors_with_hindsight(self) -> Floats:
        """The errors of a prediction from the true waits of all others (``estimated_with_hindsight``): about the best
        possible with what the conductor knows of a request. The placements must have been kept."""
        kept, limit_ms = self._simulation.conductor.kept, self._simulation.cluster.slo.ttft_s * 1e3
        assert kept is not None
        parts = [kept[at].breakdown for at in self.waits_s]
        waits = np.array([(part.queue_ms + part.fetch_ms, part.prefill_ms) for part in parts]).reshape(-1, 2)
        return self._errors(estimated_with_hindsight(waits, waits.sum(axis=1) > limit_ms, self._true_s()))

    def _errors(self, told_s: Floats) -> Floats:
        errors: Floats = np.abs(told_s / self._true_s() - 1.0)
        return errors

    def _true_s(self) -> Floats:
        return np.minimum(list(self.waits_s.values()), MAX_RETRY_S)

    def _look(self) -> None:
        """Check the requests refused since the last call."""
        simulation, results = self._simulation, self._simulation.results
        fresh = np.flatnonzero((results.fate == Fate.REJECTED) & ~self._seen)
        self._seen[fresh] = True
        for at in fresh[self._is_wanted[fresh] & (results.end_s[fresh] <= self._until_s)].tolist():
            keys = simulation.block_keys(simulation.trace[at])
            request = SimRequest(at, results.input_tokens.item(at), results.output_tokens.item(at), keys)
            simulation.agenda.at(results.end_s.item(at) + 1.0, self._ask, request, 1.0)
        if simulation.agenda.now <= self._until_s + NEWS_S:
            simulation.agenda.after(NEWS_S, self._look)

    def _ask(self, request: SimRequest, waited_s: float) -> None:
        simulation = self._simulation
        if simulation.conductor.would_admit(request, simulation.agenda.now):
            self.waits_s[request.index] = waited_s
        elif waited_s >= MAX_RETRY_S:
            self.waits_s[request.index] = np.inf
        else:
            simulation.agenda.after(1.0, self._ask, request, waited_s + 1.0)


def retry_time_errors(results: Results) -> Floats:
    """|predicted / true - 1| of each retry time at which a refused client returned (``Run.returns``).

    The true time is that until it was admitted. Both are at most the longest retry time, which also counts for clients
    that gave up.
    """
    told_s = np.array([retry_time.wait_s for retry_time in results.retry_times], dtype=np.float64)
    index = np.array([retry_time.request for retry_time in results.retry_times], dtype=np.int64)
    waited_s = results.arrival_s[index] - np.array([retry_time.at_s for retry_time in results.retry_times])
    waited_s[results.fate[index] == Fate.REJECTED] = np.inf
    errors: Floats = np.abs(told_s / np.minimum(waited_s, MAX_RETRY_S) - 1.0)
    return errors


def estimated_with_hindsight(features: Floats, is_slow: Mask, true_s: Floats) -> Floats:
    """Predicted waits in seconds, ``[requests]``: for each refusal the wait that is right (``EXACT``) for most of the
    ``ALIKE`` most similar others. Similar are refusals for the same reason (``is_slow``: TTFT) whose features
    ``[requests, features]`` have near ranks."""
    ranks = features.argsort(axis=0).argsort(axis=0) / max(len(features), 1)
    is_right = np.abs(WAITS_S[:, None] / true_s - 1.0) <= EXACT  # [waits, requests]
    predicted_s: Floats = np.zeros(len(features))
    for one in range(len(features)):
        distance = ((ranks - ranks[one]) ** 2).sum(axis=1)
        distance[is_slow != is_slow[one]] += features.shape[1]  # farther than all others
        distance[one] = np.inf
        alike = distance.argsort(kind="stable")[: min(ALIKE, len(features) - 1)]
        predicted_s[one] = WAITS_S[is_right[:, alike].sum(axis=1).argmax()]
    return predicted_s
