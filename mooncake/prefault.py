"""Memory whose pages the kernel has provided before anyone waits for them.

A page is zeroed when it is first touched, and on a virtual machine with ballooning the host has to find it too: a
prompt that is the first to use its blocks would wait for that at both ends of its hand-off and in the pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import threading
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mooncake.native import BuildFailed, load_native
from mooncake.threads import Expendable

log = logging.getLogger(__name__)

_STEP_BYTES = 2 << 20  # after each step it checks whether anybody still wants the memory

Bytes = npt.NDArray[np.uint8]


def prefault(memory: Bytes) -> None:
    """Blocking; the GIL is released meanwhile. The content of ``memory`` is preserved, even what others write
    meanwhile. Without a compiler pages are provided at first touch."""
    library = _library()
    if library is not None:
        _touch(library, memory, 0, memory.nbytes)


def prefault_in_background(memory: Bytes) -> None:
    """The same in a thread that runs only on an idle core, and that ends when nobody else references ``memory``.
    Memory whose owner has another lifetime must be held by ``memory`` (as numpy's ``base``)."""
    if memory.nbytes >= _STEP_BYTES:
        held = (weakref.ref(memory), memory.nbytes)
        thread = Expendable(target=_prefault_when_idle, args=held, name="prefault", daemon=True)
        with contextlib.suppress(RuntimeError):  # no further thread can be started
            thread.start()


def _prefault_when_idle(memory: weakref.ref[Bytes], num_bytes: int) -> None:
    with contextlib.suppress(OSError):  # of this thread only; if not permitted, it runs normally
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    library = _library()
    for start in range(0, num_bytes, _STEP_BYTES):
        held = memory()
        if held is None or library is None:
            return
        _touch(library, held, start, min(_STEP_BYTES, num_bytes - start))
        del held


def _touch(library: ctypes.CDLL, memory: Bytes, start: int, num_bytes: int) -> None:
    begin: int = memory.__array_interface__["data"][0]  # ``ctypes`` would put ``memory`` into a reference cycle
    library.prefault_touch(begin + start, num_bytes, mmap.PAGESIZE)


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = load_native("prefault", Path(__file__).with_name("prefault.cpp"))
    except BuildFailed as error:
        log.info("memory is not provided ahead of its use: %s", error)
        return None
    library.prefault_touch.restype = None
    library.prefault_touch.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    return library
