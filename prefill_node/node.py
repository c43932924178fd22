"""The prefill node: wires model, engine, transfers and service together, and joins the cluster."""

from __future__ import annotations

import os

from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.report import add_transports
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, transfer_secret
from mooncake.engine.host import EngineHost, plan_cache
from mooncake.errors import MooncakeError
from mooncake.events import CacheEventsServicer
from mooncake.membership import Membership, first_end
from mooncake.rpc import cluster_pb2, common_pb2_grpc
from mooncake.rpc.server import Channels, RpcServer, join_address
from mooncake.types import Role
from prefill_node.role import PrefillRole
from prefill_node.streamer import LayerStreamer


class PrefillNode:
    """``await start()``, then serve until ``await stop()``. Raises ConfigError or ModelError from ``start``."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.node_id = config.node.id or f"prefill-{os.getpid()}"
        self.control_address = ""

    async def start(self) -> None:
        config, transfer = self.config, self.config.transfer
        checkpoint = open_checkpoint(config.model.path, config.model.max_model_len)
        plan = plan_cache(config, config.prefill, checkpoint)
        self._transfer = TransferEngine(
            self.node_id, transfer.transports, transfer.streams, transfer.max_mb_per_s, transfer_secret(config)
        )
        self._channels = Channels()
        self._role = PrefillRole(self.node_id, config, self._transfer, self._channels)
        self.host = EngineHost(config, config.prefill, checkpoint, plan)
        await self.host.start(self._role.hook)
        self._server = RpcServer()
        self._role.serve(self.host, self._server)
        self._server.add(
            common_pb2_grpc.add_CacheEventsServicer_to_server,
            CacheEventsServicer(self.host.events),
            "mooncake.v1.CacheEvents",
        )
        port = await self._server.start(config.node.host, config.node.port)
        self.control_address = join_address(config.node.reached_at, port)
        info = cluster_pb2.NodeInfo(
            node_id=self.node_id,
            role=Role.PREFILL,
            incarnation=self.host.incarnation,
            control_address=self.control_address,
            kv_fingerprint=self.host.fingerprint,
            block_tokens=config.block.tokens,
            max_sequences=config.prefill.max_sequences,
            device=self.host.device,
        )
        self._membership = Membership(config, info, self._report)
        await self._membership.start()

    async def wait_fatal(self) -> MooncakeError:
        """Return the error once another process has taken this node's place, or the engine is broken."""
        return await first_end(self._membership.wait_replaced(), self.host.wait_broken())

    async def stop(self) -> None:
        """What it was given ends first, within ``node.drain_s``."""
        await self._membership.drain(lambda: not self._role.is_answering, self.config.node.drain_s)
        await self._membership.stop()
        self.host.events.end()
        await self._server.stop()
        await self._role.drain()
        await self.host.stop()
        self._role.stop()
        self._transfer.close()
        await self._channels.close()

    async def drained(self) -> None:
        """Return once nothing of ended requests is held any more."""
        await self._role.drain()

    @property
    def streamer(self) -> LayerStreamer:
        return self._role.hook

    def _report(self) -> cluster_pb2.HeartbeatRequest:
        report = cluster_pb2.HeartbeatRequest(load=self.host.load(), samples=self.host.samples.take())
        add_transports(report, self._transfer)
        return report
