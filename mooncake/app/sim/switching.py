"""Changes of role in virtual time: the real balancer decides; here the machine drains, and then serves its new role."""

from __future__ import annotations

from collections.abc import Callable

from conductor.control.balance import Switch, SwitchState
from conductor.registry import NodeLoad
from mooncake.app.sim.conductor import SimConductor
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.machines.sim_machines import SimMachines


class Switching:
    """``is_empty`` says whether no request needs a machine; a switch of an empty one takes ``switch_s``."""

    def __init__(
        self,
        agenda: Agenda,
        conductor: SimConductor,
        machines: SimMachines,
        switch_s: float,
        is_empty: Callable[[str], bool],
    ) -> None:
        self._agenda = agenda
        self._conductor = conductor
        self._machines = machines
        self._switch_s = switch_s
        self._is_empty = is_empty
        self._draining: Switch | None = None

    def drains(self, name: str) -> bool:
        return self._draining is not None and self._draining.node_id == name

    def look(self) -> None:
        """Begin a switch when the conductor asks for it, and finish it when the machine is empty."""
        now, balancer = self._agenda.now, self._conductor.balancer
        if balancer is None:
            return
        switch = self._conductor.switch(now)
        if switch is not None:
            self._draining = switch
        switch = self._draining
        if switch is None:
            return
        if balancer.switching is None:  # it took too long
            self._draining = None
            self._conductor.heartbeat(switch.node_id, NodeLoad(), now)
            return
        self._conductor.heartbeat(switch.node_id, NodeLoad(), now, draining=True)
        if self._is_empty(switch.node_id) and balancer.switching[1] is SwitchState.DRAINING:
            balancer.moved(SwitchState.FLIPPING, now)
            self._agenda.after(self._switch_s, self._flip, switch)

    def _flip(self, switch: Switch) -> None:
        balancer = self._conductor.balancer
        self._draining = None
        self._machines.switch(switch.node_id, switch.to)
        if balancer is not None and balancer.switching is not None:
            balancer.moved(SwitchState.DONE, self._agenda.now)
