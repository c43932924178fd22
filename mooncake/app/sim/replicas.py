"""Replicas of hot prefixes in virtual time. The real replicator decides which prefix goes to which host and which are
dropped; here their bytes take time and share the links with all other transfers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from conductor.control.replication import CopyPrefix, DropReplica
from mooncake.app.sim.cluster import Model
from mooncake.app.sim.conductor import SimConductor, host_of
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.links import Flow, Network
from mooncake.app.sim.machines.sim_machines import SimMachines
from mooncake.app.sim.machines.tiered import Loading, TieredCache


@dataclass(eq=False, slots=True)
class _Moving:
    """A copy in progress: first read from the source's SSD if needed, then sent between the hosts."""

    copy: CopyPrefix
    loading: Loading | None = None
    flow: Flow | None = None
    held: list[int] = field(default_factory=list)  # in the source's memory


class Replicas:
    """All replicas of one run."""

    def __init__(
        self,
        model: Model,
        agenda: Agenda,
        network: Network,
        conductor: SimConductor,
        machines: SimMachines,
    ) -> None:
        self.made = 0
        self.dropped = 0
        self._block_bytes = model.block_tokens * model.token_bytes
        self._agenda = agenda
        self._network = network
        self._conductor = conductor
        self._machines = machines
        self._moving: dict[_Moving, None] = {}

    def look(self) -> None:
        """Begin to copy, and drop, what the conductor requests now."""
        for action in self._conductor.replications(self._agenda.now):
            if isinstance(action, CopyPrefix):
                self._begin(action)
            else:
                self._drop(action)

    def lose(self, machine: str) -> None:
        """The machine died: cancel copies from and to it."""
        for moving in list(self._moving):
            if machine in (host_of(moving.copy.source), host_of(moving.copy.target)):
                self._end(moving, ok=False)

    def _begin(self, copy: CopyPrefix) -> None:
        moving = _Moving(copy)
        self._moving[moving] = None
        source, target = host_of(copy.source), host_of(copy.target)
        if self._machines.down & {source, target}:  # the conductor has not noticed yet: its call fails
            self._end(moving, ok=False)
            return
        store = self._machines.prefill[source].cache
        if isinstance(store, TieredCache):
            moving.loading = store.load(copy.keys, partial(self._loaded, moving))
        if moving.loading is None:
            self._send(moving)

    def _loaded(self, moving: _Moving, num_blocks: int) -> None:
        moving.loading = None
        self._machines.tell_index(host_of(moving.copy.source))
        self._send(moving)

    def _send(self, moving: _Moving) -> None:
        copy = moving.copy
        source, target = host_of(copy.source), host_of(copy.target)
        store, num_blocks = self._machines.prefill[source].cache, len(copy.keys)
        if store.match(copy.keys) < num_blocks:  # evicted meanwhile
            self._end(moving, ok=False)
            return
        moving.held = store.hold(copy.keys, num_blocks)
        lacking = num_blocks - self._machines.prefill[target].cache.match(copy.keys)
        moving.flow = self._network.send(source, target, lacking * self._block_bytes, partial(self._sent, moving))

    def _sent(self, moving: _Moving, flow: Flow) -> None:
        moving.flow = None
        target = host_of(moving.copy.target)
        cache = self._machines.prefill[target].cache
        cache.add(moving.copy.keys, [], into_dram=True)
        self._machines.tell_index(target)
        self._end(moving, ok=cache.match(moving.copy.keys) == len(moving.copy.keys))

    def _end(self, moving: _Moving, ok: bool) -> None:
        del self._moving[moving]
        if moving.loading is not None:
            moving.loading.cancel()
        if moving.flow is not None:
            self._network.cancel(moving.flow)
        if moving.held:
            source = host_of(moving.copy.source)
            self._machines.prefill[source].cache.release(moving.held)
            self._machines.tell_index(source)
        self.made += ok
        self._conductor.copied(moving.copy, ok)

    def _drop(self, drop: DropReplica) -> None:
        machine = host_of(drop.node_id)
        if machine in self._machines.down:
            return
        self.dropped += self._machines.prefill[machine].cache.give_up(drop.keys) > 0
        self._machines.tell_index(machine)
