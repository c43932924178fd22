"""The inputs of sampling on the device: a step's sampling parameters and random numbers, a column per sequence.

Random numbers are made here, on the host, from seed and position. It knows nothing of logits.
"""

from __future__ import annotations

import numpy as np

from mooncake.engine.decoding.randomness import uniforms
from mooncake.engine.decoding.sampler import pack_sampling
from mooncake.engine.sequence import Sequence
from mooncake.model.gpu.device_sampler import Draws

_KEPT = np.dtype([(name, "f8") for name in ("temperature", "top_p", "min_p")] + [("top_k", "i8"), ("seed", "u8")])


class SamplingInputs:
    """Sampling parameters are kept while the same sequences are sampled from."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._kept = np.empty(0, _KEPT)
        self._cut_rows = np.empty(0, np.int64)

    def build(self, sequences: list[Sequence], positions: list[int]) -> Draws | None:
        """``positions`` are those of the tokens to be sampled. None when all sequences are greedy."""
        if sequences != self._sequences:
            self._sequences = sequences
            self._kept = np.frombuffer(
                b"".join(sequence.packed_sampling or pack_sampling(sequence) for sequence in sequences), _KEPT
            )
            is_cut = (self._kept["top_k"] > 0) | (self._kept["top_p"] < 1)
            self._cut_rows = np.flatnonzero(is_cut & (self._kept["temperature"] > 0))
        kept = self._kept
        if not kept["temperature"].any():
            return None
        drawn = uniforms(kept["seed"], np.array(positions, np.uint64))
        return Draws(
            np.stack([kept["temperature"], kept["top_k"], kept["top_p"], kept["min_p"], drawn]), self._cut_rows
        )
