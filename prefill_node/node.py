"""The prefill node: wires model, engine, transfers and service together, and joins the cluster."""

from __future__ import annotations

import logging
import os

from kvstore.transfer.engine import Priority, TransferEngine
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, transfer_secret
from mooncake.engine.host import EngineHost, plan_cache
from mooncake.events import CacheEventsServicer
from mooncake.membership import Membership
from mooncake.rpc import cluster_pb2, common_pb2_grpc, prefill_pb2_grpc
from mooncake.rpc.server import Channels, RpcServer
from mooncake.types import Role
from prefill_node.job import Workshop
from prefill_node.loader import Loader
from prefill_node.outbox import Outbox, Sink
from prefill_node.service import PrefillServicer
from prefill_node.streamer import LayerStreamer

log = logging.getLogger(__name__)


class PrefillNode:
    """``await start()``, then serve until ``await stop()``. Raises ConfigError or ModelError from ``start``."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.node_id = config.node.id or f"prefill-{os.getpid()}"
        self.control_address = ""

    async def start(self) -> None:
        config = self.config
        checkpoint = open_checkpoint(config.model.path)
        plan = plan_cache(config, config.prefill, checkpoint)
        self.host = EngineHost(config, config.prefill, checkpoint, plan)
        self.streamer = LayerStreamer(config.block.tokens)
        await self.host.start(self.streamer)
        transfer = config.transfer
        self._transfer = TransferEngine(
            self.node_id, transfer.transports, transfer.streams, transfer.max_mb_per_s, transfer_secret(config)
        )
        self._channels = Channels()
        memory = self.host.engine.cache.memory
        self._loader = Loader(self._transfer, memory)
        self._handoffs = Outbox("hand-offs", self._transfer, memory, self._on_sent, Priority.URGENT)
        self._stores = Outbox("pool-writes", self._transfer, memory, self._on_sent, Priority.BACKGROUND)
        shop = Workshop(
            self.node_id,
            self.host,
            self._transfer,
            self._channels,
            self.streamer,
            self._loader,
            self._handoffs,
            self._stores,
            {},
        )
        self._servicer = PrefillServicer(shop)
        self._server = RpcServer()
        self._server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, self._servicer, "mooncake.v1.Prefill")
        self._server.add(
            common_pb2_grpc.add_CacheEventsServicer_to_server,
            CacheEventsServicer(self.host.events),
            "mooncake.v1.CacheEvents",
        )
        port = await self._server.start(config.node.host, config.node.port)
        self.control_address = f"{config.node.host}:{port}"
        info = cluster_pb2.NodeInfo(
            node_id=self.node_id,
            role=Role.PREFILL,
            incarnation=self.host.incarnation,
            control_address=self.control_address,
            kv_fingerprint=self.host.fingerprint,
            block_tokens=config.block.tokens,
            max_sequences=config.prefill.max_sequences,
        )
        self._membership = Membership(config, info, self._report)
        await self._membership.start()

    async def stop(self) -> None:
        await self._membership.stop()
        await self._server.stop()
        await self._servicer.drain()
        await self.host.stop()
        for worker in (self._loader, self._handoffs, self._stores):
            worker.stop()
        self._transfer.close()
        await self._channels.close()

    async def drained(self) -> None:
        """Return once nothing of ended requests is held any more."""
        await self._servicer.drain()

    def _report(self) -> cluster_pb2.HeartbeatRequest:
        report = cluster_pb2.HeartbeatRequest(load=self.host.load(), samples=self.host.samples.take())
        for peer in self._transfer.stats():
            report.transports.add(
                peer=peer.node_id,
                transport=peer.transport,
                bytes=peer.nbytes,
                gb_per_s=peer.gb_per_s,
                failures=peer.failures,
                current=peer.is_current,
                reason=peer.reason,
            )
        return report

    def _on_sent(self, sink: Sink, num_bytes: int, elapsed_ms: float) -> None:
        address = sink.address
        if address is not None:
            self.host.samples.add_transfer(address.node_id, sink.transport, num_bytes, elapsed_ms)
