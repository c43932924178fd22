"""Output files of commands, checked when the flag is parsed, so that an error does not come after long work."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mooncake.errors import ConfigError


def writable(path: Path | None) -> Path | None:
    """Returns the path. Raises ConfigError when no file can be written there."""
    if path is not None and (problem := _problem(path)):
        raise ConfigError(f"cannot write {path}: {os.strerror(problem)}")
    return path


def writable_folder(path: Path | None) -> Path | None:
    """Returns the path of a folder, which may not exist yet. Raises ConfigError when it cannot be written to."""
    if path is not None:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        problem = 0 if os.access(there, os.W_OK) else errno.EACCES
        if problem := problem if there.is_dir() else errno.ENOTDIR:
            raise ConfigError(f"cannot write in {path}: {os.strerror(problem)}")
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError that is raised here names the file; that of a full disk names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def output_folder(text: str) -> Path:
    """``writable_folder`` as an argparse type."""
    return writable_folder(Path(text)) or Path(text)


def output_file(text: str) -> Path:
    """``writable`` as an argparse type."""
    return writable(Path(text)) or Path(text)


def _problem(path: Path) -> int:
    if path.is_dir():
        return errno.EISDIR
    if not path.parent.is_dir():
        return errno.ENOENT
    return 0 if os.access(path if path.exists() else path.parent, os.W_OK) else errno.EACCES
