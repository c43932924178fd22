"""What a refusal was worth, judged with what only a simulation can know: the same run once more with the refused
request in it, and when the conductor would first have let it in. It decides nothing in the run that it looks at.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from conductor.waits import MAX_RETRY_S, WAITS
from mooncake.app.sim.requests import Fate, Flight, Results
from mooncake.app.sim.simulation import Simulation
from mooncake.app.sim.summary import meets

AFTER_S = 90.0  # of arrivals that a refused request could disturb: more than a queue and an answer take
EVENTS_A_LOOK = 1000
NEWS_S = 0.5  # how often it is seen who was refused; less than a second
ALIKE = 20  # refusals that one is told from when all waits are known
EXACT = 0.25  # of the true wait: what is told no worse is right

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def keep_placements(simulation: Simulation) -> None:
    """Before a run whose refusals are to be judged."""
    simulation.brain.kept = {}


def false_rejections(judged: Simulation, count: int, seed: int) -> Mask:
    """Of ``count`` refused requests of a run that has ended (all, if there are fewer): whether each, put back alone
    where it would have been placed, would have met both limits without anybody else missing them for it.

    The run is played again with everything decided as it was: who is let in, and every placement, so that nothing
    differs by the luck of other choices. Where one of those looked at arrived, the process forks, and the branch lets
    it in and goes on until everybody who came in the next ``AFTER_S`` has ended. Branches run on all processors.
    """
    refused = np.flatnonzero(judged.results.fate == Fate.REJECTED)
    looked_at = np.random.default_rng(seed).choice(refused, min(count, len(refused)), replace=False)
    return _Branches(judged, refused, looked_at).compare()


class _Branches:
    """The run again, with a branch for each of ``looked_at``."""

    def __init__(self, judged: Simulation, refused: Indices, looked_at: Indices) -> None:
        if judged.brain.kept is None:
            raise ValueError("the placements of the run were not kept")
        # It learns nothing, for it decides nothing.
        unasked = judged.cluster.with_conductor(admission="none", sample_every=judged.results.size)
        self._simulation = Simulation(unasked, judged.trace, judged.options)
        self._simulation.brain.script = judged.brain.kept
        self._simulation.brain.turned_away = set(refused.tolist())
        self._without = meets(judged.results, judged.cluster.slo)
        self._looked_at: list[int] = looked_at.tolist()
        self._is_branch = False
        self._running: list[tuple[int, int, int]] = []  # request, process, where it writes
        self._met: dict[int, Mask] = {}  # by request

    def compare(self) -> Mask:
        """Of each of ``looked_at``: whether it did well and nobody the worse."""
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
        """Whom the request could disturb."""
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
        """The rest of the run with the request in it."""
        simulation, wanted = self._simulation, self._came_before(one)
        simulation.brain.turned_away.discard(one)
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
    """Asks for some refused requests again, every whole second after the refusal as ``Retry-After`` counts, until they
    would be let in; they are not.

    ``waits_s``: by request, how long that took; ``inf`` when it was longer than the longest time that is told. Who was
    refused so late that requests stopped coming meanwhile is not in it.
    """

    def __init__(self, simulation: Simulation, share: float = 1.0) -> None:
        self.waits_s: dict[int, float] = {}
        self._simulation = simulation
        self._seen: Mask = np.zeros(simulation.results.size, dtype=bool)
        self._is_wanted: Mask = np.random.default_rng(simulation.options.seed).random(simulation.results.size) < share
        self._until_s = float(simulation.results.arrival_s.max()) - MAX_RETRY_S
        simulation.agenda.after(NEWS_S, self._look)

    def errors(self) -> Floats:
        """|told / true - 1| of each, both in whole seconds and none longer than the longest that is told."""
        return self._errors(np.ceil(self._simulation.results.retry_after_s[list(self.waits_s)]))

    def errors_with_hindsight(self) -> Floats:
        """As ``errors``, had each been told by all others' true waits (``told_with_hindsight``): about the best that
        anybody can do who knows what the conductor knows of a request. The placements must have been kept."""
        kept, limit_ms = self._simulation.brain.kept, self._simulation.cluster.slo.ttft_s * 1e3
        assert kept is not None
        parts = [kept[at].breakdown for at in self.waits_s]
        waits = np.array([(part.queue_ms + part.fetch_ms, part.prefill_ms) for part in parts]).reshape(-1, 2)
        return self._errors(told_with_hindsight(waits, waits.sum(axis=1) > limit_ms, self._true_s()))

    def _errors(self, told_s: Floats) -> Floats:
        errors: Floats = np.abs(told_s / self._true_s() - 1.0)
        return errors

    def _true_s(self) -> Floats:
        return np.minimum(list(self.waits_s.values()), MAX_RETRY_S)

    def _look(self) -> None:
        """For who was refused since the last time."""
        simulation, results = self._simulation, self._simulation.results
        fresh = np.flatnonzero((results.fate == Fate.REJECTED) & ~self._seen)
        self._seen[fresh] = True
        for at in fresh[self._is_wanted[fresh] & (results.end_s[fresh] <= self._until_s)].tolist():
            keys = simulation.block_keys(simulation.trace[at])
            flight = Flight(at, results.input_tokens.item(at), results.output_tokens.item(at), keys)
            simulation.agenda.at(results.end_s.item(at) + 1.0, self._ask, flight, 1.0)
        if simulation.agenda.now <= self._until_s + NEWS_S:
            simulation.agenda.after(NEWS_S, self._look)

    def _ask(self, flight: Flight, waited_s: float) -> None:
        simulation = self._simulation
        if simulation.brain.would_admit(flight, simulation.agenda.now):
            self.waits_s[flight.index] = waited_s
        elif waited_s >= MAX_RETRY_S:
            self.waits_s[flight.index] = np.inf
        else:
            simulation.agenda.after(1.0, self._ask, flight, waited_s + 1.0)


def telling_errors(results: Results) -> Floats:
    """|told / true - 1| of each time that a refused client was told, and came back at (``Run.returns``).

    True is how long it took until it was let in. Neither is longer than the longest that is told; who gave up counts as
    one who waited so long.
    """
    told_s = np.array([telling.told_s for telling in results.tellings], dtype=np.float64)
    index = np.array([telling.request for telling in results.tellings], dtype=np.int64)
    waited_s = results.arrival_s[index] - np.array([telling.at_s for telling in results.tellings])
    waited_s[results.fate[index] == Fate.REJECTED] = np.inf
    errors: Floats = np.abs(told_s / np.minimum(waited_s, MAX_RETRY_S) - 1.0)
    return errors


def told_with_hindsight(features: Floats, is_slow: Mask, true_s: Floats) -> Floats:
    """[requests] seconds: what is right for most of the ``ALIKE`` refusals most like each, itself left out. Alike are
    those for the same reason (``is_slow``: the first token) that are near in the ranks of their features [requests,
    features]."""
    ranks = features.argsort(axis=0).argsort(axis=0) / max(len(features), 1)
    is_right = np.abs(WAITS[:, None] / true_s - 1.0) <= EXACT  # [waits, requests]
    told: Floats = np.zeros(len(features))
    for one in range(len(features)):
        distance = ((ranks - ranks[one]) ** 2).sum(axis=1)
        distance[is_slow != is_slow[one]] += features.shape[1]  # farther than any
        distance[one] = np.inf
        alike = distance.argsort(kind="stable")[: min(ALIKE, len(features) - 1)]
        told[one] = WAITS[is_right[:, alike].sum(axis=1).argmax()]
    return told
