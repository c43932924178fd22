"""The machines of a run: the role of each, which are down, and how slow each is.

A machine keeps its name, its place in the network and what its SSD holds when it restarts, and its host's memory when
it only changes its role. What requests do on machines is up to ``MachineEvents``.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Protocol

from mooncake.app.sim.cluster import Cluster, Machines
from mooncake.app.sim.conductor import SimConductor, store_id
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.links import Network
from mooncake.app.sim.machines.cache import Cache, HostCache
from mooncake.app.sim.machines.coupled import CoupledMachine
from mooncake.app.sim.machines.decode import DecodeMachine
from mooncake.app.sim.machines.disk import Disk
from mooncake.app.sim.machines.prefill import PrefillMachine
from mooncake.app.sim.machines.tiered import TieredCache
from mooncake.app.sim.requests import SimRequest


class MachineEvents(Protocol):
    """What machines report of their requests; see ``PrefillMachine``, ``DecodeMachine`` and ``CoupledMachine``."""

    def prefill_starts(self, request: SimRequest, work_s: float) -> None: ...

    def pace_changed(self, request: SimRequest, left_s: float) -> None: ...

    def prefill_ends(self, request: SimRequest, work_s: float) -> None: ...

    def first_token(self, request: SimRequest, spent_s: float) -> None:
        """On a coupled machine."""
        ...

    def finished(self, request: SimRequest, tail_ms: float) -> None: ...


class SimMachines:
    """All machines of ``cluster``, started and registered."""

    def __init__(
        self, cluster: Cluster, agenda: Agenda, network: Network, conductor: SimConductor, events: MachineEvents
    ) -> None:
        self.prefill: dict[str, PrefillMachine] = {}
        self.decode: dict[str, DecodeMachine] = {}
        self.coupled: dict[str, CoupledMachine] = {}
        self.disks: dict[str, Disk] = {}
        self.down: set[str] = set()
        self._cluster = cluster
        self._agenda = agenda
        self._conductor = conductor
        self._events = events
        self._groups: dict[str, Machines] = {}  # group of each machine
        self._died: set[str] = set()  # machines that have not been restarted in a role that keeps KV
        self._slowed: dict[str, float] = {}  # by a fault
        count: Counter[str] = Counter()  # machines named so far, by role
        for group in cluster.machines:
            for _ in range(group.count):
                name = f"{group.role}-{count[group.role]}"
                count[group.role] += 1
                self._groups[name] = group
                self._start(name)
                network.join(name, group.nic_gb_per_s * 1e9)

    def __contains__(self, name: str) -> bool:
        return name in self._groups

    def role(self, name: str) -> str:
        return self._groups[name].role

    def tell_index(self, name: str) -> None:
        """Publish what has changed in the cache of a machine's host."""
        events = self.prefill[name].cache.take_events()
        if events:
            self._conductor.stored(store_id(name), events)

    # Faults and roles

    def go_down(self, name: str) -> None:
        """The machine is gone; what it was doing still has to ``fail``."""
        self.down.add(name)
        self._died.add(name)

    def fail(self, name: str) -> None:
        """It loses its work and its memory."""
        if name in self.decode:
            self.decode[name].fail()
        if name in self.prefill:
            self.prefill[name].fail()
            self.prefill[name].cache.die()

    def revive(self, name: str) -> None:
        self.down.discard(name)
        self._start(name)

    def switch(self, name: str, role: str) -> None:
        """It serves another role; weights and the KV in its host's memory stay."""
        self._groups[name] = next(group for group in self._cluster.machines if group.role == role)
        self._start(name)

    def slow_down(self, name: str, slowdown: float) -> None:
        """A fault: steps take ``slowdown`` times as long; 1 ends it."""
        self._slowed[name] = slowdown
        if name in self.decode:
            self.decode[name].disturb(slowdown)
        elif name in self.prefill:
            self.prefill[name].disturb(slowdown)
        else:
            self.coupled[name].slowdown = slowdown

    def look_beside(self) -> None:
        """Machines that share a processor slow one another down while both work."""
        prefills = any(machine.running is not None for machine in self.prefill.values())
        decodes = any(machine.running for machine in self.decode.values())
        for is_beside, machines in ((decodes, self.prefill), (prefills, self.decode)):
            for name, machine in machines.items():
                slowdown = self._slowed.get(name, 1.0) * (self._groups[name].beside if is_beside else 1.0)
                if slowdown != machine.slowdown:
                    machine.disturb(slowdown)

    def _start(self, name: str) -> None:
        """A new process with empty memory; counters of an earlier one with this name continue."""
        group, model, events = self._groups[name], self._cluster.model, self._events
        curve = self._cluster.curves[group.curve]
        if group.role == "coupled":
            self.coupled[name] = CoupledMachine(group, curve, model, self._agenda, events.first_token, events.finished)
        elif group.role == "decode":
            if name not in self.decode:
                self.decode[name] = DecodeMachine(group, curve, model, self._agenda, events.finished)
        else:
            if name in self.prefill and name not in self._died:  # it had this role before: its host still has the KV
                self._conductor.join(name, group, self._agenda.now, has_store=False)
                return
            self._died.discard(name)
            machine = PrefillMachine(
                group,
                curve,
                model,
                self._agenda,
                self._make_cache(name, group),
                events.prefill_starts,
                events.pace_changed,
                events.prefill_ends,
            )
            if name in self.prefill:
                machine.busy_s = self.prefill[name].busy_s
            self.prefill[name] = machine
        self._conductor.join(name, group, self._agenda.now)
        if name in self.disks:  # it recovers its blocks from there
            self.tell_index(name)

    def _make_cache(self, name: str, group: Machines) -> Cache:
        """An empty cache in memory; the SSD keeps its content."""
        model, ssd = self._cluster.model, group.ssd
        if ssd is None:
            return HostCache(group.store_tokens // model.block_tokens, model.block_tokens)
        if name not in self.disks:
            self.disks[name] = Disk(ssd, model, self._agenda)
        tell = partial(self.tell_index, name)
        return TieredCache(group.store_tokens, ssd, model, self._agenda, self.disks[name], tell)
