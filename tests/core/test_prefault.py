"""Memory provided ahead of its use."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import threading
import time
import weakref

import numpy as np
import numpy.typing as npt

from mooncake.prefault import prefault, prefault_in_background

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def fresh(num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def resident(memory: npt.NDArray[np.uint8]) -> float:
    """Share of its pages that the kernel has provided."""
    found = (ctypes.c_ubyte * (memory.nbytes // PAGE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), found) == 0
    return sum(each & 1 for each in found) / len(found)


def prefaulting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefault"]


def wait_until_done() -> None:
    for thread in prefaulting():
        thread.join(30.0)
    assert not prefaulting()


def test_every_page_is_there_and_what_was_written_stays() -> None:
    memory = fresh(9 * MIB)
    memory[5 * MIB] = 7
    assert resident(memory) < 0.3
    prefault(memory)
    assert resident(memory) == 1.0
    assert memory[5 * MIB] == 7
    assert memory.sum() == 7


def test_in_the_background_too_while_others_write() -> None:
    memory = fresh(64 * MIB)
    prefault_in_background(memory)
    expected = np.arange(64 * MIB // PAGE, dtype=np.uint8)
    memory[::PAGE] = expected
    wait_until_done()
    assert resident(memory) == 1.0
    assert (memory[::PAGE] == expected).all()


def test_memory_within_other_memory_need_not_begin_with_a_page() -> None:
    whole = fresh(8 * MIB)
    part = whole[3 * PAGE + 100 : 3 * PAGE + 100 + 4 * MIB]
    prefault(part)
    assert resident(whole[3 * PAGE : 3 * PAGE + 4 * MIB]) == 1.0
    assert resident(whole[6 * MIB :]) == 0.0


def test_memory_that_nobody_wants_any_more_goes() -> None:
    memory = fresh(1 << 30)
    gone = weakref.ref(memory)
    prefault_in_background(memory)
    del memory
    gc.collect()
    wait_until_done()
    assert gone() is None


def test_only_idle_cores_are_used_and_only_by_that_thread() -> None:
    memory = fresh(256 * MIB)
    prefault_in_background(memory)
    deadline = time.monotonic() + 10.0
    policies = set[int]()
    while prefaulting() and time.monotonic() < deadline and os.SCHED_IDLE not in policies:
        with contextlib.suppress(ProcessLookupError):  # it may end meanwhile
            policies |= {os.sched_getscheduler(thread.native_id or 0) for thread in prefaulting()}
    assert os.SCHED_IDLE in policies
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    del memory
    wait_until_done()


def test_little_memory_is_not_worth_a_thread() -> None:
    memory = fresh(PAGE)
    prefault_in_background(memory)
    assert not prefaulting()


def test_a_process_without_threads_goes_on() -> None:
    memory = fresh(4 * MIB)
    threading.stack_size(1 << 46)  # more than there is address space: no thread can be started
    try:
        prefault_in_background(memory)
    finally:
        threading.stack_size(0)
    assert not prefaulting()
    assert resident(memory) == 0.0
