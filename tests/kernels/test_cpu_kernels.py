"""The C++ kernels against their definition, over random ragged batches in a shuffled cache."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mooncake.kernels import Kernels, reference
from mooncake.kernels.cpu import CpuKernels, OneDnnLinear, PanelLinear
from mooncake.kernels.cpu_build import load_library

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Largest difference, relative to values of size 1: a few roundings of float32, one of bfloat16."""


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    return CpuKernels(load_library())


@dataclass(frozen=True)
class Ragged:
    """Queries of several sequences, and a cache that holds their contexts in blocks of random order."""

    query: torch.Tensor
    cache_layer: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor

    def attend(self, kernels: Kernels, window: int = 0) -> torch.Tensor:
        return kernels.paged_attention(
            self.query,
            self.cache_layer,
            self.block_tables,
            self.query_starts,
            self.context_lens,
            self.query.shape[2] ** -0.5,
            window,
        )


def ragged(
    lengths: list[tuple[int, int]],
    *,
    block_tokens: int = 16,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    order_seed: int = 0,
) -> Ragged:
    """``lengths``: (history, new tokens) a sequence. Blocks are filled from ``seed`` and placed by ``order_seed``."""
    random = torch.Generator().manual_seed(seed)
    contexts = [history + new for history, new in lengths]
    counts = [-(-context // block_tokens) for context in contexts]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(order_seed)).int()
    tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    contents = torch.randn(sum(counts), 2, num_kv_heads, block_tokens, head_dim, generator=random).to(dtype)
    # a layer of a cache of three layers; what nobody wrote is NaN, so that reading it shows
    cache = torch.full((num_blocks, 3, 2, num_kv_heads, block_tokens, head_dim), float("nan"), dtype=dtype)
    used = 0
    for b, count in enumerate(counts):
        tables[b, :count] = order[used : used + count]
        cache[tables[b, :count].long(), 1] = contents[used : used + count]
        tail = contexts[b] % block_tokens
        if tail:
            cache[tables[b, count - 1], 1, :, :, tail:] = float("nan")
        used += count
    num_queries = torch.tensor([0] + [new for _, new in lengths])
    fused = torch.randn(int(num_queries.sum()), (group + 2) * num_kv_heads * head_dim, generator=random).to(dtype)
    return Ragged(
        query=fused.unflatten(1, (-1, head_dim))[:, : group * num_kv_heads],
        cache_layer=cache[:, 1],
        block_tables=tables,
        query_starts=num_queries.cumsum(0).int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
    )


PREFILL = [(0, 1), (0, 17), (0, 150)]
CHUNKS = [(64, 64), (37, 100), (0, 33), (300, 5)]
DECODE = [(0, 1), (15, 1), (16, 1), (299, 1), (1030, 1)]
MIXED = [(200, 1), (64, 64), (0, 40), (31, 1), (5, 2), (2500, 3), (2500, 40)]


@pytest.mark.parametrize("lengths", [PREFILL, CHUNKS, DECODE, MIXED], ids=["prefill", "chunks", "decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("block_tokens", "group", "head_dim"), [(1, 1, 32), (7, 3, 64), (16, 8, 128), (64, 3, 64), (64, 1, 80), (32, 4, 48)]
)
def test_attention_is_the_reference(
    cpu: CpuKernels,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    block_tokens: int,
    group: int,
    head_dim: int,
) -> None:
    batch = ragged(lengths, block_tokens=block_tokens, group=group, head_dim=head_dim, dtype=dtype)
    torch.testing.assert_close(batch.attend(cpu), batch.attend(reference), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 9, 64, 400])
def test_a_window_hides_what_is_older(cpu: CpuKernels, window: int) -> None:
    batch = ragged(MIXED)
    torch.testing.assert_close(batch.attend(cpu, window), batch.attend(reference, window), rtol=2e-6, atol=2e-6)


def test_reference_attention_is_sdpa() -> None:
    batch = ragged([(0, 50)], block_tokens=64, num_kv_heads=2, group=3)
    key, value = batch.cache_layer[int(batch.block_tables[0, 0]), :, :, :50]
    expected = torch.nn.functional.scaled_dot_product_attention(
        batch.query.transpose(0, 1), key, value, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(batch.attend(reference), expected.transpose(0, 1), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_where_blocks_lie_changes_no_bit(cpu: CpuKernels, dtype: torch.dtype) -> None:
    one, other = (ragged(MIXED, dtype=dtype, order_seed=seed).attend(cpu) for seed in (1, 2))
    assert torch.equal(one, other)


def test_threads_change_no_bit(cpu: CpuKernels) -> None:
    batch = ragged(MIXED)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = batch.attend(cpu)
        torch.set_num_threads(3)
        together = batch.attend(cpu)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together)


def test_neighbours_change_no_bit(cpu: CpuKernels) -> None:
    both = ragged([(700, 1), (90, 30)])
    first = Ragged(
        both.query[:1], both.cache_layer, both.block_tables[:1], both.query_starts[:2], both.context_lens[:1]
    )
    assert torch.equal(first.attend(cpu), both.attend(cpu)[:1])


def test_a_block_outside_the_cache_is_refused(cpu: CpuKernels) -> None:
    batch = ragged(DECODE)
    batch.block_tables[2, 0] = batch.cache_layer.shape[0]
    with pytest.raises(IndexError, match="block"):
        batch.attend(cpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("num_tokens", "head_dim", "norm"), [(1, 64, False), (200, 64, True), (33, 80, True)])
def test_rope_and_cache_write_are_the_reference(
    cpu: CpuKernels, dtype: torch.dtype, num_tokens: int, head_dim: int, norm: bool
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, block_tokens = 6, 2, 16
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    angles = torch.outer(torch.arange(300.0), torch.rand(head_dim // 2))
    positions = torch.randint(300, (num_tokens,))
    slots = torch.randperm(40 * block_tokens)[:num_tokens]
    norms = [torch.randn(head_dim).to(dtype) for _ in range(2)] if norm else [None, None]
    caches = [torch.zeros(40, 3, 2, num_kv_heads, block_tokens, head_dim, dtype=dtype) for _ in range(2)]

    expected, query = (
        kernels.rope_write_kv(qkv.clone(), angles.cos(), angles.sin(), positions, cache[:, 1], slots, *norms, 1e-5)
        for kernels, cache in zip((reference, cpu), caches, strict=True)
    )

    tolerance = 2e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(query, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(caches[1], caches[0], rtol=tolerance, atol=tolerance)
    assert not caches[1][:, [0, 2]].any()


def test_positions_and_slots_outside_are_refused_and_nothing_is_written(cpu: CpuKernels) -> None:
    cache = torch.zeros(4, 1, 2, 1, 16, 32)
    qkv, table = torch.ones(2, 3 * 32), torch.ones(10, 16)
    inside = torch.tensor([3, 9])
    for positions, slots in ((torch.tensor([3, 10]), inside), (inside, torch.tensor([3, 64])), (inside, -inside)):
        with pytest.raises(IndexError):
            cpu.rope_write_kv(qkv, table, table, positions, cache[:, 0], slots)
    assert not cache.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_write_kv_is_the_reference(cpu: CpuKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    key, value = torch.randn(2, 30, 2, 32).to(dtype)
    slots = torch.randperm(64)[:30]
    caches = torch.zeros(2, 4, 3, 2, 2, 16, 32, dtype=dtype)
    reference.write_kv(key, value, caches[0][:, 1], slots)
    cpu.write_kv(key, value, caches[1][:, 1], slots)
    assert caches[0].any()
    assert torch.equal(caches[0], caches[1])


LINEAR_SHAPES = [(576, 960), (1536, 576), (33, 7), (130, 100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("inputs", "outputs"), LINEAR_SHAPES)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_linear_is_the_reference(cpu: CpuKernels, dtype: torch.dtype, inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    shift = torch.randn(outputs).to(dtype) if bias else None
    layers = [reference.linear(weight, shift), cpu.linear(weight, shift), OneDnnLinear(weight, shift)]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for num_tokens in (1, 2, 12, 13, 100):
        hidden = torch.randn(num_tokens, inputs).to(dtype)
        expected, *others = (layer(hidden) for layer in layers)
        for actual in others:
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    wanted = torch.tensor([0, outputs - 1, 3])
    assert all(torch.equal(layer.rows(wanted), weight[wanted]) for layer in layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("inputs", "outputs"), LINEAR_SHAPES)
def test_a_token_alone_and_in_any_batch_has_the_same_bits(
    cpu: CpuKernels, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    torch.manual_seed(0)
    layer = PanelLinear(cpu._linear, cpu._panel_width, torch.randn(outputs, inputs).to(dtype), None)
    hidden = torch.randn(101, inputs).to(dtype)
    together = layer(hidden)
    for first, last in ((0, 1), (7, 9), (40, 101), (100, 101)):
        assert torch.equal(layer(hidden[first:last]), together[first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 576), (100, 576), (5, 77)])
def test_norms_and_silu_are_the_reference(cpu: CpuKernels, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    torch.manual_seed(0)
    residual, update = (torch.randn(2, num_tokens, width) * 3).to(dtype)
    weight = torch.randn(width).to(dtype)
    gate_up = (torch.randn(num_tokens, 2 * width) * 20).to(dtype)
    tolerance = 2e-6 if dtype is torch.float32 else 2e-2

    left, right = residual.clone(), residual.clone()
    expected = reference.add_rms_norm(left, update, weight, 1e-5)
    torch.testing.assert_close(cpu.add_rms_norm(right, update, weight, 1e-5), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(left, right)
    torch.testing.assert_close(
        cpu.rms_norm(residual, weight, 1e-5), reference.rms_norm(residual, weight, 1e-5), rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(cpu.silu_mul(gate_up), reference.silu_mul(gate_up), rtol=tolerance, atol=tolerance)
