"""A node's blocks as bytes: a log of 16-byte records, and a cursor that says how much of it is valid.

A record is a truncated key and one byte: 0 for a block that left, else 1 + its tier. Reading a log twice, or its end
twice, gives the same table. Pure.
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
_TIERS = {1 + tier: tier for tier in Tier}
_RECORD = np.dtype([("key", f"V{RECORD_KEY_BYTES}"), ("state", "u1")])


@dataclass(frozen=True, slots=True)
class Cursor:
    """Which log of a node is current, how many bytes of it are valid, and where its events continue."""

    generation: int
    length: int
    incarnation: int
    next_sequence: int

    _FORM: ClassVar[struct.Struct] = struct.Struct("<4Q")
    NUM_BYTES: ClassVar[int] = _FORM.size

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
    """The table that a log adds up to. Records of an unknown tier count as blocks that left."""
    records = np.frombuffer(log, dtype=_RECORD, count=len(log) // RECORD_BYTES)
    keys, states = records["key"].tolist(), records["state"]
    if len(records) and states.min() == states.max() and states[0] in _TIERS:  # a whole table of one tier
        return {_TIERS[int(states[0])]: keys}
    table = dict(zip(keys, states.tolist(), strict=True))  # a block's last record counts
    return {tier: found for state, tier in _TIERS.items() if (found := [key for key in table if table[key] == state])}
