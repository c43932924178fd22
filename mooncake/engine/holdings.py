"""Which sequence holds which blocks: it is given them, shares them, may write into them, and gives them back.

Between the block pool, which knows numbers, and the scheduler, which knows turns. Pure. It must not know who runs next
or who has to give way: where there is no room it says so, and nothing has changed. Copies that bytes need are noted as
pairs (from, to), in order; numbers behind the cache's blocks are places of the swap space.
"""

from __future__ import annotations

from mooncake.engine.block_pool import BlockPool
from mooncake.engine.block_tables import BlockTables
from mooncake.engine.sequence import Sequence
from mooncake.engine.swap import Swapped, SwapSpace

Copies = list[tuple[int, int]]


class Holdings:
    """The block tables of sequences, and what is kept of those that have none for now."""

    def __init__(self, pool: BlockPool, max_sequences: int, max_model_len: int, num_places: int) -> None:
        self.pool = pool
        self.tables = BlockTables(max_sequences, -(-max_model_len // pool.block_tokens))
        self.swap = SwapSpace(pool.num_blocks, num_places)
        self.num_swapped = 0  # blocks that were kept while their sequences were preempted
        self.num_forks = 0  # sequences that began over blocks of another one
        self.num_shared = 0  # full blocks, which they will never copy
        self.num_copies = 0  # of blocks, because someone else would have seen a write
        self._block_tokens = pool.block_tokens

    def num_needed(self, sequence: Sequence) -> int:
        """Blocks of all its tokens."""
        return -(-sequence.num_tokens // self._block_tokens)

    def can_ever_hold(self, sequence: Sequence) -> bool:
        return self.num_needed(sequence) <= min(self.pool.num_blocks, self.tables.ids.shape[1])

    # To have blocks

    def num_usable(self, sequence: Sequence, spare: int) -> int:
        """How many leading blocks need not be computed if they are cached. The last token is, whatever is cached: into
        a copy of its block, if there is room for one beside ``spare`` blocks."""
        sequence.extend_keys(self._block_tokens)
        if sequence.is_scoring:
            return 0
        usable = len(sequence.block_keys)
        if usable * self._block_tokens < sequence.num_tokens or self.pool.match(sequence.block_keys) < usable:
            return usable
        return usable if self._has_room(sequence, usable, spare + 1) else usable - 1

    def num_cached(self, sequence: Sequence, usable: int, spare: int) -> int | None:
        """How many of its first ``usable`` blocks are cached; None when there is no room for the others beside
        ``spare`` blocks."""
        num_cached = self.pool.match(sequence.block_keys[:usable])
        return num_cached if self._has_room(sequence, num_cached, spare) else None

    def give(self, sequence: Sequence, usable: int, spare: int) -> int | None:
        """A table for all its tokens; returns as ``num_cached`` how many of its blocks are filled."""
        num_cached = self.num_cached(sequence, usable, spare)
        if num_cached is None:
            return None
        table = self.pool.take_prefix(sequence.block_keys, num_cached)
        self._enter(sequence, table + self.pool.allocate(self.num_needed(sequence) - num_cached))
        return num_cached

    def share(self, parent: Sequence, child: Sequence) -> None:
        """``child``, whose tokens but the last ``parent`` has computed, gets the blocks of those tokens too."""
        child.num_computed = min(parent.num_computed, child.num_tokens - 1)
        shared = parent.block_table[: -(-child.num_computed // self._block_tokens)]
        num_full = child.num_computed // self._block_tokens
        self.pool.fork(shared)
        self.num_forks += 1
        self.num_shared += num_full
        parent.num_writable = 0
        self._enter(child, list(shared))
        child.block_keys = parent.block_keys[:num_full]
        child.num_sealed = min(parent.num_sealed, num_full)

    # To write into them

    def needs_copy(self, sequence: Sequence, position: int) -> bool:
        """Whether someone else would see a write there."""
        held = sequence.block_table[position // self._block_tokens :]
        return bool(held) and self.pool.needs_copy(held[0])

    def make_writable(self, sequence: Sequence, position: int, copies: Copies) -> bool:
        """See to it that ``position`` can be written: a block is there, and nobody else would see the write.

        False when that takes a block and there is none.
        """
        index = position // self._block_tokens
        table = sequence.block_table
        is_new = index == len(table)
        if is_new or self.pool.needs_copy(table[index]):
            if self.pool.num_available == 0:
                return False
            [block_id] = self.pool.allocate(1)
            if is_new:
                table.append(block_id)
            else:
                copies.append((table[index], block_id))
                self.num_copies += 1
                self.pool.release([table[index]])
                table[index] = block_id
            self.tables.put(sequence.row, index, block_id)
        sequence.num_writable = (index + 1) * self._block_tokens
        return True

    # To have them no longer

    def roll_back(self, sequence: Sequence) -> None:
        """Take blocks back that only wrong guesses needed."""
        needed = -(-sequence.num_computed // self._block_tokens)
        if needed < len(sequence.block_table):
            self.pool.release(sequence.block_table[needed:])
            del sequence.block_table[needed:]
            sequence.num_writable = 0

    def take_row(self, sequence: Sequence) -> None:
        """It is in no step any more, but may keep its blocks. Idempotent."""
        if sequence.row >= 0:
            self.tables.leave(sequence.row)
            sequence.row = -1

    def take_back(self, sequence: Sequence) -> None:
        """All that it holds but what is swapped out. Idempotent."""
        self.take_row(sequence)
        table, sequence.block_table = sequence.block_table, []
        self.pool.release(table)

    # To have them later

    def swap_out(self, victim: Sequence, copies: Copies) -> None:
        """Keep what it has computed, if there is room and copying is cheaper than computing it again."""
        filled = victim.block_table[: -(-victim.num_computed // self._block_tokens)]
        places = self.swap.take(len(filled), victim.num_computed) if filled and not victim.is_loading else []
        if places:
            victim.swapped = Swapped(places, victim.num_computed)
            self.num_swapped += len(places)
            copies += zip(filled, places, strict=True)

    def swap_in(self, sequence: Sequence, copies: Copies) -> None:
        """Back into its new blocks, but for those that were found in the cache."""
        if sequence.swapped is not None:
            first = sequence.num_sealed
            copies += zip(sequence.swapped.places[first:], sequence.block_table[first:], strict=False)
            self.forget_swapped(sequence)

    def forget_swapped(self, sequence: Sequence) -> None:
        """Idempotent."""
        if sequence.swapped is not None:
            self.swap.give_back(sequence.swapped.places)
            sequence.swapped = None

    # Parts of these

    def _has_room(self, sequence: Sequence, num_cached: int, spare: int) -> bool:
        left = self.pool.num_available - (self.num_needed(sequence) - num_cached) - spare
        if left < num_cached:  # those that nobody holds are part of what is available
            left -= self.pool.num_idle(sequence.block_keys[:num_cached])
        return left >= 0

    def _enter(self, sequence: Sequence, table: list[int]) -> None:
        sequence.block_table = table
        sequence.num_writable = 0
        sequence.row = self.tables.enter(table)
