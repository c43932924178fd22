"""Estimate of the retry time (``Retry-After``) of a refused request, from how long requests had to wait recently.

The queue ahead drains at a known pace and answers end by known lengths, but newcomers take the room first, and under
overload that decides. So nothing is assumed about them: queue and decode load are sampled for two minutes, and the
estimate is the wait that would have been right for this request at most moments of that time. Pure.
"""

from __future__ import annotations

import numpy as np

from conductor.arrays import Bools, Floats

MAX_RETRY_S = 60  # the longest retry time that is given
WINDOW_S = 120  # how long samples are kept
SAMPLES_PER_S = 4
SIZE = WINDOW_S * SAMPLES_PER_S
TOLERANCE = 0.35  # fraction of the true wait: an estimate further off is useless
WAITS_S = np.arange(1, MAX_RETRY_S + 1)  # the retry times that can be given


class RetryAfterEstimator:
    """A ring of samples. Each holds until the next request is observed."""

    def __init__(self) -> None:
        self._wait_ms: Floats = np.zeros(SIZE)  # until a new prompt would be computed
        self._decode_load: Floats = np.zeros(SIZE)  # over the limit, with one more sequence
        self._first = self._last = -1  # sample numbers, counted from time 0

    def observe(self, wait_ms: float, decode_load: float, now: float) -> None:
        """What a request that arrives now has found."""
        sample = max(int(now * SAMPLES_PER_S), self._last)
        if sample > self._last:
            self._advance_to(sample)
        self._wait_ms[sample % SIZE] = wait_ms
        self._decode_load[sample % SIZE] = decode_load

    def estimate_s(self, max_wait_ms: float) -> int:
        """Whole seconds, for a refused request whose prefill may wait ``max_wait_ms``. 0: unknown."""
        samples = np.arange(self._last - SIZE + 1, self._last + 1)
        has_room = (self._wait_ms[samples % SIZE] <= max_wait_ms) & (self._decode_load[samples % SIZE] <= 1.0)
        is_refused = ~has_room & (samples >= self._first)
        return _likeliest_s(_shares(has_room.reshape(-1, SAMPLES_PER_S), is_refused.reshape(-1, SAMPLES_PER_S)))

    def _advance_to(self, sample: int) -> None:
        """Repeat the last observation up to just before ``sample``."""
        if self._last < 0 or sample - self._last >= SIZE:
            self._first = sample
        between = np.arange(max(self._last + 1, sample - SIZE), sample) % SIZE
        self._wait_ms[between] = self._wait_ms[self._last % SIZE]
        self._decode_load[between] = self._decode_load[self._last % SIZE]
        self._first, self._last = max(self._first, sample - SIZE + 1), sample


def _shares(has_room: Bools, is_refused: Bools) -> Floats:
    """[seconds, samples] each. Of requests refused and retried every second: the fraction that waited each number of
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
    survival = np.cumprod(1.0 - ended / np.maximum(still_waiting, 1))
    shares: Floats = -np.diff(survival, prepend=1.0)
    shares[waited[is_refused].max(initial=0)] += survival[-1]
    return shares


def _likeliest_s(shares: Floats) -> int:
    """The wait that is within tolerance of the most others."""
    score = np.maximum(1.0 - np.abs(WAITS_S[:, None] / WAITS_S - 1.0) / TOLERANCE, 0.0) @ shares[1:]
    return int(WAITS_S[score.argmax()]) if score.any() else 0
