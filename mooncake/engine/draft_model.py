"""Speculation by a small model: it writes on greedily, and the large one checks all it wrote in one step.

It keeps a paged cache of its own, one table a sequence, and forgets whoever it has not been asked about for longest. It
must not know steps, scheduling or what becomes of its guesses: the tokens of a sequence tell it which came true.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from mooncake.engine.block_pool import BlockPool
from mooncake.engine.contract import Cache
from mooncake.engine.sequence import Sequence
from mooncake.engine.speculation import DraftMemory
from mooncake.model.batch import ForwardBatch, LayerHook, NoHook

log = logging.getLogger(__name__)


class CausalModel(Protocol):
    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        """Float32 logits [R, V]."""
        ...


@dataclass(slots=True)
class _Drafted:
    """What of one sequence is in the draft model's cache."""

    tokens: list[int] = field(default_factory=list)  # whose KV is there
    table: list[int] = field(default_factory=list)


class DraftModel:
    """Guesses for an engine with the same vocabulary."""

    def __init__(self, model: CausalModel, cache: Cache, max_tokens: int, max_model_len: int) -> None:
        """``max_tokens``: of one draft. ``max_model_len``: of what the model can read (tokens)."""
        self.max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._has_failed = False
        self._model = model
        self._cache = cache
        self._block_tokens = cache.tensor.shape[4]
        self._pool = BlockPool(cache.num_blocks, self._block_tokens, keep_events=False)
        self._drafted: OrderedDict[str, _Drafted] = OrderedDict()  # the one asked about last comes last

    def propose(self, sequence: Sequence) -> list[int]:
        """As ``PromptLookup.propose``; none when the sequence is longer than the whole cache or the model's context.

        A model that fails is asked no more: guesses are optional, answers are not.
        """
        memory = sequence.draft_memory
        if memory is None:
            memory = sequence.draft_memory = DraftMemory()
        # The last token of a draft is not read, and the last one of an answer needs no guess.
        count = min(
            memory.length, self.max_tokens, sequence.num_left - 1, self._max_model_len - sequence.num_tokens + 1
        )
        if count < 1 or self._has_failed:
            return []
        drafted = self._drafted.setdefault(sequence.request_id, _Drafted())
        self._drafted.move_to_end(sequence.request_id)
        if memory.is_paused(sequence.num_tokens) or not self._make_room(drafted, sequence.num_tokens + count - 1):
            return []
        try:
            return self._write_on(drafted, sequence.tokens.tolist(), count)
        except Exception:
            log.exception("the draft model has failed; answers go on without its guesses")
            self._has_failed = True
            return []

    def _write_on(self, drafted: _Drafted, tokens: list[int], count: int) -> list[int]:
        known = _common(drafted.tokens, tokens[:-1])
        draft: list[int] = []
        new = tokens[known:]
        with torch.inference_mode():
            while len(draft) < count:
                draft.append(self._next(drafted, known, new))
                known += len(new)
                new = draft[-1:]
        drafted.tokens = [*tokens, *draft[:-1]]
        return draft

    def _next(self, drafted: _Drafted, known: int, new: list[int]) -> int:
        """The likeliest token after ``known`` tokens in the cache and ``new`` ones, which are written there."""
        positions = torch.arange(known, known + len(new))
        table = torch.tensor(drafted.table, dtype=torch.int32)
        blocks = table[positions // self._block_tokens].long()
        batch = ForwardBatch(
            tokens=torch.tensor(new),
            positions=positions,
            query_starts=torch.tensor([0, len(new)], dtype=torch.int32),
            context_lens=torch.tensor([known + len(new)], dtype=torch.int32),
            block_tables=table[None],
            slots=blocks * self._block_tokens + positions % self._block_tokens,
            logit_rows=torch.tensor([len(new) - 1]),
        )
        return int(self._model.forward(batch, self._cache.tensor, NoHook())[0].argmax())

    def _make_room(self, drafted: _Drafted, num_tokens: int) -> bool:
        """Blocks for so many tokens, taken from whoever was asked about longest ago."""
        missing = -(-num_tokens // self._block_tokens) - len(drafted.table)
        while missing > self._pool.num_available and len(self._drafted) > 1:
            _, oldest = self._drafted.popitem(last=False)
            self._pool.release(oldest.table)
        if missing > self._pool.num_available:
            return False
        if missing > 0:
            drafted.table += self._pool.allocate(missing)
        return True


def _common(known: list[int], tokens: list[int]) -> int:
    """Length of the common beginning."""
    length = min(len(known), len(tokens))
    differ = np.flatnonzero(np.array(known[:length]) != np.array(tokens[:length]))
    return int(differ[0]) if len(differ) else length
