"""Waiting for nodes that are coming back: a role without a node is usually one whose process is being restarted.

A supervisor restarts a process that died, and a conductor that has just started has not heard from its nodes yet.
Requests wait, but only for a limited time after a role lost its last node; later ones are refused at once. This module
knows neither nodes nor requests, only that the set of nodes has changed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Absence:
    """One owner, one event loop. With ``patience_s`` 0 nobody waits."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._since: float | None = clock()  # when some role was first without a node; None: every role has one
        self._is_leaving = False  # the last node of some role is draining
        self._change = asyncio.Event()

    def changed(self, is_anyone_missing: bool, is_anyone_leaving: bool = False) -> None:
        """The set of nodes has changed: wake every waiter to look again. A node that drains counts as leaving, and
        as missing once it is gone."""
        self._is_leaving = is_anyone_leaving
        if not is_anyone_missing:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        self._change.set()
        self._change = asyncio.Event()

    def until(self) -> float:
        """Time until which waiting is worthwhile; infinite while a node is leaving."""
        if self._since is None and self._is_leaving:
            return math.inf
        return (self._clock() if self._since is None else self._since) + self._patience_s

    async def change(self, until: float) -> bool:
        """Return True as soon as the nodes have changed, or False at ``until``."""
        try:
            async with asyncio.timeout(max(until - self._clock(), 0.0)):
                await self._change.wait()
        except TimeoutError:
            return False
        return True
