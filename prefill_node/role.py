"""The prefill role of a process: its hook on the engine, its loader and writers, its service.

``node`` gives it its own engine; a node that can switch roles gives it the engine that decode uses too.
"""

from __future__ import annotations

from kvstore.client.store_client import StoreClient
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.transport import Priority
from mooncake.connection_cache import ConnectionCache
from mooncake.engine.hosting.host import EngineHost
from mooncake.outbox import Outboxes
from mooncake.rpc import cluster_pb2, prefill_pb2_grpc
from mooncake.rpc.server import Channels, RpcServer
from prefill_node.blend_chunks import BlendChunks
from prefill_node.closings import Closings
from prefill_node.converted_prefix import SourceLayout
from prefill_node.kv_writer import KVWriter, WriteStream
from prefill_node.loader import Loader
from prefill_node.resources import NodeResources
from prefill_node.service import PrefillServicer
from prefill_node.streamer import LayerStreamer
from prefill_node.variant_kv import Sender


class PrefillRole:
    """Over a ``host`` that is open: let it run with ``hook``, ``serve``; at the end ``drain`` and ``stop``."""

    def __init__(self, host: EngineHost, transfer: TransferEngine, channels: Channels, outboxes: Outboxes) -> None:
        """Raises ConfigError."""
        self._samples = host.samples
        self._closings = Closings(channels)
        self._chunks = BlendChunks.configured(host)
        source_layout = SourceLayout.configured(host.config.pool_layout, host.content, host.cache_size.layout)
        variant = Sender.configured(host)
        memory = host.mirror.memory
        transfer.register(memory.data)
        self.hook = LayerStreamer(host.config.block.tokens, host.mirror, host.cache_size.groups)
        loader = Loader(transfer, host.mirror)
        handoff_writer = KVWriter("hand-offs", transfer, memory, self._on_sent, Priority.URGENT)
        pool_writer = KVWriter("pool-writes", transfer, memory, self._on_sent, Priority.BACKGROUND)
        self._workers: list[Loader | KVWriter] = [loader, handoff_writer, pool_writer]
        node = NodeResources(
            host=host,
            transfer=transfer,
            channels=channels,
            closings=self._closings,
            streamer=self.hook,
            loader=loader,
            handoff_writer=handoff_writer,
            pool_writer=pool_writer,
            store_at=ConnectionCache(lambda address: StoreClient(address, transfer, channels)).get,
            source_layout=source_layout,
            blend_chunks=self._chunks,
            variant=variant,
        )
        self._servicer = PrefillServicer(node, outboxes)

    def serve(self, server: RpcServer) -> None:
        """Add the service."""
        server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, self._servicer, "mooncake.v1.Prefill")

    def describe(self, info: cluster_pb2.NodeInfo) -> None:
        """Nothing to add: nobody writes into it."""

    def rest_after_s(self, step_s: float) -> float:
        """Somebody waits for each prompt."""
        return 0.0

    @property
    def is_idle(self) -> bool:
        return not self.hook.prompts

    @property
    def is_answering(self) -> bool:
        """Whether a client waits for its work."""
        return self._servicer.num_running > 0

    def report(self, load: cluster_pb2.Load) -> None:
        """Nothing to add: its counts are kept with the engine's."""

    async def drain(self) -> None:
        """Return once nothing of finished requests is held any more."""
        if self._chunks is not None:
            await self._chunks.stop()
        await self._servicer.drain()

    def stop(self) -> None:
        """Call after the engine has stopped."""
        self._closings.stop()
        for worker in self._workers:
            worker.stop()

    def _on_sent(self, stream: WriteStream, num_bytes: int, elapsed_ms: float) -> None:
        address = stream.address
        if address is not None:
            self._samples.add_transfer(address.node_id, stream.transport, num_bytes, elapsed_ms)
