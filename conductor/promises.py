"""Prompts waiting for a prefill node: what it will hold once they are computed, before its cache can report it.

Pure soft state beside the prefix index. What a prompt adds to its node's cache is marked every few blocks and at its
end, from booking to the first token. Beyond what some cache holds, a mark implies all blocks before it, so the deepest
mark that a new prompt shares is found by bisection. ``promises.cpp`` is the same in C++; this is the reference, and
serves where that cannot be built.
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.bookings import Booking
from conductor.view import Floats, View

MARK_TOKENS = 1024  # distance between two marks


def stride_blocks(block_tokens: int) -> int:
    """Distance between two marks in blocks."""
    return max(1, MARK_TOKENS // block_tokens)


class Promises:
    """One owner. A booking's marks stand until ``kept``, which may be called more than once."""

    def __init__(self, block_tokens: int) -> None:
        self._stride = stride_blocks(block_tokens)
        self._nodes: dict[bytes, tuple[str, ...]] = {}  # by mark: the node of each waiting prompt that has it
        self._marks: dict[Booking, tuple[list[bytes], int]] = {}  # and length in blocks if between two
        self._ends: dict[int, int] = {}  # number of prompts of each length in blocks

    def __len__(self) -> int:
        return len(self._marks)

    def give(self, booking: Booking, keys: Sequence[bytes], held: int) -> None:
        """The booking's node holds ``held`` leading blocks of ``keys`` and will hold all of them."""
        stride = self._stride
        marks = list(keys[(held // stride + 1) * stride - 1 :: stride])
        end = len(keys) if len(keys) > held and len(keys) % stride else 0
        if end:
            marks.append(keys[-1])
            self._ends[end] = self._ends.get(end, 0) + 1
        nodes, here = self._nodes, (booking.prefill_id,)
        for mark in marks:
            waiting = nodes.setdefault(mark, here)
            if waiting is not here:
                nodes[mark] = waiting + here
        self._marks[booking] = (marks, end)

    def kept(self, booking: Booking) -> None:
        """The prompt is computed, or never will be."""
        nodes = self._nodes
        marks, end = self._marks.pop(booking, ((), 0))
        if end:
            self._ends[end] -= 1
            if not self._ends[end]:
                del self._ends[end]
        for mark in marks:
            waiting = nodes[mark]
            if len(waiting) == 1:
                del nodes[mark]
            else:
                at = waiting.index(booking.prefill_id)
                nodes[mark] = waiting[:at] + waiting[at + 1 :]

    def count(self, keys: Sequence[bytes], view: View, runs: Floats, longest: int) -> None:
        """Raise the runs of prefill nodes that will hold more of ``keys`` than the ``longest`` run in a cache."""
        if not self._nodes:
            return
        depth = self._depth(keys, longest)
        if depth:
            for node_id in self._nodes[keys[depth - 1]]:
                if (at := view.prefill_at.get(node_id)) is not None:
                    runs[view.prefill.slots.item(at)] = depth

    def _depth(self, keys: Sequence[bytes], held: int) -> int:
        """How many leading blocks of ``keys`` the deepest mark beyond ``held`` blocks covers; 0: there is none."""
        nodes, stride = self._nodes, self._stride
        base = low = held // stride
        high = len(keys) // stride
        while low < high:
            middle = (low + high + 1) >> 1
            if keys[middle * stride - 1] in nodes:
                low = middle
            else:
                high = middle - 1
        ends = self._ends
        for end in range(min((low + 1) * stride - 1, len(keys)), max(low * stride, held), -1):
            if end in ends and keys[end - 1] in nodes:  # a shorter prompt ends there
                return end
        return low * stride if low > base else 0
