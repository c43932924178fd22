"""The library of ``board.cpp``: its functions, the numbers that both sides know, and what a client is greeted with.

``board.cpp`` owns the layout of a board and the order of loads and stores; ``board.py`` is the store's half,
``reader.py`` its clients'. Without a C++ compiler there is no board.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path

from kvstore.transfer.native import MAX_SUMS, MIN_SUM_BYTES
from kvstore.transfer.owner.native_owner import Arrival
from mooncake.native import MODULE_HEADER, BuildFailed, load_module, load_native

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("board.cpp")
HEADERS = [SOURCE.with_name("board.h"), SOURCE.parent.with_name("xxh3.h")]
FLAGS = (f"-I{MODULE_HEADER.parent}",)
FILES = 3  # sent to a client: the board, its mailbox, the segment
GREETING = b"board 1\n"
WRITER_ID_BYTES = 36
MAX_ARRIVED = 64  # blocks listed by others, taken at a time
MAX_NOTES = 1024  # of blocks a client has read
MAX_GIFTS = 8  # slots for a client to fill

ADDRESS, _U32, _U64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "board_size": (_U64, [_U32]),
    "board_mailbox_size": (_U64, []),
    "board_max_ranges": (_U64, []),
    "board_min_range_bytes": (_U64, []),
    "board_arrival_size": (_U64, []),
    "board_max_arrived": (_U64, []),
    "board_max_notes": (_U64, []),
    "board_max_gifts": (_U64, []),
    "board_create": (ADDRESS, [ctypes.c_int, _U32, _U64, _U64, ctypes.c_int]),
    "board_end": (None, [ADDRESS]),
    "board_close": (None, [ADDRESS]),
    "board_show": (ctypes.c_int, [ADDRESS, _U32, _U64, ctypes.c_char_p, _U32, _U32, ADDRESS, _U32]),
    "board_hide": (None, [ADDRESS, _U32]),
    "board_mark": (None, [ADDRESS, ctypes.c_char_p, _U32, ctypes.c_int]),
    "board_hold": (None, [ADDRESS, ctypes.c_int]),
    "board_expect": (None, [ADDRESS, _U32, _U64]),
    "board_count_unlisted": (None, [ADDRESS, _U32]),
    "board_lists_all": (ctypes.c_int, [ADDRESS]),
    "board_be_patient": (None, [ADDRESS, _U32]),
    "board_take_arrived": (_U32, [ADDRESS, ADDRESS]),
    "board_open_mailbox": (ADDRESS, [ctypes.c_int]),
    "board_close_mailbox": (None, [ADDRESS]),
    "board_take_notes": (_U32, [ADDRESS, ADDRESS, ADDRESS, _U32]),
    "board_give": (ctypes.c_int, [ADDRESS, _U64, _U64]),
    "board_receive": (ctypes.c_int, [ADDRESS, ADDRESS]),
    "board_open": (ADDRESS, [ctypes.c_int] * 4),
    "board_segment": (ADDRESS, [ADDRESS]),
    "board_segment_bytes": (_U64, [ADDRESS]),
    "board_leave": (None, [ADDRESS]),
    "board_exists": (ctypes.c_int32, [ADDRESS, ctypes.c_char_p, ADDRESS, _U32, ctypes.c_char_p]),
    "board_length": (ctypes.c_int64, [ADDRESS, ctypes.c_char_p, _U32]),
    "board_block_bytes": (_U64, [ADDRESS]),
    "board_write": (None, [ADDRESS, _U32, ADDRESS, _U64, _U32, ADDRESS]),
    "board_read": (ctypes.c_int32, [ADDRESS, ctypes.c_char_p, _U32, ADDRESS, _U64]),
}
_SAME: dict[str, int] = {  # as in board.cpp
    "board_arrival_size": ctypes.sizeof(Arrival),
    "board_max_ranges": MAX_SUMS,
    "board_min_range_bytes": MIN_SUM_BYTES,
    "board_max_arrived": MAX_ARRIVED,
    "board_max_notes": MAX_NOTES,
    "board_max_gifts": MAX_GIFTS,
}


@functools.cache
def load_board() -> ctypes.CDLL | None:
    """The library, or None if it cannot be built."""
    try:
        library = load_native("board", SOURCE, [MODULE_HEADER, *HEADERS], FLAGS)
        load_get()
    except BuildFailed as error:
        log.warning("blocks on this host are looked up over the wire, not in shared memory: %s", error)
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for name, ours in _SAME.items():
        assert getattr(library, name)() == ours, f"board.cpp has another {name} than library.py"
    return library


@functools.cache
def load_get() -> Callable[[int, bytes, object], int | None]:
    """The same library's look-up as a function of Python's. Raises BuildFailed."""
    get: Callable[[int, bytes, object], int | None] = load_module("board", SOURCE, HEADERS, FLAGS).get
    return get
