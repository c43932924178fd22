"""Compiles one of our C++ files for this machine at first use, and keeps the result for later processes.

The library is stored under ``$XDG_CACHE_HOME/mooncake/kernels``, named after everything it depends on: source (with its
headers), flags, compiler, instruction set. Several processes may build it at once: each renames its finished file into
place. Every failure is one sentence in ``BuildFailed``; nothing here knows what the code does.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from mooncake.precision import cpu_features

COMPILE_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")
MODULE_HEADER = Path(__file__).with_name("python_module.h")
BUILD_TIMEOUT_S = 300  # seconds on one core; a busy machine takes several times as long

log = logging.getLogger(__name__)


class BuildFailed(Exception):
    """No native code on this machine; the message says why and what would help."""


def load_native(name: str, source: Path, headers: Sequence[Path] = (), flags: Sequence[str] = ()) -> ctypes.CDLL:
    """``source`` as a loaded library, built if necessary. Raises BuildFailed."""
    compiler = _find_compiler()
    command = [compiler, *COMPILE_FLAGS, *flags]
    path = _cache_folder() / f"{name}-{_digest(command, [source, *headers])}.so"
    if not path.exists():
        started_s = time.monotonic()
        _build(command, source, path)
        log.info("built %s in %.1f s: %s", source.name, time.monotonic() - started_s, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildFailed(f"the library built of {source.name} does not load: {error}") from None


def load_module(name: str, source: Path, headers: Sequence[Path] = (), flags: Sequence[str] = ()) -> ModuleType:
    """Like ``load_native``, for a source that exports functions with ``PYTHON_MODULE``: they become Python
    functions."""
    library = ctypes.PyDLL(load_native(name, source, [MODULE_HEADER, *headers], flags)._name)
    library.python_module.restype = ctypes.py_object
    module: ModuleType = library.python_module()
    return module


def _find_compiler() -> str:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    for name in wanted:
        if path := shutil.which(name):
            return path
    raise BuildFailed(f"no C++ compiler ({' or '.join(wanted)}) is installed; install g++")


def _cache_folder() -> Path:
    """Our own folder for built code: never one that somebody else could have written to."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "mooncake" / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise BuildFailed(f"cannot keep built code in {folder}: {error.strerror}; set XDG_CACHE_HOME") from None
    if owner != os.geteuid():
        raise BuildFailed(f"{folder} belongs to another user; set XDG_CACHE_HOME")
    return folder


def _digest(command: Sequence[str], sources: Sequence[Path]) -> str:
    machine = " ".join([platform.machine(), *sorted(cpu_features()), *command[1:]])
    parts = [*(path.read_bytes() for path in sources), _run([command[0], "--version"]), machine.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _build(command: Sequence[str], source: Path, target: Path) -> None:
    """Compile, and rename into place."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        built = Path(folder) / "library.so"
        _run([*command, "-shared", str(source), "-o", str(built)])
        built.replace(target)


def _run(command: Sequence[str]) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S).stdout
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().splitlines()
        raise BuildFailed(f"{command[0]} failed: {reason[0] if reason else f'exit {error.returncode}'}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} did not run: {error}") from None
