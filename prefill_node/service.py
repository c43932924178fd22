"""The gRPC face of a prefill node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from mooncake.rpc import prefill_pb2 as pb
from mooncake.rpc import prefill_pb2_grpc
from mooncake.rpc.server import remaining_s
from prefill_node.job import PrefillJob
from prefill_node.workshop import Workshop


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, shop: Workshop) -> None:
        self._shop = shop
        self.num_running = 0
        self._clean_ups: set[asyncio.Task[None]] = set()

    async def Run(self, request: pb.PrefillRequest, context: Any) -> AsyncIterator[pb.PrefillResponse]:  # noqa: N802
        timeout_s = self._shop.host.config.conductor.request_timeout_s
        job = PrefillJob(self._shop, request, time.monotonic() + remaining_s(context, timeout_s))
        self.num_running += 1
        try:
            async for response in job.responses():
                yield response
        finally:
            self.num_running -= 1
            # Outside of the call, which may be cancelled at any await.
            task = asyncio.ensure_future(job.clean_up())
            self._clean_ups.add(task)
            task.add_done_callback(self._clean_ups.discard)

    async def drain(self) -> None:
        """Wait for what ended calls left to clean up."""
        while self._clean_ups:
            await asyncio.wait(self._clean_ups)
