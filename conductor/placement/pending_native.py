"""Pending prefixes in C++: the same answers as ``PendingPrefixes`` in a fraction of the time. Built at first use;
without a compiler the Python version serves, with one warning."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from conductor.arrays import Floats
from conductor.native import load_or_warn
from conductor.placement.bookings import Booking
from conductor.placement.pending import PendingPrefixes, stride_blocks
from conductor.placement.view import View

SOURCE = Path(__file__).with_name("pending.cpp")


def new_pending_prefixes(block_tokens: int, native: bool = True) -> PendingPrefixes | NativePendingPrefixes:
    """The fastest version available on this machine."""
    library = _load() if native else None
    return PendingPrefixes(block_tokens) if library is None else NativePendingPrefixes(library, block_tokens)


@functools.cache
def _load() -> ModuleType | None:
    return load_or_warn("pending_prefixes", SOURCE, "tracking pending prefixes")


class NativePendingPrefixes:
    """Like ``PendingPrefixes``. The C++ side knows prompts by numbers, which are reused."""

    def __init__(self, library: ModuleType, block_tokens: int) -> None:
        self._add, self._remove, self._deepest = library.add, library.remove, library.deepest
        self._prefixes: int = library.new_prefixes(stride_blocks(block_tokens))
        self._numbers: dict[Booking, int] = {}
        self._node_ids: list[str] = [""]  # by number; 0 is never given
        weakref.finalize(self, library.delete_prefixes, self._prefixes)

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, booking: Booking, keys: Sequence[bytes], held: int) -> None:
        number: int = self._add(self._prefixes, keys, held)
        self._numbers[booking] = number
        if number < len(self._node_ids):
            self._node_ids[number] = booking.prefill_id
        else:
            self._node_ids.append(booking.prefill_id)

    def remove(self, booking: Booking) -> None:
        number = self._numbers.pop(booking, 0)
        if number:
            self._remove(self._prefixes, number)

    def extend_runs(self, keys: Sequence[bytes], view: View, runs: Floats, longest: int) -> None:
        if not self._numbers:
            return
        depth, *numbers = self._deepest(self._prefixes, keys, longest)
        for number in numbers:
            if (at := view.prefill_at.get(self._node_ids[number])) is not None:
                runs[view.prefill.slots.item(at)] = depth
