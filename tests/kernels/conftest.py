"""Triton's interpreter patches its whole language anew for each launch, and again for each function that a kernel
calls: more than a third of the time of these tests. Here it does so once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
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

        interpreter._patch_lang = patched_once(interpreter._patch_lang)
