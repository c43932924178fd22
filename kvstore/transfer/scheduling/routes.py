"""The transports that reach one peer, and their paths: which one carries, which rest, and which are stalled.

No locks, no threads and no sockets: the link calls it under its own lock, and closes the paths that it returns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.transfer.protocol import SLICE_BYTES
from kvstore.transfer.scheduling.schedule import Pace, Patience, Watch, backoff_s, slice_bytes
from kvstore.transfer.transport import Path, Transport
from mooncake.errors import NodeUnavailable
from mooncake.types import SegmentAddress

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # consecutive broken paths, with nothing arriving in between, before a transport is given up
GIVEN_UP_S = 1.0  # how long a path may stall with only cancelled transfers
_RATE_SAMPLE_S = 0.050  # of traffic, at most, that make one sample
_RATE_SAMPLE_BYTES = 64 << 10  # smaller transfers measure latency, not rate
_EWMA_WEIGHT = 0.2  # of a new sample in the moving average that status shows


@dataclass(frozen=True, slots=True)
class TransportStats:
    """One transport to one peer, since the peer was first met."""

    node_id: str
    transport: str
    nbytes: int
    gb_per_s: float  # moving average while something was in flight, 1e9 bytes
    failures: int
    is_current: bool  # carries the next transfer
    paths: int  # open now
    reason: str  # why it last failed


def merged(entries: Iterable[TransportStats]) -> list[TransportStats]:
    """One entry per transport and peer: counts add up over the peer's incarnations, the rest is from the last one."""
    found: dict[tuple[str, str], TransportStats] = {}
    for entry in entries:
        before = found.get((entry.node_id, entry.transport))
        found[entry.node_id, entry.transport] = (
            entry
            if before is None
            else replace(
                entry,
                nbytes=before.nbytes + entry.nbytes,
                failures=before.failures + entry.failures,
                reason=entry.reason or before.reason,
            )
        )
    return list(found.values())


@dataclass(eq=False, slots=True)
class Rail:
    """One path's place: the path may be broken, resting, or not open yet."""

    route: Route
    index: int
    path: Path | None = None
    is_driven: bool = False
    pace: Pace = field(default_factory=Pace)
    watch: Watch = field(default_factory=Watch)
    failures: int = 0  # consecutive
    has_carried: bool = False
    was_cut: bool = False  # for stalling, and has delivered nothing since
    rest_until: float = 0.0

    @property
    def is_hope(self) -> bool:
        """Whether it is open or being opened, or was sound when it was closed (with those that broke)."""
        return self.path is not None or self.is_driven or (self.has_carried and not self.failures)


@dataclass(eq=False, slots=True)
class Route:
    """One transport to the peer."""

    transport: Transport
    rails: list[Rail] = field(default_factory=list)
    nbytes: int = 0
    gb_per_s: float = 0.0
    failures: int = 0
    failed_in_row: int = 0
    avoid_until: float = 0.0
    reason: str = ""
    on_way: int = 0
    sample_since: float = 0.0
    sample_bytes: int = 0

    def began(self, now: float) -> None:
        if self.on_way == 0:
            self.sample_since, self.sample_bytes = now, 0
        self.on_way += 1

    def arrived(self, nbytes: int, now: float) -> None:
        self.on_way -= 1
        self.nbytes += nbytes
        self.sample_bytes += nbytes
        seconds = now - self.sample_since
        if self.sample_bytes >= _RATE_SAMPLE_BYTES and (self.on_way == 0 or seconds >= _RATE_SAMPLE_S) and seconds > 0:
            rate = self.sample_bytes / seconds / 1e9
            self.gb_per_s = rate if self.gb_per_s == 0 else self.gb_per_s + _EWMA_WEIGHT * (rate - self.gb_per_s)
            self.sample_since, self.sample_bytes = now, 0


class Routes:
    """All ways to one peer, in order of preference, without those that do not reach it."""

    def __init__(self, address: SegmentAddress, transports: Sequence[Transport], retry_after_s: float) -> None:
        self._node_id = address.node_id
        self._retry_after_s = retry_after_s
        self._routes = [_route(transport, address) for transport in transports if transport.paths_to(address)]
        self.current = self._routes[0] if self._routes else None
        self._patience = Patience()
        self._tried: dict[str, str] = {}  # transports that failed since anything arrived, and why

    @property
    def transport(self) -> str:
        """The transport of the next transfer, or ""."""
        return self.current.transport.name if self.current else ""

    @property
    def rails(self) -> list[Rail]:
        return [rail for route in self._routes for rail in route.rails]

    @property
    def has_open_rail(self) -> bool:
        return self.current is not None and any(rail.path is not None for rail in self.current.rails)

    @property
    def is_gone(self) -> bool:
        """Whether no rail is driven and the peer has closed every open path."""
        return not any(rail.is_driven or (rail.path is not None and not rail.path.is_gone) for rail in self.rails)

    @property
    def has_other(self) -> bool:
        """Whether another rail could carry what a path about to be opened cannot."""
        return len(self._tried) < len(self._routes) - 1 or self.has_open_rail

    def stats(self) -> list[TransportStats]:
        return [
            TransportStats(
                self._node_id,
                route.transport.name,
                route.nbytes,
                route.gb_per_s,
                route.failures,
                route is self.current,
                sum(rail.path is not None for rail in route.rails),
                route.reason,
            )
            for route in self._routes
            if route.nbytes or route.failures
        ]

    def slice_bytes(self, request_bytes: int) -> int:
        """How to cut a request of this size, for the transport that will carry it."""
        route = self.current
        if route is None or request_bytes <= 2 * SLICE_BYTES:
            return SLICE_BYTES
        largest = min(each.transport.max_slice_bytes for each in self._routes)
        return slice_bytes(request_bytes, len(route.rails), route.gb_per_s * 1e9, largest)

    def check(self) -> None:
        """Raises NodeUnavailable when no configured transport reaches the peer."""
        if not self._routes:
            raise NodeUnavailable(f"no configured transport reaches {self._node_id}")

    def choose(self, now: float) -> None:
        """The best available transport; there is one."""
        best = self._ranked(now)[0]
        if best is not self.current and not self._tried:
            log.info("%s: trying %s again", self._node_id, best.transport.name)
            self.current = best

    def free_rail(self) -> Rail | None:
        """The fastest open rail that is idle, if no decision between transports is due."""
        route = self.current
        if route is None or self._tried or route is not self._routes[0]:  # it may be time to retry a better one
            return None
        best: Rail | None = None
        for rail in route.rails:
            if rail.path is not None and not rail.is_driven and (best is None or rail.pace.rate > best.pace.rate):
                best = rail
        return best

    def idle(self, now: float) -> list[Rail]:
        """Of the current transport: open ones first, fast ones first."""
        if self.current is None:
            return []
        rails = [rail for rail in self.current.rails if not rail.is_driven and rail.rest_until <= now]
        if len(rails) > 1:
            rails.sort(key=lambda rail: (rail.path is None, -rail.pace.rate))
        return rails

    def carried(self, rail: Rail, nbytes: int, now: float) -> None:
        """A slice has arrived over this rail: it is sound."""
        rail.pace.arrived(nbytes, now)
        rail.route.arrived(nbytes, now)
        rail.failures = rail.route.failed_in_row = 0
        rail.has_carried = True
        if rail.was_cut:
            rail.was_cut = False
            self._patience.grow(now)
        if self._tried:
            self._tried.clear()

    def failed(self, rail: Rail, error: Exception, was_open: bool, now: float) -> str:
        """The rail's path broke, or could not be opened. Returns why nothing reaches the peer if that was the last
        hope; else ""."""
        route = rail.route
        rail.failures += 1
        route.failed_in_row += 1
        route.reason = str(error)
        if any(other.is_hope for other in route.rails if other is not rail):
            rail.rest_until = now + backoff_s(rail.failures + (not was_open))
            name = route.transport.name
            log.info("%s: one %s path of %d failed: %s", self._node_id, name, len(route.rails), error)
        elif route is self.current and (not was_open or route.failed_in_row >= MAX_FAILURES):
            return self._give_up(route, str(error), now)
        return ""

    def stalled(self, now: float, is_given_up: bool) -> list[tuple[Rail, Path]]:
        """Paths that stall while others of this peer move; or that stall at all, if something in flight
        ``is_given_up``, so that its caller gets the memory back."""
        seen: list[tuple[Rail, Path]] = []
        patience = self._patience.at(now)
        for route in self._routes:
            for rail in route.rails:
                if rail.path is not None:
                    rail.watch.saw(rail.path.progress, rail.pace.on_way > 0, now)
                    seen.append((rail, rail.path))
        return [
            (rail, path)
            for rail, path in seen
            if rail.watch.is_stalled(
                [other.watch for other, _ in seen if other is not rail], patience, rail.failures > 0, now
            )
            or (is_given_up and rail.watch.stands_still(GIVEN_UP_S, now))
        ]

    def take_idle_paths(self, rails: Iterable[Rail]) -> list[Path]:
        """The open paths of rails that nobody drives, to be closed."""
        paths: list[Path] = []
        for rail in rails:
            if rail.path is not None and not rail.is_driven:
                paths.append(rail.path)
                rail.path, rail.pace = None, Pace()
        return paths

    def _give_up(self, route: Route, reason: str, now: float) -> str:
        """Do not use this transport for a while; the next one takes over what waits."""
        name = route.transport.name
        route.failures += 1
        route.failed_in_row = 0
        route.avoid_until = now + self._retry_after_s
        self._tried[name] = reason
        untried = [each for each in self._ranked(now) if each.transport.name not in self._tried]
        if untried:
            self.current = untried[0]
            log.warning("%s: %s does not work (%s); using %s", self._node_id, name, reason, self.transport)
            return ""
        reasons = "; ".join(f"{tried}: {why}" for tried, why in self._tried.items())
        self._tried.clear()
        return reasons

    def _ranked(self, now: float) -> list[Route]:
        """In order of preference; those that failed recently come last."""
        if len(self._routes) == 1:
            return self._routes
        return sorted(self._routes, key=lambda route: route.avoid_until > now)


def _route(transport: Transport, address: SegmentAddress) -> Route:
    route = Route(transport)
    route.rails = [Rail(route, index) for index in range(transport.paths_to(address))]
    return route
