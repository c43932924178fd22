"""Layers recomputed from hidden states in the cache, which may be those of another model of the same shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_model import write_tiny_model

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError, InternalError, KVLoadFailed, ModelError
from mooncake.kernels import reference
from mooncake.model import CausalLM, ForwardBatch, NoHook, load_model
from mooncake.model.kept_inputs import input_rows
from mooncake.model.reading.weights import load_weights
from mooncake.precision import FLOAT32
from mooncake.types import KVLayout

LAYERS, BLOCK, LENGTH, TAIL = 6, 16, 70, 6  # tokens
PREFIX = 64
TOKENS = torch.randint(3, 300, (LENGTH,), generator=torch.Generator().manual_seed(0))
KEPT = (2, 4)


class Kitchen:
    """A model over a cache of its own that keeps the inputs of two layers."""

    def __init__(self, checkpoint: Checkpoint, is_fused: bool = True, kv_dtype: str = "float32") -> None:
        self.layout = checkpoint.kv_layout(BLOCK, kv_dtype, KEPT)
        weights = load_weights(checkpoint, "float32")
        self.model = CausalLM(checkpoint.config, weights, is_fused=is_fused, keep_hidden=KEPT)
        self.cache = KVCache(self.layout, -(-LENGTH // BLOCK)).tensor

    def batch(self, first: int, end: int, num_logits: int) -> ForwardBatch:
        whole = ForwardBatch.of_prompt(TOKENS[:end], BLOCK, torch.arange(end - first - num_logits, end - first))
        return replace(
            whole,
            tokens=whole.tokens[first:],
            positions=whole.positions[first:],
            query_starts=torch.tensor([0, end - first], dtype=torch.int32),
            slots=whole.slots[first:],
        )

    def compute(self, first: int, end: int, num_logits: int = 0) -> torch.Tensor:
        return self.model.forward(self.batch(first, end, num_logits), self.cache, NoHook())

    def recompute(self, layers: range, first: int, end: int, hidden: torch.Tensor | None = None) -> None:
        self.model.recompute(layers, self.batch(first, end, 0), self.cache, NoHook(), hidden)

    def kept(self, layer: int) -> torch.Tensor:
        """Float32 [LENGTH, hidden]: what the cache keeps as the layer's inputs."""
        rows = input_rows(self.cache, LAYERS, KEPT.index(layer), self.model.config.hidden_size)
        return rows.flatten(0, 1)[:LENGTH].float()


def folder(path: Path, seed: int = 0, family: str = "llama") -> Checkpoint:
    path.mkdir()
    write_tiny_model(path, family, seed=seed, num_hidden_layers=LAYERS, head_dim=16)
    return open_checkpoint(str(path))


@pytest.fixture
def ours(tmp_path: Path) -> Checkpoint:
    return folder(tmp_path / "ours")


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("chunk", [PREFIX, BLOCK])
def test_all_layers_computed_anew_are_a_full_prefill(ours: Checkpoint, is_fused: bool, chunk: int) -> None:
    """To the bit, in the same chunks: the embeddings are the receiver's own, and every layer is."""
    full, again = Kitchen(ours, is_fused), Kitchen(ours, is_fused)
    for first in range(0, PREFIX, chunk):
        full.compute(first, first + chunk)
        again.recompute(range(LAYERS), first, first + chunk)
    assert torch.equal(again.compute(PREFIX, LENGTH, TAIL), full.compute(PREFIX, LENGTH, TAIL))
    assert torch.equal(again.cache[:, :LAYERS], full.cache[:, :LAYERS])


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("layers", [range(2, 3), range(2, 5), range(4, 6)])
def test_layers_go_on_from_what_was_kept(ours: Checkpoint, is_fused: bool, layers: range) -> None:
    """With the same weights on both sides, nothing changes; only the group's own KV is written."""
    kitchen = Kitchen(ours, is_fused)
    kitchen.compute(0, LENGTH)
    before = kitchen.cache.clone()
    hidden = kitchen.kept(layers[0])
    kitchen.cache[:, layers.start : layers.stop] = 7.0
    kitchen.cache[4, :, :, :, TAIL:] = before[4, :, :, :, TAIL:]  # behind the prompt
    kitchen.recompute(layers, 0, LENGTH, hidden)
    assert torch.equal(kitchen.cache, before)
    assert torch.equal(hidden, kitchen.kept(layers[0]))  # it is the caller's


def test_the_kept_inputs_are_those_of_transformers(tmp_path: Path) -> None:
    published = write_tiny_model(tmp_path, num_hidden_layers=LAYERS, head_dim=16)
    kitchen = Kitchen(open_checkpoint(str(tmp_path)))
    kitchen.compute(0, BLOCK)
    kitchen.compute(BLOCK, LENGTH)
    with torch.no_grad():
        states = published(TOKENS[None], output_hidden_states=True).hidden_states
    for layer in KEPT:
        torch.testing.assert_close(kitchen.kept(layer), states[layer][0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("is_fused", [True, False])
def test_another_models_layers_go_on_from_ours(tmp_path: Path, is_fused: bool, family: str) -> None:
    """Compared with transformers: the receiver's layers over the sender's hidden states."""
    ours, theirs = folder(tmp_path / "ours", 0, family), folder(tmp_path / "theirs", 1, family)
    sender, receiver = Kitchen(ours, is_fused), Kitchen(theirs, is_fused)
    by_torch = load_model(theirs, FLOAT32, kernels=reference)
    assert isinstance(by_torch, CausalLM)
    sender.compute(0, LENGTH)
    hidden = sender.kept(2)
    receiver.recompute(range(2, 5), 0, BLOCK, hidden[:BLOCK])
    receiver.recompute(range(2, 5), BLOCK, LENGTH, hidden[BLOCK:])

    layout = theirs.kv_layout(BLOCK, "float32")
    cache = KVCache(layout, -(-LENGTH // BLOCK)).tensor
    by_torch.recompute(range(2, 5), receiver.batch(0, LENGTH, 0), cache, NoHook(), hidden)
    assert not cache[:, :2].any() and not cache[:, 5:].any()
    torch.testing.assert_close(receiver.cache[:, 2:5], cache[:, 2:5], atol=2e-4, rtol=1e-3)
    assert not torch.allclose(receiver.cache[:, 2:5], sender.cache[:, 2:5], atol=1e-2)


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_cache_without_room_is_refused_before_anything_is_written(ours: Checkpoint, is_fused: bool) -> None:
    kitchen = Kitchen(ours, is_fused)
    kitchen.cache = KVCache(ours.kv_layout(BLOCK, "float32", KEPT[:1]), -(-LENGTH // BLOCK)).tensor
    with pytest.raises(InternalError, match="no room"):
        kitchen.compute(0, LENGTH)
    with pytest.raises(InternalError, match="no room"):
        kitchen.recompute(range(2), 0, BLOCK)
    assert not kitchen.cache.any()


def test_narrow_pages_keep_narrow_inputs(ours: Checkpoint) -> None:
    wide, narrow = Kitchen(ours), Kitchen(ours, kv_dtype="bfloat16")
    plain = Kitchen(ours, is_fused=False, kv_dtype="bfloat16")
    for kitchen in (wide, narrow, plain):
        kitchen.compute(0, LENGTH)
    assert torch.equal(narrow.kept(4), plain.kept(4))
    torch.testing.assert_close(narrow.kept(4), wide.kept(4), atol=0.1, rtol=0.05)


def test_a_wait_that_fails_ends_the_pass_and_nobody_is_told_of_layers(ours: Checkpoint) -> None:
    class Waiting(NoHook):
        wants_layers = True
        waited: list[int] = []  # noqa: RUF012

        def before_layer(self, layer: int) -> None:
            self.waited.append(layer)
            if layer == 3:
                raise KVLoadFailed("gone")

        def after_layer(self, layer: int) -> None:
            raise AssertionError("told of a layer")

    kitchen = Kitchen(ours)
    with pytest.raises(KVLoadFailed):
        kitchen.model.recompute(
            range(2, 5), kitchen.batch(0, BLOCK, 0), kitchen.cache, Waiting(), kitchen.kept(2)[:BLOCK]
        )
    assert Waiting.waited == [2, 3]


def test_kept_inputs_are_layers_for_whoever_moves_them(ours: Checkpoint) -> None:
    class Listening(NoHook):
        wants_layers = True
        told: list[int] = []  # noqa: RUF012

        def after_layer(self, layer: int) -> None:
            self.told.append(layer)

    kitchen = Kitchen(ours)
    kitchen.model.forward(kitchen.batch(0, BLOCK, 1), kitchen.cache, Listening())
    assert Listening.told == list(range(kitchen.layout.num_layers))


def test_room_for_inputs_is_whole_layers(ours: Checkpoint) -> None:
    layout = ours.kv_layout(64, "float32", (2, 4))
    assert layout.kv_layers == range(LAYERS)
    assert layout.layers_an_input * layout.layer_bytes >= 64 * ours.config.hidden_size * 4
    assert layout.input_layers(2).start == LAYERS and layout.input_layers(4).stop == layout.num_layers
    smollm2 = open_checkpoint("smollm2").kv_layout(64, "float32", (10,))
    assert smollm2.num_layers == 32  # 1.5 layers' bytes in room for 2
    assert isinstance(layout, KVLayout)
    for wrong in ((0,), (LAYERS,), (3, 2), (2, 2)):
        with pytest.raises(ConfigError, match="keep_hidden"):
            ours.kv_layout(64, "float32", wrong)
    with pytest.raises(ConfigError, match="float32 or bfloat16"):
        ours.kv_layout(64, "int8", (2,))


def test_other_families_refuse_to_keep_hidden_states(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "gpt2")
    with pytest.raises(ModelError, match="Llama family"):
        load_model(open_checkpoint(str(tmp_path)), FLOAT32, keep_hidden=(1,))
