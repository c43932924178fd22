"""Finds what RDMA needs on this machine: pyverbs, a device with an active port, and the address to be reached by.

Works with the pyverbs of rdma-core 44 (Debian 12's ``python3-pyverbs``) and that of 59 (PyPI); neither is a dependency.
No other module imports pyverbs.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

_DISTRIBUTION_PACKAGES = Path("/usr/lib/python3/dist-packages")  # where Debian-based systems install python3-pyverbs
_DEVICES = Path("/sys/class/infiniband")
_MAPPED_IPV4 = bytes(10) + b"\xff\xff"


class VerbsUnavailable(Exception):
    """This process cannot use an RDMA device; the message says in one line why, and what would help."""


class Verbs(NamedTuple):
    """The pyverbs modules used here."""

    device: ModuleType
    pd: ModuleType
    mr: ModuleType
    cq: ModuleType
    qp: ModuleType
    wr: ModuleType
    addr: ModuleType
    enums: ModuleType
    error: type[Exception]


_loading = threading.Lock()
_loaded: list[Verbs] = []


def pyverbs() -> Verbs:
    """pyverbs, imported at first use, which works even without a device. Raises VerbsUnavailable."""
    with _loading:
        if not _loaded:
            _loaded.append(_import_verbs())
        return _loaded[0]


def _import_verbs() -> Verbs:
    try:
        if "pyverbs" not in sys.modules and importlib.util.find_spec("pyverbs") is None:
            _link_distribution_package()
        names = ("device", "pd", "mr", "cq", "qp", "wr", "addr")
        modules = {name: importlib.import_module(f"pyverbs.{name}") for name in names}
        error = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
        return Verbs(**modules, enums=_enums(), error=error)
    except ImportError as error:
        raise VerbsUnavailable(
            f"RDMA needs pyverbs ({error}); `apt install python3-pyverbs` on Debian 12, or `pip install pyverbs` "
            "beside rdma-core of the same version"
        ) from None


def _enums() -> ModuleType:
    try:
        return importlib.import_module("pyverbs.enums")  # up to rdma-core 5x
    except ImportError:
        return importlib.import_module("pyverbs.libibverbs_enums")


def _link_distribution_package() -> None:
    """Make the system's pyverbs visible in a virtual environment, without the rest of the system's packages.

    Equivalent to a symbolic link to its folder in ``site-packages``. It was compiled for one version of Python.
    """
    folder = _DISTRIBUTION_PACKAGES / "pyverbs"
    if not any((folder / f"device{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        raise ImportError("not installed for this Python")
    spec = importlib.util.spec_from_file_location(
        "pyverbs", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["pyverbs"]
        raise


def find_port() -> tuple[str, int]:
    """The first device with an active port, and that port. Raises VerbsUnavailable."""
    names = sorted(path.name for path in _DEVICES.iterdir()) if _DEVICES.is_dir() else []
    if not names:
        raise VerbsUnavailable("this machine has no RDMA device (/sys/class/infiniband is empty)")
    for name in names:
        ports = sorted(int(path.name) for path in (_DEVICES / name / "ports").iterdir())
        for port in ports:
            if "ACTIVE" in _read(_DEVICES / name / "ports" / str(port) / "state"):
                return name, port
    raise VerbsUnavailable(f"no RDMA device has an active port ({', '.join(names)})")


def link_layer(device: str, port: int) -> str:
    return _read(_DEVICES / device / "ports" / str(port) / "link_layer")


def gid_index(device: str, port: int, is_ethernet: bool) -> int:
    """On Ethernet the first RoCE v2 address that maps an IPv4 one, else any RoCE v2 one. Raises VerbsUnavailable."""
    if not is_ethernet:
        return 0
    folder = _DEVICES / device / "ports" / str(port)
    routable: list[int] = []
    for path in (folder / "gids").iterdir():
        gid = bytes.fromhex(_read(path).replace(":", "") or "00")
        if any(gid) and _read(folder / "gid_attrs" / "types" / path.name) == "RoCE v2":
            routable.append(int(path.name) + (0 if gid.startswith(_MAPPED_IPV4) else 1 << 16))
    if not routable:
        raise VerbsUnavailable(f"RDMA device {device} has no RoCE v2 address: give its network interface an IP address")
    return min(routable) & 0xFFFF


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # an empty slot of the table
        return ""
