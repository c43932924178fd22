"""What a node says of all requests of one conductor, on its way into the one stream that the conductor collects.

Whoever answers a request puts its messages in; each batch takes along all that are there. A conductor holds back what
it has no room for, request by request, so that nobody waits for the client of another. It knows nothing of what the
messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

from mooncake.errors import InvalidRequest, NodeUnavailable
from mooncake.rpc import decode_pb2, outputs_pb2, outputs_pb2_grpc, prefill_pb2
from mooncake.rpc.server import LAST_BATCH_KEY

OPEN_S = 5.0  # for a stream to arrive after the first call that names it: they travel side by side
MAX_OUTPUTS = 1024  # of a batch, and waiting for the next
MAX_OF_ONE = 128  # of these, of one request
MAX_TOKENS = 8192  # likewise: with log-probabilities a token has some 400 bytes

Message = TypeVar("Message", decode_pb2.DecodeResponse, prefill_pb2.PrefillResponse)


class Outbox:
    """Of one stream. On its event loop only."""

    def __init__(self) -> None:
        self._waiting: list[outputs_pb2.Output] = []
        self._num_of: Counter[str] = Counter()  # of these, by hand-off
        self._num_tokens = 0  # of these
        self._held: set[str] = set()  # hand-offs
        self._number = 1  # of the next batch
        self._filled = asyncio.Event()
        self._has_room = asyncio.Event()
        self.has_ended = False

    async def put(self, output: outputs_pb2.Output) -> int:
        """Returns the number of the batch that has it, once there is room. Raises NodeUnavailable when the stream has
        ended."""
        while not self.has_ended and self._must_wait(output.handoff_id):
            self._has_room.clear()
            await self._has_room.wait()
        if self.has_ended:
            raise NodeUnavailable("the stream of outputs has ended")
        self._waiting.append(output)
        self._num_of[output.handoff_id] += 1
        self._num_tokens += len(output.decode.tokens) or 1
        self._filled.set()
        return self._number

    def _must_wait(self, handoff_id: str) -> bool:
        is_full = len(self._waiting) >= MAX_OUTPUTS or self._num_tokens >= MAX_TOKENS
        return is_full or self._num_of[handoff_id] >= MAX_OF_ONE or handoff_id in self._held

    async def take(self) -> outputs_pb2.OutputBatch | None:
        """All that is there, once there is something; None when the stream has ended."""
        await self._filled.wait()
        if self.has_ended:
            return None
        batch = outputs_pb2.OutputBatch(number=self._number, outputs=self._waiting)
        self._waiting, self._num_tokens = [], 0
        self._num_of.clear()
        self._number += 1
        self._filled.clear()
        self._has_room.set()
        return batch

    def hold(self, handoff_id: str) -> None:
        self._held.add(handoff_id)

    def release(self, handoff_id: str) -> None:
        """Of one that is not held, too: it has ended."""
        self._held.discard(handoff_id)
        self._has_room.set()

    def end(self) -> None:
        self.has_ended = True
        self._filled.set()
        self._has_room.set()


class Outboxes(outputs_pb2_grpc.OutputsServicer):
    """Those of all streams of a node, and the service that has them collected."""

    def __init__(self) -> None:
        self._open: dict[int, Outbox] = {}
        self._opened = asyncio.Event()
        self._has_ended = False

    async def Collect(  # noqa: N802
        self, requests: AsyncIterator[outputs_pb2.CollectRequest], context: Any
    ) -> AsyncIterator[outputs_pb2.OutputBatch]:
        stream = (await anext(requests, outputs_pb2.CollectRequest())).output_stream
        if not stream or stream in self._open:
            raise InvalidRequest("a stream of outputs needs a name that no other has", "output_stream")
        outbox = self._open[stream] = Outbox()
        self._opened.set()
        listening = asyncio.create_task(_obey(outbox, requests))
        try:
            while not self._has_ended and (batch := await outbox.take()) is not None:
                yield batch
        finally:
            outbox.end()
            del self._open[stream]
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def of(self, stream: int) -> Outbox | None:
        """The outbox that a request names; None for 0. Raises NodeUnavailable when its stream does not come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_S):
                while stream and stream not in self._open:
                    self._opened.clear()
                    await self._opened.wait()
        if stream and stream not in self._open:
            raise NodeUnavailable("the stream of outputs that the request names is not there")
        return self._open.get(stream)

    def end(self) -> None:
        """End all streams before the server stops: it would wait for them, and then cut them off."""
        self._has_ended = True
        for outbox in self._open.values():
            outbox.end()


async def diverted(
    outbox: Outbox | None, handoff_id: str, said: AsyncGenerator[Message, None], context: Any
) -> AsyncIterator[Message]:
    """What the call itself still has to send: all without an outbox, otherwise nothing but, when it ends, which batch
    was the last. Raises like ``said``, and NodeUnavailable when the stream ends before."""
    number = 0
    async with contextlib.aclosing(said):
        try:
            async for message in said:
                if outbox is None:
                    yield message
                else:
                    number = await outbox.put(_output(handoff_id, message))
        finally:
            if outbox is not None:
                context.set_trailing_metadata(((LAST_BATCH_KEY, str(number)),))


def _output(handoff_id: str, message: decode_pb2.DecodeResponse | prefill_pb2.PrefillResponse) -> outputs_pb2.Output:
    if isinstance(message, decode_pb2.DecodeResponse):
        return outputs_pb2.Output(handoff_id=handoff_id, decode=message)
    return outputs_pb2.Output(handoff_id=handoff_id, prefill=message)


async def _obey(outbox: Outbox, requests: AsyncIterator[outputs_pb2.CollectRequest]) -> None:
    async for request in requests:
        if request.held:
            outbox.hold(request.held)
        if request.released:
            outbox.release(request.released)
