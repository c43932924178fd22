"""The gRPC service of a prefill node."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from mooncake.outbox import Outboxes, diverted
from mooncake.rpc import prefill_pb2 as pb
from mooncake.rpc import prefill_pb2_grpc
from mooncake.rpc.server import CleanUps, check_arrived, remaining_s
from prefill_node.job import PrefillJob
from prefill_node.resources import NodeResources


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, node: NodeResources, outboxes: Outboxes) -> None:
        self._node = node
        self._outboxes = outboxes
        self.num_running = 0
        self._clean_ups = CleanUps()

    async def Run(self, request: pb.PrefillRequest, context: Any) -> AsyncIterator[pb.PrefillResponse]:  # noqa: N802
        check_arrived(request.handoff_id or request.request_id)
        outbox = await self._outboxes.of(request.output_stream)
        timeout_s = self._node.host.config.conductor.request_timeout_s
        job = PrefillJob(self._node, request, time.monotonic() + remaining_s(context, timeout_s))
        self.num_running += 1
        try:
            async for response in diverted(outbox, request.handoff_id, job.responses(), context):
                yield response
        finally:
            self.num_running -= 1
            self._clean_ups.start(job.clean_up())

    async def drain(self) -> None:
        """Wait for the clean-up of finished calls."""
        await self._clean_ups.drain()
