"""What a node reports to the conductor about its transports: which one each peer is reached by, and its traffic."""

from __future__ import annotations

from kvstore.transfer.engine import TransferEngine
from mooncake.rpc import cluster_pb2

EVERY_PEER = "*"  # for a configured transport that this machine lacks


def add_transports(report: cluster_pb2.HeartbeatRequest, transfer: TransferEngine) -> None:
    for peer in transfer.stats():
        report.transports.add(
            peer=peer.node_id,
            transport=peer.transport,
            bytes=peer.nbytes,
            gb_per_s=peer.gb_per_s,
            failures=peer.failures,
            current=peer.is_current,
            reason=peer.reason,
        )
    for name, reason in transfer.unavailable().items():
        report.transports.add(peer=EVERY_PEER, transport=name, failures=1, reason=reason)
