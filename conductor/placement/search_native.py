"""The default policy's search in C++: what ``policies.milliseconds``, ``predict.explain`` and ``scheduler.describe``
compute together, in a few microseconds. Built at first use; without a compiler the Python versions serve, with one
warning."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from conductor.native import load_or_warn
from conductor.placement.predict import Breakdown
from conductor.placement.view import PlacementQuery, Shape, View
from conductor.registry import NodeInfo

SOURCE = Path(__file__).with_name("search.cpp")
_from_buffer: Callable[..., ctypes.c_char] = ctypes.c_char.from_buffer


@functools.cache
def load_search() -> ModuleType | None:
    """The library, or None if it cannot be built."""
    return load_or_warn("placement_search", SOURCE, "placing")


Found = tuple[NodeInfo, NodeInfo | None, tuple[NodeInfo, ...], int, int, int, int, bool, Breakdown, int | None, int]


class _View(ctypes.Structure):
    """Mirrors ``View`` in search.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_prefill", "num_decode", "num_stores")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "prefill_slots",
                "local_store",
                "costs",
                "known",
                "waiting_ms",
                "ready_at_ms",
                "prefill_tie_ms",
                "decode_slots",
                "context_ms",
                "next_step_ms",
                "free_blocks",
                "decode_tie_ms",
                "store_slots",
                "dram_slots",
                "ssd_ready_at_ms",
                "sending_flows",
                "idleness",
                "links",
                "fetch_link",
                "send_link",
                "least_send",
                "scratch",
            )
        ),
        *(
            (name, ctypes.c_double)
            for name in ("ssd_byte_ms", "block_tokens", "block_bytes", "num_layers", "chunk_tokens")
        ),
    )


class NativeSearch:
    """One owner. Keeps pointers into the arrays of the last view it saw; the fleet updates those in place."""

    def __init__(self, library: ModuleType, shape: Shape) -> None:
        self._place: Callable[..., tuple[int, int, int, int, int, int, int, bool, tuple[float, ...], int, int]]
        self._place = library.place
        self._shape = shape
        self._view: View | None = None
        self._native_view = _View()
        self._view_at = ctypes.addressof(self._native_view)
        self._scratch = np.zeros(0)

    def __call__(self, query: PlacementQuery) -> Found:
        """The fields of a ``Placement``. Each required side must have an allowed node."""
        view, facts = query.view, query.facts
        if view is not self._view:
            self._point_to(view)
        p, d, pool, local, fetched, new, blocks, is_known, parts, limit, ssd = self._place(
            self._view_at,
            query.runs,
            query.prefill_ok,
            query.decode_ok,
            facts.num_tokens,
            facts.expected_tokens,
            query.now_ms,
            facts.needs_decode,
            query.last_prefill,
            query.last_decode,
        )
        decode = view.decode.nodes[d] if d >= 0 else None
        pools = (view.stores.nodes[pool],) if pool >= 0 else ()
        breakdown, pool_tokens = Breakdown(*parts), limit if limit >= 0 else None
        prefill = view.prefill.nodes[p]
        return prefill, decode, pools, local, fetched, new, blocks, is_known, breakdown, pool_tokens, ssd

    def _point_to(self, view: View) -> None:
        prefill, decode, stores, shape = view.prefill, view.decode, view.stores, self._shape
        self._scratch = np.zeros(2 * len(prefill.nodes) + 2 * len(decode.nodes) + 1)
        pointers = {
            "prefill_slots": prefill.slots,
            "local_store": prefill.local_store,
            "costs": prefill.costs,
            "known": prefill.known,
            "waiting_ms": prefill.waiting_ms,
            "ready_at_ms": prefill.ready_at_ms,
            "prefill_tie_ms": prefill.tie_ms,
            "decode_slots": decode.slots,
            "context_ms": decode.context_ms,
            "next_step_ms": decode.next_step_ms,
            "free_blocks": decode.free_blocks,
            "decode_tie_ms": decode.tie_ms,
            "store_slots": stores.slots,
            "dram_slots": stores.dram_slots,
            "ssd_ready_at_ms": stores.ssd_ready_at_ms,
            "sending_flows": stores.sending_flows,
            "idleness": stores.idleness,
            "links": view.links,
            "fetch_link": view.fetch_link,
            "send_link": view.send_link,
            "least_send": view.least_send,
            "scratch": self._scratch,
        }
        for name, array in pointers.items():
            assert array.flags.c_contiguous
            setattr(self._native_view, name, _address(array))
        for name, value in {
            "num_prefill": len(prefill.nodes),
            "num_decode": len(decode.nodes),
            "num_stores": len(stores.nodes),
            "ssd_byte_ms": stores.ssd_byte_ms,
            "block_tokens": shape.block_tokens,
            "block_bytes": shape.block_bytes,
            "num_layers": shape.num_layers,
            "chunk_tokens": shape.chunk_tokens,
        }.items():
            setattr(self._native_view, name, value)
        self._view = view


def _address(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    """Pointer to an array, which its owner must keep alive."""
    return ctypes.addressof(_from_buffer(array)) if array.size else 0
