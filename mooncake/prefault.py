"""Memory that the kernel has provided before anybody has to wait for it.

A page is zeroed when it is first touched, and on a virtual machine whose host takes back what lies unused, the host
has to find it, too: a prompt that is the first to use its blocks would wait for that at both ends of its hand-off and in
the pool.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref

import numpy as np
import numpy.typing as npt

_MADV_POPULATE_WRITE = 23  # <linux/mman.h>, Linux 5.14
_STEP_BYTES = 2 << 20  # short, since whoever maps memory meanwhile waits
_LOWEST_PRIORITY = 19

Bytes = npt.NDArray[np.uint8]


def prefault(memory: Bytes) -> None:
    """Blocking; the GIL is free meanwhile. What lies in ``memory`` stays. Kernels before 5.14 do not know how: there
    pages come at first touch, as they do where there is no more memory."""
    for start in range(0, memory.nbytes, _STEP_BYTES):
        if not _prefault_step(memory, start):
            return


def prefault_in_background(memory: Bytes) -> None:
    """The same in a thread that gives way to everybody, and that ends when nobody else has ``memory`` any more.
    Whatever memory has an owner with another lifetime must be held by ``memory`` (as numpy's ``base``)."""
    if memory.nbytes >= _STEP_BYTES:
        held = (weakref.ref(memory), memory.nbytes)
        threading.Thread(target=_prefault_gently, args=held, name="prefault", daemon=True).start()


def _prefault_gently(memory: weakref.ref[Bytes], num_bytes: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)  # of this thread alone
    for start in range(0, num_bytes, _STEP_BYTES):
        held = memory()
        if held is None or not _prefault_step(held, start):
            return
        del held


def _prefault_step(memory: Bytes, start: int) -> bool:
    """Whether there is more to be had. Memory need not begin with a page: its neighbours in that are provided, too."""
    begin: int = memory.__array_interface__["data"][0]  # what ``ctypes`` gives would hold ``memory`` in a cycle
    address, end = begin + start, begin + min(start + _STEP_BYTES, memory.nbytes)
    address -= address % os.sysconf("SC_PAGE_SIZE")
    return bool(_madvise(address, end - address, _MADV_POPULATE_WRITE) == 0)


_madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise would hold the GIL
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
