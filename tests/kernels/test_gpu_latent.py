"""Latent attention in Triton against the definition: one row a token, whose keys are its values."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from paged_batch import DEVICE, TOLERANCE, Batch, check_within_rounding, keys_read, needs_gpu

from mooncake.kernels import reference
from mooncake.kernels.gpu.attention import DevicePlan
from mooncake.kernels.gpu.kernels import GpuKernels
from mooncake.kernels.gpu.triton_launch import INTERPRETED

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="triton was imported without a GPU and without its interpreter",
)

SMALL = {"num_heads": 20, "num_kv_heads": 1, "head_dim": 48, "num_kinds": 1}  # rows of 32 and 16 columns
MOONLIGHT = {"num_heads": 16, "num_kv_heads": 1, "head_dim": 576, "num_kinds": 1}
DEEPSEEK_V3 = MOONLIGHT | {"num_heads": 128}


@pytest.fixture(scope="module")
def kernels() -> GpuKernels:
    return GpuKernels(DEVICE)


def planned(kernels: GpuKernels, batch: Batch, piece_tokens: int = 0, shared: bool = False) -> DevicePlan:
    return kernels.plan(
        batch.starts.cpu().numpy(),
        batch.contexts.cpu().numpy(),
        num_heads=batch.query.shape[1],
        num_kv_heads=1,
        head_dim=batch.query.shape[2],
        block_tokens=batch.layer.shape[3],
        block_tables=batch.tables.cpu().numpy() if shared else None,
        piece_tokens=piece_tokens,
        wide=batch.query.dtype is torch.float32,
        latent=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [8, 64])
@pytest.mark.parametrize(("queries", "contexts"), [([1, 1, 1], [5, 130, 64]), ([20, 1, 3], [50, 33, 3])])
def test_latent_attention_equals_the_reference(
    kernels: GpuKernels, queries: list[int], contexts: list[int], block_tokens: int, dtype: torch.dtype
) -> None:
    batch = Batch(queries, contexts, dtype, block_tokens=block_tokens, **SMALL)
    expected = reference.paged_attention(*batch.arguments)
    actual = kernels.paged_attention(*batch.arguments)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 6), (16, 24), (33, 32), (40, 72)])
def test_any_number_of_heads_shares_tiles_and_any_row_has_two_parts(
    kernels: GpuKernels, num_heads: int, head_dim: int
) -> None:
    for dtype in TOLERANCE:
        shape = SMALL | {"num_heads": num_heads, "head_dim": head_dim}
        batch = Batch([1, 5], [70, 29], dtype, **shape)
        expected = reference.paged_attention(*batch.arguments)
        actual = kernels.paged_attention(*batch.arguments)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [MOONLIGHT, DEEPSEEK_V3], ids=["moonlight", "deepseek-v3"])
@pytest.mark.parametrize(("queries", "contexts"), [([1, 1], [70, 5]), ([3], [40])])
def test_rows_as_they_are_published(
    kernels: GpuKernels, queries: list[int], contexts: list[int], shape: dict[str, int]
) -> None:
    batch = Batch(queries, contexts, torch.bfloat16, block_tokens=64, **shape)
    check_within_rounding(batch, kernels.paged_attention(*batch.arguments), batch.layer)


def test_pieces_of_a_context_are_merged_to_the_same(kernels: GpuKernels) -> None:
    batch = Batch([1, 1, 6], [400, 33, 260], **SMALL)
    split = planned(kernels, batch, piece_tokens=48)
    assert split.partial.shape[0] > 10
    expected = reference.paged_attention(*batch.arguments)
    torch.testing.assert_close(kernels.paged_attention(*batch.arguments, plan=split), expected, atol=2e-5, rtol=2e-5)


def test_a_shared_prefix_is_read_once_by_the_tokens_that_fit_into_a_tile(kernels: GpuKernels) -> None:
    few = SMALL | {"num_heads": 8}
    batch = Batch([1] * 4, [560, 530, 545, 516], shared_blocks=32, **few)
    plan = planned(kernels, batch, shared=True)
    assert [one.tile_tokens for one in plan.passes] == [2, 2]
    assert keys_read(plan) == 560 + 530 + 545 + 516 - 2 * 512
    expected = reference.paged_attention(*batch.arguments)
    torch.testing.assert_close(kernels.paged_attention(*batch.arguments, plan=plan), expected, atol=2e-5, rtol=2e-5)
    many = planned(kernels, Batch([1] * 4, [560, 530, 545, 516], shared_blocks=32, **SMALL), shared=True)
    assert len(many.passes) == 1, "a token's heads fill a tile: reading together would save nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_rows_carry_one_scale_for_keys_and_values(kernels: GpuKernels, dtype: torch.dtype) -> None:
    tokens, head_dim = 24, SMALL["head_dim"]
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(tokens, 21 * head_dim, generator=generator).to(dtype).to(DEVICE)  # 20 queries and a key
    angles = torch.rand(100, head_dim // 2, generator=generator).to(DEVICE)
    rest = (angles.cos(), angles.sin(), torch.arange(tokens, device=DEVICE))
    slots = torch.arange(16, 16 + tokens, device=DEVICE)
    caches = [torch.zeros((3, 1, 1, 16, head_dim + 4), dtype=torch.int8, device=DEVICE) for _ in range(2)]
    tables = torch.tensor([[1, 2]], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    arguments = (tables, starts, starts[1:].clone(), head_dim**-0.5)
    wanted = reference.rope_write_kv(rows.clone(), *rest, caches[0], slots)
    query = kernels.rope_write_kv(rows.clone(), *rest, caches[1], slots)
    torch.testing.assert_close(query, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    expected = reference.paged_attention(query, caches[1], *arguments)
    actual = kernels.paged_attention(query, caches[1], *arguments)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert (caches[0].int() - caches[1].int())[..., :head_dim].abs().max() <= 1  # ties may round either way


@pytest.mark.parametrize("num_heads", [5, 40])
def test_the_row_of_a_token_is_turned_and_written_once(kernels: GpuKernels, num_heads: int) -> None:
    """Programs share out the 40 heads; one of them writes the row."""
    tokens, head_dim = 5, 144
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(tokens, (num_heads + 1) * head_dim, generator=generator).to(DEVICE)
    angles = torch.rand(50, head_dim // 2, generator=generator).to(DEVICE) * 6
    positions = torch.tensor([3, 0, 49, 7, 8], device=DEVICE)
    slots = torch.tensor([9, 31, 0, 8, -1], device=DEVICE)
    caches = [torch.zeros((4, 1, 1, 8, head_dim), device=DEVICE) for _ in range(2)]
    rest = (angles.cos(), angles.sin(), positions)
    last = slots.clone()
    last[-1] = 30  # the reference has no call for tokens without a slot: their row is cleared again
    expected = reference.rope_write_kv(rows.clone(), *rest, caches[0], last)
    caches[0][30 // 8, 0, 0, 30 % 8] = 0
    actual = kernels.rope_write_kv(rows.clone(), *rest, caches[1], slots)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(caches[1], caches[0], atol=2e-5, rtol=2e-5)


@needs_gpu
@pytest.mark.parametrize("shape", [MOONLIGHT, DEEPSEEK_V3], ids=["moonlight", "deepseek-v3"])
@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize(
    ("queries", "contexts"), [([1] * 3, [300, 64, 1029]), ([40, 1, 33], [200, 90, 33]), ([1] * 4, [5000] * 3 + [31])]
)
def test_latent_attention_as_it_is_served_equals_the_reference(
    kernels: GpuKernels, queries: list[int], contexts: list[int], block_tokens: int, shape: dict[str, int]
) -> None:
    batch = Batch(queries, contexts, torch.bfloat16, block_tokens=block_tokens, **shape)
    check_within_rounding(batch, kernels.paged_attention(*batch.arguments), batch.layer)
    values = batch.layer.float().nan_to_num()
    scales = values.abs().amax(-1) / 127
    codes = (values / scales.clamp(min=1e-9)[..., None]).round().to(torch.int8)
    rows = torch.cat([codes, scales[..., None].view(torch.int8)], -1)
    query, _, *rest = batch.arguments
    check_within_rounding(batch, kernels.paged_attention(query, rows, *rest), codes * scales[..., None])
    exact = Batch(queries, contexts, torch.float32, block_tokens=block_tokens, **shape)
    expected = reference.paged_attention(*exact.arguments)
    torch.testing.assert_close(kernels.paged_attention(*exact.arguments), expected, atol=1e-4, rtol=1e-4)
