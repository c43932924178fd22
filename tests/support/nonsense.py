"""What a decode node that is broken, or of another version, may say."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from enum import StrEnum
from typing import Any

import grpc

from mooncake.rpc import common_pb2, decode_pb2, outputs_pb2, outputs_pb2_grpc

NO_MESSAGE = b"\xff" * 8


class Nonsense(StrEnum):
    REPEATS = "repeats"  # for ever
    VOCABULARY = "vocabulary"  # tokens that the model does not have
    CHOICE = "choice"  # of an answer that nobody asked for
    REASON = "reason"  # one that does not exist, for which the answer ends
    GARBAGE = "garbage"  # bytes that are no message


def nonsense(kind: Nonsense | None, due: int, vocab_size: int) -> Iterator[decode_pb2.DecodeResponse]:
    """What comes in place of the token ``due``; nothing without a kind."""
    right = common_pb2.SampledToken(index=due, token_id=7)
    match kind:
        case Nonsense.REPEATS:
            before = common_pb2.SampledToken(index=due - 1, token_id=7)
            yield from itertools.repeat(decode_pb2.DecodeResponse(tokens=[before]))
        case Nonsense.VOCABULARY:
            yield decode_pb2.DecodeResponse(tokens=[common_pb2.SampledToken(index=due, token_id=vocab_size)])
        case Nonsense.CHOICE:
            yield decode_pb2.DecodeResponse(tokens=[right], choice=1 << 31)
        case Nonsense.REASON:
            yield decode_pb2.DecodeResponse(finish_reason="bored")
        case Nonsense.GARBAGE:
            yield decode_pb2.DecodeResponse(finish_reason=Nonsense.GARBAGE)


def add_outputs_servicer(servicer: outputs_pb2_grpc.OutputsServicer, server: grpc.aio.Server) -> None:
    """As generated, but for ``Nonsense.GARBAGE``."""
    collect = grpc.stream_stream_rpc_method_handler(
        servicer.Collect,
        request_deserializer=outputs_pb2.CollectRequest.FromString,
        response_serializer=_bytes,
    )
    handlers = grpc.method_handlers_generic_handler("mooncake.v1.Outputs", {"Collect": collect})
    server.add_generic_rpc_handlers((handlers,))


def _bytes(batch: outputs_pb2.OutputBatch) -> bytes:
    is_garbage = any(output.decode.finish_reason == Nonsense.GARBAGE for output in batch.outputs)
    return NO_MESSAGE if is_garbage else batch.SerializeToString()


class Garbler(grpc.GenericRpcHandler):
    """Answers every call with bytes that are no message, and counts the calls by method."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._server = grpc.aio.server(handlers=(self,))

    async def start(self) -> int:
        """Returns its port."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return int(port)

    async def stop(self) -> None:
        await self._server.stop(0)

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[bytes, bytes]:
        method = handler_call_details.method.rpartition("/")[2]

        async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            self.calls[method] += 1
            yield NO_MESSAGE

        return grpc.stream_stream_rpc_method_handler(answer)  # the wire knows no other kind
