"""Plans of GPU attention: whatever the batch, every query reads every visible key once, and pieces are balanced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.kernels.gpu.attention_plan import BEHIND_ALL_KEYS, NO_ROW, AttentionPlan, plan_attention

BLOCK_TOKENS = 16


def plan_of(
    queries: list[int], contexts: list[int], tile_tokens: int = 4, num_processors: int = 4, **options: object
) -> AttentionPlan:
    starts = np.cumsum([0, *queries], dtype=np.int32)
    return plan_attention(
        starts,
        np.array(contexts, np.int32),
        block_tokens=BLOCK_TOKENS,
        num_kv_heads=2,
        tile_tokens=tile_tokens,
        num_processors=num_processors,
        **options,  # type: ignore[arg-type]
    )


def lengths_of(plan: AttentionPlan) -> np.ndarray:
    """Of the runs of keys that its pieces read, per KV head."""
    return plan.pieces[:, 5] - plan.pieces[:, 4]


def keys_of_tokens(plan: AttentionPlan, tables: np.ndarray) -> dict[int, list[tuple[int, int]]]:
    """For each query token the (block, offset) of every key that it reads, from the pieces alone."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for table, first, count, position, begin, end, _, _ in plan.pieces.tolist():
        for offset in range(count):
            last = end if position == BEHIND_ALL_KEYS else min(end, position + offset + 1)
            keys = [(int(tables[table, key // BLOCK_TOKENS]), key % BLOCK_TOKENS) for key in range(begin, last)]
            seen.setdefault(first + offset, []).extend(keys)
    return seen


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], np.ndarray]:
    """Queries, contexts and block tables; neighbours may share leading blocks, nested."""
    count = draw(st.integers(1, 6))
    queries = [draw(st.sampled_from([1, 1, 1, 3, 9])) for _ in range(count)]
    contexts = [query + draw(st.integers(0, 700)) for query in queries]
    blocks = 48
    tables = np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
    for b in range(1, count):
        shared = draw(st.integers(0, 44))
        shared = min(shared, (contexts[b] - queries[b]) // BLOCK_TOKENS, (contexts[b - 1] - 1) // BLOCK_TOKENS)
        tables[b, :shared] = tables[b - 1, :shared]
    return queries, contexts, tables


@given(batches(), st.booleans(), st.sampled_from([0, 64, 256]))
@settings(max_examples=150)
def test_every_query_reads_every_visible_key_once(
    batch: tuple[list[int], list[int], np.ndarray], share: bool, piece_tokens: int
) -> None:
    queries, contexts, tables = batch
    plan = plan_of(queries, contexts, piece_tokens=piece_tokens, block_tables=tables if share else None)
    seen = keys_of_tokens(plan, tables)
    token = 0
    for b, (query, context) in enumerate(zip(queries, contexts, strict=True)):
        for offset in range(query):
            visible = context - query + offset + 1
            expected = [(int(tables[b, key // BLOCK_TOKENS]), key % BLOCK_TOKENS) for key in range(visible)]
            assert sorted(seen[token]) == sorted(expected)
            token += 1


@given(batches(), st.booleans())
@settings(max_examples=100)
def test_rows_and_merges_name_each_part_once(batch: tuple[list[int], list[int], np.ndarray], share: bool) -> None:
    queries, contexts, tables = batch
    plan = plan_of(queries, contexts, piece_tokens=64, block_tables=tables if share else None)
    written = [
        (row + offset, first + offset)
        for _, first, count, _, _, _, row, _ in plan.pieces.tolist()
        if row != NO_ROW
        for offset in range(count)
    ]
    assert sorted(row for row, _ in written) == list(range(plan.num_rows))
    merged = {}
    for index, token in enumerate(plan.merge_tokens.tolist()):
        for row in plan.merge_rows[plan.merge_starts[index] : plan.merge_starts[index + 1]].tolist():
            assert row not in merged
            merged[row] = token
    assert merged == dict(written)
    alone = {int(piece[1]) + offset for piece in plan.pieces if piece[6] == NO_ROW for offset in range(int(piece[2]))}
    assert alone.isdisjoint(merged.values())
    assert alone | set(merged.values()) == set(range(sum(queries)))


def test_a_long_context_among_short_ones_is_cut_so_that_no_processor_waits_for_it() -> None:
    plan = plan_of([1] * 8, [32_000] + [500] * 7, num_processors=132)
    assert lengths_of(plan).max() <= 256
    assert lengths_of(plan).sum() == 32_000 + 7 * 500


def test_a_shared_prefix_is_read_once_for_the_group_and_nested_ones_too() -> None:
    tables = np.arange(16 * 200, dtype=np.int32).reshape(16, 200)
    tables[:, :128] = tables[0, :128]  # 2,048 tokens of all
    tables[8:, 128:160] = tables[8, 128:160]  # 512 more of the second half
    contexts = [2_048 + 600] * 16
    flat = plan_of([1] * 16, contexts, tile_tokens=16)
    tree = plan_of([1] * 16, contexts, tile_tokens=16, block_tables=tables)
    assert lengths_of(flat).sum() == 16 * 2_648
    assert lengths_of(tree).sum() == 2_048 + 512 + 8 * 600 + 8 * 88


@pytest.mark.parametrize(("sequences", "tile_tokens"), [(3, 16), (20, 32), (70, 32)])
def test_shared_keys_take_tiles_that_fit_the_group_and_own_keys_the_smallest(sequences: int, tile_tokens: int) -> None:
    tables = np.arange(sequences * 80, dtype=np.int32).reshape(sequences, 80)
    tables[:, :64] = tables[0, :64]
    options = {"tile_tokens": 4, "num_processors": 132, "shared_tile_tokens": (16, 32)}
    plan = plan_of([1] * sequences, [1_100] * sequences, block_tables=tables, **options)
    shared, own = plan.passes
    assert (shared.tile_tokens, own.tile_tokens) == (tile_tokens, 4)
    assert shared.pieces[:, 2].max() == min(sequences, tile_tokens)
    assert (own.pieces[:, 4] == 1_024).all()
    [flat] = plan_of([1] * sequences, [1_100] * sequences, **options).passes
    assert flat.tile_tokens == 4


@pytest.mark.parametrize(
    ("sequences", "prefix", "longest", "programs"),
    [(64, 32_768, 4_096, 132), (64, 30_000, 3_760, 132), (12, 32_768, 1_008, 264), (32, 2_048, 256, 132)],
)
def test_a_shared_prefix_is_cut_into_one_piece_a_program(
    sequences: int, prefix: int, longest: int, programs: int
) -> None:
    """8 heads of 1 or 2 tiles; cut into quarters, as own keys are, it would be merged four times as often."""
    blocks = prefix // BLOCK_TOKENS
    tables = np.arange(sequences * (blocks + 8), dtype=np.int32).reshape(sequences, -1)
    tables[:, :blocks] = tables[0, :blocks]
    options = {"num_processors": 132, "shared_tile_tokens": (16, 32), "shared_programs": (2, 1), "block_tables": tables}
    starts, contexts = np.arange(sequences + 1, dtype=np.int32), np.full(sequences, prefix + 100, np.int32)
    plan = plan_attention(starts, contexts, block_tokens=BLOCK_TOKENS, num_kv_heads=8, tile_tokens=4, **options)
    lengths = plan.passes[0].pieces[:, 5] - plan.passes[0].pieces[:, 4]
    assert lengths.max() == longest and 8 * len(lengths) <= programs


def test_tiles_that_read_the_same_keys_are_neighbours() -> None:
    pieces = plan_of([64], [4_096], piece_tokens=1_024).passes[0].pieces
    begins = pieces[pieces[:, 5] - pieces[:, 4] == 1_024, 4].tolist()
    assert begins == sorted(begins)


@pytest.mark.parametrize("window", [1, 16, 100])
def test_a_window_reads_only_the_blocks_it_touches(window: int) -> None:
    plan = plan_of([1], [1_000], window=window)
    begin = int(plan.pieces[:, 4].min())
    assert begin % BLOCK_TOKENS == 0
    assert 1_000 - window - BLOCK_TOKENS < begin <= 1_000 - window


@pytest.mark.parametrize("chunk", [16, 100, 998])
def test_a_chunk_reads_only_the_blocks_it_touches(chunk: int) -> None:
    first = 999 // chunk * chunk
    assert int(plan_of([1], [1_000], window=-chunk).pieces[:, 4].min()) == first // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("chunk", [1, 10, 16, 998])
def test_the_queries_of_a_piece_are_in_one_chunk(chunk: int) -> None:
    """The kernel takes the begin of the chunk of a piece's first query for that of all of them."""
    pieces = plan_of([90, 1, 33], [1_000, 17, 33], window=-chunk, tile_tokens=16).pieces
    assert (pieces[:, 3] // chunk == (pieces[:, 3] + pieces[:, 2] - 1) // chunk).all()
    queries = {first + offset for first, count in pieces[:, 1:3].tolist() for offset in range(count)}
    assert queries == set(range(124))


def test_a_fixed_split_makes_a_sequence_independent_of_its_batch() -> None:
    alone = plan_of([1], [5_000], piece_tokens=1_024)
    batched = plan_of([1] * 30, [5_000] * 30, piece_tokens=1_024)
    own = batched.pieces[batched.pieces[:, 0] == 0]
    assert sorted(map(tuple, own[:, 4:6].tolist())) == sorted(map(tuple, alone.pieces[:, 4:6].tolist()))


def test_a_short_rest_is_read_with_the_piece_before() -> None:
    equal = plan_of([1] * 64, [8_192] * 64, num_processors=33)  # equal shares are of 7,952 keys
    assert lengths_of(equal).tolist() == [8_192] * 64
    assert equal.num_rows == 0
    for rest, lengths in ((128, [1_152]), (144, [1_024, 144])):
        [*pieces] = plan_of([1], [1_024 + rest], piece_tokens=1_024).pieces.tolist()
        assert [end - begin for *_, begin, end, _, _ in pieces] == lengths
