"""The prefill node: one engine and the prefill role."""

from __future__ import annotations

from mooncake.config import Config
from mooncake.engine_node import EngineNode, NodeRole
from mooncake.types import Role
from prefill_node.role import PrefillRole
from prefill_node.streamer import LayerStreamer


class PrefillNode(EngineNode):
    """``await start()``, then serve until ``await stop()``. ``start`` raises ConfigError or ModelError."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, Role.PREFILL, config.prefill)

    def _make_roles(self) -> list[NodeRole]:
        self._role = PrefillRole(self.host, self._transfer, self._channels, self._outboxes)
        return [self._role]

    async def drained(self) -> None:
        """Return once nothing of finished requests is held any more."""
        await self._role.drain()

    @property
    def streamer(self) -> LayerStreamer:
        return self._role.hook
