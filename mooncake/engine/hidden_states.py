"""Hidden states of another model, from which layers are computed of tokens that reuse that model's KV in all others.

Pure bookkeeping: it knows neither keys, the pool nor how the states got here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mooncake.engine.step_plan import StepEntry


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of a sequence's tokens from ``first`` on: ``blocks`` [N, block_tokens, hidden], valid when a
    step needs them."""

    first: int
    blocks: torch.Tensor

    def slice(self, first: int, end: int) -> torch.Tensor:
        """Float32 ``[end - first, hidden]`` of the sequence's tokens ``first ≤ i < end``, a copy."""
        places = torch.arange(first - self.first, end - self.first)
        block_tokens = self.blocks.shape[1]
        return self.blocks[places // block_tokens, places % block_tokens].float()


def hidden_states_of(entries: Sequence[StepEntry]) -> torch.Tensor | None:
    """Those of a step's ``variant_entries``, in the order of its batch; None if their layers begin with the
    embeddings."""
    given = [(entry.sequence.reused.hidden_states, entry) for entry in entries]
    parts = [hidden.slice(entry.first, entry.end) for hidden, entry in given if hidden is not None]
    return torch.cat(parts) if parts else None
