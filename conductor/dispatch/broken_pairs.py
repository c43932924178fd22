"""Pairs of nodes whose hand-offs fail while both are in order for everybody else: the way between them is cut.

Pure: time is an argument. Nodes are known by their incarnations. A retry helps one request; this spares those that
follow a prefill in vain and the wait for a machine that does not answer.
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES = 2  # in a row, before a pair is avoided: one may have been the request's, or a busy node's
AVOIDED_S, MAX_AVOIDED_S = 10.0, 60.0  # then a request finds out; twice as long after each in vain
MAX_PAIRS = 4096  # that are remembered

Pair = tuple[int, int]  # prefill, decode


@dataclass(slots=True)
class _Trouble:
    failures: int = 0
    avoided_s: float = 0.0
    until: float = 0.0


class BrokenPairs:
    """One owner: the dispatcher."""

    def __init__(self) -> None:
        self._troubles: dict[Pair, _Trouble] = {}  # the latest last

    def failed(self, pair: Pair, now: float) -> bool:
        """A hand-off has failed, and neither node was lost. Returns whether the pair is avoided now and was not."""
        trouble = self._troubles.pop(pair, None) or _Trouble()
        self._troubles[pair] = trouble
        if len(self._troubles) > MAX_PAIRS:
            del self._troubles[next(iter(self._troubles))]
        trouble.failures += 1
        if trouble.failures < FAILURES:
            return False
        if now >= trouble.until:  # otherwise that hand-off began before
            trouble.avoided_s = min(2 * trouble.avoided_s or AVOIDED_S, MAX_AVOIDED_S)
        trouble.until = now + trouble.avoided_s
        return trouble.failures == FAILURES

    def worked(self, pair: Pair) -> None:
        """A hand-off has been committed."""
        self._troubles.pop(pair, None)

    def avoids(self, pair: Pair, now: float) -> bool:
        trouble = self._troubles.get(pair)
        return trouble is not None and now < trouble.until

    def gone(self, incarnation: int) -> None:
        """The node has left the cluster."""
        for pair in [pair for pair in self._troubles if incarnation in pair]:
            del self._troubles[pair]
