"""A node's description of itself, to and from the wire: for nodes' messages, and for what a directory stores."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from conductor.registry import NodeInfo
from mooncake.errors import InvalidRequest
from mooncake.rpc import cluster_pb2 as pb
from mooncake.rpc.convert import segment_from_wire, segment_to_wire
from mooncake.types import Role


def info_from_wire(message: pb.NodeInfo) -> NodeInfo:
    """Raises InvalidRequest for an unknown role."""
    if message.role not in tuple(Role):
        raise InvalidRequest(f"no such role: {message.role!r}", "role")
    return NodeInfo(
        node_id=message.node_id,
        role=Role(message.role),
        incarnation=message.incarnation,
        control_address=message.control_address,
        segment=segment_from_wire(message.segment) if message.HasField("segment") else None,
        kv_fingerprint=message.kv_fingerprint,
        block_tokens=message.block_tokens,
        max_sequences=message.max_sequences,
        can_switch=message.can_switch,
        device=message.device,
        max_model_len=message.max_model_len,
        settings=tuple(sorted(message.settings.items())),
        kv_bytes=message.kv_bytes,
        kv_why=message.kv_why,
        chunk_tokens=message.chunk_tokens,
    )


def info_to_wire(info: NodeInfo) -> pb.NodeInfo:
    return pb.NodeInfo(
        node_id=info.node_id,
        role=info.role,
        incarnation=info.incarnation,
        control_address=info.control_address,
        segment=segment_to_wire(info.segment) if info.segment else None,
        kv_fingerprint=info.kv_fingerprint,
        block_tokens=info.block_tokens,
        max_sequences=info.max_sequences,
        can_switch=info.can_switch,
        device=info.device,
        max_model_len=info.max_model_len,
        settings=dict(info.settings),
        kv_bytes=info.kv_bytes,
        kv_why=info.kv_why,
        chunk_tokens=info.chunk_tokens,
    )


def describe(info: NodeInfo) -> bytes:
    """The bytes that a directory stores."""
    return info_to_wire(info).SerializeToString()


def info_from_bytes(description: bytes) -> NodeInfo:
    """Raises InvalidRequest when the bytes describe no node."""
    try:
        return info_from_wire(pb.NodeInfo.FromString(description))
    except DecodeError as error:
        raise InvalidRequest(f"not the description of a node: {error}") from None
