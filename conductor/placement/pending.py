"""Prefixes of prompts in prefill: what a prefill node will have cached once they are computed, before it reports that.

Pure soft state beside the prefix index, from a prompt's booking to its first token. Only some blocks of a prompt are
indexed, its *markers*: every ``MARKER_TOKENS`` and the last one, as far as the node does not hold them yet. A block's
key names all blocks before it, so the deepest marker shared with a new prompt is found by bisection.
``pending.cpp`` is the same in C++; this is the reference, and serves where that cannot be built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from conductor.arrays import Floats
from conductor.placement.bookings import Booking
from conductor.placement.view import View

MARKER_TOKENS = 1024  # distance between two markers


def stride_blocks(block_tokens: int) -> int:
    """Distance between two markers in blocks."""
    return max(1, MARKER_TOKENS // block_tokens)


class _Pending(NamedTuple):
    """One prompt in prefill."""

    markers: list[bytes]
    end: int  # its length in blocks if that is no multiple of the stride; else 0


class PendingPrefixes:
    """One owner. A prompt counts from ``add`` to ``remove``, which may be called more than once."""

    def __init__(self, block_tokens: int) -> None:
        self._stride = stride_blocks(block_tokens)
        self._nodes: dict[bytes, tuple[str, ...]] = {}  # by marker: the node of each pending prompt that has it
        self._pending: dict[Booking, _Pending] = {}
        self._ends: dict[int, int] = {}  # number of pending prompts by ``_Pending.end``

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, booking: Booking, keys: Sequence[bytes], held: int) -> None:
        """The booking's prefill node holds ``held`` leading blocks of ``keys`` and will hold all of them."""
        stride = self._stride
        markers = list(keys[(held // stride + 1) * stride - 1 :: stride])
        end = len(keys) if len(keys) > held and len(keys) % stride else 0
        if end:
            markers.append(keys[-1])
            self._ends[end] = self._ends.get(end, 0) + 1
        nodes, here = self._nodes, (booking.prefill_id,)
        for marker in markers:
            others = nodes.setdefault(marker, here)
            if others is not here:
                nodes[marker] = others + here
        self._pending[booking] = _Pending(markers, end)

    def remove(self, booking: Booking) -> None:
        """The prompt is computed, or was cancelled."""
        pending = self._pending.pop(booking, None)
        if pending is None:
            return
        if pending.end:
            self._ends[pending.end] -= 1
            if not self._ends[pending.end]:
                del self._ends[pending.end]
        for marker in pending.markers:
            nodes = self._nodes[marker]
            if len(nodes) == 1:
                del self._nodes[marker]
            else:
                at = nodes.index(booking.prefill_id)
                self._nodes[marker] = nodes[:at] + nodes[at + 1 :]

    def extend_runs(self, keys: Sequence[bytes], view: View, runs: Floats, longest: int) -> None:
        """Raise the runs of prefill nodes that will hold more of ``keys`` than the ``longest`` run in any cache."""
        if not self._nodes:
            return
        depth = self._deepest(keys, longest)
        if depth:
            for node_id in self._nodes[keys[depth - 1]]:
                if (at := view.prefill_at.get(node_id)) is not None:
                    runs[view.prefill.slots.item(at)] = depth

    def _deepest(self, keys: Sequence[bytes], held: int) -> int:
        """Leading blocks of ``keys`` up to the deepest marker beyond ``held`` blocks; 0: there is none."""
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
            if end in ends and keys[end - 1] in nodes:  # a pending prompt ends between two strides
                return end
        return low * stride if low > base else 0
