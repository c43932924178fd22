"""Slots for blocks that are only on the SSD and that a writer has recomputed: once sealed, they are in DRAM again.

Until then the index does not know what such a slot is for, so the block stays readable from the SSD, and a writer that
goes silent blocks nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.checksum import Checksums
from kvstore.index.store_index import StoreIndex
from kvstore.index.types import BlockName, Grant


class Recomputed:
    """One owner. Errors are the index's own."""

    def __init__(self, index: StoreIndex) -> None:
        self._index = index
        self._meant: dict[Grant, tuple[BlockName, str]] = {}  # and the block it is for

    def reserve(
        self, names: Sequence[BlockName], writer: str, length: int, ranges: int, tenant: str, now: float
    ) -> list[Grant]:
        """Slots for the first of ``names``, as far as there is room now."""
        index = self._index
        self._meant = {
            grant: meant for grant, meant in self._meant.items() if index.reservations.get(grant) is not None
        }
        grants = index.reserve_ahead(len(names), writer, length, now, ranges, behind=[name.parent for name in names])
        self._meant.update((grant, (name, tenant)) for grant, name in zip(grants, names, strict=False))
        return grants

    def __contains__(self, grant: Grant) -> bool:
        return grant in self._meant

    def seal(self, grant: Grant, checksums: Checksums, now: float) -> BlockName | None:
        """The block, now readable in DRAM, from this copy or an earlier one. None: the grant is over. Either way the
        writer is done with the slot."""
        name, tenant = self._meant.pop(grant)
        reserved = self._index.reservations.get(grant)
        if reserved is None:
            self._index.reservations.abort(grant)
            return None
        if not self._index.adopt(grant, name, reserved.length, checksums, now, tenant):
            self._index.reservations.abort(grant)
            return name if self._index.exists([name.key])[0] else None
        return name
