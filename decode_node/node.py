"""The decode node: its paged cache is a registered segment that prefill nodes write into directly."""

from __future__ import annotations

from decode_node.receiver import Receiver
from decode_node.role import DecodeRole, open_segment
from mooncake.config import Config
from mooncake.engine.backends.backend import CacheSize
from mooncake.engine_node import EngineNode, NodeRole
from mooncake.model.pages import Mappable
from mooncake.types import Role


class DecodeNode(EngineNode):
    """``await start()``, then serve until ``await stop()``. ``start`` raises ConfigError or ModelError."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, Role.DECODE, config.decode)

    def _open_memory(self, size: CacheSize) -> Mappable:
        self._segment = open_segment(self.node_id, size)
        return self._segment

    def _make_roles(self) -> list[NodeRole]:
        self._role = DecodeRole(self.node_id, self.host, self._segment, self._transfer, self._channels, self._outboxes)
        return [self._role]

    @property
    def receiver(self) -> Receiver:
        return self._role.receiver
