"""Speculation with a small model: it drafts greedily, and the large one verifies the draft in one step.

It keeps its own paged cache, sharing full blocks by key like the large model's, and evicts the sequences asked about
least recently. It knows neither steps, scheduling nor which draft tokens were accepted: a sequence's tokens show that.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq

import torch

from mooncake.engine.cache.block_pool import BlockPool
from mooncake.engine.contract import Cache, CausalModel
from mooncake.engine.decoding.speculation import DraftMemory
from mooncake.engine.sequence import Sequence
from mooncake.model.batch import ForwardBatch, NoHook

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Drafted:
    """The part of one sequence that is in the draft model's cache."""

    table: list[int]
    num_sealed: int  # blocks
    num_read: int  # leading tokens with KV
    draft: list[int] = field(default_factory=list)  # draft tokens after them, also with KV


class DraftModel:
    """Draft tokens for an engine with the same vocabulary."""

    def __init__(
        self, model: CausalModel, cache: Cache, max_tokens: int, max_model_len: int, chunk_tokens: int = 0
    ) -> None:
        """``max_tokens``: per draft; ``max_model_len``: of the draft model; ``chunk_tokens``: most prompt tokens it
        reads at once, 0 for all. Blocks have as many tokens as the engine's."""
        self.max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._chunk_tokens = chunk_tokens or max_model_len
        self._has_failed = False
        self._model = model
        self._cache = cache
        self._block_tokens = cache.tensor.shape[4]
        self._pool = BlockPool(cache.num_blocks, self._block_tokens, keep_events=False)
        self._drafted: OrderedDict[DraftMemory, _Drafted] = OrderedDict()  # most recently asked about last

    def propose(self, sequence: Sequence) -> list[int]:
        """Like ``PromptLookup.propose``; none when the sequence exceeds the whole cache or the model's context, or has
        more unread tokens than may be read at once.

        A model that fails is not used again: drafts are optional, answers are not.
        """
        memory = DraftMemory.of(sequence)
        # The last token of a draft is not read, and the last one of an answer is not drafted.
        count = min(
            memory.length, self.max_tokens, sequence.num_left - 1, self._max_model_len - sequence.num_tokens + 1
        )
        if count < 1 or self._has_failed:
            return []
        drafted = self._drafted.get(memory) or self._add(sequence, memory)
        self._drafted.move_to_end(memory)
        if memory.is_paused(sequence.num_tokens):
            return []
        if not self._make_room(drafted, sequence.num_tokens + count - 1):
            self._pool.release(self._drafted.pop(memory).table)
            return []
        try:
            return self._draft(drafted, sequence, count)
        except Exception:
            log.exception("the draft model has failed; answers go on without its drafts")
            self._has_failed = True
            return []

    def _add(self, sequence: Sequence, memory: DraftMemory) -> _Drafted:
        """Start with the blocks that another sequence has for the same tokens."""
        sequence.extend_keys(self._block_tokens)
        keys = sequence.block_keys[: (sequence.num_tokens - 1) // self._block_tokens]
        count = self._pool.match(keys)
        drafted = _Drafted(self._pool.take_prefix(keys, count), count, count * self._block_tokens)
        self._drafted[memory] = drafted
        return drafted

    @torch.inference_mode()
    def _draft(self, drafted: _Drafted, sequence: Sequence, count: int) -> list[int]:
        last = sequence.num_tokens - 1  # the last token is always read: its logits are needed
        known = min(drafted.num_read, last)
        known += _num_common(drafted.draft, sequence.token_slice(known, last).tolist())
        drafted.num_read, drafted.draft = known, []
        new = sequence.token_slice(known, sequence.num_tokens).tolist()
        if len(new) > self._chunk_tokens:
            self._read(drafted, new[: self._chunk_tokens])
            self._seal(drafted, sequence)
            return []
        draft = [self._read(drafted, new)]
        self._seal(drafted, sequence)
        num_read = drafted.num_read
        while len(draft) < count:
            draft.append(self._read(drafted, draft[-1:]))
        drafted.num_read, drafted.draft = num_read, draft[:-1]
        return draft

    def _read(self, drafted: _Drafted, new: list[int]) -> int:
        """Append the KV of these tokens. Returns the most likely next one."""
        table = torch.tensor(drafted.table, dtype=torch.int32)
        tokens, last = torch.tensor(new), torch.tensor([len(new) - 1])
        batch = ForwardBatch.of_sequence(tokens, drafted.num_read, table, self._block_tokens, last)
        drafted.num_read += len(new)
        return int(self._model.forward(batch, self._cache.tensor, NoHook())[0].argmax())

    def _seal(self, drafted: _Drafted, sequence: Sequence) -> None:
        """Share the blocks that contain only the sequence's tokens, no draft tokens."""
        sequence.extend_keys(self._block_tokens)
        end = drafted.num_read // self._block_tokens
        self._pool.seal(drafted.table, sequence.block_keys, drafted.num_sealed, end)
        drafted.num_sealed = end

    def _make_room(self, drafted: _Drafted, num_tokens: int) -> bool:
        """Blocks for this many tokens, taken from the sequences asked about least recently."""
        missing = -(-num_tokens // self._block_tokens) - len(drafted.table)
        while missing > self._pool.num_available and len(self._drafted) > 1:
            _, oldest = self._drafted.popitem(last=False)
            self._pool.release(oldest.table)
        if missing > self._pool.num_available:
            return False
        if missing > 0:
            drafted.table += self._pool.allocate(missing)
        return True


def _num_common(draft: list[int], tokens: list[int]) -> int:
    """Length of the common prefix."""
    return sum(takewhile(bool, map(eq, draft, tokens)))
