"""Compiles our C++ files for this machine at first use, and keeps the result for later processes.

A library is stored under ``$XDG_CACHE_HOME/mooncake/kernels``, named after everything it depends on: sources (with
their headers), flags, compiler, instruction set. ``CXX`` names another compiler, ``CXXFLAGS`` adds flags. Of several
processes that want a library at once, one builds it, its sources in parallel, and the others wait. Every failure is
one sentence in ``BuildFailed``; nothing here knows what the code does.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from mooncake.durable import rename_whole
from mooncake.precision import cpu_features

COMPILE_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")
ROUNDING_AS_PYTHON = ("-ffp-contract=off",)  # after every operation: no fused multiply-add
MODULE_HEADER = Path(__file__).with_name("python_module.h")
BUILD_TIMEOUT_S = 300  # seconds on one core; a busy machine takes several times as long

log = logging.getLogger(__name__)


class BuildFailed(Exception):
    """No native code on this machine; the message says why and what would help."""


def load_native(
    name: str, sources: Path | Sequence[Path], headers: Sequence[Path] = (), flags: Sequence[str] = ()
) -> ctypes.CDLL:
    """``sources`` as one loaded library, built if necessary. Raises BuildFailed."""
    sources = [sources] if isinstance(sources, Path) else sources
    compiler = _find_compiler()
    command = [compiler, *COMPILE_FLAGS, *flags, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    path = _cache_folder() / f"{name}-{_digest(command, [*sources, *headers])}.so"
    if not _is_built(path):
        try:
            with _alone(path) as is_alone:
                if not _is_built(path):
                    if is_alone:
                        _drop_cut_short(path)
                    started_s = time.monotonic()
                    _build(command, sources, path)
                    log.info("built %s in %.1f s: %s", sources[0].name, time.monotonic() - started_s, path)
        except OSError as error:  # e.g. the disk is full
            raise BuildFailed(
                f"cannot keep built code in {path.parent}: {error.strerror}; set XDG_CACHE_HOME"
            ) from None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildFailed(f"the library built of {sources[0].name} does not load: {error}") from None


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
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooncake" / "kernels"
    except RuntimeError:  # as for a user of a container that its system does not know
        raise BuildFailed("there is no home folder to keep built code in; set XDG_CACHE_HOME") from None
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


def _is_built(path: Path) -> bool:
    """Not if the file is there and empty, or zeros, as power cuts have left it to earlier versions."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except FileNotFoundError:
        return False


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """While no other process builds ``path``. False: files cannot be locked, so all build, and each renames its own
    result."""
    lock = path.with_suffix(".lock")
    try:
        file = lock.open("w")
    except OSError:
        yield False
        return
    with file:
        is_locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            log.debug("%s cannot be locked", lock)
            is_locked = False
        try:
            yield is_locked
        finally:
            lock.unlink(missing_ok=True)


def _drop_cut_short(target: Path) -> None:
    """What builds of ``target`` left that were killed; nobody builds it now."""
    for folder in target.parent.glob(f"{_build_prefix(target)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _build_prefix(target: Path) -> str:
    return f"build-{target.stem}-"


def _build(command: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    """Compile, the sources in parallel, and rename into place."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_build_prefix(target)) as folder:
        objects = [str(Path(folder) / f"{index}.o") for index in range(len(sources))]
        built = Path(folder) / "library.so"
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            compiled = [
                pool.submit(_run, [*command, "-c", str(source), "-o", to])
                for source, to in zip(sources, objects, strict=True)
            ]
            for each in compiled:
                each.result()
        _run([*command, "-shared", *objects, "-o", str(built)])
        rename_whole(built, target)


def _run(command: Sequence[str]) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S).stdout
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or [f"exit {error.returncode}"]
        reason = next((line for line in lines if "error: " in line), lines[0])  # before it, what included what
        raise BuildFailed(f"{command[0]} failed: {reason}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} did not run: {error}") from None
