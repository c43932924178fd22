"""The decode node: its paged cache is a registered segment that prefill nodes write straight into."""

from __future__ import annotations

import asyncio
import logging
import os

import numpy as np

from decode_node.generated import GeneratedBlocks
from decode_node.receiver import Receiver
from decode_node.service import DecodeServicer
from decode_node.writeback import WriteBack
from kvstore.client import StoreClient
from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.server import SegmentServer
from mooncake.checkpoint import open_checkpoint
from mooncake.config import Config, transfer_secret
from mooncake.engine.host import EngineHost, plan_cache
from mooncake.events import CacheEventsServicer
from mooncake.membership import Membership
from mooncake.rpc import cluster_pb2, common_pb2_grpc, decode_pb2_grpc
from mooncake.rpc.convert import segment_to_wire
from mooncake.rpc.server import Channels, RpcServer
from mooncake.types import Role

log = logging.getLogger(__name__)


class DecodeNode:
    """``await start()``, then serve until ``await stop()``. Raises ConfigError or ModelError from ``start``."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.node_id = config.node.id or f"decode-{os.getpid()}"
        self.control_address = ""

    async def start(self) -> None:
        config, transfer = self.config, self.config.transfer
        checkpoint = open_checkpoint(config.model.path)
        plan = plan_cache(config, config.decode, checkpoint)
        self._segment = Segment.create(self.node_id, plan.layout.block_bytes, plan.num_blocks)
        memory = np.frombuffer(self._segment.buffer, np.uint8).reshape(plan.num_blocks, plan.layout.block_bytes)
        secret = transfer_secret(config)
        self._transfer = TransferEngine(
            self.node_id, transfer.transports, transfer.streams, transfer.max_mb_per_s, secret
        )
        self._channels = Channels()
        self._stores: dict[str, StoreClient] = {}
        self._writeback = WriteBack(self._store, memory, plan.layout)
        self._generated = GeneratedBlocks(self._writeback, config.block.tokens)
        self.host = EngineHost(config, config.decode, checkpoint, plan)
        await self.host.start(self._generated, self._segment.buffer)
        self._generated.thread = self.host.thread
        self._loop = asyncio.get_running_loop()
        self._segment_server = SegmentServer(
            self._segment,
            self.node_id,
            transfer.transports,
            config.node.host,
            on_peer_gone=self._on_peer_gone,
            secret=secret,
        )
        self._receiver = Receiver(
            self.host.thread, self._segment_server, memory, plan.layout, transfer.handoff_timeout_s
        )
        self._segment_server.start()
        self._writeback.start()
        address = self._segment_server.address
        self._servicer = DecodeServicer(self.host, self._receiver, self._generated, address)
        self._server = RpcServer()
        self._server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self._servicer, "mooncake.v1.Decode")
        self._server.add(
            common_pb2_grpc.add_CacheEventsServicer_to_server,
            CacheEventsServicer(self.host.events),
            "mooncake.v1.CacheEvents",
        )
        port = await self._server.start(config.node.host, config.node.port)
        self.control_address = f"{config.node.host}:{port}"
        info = cluster_pb2.NodeInfo(
            node_id=self.node_id,
            role=Role.DECODE,
            incarnation=self.host.incarnation,
            control_address=self.control_address,
            segment=segment_to_wire(address),
            kv_fingerprint=self.host.fingerprint,
            block_tokens=config.block.tokens,
            max_sequences=config.decode.max_sequences,
        )
        self._membership = Membership(config, info, self._report)
        await self._membership.start()

    async def stop(self) -> None:
        await self._membership.stop()
        await self._server.stop()
        await self._servicer.drain()
        await self._writeback.stop()
        await self.host.stop()
        self._segment_server.stop()
        self._transfer.close()
        await self._channels.close()

    def _on_peer_gone(self, writer_id: str) -> None:
        """On a thread of the segment server."""
        self._loop.call_soon_threadsafe(self._receiver.peer_gone, writer_id)

    def _store(self, address: str) -> StoreClient:
        if address not in self._stores:
            self._stores[address] = StoreClient(address, self._transfer, self._channels)
        return self._stores[address]

    def _report(self) -> cluster_pb2.HeartbeatRequest:
        load = self.host.load()
        load.counters["handoffs_taken"] = self._receiver.committed
        load.counters["handoffs_open"] = self._receiver.num_open
        load.counters["blocks_quarantined"] = self._receiver.num_quarantined_blocks
        load.counters["checksum_mismatches"] = self._receiver.checksum_mismatches
        load.counters["blocks_written_back"] = self._writeback.stored
        load.counters["blocks_not_written_back"] = self._writeback.skipped
        report = cluster_pb2.HeartbeatRequest(load=load, samples=self.host.samples.take())
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
