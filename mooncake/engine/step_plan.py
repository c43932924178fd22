"""What the scheduler decides for one step. Only types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake.engine.sequence import Sequence
from mooncake.errors import MooncakeError
from mooncake.pooling import Pooling
from mooncake.types import BlockKey


class StepEntry(NamedTuple):
    """The tokens ``first ≤ i < first + num_tokens`` of a sequence are computed in this step.

    The last ``num_draft`` of them are draft tokens, which may be wrong. (A tuple, because there is one per sequence and
    step, and loops unpack it.)
    """

    sequence: Sequence
    first: int
    num_tokens: int
    num_draft: int = 0

    @property
    def end(self) -> int:
        return self.first + self.num_tokens

    @property
    def scored(self) -> range:
        """Prompt positions whose logits are wanted too, for the log-probability of the prompt's next token."""
        if not self.sequence.is_scoring:
            return range(0)
        return range(self.first, min(self.end, self.sequence.num_prompt - 1))

    @property
    def pooled(self) -> range:
        """Positions whose hidden states are wanted, for a sequence's embedding."""
        if self.sequence.pooling is None:
            return range(0)
        return range(self.first if self.sequence.pooling is Pooling.MEAN else self.sequence.num_tokens - 1, self.end)


@dataclass(frozen=True, slots=True)
class BlockToLoad:
    """A page of an admitted sequence that is to be filled from elsewhere."""

    index: int  # of the block in the sequence, or in what is leased for it
    block_id: int  # in the cache
    key: BlockKey
    group: int = 0  # of layers


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence got its blocks; those ``to_load`` are to be filled from elsewhere, and ``copies`` (from, to) made."""

    sequence: Sequence
    to_load: list[BlockToLoad]
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """One step; in ``entries`` decodes come first. ``copies`` of blocks (from, to) are made before anything else, in
    order; numbers above the cache's blocks are places of the swap space. Tokens of ``variant_entries`` have another
    model's KV: before the others, they are computed in some layers only."""

    entries: list[StepEntry] = field(default_factory=list)
    variant_entries: list[StepEntry] = field(default_factory=list)
    has_preempted: bool = False
    admissions: list[Admission] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    failures: list[tuple[Sequence, MooncakeError]] = field(default_factory=list)
    num_scored: int = 0  # prompt tokens whose logits are wanted too
