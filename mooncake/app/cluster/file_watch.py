"""Tells when this process has no file descriptor left, and when it has one again.

Nothing else would: neither the event loop nor gRPC says a word of connections that it cannot accept for that; they wait
in the kernel, and are accepted later.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import resource
import time

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
TELL_EVERY_S = 60.0


async def watch_files() -> None:
    """Never returns."""
    told_at, is_short = -math.inf, False
    while True:
        lack = _lack()
        if lack and time.monotonic() - told_at >= TELL_EVERY_S:
            told_at, is_short = time.monotonic(), True
            log.error("new connections wait, and no file can be opened: %s", lack)
        elif not lack and is_short:
            is_short = False
            log.warning("there are file descriptors again: new connections are accepted")
        await asyncio.sleep(LOOK_EVERY_S)


def _lack() -> str:
    """Why no file can be opened now, for a person; "" if one can."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EMFILE:
            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"this process has as many open as it may ({files}); raise its limit (ulimit -n, LimitNOFILE)"
        if error.errno == errno.ENFILE:
            return "this machine has as many open as it may; raise fs.file-max"
    return ""
