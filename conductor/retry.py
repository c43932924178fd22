"""What the failed attempts of one request have shown: whom the next one is to spare, and whether there is a next one.

Pure. Nodes are known by their incarnations, so one that was started anew is another node. A request has a few tries,
and whoever did not fail because of it costs none: a node that was gone before the call came, one that had said that it
leaves, and a loss that was charged for already when the other node of the hand-off told of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Incarnations = frozenset[int]
NOBODY: Incarnations = frozenset()


@dataclass(frozen=True, slots=True)
class Failure:
    """One attempt that failed, by its nodes."""

    nodes: Incarnations
    lost: Incarnations = NOBODY  # of those, could not be reached
    leaving: Incarnations = NOBODY  # of those, had said that they are about to go
    met_nobody: bool = False  # a lost one was gone before it had the call: it did not die of this request


@dataclass(slots=True)
class Retries:
    """One owner: the request's journey. ``most`` failures may be charged to it; one more ends it."""

    most: int
    count: int = 0  # failures that were charged
    has_failed: bool = False  # whether or not it was charged for
    dead: Incarnations = NOBODY  # could not be reached, and have not been heard since
    unreached: Incarnations = NOBODY  # these, and those that were heard again
    left: Incarnations = NOBODY  # were leaving when an attempt on them failed
    avoid: Incarnations = NOBODY  # of failed attempts that lost nobody: any of them may be the reason

    def learn(self, failure: Failure) -> bool:
        """Take a failure in. Whether the request may be tried again."""
        self.has_failed = True
        self.count += not self._is_free(failure)
        self.left |= failure.leaving
        self.unreached |= failure.lost
        self.dead |= failure.lost
        # Who is lost was the reason; without a loss it may have been any of them.
        self.avoid = self.avoid - failure.lost if failure.lost else self.avoid | failure.nodes
        return self.count <= self.most

    def heard(self, live: Incarnations) -> None:
        """These nodes are there: only the connection to them was lost. They are taken again when there is no other."""
        self.dead -= live

    def excluded(self, roles: Iterable[Incarnations]) -> Incarnations:
        """Whom the next attempt must not meet: the dead, and of each role's usable nodes those that failed it, unless
        that is all of them that are alive. ``roles`` is looked at only when something has failed."""
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
        if failure.lost & self.avoid:  # the failure before was this loss, as the other node had seen it
            return True
        if not failure.leaving <= self.left:  # whichever end of the hand-off tells of it first; but once each
            return True
        # A second time it counts: one that goes on beating where nobody can reach it would be tried until the deadline.
        return failure.met_nobody and not failure.lost & self.unreached
