"""Triton kernels as the host launches them: compiled for a GPU, or in Triton's interpreter when TRITON_INTERPRET=1.

It must not know what any kernel computes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import triton
from triton.runtime.errors import OutOfResources

DoesNotFit = OutOfResources
"""Raised by a launch that needs more registers or shared memory than the device has."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_INTERPRETING = threading.Lock()


class _OneAtATime:
    """The interpreter puts its own functions into Triton's modules while a kernel runs: one thread at a time."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **settings: object) -> None:
            with _INTERPRETING:
                self._kernel[grid](*arguments, **settings)

        return launch


def kernel(*varying: str) -> Callable[[Callable[..., None]], Any]:
    """``triton.jit`` for what the host launches; what kernels call takes that itself.

    ``varying`` are numbers that differ from step to step: Triton would compile once more for 1 and for multiples of 16.
    """

    def decorate(function: Callable[..., None]) -> Any:
        jitted = triton.jit(function, do_not_specialize=list(varying))
        return _OneAtATime(jitted) if INTERPRETED else jitted

    return decorate
