"""Ends a process that lives but can serve no more: whoever started it starts it again, and its requests are retried.

A thread or a task that died leaves what it did undone for good; so does a callback, or a thread's start, that found no
memory. Who waits for it waits for ever, perhaps on the event loop. Errors that somebody is prepared for never come
here. It knows nothing of nodes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from typing import Any

from mooncake.errors import lacks_memory
from mooncake.threads import Expendable
from mooncake.vital import IS_VITAL

log = logging.getLogger(__name__)

LOOP_TIMEOUT_S = 120.0  # for one pass of the event loop, which may have a few lines of C++ compiled
_LOOKS = 60  # in that time


def end_when_crippled(loop: asyncio.AbstractEventLoop) -> None:
    """End this process with 1 when a thread that is not expendable dies of an error, or a vital task, or when an error
    for lack of memory was nobody's."""
    threading.excepthook = _on_thread_error
    sys.unraisablehook = _on_unraisable
    loop.set_exception_handler(_on_loop_error)


class LoopWatch:
    """Ends this process with 1 when its event loop makes no pass for ``timeout_s``, and tells where it stands. Time in
    which the process itself was stopped does not count."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float = LOOP_TIMEOUT_S) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._is_heard = True
        threading.Thread(target=self._run, name="loop watch", daemon=True).start()

    def _run(self) -> None:
        looks = 0
        while looks < _LOOKS:
            time.sleep(self._timeout_s / _LOOKS)
            looks += 1
            if self._is_heard:
                looks, self._is_heard = 0, False
                try:
                    self._loop.call_soon_threadsafe(self._hear)
                except RuntimeError:  # it is closed
                    return
        faulthandler.dump_traceback(2)
        _end(f"the event loop has not made a pass for {self._timeout_s:g} s".encode())

    def _hear(self) -> None:
        self._is_heard = True


def _on_thread_error(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit or isinstance(args.thread, Expendable):
        threading.__excepthook__(args)
        return
    _tell("a thread died of an error that nobody expected", args.exc_value)
    _end(b"a thread has died")


def _on_unraisable(args: sys.UnraisableHookArgs) -> None:
    """Python's own hook tells of these and goes on. A thread that fails before it is running leaves whoever starts it
    waiting for that."""
    sys.__unraisablehook__(args)
    if (args.exc_value is not None and lacks_memory(args.exc_value)) or "thread started by" in (args.err_msg or ""):
        _end(b"no memory was left for something that nothing else makes up for")


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    loop.default_exception_handler(context)
    if context.get(IS_VITAL):
        _end(b"a vital task has died")
    error = context.get("exception")
    if error is not None and lacks_memory(error):
        _end(b"no memory was left for something that nothing else makes up for")


def _tell(what: str, error: BaseException | None) -> None:
    try:
        log.critical(what, exc_info=error)
    except BaseException:  # there is no memory for that
        return


def _end(why: bytes) -> None:
    """With as little memory as possible."""
    try:
        os.write(2, why)
        os.write(2, b"; ending the process\n")
    finally:
        os._exit(1)
