"""Counter-based random numbers: a draw depends on the request's seed and the token's position, and on nothing else.

So an answer is the same alone, in a batch, on another node, and after a preemption. The generator is SplitMix64
(Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), with random access to its sequence.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: U64, positions: U64) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), with 53 random bits.

    Seeds are mixed first: otherwise neighbouring seeds would give the same sequence, shifted.
    """
    bits = splitmix64(_mix(seeds), positions)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def splitmix64(states: U64, places: U64) -> U64:
    """Element ``place`` (from 0) of the sequence that starts at ``state``."""
    return _mix(states + (places + np.uint64(1)) * GAMMA)


def _mix(bits: U64) -> U64:
    bits = (bits ^ (bits >> np.uint64(30))) * MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * MIX_2
    return bits ^ (bits >> np.uint64(31))
