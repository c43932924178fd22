"""The requests of an attempt to its two nodes, in wire format."""

from __future__ import annotations

from dataclasses import dataclass

from conductor.api import InferenceRequest
from conductor.placement.scheduler import Placement
from mooncake.rpc import decode_pb2, prefill_pb2
from mooncake.rpc.convert import sampling_to_wire, segment_to_wire, tokens_to_wire
from mooncake.types import TokenIds


@dataclass(frozen=True, slots=True)
class NodeRequests:
    prefill: prefill_pb2.PrefillRequest
    decode: decode_pb2.DecodeRequest | None


def node_requests(
    request: InferenceRequest, tokens: TokenIds, placement: Placement, epoch: int, output_stream: int = 0
) -> NodeRequests:
    """The requests to the two nodes, of which the one that generates names the ``output_stream``. Ids include the epoch
    to be unique: a client may reuse one, and a retry may meet remains of the attempt before it."""
    handoff_id = f"{epoch:016x}"
    request_id = f"{request.request_id}/{handoff_id}"
    data = tokens_to_wire(tokens)
    sampling = sampling_to_wire(request.sampling)
    pools = [
        prefill_pb2.PoolTarget(
            control_address=store.control_address,
            segment=segment_to_wire(store.segment) if store.segment else None,
        )
        for store in placement.pools
    ]
    prefill = prefill_pb2.PrefillRequest(
        request_id=request_id,
        handoff_id=handoff_id,
        epoch=epoch,
        tokens=data,
        num_prompt_tokens=len(request.tokens),
        sampling=sampling,
        cache_salt=request.salt,
        priority=request.priority,
        adapter=request.adapter,
        adapter_start=request.adapter_start,
        decode_address=placement.decode.control_address if placement.decode else "",
        pools=pools,
        pool_tokens=placement.pool_tokens,
        pooling=request.pooling or "",
        output_stream=output_stream if placement.decode is None else 0,
    )
    if placement.decode is None:
        return NodeRequests(prefill, None)
    decode = decode_pb2.DecodeRequest(
        request_id=request_id,
        handoff_id=handoff_id,
        epoch=epoch,
        tokens=data,
        num_prompt_tokens=len(request.tokens),
        sampling=sampling,
        cache_salt=request.salt,
        priority=request.priority,
        adapter=request.adapter,
        adapter_start=request.adapter_start,
        pools=pools,
        expected_ms=placement.predicted_ttft_ms if placement.is_known else 0.0,
        output_stream=output_stream,
    )
    return NodeRequests(prefill, decode)
