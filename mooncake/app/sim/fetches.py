"""Prefixes being fetched: from another host's memory over the network, first from an SSD if only that has them. The
conductor decides what is fetched; blocks evicted meanwhile are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from mooncake.app.sim.brain import Brain, store_id
from mooncake.app.sim.cluster import Cluster
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.links import Flow, Network
from mooncake.app.sim.prefill import PrefillMachine
from mooncake.app.sim.requests import Flight
from mooncake.app.sim.tiered import TieredCache


class Fetches:
    """The callers change ``machines`` and ``down`` (the dead ones); ``tell`` publishes changes in a machine's cache."""

    def __init__(
        self,
        cluster: Cluster,
        agenda: Agenda,
        network: Network,
        brain: Brain,
        machines: Mapping[str, PrefillMachine],
        down: Collection[str],
        tell: Callable[[str], None],
    ) -> None:
        self._agenda = agenda
        self._network = network
        self._brain = brain
        self._machines = machines
        self._down = down
        self._tell = tell
        self._block_tokens = cluster.model.block_tokens
        self._token_bytes = cluster.model.token_bytes
        self._sample_every = cluster.conductor.sample_every

    def begin(self, flight: Flight) -> None:
        """Start fetching the prefix from another host or an SSD; without such a prefix the prompt is ready."""
        placement = flight.placement
        assert placement is not None
        flight.is_ready = True
        if not placement.fetched_tokens:
            return
        source = placement.pools[0].host_id
        if source in self._down:
            return
        wanted = (placement.local_tokens + placement.fetched_tokens) // self._block_tokens
        cache = self._machines[flight.prefill_id].cache
        if source == placement.prefill.host_id:
            if isinstance(cache, TieredCache):
                flight.loading = cache.load(flight.keys[:wanted], partial(self._loaded_here, flight))
                flight.is_ready = flight.loading is None
            return
        store = self._machines[source].cache
        run = min(store.stored(flight.keys), wanted)
        own = cache.match(flight.keys[:run])
        if run <= own:
            return
        flight.is_ready = False
        flight.source_id = source
        if isinstance(store, TieredCache):
            store.saw(flight.keys[:run])
            flight.loading = store.load(flight.keys[:run], partial(self._loaded_there, flight, run))
            if flight.loading is not None:
                return
        self._send(flight, run, own)

    def lose_source(self, flight: Flight) -> None:
        """The source died: the prefix has to be computed."""
        self._stop(flight)
        flight.source_id, flight.source_held = "", []
        flight.fetched_tokens = flight.ssd_tokens = 0
        self._is_ready(flight)

    def cancel(self, flight: Flight) -> None:
        """Cancel all transfers of this attempt, including its hand-off."""
        self._stop(flight)
        self._let_source_go(flight)

    def _stop(self, flight: Flight) -> None:
        for flow in flight.transfers:
            self._network.cancel(flow)
        flight.transfers = []
        if flight.loading is not None:
            flight.loading.cancel()
            flight.loading = None

    def _loaded_here(self, flight: Flight, num_blocks: int) -> None:
        """Blocks have come from the machine's own SSD; they are held in memory until the prompt is computed."""
        flight.loading = None
        flight.ssd_tokens = num_blocks * self._block_tokens
        cache = self._machines[flight.prefill_id].cache
        flight.held = cache.hold(flight.keys, cache.match(flight.keys))
        self._tell(flight.prefill_id)
        self._is_ready(flight)

    def _loaded_there(self, flight: Flight, run: int, num_blocks: int) -> None:
        """Blocks have come from the SSD into the memory of the source host."""
        flight.loading = None
        flight.ssd_tokens = num_blocks * self._block_tokens
        self._tell(flight.source_id)
        run = self._machines[flight.source_id].cache.match(flight.keys[:run])
        own = self._machines[flight.prefill_id].cache.match(flight.keys[:run])
        if run > own:
            self._send(flight, run, own)
        else:
            flight.source_id = ""
            self._is_ready(flight)

    def _send(self, flight: Flight, run: int, own: int) -> None:
        source = flight.source_id
        flight.source_held = self._machines[source].cache.hold(flight.keys, run)
        flight.fetched_tokens = (run - own) * self._block_tokens
        num_bytes = flight.fetched_tokens * self._token_bytes
        done = partial(self._fetched, flight, run)
        flight.transfers.append(self._network.send(source, flight.prefill_id, num_bytes, done))

    def _fetched(self, flight: Flight, run: int, flow: Flow) -> None:
        flight.transfers.remove(flow)
        source = flight.source_id
        self._let_source_go(flight)
        machine = self._machines[flight.prefill_id]
        machine.cache.add(flight.keys[:run], [], into_dram=True)  # needed in DRAM now, even if the SSD has it
        flight.held = machine.cache.hold(flight.keys, machine.cache.match(flight.keys[:run]))
        self._tell(machine.name)
        took_ms = (self._agenda.now - flow.started_s) * 1e3
        if flight.index % self._sample_every == 0:
            self._brain.costs.observe_transfer(flight.prefill_id, store_id(source), int(flow.num_bytes), took_ms)
        self._is_ready(flight)

    def _is_ready(self, flight: Flight) -> None:
        flight.is_ready = True
        self._machines[flight.prefill_id].make_ready()

    def _let_source_go(self, flight: Flight) -> None:
        source, flight.source_id = flight.source_id, ""
        if source:
            self._machines[source].cache.release(flight.source_held)
            flight.source_held = []
            self._tell(source)
