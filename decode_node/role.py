"""The decode role of a process: a registered segment under its cache (or the mirror), hand-offs, write-back, service.

``node`` gives it its own engine; a node that can switch roles gives it the engine that prefill uses too.
"""

from __future__ import annotations

import asyncio
import math

from decode_node.receiver import Receiver
from decode_node.service import DecodeServicer
from decode_node.writeback import WriteBack
from decode_node.writeback_hook import WriteBackHook
from kvstore.client.store_client import StoreClient
from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from mooncake.config import TBT_ROOM, transfer_secret
from mooncake.connection_cache import ConnectionCache
from mooncake.engine.backends.backend import CacheSize
from mooncake.engine.hosting.host import EngineHost
from mooncake.outbox import Outboxes
from mooncake.prefault import prefault_in_background
from mooncake.rpc import cluster_pb2, decode_pb2_grpc
from mooncake.rpc.convert import segment_to_wire
from mooncake.rpc.server import Channels, RpcServer


def open_segment(node_id: str, size: CacheSize) -> Segment:
    """Memory for the cache, or its mirror, that other nodes can write into."""
    segment = Segment.create(node_id, size.layout.block_bytes, size.num_blocks)
    prefault_in_background(segment.array)
    return segment


class DecodeRole:
    """Over a ``host`` that is open in ``segment``: let it run with ``hook``, ``serve``; at the end ``drain`` and
    ``stop``."""

    def __init__(
        self,
        node_id: str,
        host: EngineHost,
        segment: Segment,
        transfer: TransferEngine,
        channels: Channels,
        outboxes: Outboxes,
    ) -> None:
        config, layout = host.config, host.cache_size.layout
        stores = ConnectionCache(lambda address: StoreClient(address, transfer, channels))
        self._host = host
        self._writeback = WriteBack(stores.get, layout, host.mirror)
        self.hook = WriteBackHook(self._writeback, host.thread, config.block.tokens)
        self._loop = asyncio.get_running_loop()
        self._segment_server = SegmentServer(
            segment,
            node_id,
            config.transfer.transports,
            config.node.host,
            on_peer_gone=self._on_peer_gone,
            secret=transfer_secret(config),
            advertise=config.node.advertise,
        )
        self.receiver = Receiver(host.thread, self._segment_server, host.mirror, layout)
        self._servicer = DecodeServicer(host, self.receiver, self.hook, self._segment_server, outboxes)
        self._rests_per_step = 1 / config.node.decode_share - 1
        self._most_s = TBT_ROOM * config.conductor.tbt_limit_ms / 1e3 or math.inf  # for a step and its rest

    def serve(self, server: RpcServer) -> None:
        """Export the segment and add the service. Raises ConfigError for unavailable transports."""
        self._segment_server.start()
        self._writeback.start()
        server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self._servicer, "mooncake.v1.Decode")

    def rest_after_s(self, step_s: float) -> float:
        """How long the engine leaves its cores, after a step of ``step_s``, to the prompts that are computed for this
        node. A step that computed a prompt itself is not rested after. May be called from any thread."""
        if not self._rests_per_step or self._host.has_computed_prompts or not self.receiver.awaits_prompts:
            return 0.0
        return min(step_s * self._rests_per_step, self._most_s - step_s)

    def describe(self, info: cluster_pb2.NodeInfo) -> None:
        """Add where the segment is served, and how many sequences may decode."""
        info.segment.CopyFrom(segment_to_wire(self._segment_server.address))
        info.max_sequences = self._host.config.decode.max_sequences

    @property
    def is_idle(self) -> bool:
        return self.receiver.num_open == 0

    @property
    def is_answering(self) -> bool:
        """Whether a client waits for its work."""
        return self._servicer.num_running > 0

    def report(self, load: cluster_pb2.Load) -> None:
        """Add this role's counts."""
        load.counters["handoffs_taken"] = self.receiver.committed
        load.counters["handoffs_open"] = self.receiver.num_open
        load.counters["handoffs_waiting"] = self.receiver.num_waiting
        load.counters["blocks_quarantined"] = self.receiver.num_quarantined_blocks
        load.counters["checksum_mismatches"] = self.receiver.checksum_mismatches
        load.counters["blocks_written_back"] = self._writeback.stored
        load.counters["blocks_not_written_back"] = self._writeback.skipped

    async def drain(self) -> None:
        """Return once nothing of finished requests is held any more, and offer the pool no further blocks."""
        await self._servicer.drain()
        await self._writeback.stop()

    def stop(self) -> None:
        """Call after the engine has stopped."""
        self._segment_server.stop()

    def _on_peer_gone(self, writer_id: str) -> None:
        """Called on a thread of the segment server."""
        self._loop.call_soon_threadsafe(self.receiver.peer_gone, writer_id)
