"""What a refusal was worth, judged with what only a simulation can know: the same trace once more with the refused
request in it, and when the conductor would first have let it in. It decides nothing in the run that it looks at.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mooncake.app.sim.cluster import Cluster
from mooncake.app.sim.requests import Fate, Flight, Results
from mooncake.app.sim.simulation import Run, Simulation
from mooncake.app.sim.summary import meets
from mooncake.trace import TraceRequest

AFTER_S = 90.0  # of arrivals that a refused request could disturb: more than a queue and an answer take
PROBE_S = 1.0
MAX_WAITING = 16  # refused requests asked about at a time


def false_rejections(cluster: Cluster, trace: Sequence[TraceRequest], results: Results, count: int, seed: int) -> float:
    """Share of ``count`` refused requests that would have met both limits with no fewer of the others meeting theirs.

    A replay has the arrivals of the run, everybody who was let in, and the one; nobody is asked at the door.
    """
    refused = np.flatnonzero(results.fate == Fate.REJECTED)
    looked_at = np.random.default_rng(seed).choice(refused, min(count, len(refused)), replace=False)
    open_door = cluster.with_conductor(admission="none")
    wrong = sum(_was_wrong(open_door, trace, results, int(one)) for one in looked_at)
    return wrong / max(len(looked_at), 1)


def _was_wrong(cluster: Cluster, trace: Sequence[TraceRequest], results: Results, one: int) -> bool:
    until_s = results.arrival_s[one] + AFTER_S
    let_in = np.flatnonzero((results.fate != Fate.REJECTED) & (results.arrival_s < until_s))
    without = _replay(cluster, trace, results, let_in)
    with_it = np.sort(np.append(let_in, one))
    met = _replay(cluster, trace, results, with_it)
    at = int(np.searchsorted(with_it, one))
    return bool(met[at]) and int(met.sum()) - 1 >= int(without.sum())


def _replay(
    cluster: Cluster, trace: Sequence[TraceRequest], results: Results, indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    first_s = float(results.arrival_s[indices].min())
    part = [
        TraceRequest(
            (float(results.arrival_s[at]) - first_s) * 1e3,
            trace[at].input_length,
            int(results.output_tokens[at]),
            trace[at].hash_ids,
        )
        for at in indices
    ]
    replay = Simulation(cluster, part, Run(jitter_s=0.0))
    return meets(replay.run(), cluster.slo)


class RetryProbe:
    """Asks for refused requests again, every second, until they would be let in; they are not.

    ``waits_s``: by request, how long that took; what was not let in while requests arrived is not in it.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.waits_s: dict[int, float] = {}
        self._simulation = simulation
        self._seen: npt.NDArray[np.bool_] = np.zeros(simulation.results.size, dtype=bool)
        self._waiting: list[Flight] = []
        self._until_s = float(simulation.results.arrival_s.max())
        simulation.agenda.after(PROBE_S, self._ask)

    def errors(self) -> npt.NDArray[np.float64]:
        """|told / true - 1| of every retry time whose truth is known."""
        told = self._simulation.results.retry_after_s
        return np.array([abs(told[at] / wait_s - 1.0) for at, wait_s in self.waits_s.items()])

    def _ask(self) -> None:
        simulation = self._simulation
        now, results = simulation.agenda.now, simulation.results
        left = []
        for flight in self._waiting:
            if simulation.brain.would_admit(flight, now):
                self.waits_s[flight.index] = now - float(results.arrival_s[flight.index])
            else:
                left.append(flight)
        self._waiting = left
        fresh = np.flatnonzero((results.fate == Fate.REJECTED) & ~self._seen)
        self._seen[fresh] = True
        for at in fresh[: MAX_WAITING - len(self._waiting)]:
            keys = simulation.block_keys(simulation.trace[int(at)])
            self._waiting.append(Flight(int(at), int(results.input_tokens[at]), int(results.output_tokens[at]), keys))
        if now < self._until_s:
            simulation.agenda.after(PROBE_S, self._ask)
