"""The main function that every role shares: arguments, logging, signals, and one sentence for every expected error.

It knows that a node starts and stops, and nothing of what a node does. It must not import torch or a role.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from mooncake.app.flags import add_overrides
from mooncake.config import Config, load_config
from mooncake.errors import Cancelled, ConfigError, ModelError, MooncakeError, NodeUnavailable

log = logging.getLogger(__name__)

STOP_GRACE_S = 15.0  # a node that has not stopped so long after its drain is ended the hard way
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


def run_role(name: str, build: Callable[[Config], Node], argv: list[str] | None = None) -> None:
    """Run one node until a signal to stop, then leave with exit code 0; 2 for a ConfigError or ModelError, which mostly
    no restart mends, 1 for any other MooncakeError, also one that ends it later.

    A second signal, or ``STOP_GRACE_S`` beyond ``node.drain_s`` without an end, stops the process at once.
    """
    arguments = _parse(name, argv)
    try:
        config = load_config(arguments.config, arguments.set)
        set_up_logging(config.node.id or f"{name}-{os.getpid()}", arguments.log_level)
        die_with_parent()
        pin_to(config.node.cores)
        give_way(config.node.nice)
        run_async(_serve(name, build(config), STOP_GRACE_S + config.node.drain_s))
    except (ConfigError, ModelError) as error:
        _leave(name, error, 2)
    except MooncakeError as error:
        _leave(name, error, 1)


def run_async(main: Coroutine[object, object, T]) -> T:
    """``asyncio.run`` on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def set_up_logging(node_id: str, level: str = "INFO") -> None:
    """Log to stderr, a line a message: time, level, node, logger, text."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine(f"%(asctime)s %(levelname)-7s {node_id} %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class _OneLine(logging.Formatter):
    """A line a message, so that text from outside cannot forge one. The traceback of a bug follows its message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


def _parse(name: str, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_program(name), description=f"Run one {name} process of a cluster.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the cluster's TOML file")
    add_overrides(parser)
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    return parser.parse_args(argv)


def _program(name: str) -> str:
    """What a person typed to start this process, whose module need not be called as its role is."""
    spec = sys.modules["__main__"].__spec__
    return name if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


async def _serve(name: str, node: Node, stop_grace_s: float) -> None:
    with stop_signals() as asked_to_stop:
        starting = asyncio.create_task(node.start(), name=f"start {name}")
        stopping = asyncio.create_task(asked_to_stop.wait(), name="wait for a signal")
        tasks: list[asyncio.Task[None] | asyncio.Task[bool] | asyncio.Task[MooncakeError]] = [starting, stopping]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                log.info("%s serves on %s", name, node.control_address)
                failing = asyncio.create_task(node.wait_fatal(), name="wait for an error")
                tasks.append(failing)
                await asyncio.wait((failing, stopping), return_when=asyncio.FIRST_COMPLETED)
                if failing.done():
                    raise failing.result()
            log.info("%s stops", name)
        finally:
            complete = starting.done() and not starting.cancelled() and starting.exception() is None
            for task in tasks:
                task.cancel()
            with _hard_end_after(stop_grace_s):
                await asyncio.gather(*tasks, return_exceptions=True)
                await _stop(node, complete)


async def _stop(node: Node, complete: bool) -> None:
    """Stop a node. What a half-started node says about its own missing parts must not hide why it did not start."""
    try:
        await node.stop()
    except Exception:
        if complete:
            raise
        log.debug("stopping a node that had not started", exc_info=True)


async def unless_stopped(work: Coroutine[object, object, T], at_once: Callable[[], None] = lambda: None) -> T:
    """The result of ``work``; or Cancelled when a signal to stop came first and ``work`` has cleaned up.

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
def stop_signals(at_once: Callable[[], None] = lambda: None) -> Iterator[asyncio.Event]:
    """An event that SIGTERM, SIGINT and the terminal's SIGHUP set; a second one calls ``at_once`` and ends the process
    with 130."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            at_once()
            os._exit(130)
        asked.set()

    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signals.append(signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield asked
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _hard_end_after(grace_s: float) -> Iterator[None]:
    """End the process when the block takes longer: even a stuck thread or event loop cannot keep it alive."""

    def end() -> None:
        sys.stderr.write(f"did not stop within {grace_s:g} s; ending the process\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(grace_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the launcher dies, however it dies, so that no node outlives it."""
    launcher = os.environ.get(PARENT_ENV)
    if not launcher or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before the kernel knew
        raise NodeUnavailable(f"the launcher (process {launcher}) is gone")


def pin_to(cores: tuple[int, ...]) -> None:
    """Keep this process, and every thread it will start, on these cores. Raises ConfigError for one that is missing."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except (AttributeError, OSError, ValueError) as error:
        raise ConfigError(f"this process cannot run on the cores {list(cores)} (node.cores): {error}") from None


def give_way(nice: int) -> None:
    """Let this process, and every thread it will start, run after others that want the same cores."""
    if not nice:
        return
    os.nice(nice)
    # Where Linux divides the cores among sessions first, niceness within one says nothing: the session has its own.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def _leave(name: str, error: MooncakeError, code: int) -> None:
    sys.stderr.write(f"{name}: {error.message}\n")
    raise SystemExit(code)
