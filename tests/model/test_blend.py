"""Chunks computed separately and blended into a prompt: what is copied, what is computed, and the gain in quality."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import write_tiny_model

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ModelError
from mooncake.kernels import Kernels, choose_kernels, reference
from mooncake.kernels.cpu import CpuKernels
from mooncake.kernels.cpu_build import load_library
from mooncake.kernels.reference import from_page_rows, rope
from mooncake.model import CausalLM, ForwardBatch, NoHook, load_model
from mooncake.model.batch import Reuse
from mooncake.model.blend import Blending, share_at, turns
from mooncake.model.llama import LayerByLayer
from mooncake.model.reading.weights import load_weights
from mooncake.model.rope import rope_tables
from mooncake.precision import FLOAT32

BLOCK, CHUNK, NUM_CHUNKS, TAIL = 16, 128, 4, 20  # tokens; the first chunk is a prefix
LENGTH = NUM_CHUNKS * CHUNK + TAIL
STORE = 40  # the block that chunks computed alone lie from


class Kitchen:
    """A model over a cache: the prompt in the first blocks, then its chunks, each computed separately."""

    def __init__(self, checkpoint: Checkpoint, model: CausalLM, tokens: np.ndarray, kv_dtype: str = "float32") -> None:
        self.model = model
        self.tokens = torch.from_numpy(tokens.astype(np.int64))
        self.cache = KVCache(checkpoint.kv_layout(BLOCK, kv_dtype), STORE + LENGTH // BLOCK).tensor
        self.sources, self.shifts = torch.full((LENGTH,), -1), torch.zeros(LENGTH, dtype=torch.int64)
        for start in range(CHUNK, NUM_CHUNKS * CHUNK, CHUNK):
            here = slice(start, start + CHUNK)
            self.compute(self.tokens[here], first_block=STORE + start // BLOCK)
            self.sources[here] = torch.arange(start, start + CHUNK) + STORE * BLOCK
            self.shifts[here] = start

    def compute(
        self, tokens: torch.Tensor, first: int = 0, first_block: int = 0, reuse: Reuse | None = None, last: int = 1
    ) -> torch.Tensor:
        """Compute tokens from ``first`` on, with those before it in the cache. Returns logits of the ``last`` ones."""
        prompt = ForwardBatch.of_prompt(tokens, BLOCK, torch.arange(len(tokens) - last, len(tokens)) - first)
        batch = replace(
            prompt,
            tokens=tokens[first:],
            positions=prompt.positions[first:],
            query_starts=torch.tensor([0, len(tokens) - first], dtype=torch.int32),
            block_tables=prompt.block_tables + first_block,
            slots=prompt.slots[first:] + first_block * BLOCK,
            reuse=reuse,
        )
        return self.model.forward(batch, self.cache, NoHook())

    def prompt(self) -> torch.Tensor:
        """Compute the prompt in full. Returns logits of the tail."""
        return self.compute(self.tokens, last=TAIL)

    def blended(self, share: float, ranks: torch.Tensor | None = None) -> torch.Tensor:
        """Compute it blended, after the prefix left in the cache by ``prompt`` or this. Returns logits of the tail."""
        self.compute(self.tokens[:CHUNK])
        reuse = Reuse(self.sources[CHUNK:], self.shifts[CHUNK:], share, ranks)
        return self.compute(self.tokens, CHUNK, reuse=reuse, last=TAIL)

    def kv(self) -> torch.Tensor:
        """KV of the prompt in the cache: float32 [layers, 2, Hkv, tokens, D]."""
        pages = from_page_rows(self.cache[: -(-LENGTH // BLOCK)])
        return pages.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, :LENGTH].clone()


def text(checkpoint: Checkpoint) -> np.ndarray:
    topics = pydoc_data.topics.topics
    return checkpoint.load_tokenizer().encode("\n\n".join(topics[name] for name in sorted(topics)))


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Iterator[CausalLM]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = load_model(checkpoint, FLOAT32, 1024, can_blend=True)
    assert isinstance(model, CausalLM)
    yield model
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def kitchen(checkpoint: Checkpoint, model: CausalLM) -> Kitchen:
    return Kitchen(checkpoint, model, text(checkpoint)[2000 : 2000 + LENGTH])


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.2,
        },
    ],
)
@pytest.mark.parametrize("kernels", [reference, choose_kernels()], ids=["torch", "cpu"])
def test_turned_keys_are_those_of_the_new_position(kernels: Kernels, scaling: dict[str, Any] | None) -> None:
    """The error of float32 angles grows with the position, also in the model's own tables: 1e-4 per thousand tokens."""
    cos, sin = rope_tables(64, 4096, 10_000.0, scaling)
    raw = torch.randn(BLOCK, 3, 64, generator=torch.Generator().manual_seed(0))
    places = torch.arange(BLOCK)
    cache_layer = torch.zeros(8, 2, 3, BLOCK, 64)
    cache_layer[5, 0] = rope(raw, cos, sin, places).transpose(0, 1)
    cache_layer[5, 1] = raw.transpose(0, 1)
    slots = torch.randperm(4 * BLOCK, generator=torch.Generator().manual_seed(1))[:BLOCK]
    sources, shifts = 5 * BLOCK + places, torch.full((BLOCK,), 900)

    kernels.copy_turned(cache_layer, sources, slots, shifts, *turns(cos, sin))

    wanted = rope(raw, cos, sin, 900 + places)
    assert torch.allclose(cache_layer[slots // BLOCK, 0, :, slots % BLOCK], wanted, atol=1e-4, rtol=0)
    assert torch.equal(cache_layer[slots // BLOCK, 1, :, slots % BLOCK], raw)


def test_stored_kv_of_the_first_layer_is_right_anywhere_and_of_others_it_is_not(kitchen: Kitchen) -> None:
    """The first layer depends only on tokens and positions. The others depend on the context, so blending is needed."""
    kitchen.prompt()
    wanted = kitchen.kv()
    reused = kitchen.sources >= 0
    for layer in (0, 10):
        choose_kernels().copy_turned(
            kitchen.cache[:, layer],
            kitchen.sources[reused],
            reused.nonzero().flatten(),
            kitchen.shifts[reused],
            *kitchen.model.turns,
        )
    got = kitchen.kv()
    assert torch.allclose(got[0, 0], wanted[0, 0], atol=1e-4 * float(wanted[0, 0].abs().max()), rtol=0)
    assert torch.equal(got[0, 1], wanted[0, 1])
    assert (got[10] - wanted[10]).abs().max() > 0.1


def test_computing_all_of_it_is_a_full_prefill_to_the_bit(kitchen: Kitchen) -> None:
    logits = kitchen.prompt()
    kv = kitchen.kv()
    kitchen.cache[: LENGTH // BLOCK].zero_()
    assert torch.equal(kitchen.blended(1.0), logits)
    assert torch.equal(kitchen.kv(), kv)


@pytest.mark.slow
def test_the_tokens_that_deviate_most_bring_most_of_the_loss_back(checkpoint: Checkpoint, model: CausalLM) -> None:
    """There must be a real loss to recover, and recomputing random tokens recovers far less. A few short prompts;
    `mooncake bench blend` uses more, of realistic length."""
    random = torch.rand(LENGTH - CHUNK, generator=torch.Generator().manual_seed(2))
    divergences = []
    for start in (2000, 20_000, 40_000, 60_000):
        kitchen = Kitchen(checkpoint, model, text(checkpoint)[start : start + LENGTH])
        wanted = kitchen.prompt().log_softmax(-1)
        ways = (kitchen.blended(0.0), kitchen.blended(0.15, random), kitchen.blended(0.15))
        divergences.append([float((wanted.exp() * (wanted - way.log_softmax(-1))).sum(-1).mean()) for way in ways])
    lost, by_chance, by_deviation = np.mean(divergences, axis=0)
    assert lost > 0.05
    assert lost - by_deviation > 0.5 * lost
    assert lost - by_chance < 0.5 * (lost - by_deviation)


def test_tokens_that_left_are_not_computed(checkpoint: Checkpoint, kitchen: Kitchen) -> None:
    """Neither their queries nor anything else; counted are the rows of each layer's first product."""
    counts: list[int] = []

    class Counting(CpuKernels):
        def rope_write_kv(self, qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
            counts.append(len(qkv))
            return super().rope_write_kv(qkv, *rest)

    weights = load_weights(checkpoint, "float32")
    by_layers = CausalLM(checkpoint.config, weights, 1024, Counting(load_library()), is_fused=False)
    Kitchen(checkpoint, by_layers, kitchen.tokens.numpy()).blended(0.15)
    num_reused = (NUM_CHUNKS - 1) * CHUNK
    counts = counts[-checkpoint.config.num_layers :]  # behind those of the chunks and of the prefix
    assert counts[:2] == [num_reused + TAIL] * 2
    assert counts[-1] == pytest.approx(0.15 * num_reused + TAIL, abs=1)
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_a_pass_in_one_call_blends_like_one_by_layers(tmp_path: Path, kv_dtype: str) -> None:
    """The same tokens leave after the same layers, whose KV is copied, and which the others attend to."""
    write_tiny_model(tmp_path, num_hidden_layers=12, max_position_embeddings=LENGTH + 4, head_dim=16)
    checkpoint = open_checkpoint(str(tmp_path))
    weights, tokens = load_weights(checkpoint, "float32"), np.random.default_rng(1).integers(3, 300, LENGTH)
    results = []
    for is_fused in (True, False):
        model = CausalLM(checkpoint.config, weights, is_fused=is_fused)
        assert isinstance(model.decoder, LayerByLayer) != is_fused
        kitchen = Kitchen(checkpoint, model, tokens, kv_dtype)
        results.append((kitchen.blended(0.15), kitchen.kv()))
    for ours, wanted in zip(*results, strict=True):
        difference = (ours - wanted).abs()
        assert difference.max() < {"float32": 1e-4, "bfloat16": 0.02, "int8": 0.03}[kv_dtype] * wanted.abs().max()


def test_each_sequence_of_a_batch_keeps_its_own_share() -> None:
    """The tokens of each that deviate most, independently of the others, and all without stored KV."""
    lengths, num_reused = (10, 30, 4), (4, 20, 0)
    starts = torch.tensor([0, *np.cumsum(lengths)])
    sources = torch.full((int(starts[-1]),), -1)
    for start, count in zip(starts.tolist(), num_reused, strict=False):
        sources[start : start + count] = torch.arange(count)
    batch = ForwardBatch(
        tokens=torch.arange(len(sources)),
        positions=torch.cat([torch.arange(100, 100 + length) for length in lengths]),
        query_starts=starts.int(),
        context_lens=torch.tensor(lengths, dtype=torch.int32) + 100,
        block_tables=torch.arange(30, dtype=torch.int32).view(3, 10),
        slots=torch.arange(len(sources)),
        logit_rows=starts[1:] - 1,
        reuse=Reuse(sources, torch.ones_like(sources), 0.25, ranks=-torch.arange(len(sources)).float()),
    )
    cache = torch.zeros(4, 21, 2, 1, BLOCK, 8)
    blending = Blending(batch, cache, NoHook(), reference, rope_tables(8, 200, 1e4, None))
    assert blending.narrow(0) is None
    for layer in (1, 20):
        blending.narrow(layer)
    kept = [0, *range(4, 10), *range(10, 15), *range(30, 44)]
    assert blending.batch.tokens.tolist() == kept
    assert blending.batch.query_starts.tolist() == [0, 7, 22, 26]
    assert blending.batch.positions.tolist() == [
        100,
        *range(104, 110),
        *range(100, 105),
        *range(120, 130),
        *range(100, 104),
    ]
    assert blending.batch.context_lens.tolist() == [110, 130, 104]
    assert blending.batch.block_tables[:, 0].tolist() == [0, 10, 20]
    assert [kept[row] for row in blending.batch.logit_rows.tolist()] == [9, 39, 43]


def test_a_step_of_nothing_but_reused_tokens_keeps_one(kitchen: Kitchen) -> None:
    reuse = Reuse(kitchen.sources[CHUNK : 2 * CHUNK], kitchen.shifts[CHUNK : 2 * CHUNK], 0.0)
    kitchen.compute(kitchen.tokens[:CHUNK])
    logits = kitchen.compute(kitchen.tokens[: 2 * CHUNK], CHUNK, reuse=reuse, last=0)
    assert logits.shape[0] == 0
    assert torch.equal(
        kitchen.kv()[5, 1, :, CHUNK + 1], from_page_rows(kitchen.cache[STORE + CHUNK // BLOCK, 5, 1, :, 1])
    )


def test_shares_shrink_to_what_was_asked_for() -> None:
    shares = [share_at(layer, 0.2) for layer in range(12)]
    assert shares[0] == 1.0
    assert shares[1:] == sorted(shares[1:], reverse=True)
    assert shares[1] > 0.2 == pytest.approx(shares[-1])
    assert [share_at(layer, 1.0) for layer in range(12)] == [1.0] * 12


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_pages_of_every_format_are_turned(tmp_path: Path, family: str, kv_dtype: str) -> None:
    """Including keys with norms: stored keys are normalised."""
    write_tiny_model(tmp_path, family, max_position_embeddings=LENGTH + 4, head_dim=16)
    checkpoint = open_checkpoint(str(tmp_path))
    model = load_model(checkpoint, FLOAT32, can_blend=True)
    assert isinstance(model, CausalLM)
    tokens = np.random.default_rng(0).integers(3, 300, LENGTH)
    kitchen = Kitchen(checkpoint, model, tokens, kv_dtype)
    kitchen.prompt()
    first_layer = kitchen.kv()[0]
    reused = (kitchen.sources >= 0).nonzero().flatten()
    kitchen.cache[: LENGTH // BLOCK, 0].zero_()
    choose_kernels().copy_turned(
        kitchen.cache[:, 0], kitchen.sources[reused], reused, kitchen.shifts[reused], *model.turns
    )
    difference = (kitchen.kv()[0] - first_layer)[:, :, reused].abs().max()
    assert difference < {"float32": 1e-4, "bfloat16": 0.04, "int8": 0.1}[kv_dtype]


def test_models_that_cannot_blend_refuse(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "mistral", sliding_window=32)
    with pytest.raises(ModelError, match="full attention"):
        load_model(open_checkpoint(str(tmp_path)), FLOAT32, can_blend=True)
