"""Hooks and errors of steps over two ranks, in rings of keys and of queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from context_pair import BLOCK_TOKENS, Pair, pair, some_tokens
from tiny_model import write_tiny_model

from mooncake.errors import KVLoadFailed
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.parallel.context_plan import Method


@pytest.fixture(scope="module", params=[Method.PASS_KV, Method.PASS_Q])
def ring(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """One thread per rank; the model has twelve query heads over four KV heads."""
    before, folder = torch.get_num_threads(), tmp_path_factory.mktemp("ring") / "tiny"
    write_tiny_model(folder, "qwen3", num_attention_heads=12, num_key_value_heads=4, head_dim=16)
    torch.set_num_threads(1)
    with pair(str(folder), 2, request.param) as both:
        yield both
    torch.set_num_threads(before)


@pytest.mark.slow
def test_ranks_give_the_logits_of_one(ring: Pair) -> None:
    tokens, method = some_tokens(203), ring.setup.method
    assert method is not None
    ring.check(tokens[:101], 0, method)
    ring.check(tokens, 101, method)


class Watching:
    """A hook that compares the caches when a layer is reported complete, and can be made to fail."""

    wants_layers = True

    def __init__(self, both: Pair, count: int, fails_before: int = -1, fails_after: int = -1) -> None:
        self.heard: list[str] = []
        self._both, self._blocks = both, -(-count // BLOCK_TOKENS)
        self._fails_before, self._fails_after = fails_before, fails_after

    def before_layer(self, layer: int) -> None:
        self.heard.append(f"before {layer}")
        if layer == self._fails_before:
            raise KVLoadFailed("it will not come", ("someone",))

    def after_layer(self, layer: int) -> None:
        alone, together = (cache.tensor[: self._blocks, layer] for cache in self._both.caches)
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
        self.heard.append(f"after {layer}")
        if layer == self._fails_after:
            raise KVLoadFailed("it will not go", ("someone",))


def test_hooks_hear_of_layers_that_are_there_and_may_abandon_a_step(ring: Pair) -> None:
    tokens = some_tokens(120)
    told = Watching(ring, 120)
    ring.logits(tokens, 0, told)
    assert told.heard == ["before 0", "after 0", "before 1", "after 1"]
    for failing in ({"fails_before": 0}, {"fails_before": 1}, {"fails_after": 0}, {"fails_after": 1}):
        with pytest.raises(KVLoadFailed):
            ring.logits(tokens, 0, Watching(ring, 120, **failing))
    alone, together = ring.logits(tokens, 0)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_a_wrong_batch_is_the_error_that_it_is_alone(ring: Pair) -> None:
    tokens = some_tokens(80)
    batch = ForwardBatch.of_prompt(tokens, BLOCK_TOKENS, torch.tensor([79]))
    for wrong in (replace(batch, positions=batch.positions + 100_000), replace(batch, tokens=batch.tokens - 1000)):
        with pytest.raises(IndexError):
            ring.over_ranks.forward(wrong, ring.caches[1].tensor, NoHook())
    alone, together = ring.logits(tokens, 0)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
