"""Waiting for a role without a node: usually its process is being restarted, or the conductor has only just started.

Requests wait, but only for a limited time after the role lost its last node; later ones are refused at once. This
module knows neither nodes nor requests, only that the set of nodes has changed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class NodeWait:
    """One owner, one event loop. With ``patience_s`` 0 nobody waits."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._missing_since: float | None = clock()  # when some role first had no node; None: every role has one
        self._is_draining = False  # the last node of some role is draining
        self._change = asyncio.Event()

    def nodes_changed(self, is_role_missing: bool, is_role_draining: bool = False) -> None:
        """Wake every waiter to look again. ``is_role_missing``: some role has no node; ``is_role_draining``: some role
        has no node that takes new work."""
        self._is_draining = is_role_draining
        if not is_role_missing:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = self._clock()
        self._change.set()
        self._change = asyncio.Event()

    def give_up_at(self) -> float:
        """Time until which waiting is worthwhile; infinite while the last node of a role drains."""
        if self._missing_since is None and self._is_draining:
            return math.inf
        return (self._clock() if self._missing_since is None else self._missing_since) + self._patience_s

    async def change(self, until: float) -> bool:
        """Return True as soon as the nodes have changed, or False at ``until``."""
        try:
            async with asyncio.timeout(max(until - self._clock(), 0.0)):
                await self._change.wait()
        except TimeoutError:
            return False
        return True
