"""Waiting until the conductor knows every started node, and reporting which are missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc

from mooncake.api_keys import bearer
from mooncake.errors import NodeUnavailable
from mooncake.rpc import cluster_pb2 as pb
from mooncake.rpc.cluster_pb2_grpc import ClusterStub
from mooncake.rpc.errors import handshake_trouble
from mooncake.rpc.server import opener
from mooncake.tls import Tls

PATIENCE_S = 10.0  # a longer wait is explained
POLL_S = 0.05
CALL_S = 2.0
# a starting conductor refuses connections: retry soon
CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200))


class Readiness:
    """Waits until the conductor at ``address`` is ready and knows all of ``node_ids`` as live.

    ``dead``: incarnations that have ended, which the conductor may not have noticed yet.
    """

    def __init__(
        self,
        address: str,
        node_ids: Sequence[str],
        tell: Callable[[str], None],
        dead: frozenset[int] = frozenset(),
        api_key: str = "",
        tls: Tls | None = None,
    ) -> None:
        self.incarnations: dict[str, int] = {}  # of the live nodes, at the last check
        self._address = address
        self._open = opener(tls, CHANNEL_OPTIONS)
        self._node_ids = node_ids
        self._tell = tell
        self._dead = dead
        self._metadata = bearer(api_key)
        self._missing: list[str] = []  # at the last check

    async def wait(self, timeout_s: float) -> None:
        """Raises NodeUnavailable with the missing nodes after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                explaining = asyncio.create_task(self._explain(), name="explain a long wait")
                try:
                    await self._poll()
                finally:
                    explaining.cancel()
        except TimeoutError:
            missing = ", ".join(self._missing)
            raise NodeUnavailable(f"not ready after {timeout_s:g} s: still waiting for {missing}") from None

    async def _explain(self) -> None:
        await asyncio.sleep(PATIENCE_S)
        self._tell("still starting: the first start compiles kernels and converts weights; large weights load slowly")

    async def _poll(self) -> None:
        async with self._open(self._address) as channel:
            while missing := await self._who_is_missing(channel):
                if missing != self._missing:
                    self._missing = missing
                    self._tell(f"waiting for {', '.join(missing)}")
                await asyncio.sleep(POLL_S)

    async def _who_is_missing(self, channel: grpc.aio.Channel) -> list[str]:
        try:
            status: pb.StatusResponse = await ClusterStub(channel).Status(
                pb.StatusRequest(), timeout=CALL_S, metadata=self._metadata
            )
        except grpc.RpcError as failure:
            trouble = handshake_trouble(failure)
            return [f"conductor ({trouble})" if trouble else "conductor"]
        self.incarnations = {
            node.info.node_id: node.info.incarnation
            for node in status.nodes
            if node.state == "live" and node.info.incarnation not in self._dead
        }
        missing = [node_id for node_id in self._node_ids if node_id not in self.incarnations]
        return missing or ([] if status.ready else list(status.waiting_for) or ["conductor"])
