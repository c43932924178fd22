"""The sending side of a hand-off: a prompt's KV and first tokens go to the decode node that continues it."""

from __future__ import annotations

import asyncio
import logging

import grpc

from kvstore.checksum import digest
from mooncake.errors import InternalError, OutOfMemory, as_ours
from mooncake.page_groups import page_number
from mooncake.rpc import decode_pb2, decode_pb2_grpc
from mooncake.rpc import prefill_pb2 as pb
from mooncake.rpc.convert import sampled_to_wire, segment_from_wire
from mooncake.rpc.errors import error_from_rpc
from mooncake.rpc.server import check_arrived
from mooncake.types import SampledToken
from prefill_node.deadline import Deadline
from prefill_node.kv_writer import Destination, WriteStream
from prefill_node.resources import NodeResources

log = logging.getLogger(__name__)


class HandoffSender:
    """Call ``open`` when the prompt's first step begins, ``commit`` when its first tokens are known, ``close`` in any
    case."""

    def __init__(self, node: NodeResources, request: pb.PrefillRequest, num_tokens: int, deadline: Deadline) -> None:
        self._node = node
        self._request = request
        self._num_tokens = num_tokens
        self._deadline = deadline
        self._layout = node.host.cache_size.layout
        self._groups = node.host.cache_size.groups
        self._pages: list[int] = []  # page numbers that the decode node wants
        self._is_committed = False
        self._decode_node = decode_pb2_grpc.DecodeStub(node.channels.get(request.decode_address))
        self.stream = WriteStream(f"hand-off {request.handoff_id}", self._layout, deadline.at_s, node.handoff_writer)

    async def open(self) -> None:
        """Reserve blocks on the decode node and start sending what is computed. What goes wrong fails the stream: who
        waits for it would otherwise wait until the deadline."""
        try:
            await self._open()
        except grpc.aio.AioRpcError as error:
            self.stream.fail(error_from_rpc(error, "decode node"))
        except (OutOfMemory, InternalError) as error:
            self.stream.fail(error)
        except Exception as error:
            log.exception("%s cannot be opened", self.stream.name)
            self.stream.fail(as_ours(error, f"{self.stream.name} cannot be opened"))

    async def _open(self) -> None:
        request = decode_pb2.OpenHandoffRequest(
            handoff_id=self._request.handoff_id, epoch=self._request.epoch, writer_id=self._node.transfer.writer_id
        )
        response = await self._decode_node.OpenHandoff(request, timeout=self._deadline.left_s)
        check_arrived(response.segment.node_id)
        spans = self._groups.spans_behind(self._num_tokens, response.first_block, self._layout.block_tokens)
        self._pages = [page_number(group, index) for group, span in enumerate(spans) for index in span]
        if len(self._pages) != len(response.block_ids):
            raise InternalError(f"{self.stream.name}: the decode node groups layers differently")
        slots = {
            page: (block_id, self._request.epoch)
            for page, block_id in zip(self._pages, response.block_ids, strict=True)
        }
        self.stream.open(Destination(segment_from_wire(response.segment), slots))
        self.stream.writer.kick(self.stream)

    async def commit(self, first_tokens: list[SampledToken], num_exact: int | None) -> None:
        """Wait until every block has been written, then let the decode node continue. Raises MooncakeError."""
        await self._deadline.wait_for(asyncio.wrap_future(self.stream.done))
        checksums = self.stream.checksums
        missing = [page for page in self._pages if page not in checksums]
        if missing:
            raise InternalError(f"{self.stream.name}: blocks {missing[:4]} were never written")
        request = decode_pb2.CommitHandoffRequest(
            handoff_id=self._request.handoff_id,
            epoch=self._request.epoch,
            first_tokens=[sampled_to_wire(token) for token in first_tokens],
            digest=digest(checksums[page] for page in self._pages),
            exact_tokens=num_exact,
        )
        try:
            await self._decode_node.CommitHandoff(request, timeout=self._deadline.left_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, "decode node") from None
        self._is_committed = True

    async def close(self) -> None:
        """If not committed, tell the decode node that nothing more will be written. Otherwise the blocks would stay
        quarantined there until our connections end."""
        if self._is_committed:
            return
        request = decode_pb2.CloseHandoffRequest(
            handoff_id=self._request.handoff_id, epoch=self._request.epoch, reason="prefill ended without a commit"
        )
        await self._node.closings.tell(self._request.decode_address, request)
