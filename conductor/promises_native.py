"""Promises in C++: the same answers as ``promises.Promises`` in a fraction of the time. Built at first use; without
a compiler the Python version serves, with one warning."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from conductor.bookings import Booking
from conductor.native import load_or_warn
from conductor.promises import Promises, stride_blocks
from conductor.view import Floats, View

SOURCE = Path(__file__).with_name("promises.cpp")


def new_promises(block_tokens: int, native: bool = True) -> Promises | NativePromises:
    """The fastest version available on this machine."""
    library = _load() if native else None
    return Promises(block_tokens) if library is None else NativePromises(library, block_tokens)


@functools.cache
def _load() -> ModuleType | None:
    return load_or_warn("promises", SOURCE, "keeping promises")


class NativePromises:
    """Like ``Promises``."""

    def __init__(self, library: ModuleType, block_tokens: int) -> None:
        self._give, self._keep, self._deepest = library.give, library.keep, library.deepest
        self._all: int = library.new_promises(stride_blocks(block_tokens))
        self._numbers: dict[Booking, int] = {}
        self._node_ids: list[str] = [""]  # by number; numbers are reused
        weakref.finalize(self, library.delete_promises, self._all)

    def __len__(self) -> int:
        return len(self._numbers)

    def give(self, booking: Booking, keys: Sequence[bytes], held: int) -> None:
        number: int = self._give(self._all, keys, held)
        self._numbers[booking] = number
        if number < len(self._node_ids):
            self._node_ids[number] = booking.prefill_id
        else:
            self._node_ids.append(booking.prefill_id)

    def kept(self, booking: Booking) -> None:
        number = self._numbers.pop(booking, 0)
        if number:
            self._keep(self._all, number)

    def count(self, keys: Sequence[bytes], view: View, runs: Floats, longest: int) -> None:
        if not self._numbers:
            return
        depth, *numbers = self._deepest(self._all, keys, longest)
        for number in numbers:
            if (at := view.prefill_at.get(self._node_ids[number])) is not None:
                runs[view.prefill.slots.item(at)] = depth
