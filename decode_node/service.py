"""The gRPC service of a decode node: Generate for the conductor, hand-offs for prefill nodes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from decode_node.handoff import Handoff, HandoffState
from decode_node.outputs import Outputs, least_gap_s
from decode_node.receiver import Receiver
from decode_node.writeback_hook import WriteBackHook
from kvstore.transfer.owner.server import SegmentServer
from mooncake.engine.contract import StepOutput
from mooncake.engine.hosting.host import EngineHost
from mooncake.engine.sequence import Sequence
from mooncake.errors import DeadlineExceeded, MooncakeError
from mooncake.outbox import Outboxes, diverted
from mooncake.rpc import decode_pb2 as pb
from mooncake.rpc import decode_pb2_grpc
from mooncake.rpc.convert import (
    sampled_from_wire,
    sampled_to_wire,
    sampling_from_wire,
    segment_to_wire,
    tokens_from_wire,
)
from mooncake.rpc.server import CleanUps, check_arrived, remaining_s


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(
        self,
        host: EngineHost,
        receiver: Receiver,
        writeback_hook: WriteBackHook,
        segment_server: SegmentServer,
        outboxes: Outboxes,
    ) -> None:
        self._host = host
        self._receiver = receiver
        self._writeback_hook = writeback_hook
        self._segment_server = segment_server
        self._outboxes = outboxes
        self.num_running = 0
        self._num_streaming = 0  # of these, requests that generate
        self._clean_ups = CleanUps()
        self._request_timeout_s = host.config.conductor.request_timeout_s

    async def Generate(self, request: pb.DecodeRequest, context: Any) -> AsyncIterator[pb.DecodeResponse]:  # noqa: N802
        check_arrived(request.handoff_id)
        deadline = time.monotonic() + remaining_s(context, self._request_timeout_s)
        outbox = await self._outboxes.of(request.output_stream)
        outputs = Outputs()
        sequence = await self._sequence(request)
        handoff = Handoff(request.handoff_id, request.epoch)
        expected_s = request.expected_ms / 1e3
        self._receiver.announce(handoff, sequence, outputs.put, expected_s)  # from here on there are things to clean up
        self._writeback_hook.watch(sequence, [pool.control_address for pool in request.pools])
        self.num_running += 1
        try:
            said = self._stream(sequence, outputs, deadline)
            async for response in diverted(outbox, request.handoff_id, said, context):
                yield response
        finally:
            self.num_running -= 1
            self._clean_ups.start(self._end(handoff, time.monotonic() >= deadline))

    async def OpenHandoff(self, request: pb.OpenHandoffRequest, context: Any) -> pb.OpenHandoffResponse:  # noqa: N802
        check_arrived(request.handoff_id)
        # We do not judge how long a prompt may take: if the conductor stops waiting, it ends ``Generate``.
        wait_s = remaining_s(context, self._request_timeout_s)
        handoff = await self._receiver.open(request.handoff_id, request.epoch, request.writer_id, wait_s)
        return pb.OpenHandoffResponse(
            segment=segment_to_wire(self._segment_server.address),
            first_block=handoff.first_block,
            block_ids=handoff.block_ids,
        )

    async def CommitHandoff(self, request: pb.CommitHandoffRequest, context: Any) -> pb.CommitHandoffResponse:  # noqa: N802
        check_arrived(request.handoff_id)
        tokens = [sampled_from_wire(token) for token in request.first_tokens]
        num_exact = request.exact_tokens if request.HasField("exact_tokens") else None
        await self._receiver.commit(request.handoff_id, request.epoch, tokens, request.digest, num_exact)
        return pb.CommitHandoffResponse()

    async def CloseHandoff(self, request: pb.CloseHandoffRequest, context: Any) -> pb.CloseHandoffResponse:  # noqa: N802
        check_arrived(request.handoff_id)  # otherwise its blocks would wait for the end of the writer's connections
        await self._receiver.close(request.handoff_id, request.epoch, request.reason)
        return pb.CloseHandoffResponse()

    async def EndChoice(self, request: pb.EndChoiceRequest, context: Any) -> pb.EndChoiceResponse:  # noqa: N802
        call = self._host.thread.call(lambda engine: engine.end_choice(request.handoff_id, request.choice))
        await asyncio.wrap_future(call)
        return pb.EndChoiceResponse()

    async def drain(self) -> None:
        """Wait for the clean-up of finished calls."""
        await self._clean_ups.drain()

    async def _sequence(self, request: pb.DecodeRequest) -> Sequence:
        """The sequence, with the hand-off's id, so that a retry here does not collide with an earlier attempt."""
        sampling = sampling_from_wire(request.sampling)
        await self._host.prepare(sampling)
        return self._host.sequence(
            request.handoff_id,
            tokens_from_wire(request.tokens),
            request.num_prompt_tokens,
            sampling,
            self._host.chain(request.cache_salt, request.adapter, request.adapter_start),
            priority=request.priority,
            adapter=request.adapter,
        )

    async def _stream(
        self, sequence: Sequence, outputs: Outputs, deadline: float
    ) -> AsyncGenerator[pb.DecodeResponse, None]:
        num_open = sequence.sampling.num_answers
        ready = await self._take(outputs, deadline)
        started_s = time.monotonic()
        self._num_streaming += 1
        try:
            while True:
                for response in _responses(ready):
                    if response.finish_reason:
                        num_open -= 1
                        response.decode_ms = (time.monotonic() - started_s) * 1e3
                        response.preemptions = sequence.num_preemptions
                    yield response
                if not num_open:
                    return
                ready = await self._take(outputs, deadline)
        finally:
            self._num_streaming -= 1

    async def _take(self, outputs: Outputs, deadline: float) -> list[StepOutput | MooncakeError]:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await outputs.take(least_gap_s(self._num_streaming))
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while decoding") from None

    async def _end(self, handoff: Handoff, is_late: bool) -> None:
        """Whatever ended Generate, nothing of the request may remain."""
        self._writeback_hook.forget(handoff.handoff_id)
        await self._receiver.cancel(handoff, is_late)
        if handoff.state is HandoffState.COMMITTED:  # otherwise the receiver frees its blocks
            with contextlib.suppress(MooncakeError):
                await asyncio.wrap_future(self._host.thread.drop(handoff.handoff_id))


def _responses(outputs: list[StepOutput | MooncakeError]) -> Iterator[pb.DecodeResponse]:
    """One message for each answer with something new. Raises the first error, after the outputs before it."""
    by_choice: dict[int, pb.DecodeResponse] = {}
    failure: MooncakeError | None = None
    for output in outputs:
        if isinstance(output, MooncakeError):
            failure = output
            break
        response = by_choice.setdefault(output.choice, pb.DecodeResponse(choice=output.choice))
        response.tokens.append(sampled_to_wire(output.token))
        response.finish_reason = output.finish_reason or ""
    yield from by_choice.values()
    if failure is not None:
        raise failure
