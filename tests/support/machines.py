"""Machines of a test's own: network namespaces, joined by a switch, on which processes run as on several hosts.

Each has a boot id of its own, so that nobody thinks of shared memory between two. Everything goes with the processes
that hold the namespaces, and they with the test, however it ends. Needs root and Linux's usual tools.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

TOOLS = ("ip", "unshare", "nsenter")
NOBODY = "02:00:00:00:00:ff"  # no machine's card has this number
_CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x40000000, 1

T = TypeVar("T")


def missing() -> str:
    """What machines need and is not here; "" where there can be some."""
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"there is no {', '.join(absent)}"
    tried = subprocess.run(["unshare", "--net", "--mount", "ip", "link", "add", "br0", "type", "bridge"], check=False)
    return "" if tried.returncode == 0 else "this user, or this kernel, makes no networks"


class Machine:
    """One host: a network, and what is to be told from other hosts."""

    def __init__(self, address: str, switch: int, folder: Path) -> None:
        self.address = address
        boot_id = folder / f"boot-{address}"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        self._holder = _hold("--mount", f"mount --bind {boot_id} /proc/sys/kernel/random/boot_id; ip link set lo up")
        number = address.rpartition(".")[2]
        ends = ("name", f"port{number}", "netns", str(switch), "type", "veth")
        _call("ip", "link", "add", *ends, "peer", "name", "eth0", "netns", str(self._holder.pid))
        _call(*_within(switch), "ip", "link", "set", f"port{number}", "master", "br0", "up")
        self._do("ip", "address", "add", f"{address}/24", "dev", "eth0")
        self._do("ip", "link", "set", "eth0", "up")
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Run a process here, in ``folder``; it ends with the machine."""
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder)]  # who enters a machine's files begins at their root
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*_within(self._holder.pid, "-m"), *there, *command],
                stdout=output,
                stderr=output,
                env=environment,
                preexec_fn=_die_with_parent,
            )
        self._started.append(process)
        return process

    def call(self, function: Callable[[], T]) -> T:
        """What the function returns on a thread whose sockets are this machine's."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                with Path(f"/proc/{self._holder.pid}/ns/net").open() as network:
                    if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        thread = threading.Thread(target=run, name=f"at {self.address}")
        thread.start()
        thread.join()
        return result.result()

    def lose(self, other: Machine) -> None:
        """From now on what this machine sends to the other one is lost."""
        self._do("ip", "neighbour", "replace", other.address, "lladdr", NOBODY, "nud", "permanent", "dev", "eth0")

    def find(self, other: Machine) -> None:
        self._do("ip", "neighbour", "del", other.address, "dev", "eth0")

    def mute(self, port: str) -> None:
        """What this machine sends from a TCP port is lost."""
        self._do("ip", "rule", "add", "priority", "1", "ipproto", "tcp", "sport", port, "blackhole")

    def unmute(self, port: str) -> None:
        self._do("ip", "rule", "del", "priority", "1", "ipproto", "tcp", "sport", port, "blackhole")

    def close(self) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        _release(self._holder)

    def _do(self, *command: str) -> None:
        _call(*_within(self._holder.pid), *command)


@contextlib.contextmanager
def machines(folder: Path, *addresses: str) -> Iterator[list[Machine]]:
    """Machines at these IPv4 addresses of one network of 256, and nothing else on it. ``folder`` is for their files."""
    switch = _hold("", "ip link add br0 type bridge; ip link set br0 up")
    with contextlib.ExitStack() as stack:
        stack.callback(_release, switch)
        found: list[Machine] = []
        for address in addresses:
            found.append(machine := Machine(address, switch.pid, folder))
            stack.callback(machine.close)
        yield found


@contextlib.contextmanager
def apart(one: Machine, other: Machine) -> Iterator[None]:
    """The two do not reach each other, and nobody tells them."""
    one.lose(other)
    other.lose(one)
    try:
        yield
    finally:
        one.find(other)
        other.find(one)


def _hold(option: str, script: str) -> subprocess.Popen[bytes]:
    """A process in namespaces of its own, once it has done what ``script`` says there."""
    command = ["unshare", "--net", *filter(None, [option]), "sh", "-ec", f"{script}; echo; exec sleep infinity"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=_die_with_parent)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"\n", f"cannot do: {script}"
    return holder


def _release(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.communicate()


def _within(pid: int, *more: str) -> list[str]:
    return ["nsenter", "-t", str(pid), "-n", *more]


def _call(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
