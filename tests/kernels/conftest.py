"""Triton's interpreter patches its whole language anew for each launch, and again for each function that a kernel
calls, and makes a table of all types whenever it looks one up: a third of the time of these tests. Here it does so
once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import cache
from typing import Any

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

        interpreter._patch_lang = patched_once(interpreter._patch_lang)
        interpreter._get_np_dtype = np_dtype
