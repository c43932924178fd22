"""The streams in which nodes tell what they have to say of all requests, one from each node, and who hears it.

It knows neither what messages mean nor what requests are: whoever listens is named by its hand-off.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable
from typing import cast

import grpc

from conductor.dispatch.call_end import CallEnded, call_ended
from mooncake.errors import InternalError, NodeUnavailable, OutOfMemory
from mooncake.rpc import decode_pb2, outputs_pb2, prefill_pb2
from mooncake.rpc.outputs_pb2_grpc import OutputsStub
from mooncake.rpc.server import Channels

log = logging.getLogger(__name__)

Said = prefill_pb2.PrefillResponse | decode_pb2.DecodeResponse
# A message; why none follows; or None, gRPC's word for bytes that are no message
Hear = Callable[[Said | CallEnded | None], None]


class OutputStream:
    """From one node, until it ends: then everybody who listens is told why."""

    def __init__(self, channel: grpc.aio.Channel, peer: str) -> None:
        self.id = secrets.randbits(63) | 1
        self._peer = peer
        self._listeners: dict[str, Hear] = {}
        self._to_tell: asyncio.Queue[outputs_pb2.CollectRequest] = asyncio.Queue()  # of each listener, two at a time
        self._num_read = 0
        self._closed = False
        self._awaited: dict[asyncio.Future[None], int] = {}  # the batch that each of those who wait, waits for
        self._call = OutputsStub(channel).Collect(self._requests())
        self._task = asyncio.create_task(self._read(), name=f"outputs of {peer}")

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    def listen(self, handoff_id: str, hear: Hear) -> None:
        self._listeners[handoff_id] = hear

    def leave(self, handoff_id: str) -> None:
        self._listeners.pop(handoff_id, None)

    def hold(self, handoff_id: str) -> None:
        """Have the node send no more of it, though some may be on its way."""
        self._to_tell.put_nowait(outputs_pb2.CollectRequest(held=handoff_id))

    def release(self, handoff_id: str) -> None:
        self._to_tell.put_nowait(outputs_pb2.CollectRequest(released=handoff_id))

    async def read_up_to(self, number: int) -> None:
        """Return once this batch has been read, or the stream has ended."""
        if self._num_read >= number or self._task.done():
            return
        read = asyncio.get_running_loop().create_future()
        self._awaited[read] = number
        try:
            await read
        finally:
            del self._awaited[read]

    async def close(self) -> None:
        self._closed = True
        self._call.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _requests(self) -> AsyncIterator[outputs_pb2.CollectRequest]:
        yield outputs_pb2.CollectRequest(output_stream=self.id)
        while True:
            yield await self._to_tell.get()

    async def _read(self) -> None:
        try:
            end = await self._hear_all()
        finally:
            self._call.cancel()  # of one that lost something the rest would not be understood
            self._wake_up_to(math.inf)
        for hear in list(self._listeners.values()):
            hear(end)

    def _wake_up_to(self, number: float) -> None:
        """Those who wait for this batch, or an earlier one."""
        for read, awaited in self._awaited.items():
            if awaited <= number and not read.done():
                read.set_result(None)

    async def _hear_all(self) -> CallEnded | None:
        """Pass every message on. Returns why there is no other, as listeners are told it."""
        try:
            async for batch in self._call:
                if cast(object, batch) is None:
                    return None
                if not batch.number:  # gRPC has no memory for the bytes of a message, sends none of them, and goes on
                    what = f"{self._peer} sent an empty message: it may have run out of memory"
                    return CallEnded(OutOfMemory(what))
                for output in batch.outputs:
                    if hear := self._listeners.get(output.handoff_id):
                        hear(output.decode if output.HasField("decode") else output.prefill)
                self._num_read = batch.number
                self._wake_up_to(batch.number)
        except grpc.RpcError as error:
            return call_ended(error, self._peer)
        except asyncio.CancelledError:
            if self._closed:
                raise
            # grpc.aio reports this when the other side cancelled: its server is stopping
        except Exception:  # our bug, or gRPC's: otherwise requests would wait until their deadlines
            log.exception("unexpected error in the outputs of %s", self._peer)
            what = f"the outputs of {self._peer} failed; the conductor's log has the details"
            return CallEnded(InternalError(what))
        return CallEnded(NodeUnavailable(f"{self._peer} stopped"), is_lost=True)


class OutputStreams:
    """By the nodes' addresses: opened once and kept. One owner, one event loop."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._streams: dict[str, OutputStream] = {}

    def of(self, address: str, peer: str) -> OutputStream:
        """The stream from this node."""
        if address not in self._streams or self._streams[address].has_ended:
            self._streams = {at: stream for at, stream in self._streams.items() if not stream.has_ended}
            self._streams[address] = OutputStream(self._channels.get(address), peer)
        return self._streams[address]

    async def close(self) -> None:
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))
        self._streams.clear()
