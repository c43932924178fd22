"""Files that are whole or absent under their names, even after a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def rename_whole(part: Path, path: Path) -> None:
    """Rename ``part`` to ``path`` once its bytes are on the disk: file systems write names and bytes in any order, and
    a machine that loses power in between would find zeros, or half of it, under the final name. Raises OSError, also
    for writes that failed unnoticed."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
