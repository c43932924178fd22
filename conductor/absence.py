"""Waiting for nodes that are on their way back: a role without a node is mostly one that is being started again.

A supervisor restarts a process that died, and a conductor that has just started has not heard of its nodes yet.
Requests wait that out, but only for a while after a role lost its last node; later ones are refused at once. It knows
neither nodes nor requests, only that something about the nodes has changed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Absence:
    """One owner, one event loop. ``patience_s`` 0: nobody waits."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._since: float | None = clock()  # that a role has no node; None: every role has one
        self._is_leaving = False  # but the last one of a role is about to go
        self._change = asyncio.Event()

    def changed(self, is_anyone_missing: bool, is_anyone_leaving: bool = False) -> None:
        """The nodes are others than they were: whoever waits looks again. A node that only finishes what it has is
        leaving, and missing once it is gone."""
        self._is_leaving = is_anyone_leaving
        if not is_anyone_missing:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        self._change.set()
        self._change = asyncio.Event()

    def until(self) -> float:
        """How long it is worth waiting from now on: while a node is leaving, without an end."""
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
