"""What the failed attempts of one request have taught: which nodes the next one avoids, and whether there is a next
one.

Pure. Nodes are known by their incarnations, so a restarted one is another node. A request has a few attempts. Failures
that are not its fault are not charged to it: a node that was gone before the call arrived, one that had announced it
was leaving, and a loss already charged when the other node of the hand-off reported it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conductor.registry import NodeInfo

Incarnations = frozenset[int]
NOBODY: Incarnations = frozenset()


def incarnations(nodes: Iterable[NodeInfo]) -> Incarnations:
    return frozenset(info.incarnation for info in nodes)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt, by its nodes."""

    nodes: Incarnations
    lost: Incarnations = NOBODY  # could not be reached
    leaving: Incarnations = NOBODY  # had announced that they were leaving
    met_nobody: bool = False  # a lost one was gone before it accepted the call: this request did not kill it


@dataclass(slots=True)
class Retries:
    """One owner: the request's journey. Up to ``most`` failures may be charged to it; one more ends it."""

    most: int
    count: int = 0  # failures charged
    has_failed: bool = False  # whether or not it was charged
    dead: Incarnations = NOBODY  # could not be reached, and have not been heard from since
    unreached: Incarnations = NOBODY  # these, and those heard from again
    left: Incarnations = NOBODY  # were leaving when an attempt on them failed
    avoid: Incarnations = NOBODY  # nodes of failed attempts that lost none: any of them may be the cause

    def learn(self, failure: Failure) -> bool:
        """Take in a failure. Returns whether the request may be retried."""
        self.has_failed = True
        self.count += not self._is_free(failure)
        self.left |= failure.leaving
        self.unreached |= failure.lost
        self.dead |= failure.lost
        # A lost node was the cause; without a loss it may have been any of them.
        self.avoid = self.avoid - failure.lost if failure.lost else self.avoid | failure.nodes
        return self.count <= self.most

    def heard(self, live: Incarnations) -> None:
        """These nodes are alive: only the connection to them was lost. They are used again when there is no other."""
        self.dead -= live

    def excluded(self, roles: Iterable[Incarnations]) -> Incarnations:
        """Nodes the next attempt must avoid: the dead, and of each role's usable nodes those that failed it, unless
        those are all that are alive. ``roles`` is only evaluated after a failure."""
        failed = self.avoid | self.unreached
        if not failed:
            return NOBODY
        spared = self.dead
        for usable in roles:
            alive = usable - self.dead
            if not alive <= failed:
                spared |= alive & failed
        return spared

    def _is_free(self, failure: Failure) -> bool:
        if failure.lost & self.avoid:  # the previous failure was this loss, as the other node had seen it
            return True
        if not failure.leaving <= self.left:  # whichever end of the hand-off reports it first, but only once each
            return True
        # A second time it counts: an unreachable node that keeps sending heartbeats would be tried until the deadline.
        return failure.met_nobody and not failure.lost & self.unreached
