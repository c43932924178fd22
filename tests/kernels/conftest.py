"""Triton's interpreter patches its whole language anew for each launch, and again for each function that a kernel
calls, makes a table of all types whenever it looks one up, and describes the shape of every value that it computes:
half the time of these tests. Here it does so once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import cache
from typing import Any

from forked_ranks import forked_ranks

__all__ = ["forked_ranks"]

if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ModuleNotFoundError):
        from triton.runtime import interpreter

        def patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
            """``patch(fn)``, but once for all functions that name the language in the same ways, and for good."""
            done: set[frozenset[int]] = set()
            named: dict[Any, frozenset[int]] = {}
            languages = {id(module) for module in (interpreter.tl, interpreter.tl.core)}

            def patched(fn: Any) -> Any:
                if fn not in named:
                    named[fn] = frozenset(map(id, fn.__globals__.values())) & languages
                if named[fn] not in done:
                    done.add(named[fn])
                    patch(fn)
                return interpreter._LangPatchScope()  # nothing to restore

            return patched

        of_scalar = cache(interpreter._get_np_dtype)
        of_any = interpreter._get_np_dtype

        def np_dtype(dtype: Any) -> Any:
            scalar = dtype.scalar  # of a block
            return of_any(scalar) if scalar.is_ptr() else of_scalar(scalar)

        core, unwrapped = interpreter.tl.core, interpreter.tl.core._unwrap_if_constexpr
        new_block, new_tensor, equals = core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__
        shapes: dict[tuple[int, ...], Any] = {}  # one for all blocks of these sizes
        of_blocks: dict[int, tuple[Any, int, str]] = {}  # by the number of the shape, which lives on
        of_tensors: dict[int, tuple[Any, Any, Any]] = {}

        def block_type(block: Any, element: Any, shape: Any) -> None:
            if id(shape) not in of_blocks:
                sizes = tuple(map(unwrapped, unwrapped(shape)))
                if sizes not in shapes:
                    new_block(block, element, shape)
                    shapes[sizes] = block.shape
                    of_blocks[id(block.shape)] = block.shape, block.numel, str(block.shape)
                shape = shapes[sizes]
            block.element_ty = element
            block.shape, block.numel, text = of_blocks[id(shape)]
            block.name = f"<{text}, {element}>"

        def tensor(made: Any, handle: Any, kind: Any) -> None:
            shape = kind.shape if kind.is_block() else None
            if id(shape) not in of_tensors:
                new_tensor(made, handle, kind)
                of_tensors[id(shape)] = made.shape, made.numel, shape
            made.handle, made.type, made.dtype = handle, kind, kind.scalar
            made.shape, made.numel, _ = of_tensors[id(shape)]

        def equal(shape: Any, other: Any) -> Any:
            if isinstance(other, list):
                return core.constexpr(shape.values == [unwrapped(size) for size in other])
            return equals(shape, other)

        core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__ = block_type, tensor, equal
        interpreter._patch_lang = patched_once(interpreter._patch_lang)
        interpreter._get_np_dtype = np_dtype
