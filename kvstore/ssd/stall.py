"""Notices that a disk has come to a halt, or is so slow that whoever waits for it cannot tell the difference.

Pure: it counts looks, not seconds, so that a process that was itself not running blames no disk. It knows neither what
is done at the disk, nor what follows from a halt.
"""

from __future__ import annotations

STALL_S = 5.0  # without progress, while something waits for it
LOOKS = 20  # in that time
RECHECK_S = 0.25  # until those who wait for the disk ask again whether it stands still


class Stall:
    """Of one kind of work. ``moved`` when something has been done, ``look`` at regular intervals."""

    def __init__(self) -> None:
        self._looks = 0
        self.lasts = False  # it has stood still, and what waited is not done: a little progress is not enough

    @property
    def holds(self) -> bool:
        """Whether nothing has moved for a while that should."""
        return self._looks >= LOOKS

    @property
    def share(self) -> float:
        """Of the time that makes a halt: how much has passed without progress."""
        return self._looks / LOOKS

    def moved(self) -> None:
        self._looks = 0

    def look(self, is_busy: bool) -> None:
        self._looks = self._looks + 1 if is_busy else 0
        self.lasts = is_busy and (self.lasts or self.holds)

    def forget(self) -> None:
        self._looks, self.lasts = 0, False
