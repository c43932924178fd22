"""The hash model with windows, for tests: each layer sees a window of the previous layer's output, or all of it.

Every layer stores its input for a token, and the token's position; its output is a checksum of everything it sees. So a
page that was released too early, or belongs to other tokens, changes the answer. A layer of several rows stores its
input in the last one and noise in the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Rows

import numpy as np
import torch

from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.page_groups import plan_groups
from mooncake.types import KVLayout
from tests.engine.hash_model import BLOCK, VOCAB, HashConfig, logits_after

HYBRID = (0, 6, 6, 6, 0, 6)  # tokens that the query of each layer sees
LOCAL = (6, 6, 6)


def seen_from(values: Rows[float]) -> int:
    """24 bits, which float32 represents exactly."""
    return zlib.crc32(np.array(values, "<i8").tobytes()) & 0xFFFFFF


def true_answer(prompt: list[int], count: int, windows: Rows[int] = HYBRID) -> list[int]:
    """Greedy, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        values = tokens
        for window in windows:
            values = [
                seen_from(values[max(0, end - window) if window else 0 : end]) for end in range(1, len(tokens) + 1)
            ]
        tokens.append(int(logits_after([values[-1]]).argmax()))
    return tokens[len(prompt) :]


class WindowedModel:
    def __init__(self, windows: Rows[int], rows: Rows[int] = ()) -> None:
        self.config = HashConfig()
        self.num_tokens = 0  # computed
        self._windows = windows
        self._rows = rows or [1] * len(windows)

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        self.num_tokens += len(batch.tokens)
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        values = batch.tokens.float()
        for layer, window in enumerate(self._windows):
            row, tables, slots = batch.pages_of(layer)
            if batch.pages is None:
                row = sum(self._rows[:layer])
            hook.before_layer(layer)
            blocks, offsets = slots // BLOCK, slots % BLOCK
            row += self._rows[layer] - 1
            for noisy in range(row - self._rows[layer] + 1, row):
                cache[blocks, noisy, :, 0, offsets, 0] = -1.0 - layer
            cache[blocks, row, 0, 0, offsets, 0] = values
            cache[blocks, row, 1, 0, offsets, 0] = batch.positions.float()
            hook.after_layer(layer)
            values = torch.empty_like(values)
            for b, context in enumerate(contexts):
                read = cache[tables[b].long(), row, :, 0, :, 0]  # [M, K|V, block_tokens]
                known, positions = read[:, 0].reshape(-1), read[:, 1].reshape(-1)
                for t in range(starts[b], starts[b + 1]):
                    end = context - starts[b + 1] + t + 1
                    first = max(0, end - window) if window else 0
                    assert positions[first:end].tolist() == list(range(first, end)), "KV of another place was read"
                    values[t] = seen_from(known[first:end].tolist())
        rows = [logits_after([int(values[t])]) for t in batch.logit_rows.tolist()]
        return torch.from_numpy(np.array(rows, np.float32).reshape(-1, VOCAB))


def windowed_engine(
    windows: Rows[int] = HYBRID, num_pages: int = 400, num_places: int = 0, rows: Rows[int] = (), **settings: int
) -> tuple[Engine, WindowedModel]:
    """``num_pages`` counts pages; a block has one per group of layers."""
    numbers = {"block_tokens": BLOCK, "chunk_tokens": 8, "max_sequences": 8, "max_model_len": 200} | settings
    groups = plan_groups(windows, numbers["max_model_len"], rows)
    layout = groups.page_layout(KVLayout(sum(rows) or len(windows), 1, BLOCK, 1, "float32"))
    cache = KVCache(layout, num_pages, num_places=num_places)
    cache.memory[:] = 0xA5  # what was never written must never be read
    model = WindowedModel(windows, rows)
    return Engine(model, cache, EngineConfig(**numbers, groups=groups)), model  # type: ignore[arg-type]
