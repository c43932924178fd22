"""How the host launches Triton kernels: compiled for a GPU, or in Triton's interpreter if TRITON_INTERPRET=1.

This module does not know what any kernel computes.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import triton
from triton.runtime.errors import OutOfResources

DoesNotFit = OutOfResources
"""Raised by a launch that needs more registers or shared memory than the device has."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_INTERPRETING = threading.Lock()
_LAUNCHED: list[Any] = []  # made by ``kernel``


class _OneAtATime:
    """While a kernel runs, the interpreter patches Triton's modules: only one thread at a time."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **settings: object) -> None:
            with _INTERPRETING:
                self._kernel[grid](*arguments, **settings)

        return launch


def kernel(*varying: str) -> Callable[[Callable[..., None]], Any]:
    """``triton.jit`` for kernels that the host launches; functions that kernels call use that directly.

    ``varying`` are numbers that change from step to step, and tensors that are parts of others, so begin anywhere:
    Triton would otherwise compile again for 1 and multiples of 16, and for addresses that are none.
    """

    def decorate(function: Callable[..., None]) -> Any:
        jitted = triton.jit(function, do_not_specialize=list(varying))
        if INTERPRETED:
            return _OneAtATime(jitted)
        _LAUNCHED.append(jitted)
        return jitted

    return decorate


@functools.cache
def row_warps(width: int) -> int:
    """Warps for a program that holds a row of this many elements: about 16 per thread."""
    return int(min(max(triton.next_power_of_2(width) // 512, 1), 16))


def built_kernels() -> Iterator[dict[str, str | int]]:
    """``facts`` of all kernels this process has compiled for its GPUs so far; none in the interpreter."""
    for jitted in _LAUNCHED:
        for kernels, *_ in jitted.device_caches.values():
            for built in list(kernels.values()):
                yield facts(built)


def facts(built: Any) -> dict[str, str | int]:
    """Facts about a compiled kernel, a ``CompiledKernel``: from its PTX, and from the driver once it is loaded."""
    ptx, metadata = built.asm["ptx"], built.metadata
    constants = {built.src.fn.arg_names[path[0]]: value for path, value in built.src.constants.items()}
    return {
        "kernel": built.name,
        "constants": ", ".join(f"{name}={value}" for name, value in constants.items()),
        "warps": metadata.num_warps,
        "stages": metadata.num_stages,
        "shared_bytes": metadata.shared,
        "registers": getattr(built, "n_regs", -1),
        "spills": getattr(built, "n_spills", -1),
        "async_copies": ptx.count("cp.async.c"),
        "warpgroup_products": ptx.count("wgmma.mma_async"),
        "warp_products": ptx.count("mma.sync"),
    }
