"""KV that a sequence reuses beside its engine's own prefix cache: loaded, blended, or of another model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake.engine.blend import Blend
    from mooncake.engine.hidden_states import HiddenStates
    from mooncake.types import BlockKey


@dataclass(slots=True, eq=False)
class ReusedKV:
    """Where the KV of a sequence's tokens comes from, and how much of it is exact.

    KV is exact if it is what the model would have computed from the tokens before it; only then may others find it by
    its key.
    """

    external_blocks: int = 0  # leading blocks that can be loaded at admission
    variant_blocks: int = 0  # leading blocks of which another variant of the model has KV, where ours is missing
    variant_tokens: range = field(default=range(0), init=False)  # those computed in some layers only
    hidden_states: HiddenStates | None = field(default=None, init=False)  # the input of those layers; None: embeddings
    blend: Blend | None = field(default=None, init=False)  # KV blended from chunks of its prompt
    copied_from: BlockKey | None = field(default=None, init=False)  # the block of which it began with a copy
    num_exact: int | None = field(default=None, init=False)  # leading tokens with exact KV; None: all

    def limit_exact(self, num_exact: int) -> None:
        """Tokens from this one on are not exact. The limit never rises, because KV computed from them is not either."""
        self.num_exact = num_exact if self.num_exact is None else min(num_exact, self.num_exact)
