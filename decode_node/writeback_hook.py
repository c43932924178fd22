"""The engine's hook on a decode node: offers blocks that generation has filled for write-back to the pool.

It runs on the engine's thread. An offered block is retained, so it stays unchanged until it is written, whatever
happens to its sequence.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from decode_node.writeback import FilledBlock, WriteBack
from mooncake.engine.loop import EngineThread
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import BlockToLoad, StepPlan
from mooncake.model.batch import NoHook
from mooncake.page_groups import page_key
from mooncake.types import BlockKey


@dataclass(slots=True)
class WatchedRequest:
    """A request whose blocks are written back. Those before ``first_block`` belong to its prompt."""

    pool_address: str
    first_block: int
    next_blocks: dict[str, int] = field(default_factory=dict)  # by sequence: blocks before this one have been offered


class WriteBackHook(NoHook):
    """The event loop calls ``watch`` and ``forget``, each a single assignment."""

    def __init__(self, writeback: WriteBack, thread: EngineThread, block_tokens: int) -> None:
        """``thread`` is the one that it runs on."""
        self._writeback = writeback
        self._thread = thread
        self._block_tokens = block_tokens
        self._watched: dict[str, WatchedRequest] = {}
        self._loop = asyncio.get_running_loop()

    def watch(self, sequence: Sequence, pool_addresses: list[str]) -> None:
        if pool_addresses:
            first = len(sequence.tokens) // self._block_tokens
            self._watched[sequence.request_id] = WatchedRequest(pool_addresses[0], first)

    def forget(self, request_id: str) -> None:
        self._watched.pop(request_id, None)

    def admitted(self, sequence: Sequence, to_load: list[BlockToLoad]) -> None:
        pass

    def begin_step(self, plan: StepPlan) -> None:
        pass

    def end_step(self, plan: StepPlan) -> None:
        for entry in plan.entries:
            sequence = entry.sequence
            watched = self._watched.get(sequence.root_id)
            if watched is None or sequence.failure is not None:
                continue
            filled = sequence.num_shareable // self._block_tokens
            first = watched.next_blocks.get(sequence.request_id)
            if first is None:  # what a fork shares is offered by the sequence it was forked from
                first = max(watched.first_block, entry.first // self._block_tokens)
            for index in range(first, filled):
                self._offer(sequence, index, watched.pool_address)
            watched.next_blocks[sequence.request_id] = max(first, filled)

    def _offer(self, sequence: Sequence, index: int, pool_address: str) -> None:
        """Offer a block with the pages of it that the sequence still has. Window pages are evicted before the first
        group's, without which they are useless."""
        key, parent = sequence.block_keys[index], sequence.block_keys[index - 1] if index else b""
        blocks = sequence.blocks
        for group, (table, first) in enumerate(zip(blocks.tables, blocks.first_held, strict=True)):
            if index >= first:
                self._offer_page(table[index], page_key(key, group), key if group else parent, pool_address)

    def _offer_page(self, page: int, key: BlockKey, parent: bytes, pool_address: str) -> None:
        self._thread.engine.block_pool.retain([page])

        def done() -> None:
            self._thread.call(lambda engine: engine.block_pool.release([page]))

        block = FilledBlock(pool_address, page, key, parent, done)
        self._loop.call_soon_threadsafe(self._writeback.offer, block)
