"""Groups of layers: the shapes of published models, and pages counted one by one against the formulas."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from empty_rows import num_empty_rows

from mooncake.config import load_config
from mooncake.errors import ConfigError, ModelError
from mooncake.model_config import ModelConfig
from mooncake.page_groups import UNIFORM, PageGroups, groups_of, one_group, page_key, plan_groups
from mooncake.types import BlockKey, KVLayout

CONTEXT = 131072


def every(period: int, num_layers: int, window: int) -> list[int]:
    """One layer in ``period`` sees everything, as Gemma's do."""
    return [0 if layer % period == period - 1 else window for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "num_global", "num_local", "num_rows", "num_empty"),
    [
        pytest.param(every(2, 26, 4096), 1, 1, 13, 0, id="gemma-2-2b"),
        pytest.param(every(2, 42, 4096), 1, 1, 21, 0, id="gemma-2-9b"),
        pytest.param(every(6, 26, 512), 1, 6, 4, 2, id="gemma-3-1b"),
        pytest.param(every(6, 34, 1024), 1, 6, 5, 1, id="gemma-3-4b"),
        pytest.param(every(6, 48, 1024), 1, 5, 8, 0, id="gemma-3-12b"),
        pytest.param(every(6, 62, 1024), 1, 6, 10, 8, id="gemma-3-27b"),
    ],
)
def test_published_models_are_parted_by_their_rarer_kind(
    windows: list[int], num_global: int, num_local: int, num_rows: int, num_empty: int
) -> None:
    groups = plan_groups(windows, CONTEXT)
    assert groups.windows == (0,) * num_global + (windows[0],) * num_local
    assert (groups.num_rows, num_empty_rows(groups)) == (num_rows, num_empty)
    assert sorted(set(groups.places)) == sorted(groups.places), "two layers in one place"
    assert [groups.windows[group] for group, _ in groups.places] == windows
    layout = KVLayout(len(windows), 4, 64, 256, "bfloat16")
    assert groups.page_layout(layout).block_bytes == num_rows * layout.layer_bytes


@pytest.mark.parametrize(
    ("windows", "context", "expected"),
    [
        ([0] * 12, CONTEXT, UNIFORM),
        ([4096] * 12, CONTEXT, PageGroups((4096,))),
        ([4096] * 12, 4096, UNIFORM),
        (every(6, 24, 1024), 1024, UNIFORM),
        ([512, *[0] * 30], CONTEXT, UNIFORM),
        ([512, *[1024] * 30], CONTEXT, PageGroups((1024,))),
    ],
    ids=["none", "all", "all-seen", "both-seen", "hardly-any", "narrower"],
)
def test_what_saves_little_is_one_group(windows: list[int], context: int, expected: PageGroups) -> None:
    groups = plan_groups(windows, context)
    assert groups == expected
    assert num_empty_rows(groups) == 0 and groups.name == ""
    layout = KVLayout(len(windows), 4, 64, 256, "bfloat16")
    assert groups.page_layout(layout) == layout


@pytest.mark.parametrize("block_tokens", [4, 7, 16])
@pytest.mark.parametrize("window", [1, 5, 6, 16, 40])
def test_formulas_count_pages(block_tokens: int, window: int) -> None:
    groups = PageGroups((0, window, window))
    for num_tokens in range(1, 120):
        blocks = range(-(-num_tokens // block_tokens))
        seen = {token // block_tokens for token in range(max(num_tokens - window, 0), num_tokens)}
        assert groups.num_pages(num_tokens, block_tokens) == len(blocks) + 2 * len(seen)
        for at_once in (1, 3, 16):
            touched = {token // block_tokens for token in range(max(num_tokens - window, 0), num_tokens - 1 + at_once)}
            most = groups.most_pages(1, at_once, block_tokens)
            assert most is not None and len(touched) <= most


def test_a_long_context_takes_what_the_papers_say() -> None:
    """8192 tokens, 5 of 6 layers with a window of 1024: (1/6 + 5/6 · 1/8) of what all layers would keep."""
    groups = plan_groups(every(6, 36, 1024), CONTEXT)
    pages = groups.num_pages(8192, 64)
    assert pages * groups.num_rows == 36 * 128 * (1 + 5 / 8) / 6


def test_the_longest_sequence_is_the_last_one_that_fits() -> None:
    groups = PageGroups((0, 24))
    for num_pages in range(2, 60):
        longest = groups.max_model_len(num_pages, 8, 4, 1000) // 4
        assert groups.num_needed(longest, 8, 4) <= num_pages < groups.num_needed(longest + 1, 8, 4)
    assert groups.max_model_len(10_000, 8, 4, 99) == 99


def test_pages_of_all_groups_have_keys_of_their_own() -> None:
    key = BlockKey(bytes(range(32)))
    keys = [page_key(key, group) for group in range(8)]
    assert keys[0] == key and len(set(keys)) == 8 and {len(key) for key in keys} == {32}


def model(windows: list[int]) -> ModelConfig:
    return ModelConfig(
        architecture="gemma3_text",
        num_layers=len(windows),
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=320,
        max_model_len=4096,
        rope_theta=1e4,
        rope_scaling=None,
        rms_eps=1e-6,
        tie_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        sliding_window=None,
        bos_id=None,
        eos_ids=(),
        layer_windows=tuple(windows),
    )


@pytest.mark.parametrize(
    ("settings", "of_hybrid", "of_local"),
    [
        ((), (0, 64, 64), (0,)),
        (("cluster.coupled=1",), (0, 64, 64), (64,)),
        (("model.max_model_len=64",), (0,), (0,)),
        (("block.windows=false",), (0,), (0,)),
        (("decode.device=cuda",), (0, 64, 64), (0,)),
        (("pool_layout.tensor_parallel=2",), (0,), (0,)),
        (("model.keep_hidden=[1]",), (0,), (0,)),
        (("prefill.pipeline_stages=2",), (0,), (0,)),
        (("prefill.context_parallel=2",), (0,), (0,)),
        (("prefill.tensor_parallel=2",), (0,), (0,)),
        (("decode.tensor_parallel=2",), (0,), (0,)),
        (("decode.tensor_parallel=2", "cluster.coupled=1"), (0, 64, 64), (64,)),
    ],
)
def test_all_nodes_of_a_cluster_part_layers_alike(
    settings: tuple[str, ...], of_hybrid: tuple[int, ...], of_local: tuple[int, ...]
) -> None:
    """In a cluster with hand-offs one group must keep every block, because a prefix is found by its first blocks."""
    config = load_config(None, list(settings))
    assert config.page_groups(model(every(3, 6, 64))).windows == of_hybrid
    assert config.page_groups(model([64] * 6)).windows == of_local


Heads = tuple[int, int]  # KV heads, and the elements of each


def of_two_kinds(period: int, num_layers: int, window: int, local: Heads, wide: Heads, shared: int = 0) -> ModelConfig:
    """One layer in ``period`` sees everything and has ``wide`` heads; the last ``shared`` have no KV of their own."""
    windows, first = every(period, num_layers, window), num_layers - shared
    last_of = {seen: layer for layer, seen in enumerate(windows[:first])}
    return replace(
        model(windows),
        num_heads=32,
        max_model_len=CONTEXT,
        layer_heads=tuple(local if seen else wide for seen in windows),
        kv_sources=(*range(first), *(last_of[seen] for seen in windows[first:])) if shared else (),
    )


@pytest.mark.parametrize(
    ("config", "row", "rows", "windows", "num_rows", "num_empty"),
    [
        pytest.param(
            of_two_kinds(5, 35, 512, (1, 256), (1, 512), 20), (1, 256), (1, 2), [0, *[512] * 2], 6, 0, id="gemma-4-e2b"
        ),
        pytest.param(
            of_two_kinds(6, 42, 512, (2, 256), (2, 512), 18),
            (2, 256),
            (1, 2),
            [0, 0, *[512] * 5],
            4,
            0,
            id="gemma-4-e4b",
        ),
        pytest.param(
            of_two_kinds(6, 60, 1024, (16, 256), (4, 512)), (8, 256), (2, 1), [0, *[1024] * 7], 16, 18, id="gemma-4-31b"
        ),
        pytest.param(
            of_two_kinds(6, 30, 1024, (8, 256), (2, 512)), (4, 256), (2, 1), [0, *[1024] * 7], 8, 9, id="gemma-4-26b"
        ),
    ],
)
def test_layers_with_other_heads_take_other_numbers_of_rows(
    config: ModelConfig, row: Heads, rows: tuple[int, int], windows: list[int], num_rows: int, num_empty: int
) -> None:
    """``rows``: of a local layer, and of a global one."""
    groups = groups_of(config, CONTEXT)
    assert config.row_heads == row
    assert {(config.window_of(layer) > 0, n) for layer, n in zip(config.kv_owners, groups.rows, strict=True)} == {
        (True, rows[0]),
        (False, rows[1]),
    }
    assert list(groups.windows) == windows
    assert (groups.num_rows, num_empty_rows(groups)) == (num_rows, num_empty)
    for dtype in ("float32", "bfloat16", "int8"):
        layout = KVLayout(sum(groups.rows), *reversed_heads(row), dtype)
        for layer, count in zip(config.kv_owners, groups.rows, strict=True):
            own = KVLayout(1, *reversed_heads(config.heads_of(layer)), dtype)
            assert (count - 1) * layout.layer_bytes < own.layer_bytes <= count * layout.layer_bytes


def reversed_heads(heads: Heads) -> tuple[int, int, int]:
    """KV heads, tokens of a block, head size."""
    return heads[0], 64, heads[1]


def test_rows_of_layers_never_overlap_and_all_become_final_once() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(300):
        windows = [draw.choice([0, 16, 64, 64, 512]) for _ in range(draw.randint(1, 30))]
        rows = [draw.choice([1, 1, 2, 3, 17]) for _ in windows]
        groups = plan_groups(windows, draw.choice([32, 4096]), rows)
        assert groups.num_groups <= 8 and (groups.rows == tuple(rows) if max(rows) > 1 else groups.rows == ())
        taken = [(group, row) for group, there in map(groups.rows_of, range(len(rows))) for row in there]
        final = [(group, row) for group, there in map(groups.rows_with, range(len(rows))) for row in there]
        assert len(set(taken)) == len(taken) == sum(rows)
        if groups.places:
            pages = [(group, row) for group in range(groups.num_groups) for row in range(groups.num_rows)]
            assert sorted(final) == pages and num_empty_rows(groups) == len(pages) - len(taken)
        for layer, count in enumerate(rows):
            group, there = groups.rows_of(layer)
            assert len(there) == count and groups.rows_with(layer)[1][:count] == there
            assert groups.windows[group] == 0 or groups.windows[group] >= windows[layer] > 0


def test_rows_count_when_layers_are_weighed() -> None:
    """A few layers that see everything and are large; the others may as well keep everything too."""
    windows = [0, 0, *[64] * 4]
    assert plan_groups(windows, CONTEXT).num_groups == 3
    assert plan_groups(windows, CONTEXT, [30, 30, 1, 1, 1, 1]).num_groups == 1


def test_names_say_how_many_rows_layers_take() -> None:
    assert one_group() == one_group([1, 1]) == UNIFORM
    groups = one_group([2, 1, 3])
    assert [groups.rows_of(layer) for layer in range(3)] == [(0, range(2)), (0, range(2, 3)), (0, range(3, 6))]
    assert groups.num_rows == 6 and groups.page_layout(KVLayout(6, 1, 4, 8, "int8")) == KVLayout(6, 1, 4, 8, "int8")
    named = [groups, one_group([1, 2, 3]), plan_groups([0, 4, 4], 64), plan_groups([0, 4, 4], 64, [2, 1, 1]), UNIFORM]
    assert len({each.name for each in named}) == len(named)


def test_models_with_other_heads_in_some_layers_are_whole_only_here() -> None:
    mixed = of_two_kinds(3, 6, 64, (1, 16), (1, 32))
    config = load_config(None, ["block.windows=false"])
    assert config.page_groups(mixed) == one_group([1, 1, 2, 1, 1, 2])
    with pytest.raises(ConfigError, match="pool_layout"):
        load_config(None, ["pool_layout.tensor_parallel=2"]).page_groups(mixed)
    for wrong in ([(1, 16)] * 5, [(3, 16)] * 6, [(1, 15)] * 6, [(0, 16)] * 6):
        with pytest.raises(ModelError):
            replace(mixed, layer_heads=tuple(wrong))
    with pytest.raises(ModelError, match="heads differ"):
        replace(mixed, layer_windows=(), kv_sources=(0, 1, 0, 3, 4, 5))
