"""Bytes in flight between hosts: every host has one ingress and one egress port, and flows share them max-min fairly.

Fluid flows with progressive filling (Bertsekas, Gallager, Data Networks, 6.5): all rates grow together until a port is
full or a flow has reached its limit; those flows are fixed, the others keep growing. It knows bytes and seconds, not
what they are for.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake.app.sim.events import Agenda


class Port:
    """One direction of one host's network."""

    __slots__ = ("_binds_above", "capacity", "demand", "flows")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity  # bytes/s
        self._binds_above = capacity * (1 + 1e-9)
        self.flows: dict[Flow, None] = {}  # in order of start
        self.demand = 0.0  # what its flows would use without competition

    @property
    def binds(self) -> bool:
        """Whether its flows want more than its capacity. Otherwise the port limits no flow."""
        return self.demand > self._binds_above


class Flow:
    """``left`` bytes at time ``since``; ``limit`` is the most it can use (bytes/s)."""

    __slots__ = ("left", "limit", "num_bytes", "on_done", "rate", "since", "source", "started_s", "target", "version")

    def __init__(
        self, source: Port, target: Port, num_bytes: float, limit: float, on_done: Callable[[Flow], None], now: float
    ) -> None:
        self.source = source
        self.target = target
        self.num_bytes = num_bytes
        self.left = num_bytes
        self.limit = limit
        self.rate = 0.0
        self.since = self.started_s = now
        self.on_done = on_done
        self.version = 0


class Network:
    """The ports of all hosts and the flows between them."""

    def __init__(self, agenda: Agenda, latency_s: float = 0.0) -> None:
        self._agenda = agenda
        self._latency_s = latency_s
        self._out: dict[str, Port] = {}
        self._in: dict[str, Port] = {}
        self.num_open = 0
        self.bytes_moved = 0.0

    def join(self, host: str, bytes_per_s: float) -> None:
        self._out[host] = Port(bytes_per_s)
        self._in[host] = Port(bytes_per_s)

    def send(
        self, source: str, target: str, num_bytes: float, on_done: Callable[[Flow], None], limit: float = float("inf")
    ) -> Flow:
        """Move bytes from host to host; ``on_done`` is called with the flow when the last one has arrived."""
        out, into = self._out[source], self._in[target]
        now = self._agenda.now
        flow = Flow(out, into, max(num_bytes, 1.0), min(limit, out.capacity, into.capacity), on_done, now)
        self.num_open += 1
        out.flows[flow] = into.flows[flow] = None
        out.demand += flow.limit
        into.demand += flow.limit
        if out.binds or into.binds:
            flows = self._touched([port for port in (out, into) if port.binds])
            flows.setdefault(flow)
            self._share(flows)
        else:  # it runs at its limit and affects no other flow
            self._set_rate(flow, flow.limit)
        return flow

    def cancel(self, flow: Flow) -> None:
        """Stop the flow where it is, without a callback. Does nothing if it has ended."""
        if flow in flow.source.flows:
            self._leave(flow)

    def finish_within(self, flow: Flow, left_s: float) -> None:
        """Limit the flow so that its last byte arrives ``left_s`` from now: the sender's pace has changed."""
        self._settle(flow)
        if not flow.left:  # the last byte is on the way
            return
        ports = flow.source, flow.target
        bound = {port for port in ports if port.binds}
        limit = min(flow.left / left_s if left_s > 0.0 else float("inf"), *(port.capacity for port in ports))
        for port in ports:
            port.demand += limit - flow.limit
        flow.limit = limit
        bound |= {port for port in ports if port.binds}
        if bound:
            self._share(self._touched([port for port in ports if port in bound]))
        else:
            self._set_rate(flow, limit)

    def _leave(self, flow: Flow) -> None:
        self._settle(flow)
        ports = flow.source, flow.target
        bound = [port for port in ports if port.binds]
        for port in ports:
            del port.flows[flow]
            port.demand = port.demand - flow.limit if port.flows else 0.0
        flow.version += 1
        self.num_open -= 1
        if bound:
            self._share(self._touched(bound))

    def _touched(self, ports: list[Port]) -> dict[Flow, None]:
        """All flows whose rates depend on these ports, through saturated ports."""
        seen = dict.fromkeys(ports)
        flows: dict[Flow, None] = {}
        queue = list(ports)
        while queue:
            for flow in queue.pop().flows:
                if flow in flows:
                    continue
                flows[flow] = None
                for port in (flow.source, flow.target):
                    if port not in seen and port.binds:
                        seen[port] = None
                        queue.append(port)
        return flows

    def _share(self, flows: dict[Flow, None]) -> None:
        """Progressive filling over ``flows``, which are all flows of the ports that bind them."""
        room: dict[Port, float] = {}
        users: dict[Port, int] = {}
        for flow in flows:
            for port in (flow.source, flow.target):
                if port.binds:
                    room.setdefault(port, port.capacity)
                    users[port] = users.get(port, 0) + 1
        level, growing = 0.0, sorted(flows, key=_limit)
        while growing:
            next_level = min(growing[0].limit, *(level + room[p] / users[p] for p in room if users[p]), float("inf"))
            grown = next_level - level
            for port in room:
                room[port] -= grown * users[port]
            level, still = next_level, []
            for flow in growing:
                ends = [port for port in (flow.source, flow.target) if port in room]
                if flow.limit <= level * (1 + 1e-12) or any(room[p] <= p.capacity * 1e-9 for p in ends):
                    for port in ends:
                        users[port] -= 1
                    self._set_rate(flow, level)
                else:
                    still.append(flow)
            growing = still

    def _set_rate(self, flow: Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        if flow.rate:  # it has been moving
            self._settle(flow)
        flow.rate = rate
        flow.version += 1
        self._agenda.at(flow.since + flow.left / rate + self._latency_s, self._arrive, flow, flow.version)

    def _settle(self, flow: Flow) -> None:
        """Count what has moved since its rate was set."""
        now = self._agenda.now
        moved = min(flow.left, flow.rate * (now - flow.since))
        flow.left -= moved
        flow.since = now
        self.bytes_moved += moved

    def _arrive(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return
        self._leave(flow)
        flow.on_done(flow)


def _limit(flow: Flow) -> float:
    return flow.limit
