"""Where a store lists its readable blocks for clients that look without asking: ``kvstore.board`` does, for those of
its host."""

from __future__ import annotations

from typing import Protocol

from kvstore.checksum import Checksums


class Listing(Protocol):
    """Called in step with every change of the index."""

    def show(self, slot: int, epoch: int, key: bytes, length: int, checksums: Checksums) -> None: ...

    def hide(self, slot: int) -> None:
        """From now on the slot's bytes may change."""
        ...

    def mark(self, key: bytes, is_marked: bool) -> None:
        """A writer has started or stopped writing this block."""
        ...


class Unlisted:
    """For a store that has no listing."""

    def show(self, slot: int, epoch: int, key: bytes, length: int, checksums: Checksums) -> None: ...

    def hide(self, slot: int) -> None: ...

    def mark(self, key: bytes, is_marked: bool) -> None: ...
