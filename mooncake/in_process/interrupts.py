"""Ctrl-C that waits for a good moment: Python raises KeyboardInterrupt between any two lines, also where they belong
together."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class HeldInterrupts:
    """Within ``with``, an interrupt waits for ``let_through`` or the end. A second one does not: what it would wait for
    may hang.

    Only the main thread is ever interrupted, so in others it does nothing, nor where Python does not handle SIGINT.
    """

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGINT)
        self._is_held = False

    def __enter__(self) -> HeldInterrupts:
        if callable(self._handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if signal.getsignal(signal.SIGINT) == self._hold:
            signal.signal(signal.SIGINT, self._handler)
        if error is None:
            self.let_through()

    def let_through(self) -> None:
        """Raises KeyboardInterrupt, or whatever the handler before this one does, if there was an interrupt."""
        if self._is_held:
            self._is_held = False
            self._pass_on(signal.SIGINT, None)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._is_held:
            self._pass_on(number, frame)
        self._is_held = True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._handler):
            self._handler(number, frame)
