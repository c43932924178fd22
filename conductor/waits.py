"""How long it has recently taken until there was room: the wait that a refused request is told.

The queue ahead drains at a known pace and answers end by known lengths, but newcomers take the room first, and under
overload that decides. So nothing is assumed about them: what requests found is kept for a while, and the wait told is
the one that would have been right for this request at most moments of that time. Pure.
"""

from __future__ import annotations

import numpy as np

from conductor.view import Bools, Floats

MAX_RETRY_S = 60  # the longest wait that is told
WINDOW_S = 120  # how long looks are remembered
LOOKS = 4  # per second
SIZE = WINDOW_S * LOOKS
NEAR = 0.35  # fraction of the true wait: an estimate further off is useless
WAITS = np.arange(1, MAX_RETRY_S + 1)  # the waits that can be told


class RecentRoom:
    """A ring of looks. What was found last holds until the next request asks."""

    def __init__(self) -> None:
        self._wait_ms: Floats = np.zeros(SIZE)  # until a new prompt would be computed
        self._decode_load: Floats = np.zeros(SIZE)  # over the limit, with one more sequence
        self._first = self._last = -1  # looks since time 0

    def found(self, wait_ms: float, decode_load: float, now: float) -> None:
        """Called by the request that asks now."""
        look = max(int(now * LOOKS), self._last)
        if look > self._last:
            self._hold_until(look)
        self._wait_ms[look % SIZE] = wait_ms
        self._decode_load[look % SIZE] = decode_load

    def typical_wait_s(self, most_wait_ms: float) -> int:
        """Whole seconds, for a refused request that may wait ``most_wait_ms`` for its prefill. 0: unknown."""
        looks = np.arange(self._last - SIZE + 1, self._last + 1)
        has_room = (self._wait_ms[looks % SIZE] <= most_wait_ms) & (self._decode_load[looks % SIZE] <= 1.0)
        is_refused = ~has_room & (looks >= self._first)
        return _likeliest_s(_shares(has_room.reshape(-1, LOOKS), is_refused.reshape(-1, LOOKS)))

    def _hold_until(self, look: int) -> None:
        if self._last < 0 or look - self._last >= SIZE:
            self._first = look
        between = np.arange(max(self._last + 1, look - SIZE), look) % SIZE
        self._wait_ms[between] = self._wait_ms[self._last % SIZE]
        self._decode_load[between] = self._decode_load[self._last % SIZE]
        self._first, self._last = max(self._first, look - SIZE + 1), look


def _shares(has_room: Bools, is_refused: Bools) -> Floats:
    """[seconds, looks] each. Of requests refused and retried every second: the fraction that waited each number of
    seconds. Waits still running count as far as they are known (the Kaplan-Meier estimate); if most are still
    running, the best guess is that they last as long again."""
    num_seconds = len(has_room)
    seconds = np.arange(num_seconds)[:, None]
    next_room = np.where(has_room, seconds, num_seconds)
    next_room = np.minimum.accumulate(next_room[::-1])[::-1]
    has_ended = next_room < num_seconds
    waited = np.minimum(np.where(has_ended, next_room, num_seconds - 1) - seconds, MAX_RETRY_S)
    ended = np.bincount(waited[is_refused & has_ended], minlength=MAX_RETRY_S + 1)
    still_waiting = np.bincount(waited[is_refused], minlength=MAX_RETRY_S + 1)[::-1].cumsum()[::-1]
    goes_on = np.cumprod(1.0 - ended / np.maximum(still_waiting, 1))
    shares: Floats = -np.diff(goes_on, prepend=1.0)
    shares[waited[is_refused].max(initial=0)] += goes_on[-1]
    return shares


def _likeliest_s(shares: Floats) -> int:
    """The wait that is within tolerance of the most others."""
    use = np.maximum(1.0 - np.abs(WAITS[:, None] / WAITS - 1.0) / NEAR, 0.0) @ shares[1:]
    return int(WAITS[use.argmax()]) if use.any() else 0
