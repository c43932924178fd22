"""The default: nothing beyond the conductor's registry and index, which are in its memory already."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.directory import BlocksOf, BlockTable, KnownNode
from mooncake.types import BlockEvent


class MemoryDirectory:
    """Stores nothing. A conductor that restarts asks the nodes, which register again within two heartbeats."""

    async def load(self) -> list[KnownNode]:
        return []

    def start(self, blocks_of: BlocksOf) -> None: ...

    def joined(self, node_id: str, description: bytes, table: BlockTable | None = None) -> None: ...

    def left(self, node_id: str) -> None: ...

    def forget(self, node_id: str) -> None: ...

    def changed(
        self, node_id: str, incarnation: int, next_sequence: int, events: Sequence[BlockEvent], is_reset: bool
    ) -> None: ...

    @property
    def state(self) -> str:
        return "memory"

    async def close(self) -> None: ...
