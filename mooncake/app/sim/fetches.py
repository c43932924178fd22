"""Prefixes being fetched: from another host's memory over the network, first from an SSD if only that has them. The
conductor decides what is fetched; blocks evicted meanwhile are computed.
"""

from __future__ import annotations

from functools import partial

from mooncake.app.sim.cluster import Cluster
from mooncake.app.sim.conductor import SimConductor, store_id
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.links import Flow, Network
from mooncake.app.sim.machines.sim_machines import SimMachines
from mooncake.app.sim.machines.tiered import TieredCache
from mooncake.app.sim.requests import SimRequest


class Fetches:
    """All fetches of one run."""

    def __init__(
        self,
        cluster: Cluster,
        agenda: Agenda,
        network: Network,
        conductor: SimConductor,
        machines: SimMachines,
    ) -> None:
        self._agenda = agenda
        self._network = network
        self._conductor = conductor
        self._machines = machines
        self._block_tokens = cluster.model.block_tokens
        self._token_bytes = cluster.model.token_bytes
        self._sample_every = cluster.conductor.sample_every

    def begin(self, request: SimRequest) -> None:
        """Start fetching the prefix from another host or an SSD; without such a prefix the prompt is ready."""
        placement = request.placement
        assert placement is not None
        request.is_ready = True
        if not placement.fetched_tokens:
            return
        source = placement.pools[0].host_id
        if source in self._machines.down:
            return
        wanted = (placement.local_tokens + placement.fetched_tokens) // self._block_tokens
        cache = self._machines.prefill[request.prefill_id].cache
        if source == placement.prefill.host_id:
            if isinstance(cache, TieredCache):
                request.loading = cache.load(request.keys[:wanted], partial(self._loaded_here, request))
                request.is_ready = request.loading is None
            return
        store = self._machines.prefill[source].cache
        run = min(store.stored(request.keys), wanted)
        own = cache.match(request.keys[:run])
        if run <= own:
            return
        request.is_ready = False
        request.source_id = source
        if isinstance(store, TieredCache):
            store.saw(request.keys[:run])
            request.loading = store.load(request.keys[:run], partial(self._loaded_there, request, run))
            if request.loading is not None:
                return
        self._send(request, run, own)

    def lose_source(self, request: SimRequest) -> None:
        """The source died: the prefix has to be computed."""
        self._stop(request)
        request.source_id, request.source_held = "", []
        request.fetched_tokens = request.ssd_tokens = 0
        self._is_ready(request)

    def cancel(self, request: SimRequest) -> None:
        """Cancel all transfers of this attempt, including its hand-off."""
        self._stop(request)
        self._let_source_go(request)

    def _stop(self, request: SimRequest) -> None:
        for flow in request.transfers:
            self._network.cancel(flow)
        request.transfers = []
        if request.loading is not None:
            request.loading.cancel()
            request.loading = None

    def _loaded_here(self, request: SimRequest, num_blocks: int) -> None:
        """Blocks have come from the machine's own SSD; they are held in memory until the prompt is computed."""
        request.loading = None
        request.ssd_tokens = num_blocks * self._block_tokens
        cache = self._machines.prefill[request.prefill_id].cache
        request.held = cache.hold(request.keys, cache.match(request.keys))
        self._machines.tell_index(request.prefill_id)
        self._is_ready(request)

    def _loaded_there(self, request: SimRequest, run: int, num_blocks: int) -> None:
        """Blocks have come from the SSD into the memory of the source host."""
        request.loading = None
        request.ssd_tokens = num_blocks * self._block_tokens
        self._machines.tell_index(request.source_id)
        run = self._machines.prefill[request.source_id].cache.match(request.keys[:run])
        own = self._machines.prefill[request.prefill_id].cache.match(request.keys[:run])
        if run > own:
            self._send(request, run, own)
        else:
            request.source_id = ""
            self._is_ready(request)

    def _send(self, request: SimRequest, run: int, own: int) -> None:
        source = request.source_id
        request.source_held = self._machines.prefill[source].cache.hold(request.keys, run)
        request.fetched_tokens = (run - own) * self._block_tokens
        num_bytes = request.fetched_tokens * self._token_bytes
        done = partial(self._fetched, request, run)
        request.transfers.append(self._network.send(source, request.prefill_id, num_bytes, done))

    def _fetched(self, request: SimRequest, run: int, flow: Flow) -> None:
        request.transfers.remove(flow)
        source = request.source_id
        self._let_source_go(request)
        machine = self._machines.prefill[request.prefill_id]
        machine.cache.add(request.keys[:run], [], into_dram=True)  # needed in DRAM now, even if the SSD has it
        request.held = machine.cache.hold(request.keys, machine.cache.match(request.keys[:run]))
        self._machines.tell_index(request.prefill_id)
        took_ms = (self._agenda.now - flow.started_s) * 1e3
        if request.index % self._sample_every == 0:
            self._conductor.costs.observe_transfer(request.prefill_id, store_id(source), int(flow.num_bytes), took_ms)
        self._is_ready(request)

    def _is_ready(self, request: SimRequest) -> None:
        request.is_ready = True
        self._machines.prefill[request.prefill_id].make_ready()

    def _let_source_go(self, request: SimRequest) -> None:
        source, request.source_id = request.source_id, ""
        if source:
            self._machines.prefill[source].cache.release(request.source_held)
            request.source_held = []
            self._machines.tell_index(source)
