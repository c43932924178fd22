"""How long answers become: decayed histograms of what was seen, by kind of request, and conditional on what is there.

Pure; what is random comes from a generator that is given. Point predictions of chat answers are hardly better than
chance, so nothing here promises a length: it gives a distribution, and admission asks what fits with which likelihood.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.view import Floats

HALF_LIFE = 2000  # requests of a kind after which a sample counts half
MAX_KINDS = 20_000
KNOWN_TURNS = 200_000  # prompts whose answers' lengths are remembered for the next turn
TRUST = 30.0  # samples of its own that a kind needs to count as much as what it falls back to
STEPS_AN_OCTAVE = 4
NUM_BINS = 20 * STEPS_AN_OCTAVE  # lengths up to 2^20
_UPPER = np.ceil(2.0 ** (np.arange(1, NUM_BINS + 1) / STEPS_AN_OCTAVE))  # the longest answer of each bin
_LOWER = np.concatenate(([0.0], _UPPER[:-1]))  # below the shortest


class Kind(NamedTuple):
    """What is known of an answer before it begins. ``root`` names the prompt's first block (a system prompt mostly)."""

    root: bytes = b""
    input_tokens: int = 0
    parent_tokens: int = 0  # answer of the conversation's last turn; 0: none

    def chain(self) -> tuple[tuple[object, ...], ...]:
        """From the most specific class to the one of all."""
        size, parent = self.input_tokens.bit_length(), self.parent_tokens.bit_length()
        return (self.root, size, parent), (size, parent), (size,), ()


class _Histogram:
    """Samples weigh more and more instead of old ones less and less: one addition a sample."""

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
    """One owner. Kinds that were seen rarely lean on broader ones."""

    def __init__(self) -> None:
        self._histograms: OrderedDict[tuple[object, ...], _Histogram] = OrderedDict({(): _Histogram()})

    def observe(self, kind: Kind, tokens: int) -> None:
        """An answer of ``kind`` had so many tokens."""
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
        """Probabilities over bins of lengths; all 0 before the first sample."""
        found: Floats = np.zeros(NUM_BINS)
        for name in reversed(kind.chain()):
            histogram = self._histograms.get(name)
            if histogram is None or not histogram.total:
                continue
            own = histogram.num_samples / (histogram.num_samples + TRUST) if found.any() else 1.0
            found = (1.0 - own) * found + own * histogram.counts / histogram.total
        return found

    def mean(self, kind: Kind, limit: int) -> float:
        """Expected tokens; ``limit`` when nothing is known."""
        share = self.distribution(kind)
        return float(share @ np.minimum((_LOWER + _UPPER) / 2, limit)) if share.any() else float(limit)

    def sample(self, kind: Kind, limit: int, count: int, rng: np.random.Generator, generated: int = 0) -> Floats:
        """``count`` lengths that such an answer may get, given that it has ``generated`` tokens and goes on."""
        return sample_beyond(self.distribution(kind), np.full(count, float(generated)), limit, rng)

    def quantile(self, kind: Kind, share: float, limit: int, generated: int = 0) -> float:
        """The length that ``share`` of such answers do not exceed."""
        return float(_inverse(self.distribution(kind), np.array([share]), np.array([float(generated)]), limit)[0])

    def _forget_one(self) -> None:
        """The kind that was not seen for longest; never the one of all."""
        for name in self._histograms:
            if name:
                del self._histograms[name]
                return


class Turns:
    """How long the answers were that conversations got lately, each by its prompt's last full block."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, int] = OrderedDict()

    def kind(self, keys: Sequence[bytes], num_tokens: int) -> Kind:
        """What is known of the answer to a prompt of these blocks."""
        parent = next((self._answers[key] for key in reversed(keys) if key in self._answers), 0)
        return Kind(keys[0] if keys else b"", num_tokens, parent)

    def observe(self, last: bytes, tokens: int) -> None:
        """The prompt that ends in block ``last`` got so many tokens."""
        self._answers[last] = tokens
        self._answers.move_to_end(last)
        if len(self._answers) > KNOWN_TURNS:
            self._answers.popitem(last=False)


def sample_beyond(
    distribution: Floats, generated: Floats, limit: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """One length each, above ``generated``; ``limit`` where nothing is known or nothing so long was seen."""
    return _inverse(distribution, rng.random(len(generated)), generated, limit)


def _inverse(distribution: Floats, share: Floats, generated: Floats, limit: int) -> Floats:
    """Inverse of the distribution given that lengths exceed ``generated``; straight inside a bin."""
    edges = np.concatenate(([0.0], _UPPER))
    below = np.concatenate(([0.0], distribution.cumsum()))
    reached = np.interp(generated, edges, below)
    wanted = reached + share * (below[-1] - reached)
    found = np.interp(wanted, below + np.arange(len(below)) * 1e-15, edges)
    nothing = below[-1] - reached <= 1e-12
    found = np.where(nothing, float(limit), np.maximum(found, generated + 1.0))
    return np.minimum(found, float(limit))
