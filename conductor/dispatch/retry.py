"""Retries of one request: whether there is another attempt, and which nodes it avoids.

Pure. Nodes are known by their incarnations, so a restarted one is another node. The number of retries is limited, but
failures that are not the request's fault are not counted: a node that was gone before the call arrived, one that had
announced it was leaving, and a loss already counted when the other node of the hand-off reported it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conductor.registry import NodeInfo

Incarnations = frozenset[int]
NO_NODES: Incarnations = frozenset()


def incarnations(nodes: Iterable[NodeInfo]) -> Incarnations:
    return frozenset(info.incarnation for info in nodes)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt, by its nodes."""

    nodes: Incarnations
    lost: Incarnations = NO_NODES  # could not be reached
    leaving: Incarnations = NO_NODES  # had announced that they were leaving
    was_never_accepted: bool = False  # a lost node was gone before the call: this request did not kill it


@dataclass(slots=True)
class Retries:
    """One owner: the request's progress. ``max_failures`` may be counted; one more ends the request."""

    max_failures: int
    count: int = 0  # failures counted
    has_failed: bool = False  # whether or not it was counted
    dead: Incarnations = NO_NODES  # could not be reached, and have not sent a heartbeat since
    unreached: Incarnations = NO_NODES  # the dead, and those that have
    left: Incarnations = NO_NODES  # were leaving when an attempt on them failed
    suspects: Incarnations = NO_NODES  # nodes of failed attempts that lost none: any of them may be the cause

    def learn(self, failure: Failure) -> bool:
        """Record a failure. Returns whether the request may be retried."""
        self.has_failed = True
        self.count += not self._is_excused(failure)
        self.left |= failure.leaving
        self.unreached |= failure.lost
        self.dead |= failure.lost
        # A lost node was the cause; without a loss it may have been any of them.
        self.suspects = self.suspects - failure.lost if failure.lost else self.suspects | failure.nodes
        return self.count <= self.max_failures

    def revive(self, live: Incarnations) -> None:
        """These nodes are alive: only the connection to them was lost. They are used again when there is no other."""
        self.dead -= live

    @property
    def failed(self) -> Incarnations:
        """Nodes that may have been the cause of a failure."""
        return self.suspects | self.unreached

    def excluded(self, roles: Iterable[Incarnations]) -> Incarnations:
        """Nodes the next attempt must avoid: the dead, and of each role's usable nodes those that failed it, unless
        those are all that are alive. ``roles`` is only evaluated after a failure."""
        failed = self.failed
        if not failed:
            return NO_NODES
        avoided = self.dead
        for usable in roles:
            alive = usable - self.dead
            if not alive <= failed:
                avoided |= alive & failed
        return avoided

    def _is_excused(self, failure: Failure) -> bool:
        if failure.lost & self.suspects:  # the previous failure was this loss, as the other node had seen it
            return True
        if not failure.leaving <= self.left:  # whichever end of the hand-off reports it first, but only once each
            return True
        # A second time it counts: an unreachable node that keeps sending heartbeats would be tried until the deadline.
        return failure.was_never_accepted and not failure.lost & self.unreached
