"""What conductors share, or keep across a restart: which nodes there are, and which blocks each of them holds.

Only hints that can be rebuilt: the nodes themselves are authoritative, and a directory that loses everything only costs
time. The conductor uses this protocol and knows no database; the implementations are in ``kvstore.metadata``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from mooncake.types import BlockEvent, Tier

RECORD_KEY_BYTES = 15
"""Leading bytes of a block's key that a directory keeps: as many as the conductor's index does."""


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of one cache after all its events before ``next_sequence``, by tier; keys are truncated."""

    incarnation: int = 0  # of the cache's event log
    next_sequence: int = 0
    blocks: dict[Tier, list[bytes]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.blocks.values()))


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node as a conductor described it, in bytes that only conductors read."""

    node_id: str
    description: bytes
    table: BlockTable


BlocksOf: TypeAlias = Callable[[str], Iterator[Iterable[tuple[bytes, Tier]]]]
"""A node's blocks in parts, between which its owner may go on changing them."""


class Directory(Protocol):
    """One owner, one event loop. Nothing here raises when the database is gone, slow or full, and only coroutines
    wait for it."""

    async def load(self) -> list[KnownNode]:
        """What was known before; nothing when the database does not answer in time."""

    def start(self, blocks_of: BlocksOf) -> None:
        """Start writing. ``blocks_of`` is called when a node's whole table must be written again."""

    def joined(self, node_id: str, description: bytes, table: BlockTable | None = None) -> None:
        """The node is part of the cluster. ``table``: its blocks are those that were loaded."""

    def left(self, node_id: str) -> None: ...

    def forget(self, node_id: str) -> None:
        """Its owner never heard of the node: leave it to other conductors, and to its time to expire."""

    def changed(
        self, node_id: str, incarnation: int, next_sequence: int, events: Sequence[BlockEvent], is_reset: bool
    ) -> None:
        """The owner has applied these events of a cache; with ``is_reset`` after forgetting what it held before."""

    @property
    def state(self) -> str:
        """One word or sentence for an operator."""

    async def close(self) -> None:
        """Write what is left, if possible at once, and end."""
