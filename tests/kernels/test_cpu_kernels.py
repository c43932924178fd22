"""The C++ kernels against their definition, over random ragged batches in a shuffled cache."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from mooncake.kernels import Kernels, reference, warn_of_unused_units
from mooncake.kernels.cpu import CpuKernels
from mooncake.kernels.cpu_build import load_library
from mooncake.kernels.cpu_library import activation_unit, check_mirrors
from mooncake.kernels.cpu_threads import threads_for
from mooncake.kernels.grouped import GroupedCodes
from mooncake.model.pages import layer_pages
from mooncake.precision import Coding, cpu_features

PAGES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8], ids=["fp32 pages", "bf16 pages", "int8 pages"]
)
WEIGHTS = pytest.mark.parametrize(
    ("dtype", "coding"),
    [
        (torch.float32, ""),
        (torch.bfloat16, ""),
        (torch.float32, "int8"),
        (torch.bfloat16, "int8"),
        (torch.bfloat16, "w8a8"),
    ],
    ids=["fp32", "bf16", "int8", "int8 of bf16", "w8a8"],
)
TOLERANCE = 2e-6
"""Largest difference, relative to values of size 1: a few roundings of float32. Narrow pages are read exactly."""
TILE_TOLERANCE = 2e-2
"""Where queries and weights of attention are rounded to bfloat16, in the matrix unit."""
LANE_TOLERANCE = 1e-2
"""Likewise, in lanes of bfloat16 pairs; seen: 7e-3."""

NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
BUILDS = {
    "as it is": ((), ""),
    "without tiles": (NO_TILES, "amx_bf16"),
    "without bf16 lanes and byte products": ((*NO_TILES, "-mno-avx512bf16", "-mno-avx512vnni"), "avx512_bf16"),
    "without AVX-512": (("-march=haswell",), "avx512f"),
}
"""Flags that forbid a part of the processor, and the feature without which they change nothing."""


@pytest.fixture(scope="module", params=BUILDS)
def cpu(request: pytest.FixtureRequest) -> CpuKernels:
    flags, feature = BUILDS[request.param]
    if feature and feature not in cpu_features():
        pytest.skip(f"the processor has no {feature}: this is the library that is tested already")
    kernels = CpuKernels(load_library(flags))
    assert kernels.has_matrix_unit == (not flags and {"amx_bf16", "amx_int8"} <= cpu_features())
    return kernels


def test_a_matrix_unit_that_is_not_used_is_told(cpu: CpuKernels, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unused_units(cpu)
    is_unused = "amx_bf16" in cpu_features() and not cpu.has_matrix_unit
    assert ["matrix unit" in message for message in caplog.messages] == [True] * is_unused


@dataclass(frozen=True)
class Ragged:
    """Queries of several sequences, and a cache that holds their contexts in blocks of random order."""

    query: torch.Tensor
    cache_layer: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None

    def tolerance(self, cpu: CpuKernels) -> float:
        dtype = self.cache_layer.dtype
        if dtype is not torch.float32 and cpu.has_matrix_unit:
            return TILE_TOLERANCE
        return LANE_TOLERANCE if dtype is torch.bfloat16 and activation_unit(cpu.library) else TOLERANCE

    def without_what_is_before(self, window: int) -> Ragged:
        """Tables with an unwritten block instead of those before what all queries see."""
        page, tables = self.cache_layer[:1], self.block_tables.clone()
        for b, context in enumerate(self.context_lens.tolist()):
            first = context - int(self.query_starts[b + 1] - self.query_starts[b])
            seen_from = first - window + 1 if window > 0 else first - first % -window
            tables[b, : max(seen_from, 0) // page.shape[3]] = len(self.cache_layer)
        cache_layer = torch.cat([self.cache_layer, unwritten(*page.shape, dtype=page.dtype)])
        return replace(self, cache_layer=cache_layer, block_tables=tables)

    def attend(self, kernels: Kernels, window: int = 0) -> torch.Tensor:
        return kernels.paged_attention(
            self.query,
            self.cache_layer,
            self.block_tables,
            self.query_starts,
            self.context_lens,
            self.query.shape[2] ** -0.5,
            window,
            self.softcap,
            self.sinks,
            self.alibi_slopes,
        )


def unwritten(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Unwritten memory, of which reads are detected: NaN, or codes with a scale of 3e38."""
    return torch.full(shape, 0x7F if dtype is torch.int8 else float("nan"), dtype=dtype)


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
    contents = torch.randn(sum(counts), 2, num_kv_heads, block_tokens, head_dim, generator=random)
    contents = reference.as_page_rows(contents, dtype)
    cache = unwritten(num_blocks, 3, 2, num_kv_heads, block_tokens, contents.shape[-1], dtype=dtype)  # three layers
    used = 0
    for b, count in enumerate(counts):
        tables[b, :count] = order[used : used + count]
        cache[tables[b, :count].long(), 1] = contents[used : used + count]
        tail = contexts[b] % block_tokens
        if tail:
            cache[tables[b, count - 1], 1, :, :, tail:] = unwritten(1, dtype=dtype)
        used += count
    num_queries = torch.tensor([0] + [new for _, new in lengths])
    fused = torch.randn(int(num_queries.sum()), (group + 2) * num_kv_heads * head_dim, generator=random)
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
PARTS = [(300, 1), (0, 40), (5, 2), (2100, 3)]
"""More tokens than a part of few rows has, and than one of many rows: ``MIXED`` for what takes long."""
LONG = pytest.param(MIXED, marks=pytest.mark.slow)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("lengths", [PREFILL, CHUNKS, DECODE, MIXED], ids=["prefill", "chunks", "decode", "mixed"])
@PAGES
@pytest.mark.parametrize(
    ("block_tokens", "group", "head_dim"),
    [(1, 1, 32), (7, 3, 64), (16, 8, 128), (64, 3, 64), (64, 1, 80), (32, 4, 48)],
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
    tolerance = batch.tolerance(cpu)
    torch.testing.assert_close(batch.attend(cpu), batch.attend(reference), rtol=tolerance, atol=tolerance)


@pytest.mark.sweep
@pytest.mark.parametrize("lengths", [PREFILL, CHUNKS, PARTS, LONG], ids=["prefill", "chunks", "parts", "mixed"])
@PAGES
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 8), (4, 8)])
def test_heads_of_512_that_take_parts_of_several_rows_of_a_page(
    cpu: CpuKernels, lengths: list[tuple[int, int]], dtype: torch.dtype, num_kv_heads: int, group: int
) -> None:
    """Rows are those of layers with heads of 256 (Gemma 4); with int8 codes, larger heads leave their end unused."""
    batch = ragged(lengths, num_kv_heads=num_kv_heads, group=group, head_dim=512, dtype=dtype)
    num_blocks, _, _, block_tokens, _ = batch.cache_layer.shape
    width = reference.as_page_rows(torch.zeros(256), dtype).shape[0]
    pages = unwritten(num_blocks, 5, 2, num_kv_heads, block_tokens, width, dtype=dtype)
    layer = layer_pages(pages, 2, num_kv_heads, 512)
    layer.copy_(batch.cache_layer)
    assert reference.head_dim_of(layer) == 512
    untouched = unwritten(*pages[:, [0, 1, 4]].shape, dtype=dtype)
    assert torch.equal(pages[:, [0, 1, 4]].view(torch.uint8), untouched.view(torch.uint8))
    tolerance = batch.tolerance(cpu) * 4  # of longer sums than elsewhere
    found = replace(batch, cache_layer=layer).attend(cpu)
    torch.testing.assert_close(found, batch.attend(reference), rtol=tolerance, atol=tolerance)
    assert torch.equal(found, batch.attend(cpu))


@pytest.mark.sweep
@pytest.mark.parametrize("lengths", [CHUNKS, PARTS, LONG], ids=["chunks", "parts", "mixed"])
@PAGES
@pytest.mark.parametrize(("group", "head_dim"), [(1, 48), (16, 576), (128, 96)])
def test_keys_alone_are_the_values_too(
    cpu: CpuKernels, lengths: list[tuple[int, int]], dtype: torch.dtype, group: int, head_dim: int
) -> None:
    batch = ragged(lengths, num_kv_heads=1, group=group, head_dim=head_dim, dtype=dtype)
    batch.cache_layer[:, 1] = batch.cache_layer[:, 0]
    alone = replace(batch, cache_layer=batch.cache_layer[:, :1])
    found = alone.attend(cpu)
    assert torch.equal(found, batch.attend(cpu))
    tolerance = batch.tolerance(cpu) * max(head_dim / 128, 1)  # of longer sums than elsewhere
    torch.testing.assert_close(found, alone.attend(reference), rtol=tolerance, atol=tolerance)


@PAGES
def test_of_keys_alone_no_values_are_written(cpu: CpuKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_heads, head_dim, positions = 6, 96, torch.arange(40)
    query_and_key = torch.randn(40, (num_heads + 1) * head_dim)
    angles = torch.outer(torch.arange(40.0), torch.rand(head_dim // 2))
    row = reference.as_page_rows(torch.zeros(head_dim), dtype).shape[0]
    both, alone, defined = (torch.zeros(3, 2, 1, 16, row, dtype=dtype) for _ in range(3))
    rotation = angles.cos(), angles.sin(), positions
    with_values = torch.cat([query_and_key, torch.randn(40, head_dim)], 1)
    expected = cpu.rope_write_kv(with_values, *rotation, both, positions)
    reference.rope_write_kv(query_and_key.clone(), *rotation, defined[:, :1], positions)

    query = cpu.rope_write_kv(query_and_key.clone(), *rotation, alone[:, :1], positions)

    assert torch.equal(query, expected) and torch.equal(alone[:, 0], both[:, 0])
    assert not alone[:, 1].any() and not defined[:, 1].any()
    torch.testing.assert_close(*map(reference.from_page_rows, (alone, defined)), rtol=0.03, atol=0.03)


@PAGES
@pytest.mark.parametrize("window", [1, 9, 64, 400, -1, -9, -64, -400])
def test_a_window_hides_what_is_older(cpu: CpuKernels, dtype: torch.dtype, window: int) -> None:
    batch = ragged(MIXED, dtype=dtype)
    tolerance = batch.tolerance(cpu)
    expected = batch.attend(reference, window)
    torch.testing.assert_close(batch.attend(cpu, window), expected, rtol=tolerance, atol=tolerance)
    given_up = batch.without_what_is_before(window)
    for kernels in (cpu, reference):
        torch.testing.assert_close(given_up.attend(kernels, window), batch.attend(kernels, window), rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [(280, 40), (300, 2)], ids=["many rows", "few"])
@PAGES
def test_a_chunk_is_a_sequence_of_its_own(cpu: CpuKernels, lengths: tuple[int, int], dtype: torch.dtype) -> None:
    """Queries within one chunk see what they would see if their sequence began with it."""
    batch = ragged([lengths], dtype=dtype)
    first, tolerance = 256, batch.tolerance(cpu)
    tables = batch.block_tables[:, first // batch.cache_layer.shape[3] :].contiguous()
    alone = replace(batch, block_tables=tables, context_lens=batch.context_lens - first)
    for kernels in (cpu, reference):
        expected = alone.attend(kernels)
        torch.testing.assert_close(batch.attend(kernels, -64), expected, rtol=tolerance, atol=tolerance)
        assert not torch.allclose(batch.attend(kernels, 64), expected, rtol=1e-2, atol=1e-2)


@PAGES
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.2), (0, 1.5), (64, 1.5), (0, 50.0)])
def test_scores_are_bent_to_within_a_cap(cpu: CpuKernels, dtype: torch.dtype, window: int, softcap: float) -> None:
    plain = ragged(MIXED, dtype=dtype)
    batch = replace(plain, softcap=softcap)
    tolerance = batch.tolerance(cpu)
    expected = batch.attend(reference, window)
    torch.testing.assert_close(batch.attend(cpu, window), expected, rtol=tolerance, atol=tolerance)
    assert softcap == 50 or not torch.allclose(plain.attend(cpu, window), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("lengths", [PREFILL, CHUNKS, DECODE, MIXED], ids=["prefill", "chunks", "decode", "mixed"])
@pytest.mark.parametrize("window", [0, 64])
@PAGES
def test_a_sink_takes_its_part_of_each_heads_attention(
    cpu: CpuKernels, lengths: list[tuple[int, int]], window: int, dtype: torch.dtype
) -> None:
    """Once, however the context is split; a large sink takes all of the attention, a small one nothing."""
    plain = ragged(lengths, dtype=dtype)
    batch = replace(plain, sinks=torch.tensor([-3.0, 0.0, 2.5, 6.0, 300.0, -300.0]))
    tolerance = batch.tolerance(cpu)
    actual, without = batch.attend(cpu, window), plain.attend(cpu, window)
    torch.testing.assert_close(actual, batch.attend(reference, window), rtol=tolerance, atol=tolerance)
    assert not actual[:, 4].any() and torch.equal(actual[:, 5], without[:, 5])
    assert (actual[:, 1:4].norm() / without[:, 1:4].norm()) < 0.9


@pytest.mark.parametrize("lengths", [PREFILL, CHUNKS, DECODE, MIXED], ids=["prefill", "chunks", "decode", "mixed"])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (64, 1.5)])
@PAGES
def test_scores_fall_with_the_distance_of_tokens(
    cpu: CpuKernels, lengths: list[tuple[int, int]], window: int, softcap: float, dtype: torch.dtype
) -> None:
    plain = replace(ragged(lengths, dtype=dtype), softcap=softcap)
    batch = replace(plain, alibi_slopes=torch.tensor([0.0, 2**-8, 0.03, 0.1, 0.7, 40.0]))
    tolerance = batch.tolerance(cpu)
    actual, without = batch.attend(cpu, window), plain.attend(cpu, window)
    torch.testing.assert_close(actual, batch.attend(reference, window), rtol=tolerance, atol=tolerance)
    assert torch.equal(actual[:, 0], without[:, 0])
    assert not torch.allclose(actual[:, 4], without[:, 4], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("new", [1, 40], ids=["few rows", "many"])
@PAGES
def test_far_into_a_context_distances_are_as_exact(cpu: CpuKernels, new: int, dtype: torch.dtype) -> None:
    """A steep head sees its neighbours alone, whatever is before them."""
    batch = replace(ragged([(9000, new)], dtype=dtype), alibi_slopes=torch.full((6,), 0.9))
    tables, lengths = batch.block_tables[:, 550:].contiguous(), batch.context_lens - 550 * 16
    alone, tolerance = replace(batch, block_tables=tables, context_lens=lengths), batch.tolerance(cpu)
    for kernels in (cpu, reference):
        torch.testing.assert_close(batch.attend(kernels), alone.attend(reference), rtol=tolerance, atol=tolerance)


@pytest.mark.sweep
@pytest.mark.parametrize("lengths", [PREFILL, CHUNKS, DECODE, MIXED], ids=["prefill", "chunks", "decode", "mixed"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@PAGES
def test_parts_of_a_context_merge_to_the_whole(
    cpu: CpuKernels, lengths: list[tuple[int, int]], softcap: float, dtype: torch.dtype
) -> None:
    """Cut at a block border that all queries of a sequence see, or after its end if there is none."""
    batch = replace(ragged(lengths, dtype=dtype), softcap=softcap)
    block_tokens, tolerance = batch.cache_layer.shape[3], 2 * batch.tolerance(cpu)
    histories = torch.tensor([history for history, _ in lengths])
    cut = torch.where(histories < block_tokens, batch.context_lens, histories // 2 // block_tokens * block_tokens)
    tables = torch.zeros_like(batch.block_tables)
    for b, skipped in enumerate((cut // block_tokens).tolist()):
        tables[b, : tables.shape[1] - skipped] = batch.block_tables[b, skipped:]
    for kernels in (cpu, reference):
        before, behind = (
            kernels.partial_attention(
                batch.query,
                batch.cache_layer,
                part_tables,
                batch.query_starts,
                part_lens.int(),
                reference.positions_from((histories - first).clamp(min=0), batch.query_starts),
                batch.query.shape[2] ** -0.5,
                softcap,
            )
            for part_tables, part_lens, first in (
                (batch.block_tables, cut, torch.zeros_like(cut)),
                (tables, batch.context_lens - cut, cut),
            )
        )
        reference.merge_attention(*behind, *before)
        torch.testing.assert_close(behind[0], batch.attend(reference), rtol=tolerance, atol=tolerance)
        assert behind[1].isfinite().all()


def test_queries_that_see_nothing_change_nothing(cpu: CpuKernels) -> None:
    batch = ragged([(0, 5), (40, 30)])
    lens, positions = torch.tensor([0, 70]).int(), torch.tensor([*range(5), *range(40, 70)]).int()
    given = (batch.block_tables, batch.query_starts, lens, positions, 0.125)
    output, log_sums = cpu.partial_attention(batch.query, batch.cache_layer, *given)
    assert not output[:5].any() and (log_sums[:5] == float("-inf")).all()
    merged, merged_sums = output.clone(), log_sums.clone()
    empty = torch.zeros_like(output), torch.full_like(log_sums, float("-inf"))
    reference.merge_attention(merged, merged_sums, *empty)
    assert torch.equal(merged, output) and torch.equal(merged_sums, log_sums)
    for wrong in (positions - 1, positions.flip(0)):
        with pytest.raises(IndexError):
            cpu.partial_attention(batch.query, batch.cache_layer, *given[:3], wrong, 0.125)


@PAGES
def test_queries_may_have_any_positions(cpu: CpuKernels, dtype: torch.dtype) -> None:
    """As some tokens of a text that is otherwise known have them. The others' rows are compared with their own."""
    batch = ragged([(0, 300), (0, 40), (500, 90)], dtype=dtype)
    whole = batch.attend(cpu)
    some = torch.tensor([0, 1, 7, 120, 121, 299, 301, 330, *range(341, 430, 3), 429])
    starts = torch.searchsorted(some, batch.query_starts.long()).int()
    positions = reference.positions_from(torch.tensor([0, 0, 500]), batch.query_starts)[some]
    given = (batch.block_tables, starts, batch.context_lens, positions)
    for kernels in (cpu, reference):
        output, _ = kernels.partial_attention(
            batch.query[some], batch.cache_layer, *given, batch.query.shape[2] ** -0.5
        )
        tolerance = batch.tolerance(cpu)
        torch.testing.assert_close(output, whole[some], rtol=tolerance, atol=tolerance)


def test_reference_attention_is_sdpa() -> None:
    batch = ragged([(0, 50)], block_tokens=64, num_kv_heads=2, group=3)
    key, value = batch.cache_layer[int(batch.block_tables[0, 0]), :, :, :50]
    expected = torch.nn.functional.scaled_dot_product_attention(
        batch.query.transpose(0, 1), key, value, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(batch.attend(reference), expected.transpose(0, 1), rtol=2e-6, atol=2e-6)


@PAGES
def test_where_blocks_lie_changes_no_bit(cpu: CpuKernels, dtype: torch.dtype) -> None:
    one, other = (ragged(MIXED, dtype=dtype, order_seed=seed).attend(cpu) for seed in (1, 2))
    assert torch.equal(one, other)


@PAGES
def test_threads_change_no_bit(cpu: CpuKernels, dtype: torch.dtype) -> None:
    batch = ragged(MIXED, dtype=dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = batch.attend(cpu)
        torch.set_num_threads(3)
        together = batch.attend(cpu)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together)


@PAGES
def test_neighbours_change_no_bit(cpu: CpuKernels, dtype: torch.dtype) -> None:
    both = ragged([(700, 1), (90, 30), (2500, 40)], dtype=dtype)
    assert_alone_is_the_same(both, cpu)


@PAGES
def test_a_chunk_cut_elsewhere_changes_no_bit(cpu: CpuKernels, dtype: torch.dtype) -> None:
    assert_cuts_change_no_bit(cpu, ragged([(100, 90)], dtype=dtype), 0, (30, 77))


@pytest.mark.sweep
@PAGES
@pytest.mark.parametrize("window", [0, 70, 400, -64])
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_a_token_alone_has_the_bits_that_it_has_in_a_chunk(
    cpu: CpuKernels, dtype: torch.dtype, window: int, block_tokens: int
) -> None:
    """Decode steps, drafts and prompts of any length agree: a token may be computed again in other company."""
    if cpu.has_matrix_unit and dtype is not torch.float32:
        pytest.skip("a matrix unit adds up chunks in another order")
    cuts = (1, 2, 8, 51, 52, 94, 150)  # 3 rows a token; up to 128 are few
    assert_cuts_change_no_bit(cpu, ragged([(700, 151)], block_tokens=block_tokens, dtype=dtype), window, cuts)


@pytest.mark.sweep
@PAGES
@pytest.mark.parametrize("window", [0, 70, 401, -64])
@pytest.mark.parametrize("block_tokens", [8, 48])
def test_a_token_alone_has_the_bits_that_it_has_beside_a_few(
    cpu: CpuKernels, dtype: torch.dtype, window: int, block_tokens: int
) -> None:
    """Decode steps and drafts agree, also where a matrix unit multiplies several rows and vectors one."""
    for context in (40, 700, 711):  # windows begin at other tokens of a strip
        assert_cuts_change_no_bit(
            cpu, ragged([(context, 10)], block_tokens=block_tokens, dtype=dtype), window, (1, 2, 4, 7)
        )


def assert_cuts_change_no_bit(cpu: CpuKernels, whole: Ragged, window: int, cuts: tuple[int, ...]) -> None:
    together = whole.attend(cpu, window)
    history = int(whole.context_lens[0]) - len(whole.query)
    for first, last in itertools.pairwise((0, *cuts, len(whole.query))):
        starts, lengths = torch.tensor([[0, last - first], [0, history + last]], dtype=torch.int32)
        part = Ragged(whole.query[first:last], whole.cache_layer, whole.block_tables, starts, lengths[1:])
        assert torch.equal(part.attend(cpu, window), together[first:last]), (first, last)


@PAGES
@pytest.mark.parametrize("block_tokens", [16, 64, 48])
def test_neighbours_with_the_same_first_blocks_change_no_bit(
    cpu: CpuKernels, dtype: torch.dtype, block_tokens: int
) -> None:
    """A tree of prefixes: shared ones are computed once for all, and each row as if it were alone."""
    batch = ragged(
        [(1500, 1), (1400, 1), (1499, 1), (900, 2), (530, 1), (20, 1)], block_tokens=block_tokens, dtype=dtype
    )
    tables = batch.block_tables
    tables[1, : 1200 // block_tokens] = tables[0, : 1200 // block_tokens]
    tables[2, : 300 // block_tokens] = tables[0, : 300 // block_tokens]
    tables[3, : 850 // block_tokens] = tables[0, : 850 // block_tokens]
    tables[4, : 530 // block_tokens] = tables[2, : 530 // block_tokens]
    assert_alone_is_the_same(batch, cpu)


@pytest.mark.sweep
@PAGES
@pytest.mark.parametrize(
    ("group", "softcap", "has_sinks", "has_slopes"),
    [
        *((1, 0.0, False, False), (3, 0.0, False, False), (7, 0.0, False, False)),
        *((3, 1.5, False, False), (3, 0.0, True, False), (1, 0.0, False, True), (3, 1.5, True, True)),
    ],
)
def test_many_neighbours_with_the_same_first_blocks_change_no_bit(
    cpu: CpuKernels, dtype: torch.dtype, group: int, softcap: float, has_sinks: bool, has_slopes: bool
) -> None:
    """So many rows that vector lanes run over them: full, partly full, and the remaining few."""
    batch = ragged([(520 + 9 * b, 1) for b in range(37)], block_tokens=64, group=group, dtype=dtype)
    batch.block_tables[1:, :8] = batch.block_tables[0, :8]
    sinks = torch.linspace(-2, 6, 2 * group) if has_sinks else None
    slopes = torch.linspace(0.002, 0.3, 2 * group) if has_slopes else None
    assert_alone_is_the_same(replace(batch, softcap=softcap, sinks=sinks, alibi_slopes=slopes), cpu)


def assert_alone_is_the_same(batch: Ragged, cpu: CpuKernels) -> None:
    together, tolerance = batch.attend(cpu), batch.tolerance(cpu)
    torch.testing.assert_close(together, batch.attend(reference), rtol=tolerance, atol=tolerance)
    for b, table in enumerate(batch.block_tables):
        first, last = batch.query_starts[b : b + 2].tolist()
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        query, context = batch.query[first:last], batch.context_lens[b : b + 1]
        beside = (batch.softcap, batch.sinks, batch.alibi_slopes)
        alone = Ragged(query, batch.cache_layer, table[None], starts, context, *beside)
        assert torch.equal(alone.attend(cpu), together[first:last])


def test_a_block_outside_the_cache_is_refused(cpu: CpuKernels) -> None:
    batch = ragged(DECODE)
    batch.block_tables[2, 0] = batch.cache_layer.shape[0]
    with pytest.raises(IndexError, match="block"):
        batch.attend(cpu)


@PAGES
@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "norm"), [(1, 64, False), (200, 64, True), (33, 80, True), (9, 512, True)]
)
def test_rope_and_cache_write_are_the_reference(
    cpu: CpuKernels, dtype: torch.dtype, num_tokens: int, head_dim: int, norm: bool
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, block_tokens = 6, 2, 16
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    angles = torch.outer(torch.arange(300.0), torch.rand(head_dim // 2))
    positions = torch.randint(300, (num_tokens,))
    slots = torch.randperm(40 * block_tokens)[:num_tokens]
    norms = [torch.randn(head_dim) for _ in range(2)] if norm else [None, None]
    row = reference.as_page_rows(torch.zeros(head_dim), dtype).shape[0]
    caches = [torch.zeros(40, 3, 2, num_kv_heads, block_tokens, row, dtype=dtype) for _ in range(2)]

    expected, query = (
        kernels.rope_write_kv(qkv.clone(), angles.cos(), angles.sin(), positions, cache[:, 1], slots, *norms, 1e-5)
        for kernels, cache in zip((reference, cpu), caches, strict=True)
    )

    torch.testing.assert_close(query, expected, rtol=TOLERANCE, atol=TOLERANCE)
    one_step = {torch.float32: TOLERANCE, torch.bfloat16: 1e-2, torch.int8: 0.03}[dtype]  # of the pages' roundings
    torch.testing.assert_close(*map(reference.from_page_rows, caches), rtol=one_step, atol=one_step)
    assert not caches[1][:, [0, 2]].any()


def test_positions_and_slots_outside_are_refused_and_nothing_is_written(cpu: CpuKernels) -> None:
    cache = torch.zeros(4, 1, 2, 1, 16, 32)
    qkv, table = torch.ones(2, 3 * 32), torch.ones(10, 16)
    inside = torch.tensor([3, 9])
    for positions, slots in ((torch.tensor([3, 10]), inside), (inside, torch.tensor([3, 64])), (inside, -inside)):
        with pytest.raises(IndexError):
            cpu.rope_write_kv(qkv, table, table, positions, cache[:, 0], slots)
    assert not cache.any()


def test_a_structure_that_changes_on_one_side_alone_is_noticed_before_it_is_used(cpu: CpuKernels) -> None:
    class Rope(ctypes.Structure):
        _fields_: ClassVar = [("cos", ctypes.c_void_p)]

    with pytest.raises(AssertionError, match="Rope has changed on one side alone"):
        check_mirrors(cpu.library, {"Rope": Rope})


LINEAR_SHAPES = [(576, 960), (1536, 576), (33, 7), (130, 100), (64, 96), (32, 48)]


def in_16_bits(rows: torch.Tensor) -> torch.Tensor:
    """Round to 16 bits: each row's largest magnitude is 127 * 256 + 127 steps, the range of two signed codes."""
    steps = rows.abs().amax(1, keepdim=True) / 32639
    return (rows / steps.clamp(min=1e-30)).round() * steps


@pytest.mark.sweep(3)
@WEIGHTS
@pytest.mark.parametrize(("inputs", "outputs"), LINEAR_SHAPES)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_linear_is_the_reference(
    cpu: CpuKernels, dtype: torch.dtype, coding: Coding, inputs: int, outputs: int, bias: bool
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    shift = torch.randn(outputs).to(dtype) if bias else None
    defined, ours = reference.linear(weight, shift, coding), cpu.panel_linear(weight, shift, coding)
    for num_tokens in (1, 2, 12, 13, 100):
        hidden = torch.randn(num_tokens, inputs)
        hidden[0, :] *= 0 if num_tokens == 2 else 3
        if dtype is torch.bfloat16 and not coding and activation_unit(cpu.library):
            hidden = hidden.bfloat16().float()
        if dtype is torch.bfloat16 and coding == "int8" and activation_unit(cpu.library):
            hidden = in_16_bits(hidden)
        expected = defined(hidden)
        torch.testing.assert_close(ours(hidden), expected, rtol=1e-5, atol=1e-5)
    wanted = torch.tensor([0, outputs - 1, 3])
    torch.testing.assert_close(ours.rows(wanted), defined.rows(wanted).float(), rtol=0, atol=0)


@pytest.mark.sweep
@WEIGHTS
@pytest.mark.parametrize("place", [3, 574])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(
    cpu: CpuKernels, dtype: torch.dtype, coding: Coding, place: int, value: float
) -> None:
    """Only in its own row: codes could hide it, and the sampler must know."""
    layer = cpu.panel_linear(torch.ones(64, 575).to(dtype), None, coding)
    hidden = torch.randn(20, 575)
    hidden[7, place] = value
    finite = layer(hidden).isfinite().all(1)
    assert finite.tolist() == [row != 7 for row in range(20)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coding", ["int8", "w8a8"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_codes_of_a_checkpoint_are_multiplied_as_they_are(
    cpu: CpuKernels, dtype: torch.dtype, coding: Coding, tokens: int
) -> None:
    """Down to -128, which our own codes never are, and without a transform."""
    torch.manual_seed(6)
    values = torch.randint(-128, 128, (48, 96)).to(torch.int8)
    values[:4] = -128
    codes = reference.Codes(values, torch.rand(48) / 64, coding, dtype)
    hidden, bias = torch.randn(tokens, 96), torch.randn(48)
    defined, ours = reference.linear(codes, bias), cpu.linear(codes, bias)
    given = hidden
    if coding == "w8a8":
        scale = hidden.abs().amax(1, keepdim=True) / 127
        given = (hidden / scale).round() * scale
    exact = given.double() @ (values.double() * codes.scales.double()[:, None]).T + bias
    for layer in (defined, ours):
        torch.testing.assert_close(layer(hidden), exact.float(), atol=2e-3, rtol=1e-4)
        rows = torch.tensor([0, 47, 3])
        torch.testing.assert_close(layer.rows(rows), (values * codes.scales[:, None])[rows])


def in_groups(outputs: int, inputs: int, group: int, bits: int, has_offsets: bool, dtype: torch.dtype) -> GroupedCodes:
    """Random codes with float16 scales; of 4 bits they stand for float4, as an example of any table."""
    shape = outputs, inputs // group
    offsets = torch.randn(shape).half().float() if has_offsets else None
    scales = (torch.randn(shape) / 8).half().float()
    if bits == 8:
        return GroupedCodes(torch.randint(-128, 128, (outputs, inputs)).to(torch.int8), scales, offsets, None, dtype)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    return GroupedCodes(torch.randint(16, (outputs, inputs)).to(torch.uint8), scales, offsets, levels, dtype)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "lowest"), [(4, None), (4, 0), (4, -8), (8, None)])
@pytest.mark.parametrize("has_offsets", [False, True], ids=["no offsets", "offsets"])
@pytest.mark.parametrize("group", [16, 32, 192, 576])
def test_codes_in_groups_give_the_bits_of_their_weights(
    cpu: CpuKernels, dtype: torch.dtype, bits: int, lowest: int | None, has_offsets: bool, group: int
) -> None:
    torch.manual_seed(7)
    codes, bias = in_groups(100, 1152, group, bits, has_offsets, dtype), torch.randn(100)
    if lowest is not None:  # levels one apart are not looked up everywhere
        codes = replace(codes, levels=torch.arange(lowest, lowest + 16.0))
    coded, plain = cpu.panel_linear(codes, bias), cpu.panel_linear(codes.weights(), bias)
    assert coded.num_bytes < plain.num_bytes
    for num_tokens in (1, 7, 12, 13, 100):
        hidden = torch.randn(num_tokens, 1152)
        assert torch.equal(coded(hidden), plain(hidden)), num_tokens
    rows = torch.tensor([99, 0, 42])
    assert torch.equal(coded.rows(rows), codes.weights()[rows].float())
    torch.testing.assert_close(reference.linear(codes, bias)(hidden), plain(hidden), rtol=0.02, atol=2.0)


@pytest.mark.sweep
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_offsets", [False, True], ids=["no offsets", "offsets"])
@pytest.mark.parametrize("group", [16, 32, 192, 576])
def test_codes_in_groups_that_meet_codes(cpu: CpuKernels, bits: int, has_offsets: bool, group: int) -> None:
    torch.manual_seed(7)
    given, bias = in_groups(100, 1152, group, bits, has_offsets, torch.bfloat16), torch.randn(100)
    codes = given.meeting_codes()
    assert torch.equal(codes.weights(), replace(given, dtype=torch.float32).weights())
    ours, defined = cpu.panel_linear(codes, bias), reference.linear(codes, bias)
    hidden = torch.randn(100, 1152)
    hidden[3], hidden[4, 700] = 0, 300
    exact = hidden @ codes.weights().T + bias
    typical = exact.square().mean().sqrt().item()
    torch.testing.assert_close(ours(hidden), defined(hidden), rtol=1e-5, atol=1e-5 * typical)
    assert (ours(hidden) - exact).square().mean().sqrt() < 0.02 * typical
    for num_tokens in (1, 5, 6, 7, 13):
        assert torch.equal(ours(hidden[:num_tokens]), ours(hidden)[:num_tokens]), num_tokens
    hidden[2, 5] = torch.nan
    assert ours(hidden)[2].isnan().all() and ours(hidden)[[0, 1, 3]].isfinite().all()
    rows = torch.tensor([99, 0, 42])
    assert torch.equal(ours.rows(rows), codes.weights()[rows])


def test_codes_whose_levels_are_no_halves_are_dequantised(cpu: CpuKernels) -> None:
    codes = replace(in_groups(64, 64, 32, 4, False, torch.float32), levels=torch.linspace(-1, 1, 16))
    assert codes.meeting_codes() is codes


def test_codes_of_gates_and_ups_lie_side_by_side(cpu: CpuKernels) -> None:
    width = int(cpu.library.mc_panel_width()) // 2
    codes, hidden = in_groups(4 * width, 64, 32, 4, False, torch.float32), torch.randn(3, 64)
    coded, plain = (cpu.panel_linear(each, is_gated=True) for each in (codes, codes.weights()))
    assert torch.equal(coded(hidden), plain(hidden))


def test_w8a8_bears_channels_that_are_much_larger_than_the_rest(cpu: CpuKernels) -> None:
    """One scale for the row would leave few codes for the other channels; after the transform, all keep most."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 576), torch.randn(192, 576) * 576**-0.5
    hidden[:, 100] *= 50
    exact = hidden @ weight.T
    plain_codes, plain_scales = reference.quantise_rows(hidden)
    plain = (plain_codes * plain_scales[:, None]) @ weight.T
    error = (cpu.panel_linear(weight, None, "w8a8")(hidden) - exact).square().mean()
    assert error < (plain - exact).square().mean() / 4


def test_gates_and_ups_lie_side_by_side(cpu: CpuKernels) -> None:
    """A whole decoder computes SwiGLU within the product; what a gated packing holds shows through a plain product."""
    torch.manual_seed(0)
    width = int(cpu.library.mc_panel_width()) // 2
    weight, hidden = torch.randn(4 * width, 40), torch.randn(3, 40)
    gates, ups = (hidden @ weight.T).view(3, 2, 2, width).unbind(1)
    expected = torch.stack([gates, ups], dim=2).flatten(1)
    actual = cpu.panel_linear(weight, is_gated=True)(hidden)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Mixture:
    """Random experts, and tokens that never choose the second one."""

    gate_up: torch.Tensor
    down: torch.Tensor
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    hidden: torch.Tensor
    chosen: torch.Tensor
    shares: torch.Tensor

    @staticmethod
    def random(dtype: torch.dtype, tokens: int, hidden: int, inner: int, biased: bool) -> Mixture:
        torch.manual_seed(8)
        count, per_token = 7, 3
        gate_up = torch.randn(count, 2 * inner, hidden).to(dtype) * hidden**-0.5
        down = torch.randn(count, hidden, inner).to(dtype) * inner**-0.5
        biases = (torch.randn(count, 2 * inner).to(dtype), torch.randn(count, hidden).to(dtype))
        scores = torch.randn(tokens, count)
        scores[:, 1] = -100
        shares, chosen = scores.softmax(-1).topk(per_token)
        return Mixture(gate_up, down, biases if biased else (None, None), torch.randn(tokens, hidden), chosen, shares)

    def by(
        self,
        kernels: Kernels,
        bounds: reference.Bounds | None = None,
        rows: slice = slice(None),
        here: slice = slice(None),
        gate: reference.Gate = "silu",
    ) -> torch.Tensor:
        """Compute only the experts ``here``."""
        biases = [None if each is None else each[here] for each in self.biases]
        experts = kernels.experts(self.gate_up[here], self.down[here], *biases, bounds, here.start or 0, gate)
        return experts(self.hidden[rows], self.chosen[rows], self.shares[rows])


@pytest.mark.sweep
@pytest.mark.parametrize("bounds", [None, reference.Bounds(alpha=1.7, limit=0.8)], ids=["SwiGLU", "with bounds"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner"), [(1, 64, 96), (5, 130, 50), (200, 64, 96), (200, 130, 50), (1500, 160, 416)]
)
def test_a_mixture_of_experts_is_the_reference(
    cpu: CpuKernels, dtype: torch.dtype, tokens: int, hidden: int, inner: int, bounds: reference.Bounds | None
) -> None:
    """The largest number of tokens has more pairs than are held at once."""
    mixture = Mixture.random(dtype, tokens, hidden, inner, biased=bounds is not None)
    expected, actual = mixture.by(reference, bounds), mixture.by(cpu, bounds)
    tolerance = LANE_TOLERANCE if dtype is torch.bfloat16 and activation_unit(cpu.library) else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("inner", "scale"), [(50, 1.0), (96, 30.0)])
def test_gates_of_experts_go_through_gelu_where_that_is_asked_for(cpu: CpuKernels, inner: int, scale: float) -> None:
    """Also where it is nearly the identity, or zero."""
    mixture = Mixture.random(torch.float32, 40, 130, inner, biased=False)
    mixture.hidden.mul_(scale)
    expected, actual = (mixture.by(kernels, gate="gelu_tanh") for kernels in (reference, cpu))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * scale**2)
    assert not torch.allclose(expected, mixture.by(reference), rtol=0.01, atol=0.01 * scale)


@pytest.mark.parametrize("tokens", [1, 40])
def test_codes_of_experts_may_meet_codes(cpu: CpuKernels, tokens: int) -> None:
    mixture = Mixture.random(torch.float32, tokens, 64, 96, biased=True)
    gate_up, down = (
        [in_groups(*shape, 32, 4, True, torch.bfloat16).meeting_codes() for _ in range(7)]
        for shape in ((192, 64), (64, 96))
    )
    expected, actual = (
        kernels.experts(gate_up, down, *mixture.biases)(mixture.hidden, mixture.chosen, mixture.shares)
        for kernels in (reference, cpu)
    )
    # where a sum is rounded differently, what is between the products may become the next code
    assert (actual - expected).square().mean() < 1e-5 * expected.square().mean()


@pytest.mark.parametrize("tokens", [1, 40, 1500])
@pytest.mark.parametrize("inner", [50, 96])
def test_experts_may_have_no_gates(cpu: CpuKernels, inner: int, tokens: int) -> None:
    mixture = Mixture.random(torch.float32, tokens, 130, 2 * inner, biased=False)
    ups = replace(mixture, gate_up=mixture.gate_up[:, : 2 * inner].contiguous())
    expected, actual = (ups.by(kernels, gate="relu2") for kernels in (reference, cpu))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    every = torch.stack(
        [(ups.hidden @ up.T).relu().square() @ down.T for up, down in zip(ups.gate_up, ups.down, strict=True)]
    )
    plain = sum(every[ups.chosen[:, k], torch.arange(tokens)] * ups.shares[:, k, None] for k in range(3))
    torch.testing.assert_close(expected, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_a_mixture_makes_of_a_token_has_the_same_bits_in_any_batch(cpu: CpuKernels, dtype: torch.dtype) -> None:
    mixture = Mixture.random(dtype, 1500, 160, 416, biased=False)
    with threads_for(1):
        together = mixture.by(cpu)
    for first, last in ((0, 1), (7, 9), (40, 240), (1499, 1500)):
        with threads_for(3):
            assert torch.equal(mixture.by(cpu, rows=slice(first, last)), together[first:last])
    for kernels in (cpu, reference):
        assert mixture.by(kernels, rows=slice(0)).shape == (0, 160)


@pytest.mark.parametrize("tokens", [1, 30])
def test_ranks_with_some_of_the_experts_each_make_up_the_whole(cpu: CpuKernels, tokens: int) -> None:
    mixture = Mixture.random(torch.float32, tokens, 64, 96, biased=True)
    for kernels in (cpu, reference):
        parts = [mixture.by(kernels, here=here) for here in (slice(0, 2), slice(2, 3), slice(3, None))]
        torch.testing.assert_close(torch.stack(parts).sum(0), mixture.by(kernels), rtol=1e-5, atol=1e-5)


@pytest.mark.sweep
@WEIGHTS
@pytest.mark.parametrize(("inputs", "outputs"), LINEAR_SHAPES)
def test_a_token_alone_and_in_any_batch_has_the_same_bits(
    cpu: CpuKernels, dtype: torch.dtype, coding: Coding, inputs: int, outputs: int
) -> None:
    torch.manual_seed(0)
    layer = cpu.panel_linear(torch.randn(outputs, inputs).to(dtype), None, coding)
    hidden = torch.randn(101, inputs)
    together = layer(hidden)
    for first, last in ((0, 1), (7, 9), (40, 101), (100, 101)):
        assert torch.equal(layer(hidden[first:last]), together[first:last])


@WEIGHTS
def test_a_token_among_more_rows_than_caches_keep_has_the_same_bits(
    cpu: CpuKernels, dtype: torch.dtype, coding: Coding
) -> None:
    torch.manual_seed(0)
    layer = cpu.panel_linear(torch.randn(96, 576).to(dtype), None, coding)
    hidden = torch.randn(909, 576)
    together = layer(hidden)
    for first, last in ((0, 33), (440, 470), (700, 760), (908, 909)):
        assert torch.equal(layer(hidden[first:last]), together[first:last])


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 576), (100, 576), (5, 77)])
def test_norms_and_silu_are_the_reference(cpu: CpuKernels, num_tokens: int, width: int) -> None:
    torch.manual_seed(0)
    residual, update = torch.randn(2, num_tokens, width) * 3
    weight = torch.randn(width)
    gate_up = torch.randn(num_tokens, 2 * width) * 20
    tolerance = 2e-6

    left, right = residual.clone(), residual.clone()
    expected = reference.add_rms_norm(left, update, weight, 1e-5)
    torch.testing.assert_close(cpu.add_rms_norm(right, update, weight, 1e-5), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(left, right)
    torch.testing.assert_close(
        cpu.rms_norm(residual, weight, 1e-5), reference.rms_norm(residual, weight, 1e-5), rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(cpu.silu_mul(gate_up), reference.silu_mul(gate_up), rtol=tolerance, atol=tolerance)
