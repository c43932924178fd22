"""Tasks that last as long as their owner, who cancels them: if one ends of an error, what it does is never done again.

Nobody awaits such a task, so its error would be nobody's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

IS_VITAL = "is_vital"  # in the context that an event loop's exception handler gets


def vital(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Its error is told to the event loop's exception handler at once; that of a role's process ends the process."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[None]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    what = f"the task {task.get_name()!r} has ended of an error"
    task.get_loop().call_exception_handler({"message": what, "exception": error, "task": task, IS_VITAL: True})
