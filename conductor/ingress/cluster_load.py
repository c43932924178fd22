"""The load of a cluster as that of one engine, which is how vLLM's dashboards and gateways see it."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake.rpc.cluster_pb2 import StatusResponse
from mooncake.types import Role

_WITH_ENGINE = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Sequences, prompt tokens and blocks of all prefill and decode nodes, as these last reported them."""

    running: int
    waiting: int
    waiting_tokens: int
    blocks_total: int
    blocks_in_use: int
    hit_rate: float  # of prompt blocks, since the conductor started

    @classmethod
    def of(cls, status: StatusResponse) -> ClusterLoad:
        loads = [node.load for node in status.nodes if node.info.role in _WITH_ENGINE]
        return cls(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            waiting_tokens=sum(load.waiting_tokens for load in loads),
            blocks_total=sum(load.blocks_total for load in loads),
            blocks_in_use=sum(load.blocks_in_use for load in loads),
            hit_rate=status.block_hits / status.block_queries if status.block_queries else 0.0,
        )

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        return self.blocks_in_use / self.blocks_total if self.blocks_total else 0.0
