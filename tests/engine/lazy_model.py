"""The hash model on a simulated device: started steps are computed as late as a device may compute them, or at once.

A step computed late reads and writes its blocks at the last moment, so a block given to another sequence meanwhile is
detected. Tokens that the host cannot know yet are taken only from the step before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import fields, replace

import numpy as np
import torch

from mooncake.engine.cache.block_pool import BlockPool
from mooncake.engine.contract import NO_HOOK
from mooncake.engine.engine import Engine
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.model.gpu.device_sampler import Draws, choose
from tests.engine.hash_model import BLOCK, HashModel, hash_engine


class LazyStep:
    def __init__(
        self, model: LazyModel, batch: ForwardBatch, cache: torch.Tensor, draws: Draws | None, newest: Rows[int] | None
    ) -> None:
        copied = {part.name: getattr(batch, part.name) for part in fields(batch)}
        self.batch = ForwardBatch(**{name: part.clone() for name, part in copied.items() if part is not None})
        self.cache, self.draws, self.newest = cache, draws, newest
        self.before = model.last
        self.drawn: torch.Tensor | None = None
        self._model = model

    @property
    def touched(self) -> set[int]:
        lengths = (-(-self.batch.context_lens // BLOCK)).tolist()
        return {
            block
            for row, length in zip(self.batch.block_tables.tolist(), lengths, strict=True)
            for block in row[:length]
        }

    def compute(self) -> None:
        batch = self.batch
        if self.newest is not None:
            assert self.before is not None and self.before.drawn is not None
            rows = torch.tensor(self.newest)
            drawn = self.before.drawn[rows.clamp(min=0)].clamp(min=0)  # where there is none, any
            batch = replace(batch, tokens=torch.where(rows < 0, batch.tokens, drawn))
        self.before = None
        pool = self._model.pool
        assert pool is None or all(pool._references[block] > 0 for block in self.touched), "it was given away"
        logits = HashModel.forward(self._model, batch, self.cache, NO_HOOK)
        if self._model.spoils:
            logits[0] = float("nan")
        if self.draws is None:
            self.drawn = choose(logits)
            return
        cut_rows = torch.from_numpy(self.draws.cut_rows) if len(self.draws.cut_rows) else None
        self.drawn = choose(logits, torch.from_numpy(self.draws.values), cut_rows)

    def tokens(self) -> list[int]:
        if self._model.fails:
            self._model.fails -= 1
            raise RuntimeError("the device is gone")
        while self.drawn is None:
            self._model.pending.popleft().compute()
        return self.drawn.tolist()


class LazyModel(HashModel):
    """``max_async_sequences`` sequences in a started step; ``is_late`` decides for each step, in turn."""

    def __init__(self, max_async_sequences: int = 1000, is_late: Rows[bool] = (True,)) -> None:
        super().__init__()
        self.max_async_sequences = max_async_sequences
        self.is_late = deque(is_late)
        self.pending: deque[LazyStep] = deque()
        self.last: LazyStep | None = None
        self.pool: BlockPool | None = None
        self.num_started = 0
        self.num_overlapped = 0  # while the one before was not collected
        self.fails = 0  # how many times tokens cannot be had
        self.spoils = False

    def start(
        self, batch: ForwardBatch, cache: torch.Tensor, draws: Draws | None, newest: Rows[int] | None = None
    ) -> LazyStep:
        assert len(batch.tokens) == batch.num_sequences == len(batch.logit_rows) <= self.max_async_sequences
        self.num_started += 1
        self.num_overlapped += newest is not None
        step = LazyStep(self, batch, cache, draws, newest)
        self.pending.append(step)
        self.last = step
        if not self.is_late[0]:
            self.compute_all()
        self.is_late.rotate(-1)
        return step

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        self.compute_all()
        return super().forward(batch, cache, hook)

    def compute_all(self) -> None:
        while self.pending:
            self.pending.popleft().compute()


def lazy_engine(model: LazyModel | None = None, num_blocks: int = 64, **settings: int) -> tuple[Engine, LazyModel]:
    model = model or LazyModel()
    engine = hash_engine(num_blocks=num_blocks, model=model, **settings)
    model.pool = engine.block_pool
    return engine, model


def late_or_not(random: np.random.Generator) -> list[bool]:
    return [bool(late) for late in random.random(17) < 0.7]
