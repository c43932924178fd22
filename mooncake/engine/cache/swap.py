"""The swap space: places in host memory for blocks of preempted sequences, and whether to swap or to recompute them.

Pure bookkeeping: places are numbered after the cache's blocks, so that a copy between two numbers is all the memory
needs to support. It learns what copies and computing cost here; it knows neither clocks nor sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.9  # of earlier measurements, at each new one


@dataclass(frozen=True, slots=True)
class Swapped:
    """Where a swapped-out sequence's pages are."""

    places: list[int]
    spans: list[range]  # per group of layers, which blocks they belong to
    num_tokens: int  # that they hold the KV of


class SwapSpace:
    """``num_places`` places, numbered ``first``, ``first + 1``, …"""

    def __init__(self, first: int, num_places: int) -> None:
        self.num_places = num_places
        self._free = list(range(first + num_places - 1, first - 1, -1))
        self._copy_ms = 0.0  # per block, one way; 0 until measured
        self._compute_ms = 0.0  # per prompt token, likewise

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int, num_tokens: int) -> list[int]:
        """Places for the blocks of this many computed tokens; none when there is no room, or it does not pay."""
        if num_blocks > len(self._free) or not self._pays(num_blocks, num_tokens):
            return []
        return [self._free.pop() for _ in range(num_blocks)]

    def free(self, places: list[int]) -> None:
        self._free.extend(reversed(places))

    def note_copies(self, num_blocks: int, elapsed_ms: float) -> None:
        self._copy_ms = _blend(self._copy_ms, elapsed_ms / num_blocks)

    def note_prompt(self, num_tokens: int, elapsed_ms: float) -> None:
        """A step that computed this many tokens, mostly of prompts."""
        self._compute_ms = _blend(self._compute_ms, elapsed_ms / num_tokens)

    def _pays(self, num_blocks: int, num_tokens: int) -> bool:
        """Copying out and back against recomputing. What has not been measured is tried, to be measured."""
        if not (self._copy_ms and self._compute_ms):
            return True
        return 2 * num_blocks * self._copy_ms < num_tokens * self._compute_ms


def _blend(known: float, new: float) -> float:
    return DECAY * known + (1 - DECAY) * new if known else new
