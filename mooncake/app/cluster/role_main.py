"""The main function of all roles: arguments, logging, signals, and one sentence for every expected error.

It starts and stops a node without knowing what the node does. It must not import torch or a role.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import itertools
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

from mooncake.app.cli.flags import add_overrides
from mooncake.app.cluster.file_watch import watch_files
from mooncake.app.cluster.last_resort import LoopWatch, end_when_crippled
from mooncake.config import Config, load_config
from mooncake.errors import Cancelled, ConfigError, ModelError, MooncakeError, NodeUnavailable, Unauthenticated
from mooncake.threads import Threads

log = logging.getLogger(__name__)

STOP_GRACE_S = 15.0  # a node that has not stopped so long after its drain is killed
START_GRACE_S = 3.0  # the same for a node that was still starting, which has no requests to finish
MAX_OPEN_FILES = 1 << 20  # where the system sets no limit
PARENT_ENV = "MOONCAKE_PARENT_PID"  # set by a launcher whose death must end its nodes
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>

T = TypeVar("T")


class Node(Protocol):
    """One role in one process. ``start`` binds, registers with the conductor and raises MooncakeError when it cannot;
    ``stop`` ends everything that ``start`` began, also when ``start`` was cancelled half-way."""

    async def start(self) -> None: ...

    async def wait_fatal(self) -> MooncakeError:
        """Return the error once the node, which has started, cannot go on."""
        ...

    async def stop(self) -> None: ...

    @property
    def control_address(self) -> str: ...


def run_role(name: str, build: Callable[[Config], Node]) -> None:
    """Run one node until a signal to stop, then exit with code 0. Exits with 2 after a ConfigError, a ModelError or
    a wrong API key, which a restart seldom repairs, and with 1 after any other MooncakeError, at the start or later.

    The process is ended at once by a second signal, ``node.drain_s`` plus ``STOP_GRACE_S`` after the first one, or, if
    the node was still starting, ``START_GRACE_S`` after it, even during computations or compilations.
    """
    hold_standard_files()
    faulthandler.enable()  # a library that finds no memory ends the process without a word
    arguments = _parse(name)
    try:
        config = load_config(arguments.config, arguments.set)
        set_up_logging(config.node.id or f"{name}-{os.getpid()}", arguments.log_level)
        die_with_parent()
        pin_to(config.node.cores)
        raise_file_limit()
        run_async(_serve(name, build(config), STOP_GRACE_S + config.node.drain_s, config.node.step_timeout_s > 0))
    except (ConfigError, ModelError, Unauthenticated) as error:
        _leave(name, error, 2)
    except MooncakeError as error:
        _leave(name, error, 1)


def run_async(main: Coroutine[object, object, T]) -> T:
    """``asyncio.run``, with uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def set_up_logging(node_id: str, level: str) -> None:
    """Log to stderr, one line per message: time, level, node, logger, text."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine(f"%(asctime)s %(levelname)-7s {node_id} %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class _OneLine(logging.Formatter):
    """One line per message, so that text from outside cannot forge one. The traceback of a bug follows its message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


def _parse(name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_program(name), description=f"Run one {name} process of a cluster.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the cluster's TOML file")
    add_overrides(parser)
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    return parser.parse_args()


def _program(name: str) -> str:
    """The command that started this process; its module may be named differently from its role."""
    spec = sys.modules["__main__"].__spec__
    return name if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


async def _serve(name: str, node: Node, stop_grace_s: float, is_watched: bool) -> None:
    loop = asyncio.get_running_loop()
    end_when_crippled(loop)
    loop.set_default_executor(Threads(name="aside"))
    watching = asyncio.create_task(watch_files(), name="watch files")
    hard_end, started = HardEnd(), False

    def on_signal() -> None:
        if started:
            hard_end.within(stop_grace_s)
        else:
            hard_end.within(START_GRACE_S, code=0)

    with stop_signals(on_first=on_signal) as asked_to_stop:
        starting = asyncio.create_task(node.start(), name=f"start {name}")
        stopping = asyncio.create_task(asked_to_stop.wait(), name="wait for a signal")
        tasks: list[asyncio.Task[None] | asyncio.Task[bool] | asyncio.Task[MooncakeError]]
        tasks = [watching, starting, stopping]
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                started = True
                if is_watched:
                    LoopWatch(loop)
                log.info("%s serves on %s", name, node.control_address)
                failing = asyncio.create_task(node.wait_fatal(), name="wait for an error")
                tasks.append(failing)
                await asyncio.wait((failing, stopping), return_when=asyncio.FIRST_COMPLETED)
                if failing.done():
                    raise failing.result()
            log.info("%s stops", name)
        finally:
            hard_end.within(stop_grace_s)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await _stop(node, started)
            if asked_to_stop.is_set() and not started:
                _end_at_once()
        _end_at_once()


def _end_at_once() -> None:
    """Exit now with 0, once the node has stopped: a normal exit would wait for threads that compile kernels or read
    weights, take the interpreter apart, with torch for longer than the node takes to stop, and need file descriptors to
    close the event loop, which may be what is short."""
    logging.shutdown()
    with contextlib.suppress(OSError):  # nobody reads it any more
        sys.stdout.flush()
    os._exit(0)


async def _stop(node: Node, complete: bool) -> None:
    """Stop a node. Errors from stopping a half-started node are only logged, since they must not hide why it did not
    start."""
    try:
        await node.stop()
    except Exception:
        if complete:
            raise
        log.debug("stopping a node that had not started", exc_info=True)


async def unless_stopped(work: Coroutine[object, object, T], at_once: Callable[[], None] = lambda: None) -> T:
    """The result of ``work``. Raises Cancelled when a signal to stop came first, once ``work`` has cleaned up.

    A second signal calls ``at_once`` and ends the process with 130.
    """
    with stop_signals(at_once) as asked_to_stop:
        working = asyncio.ensure_future(work)
        stopping = asyncio.create_task(asked_to_stop.wait(), name="wait for a signal")
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Cancelled("stopped by a signal")
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)


@contextlib.contextmanager
def stop_signals(
    at_once: Callable[[], None] = lambda: None, on_first: Callable[[], None] = lambda: None
) -> Iterator[asyncio.Event]:
    """An event that SIGTERM, SIGINT and the terminal's SIGHUP set; a second signal calls ``at_once`` and ends the
    process with 130.

    ``on_first`` is called by the signal handler on the main thread, even if the event loop is blocked.
    """
    loop = asyncio.get_running_loop()
    asked, times = asyncio.Event(), itertools.count()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if next(times):
            at_once()
            os._exit(130)
        on_first()
        loop.call_soon_threadsafe(asked.set)

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class HardEnd:
    """Ends the process after a time limit, even if a thread or the event loop is stuck."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._grace_s, self._code = 0.0, 1
        # Started in advance: a signal handler must not start a thread.
        threading.Thread(target=self._wait, name="hard end", daemon=True).start()

    def within(self, grace_s: float, code: int = 1) -> None:
        """End the process ``grace_s`` from now. Later calls have no effect."""
        if not self._asked.is_set():
            self._grace_s, self._code = grace_s, code
            self._asked.set()

    def _wait(self) -> None:
        self._asked.wait()
        time.sleep(self._grace_s)
        if self._code:
            sys.stderr.write(f"did not stop within {self._grace_s:g} s; ending the process\n")
            sys.stderr.flush()
        os._exit(self._code)


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the launcher dies in any way, so that no node outlives it."""
    launcher = os.environ.get(PARENT_ENV)
    if not launcher or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before the request
        raise NodeUnavailable(f"the launcher (process {launcher}) is gone")


def pin_to(cores: tuple[int, ...]) -> None:
    """Restrict this process and its future threads to these cores. Raises ConfigError for a core that is missing."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except (AttributeError, OSError, ValueError) as error:
        raise ConfigError(f"this process cannot run on the cores {list(cores)} (node.cores): {error}") from None


def hold_standard_files() -> None:
    """Give a process that was started without standard input, output or error /dev/null instead. Otherwise the next
    file or connection gets that number, and what anybody writes to stderr."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))  # it was None


def raise_file_limit() -> None:
    """Let this process open as many files as it may. The usual limit of 1024 is for programs that use ``select``;
    here each connection takes a file, and so does each segment of an SSD."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _leave(name: str, error: MooncakeError, code: int) -> None:
    with contextlib.suppress(OSError):  # such as a full disk: the code says enough for whoever would start it again
        sys.stderr.write(f"{name}: {error.message}\n")
    raise SystemExit(code)
