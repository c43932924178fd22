"""The blocks of all sequences in one cache: allocated, shared, copied on write, swapped and freed.

It sits between the block pool, which counts references, and the scheduler, which knows whose turn it is. Pure: it
decides neither who runs nor who is preempted; if there is no room it says so, and nothing has changed. Copies of blocks
that must be made are appended as pairs (from, to), in order; numbers above the cache's blocks are places of the swap
space.

A block is one page per group of layers (``page_groups``), and each group has its own table. A group with a sliding
window has pages for the window and for what the next step can write; it moves on page by page, freeing as many as it
allocates, so a prompt that has started does not run out of them. The exception: a page that it frees is still shared
with another sequence. The sequence admitted last shares none, so it can advance, and then the others. In the table of
such a group, entries before ``first_held`` are not pages any more.

Whole blocks are shared. A sequence that parts from what is cached within a block, or continues one whose last block was
not full, starts with a copy of that block, and computes from the token that differs on.
"""

from __future__ import annotations

from mooncake.engine.cache.block_contents import BlockContents
from mooncake.engine.cache.block_pool import BlockPool
from mooncake.engine.cache.block_tables import BlockTables
from mooncake.engine.cache.sequence_blocks import NEVER, SequenceBlocks
from mooncake.engine.cache.swap import Swapped, SwapSpace
from mooncake.engine.sequence import Sequence
from mooncake.hashing import extend_chain
from mooncake.page_groups import PageGroups, page_key
from mooncake.types import BlockKey

Copies = list[tuple[int, int]]

LEAST_COPIED = 8  # one token in this many of a block must agree: fewer hardly lengthen a step that waits for weights

_NO_PAGE = -1


class BlockManager:
    """Block tables of sequences, and the swap space of preempted ones."""

    def __init__(
        self,
        pool: BlockPool,
        max_sequences: int,
        max_model_len: int,
        num_places: int,
        groups: PageGroups,
        max_step_tokens: int,
        shares_parts: bool,
    ) -> None:
        """``max_step_tokens``: maximum tokens of one sequence in a step; ``shares_parts``: whether sequences share the
        beginnings of blocks. (Those with states never do: states are kept at the ends of blocks.)"""
        self.pool = pool
        self.groups = groups
        self.tables = BlockTables(max_sequences, -(-max_model_len // pool.block_tokens), groups.num_groups)
        self.swap = SwapSpace(pool.num_blocks, num_places)
        self.num_swapped = 0  # blocks swapped out
        self.num_forks = 0  # sequences that started with blocks of another one
        self.num_shared = 0  # full blocks, which forks never copy
        self.num_copies = 0  # on write, of blocks that others see
        self._block_tokens = pool.block_tokens
        self._max_step_tokens = max_step_tokens
        self._windowed = [group for group, window in enumerate(groups.windows) if window]
        self._least_copied = max(pool.block_tokens // LEAST_COPIED, 1)
        self._shares_parts = shares_parts and not groups.has_states
        self._contents = BlockContents()
        pool.on_forgotten = self._contents.remove

    def num_needed(self, sequence: Sequence) -> int:
        """The fewest pages with which it can be computed."""
        return self.groups.num_needed(self._num_blocks(sequence), self._max_step_tokens, self._block_tokens)

    def fits_at_all(self, sequence: Sequence) -> bool:
        has_columns = self._num_blocks(sequence) <= self.tables.ids.shape[1]
        return has_columns and self.num_needed(sequence) <= self.pool.num_blocks

    # Allocation

    def match(self, keys: list[BlockKey]) -> int:
        """Length of the longest leading run of blocks after which a sequence can continue: groups that see
        everything need all of it, those with a window its last blocks."""
        count = len(keys)
        for group, window in enumerate(self.groups.windows):
            if not window:
                count = self.pool.match([page_key(key, group) for key in keys[:count]] if group else keys[:count])
        if not self._windowed:
            return count
        return self.groups.border(count, lambda g, i: self.pool.has(page_key(keys[i], g)), self._block_tokens)

    def num_reusable(self, sequence: Sequence, spare: int) -> int:
        """How many of its leading blocks could be reused if they were cached.

        The last token is always computed, for its logits: if all blocks are cached, into a copy of the last one, if
        there is room for that beside ``spare`` blocks.
        """
        sequence.extend_keys(self._block_tokens)
        if sequence.computes_all:
            return 0
        usable = len(sequence.block_keys)
        if self.groups.has_states:  # the last token cannot be computed again
            return min(usable, (sequence.num_tokens - 1) // self._block_tokens)
        if usable * self._block_tokens < sequence.num_tokens or self.match(sequence.block_keys) < usable:
            return usable
        spans = self._spans(sequence, usable, sequence.num_tokens - 1)
        return usable if self._has_room(sequence, usable, spans, spare + self.groups.num_groups) else usable - 1

    def num_ready(self, sequence: Sequence, num_cached: int, usable: int) -> int:
        """Tokens that it need not compute once it has its blocks, of which ``num_cached`` are cached and ``usable``
        may be loaded from elsewhere."""
        if sequence.swapped is not None:
            ready = max(num_cached * self._block_tokens, sequence.swapped.num_tokens)
        else:
            ready = max(num_cached, min(sequence.reused.external_blocks, usable)) * self._block_tokens
        return min(ready, sequence.num_tokens - 1)

    def can_allocate(self, sequence: Sequence, usable: int, spare: int) -> bool:
        """Whether ``allocate`` has room."""
        return self._plan(sequence, usable, spare) is not None

    def allocate(self, sequence: Sequence, usable: int, spare: int, num_ready: int | None = None) -> int | None:
        """Give it block tables for all its tokens. Returns how many of its first ``usable`` blocks are cached; None,
        having changed nothing, when there is no room for the others beside ``spare`` blocks. ``num_ready``: tokens it
        will not compute, whatever is cached."""
        plan = self._plan(sequence, usable, spare, num_ready)
        if plan is None:
            return None
        num_cached, spans = plan
        tables = []
        for group, span in enumerate(spans):  # take all cached ones first: allocating evicts
            keys = self._keys(sequence, group, span, num_cached)
            tables.append([_NO_PAGE] * span.start + self.pool.take_prefix(keys, len(keys)))
        for table, span in zip(tables, spans, strict=True):
            table += self.pool.allocate(span.stop - len(table))
        self._attach(sequence, SequenceBlocks(tables, [span.start for span in spans], num_sealed=num_cached))
        return num_cached

    def copy_part(self, sequence: Sequence, copies: Copies) -> int:
        """After ``allocate``: let its first block that is not cached start as a copy of the cached one that agrees with
        most of its leading tokens. Returns with how many; 0: with too few, and nothing is copied."""
        if not self._shares_parts:
            return 0
        index = sequence.blocks.num_sealed
        begin = index * self._block_tokens
        end = min(begin + self._block_tokens, sequence.num_tokens - 1)
        parent = sequence.chain.parent(sequence.block_keys, index, self._block_tokens)
        key, count = self._contents.longest(parent, sequence.token_slice(begin, max(begin, end)))
        if key is None or count < self._least_copied:
            return 0
        page_keys = [page_key(key, group) for group in range(self.groups.num_groups)]
        if not all(map(self.pool.has, page_keys)):
            return 0
        for found, table in zip(page_keys, sequence.blocks.tables, strict=True):
            self.pool.touch(found)
            copies.append((self.pool.find(found), table[index]))
        sequence.reused.copied_from = key
        return count

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child`` shares the blocks of all its tokens but the last, which ``parent`` has computed."""
        child.num_computed = min(parent.num_computed, child.num_tokens - 1)
        shared = parent.blocks
        tables = [table[: -(-child.num_computed // self._block_tokens)] for table in shared.tables]
        num_full = child.num_computed // self._block_tokens
        for table, first in zip(tables, shared.first_held, strict=True):
            self.pool.retain(table[first:])
            self.num_shared += max(num_full - first, 0)
        self.num_forks += 1
        shared.num_writable = 0
        child.block_keys = parent.block_keys[:num_full]
        num_sealed = min(shared.num_sealed, num_full)
        self._attach(child, SequenceBlocks(tables, list(shared.first_held), num_sealed=num_sealed))

    # Writing

    def needs_copy(self, sequence: Sequence, position: int) -> bool:
        """Whether a write there would be visible to others."""
        index = position // self._block_tokens
        return any(self.pool.needs_copy(page) for table in sequence.blocks.tables for page in table[index : index + 1])

    def make_writable(self, sequence: Sequence, position: int, copies: Copies) -> bool:
        """Give it a block at ``position`` that nobody else sees: a new one, or a copy of a shared one.

        False when there are too few pages for that.
        """
        index = position // self._block_tokens
        blocks, needs_copy = sequence.blocks, self.pool.needs_copy
        lacking = [g for g, table in enumerate(blocks.tables) if index == len(table) or needs_copy(table[index])]
        if len(lacking) > self.pool.num_available:
            return False
        for group, page in zip(lacking, self.pool.allocate(len(lacking)), strict=True):
            table = blocks.tables[group]
            if index == len(table):
                table.append(page)
            else:
                copies.append((table[index], page))
                self.num_copies += 1
                self.pool.release([table[index]])
                table[index] = page
            self.tables.set_block(blocks.row, index, page, group)
        blocks.num_writable = (index + 1) * self._block_tokens
        return True

    def seal_full(self, sequence: Sequence) -> None:
        """Let others share its computed blocks that are full now, under their keys."""
        end = sequence.num_shareable // self._block_tokens
        if end <= sequence.blocks.num_sealed:
            return
        sequence.extend_keys(self._block_tokens)
        keys, blocks = sequence.block_keys, sequence.blocks
        for group, table in enumerate(blocks.tables):
            begin = max(blocks.num_sealed, blocks.first_held[group])
            if group == 0:
                self.pool.seal(table, keys, begin, end)
            else:
                self.pool.seal_alone(table[begin:end], [page_key(key, group) for key in keys[begin:end]])
        if self._shares_parts:
            self._note_contents(sequence, blocks.num_sealed, end)
        blocks.num_sealed = end

    def seal_part(self, sequence: Sequence) -> None:
        """It ends: let others copy its last computed block, if that is not full."""
        blocks, num_computed = sequence.blocks, sequence.num_computed
        index, count = divmod(num_computed, self._block_tokens)
        is_exact = sequence.num_shareable == num_computed and not blocks.is_loading and sequence.failure is None
        is_useful = self._shares_parts and count >= self._least_copied
        if not is_exact or not is_useful or index != blocks.num_sealed:
            return
        pages = [table[index] for table in blocks.tables]
        if not all(map(self.pool.is_private, pages)):
            return
        sequence.extend_keys(self._block_tokens)
        parent = sequence.chain.parent(sequence.block_keys, index, self._block_tokens)
        tokens = sequence.token_slice(index * self._block_tokens, num_computed)
        if self._contents.longest(parent, tokens)[1] < count:
            [key] = extend_chain(parent, tokens, count)
            self.pool.seal_alone(pages, [page_key(key, group) for group in range(len(pages))])
            self._contents.add(parent, tokens, key)

    def free_out_of_window(self, sequence: Sequence) -> None:
        """Free pages that no later token sees, and allocate as many new ones while the prompt needs some."""
        blocks = sequence.blocks
        for group in self._windowed:
            table, first = blocks.tables[group], blocks.first_held[group]
            last_seen_from = min(sequence.num_computed - 1, sequence.keep_window_of)
            last = self.groups.first_page(group, last_seen_from, self._block_tokens)
            if last > first:
                freed, table[first:last] = table[first:last], [_NO_PAGE] * (last - first)
                blocks.first_held[group] = last
                self.pool.release(freed)
                self._extend(sequence, group, min(len(table) + len(freed), self._num_blocks(sequence)))
        self._update_window(blocks)

    def extend_to(self, sequence: Sequence, end: int) -> int:
        """Allocate pages for its tokens before ``end``. Returns where they stop if there are too few."""
        for group in self._windowed:
            self._extend(sequence, group, -(-end // self._block_tokens))
            end = min(end, len(sequence.blocks.tables[group]) * self._block_tokens)
        return end

    # Freeing

    def free_rejected(self, sequence: Sequence) -> None:
        """Free blocks that only rejected draft tokens needed."""
        needed = -(-sequence.num_computed // self._block_tokens)
        for table in sequence.blocks.tables:
            if needed < len(table):
                self.pool.release(table[needed:])
                del table[needed:]
                sequence.blocks.num_writable = 0

    def free_row(self, sequence: Sequence) -> None:
        """It is in no step any more, but keeps its blocks. Idempotent."""
        blocks = sequence.blocks
        if blocks.row >= 0:
            self.tables.free_row(blocks.row)
            blocks.row = -1

    def free(self, sequence: Sequence) -> None:
        """Free its blocks, except those swapped out. Idempotent."""
        self.free_row(sequence)
        blocks, sequence.blocks = sequence.blocks, SequenceBlocks()
        for table, first in zip(blocks.tables, blocks.first_held, strict=True):
            self.pool.release(table[first:])

    def discard(self, sequence: Sequence) -> None:
        """Remove its blocks from the prefix cache, and what it copied from."""
        keys = sequence.block_keys[: sequence.blocks.num_sealed]
        if sequence.reused.copied_from is not None:
            keys.append(sequence.reused.copied_from)
        for group in range(self.groups.num_groups):
            for key in keys:
                self.pool.discard(page_key(key, group))

    # Swapping

    def swap_out(self, victim: Sequence, copies: Copies) -> None:
        """Keep what it has computed, if there is room and copying is cheaper than recomputing."""
        blocks, end = victim.blocks, -(-victim.num_computed // self._block_tokens)
        filled = [range(first, end) for first in blocks.first_held]
        num_pages = sum(map(len, filled))
        places = self.swap.allocate(num_pages, victim.num_computed) if num_pages and not blocks.is_loading else []
        if places:
            victim.swapped = Swapped(places, filled, victim.num_computed)
            self.num_swapped += len(places)
            pages = (table[index] for table, span in zip(blocks.tables, filled, strict=True) for index in span)
            copies += zip(pages, places, strict=True)

    def swap_in(self, sequence: Sequence, copies: Copies) -> None:
        """Copy back into its new blocks, except those found in the cache."""
        if sequence.swapped is not None:
            blocks, places = sequence.blocks, iter(sequence.swapped.places)
            for table, first, span in zip(blocks.tables, blocks.first_held, sequence.swapped.spans, strict=True):
                missing = max(first, blocks.num_sealed)
                kept = zip(span, places, strict=False)
                copies += [(place, table[index]) for index, place in kept if index >= missing]
            self.free_swapped(sequence)

    def free_swapped(self, sequence: Sequence) -> None:
        """Idempotent."""
        if sequence.swapped is not None:
            self.swap.free(sequence.swapped.places)
            sequence.swapped = None

    # Helpers

    def _note_contents(self, sequence: Sequence, first: int, end: int) -> None:
        """Of its sealed blocks ``first`` ≤ i < ``end``."""
        keys, size = sequence.block_keys, self._block_tokens
        tokens = sequence.token_slice(first * size, end * size)
        for start, index in enumerate(range(first, end)):
            if self.pool.has(keys[index]):  # else its page had left the window
                parent = sequence.chain.parent(keys, index, size)
                self._contents.add(parent, tokens[start * size : (start + 1) * size], keys[index])

    def _num_blocks(self, sequence: Sequence) -> int:
        """For all its tokens."""
        return -(-sequence.num_tokens // self._block_tokens)

    def _plan(
        self, sequence: Sequence, usable: int, spare: int, num_ready: int | None = None
    ) -> tuple[int, list[range]] | None:
        """For ``allocate``: how many blocks are cached, and the spans of each group; None when there is no room."""
        num_cached = self.match(sequence.block_keys[:usable])
        ready = self.num_ready(sequence, num_cached, usable) if num_ready is None else num_ready
        spans = self._spans(sequence, num_cached, ready)
        return (num_cached, spans) if self._has_room(sequence, num_cached, spans, spare) else None

    def _spans(self, sequence: Sequence, num_cached: int, num_ready: int) -> list[range]:
        """The blocks of which each group needs pages at admission, when ``num_ready`` tokens need not be computed.
        Cached ones cost nothing, so all of them are taken."""
        num_blocks, spans = self._num_blocks(sequence), []
        for group in range(self.groups.num_groups):
            first = self.groups.first_page(group, num_ready, self._block_tokens)
            most = self.groups.most_pages(group, self._max_step_tokens, self._block_tokens)
            end = num_blocks if most is None else min(max(first, num_cached) + most, num_blocks)
            spans.append(range(first, end))
        return spans

    def _extend(self, sequence: Sequence, group: int, num_blocks: int) -> None:
        """Allocate pages up to this many blocks, if there are enough."""
        blocks = sequence.blocks
        table = blocks.tables[group]
        for page in self.pool.allocate(min(max(num_blocks - len(table), 0), self.pool.num_available)):
            table.append(page)
            self.tables.set_block(blocks.row, len(table) - 1, page, group)

    def _keys(self, sequence: Sequence, group: int, span: range, num_cached: int) -> list[BlockKey]:
        """Keys of its cached pages in the span."""
        keys = sequence.block_keys[span.start : min(num_cached, span.stop)]
        return [page_key(key, group) for key in keys] if group else keys

    def _has_room(self, sequence: Sequence, num_cached: int, spans: list[range], spare: int) -> bool:
        left, cached = self.pool.num_available - spare, 0
        for span in spans:
            found = len(range(span.start, min(num_cached, span.stop)))
            left -= len(span) - found
            cached += found
        if left < cached:  # those in no block table count as available
            left -= sum(self.pool.num_idle(self._keys(sequence, g, span, num_cached)) for g, span in enumerate(spans))
        return left >= 0

    def _attach(self, sequence: Sequence, blocks: SequenceBlocks) -> None:
        sequence.blocks = blocks
        blocks.row = self.tables.add_row(blocks.tables, blocks.first_held)
        self._update_window(blocks)

    def _update_window(self, blocks: SequenceBlocks) -> None:
        """Note when ``free_out_of_window`` is due."""
        size, windows = self._block_tokens, self.groups.windows
        blocks.out_of_window_at = min(
            ((blocks.first_held[group] + 1) * size + windows[group] for group in self._windowed), default=NEVER
        )
