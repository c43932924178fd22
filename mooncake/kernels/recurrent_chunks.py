"""Which runs of a step (``recurrent.Runs``) go in chunks of tokens, for kernels that multiply matrices.

It is decided on the host, where steps are made, and knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mooncake.kernels.recurrent import NO_PAGE, Chunks, Runs

CHUNK_TOKENS = 32
FEW_TOKENS = 8  # go token by token: about as long as a chunk takes, however full it is


def in_chunks(runs: Runs, move: Callable[[torch.Tensor], torch.Tensor]) -> Runs:
    """Runs that are on the host, moved to a device, with their chunks."""
    chunks = _chunks_of(runs)
    moved = (move(part) for part in (runs.starts, runs.sources, runs.targets))
    return Runs(*moved, chunks=chunks and Chunks(move(chunks.chains), chunks.num_few, move(chunks.spans)))


def _chunks_of(runs: Runs) -> Chunks | None:
    """None where each has one token, as in decode steps. A chunk has tokens of one run."""
    starts, sources, targets = (part.numpy() for part in (runs.starts, runs.sources, runs.targets))
    sizes = np.diff(starts)
    if not (sizes > 1).any():
        return None
    begins = np.ones(len(sizes), bool)
    begins[1:] = (sources[1:] == NO_PAGE) | (sources[1:] != targets[:-1])
    chains, chain_of = np.flatnonzero(begins), np.cumsum(begins) - 1
    is_few = np.bincount(chain_of, sizes) <= FEW_TOKENS
    counts = np.where(is_few[chain_of], 0, -(-sizes // CHUNK_TOKENS))
    owners = np.repeat(np.arange(len(sizes)), counts)
    firsts = starts[owners] + (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK_TOKENS
    ends = np.minimum(firsts + CHUNK_TOKENS, starts[owners + 1])
    of_chain = chains[chain_of[owners]]
    spans = np.stack([firsts, ends, starts[of_chain], sources[of_chain]], axis=1)
    ordered = chains[np.argsort(~is_few, kind="stable")]
    return Chunks(torch.from_numpy(ordered), int(is_few.sum()), torch.from_numpy(spans))
