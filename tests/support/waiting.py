"""Waiting for what must become true, and what is true of processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Return once it holds. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def is_running(pid: int) -> bool:
    """Whether the process is running, and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
