"""The default policy's search in C++: the same answer as ``policies.milliseconds`` and ``predict.explain`` give, in a
few microseconds. Built at first use; without a compiler the Python search serves, and says so once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from conductor.predict import Breakdown, Prediction
from conductor.view import Choice, Question, Shape, View
from mooncake.native import BuildFailed, load_native

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("placing.cpp")
KEYS_HEADER = Path(__file__).with_name("keys.h")
# Python adds and multiplies in steps, too: without fused operations both round alike.
FLAGS = ("-ffp-contract=off",)
Signatures = dict[str, tuple[type | None, tuple[type, ...]]]  # of each function: its result and its arguments
_from_buffer: Callable[..., ctypes.c_char] = ctypes.c_char.from_buffer
_REQUEST = struct.Struct("=QQQdddqqq")
_RESULT = struct.Struct("=qqqqqqddddd")


@functools.cache
def load_search() -> ctypes.CDLL | None:
    """The library, or None where it cannot be built."""
    try:
        return load_native("placing", SOURCE, flags=FLAGS)
    except BuildFailed as error:
        log.warning("placing in Python, several times slower: %s", error)
        return None


def load_with_keys(name: str, source: Path, signatures: Signatures, otherwise: str) -> ctypes.PyDLL | None:
    """A library that reads keys out of their objects (``keys.h``), called with the interpreter's lock held. Where it
    cannot be built None, with a warning of what is done ``otherwise``."""
    try:
        found = load_native(name, source, headers=[KEYS_HEADER])
    except BuildFailed as error:
        log.warning("%s in Python, several times slower: %s", otherwise, error)
        return None
    library = ctypes.PyDLL(found._name, handle=found._handle)
    for function_name, (result, arguments) in signatures.items():
        function = library[function_name]
        function.restype, function.argtypes = result, arguments
        setattr(library, function_name, function)
    return library


class _View(ctypes.Structure):
    """``View`` of placing.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_prefill", "num_decode", "num_stores")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "prefill_slots",
                "home",
                "costs",
                "known",
                "tail_ms",
                "ready_at_ms",
                "prefill_tie_ms",
                "decode_slots",
                "context_ms",
                "next_step_ms",
                "free_blocks",
                "decode_tie_ms",
                "store_slots",
                "dram_slots",
                "sending_flows",
                "idleness",
                "fetch_latency",
                "fetch_byte",
                "send_latency",
                "send_byte",
                "least_send_latency",
                "least_send_byte",
            )
        ),
        *(
            (name, ctypes.c_double)
            for name in ("ssd_byte_ms", "block_tokens", "block_bytes", "num_layers", "chunk_tokens")
        ),
    )


class NativeSearch:
    """One owner. Keeps pointers into the arrays of the view that it saw last; the fleet changes those in place."""

    def __init__(self, library: ctypes.CDLL, shape: Shape) -> None:
        self._place = library.place
        self._place.restype = None
        self._place.argtypes = (ctypes.c_void_p,) * 4
        self._shape = shape
        self._view: View | None = None
        self._native_view = _View()
        self._view_at = ctypes.addressof(self._native_view)
        self._request = ctypes.create_string_buffer(_REQUEST.size)
        self._request_at = ctypes.addressof(self._request)
        self._result = ctypes.create_string_buffer(_RESULT.size)
        self._result_at = ctypes.addressof(self._result)
        self._scratch = np.zeros(0)
        self._scratch_at = 0

    def __call__(self, question: Question) -> tuple[Choice, Prediction]:
        """Somebody must be allowed on each side that is needed."""
        if question.view is not self._view:
            self._look_at(question.view)
        facts = question.facts
        _REQUEST.pack_into(
            self._request,
            0,
            address(question.runs),
            0 if question.prefill_ok is None else address(question.prefill_ok),
            0 if question.decode_ok is None else address(question.decode_ok),
            facts.num_tokens,
            facts.expected_tokens,
            question.now_ms,
            facts.needs_decode,
            question.last_prefill,
            question.last_decode,
        )
        self._place(self._view_at, self._request_at, self._result_at, self._scratch_at)
        p, d, source, local, cached, blocks, queue, fetch, prefill, handoff, step = _RESULT.unpack(self._result)
        parts = Breakdown(queue, fetch, prefill, handoff, step)
        return Choice(p, d, source), Prediction(parts, source, local, cached - local, blocks)

    def _look_at(self, view: View) -> None:
        prefill, decode, stores, shape = view.prefill, view.decode, view.stores, self._shape
        pointers = {
            "prefill_slots": prefill.slots,
            "home": prefill.home,
            "costs": prefill.costs,
            "known": prefill.known,
            "tail_ms": prefill.tail_ms,
            "ready_at_ms": prefill.ready_at_ms,
            "prefill_tie_ms": prefill.tie_ms,
            "decode_slots": decode.slots,
            "context_ms": decode.context_ms,
            "next_step_ms": decode.next_step_ms,
            "free_blocks": decode.free_blocks,
            "decode_tie_ms": decode.tie_ms,
            "store_slots": stores.slots,
            "dram_slots": stores.dram_slots,
            "sending_flows": stores.sending_flows,
            "idleness": stores.idleness,
            "fetch_latency": view.fetch_latency,
            "fetch_byte": view.fetch_byte,
            "send_latency": view.send_latency,
            "send_byte": view.send_byte,
            "least_send_latency": view.least_send_latency,
            "least_send_byte": view.least_send_byte,
        }
        for name, array in pointers.items():
            assert array.flags.c_contiguous
            setattr(self._native_view, name, address(array))
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
        self._scratch = np.zeros(3 * len(prefill.nodes) + 2 * len(decode.nodes) + 1)
        self._scratch_at = address(self._scratch)
        self._view = view


def address(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    """Of an array that its caller keeps, and may write."""
    return ctypes.addressof(_from_buffer(array)) if array.size else 0
