"""One mirror for the caches of several GPUs: whoever asks the first rank for a copy has all ranks copy their KV heads.

All ranks map the same host memory (``HostMirror`` with a ``Share``). In a step whose hook wants layers the engine's
thread may ask for copies: they are told to the other ranks within the step, because each copies what it has computed up
to there (``gpu_ranks``). Other threads ask at any time, through a connection to a thread of every other rank. Through
it a rank also reports each copy that is done, so a rank that is gone is noticed and nobody waits for it.

It does not know whose blocks they are, or how ranks compute.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake.engine.cache.device_cache import HostMirror
from mooncake.engine.cache.kv_cache import HERE, Arrival
from mooncake.errors import NodeUnavailable

log = logging.getLogger(__name__)

TELL_S = 60  # for a rank to take a message

_OUT, _IN = 0, 1

Request: TypeAlias = npt.NDArray[np.int64]
"""A copy: its number, direction, layer (-1: all), blocks."""


def connect() -> tuple[Connection, socket.socket]:
    """The first rank's end of a connection to another rank, and that one's."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", TELL_S, 0))
    return Connection(ours.detach()), theirs


class _Copy:
    """``Arrival`` on all ranks."""

    def __init__(self, number: int, here: Arrival, mirror: RanksMirror) -> None:
        self._number, self._here, self._mirror = number, here, mirror

    def wait(self) -> None:
        """Raises NodeUnavailable if a rank is gone."""
        self._here.wait()
        self._mirror.await_others(self._number)

    def order(self) -> None:
        """Likewise."""
        self._here.order()
        self._mirror.order_others(self._number)


class RanksMirror:
    """The first rank's end: the ``Mirror`` of all ranks' caches. Its methods raise NodeUnavailable once a rank is
    gone."""

    def __init__(
        self, own: HostMirror, links: Sequence[Connection], give_up: Callable[[], None], timeout_s: float = 0.0
    ) -> None:
        """``give_up`` is called on some thread if a rank takes longer than that for a copy, which may follow a step (0:
        it may take any time); it ends them."""
        self.memory = own.memory
        self._own, self._links, self._give_up = own, links, give_up
        self._timeout_s = timeout_s or None
        self._asking = threading.Lock()  # all ranks hear of copies in the same order
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._missing: dict[int, int] = {}  # copies under way, and how many other ranks have not reported them
        self._error: NodeUnavailable | None = None
        self._in_step: int | None = None  # the thread whose copies are told within its step
        self._untold: list[Request] = []  # by that thread
        self._to_order = 0  # the last copy after which the step is to go on
        for link in links:
            threading.Thread(target=self._hear, args=(link,), name="copies of a rank", daemon=True).start()

    def to_host(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        return self._copy(_OUT, block_ids, layer)

    def to_device(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        return self._copy(_IN, block_ids, layer)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """While this thread computes a step, in which it tells the other ranks what ``take`` returns."""
        self._in_step, self._untold, self._to_order = threading.get_ident(), [], 0
        try:
            yield
        finally:
            self._in_step = None

    def take(self) -> tuple[int, list[Request]]:
        """What the thread in the step has asked for since the last time: the number of a copy to go on after (0: none),
        and copies of what has been computed."""
        taken = self._to_order, self._untold
        self._to_order, self._untold = 0, []
        return taken

    def await_others(self, number: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: number not in self._missing or self._error, self._timeout_s):
                why = f"a tensor parallel rank has not copied blocks for {self._timeout_s:g} s: it hangs"
                log.critical("%s (node.step_timeout_s)", why)
                self._fail(NodeUnavailable(why))
                self._give_up()
            if number in self._missing:
                self._raise_error()

    def order_others(self, number: int) -> None:
        if threading.get_ident() != self._in_step:
            self.await_others(number)
        elif number in self._missing:  # else it is done
            self._to_order = max(self._to_order, number)

    def settle(self) -> None:
        """As ``HostMirror.settle``, on this rank."""
        self._own.settle()

    def close(self) -> None:
        """When the other ranks have ended. Idempotent."""
        with self._changed:
            self._fail(NodeUnavailable("the tensor parallel ranks have ended"))
        self._own.close()

    def _copy(self, direction: int, block_ids: Sequence[int], layer: int | None) -> Arrival:
        if not block_ids:
            return HERE
        with self._asking:
            number = next(self._numbers)
            with self._changed:
                self._raise_error()
                self._missing[number] = len(self._links)
            request = np.array([number, direction, -1 if layer is None else layer, *block_ids], np.int64)
            if direction == _OUT and threading.get_ident() == self._in_step:
                self._untold.append(request)
            else:
                self._tell(request)
            return _Copy(number, _start(self._own, request), self)

    def _tell(self, request: Request) -> None:
        try:
            for link in self._links:
                link.send_bytes(request.data)
        except OSError as error:
            with self._changed:
                self._fail(NodeUnavailable(f"a tensor parallel rank takes no messages: {error}"))
            self._give_up()
            raise self._error or error from None

    def _hear(self, link: Connection) -> None:
        """On a thread per rank."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                [number] = np.frombuffer(link.recv_bytes(), np.int64).tolist()
                with self._changed:
                    self._missing[number] -= 1
                    if not self._missing[number]:
                        del self._missing[number]
                        self._changed.notify_all()
        with self._changed:
            self._fail(NodeUnavailable("a tensor parallel rank has ended"))

    def _fail(self, error: NodeUnavailable) -> None:
        """With the lock. The first reason counts."""
        self._error = self._error or error
        self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class RankCopies:
    """Another rank's end: it copies what the first one asks for. An error ends this process, which the first one
    notices."""

    def __init__(self, mirror: HostMirror, fd: int) -> None:
        """``fd`` is this rank's end of the connection."""
        self._mirror = mirror
        self._link = Connection(fd)
        self._telling = threading.Lock()
        self._begun: tuple[queue.SimpleQueue[tuple[int, Arrival]], ...] = (queue.SimpleQueue(), queue.SimpleQueue())
        self._changed = threading.Condition()
        self._last_in = 0  # the newest copy in that has begun; they come in the order of their numbers
        self._arriving: dict[int, Arrival] = {}  # copies in under way
        for work in (self._listen, partial(self._report, _OUT), partial(self._report, _IN)):
            threading.Thread(target=_or_end, args=(work,), name="copies", daemon=True).start()

    def start(self, request: Request) -> None:
        """Copies out what this thread has started to compute."""
        number, direction, *_ = request.tolist()
        arrival = _start(self._mirror, request)
        if direction == _IN:
            with self._changed:
                self._arriving[number] = arrival
                self._last_in = number
                self._changed.notify_all()
        self._begun[direction].put((number, arrival))

    def order(self, number: int) -> None:
        """As ``Arrival.order``, for a copy in with that number; it may not have been heard of yet."""
        with self._changed:
            self._changed.wait_for(lambda: self._last_in >= number)
            arrival = self._arriving.get(number, HERE)
        arrival.order()

    def settle(self) -> None:
        self._mirror.settle()

    def _listen(self) -> None:
        while True:
            self.start(np.frombuffer(self._link.recv_bytes(), np.int64))

    def _report(self, way: int) -> None:
        while True:
            number, arrival = self._begun[way].get()
            arrival.wait()
            with self._changed:
                self._arriving.pop(number, None)
            with self._telling:
                self._link.send_bytes(np.array([number], np.int64).data)


def _start(mirror: HostMirror, request: Request) -> Arrival:
    _, direction, layer, *block_ids = request.tolist()
    copy = mirror.to_host if direction == _OUT else mirror.to_device
    return copy(block_ids, None if layer < 0 else layer)


def _or_end(work: Callable[[], None]) -> None:
    try:
        work()
    except (EOFError, OSError):  # the first rank has ended, and this process with it
        pass
    except Exception:
        log.exception("a tensor parallel rank cannot copy blocks, and ends")
        os._exit(1)
