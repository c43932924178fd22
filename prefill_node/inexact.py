"""KV of one prompt that is not exact: blended from chunks, or inherited from a variant of the model.

Each is given to the prompt's sequence whenever that is admitted, on the engine's thread, and says which leading tokens
stay exact: what follows them is neither shared nor stored. How chunks are found is in ``chunks``, how a variant's KV is
found and read in ``inherit``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows

from mooncake.engine.sequence import Sequence
from prefill_node.chunks import Chunk, ChunkDesk
from prefill_node.deadline import Deadline
from prefill_node.inherit import Inheritance
from prefill_node.leases import Leases
from prefill_node.streamer import Stream
from prefill_node.workshop import Workshop


class BlendedPrompt:
    """The chunks of one prompt, and the blocks held for them between ``admitted`` and ``let_go``."""

    def __init__(self, shop: Workshop, desk: ChunkDesk, chunks: Rows[Chunk]) -> None:
        self._pool = shop.host.engine.block_pool
        self._desk = desk
        self._chunks = chunks
        self._held: list[int] = []  # blocks, each with one reference of ours
        self.num_tokens = 0
        self.num_exact: int | None = None

    def admitted(self, sequence: Sequence) -> None:
        """Take the chunks' blocks. Not before: a waiting request holds nothing."""
        self.let_go()
        blend, self._held = self._desk.take(self._pool, self._chunks, sequence.num_computed)
        self.num_tokens = blend.num_tokens if blend else 0
        reused = sequence.reused
        reused.blend = blend
        if blend is not None:
            reused.limit_exact(blend.first)
        self.num_exact = reused.num_exact

    def let_go(self) -> None:
        """Idempotent."""
        held, self._held = self._held, []
        self._pool.release(held)


class InheritedPrompt:
    """A variant's KV of one prompt, loaded anew whenever the sequence is admitted."""

    def __init__(self, shop: Workshop, found: Inheritance, leases: Leases, deadline: Deadline) -> None:
        self._shop = shop
        self._found = found
        self._leases = leases
        self._deadline = deadline
        self.num_tokens = 0
        self.num_exact: int | None = None

    @property
    def end(self) -> int:
        """Blocks up to here can be inherited."""
        return self._found.end

    def admitted(self, stream: Stream, sequence: Sequence) -> None:
        reused = sequence.reused
        stream.inherited, reused.hidden_states = None, None
        if self.num_tokens:  # the first load failed
            self._shop.host.counters["prompts_not_inherited"] += 1
        self.num_tokens = len(reused.variant_tokens)
        if reused.variant_tokens:
            deadline = min(self._deadline.at_s, time.monotonic() + self._shop.host.config.store.lease_s)
            stream.inherited = self._found.load(sequence, self._leases.take, self._leases.end, deadline)
            self.num_exact = reused.num_exact
            self._shop.loader.submit(stream.inherited)
