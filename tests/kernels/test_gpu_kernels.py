"""Triton kernels against the definition in ``reference``: compiled on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from paged_batch import DEVICE, TOLERANCE, Batch, check_within_rounding, keys_read, needs_gpu

from mooncake.kernels import reference
from mooncake.kernels.gpu import triton_elementwise as elementwise
from mooncake.kernels.gpu.kernels import GpuKernels, copy_pages
from mooncake.kernels.gpu.products import Int8Linear, W8A8Linear, product_tiles
from mooncake.kernels.gpu.triton_launch import INTERPRETED
from mooncake.precision import Coding

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="triton was imported without a GPU and without its interpreter",
)

SINKS = torch.tensor([-3.0, 0.0, 1.0, 2.5, 6.0, 60.0], device=DEVICE)  # of the six heads; the last sees little else
SLOPES = torch.tensor([0.0, 2**-8, 0.03, 0.1, 0.7, 4.0], device=DEVICE)


@pytest.fixture(scope="module")
def kernels() -> GpuKernels:
    return GpuKernels(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [([1], [1]), ([1, 1, 1], [5, 300, 64]), ([7], [7]), ([40, 1, 3], [90, 33, 3]), ([33], [64])],
)
def test_attention_equals_the_reference(
    kernels: GpuKernels, queries: list[int], contexts: list[int], dtype: torch.dtype
) -> None:
    batch = Batch(queries, contexts, dtype)
    expected = reference.paged_attention(*batch.arguments)
    torch.testing.assert_close(
        kernels.paged_attention(*batch.arguments), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("block_tokens", [8, 16, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(3, 3, 24), (9, 3, 64), (8, 1, 32)])
def test_any_page_size_and_head_shape(
    kernels: GpuKernels, num_heads: int, num_kv_heads: int, head_dim: int, block_tokens: int
) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
    batch = Batch([1, 5], [70, 29], **shape)
    expected = reference.paged_attention(*batch.arguments)
    torch.testing.assert_close(kernels.paged_attention(*batch.arguments), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [1, 10, 64, -1, -10, -32])
def test_a_window_that_slides_or_is_a_chunk(kernels: GpuKernels, window: int) -> None:
    batch = Batch([1, 20], [150, 47])
    expected = reference.paged_attention(*batch.arguments, window)
    torch.testing.assert_close(kernels.paged_attention(*batch.arguments, window), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("softcap", "window"), [(0.2, 0), (1.5, 10), (50.0, 0)])
def test_scores_are_bent_to_within_a_cap(kernels: GpuKernels, softcap: float, window: int) -> None:
    batch = Batch([1, 20], [150, 47])
    expected = reference.paged_attention(*batch.arguments, window, softcap)
    actual = kernels.paged_attention(*batch.arguments, window, softcap)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    assert softcap == 50 or not torch.allclose(kernels.paged_attention(*batch.arguments, window), expected, atol=1e-2)


@pytest.mark.parametrize("window", [0, 10])
def test_a_sink_takes_its_part_of_each_heads_attention(kernels: GpuKernels, window: int) -> None:
    batch = Batch([1, 20], [150, 47])
    expected = reference.paged_attention(*batch.arguments, window, sinks=SINKS)
    actual = kernels.paged_attention(*batch.arguments, window, sinks=SINKS)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    assert not torch.allclose(kernels.paged_attention(*batch.arguments, window), expected, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (10, 1.5)])
def test_scores_fall_with_the_distance_of_tokens(
    kernels: GpuKernels, window: int, softcap: float, dtype: torch.dtype
) -> None:
    batch = Batch([1, 20], [150, 47], dtype)
    arguments = (*batch.arguments, window, softcap)
    expected = reference.paged_attention(*arguments, alibi_slopes=SLOPES)
    actual = kernels.paged_attention(*arguments, alibi_slopes=SLOPES)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not torch.allclose(kernels.paged_attention(*arguments), expected, atol=1e-2)


def test_split_contexts_merge_to_the_same(kernels: GpuKernels) -> None:
    batch = Batch([1, 1, 6], [400, 33, 260])
    plan = kernels.plan(
        batch.starts.cpu().numpy(),
        batch.contexts.cpu().numpy(),
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        block_tokens=16,
        piece_tokens=48,
    )
    for of_heads in ({}, {"sinks": SINKS}, {"alibi_slopes": SLOPES}):  # a sink counts once in all pieces
        expected = reference.paged_attention(*batch.arguments, **of_heads)
        actual = kernels.paged_attention(*batch.arguments, **of_heads, plan=plan)
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_a_cascade_over_a_shared_prefix_equals_the_flat_pass(kernels: GpuKernels) -> None:
    batch = Batch([1] * 5, [560, 530, 545, 516, 529], shared_blocks=32)
    options = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "block_tokens": 16}
    host = (batch.starts.cpu().numpy(), batch.contexts.cpu().numpy())
    plan = kernels.plan(*host, block_tables=batch.tables.cpu().numpy(), **options)
    assert len(plan.passes) == 2
    assert keys_read(plan) == 512 + (560 + 530 + 545 + 516 + 529) - 5 * 512
    for sinks in (None, SINKS):
        expected = reference.paged_attention(*batch.arguments, sinks=sinks)
        actual = kernels.paged_attention(*batch.arguments, sinks=sinks, plan=plan)
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


AS_SERVED = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}  # of an 8B model


@needs_gpu
@pytest.mark.parametrize("pages", ["bfloat16", "int8", "int8 beside its scales"])
@pytest.mark.parametrize("block_tokens", [16, 64, 128])
@pytest.mark.parametrize(
    ("queries", "contexts"),
    [([1] * 3, [300, 64, 1029]), ([40, 1, 33], [200, 90, 33]), ([2048], [2600]), ([1] * 4, [5000] * 3 + [31])],
)
def test_attention_as_it_is_served_equals_the_reference(
    kernels: GpuKernels, queries: list[int], contexts: list[int], block_tokens: int, pages: str
) -> None:
    batch = Batch(queries, contexts, torch.bfloat16, block_tokens=block_tokens, **AS_SERVED)
    query, layer, *rest = batch.arguments
    if pages == "bfloat16":
        check_within_rounding(batch, kernels.paged_attention(*batch.arguments), layer)
        return
    values = layer.float().nan_to_num()
    scales = values.abs().amax(-1) / 127
    codes = (values / scales.clamp(min=1e-9)[..., None]).round().to(torch.int8)
    if pages == "int8":
        rows = torch.cat([codes, scales[..., None].view(torch.int8)], -1)
        actual = kernels.paged_attention(query, rows, *rest)
    else:
        actual = kernels.paged_attention(query, codes, *rest, scales=scales)
    check_within_rounding(batch, actual, codes * scales[..., None])


@needs_gpu
@pytest.mark.parametrize("sequences", [5, 40])
def test_a_cascade_as_it_is_served_equals_the_reference(kernels: GpuKernels, sequences: int) -> None:
    contexts = [1024 + 5 + 3 * index for index in range(sequences)]
    batch = Batch([1] * sequences, contexts, torch.bfloat16, block_tokens=64, shared_blocks=16, **AS_SERVED)
    host = (batch.starts.cpu().numpy(), batch.contexts.cpu().numpy())
    plan = kernels.plan(*host, block_tables=batch.tables.cpu().numpy(), block_tokens=64, **AS_SERVED)
    assert plan.passes[0].tile_tokens == (16 if sequences <= 16 else 32)
    check_within_rounding(batch, kernels.paged_attention(*batch.arguments, plan=plan), batch.layer)


def test_where_pages_lie_changes_no_bit(kernels: GpuKernels) -> None:
    batch = Batch([1, 4], [120, 64], torch.bfloat16)
    before = kernels.paged_attention(*batch.arguments)
    order = torch.randperm(batch.cache.shape[0], generator=torch.Generator().manual_seed(9)).to(DEVICE)
    moved = torch.empty_like(batch.cache)
    moved[order] = batch.cache
    batch.layer, batch.tables = moved[:, 1], order[batch.tables.long()].int()
    assert torch.equal(before, kernels.paged_attention(*batch.arguments))


def test_a_plan_in_old_buffers_replaces_the_plan_before(kernels: GpuKernels) -> None:
    long, short = Batch([1, 1], [400, 380]), Batch([1, 1], [20, 31], seed=1)
    options = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "block_tokens": 16, "piece_tokens": 64}
    buffers = kernels.plan(long.starts.cpu().numpy(), long.contexts.cpu().numpy(), **options)
    again = kernels.plan(short.starts.cpu().numpy(), short.contexts.cpu().numpy(), buffers=buffers, **options)
    assert again is buffers
    expected = reference.paged_attention(*short.arguments)
    torch.testing.assert_close(kernels.paged_attention(*short.arguments, plan=again), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
def test_coded_pages_are_written_and_read_with_their_scales(kernels: GpuKernels, codes: torch.dtype) -> None:
    if codes is torch.float8_e4m3fn and (INTERPRETED or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("neither the interpreter nor an A100 has float8")
    tokens, num_heads, num_kv_heads, head_dim, block_tokens = 40, 4, 2, 32, 16
    generator = torch.Generator().manual_seed(3)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(tokens, width, generator=generator).to(DEVICE)
    cos = torch.ones(64, head_dim // 2, device=DEVICE)
    sin = torch.zeros(64, head_dim // 2, device=DEVICE)
    cache = torch.zeros((4, 2, num_kv_heads, block_tokens, head_dim), dtype=codes, device=DEVICE)
    scales = torch.zeros((4, 2, num_kv_heads, block_tokens), device=DEVICE)
    slots = torch.arange(16, 16 + tokens, device=DEVICE)
    positions = torch.arange(tokens, device=DEVICE)
    query = kernels.rope_write_kv(qkv.clone(), cos, sin, positions, cache, slots, scales=scales)
    heads = qkv.view(tokens, -1, head_dim)
    written = cache.float() * scales[..., None]
    keys = written[1:, 0].permute(0, 2, 1, 3).flatten(0, 1)[:tokens]
    step = (
        heads[:, num_heads : num_heads + num_kv_heads].abs().amax(-1, keepdim=True)
        / (127 if codes is torch.int8 else 8)
    ).cpu()
    assert ((keys - heads[:, num_heads : num_heads + num_kv_heads]).abs().cpu() <= step * 0.5 + 1e-6).all()
    tables = torch.tensor([[1, 2, 3]], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    contexts = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
    arguments = (tables, starts, contexts, head_dim**-0.5)
    expected = reference.paged_attention(query, written, *arguments)
    actual = kernels.paged_attention(query, cache, *arguments, scales=scales)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_an_int8_cache_may_carry_its_scales_in_its_rows(kernels: GpuKernels) -> None:
    tokens, num_heads, num_kv_heads, head_dim, block_tokens = 20, 4, 2, 32, 16
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=torch.Generator().manual_seed(8))
    angles = torch.rand(64, head_dim // 2, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    rest = (angles.cos(), angles.sin(), torch.arange(tokens, device=DEVICE))
    shape = (3, 2, num_kv_heads, block_tokens, head_dim + reference.SCALE_BYTES)
    caches = [torch.zeros(shape, dtype=torch.int8, device=DEVICE) for _ in range(2)]
    slots = torch.arange(16, 16 + tokens, device=DEVICE)
    tables = torch.tensor([[1, 2]], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    arguments = (tables, starts, starts[1:].clone(), head_dim**-0.5)
    results = []
    for functions, cache in zip((reference, kernels), caches, strict=True):
        query = functions.rope_write_kv(qkv.to(DEVICE).clone(), *rest, cache, slots)
        results.append(functions.paged_attention(query, cache, *arguments))
    torch.testing.assert_close(results[1], results[0], atol=2e-2, rtol=2e-2)
    assert (caches[0].int() - caches[1].int())[..., :head_dim].abs().max() <= 1  # ties may round either way


@pytest.mark.parametrize(
    ("head_dim", "block_tokens", "window", "softcap", "has_slopes"),
    [
        *((32, 16, 0, 0.0, False), (48, 8, 0, 0.0, False), (64, 64, 20, 0.0, False), (64, 64, -80, 0.0, False)),
        *((32, 64, 0, 1.5, False), (32, 32, 10, 0.5, False), (32, 16, 0, 0.0, True), (32, 32, 10, 0.5, True)),
    ],
)
def test_codes_are_read_in_pairs_whatever_their_scales_are(
    kernels: GpuKernels, head_dim: int, block_tokens: int, window: int, softcap: float, has_slopes: bool
) -> None:
    """Rows of zeros, or a million times as large as others, in pieces that are merged."""
    generator = torch.Generator().manual_seed(5)
    contexts, num_heads, num_kv_heads = [1, 90, 200], 6, 2
    per_sequence = -(-max(contexts) // block_tokens)
    shape = (3 * per_sequence, 2, num_kv_heads, block_tokens)
    codes = torch.randint(-127, 128, (*shape, head_dim), generator=generator).to(torch.int8)
    scales = torch.rand(shape, generator=generator) * 0.02
    scales[:, 1] *= torch.tensor([0.0, 1e-3, 1.0, 1e3])[torch.randint(4, scales[:, 1].shape, generator=generator)]
    scales[0, 1] = 0.0  # all that the first sequence sees
    rows = torch.cat([codes, scales[..., None].view(torch.int8)], -1).to(DEVICE)
    query = torch.randn(3, num_heads, head_dim, generator=generator).to(DEVICE)
    tables = torch.arange(3 * per_sequence, dtype=torch.int32).view(3, -1).to(DEVICE)
    starts, lengths = (torch.tensor(given, dtype=torch.int32, device=DEVICE) for given in (range(4), contexts))
    written = (codes * scales[..., None]).to(DEVICE)
    arguments = (tables, starts, lengths, head_dim**-0.5, window, softcap)
    slopes = {"alibi_slopes": SLOPES if has_slopes else None}
    expected = reference.paged_attention(query, written, *arguments, **slopes)
    assert not expected[0].any() and expected[1:].abs().amax(-1).min() > 1e-3
    host = (starts.cpu().numpy(), lengths.cpu().numpy())
    split = kernels.plan(
        *host, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_tokens=block_tokens,
        window=window, piece_tokens=64, wide=True, scaled=True,
    )  # fmt: skip
    for plan in (None, split):
        actual = kernels.paged_attention(query, rows, *arguments, **slopes, plan=plan)
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_the_cache_write(kernels: GpuKernels, dtype: torch.dtype, normed: bool) -> None:
    tokens, num_heads, num_kv_heads, head_dim, block_tokens = 9, 3, 1, 16, 8
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype).to(DEVICE)
    angles = torch.rand(50, head_dim // 2, generator=generator).to(DEVICE) * 6
    norms = [torch.rand(head_dim, generator=generator).to(dtype).to(DEVICE) if normed else None for _ in range(2)]
    positions = torch.randperm(50, generator=generator)[:tokens].to(DEVICE)
    slots = torch.randperm(32, generator=generator)[:tokens].to(DEVICE)
    caches = [torch.zeros((4, 2, num_kv_heads, block_tokens, head_dim), dtype=dtype, device=DEVICE) for _ in range(2)]
    rest = (angles.cos(), angles.sin(), positions)
    expected = reference.rope_write_kv(qkv.clone(), *rest, caches[0], slots, *norms, 1e-5)
    actual = kernels.rope_write_kv(qkv.clone(), *rest, caches[1], slots, *norms, 1e-5)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(caches[1], caches[0], atol=tolerance, rtol=tolerance)


def test_a_token_without_a_slot_leaves_the_cache_alone(kernels: GpuKernels) -> None:
    cache = torch.zeros((2, 2, 1, 8, 16), device=DEVICE)
    qkv = torch.randn(2, 3 * 16, device=DEVICE)
    table = torch.zeros(4, 8, device=DEVICE)
    slots = torch.tensor([-1, 9], device=DEVICE)
    kernels.rope_write_kv(qkv, table, table, torch.zeros(2, dtype=torch.int64, device=DEVICE), cache, slots)
    touched = cache.abs().sum((1, 2, 4)).nonzero().tolist()
    assert touched in ([], [[1, 1]])
    assert cache[1, 1, 0, 1].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_silu_equal_the_reference(kernels: GpuKernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, update = (torch.randn(5, 72, generator=generator).to(dtype).to(DEVICE) for _ in range(2))
    weight = torch.rand(72, generator=generator).to(dtype).to(DEVICE)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        kernels.rms_norm(hidden, weight, 1e-5), reference.rms_norm(hidden, weight, 1e-5), atol=tolerance, rtol=tolerance
    )
    ours, theirs = hidden.clone(), hidden.clone()
    actual = kernels.add_rms_norm(ours, update, weight, 1e-5)
    expected = reference.add_rms_norm(theirs, update, weight, 1e-5)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    gate_up = torch.randn(5, 2 * 72, generator=generator).to(dtype).to(DEVICE)
    torch.testing.assert_close(kernels.silu_mul(gate_up), reference.silu_mul(gate_up), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [1, 33, 130])
def test_w8a8_products_are_exact_in_the_codes(tokens: int) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(tokens, 160, generator=generator).to(DEVICE)
    weight, bias = torch.randn(70, 160, generator=generator).to(DEVICE), torch.randn(70, generator=generator).to(DEVICE)
    layer = W8A8Linear(weight, bias, 1)
    mixed = layer.mixed(hidden)
    torch.testing.assert_close(mixed, reference.hadamard(hidden), atol=1e-4, rtol=1e-5)
    codes = torch.empty_like(mixed, dtype=torch.int8)
    scales = torch.empty(tokens, device=DEVICE)
    elementwise.quantise_rows[(tokens,)](mixed, codes, scales, 160, 160, WIDTH_PAD=256)
    largest = mixed.abs().amax(1)
    torch.testing.assert_close(scales, largest / 127)
    # what lies between two codes may become either, by the rounding of a division
    assert (mixed.double() / largest[:, None].double() * 127 - codes).abs().max() <= 0.5 + 1e-4
    expected = (codes.double() @ layer.codes.double().T) * scales[:, None].double() * layer.scales.double()
    expected += bias.double()
    torch.testing.assert_close(layer(hidden).double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer(hidden), hidden @ weight.T + bias, atol=0.6, rtol=0.1)


@pytest.mark.parametrize("coding", ["int8", "w8a8"])
def test_codes_of_a_checkpoint_are_multiplied_as_they_are(kernels: GpuKernels, coding: Coding) -> None:
    generator = torch.Generator().manual_seed(4)
    values = torch.randint(-128, 128, (70, 160), generator=generator).to(torch.int8)
    codes = reference.Codes(values, torch.rand(70, generator=generator) / 64, coding, torch.float32)
    hidden, rows = torch.randn(33, 160, generator=generator), torch.tensor([69, 0])
    defined, layer = reference.linear(codes), kernels.linear(codes)
    torch.testing.assert_close(layer(hidden.to(DEVICE)).cpu(), defined(hidden), atol=5e-2, rtol=1e-2)
    assert torch.equal(layer.rows(rows.to(DEVICE)).cpu(), (values * codes.scales[:, None])[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 33, 130])
def test_int8_weights_meet_activations_as_they_are(kernels: GpuKernels, dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(4)
    weight, bias = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in ((70, 160), (70,)))
    wide = torch.randn(tokens, 320, generator=generator).to(DEVICE, dtype)
    hidden = wide[:, 160:]  # a part of rows, as what attention reads of a product is
    codes, scales, _ = reference.coded(weight, "int8")
    for given in (weight, reference.Codes(codes, scales, "int8", dtype)):
        layer = kernels.linear(given, bias, "int8")
        assert isinstance(layer, Int8Linear)
        expected = hidden.double() @ codes.double().T * scales.double() + bias.double()
        torch.testing.assert_close(
            layer(hidden), expected.to(dtype), atol=1e-4, rtol=2**-7 if dtype.itemsize == 2 else 1e-4
        )
        embedded = (codes * scales[:, None]).to(dtype)[[69, 0]]
        assert torch.equal(layer.rows(torch.tensor([69, 0], device=DEVICE)), embedded)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("outputs", [1024, 4096, 6144, 28_672])
def test_every_multiprocessor_reads_weights_of_a_decode_step(outputs: int, itemsize: int) -> None:
    """A matrix of 4,096 outputs in tiles of 128 has 32 programs: three of four multiprocessors would be idle."""
    for tokens in (1, 32, 64, 128):
        tiles = product_tiles(tokens, outputs, itemsize, 132)
        assert outputs / tiles.columns >= 132 or tiles.columns == 32
        assert tiles.columns == 128 or outputs / (2 * tiles.columns) < 132


def test_pages_are_copied_whole_and_nothing_else() -> None:
    source = torch.arange(6 * 2 * 3 * 700, dtype=torch.float32).view(6, 2, 3, 700).to(DEVICE)
    target = torch.zeros((4, 2, 3, 700), device=DEVICE)
    copy_pages(source, target, torch.tensor([5, 0], device=DEVICE), torch.tensor([1, 3], device=DEVICE))
    assert torch.equal(target[1], source[5]) and torch.equal(target[3], source[0])
    assert not target[0].any() and not target[2].any()


def test_one_layer_of_a_block_is_a_page_as_well() -> None:
    blocks = torch.arange(4 * 3 * 64, dtype=torch.float32).view(4, 3, 64).to(DEVICE)
    target = torch.zeros_like(blocks)
    pages = torch.tensor([2], device=DEVICE)
    copy_pages(blocks[:, 1], target[:, 1], pages, pages)
    assert torch.equal(target[2, 1], blocks[2, 1])
    assert int((target != 0).sum()) == 64


def test_pages_of_different_sizes_are_refused() -> None:
    pages = torch.tensor([0], device=DEVICE)
    with pytest.raises(ValueError, match="same size"):
        copy_pages(torch.zeros(2, 8, device=DEVICE), torch.zeros(2, 10, device=DEVICE), pages, pages)
    with pytest.raises(ValueError, match="8-byte words"):
        copy_pages(torch.zeros(2, 3, device=DEVICE), torch.zeros(2, 3, device=DEVICE), pages, pages)
