"""Who may write which block: a table in memory that the owner changes, its C++ code reads, and writers on this host
see."""

from __future__ import annotations

import contextlib
import os

from kvstore.segment import map_shared, sealed_memory


class Grants:
    """The epoch that may write each block, 0 for none, in a page that writers on this host can read but not change."""

    def __init__(self, num_blocks: int) -> None:
        size = num_blocks * 8
        fd = sealed_memory("mooncake-grants", size)
        try:
            self.map = map_shared(fd, size)
            self.read_only_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self.table = memoryview(self.map).cast("Q")  # aligned 8-byte stores: a reader never sees a torn value

    def close(self) -> None:
        os.close(self.read_only_fd)
        self.table.release()
        with contextlib.suppress(BufferError):
            self.map.close()
