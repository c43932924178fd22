"""The decode node: its paged cache is a registered segment that prefill nodes write into directly."""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.receiver import Receiver
from decode_node.role import DecodeRole
from mooncake.config import Config
from mooncake.engine.backend import CacheSize
from mooncake.engine.contract import StepHook
from mooncake.engine_node import EngineNode, NodeRole
from mooncake.model.pages import Mappable
from mooncake.rpc import cluster_pb2
from mooncake.rpc.convert import segment_to_wire
from mooncake.types import Role


class DecodeNode(EngineNode):
    """``await start()``, then serve until ``await stop()``. ``start`` raises ConfigError or ModelError."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, Role.DECODE, config.decode)

    def _make_roles(self, size: CacheSize) -> Sequence[NodeRole]:
        self._role = DecodeRole(self.node_id, self.config, size, self._transfer, self._channels)
        return (self._role,)

    @property
    def _hook(self) -> StepHook:
        return self._role.hook

    @property
    def _memory(self) -> Mappable:
        return self._role.memory

    def _info(self) -> cluster_pb2.NodeInfo:
        info = super()._info()
        info.segment.CopyFrom(segment_to_wire(self._role.address))
        return info

    @property
    def receiver(self) -> Receiver:
        return self._role.receiver
