"""The thread that owns an engine: it runs calls from other threads, steps while there is work, and delivers tokens.

No error ends it silently: a failed load is computed instead; any other failure of a step ends the running and waiting
sequences with that error; one for lack of memory lets them be retried elsewhere. If that fails too the engine is
broken: the thread ends, and reports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from mooncake.engine.contract import NO_HOOK, StepHook, StepOutput
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.errors import KVLoadFailed, MooncakeError, NodeUnavailable, as_ours

log = logging.getLogger(__name__)

T = TypeVar("T")

OnOutput = Callable[[StepOutput | MooncakeError], None]
"""Called with each token of a request's answers, or once with the error that ended it. It runs on the engine's thread
and must not block."""

RestAfter = Callable[[float], float]
"""Seconds to rest after a step of so many seconds, so that others get the cores. Called on the engine's thread, again
after each call that it serves during the rest."""


class EngineThread:
    """Does nothing until ``start``. All methods but that one may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.broken: Future[MooncakeError] = Future()  # resolves with the reason once the engine is unusable
        self.is_idle = True  # waiting for calls
        self.num_done = 0  # steps and calls
        self._ending = "the engine is stopping"
        self._hook = NO_HOOK
        self._rest_after: RestAfter | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[Any]]] = queue.SimpleQueue()
        self._listeners: dict[str, OnOutput] = {}
        self._lock = threading.Lock()  # between posting calls and stopping
        self._is_stopping = self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, hook: StepHook = NO_HOOK, rest_after: RestAfter | None = None) -> None:
        """Step with this hook, and rest after steps if the engine shares its cores. Once."""
        self._hook = hook
        self._rest_after = rest_after
        self._thread.start()

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Run ``work`` between two steps. The future fails with what it raises, or NodeUnavailable after the end."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(self.engine))
                except BaseException as error:
                    future.set_exception(error)

        with self._lock:
            if not self._is_stopping:
                self._calls.put((run, future))
                return future
        future.set_exception(NodeUnavailable(self._ending))
        return future

    def add(self, sequence: Sequence, on_output: OnOutput) -> None:
        """Queue a sequence. If the engine refuses it, ``on_output`` gets the error."""

        def add(engine: Engine) -> None:
            engine.add(sequence)
            self._listeners[sequence.request_id] = on_output

        def refused(future: Future[None]) -> None:
            error = future.exception()
            if error is not None:
                _notify(on_output, sequence.request_id, as_ours(error, "the engine"))

        self.call(add).add_done_callback(refused)

    def listen(self, request_id: str, on_output: OnOutput) -> None:
        """Receive the tokens of a sequence that was not added here (a reserved one); call it before it starts."""
        self._listeners[request_id] = on_output

    def drop(self, request_id: str) -> Future[None]:
        """Nobody listens to the request any more: end what is left of it."""

        def drop(engine: Engine) -> None:
            self._listeners.pop(request_id, None)
            engine.abort(request_id)

        return self.call(drop)

    def give_up(self, why: str) -> None:
        """The current step will not end: declare the engine broken, and tell everyone who waits for it."""
        with self._lock:
            self._is_stopping = self._is_given_up = True
        self._break(why)
        with contextlib.suppress(queue.Empty):
            while True:
                _, future = self._calls.get_nowait()
                if future.set_running_or_notify_cancel():
                    future.set_exception(NodeUnavailable(why))
        self._notify_all()

    def stop(self) -> None:
        """Return once the thread has ended or was given up; every sequence still here ends with NodeUnavailable.
        Idempotent, and harmless before ``start``."""
        with self._lock:
            self._is_stopping = True
            self._calls.put((lambda: None, Future()))
        if not self._is_given_up and self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
            self._serve_calls(wait=False)
            self.engine.fail_all(NodeUnavailable(self._ending))
            self._publish([])
        except BaseException as error:  # the engine's own state is broken: its results cannot be trusted
            log.critical("the engine is broken", exc_info=True)
            with self._lock:
                self._is_stopping = True
            self._break(f"the engine is broken: {type(error).__name__}: {error}")
            self._serve_calls(wait=False)
        self._notify_all()
        self.is_idle = True

    def _work(self) -> None:
        is_stuck = False
        while not self._is_stopping:
            self._serve_calls(wait=is_stuck or not self.engine.has_work)
            began_s = time.monotonic()
            is_stuck = not self._step()
            if self._rest_after is not None:
                self._rest(self._rest_after, began_s)

    def _serve_calls(self, *, wait: bool) -> None:
        self.is_idle = wait
        with contextlib.suppress(queue.Empty):
            call, _ = self._calls.get(block=wait)
            self.is_idle = False
            while True:
                call()
                self.num_done += 1
                call, _ = self._calls.get_nowait()

    def _rest(self, rest_after: RestAfter, began_s: float) -> None:
        ended_s = time.monotonic()
        while not self._is_stopping:
            left_s = ended_s + rest_after(ended_s - began_s) - time.monotonic()
            if left_s <= 0:
                return
            with contextlib.suppress(queue.Empty):
                call, _ = self._calls.get(timeout=left_s)
                call()
                self.num_done += 1

    def _step(self) -> bool:
        """Returns False when there is nothing to do until the next call."""
        if not self.engine.has_work:
            self._publish([])
            self._drop_stale_listeners()
            return False
        outputs: list[StepOutput] = []
        try:
            outputs = self.engine.step(self._hook)
        except KVLoadFailed as error:
            self._recover(error)
        except Exception as error:
            if not self._is_given_up:  # otherwise whoever ends what it waited for has said why
                log.exception("a step failed; its sequences end")
            self.engine.fail_all(as_ours(error, "the engine"))
        self._publish(outputs)
        self.num_done += 1
        return not self.engine.is_stalled

    def _recover(self, error: KVLoadFailed) -> None:
        failed = self.engine.rewind_failed(error)
        if failed:
            log.info("stored KV of %s is computed instead: %s", ", ".join(failed), error.message)
        else:
            self.engine.fail_all(error, error.request_ids or None)

    def _publish(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            if listener := self._listeners.get(output.request_id):
                _notify(listener, output.request_id, output)
        for request_id, error in self.engine.take_ended():
            self._finish(request_id, error)
        for output in outputs:
            if output.finish_reason is not None and not self.engine.is_open(output.request_id):
                self._listeners.pop(output.request_id, None)

    def _drop_stale_listeners(self) -> None:
        """Listeners of sequences that never started."""
        for request_id in list(self._listeners):
            if not self.engine.is_open(request_id):
                self._listeners.pop(request_id, None)

    def _break(self, why: str) -> None:
        """Declare the engine broken; the first reason counts."""
        with self._lock:
            if not self.broken.done():
                self._ending = why
                self.broken.set_result(NodeUnavailable(why))

    def _notify_all(self) -> None:
        for request_id in list(self._listeners):
            self._finish(request_id, NodeUnavailable(self._ending))

    def _finish(self, request_id: str, error: MooncakeError) -> None:
        if listener := self._listeners.pop(request_id, None):
            _notify(listener, request_id, error)


async def watch_steps(thread: EngineThread, num_layers: Callable[[], int], timeout_s: float) -> None:
    """Give the engine up when a layer of a step takes longer than any step may. ``num_layers`` counts those computed.
    Time in which this process itself was stopped does not count."""
    every_s, looks, before = min(timeout_s / 4, 1.0), 0, (-1, -1)
    while looks * every_s < timeout_s:
        await asyncio.sleep(every_s)
        now = thread.num_done, num_layers()
        looks, before = looks + 1 if now == before and not thread.is_idle else 0, now
    why = f"no step has ended for {timeout_s:g} s: what computes hangs (node.step_timeout_s)"
    log.critical(why)
    thread.give_up(why)


def _notify(listener: OnOutput, request_id: str, output: StepOutput | MooncakeError) -> None:
    try:
        listener(output)
    except Exception:
        log.exception("the listener of request %s failed", request_id)
