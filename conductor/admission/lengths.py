"""Distribution of answer lengths: decayed histograms by kind of request, conditional on what is already generated.

Pure; the random generator is an argument. Point predictions of chat answers are hardly better than chance, so this
gives a distribution, and admission asks what fits with which probability.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.arrays import Floats

HALF_LIFE = 2000  # requests of a kind after which a sample counts half
MAX_KINDS = 20_000  # with a histogram; beyond that the one unused for longest is forgotten
KNOWN_TURNS = 200_000  # prompts whose answer lengths are remembered for the next turn
TRUST = 30.0  # samples at which a kind's own histogram counts as much as the one it falls back to
STEPS_AN_OCTAVE = 4  # bins of the histograms: each ends a fifth above the one before
NUM_BINS = 20 * STEPS_AN_OCTAVE  # lengths up to 2^20
_UPPER = np.ceil(2.0 ** (np.arange(1, NUM_BINS + 1) / STEPS_AN_OCTAVE))  # the longest answer in each bin


class Kind(NamedTuple):
    """What is known of an answer beforehand. ``root`` names the prompt's first block (usually a system prompt)."""

    root: bytes = b""
    input_tokens: int = 0
    parent_tokens: int = 0  # length of the answer in the conversation's previous turn; 0: none

    def chain(self) -> tuple[tuple[object, ...], ...]:
        """From the most specific class to the one of all requests."""
        size, parent = self.input_tokens.bit_length(), self.parent_tokens.bit_length()
        return (self.root, size, parent), (size, parent), (size,), ()


class _Histogram:
    """New samples weigh more and more instead of old ones less and less: one addition per sample."""

    __slots__ = ("counts", "total", "weight")

    def __init__(self) -> None:
        self.counts: Floats = np.zeros(NUM_BINS)
        self.total = 0.0
        self.weight = 1.0

    def add(self, at: int) -> None:
        self.weight *= 2.0 ** (1.0 / HALF_LIFE)
        self.counts[at] += self.weight
        self.total += self.weight
        if self.weight > 1e9:
            self.counts /= self.weight
            self.total /= self.weight
            self.weight = 1.0

    @property
    def num_samples(self) -> float:
        return self.total / self.weight


class OutputLengths:
    """One owner. Kinds with few samples fall back on broader ones."""

    def __init__(self) -> None:
        self._histograms: OrderedDict[tuple[object, ...], _Histogram] = OrderedDict({(): _Histogram()})

    def observe(self, kind: Kind, tokens: int) -> None:
        """An answer of ``kind`` had this many tokens."""
        at = int(np.searchsorted(_UPPER, max(tokens, 1)))
        for name in kind.chain():
            histogram = self._histograms.get(name)
            if histogram is None:
                histogram = self._histograms[name] = _Histogram()
                if len(self._histograms) > MAX_KINDS:
                    self._forget_one()
            histogram.add(min(at, NUM_BINS - 1))
            self._histograms.move_to_end(name)

    def distribution(self, kind: Kind) -> Floats:
        """Probabilities over length bins; all 0 before the first sample."""
        found: Floats = np.zeros(NUM_BINS)
        for name in reversed(kind.chain()):
            histogram = self._histograms.get(name)
            if histogram is None or not histogram.total:
                continue
            own = histogram.num_samples / (histogram.num_samples + TRUST) if found.any() else 1.0
            found = (1.0 - own) * found + own * histogram.counts / histogram.total
        return found

    def sample(self, kind: Kind, limit: int, count: int, rng: np.random.Generator) -> Floats:
        """``count`` possible lengths of such an answer."""
        return sample_beyond(self.distribution(kind), np.zeros(count), limit, rng)

    def _forget_one(self) -> None:
        """Forget the kind not seen for longest, but never the one of all requests."""
        for name in self._histograms:
            if name:
                del self._histograms[name]
                return


class Turns:
    """Recent answer lengths in conversations, each by its prompt's last full block."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, int] = OrderedDict()

    def kind(self, keys: Sequence[bytes], num_tokens: int) -> Kind:
        """What is known of the answer to a prompt with these blocks."""
        parent = next((self._answers[key] for key in reversed(keys) if key in self._answers), 0)
        return Kind(keys[0] if keys else b"", num_tokens, parent)

    def observe(self, last: bytes, tokens: int) -> None:
        """The prompt ending in block ``last`` was answered with this many tokens."""
        self._answers[last] = tokens
        self._answers.move_to_end(last)
        if len(self._answers) > KNOWN_TURNS:
            self._answers.popitem(last=False)


def sample_beyond(
    distribution: Floats, generated: Floats, limit: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """One length each, above ``generated``; ``limit`` if nothing is known or nothing that long was seen.

    By the inverse of the cumulative distribution, conditional on lengths above ``generated``; linear within a bin.
    """
    edges = np.concatenate(([0.0], _UPPER))
    below = np.concatenate(([0.0], distribution.cumsum()))
    reached = np.interp(generated, edges, below)
    wanted = reached + rng.random(len(generated)) * (below[-1] - reached)
    found = np.interp(wanted, below + np.arange(len(below)) * 1e-15, edges)
    nothing = below[-1] - reached <= 1e-12
    found = np.where(nothing, float(limit), np.maximum(found, generated + 1.0))
    return np.minimum(found, float(limit))
