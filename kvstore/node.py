"""The store node: one host's DRAM segment, the store over it, and the services through which the cluster uses it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from kvstore.board.board import Board
from kvstore.board.door import BoardDoor
from kvstore.board.library import MAX_NOTES
from kvstore.eviction import POLICIES, EvictionPolicy, make_policy
from kvstore.fast_rpc import FastRpcServer
from kvstore.replicas import ReplicaServicer
from kvstore.segment import Segment
from kvstore.service import StoreServicer
from kvstore.ssd.record import PAGE, padded
from kvstore.ssd.tier import GROUP_BYTES, SsdTier
from kvstore.store import Store
from kvstore.tiers.decisions import TierRules
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.owner.server_connection import Put
from kvstore.transfer.sockets import bound_to
from kvstore.wire_puts import LOOK_S, WirePuts
from mooncake.addresses import join_address
from mooncake.config import Config, transfer_secret
from mooncake.errors import ConfigError, MooncakeError
from mooncake.events import CacheEventsServicer, EventLog
from mooncake.membership import Membership
from mooncake.prefault import prefault_in_background
from mooncake.rpc import cluster_pb2, common_pb2_grpc, replica_pb2_grpc, store_pb2_grpc
from mooncake.rpc.convert import segment_to_wire
from mooncake.rpc.server import RpcServer
from mooncake.types import Role, SegmentAddress
from mooncake.vital import vital

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.25
HEAR_SHARE = 0.1  # of one processor, for reading what readers note
GIVEN_AHEAD_SHARE, MANY_SLOTS = 1 / 16, 64  # slots that writers may hold in advance: of many, twice the share
GROUPS_IN_DRAM = 16  # at least, of those in which blocks go to the SSD: a hanging disk holds up to three
MIN_PADDED_BYTES = 16 * PAGE  # padding would waste too much of smaller blocks


class StoreNode:
    """``await start()``, then serve until ``await stop()``. ``start`` raises ConfigError.

    ``block_bytes`` is the size of a slot; ``settings`` are those of the blocks it is meant for, if they are of one
    model. With ``join_cluster=False`` the node serves on its own, without a conductor.
    """

    def __init__(
        self, config: Config, block_bytes: int, join_cluster: bool = True, settings: Mapping[str, str] | None = None
    ) -> None:
        self.config = config
        self.node_id = config.node.id or f"store-{os.getpid()}"
        self.control_address = ""
        self._block_bytes = block_bytes
        self._settings = settings or {}
        self._join_cluster = join_cluster
        self._puts: WirePuts | None = None  # if there is a board
        self._hears_data_plane = True
        self._membership: Membership | None = None
        self._cleanup = contextlib.AsyncExitStack()

    @property
    def store(self) -> Store:
        """The running store, for tests and embedders on the same event loop."""
        return self._store

    @property
    def segment(self) -> Segment:
        """The memory that it serves."""
        return self._segment

    @property
    def segment_address(self) -> SegmentAddress:
        return self._segment_server.address

    async def start(self) -> None:
        """Cleans up after itself when it fails half-way; ``stop`` may then be called or not."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        self._make_segment()
        board = self._make_board()
        events = EventLog(self._segment.incarnation)
        await self._start_store(board, events)
        await self._serve(board, events)
        for work, name in ((self._sweep(), "sweep"), (self._hear_readers(), "hear readers")):
            self._cleanup.push_async_callback(_end, vital(work, name))
        log.info("%s: %d blocks of %d bytes", self.node_id, self._segment.num_blocks, self._block_bytes)
        if self._join_cluster:
            await self._join()

    def _make_segment(self) -> None:
        """Raises ConfigError."""
        config = self.config
        if config.store.ssd_path and self._block_bytes >= MIN_PADDED_BYTES:
            self._block_bytes = padded(self._block_bytes)  # the disk then reads and writes slots in place
        num_blocks = int(config.store.dram_gb * 1e9) // self._block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"store.dram_gb = {config.store.dram_gb} holds no block: one has {self._block_bytes / 1e9:.3f} GB"
            )
        self._segment = Segment.create(self.node_id, self._block_bytes, num_blocks)
        self._cleanup.callback(self._segment.close)
        prefault_in_background(self._segment.array)

    async def _start_store(self, board: Board | None, events: EventLog) -> None:
        config, cleanup, num_blocks = self.config, self._cleanup, self._segment.num_blocks
        loop = asyncio.get_running_loop()
        ahead_slots = int(num_blocks * GIVEN_AHEAD_SHARE * (2 if num_blocks >= MANY_SLOTS else 1))
        if config.store.tenant_dram_gb:
            ahead_slots = 0  # quotas could not count them
        self._segment_server = SegmentServer(
            self._segment,
            self.node_id,
            config.transfer.transports,
            config.node.host,
            on_peer_gone=lambda peer: loop.call_soon_threadsafe(self._gone, peer),
            secret=transfer_secret(config),
            listing=board,
            advertise=config.node.advertise,
            on_put=(lambda put: loop.call_soon_threadsafe(self._came, put)) if ahead_slots else None,
        )
        cleanup.callback(self._stop_data_plane)
        self._store = Store(
            self._segment,
            self._segment_server,
            events,
            config.store.lease_s,
            config.store.reserve_timeout_s,
            policy=self._policy(num_blocks),
            ssd=await self._open_ssd(),
            rules=TierRules(config.store.write_through_sights, config.store.demote_sights),
            tenant_bytes=int(config.store.tenant_dram_gb * 1e9),
            board=board,
            ahead_slots=ahead_slots,
        )
        if board is not None:
            self._puts = WirePuts(self._store, self._segment_server, board.wake_fd)
            self._puts.start()
            cleanup.callback(self._puts.stop)
        cleanup.push_async_callback(self._store.close)
        self._segment_server.start()

    async def _serve(self, board: Board | None, events: EventLog) -> None:
        config, cleanup = self.config, self._cleanup
        server = RpcServer()
        board_path = self._open_door(board) if board is not None and "shm" in config.transfer.transports else ""
        fast_rpc_socket = cleanup.enter_context(bound_to(config.node.host))
        fast_rpc_port = int(fast_rpc_socket.getsockname()[1])
        servicer = StoreServicer(self._store, self._segment_server.address, board_path, fast_rpc_port)
        server.add(store_pb2_grpc.add_StoreServicer_to_server, servicer, "mooncake.v1.Store")
        server.add(
            common_pb2_grpc.add_CacheEventsServicer_to_server, CacheEventsServicer(events), "mooncake.v1.CacheEvents"
        )
        replicas = ReplicaServicer(self.node_id, config, self._segment, self._store)
        cleanup.push_async_callback(replicas.close)
        server.add(replica_pb2_grpc.add_ReplicaServicer_to_server, replicas, "mooncake.v1.Replica")
        port = await server.start(config.node.host, config.node.port)
        cleanup.push_async_callback(server.stop)
        cleanup.callback(events.end)
        fast_rpc = await FastRpcServer.start(fast_rpc_socket, servicer)
        cleanup.push_async_callback(fast_rpc.stop)
        self.control_address = join_address(config.node.reached_at, port)

    async def _join(self) -> None:
        info = cluster_pb2.NodeInfo(
            node_id=self.node_id,
            role=Role.STORE,
            incarnation=self._segment.incarnation,
            control_address=self.control_address,
            segment=segment_to_wire(self._segment_server.address),
            block_tokens=self.config.block.tokens,
            settings=self._settings,
        )
        self._membership = Membership(self.config, info, self._report)
        self._cleanup.push_async_callback(self._membership.stop)
        await self._membership.start()

    async def wait_fatal(self) -> MooncakeError:
        """Return the error once another process has taken this node's place in the cluster."""
        if self._membership is None:
            never: asyncio.Future[MooncakeError] = asyncio.get_running_loop().create_future()
            return await never
        return await self._membership.wait_replaced()

    async def stop(self) -> None:
        await self._cleanup.aclose()

    def _make_board(self) -> Board | None:
        """Where clients on this host, and the data plane's server for all others, find blocks by key."""
        board = Board.create(self._segment)
        if board is not None:
            self._cleanup.callback(board.close)
        return board

    def _open_door(self, board: Board) -> str:
        door = BoardDoor(board, self._store.ahead.open, self._store.near_writer_gone)
        self._cleanup.callback(door.close)
        try:
            door.open()
        except OSError as error:
            log.warning("%s: the board stays closed: %s", self.node_id, error)
        return door.path

    def _policy(self, capacity_blocks: int) -> EvictionPolicy:
        name = self.config.store.eviction
        if name not in POLICIES:
            raise ConfigError(f"store.eviction = {name!r}: known are {', '.join(POLICIES)}")
        return make_policy(name, capacity_blocks)

    async def _open_ssd(self) -> SsdTier | None:
        config = self.config.store
        if not config.ssd_path:
            return None
        capacity = int(config.ssd_gb * 1e9)
        return await SsdTier.open(
            Path(config.ssd_path),
            capacity,
            self._policy(max(1, capacity // self._block_bytes)),
            self._block_bytes,
            tenant_bytes=int(config.tenant_ssd_gb * 1e9),
            group_bytes=min(GROUP_BYTES, self._segment.num_blocks * self._block_bytes // GROUPS_IN_DRAM),
        )

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                self._store.sweep()
                if self._puts is not None:
                    self._puts.sweep()
            except Exception:
                log.exception("sweeping the store failed")  # a bug there must not stop the next sweep

    async def _hear_readers(self) -> None:
        """Readers can note only a limited number of reads before somebody looks."""
        store, pause_s = self._store, SWEEP_INTERVAL_S
        while True:
            before = store.num_heard
            await asyncio.sleep(pause_s)
            started_s = time.thread_time()
            try:
                store.hear_readers()
            except Exception:
                log.exception("hearing what has been read failed")
            pause_s = hear_again_s(pause_s, store.num_heard - before, time.thread_time() - started_s)

    def _stop_data_plane(self) -> None:
        """What its threads have said just before is heard later, when there is no store any more."""
        self._hears_data_plane = False
        self._segment_server.stop()

    def _came(self, put: Put) -> None:
        if self._puts is not None and self._hears_data_plane:
            self._puts.came(put)

    def _gone(self, peer: str) -> None:
        if self._hears_data_plane:
            self._store.writer_gone(peer)

    def _report(self) -> cluster_pb2.HeartbeatRequest:
        counts, traffic = self._store.counts, self._segment_server.stats()
        load = cluster_pb2.Load(
            blocks_total=self._segment.num_blocks,
            blocks_free=counts.free,
            blocks_cached=counts.sealed,
            blocks_in_use=counts.reserved + counts.quarantined,
            bytes_in=traffic.bytes_in,
            bytes_out=traffic.bytes_out,
            counters={
                **self._store.counters,
                "leases": counts.leases,
                "blocks_quarantined": counts.quarantined,
                "transfer_refused": traffic.refused,
                "protocol_violations": traffic.violations,
            },
        )
        return cluster_pb2.HeartbeatRequest(load=load)


def hear_again_s(pause_s: float, num_heard: int, took_s: float) -> float:
    """When to look at the readers' notes again, if ``num_heard`` notes came in ``pause_s`` and reading them took
    ``took_s``: before a reader can have filled half of its room, but not so often that the store does little else."""
    half_s = pause_s * (MAX_NOTES // 2) / max(num_heard, 1)
    return max(min(half_s, SWEEP_INTERVAL_S), LOOK_S, took_s / HEAR_SHARE)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
