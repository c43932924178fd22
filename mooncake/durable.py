"""Files that are whole or absent under their names, even after a power cut."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def rename_whole(part: Path, path: Path) -> None:
    """Rename ``part`` to ``path`` once its bytes are on the disk: file systems write names and bytes in any order, and
    a machine that loses power in between would find zeros, or half of it, under the final name. Raises OSError, also
    for writes that failed unnoticed."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that keeps what it held until all of ``data`` is there. Raises OSError."""
    if path.exists() and not path.is_file():  # a pipe, or the terminal
        path.write_bytes(data)
        return
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        rename_whole(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
