"""Promises in C++: the same answers as ``promises.Promises``, in a fraction of the time. Built at first use; without a
compiler the Python ones serve, and say so once.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from ctypes import c_int64, c_uint32, c_void_p, py_object
from pathlib import Path

from conductor.fleet import Ticket
from conductor.native import Signatures, load_with_keys
from conductor.promises import Promises, stride_blocks
from conductor.view import Floats, View

SOURCE = Path(__file__).with_name("promises.cpp")
_SIGNATURES: Signatures = {
    "new_promises": (c_void_p, (c_int64,)),
    "delete_promises": (None, (c_void_p,)),
    "give": (c_int64, (c_void_p, py_object, c_int64)),
    "keep": (None, (c_void_p, c_int64)),
    "deepest": (c_int64, (c_void_p, py_object, c_int64, c_void_p)),
}


def new_promises(block_tokens: int, native: bool = True) -> Promises | NativePromises:
    """The fastest that this machine can have."""
    library = _load() if native else None
    return Promises(block_tokens) if library is None else NativePromises(library, block_tokens)


@functools.cache
def _load() -> ctypes.PyDLL | None:
    return load_with_keys("promises", SOURCE, _SIGNATURES, "keeping promises")


class NativePromises:
    """As ``Promises``."""

    def __init__(self, library: ctypes.PyDLL, block_tokens: int) -> None:
        self._give, self._keep, self._deepest = library.give, library.keep, library.deepest
        self._all: int = library.new_promises(stride_blocks(block_tokens))
        self._numbers: dict[Ticket, int] = {}
        self._node_ids: list[str] = [""]  # by number, which are given out again
        self._resize(64)
        weakref.finalize(self, library.delete_promises, self._all)

    def __len__(self) -> int:
        return len(self._numbers)

    def give(self, ticket: Ticket, keys: Sequence[bytes], held: int) -> None:
        number: int = self._give(self._all, keys, held)
        self._numbers[ticket] = number
        if number < len(self._node_ids):
            self._node_ids[number] = ticket.prefill_id
            return
        self._node_ids.append(ticket.prefill_id)
        if len(self._node_ids) > self._room:
            self._resize(2 * self._room)

    def kept(self, ticket: Ticket) -> None:
        number = self._numbers.pop(ticket, 0)
        if number:
            self._keep(self._all, number)

    def count(self, keys: Sequence[bytes], view: View, runs: Floats, longest: int) -> None:
        if not self._numbers:
            return
        depth = self._deepest(self._all, keys, longest, self._found_at)
        if depth:
            for number in self._found[1 : 1 + self._found[0]]:
                if (at := view.prefill_at.get(self._node_ids[number])) is not None:
                    runs[view.prefill.slots.item(at)] = depth

    def _resize(self, room: int) -> None:
        """For as many who wait with one mark: a count, and a number each."""
        self._room = room
        self._found = (c_uint32 * (1 + room))()
        self._found_at = ctypes.addressof(self._found)
