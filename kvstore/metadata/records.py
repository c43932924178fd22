"""A node's blocks as bytes: a log of 16-byte records, and the cursor that says how much of it counts.

A record is a cut key and one byte: 0 for a block that left, else 1 + its tier. Reading a log twice, or its end twice,
gives the same table. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mooncake.directory import RECORD_KEY_BYTES
from mooncake.types import BlockEvent, Tier

RECORD_BYTES = RECORD_KEY_BYTES + 1
_LEFT = b"\0"
_STORED = {tier: bytes((1 + tier,)) for tier in Tier}


@dataclass(frozen=True, slots=True)
class Cursor:
    """Which log of a node is the current one, how many bytes of it count, and where its events go on."""

    generation: int
    length: int
    incarnation: int
    next_sequence: int

    _FORM: ClassVar[struct.Struct] = struct.Struct("<4Q")

    def pack(self) -> bytes:
        return self._FORM.pack(self.generation, self.length, self.incarnation, self.next_sequence)

    @classmethod
    def unpack(cls, data: bytes) -> Cursor | None:
        return cls(*cls._FORM.unpack(data)) if len(data) == cls._FORM.size else None


def pack_events(events: Iterable[BlockEvent]) -> bytes:
    return b"".join(
        [event.key[:RECORD_KEY_BYTES] + (_STORED[Tier(event.tier)] if event.stored else _LEFT) for event in events]
    )


def pack_blocks(blocks: Iterable[tuple[bytes, Tier]]) -> bytes:
    return b"".join([key + _STORED[tier] for key, tier in blocks])


def unpack_log(log: bytes) -> dict[Tier, list[bytes]]:
    """The table that a log adds up to. Records of a tier that nobody knows count as blocks that left."""
    size = len(log) // RECORD_BYTES * RECORD_BYTES
    states = np.frombuffer(log, dtype=np.uint8, count=size)[RECORD_KEY_BYTES::RECORD_BYTES].tolist()
    keys = [log[start : start + RECORD_KEY_BYTES] for start in range(0, size, RECORD_BYTES)]
    table = dict(zip(keys, states, strict=True))  # the last record of a block counts
    kinds = set(states)
    if len(kinds) == 1 and kinds <= {1 + tier for tier in Tier}:
        return {Tier(kinds.pop() - 1): list(table)}
    return {tier: found for tier in Tier if (found := [key for key, state in table.items() if state == 1 + tier])}
