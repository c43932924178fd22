"""How large a KV cache is, where nobody says: what a GPU has room for beside a model, and what a CPU's host can spare.

Published shapes of models and sizes of cards; nothing here is measured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mooncake.checkpoint import Checkpoint
from mooncake.config import Config, load_config
from mooncake.config_sections import EngineSection
from mooncake.engine.backends.backend import plan_pages
from mooncake.engine.backends.fitting import Asked, Chosen, pages_beside
from mooncake.errors import ConfigError
from mooncake.model_config import LatentAttention, ModelConfig, Recurrence, Routing
from mooncake.page_groups import UNIFORM, PageGroups
from mooncake.precision import resolve_precision
from mooncake.sizing import (
    GB,
    GRAPH_BYTES,
    Card,
    LargestStep,
    cpu_cache_bytes,
    gpu_pages,
    longest_pages,
    need_of,
    parameter_count,
    rank_weights_bytes,
    shares_of_a_card,
    token_bytes,
)

BLOCK = 64
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LLAMA_8B: dict[str, Any] = {
    "architecture": "llama",
    "num_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_model_len": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": None,
    "rms_eps": 1e-5,
    "tie_embeddings": False,
    "qkv_bias": False,
    "qk_norm": False,
    "sliding_window": None,
    "bos_id": 128_000,
    "eos_ids": (128_001,),
}
LLAMA_70B = LLAMA_8B | {"num_layers": 80, "hidden_size": 8192, "intermediate_size": 28_672, "num_heads": 64}
LARGE_MQA = LLAMA_8B | {"num_kv_heads": 1}
GEMMA_LIKE = LLAMA_8B | {"layer_windows": (1024, 1024, 1024, 1024, 1024, 0) * 5 + (1024, 1024)}
H200 = Card("cuda:0", int(150.1 * GB), int(149.6 * GB))
OF_24_GB = Card("cuda:0", int(25.3 * GB), int(25.0 * GB))


class Shape(Checkpoint):
    """A model of which nothing is known but its shape."""

    def __init__(self, **settings: Any) -> None:
        self.name, self.path = "a model", Path("nowhere")
        self.config = ModelConfig(**settings)

    def load_tokenizer(self, template: str = "") -> NoReturn:
        raise AssertionError

    def _identity(self) -> NoReturn:
        raise AssertionError


def asked(settings: dict[str, Any], dtype: str = "bfloat16", ranks: int = 1, chunk: int = 2048, **more: Any) -> Asked:
    checkpoint, device = Shape(**settings), more.pop("device", "cuda")
    precision = resolve_precision(dtype, more.pop("kv_dtype", "auto"), devices=(device,))
    context = checkpoint.config.max_model_len
    groups, page = plan_pages(checkpoint, checkpoint.kv_layout(BLOCK, precision.kv_dtype), context, ranks)
    step = LargestStep(min(chunk, context), 256, 0, BUCKETS if device != "cpu" else (), context, 512)
    return Asked(checkpoint, precision, device, page, groups, step, num_ranks=ranks, **more)


def on(cards: list[Card], wanted: Asked, host_gb: float | None = 2000) -> Chosen:
    return pages_beside(wanted, cards, None if host_gb is None else int(host_gb * GB))


def size_gb(chosen: Chosen, wanted: Asked) -> float:
    return chosen.num_pages * wanted.page.block_bytes / GB


def test_what_a_card_holds_is_the_weights_the_largest_step_the_graphs_and_the_cache() -> None:
    config = ModelConfig(**LLAMA_8B)
    assert parameter_count(config) == 8_030_261_248
    wanted = asked(LLAMA_8B)
    step = wanted.step
    need = need_of(config, wanted.precision.weights, 16 * 10**9, step)
    assert need.step > 2304 * token_bytes(config, 2) > 2304 * 2 * (3 * 14_336 + 6 * 4096)
    assert need.graphs == 256 * token_bytes(config, 2) + sum(BUCKETS) * 128_256 * 4 + 13 * GRAPH_BYTES
    longer = need_of(config, wanted.precision.weights, 16 * 10**9, replace(step, prompt_tokens=8192))
    assert longer.step - need.step == (8192 - 2048) * token_bytes(config, 2)
    chosen = on([H200], wanted)
    whole = need_of(config, wanted.precision.weights, 2 * 8_030_261_248, step).total + size_gb(chosen, wanted) * GB
    assert 0 <= 0.9 * H200.total_bytes - whole < wanted.page.block_bytes, "to the last page"
    assert 110 < size_gb(chosen, wanted) < 118 and "0.9 of cuda:0 (150.1 GB, 149.6 free)" in chosen.why


def test_a_small_card_holds_what_is_left_and_says_so() -> None:
    wanted = asked(LLAMA_8B)
    assert 2 < size_gb(on([OF_24_GB], wanted), wanted) < 5
    smaller = asked(LLAMA_8B, chunk=512)
    assert on([OF_24_GB], smaller).num_pages > on([OF_24_GB], wanted).num_pages


def test_a_model_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(
        ConfigError, match=r"a model does not fit into cuda:0: 32\.1 GB of weights and .* GB to"
    ) as whole:
        on([OF_24_GB], asked(LLAMA_8B, "float32"))
    assert (
        "in 22.8 GB (gpu_memory_utilization 0.9 of 25.3 GB, 25.0 free). It would fit with dtype bfloat16 or tensor "
        in (whole.value.message)
    )
    with pytest.raises(ConfigError, match="It would fit with chunk_tokens 2048 or tensor parallelism"):
        on([OF_24_GB], asked(LLAMA_8B, chunk=131_072))
    with pytest.raises(ConfigError, match=r"It would fit with tensor parallelism over 2 GPUs or tensor .* over 4 GPUs"):
        on([H200], asked(LLAMA_70B))
    wide = LLAMA_70B | {"num_heads": 31, "num_kv_heads": 31, "architecture": "gpt2", "tie_embeddings": True}
    with pytest.raises(ConfigError, match=r"It needs a GPU of \d+ GB"):
        on([OF_24_GB], asked(wide | {"architecture": "llama"}))


def test_a_card_that_others_use_is_not_counted_on() -> None:
    wanted = asked(LLAMA_8B)
    half = replace(H200, free_bytes=H200.total_bytes // 2)
    free, shared = (size_gb(on([card], wanted), wanted) for card in (H200, half))
    assert free - shared == pytest.approx(0.9 * 150.1 - (75.05 - 0.05 * 150.1), rel=0.001)
    second = replace(wanted, utilization=0.45)
    first_gb, second_gb = size_gb(on([H200], second), wanted), size_gb(on([half], second), wanted)
    assert first_gb == second_gb, "the second of two nodes finds what the first has left"
    assert size_gb(on([H200], replace(wanted, utilization=0.95)), wanted) > free, "an explicit fraction counts"


def test_nodes_on_one_card_share_it() -> None:
    assert shares_of_a_card([0, 0]) == [0.45, 0.45]
    assert shares_of_a_card([0]) == [0.9]
    assert shares_of_a_card([0.6, 0, 0]) == pytest.approx([0.6, 0.15, 0.15])
    assert shares_of_a_card([0.3, 0.7]) == [0.3, 0.7]
    with pytest.raises(ConfigError, match=r"nodes on cuda:1 ask for 0\.6 \+ 0\.5 of it \(gpu_memory_utilization\)"):
        shares_of_a_card([0.6, 0.5], "cuda:1")
    with pytest.raises(ConfigError, match="and leave nothing to 1 more"):
        shares_of_a_card([0.95, 0])


@pytest.mark.parametrize("settings", [LLAMA_8B, LARGE_MQA], ids=["8 KV heads", "one KV head"])
def test_ranks_hold_their_own_heads_of_every_page(settings: dict[str, Any]) -> None:
    alone, wanted = asked(settings), asked(settings, ranks=4)
    cards = [replace(H200, name=f"cuda:{number}") for number in range(4)]
    pages = on(cards, wanted, None).num_pages
    heads = max(settings["num_kv_heads"] // 4, 1)
    held_gb = pages * wanted.page.block_bytes * heads / settings["num_kv_heads"] / GB
    assert 124 < held_gb < 132, "of each card's 135, a quarter of 16 GB of weights and what computing takes"
    if settings is LARGE_MQA:
        assert pages < 1.2 * on([H200], alone, None).num_pages, "every rank has the only head"
    small = [*cards[:3], replace(OF_24_GB, name="cuda:3")]
    assert on(small, wanted, None).num_pages < pages / 5, "the smallest card says how many"


def test_a_ranks_weights_are_its_part() -> None:
    config = ModelConfig(**LLAMA_8B)
    part = replace(config, num_heads=8, num_kv_heads=2, intermediate_size=3584)
    form = resolve_precision("bfloat16", devices=("cuda",)).weights
    assert rank_weights_bytes(part, form, 4) == pytest.approx(2 * parameter_count(config) / 4, rel=0.001)
    mixture = ModelConfig(
        **(LLAMA_8B | {"architecture": "qwen3_moe", "qk_norm": True, "intermediate_size": 768, "hidden_size": 2048}),
        num_experts=128,
        experts_per_token=8,
    )
    cut = replace(mixture, num_heads=8, num_kv_heads=2)
    assert rank_weights_bytes(cut, form, 4) == pytest.approx(2 * parameter_count(mixture) / 4, rel=0.01)
    assert token_bytes(mixture, 2) > 8 * 2 * (3 * 768 + 3 * 2048), "of the eight experts that a token uses"
    assert token_bytes(mixture, 2) < 20 * 2 * (3 * 768 + 3 * 2048), "and not of all"


def test_windows_latent_rows_and_states_count_by_their_pages() -> None:
    windows = asked(GEMMA_LIKE)
    assert windows.groups.num_groups > 1
    latent = asked(
        LLAMA_8B
        | {
            "architecture": "deepseek_v3",
            "num_kv_heads": 1,
            "head_dim": 576,
            "rotary_dim": 64,
            "attention_scale": 0.07,
            "intermediate_size": 2048,
            "latent": LatentAttention(rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=1536),
            "num_experts": 16,
            "experts_per_token": 4,
            "routing": Routing((0,), 2048, "sigmoid", 2.5),
        }
    )
    assert latent.page.num_kinds == 1
    states = asked(
        LLAMA_8B
        | {
            "architecture": "qwen3_next",
            "recurrence": Recurrence(tuple(i for i in range(32) if i % 4 != 3), 4, 8192, 32, 128, 16, 128),
            "num_experts": 16,
            "experts_per_token": 4,
            "intermediate_size": 512,
            "shared_expert_size": 512,
        }
    )
    for wanted in (windows, latent, states):
        need = need_of(wanted.checkpoint.config, wanted.precision.weights, 0, wanted.step)
        chosen = on([H200], wanted)
        assert chosen.num_pages >= wanted.least_pages and need.step > 0
        longest = wanted.groups.max_model_len(chosen.num_pages, 2048, BLOCK, wanted.step.context)
        least = 120_000 if wanted is states else wanted.step.context  # small blocks are mostly empty beside states
        assert longest >= least, "a sequence of the whole context"


def test_a_host_with_little_memory_bounds_the_mirror() -> None:
    wanted = asked(LLAMA_8B)
    chosen = on([H200], wanted, host_gb=100)
    assert size_gb(chosen, wanted) == pytest.approx(0.8 * 100 / 2, rel=0.01), "another node may be starting there"
    assert "by the 40.0 GB that the host can spare for its mirror" in chosen.why
    divided = replace(wanted, spare_bytes=int(60 * GB))
    assert size_gb(on([H200], divided, host_gb=100), wanted) == pytest.approx(48, rel=0.01), "as its launcher says"
    assert on([H200], replace(wanted, has_mirror=False), 1).num_pages == on([H200], wanted, None).num_pages
    with pytest.raises(ConfigError, match="for the mirror of a GPU's KV cache"):
        on([H200], wanted, host_gb=0.001)


def test_a_cache_on_a_cpu_is_a_gigabyte_unless_a_sequence_needs_more_and_it_is_there() -> None:
    assert cpu_cache_bytes(int(0.3 * GB), int(8 * GB)) == GB
    assert cpu_cache_bytes(int(3 * GB), int(8 * GB)) == 3 * GB
    assert cpu_cache_bytes(int(17 * GB), int(8 * GB)) == 4 * GB, "half of its part"
    assert cpu_cache_bytes(int(17 * GB), int(1.5 * GB)) == GB
    assert cpu_cache_bytes(int(17 * GB), int(0.7 * GB)) == int(0.7 * GB), "and never more than that"
    assert cpu_cache_bytes(int(17 * GB), -1) == 0
    assert cpu_cache_bytes(int(17 * GB), None) == GB, "nobody knows what is free"
    pages = longest_pages(UNIFORM, 1000, 256, 64)
    assert pages == 16 and UNIFORM.max_model_len(pages, 256, 64, 1000) == 1000
    windowed = PageGroups((0, 128), ((0, 0), (1, 0)))
    assert windowed.max_model_len(longest_pages(windowed, 1000, 256, 64), 256, 64, 1000) == 1000


def test_a_node_on_a_cpu_asks_for_what_the_longest_sequence_takes() -> None:
    wanted = asked(LLAMA_8B, device="cpu", chunk=256)
    plenty = pages_beside(wanted, [], int(400 * GB))
    assert size_gb(plenty, wanted) == pytest.approx(131_072 * 131_072 / GB, rel=0.01)
    assert plenty.why == "what a sequence of 131,072 tokens takes"
    some = pages_beside(wanted, [], int(40 * GB))
    assert size_gb(some, wanted) == pytest.approx((40 - 16.06) / 2 / 2, rel=0.01)
    assert some.why == "by the 12.0 GB that the host can spare for it"
    drafting = pages_beside(replace(wanted, draft_model="any"), [], int(400 * GB))
    assert drafting.num_pages == plenty.num_pages, "as long a sequence, and the draft's cache beside it"
    small = asked(LLAMA_8B | {"max_model_len": 1024}, device="cpu", chunk=256)
    assert pages_beside(small, [], int(400 * GB)).why == "the default"
    ours = pages_beside(replace(small, spare_bytes=int(0.5 * GB)), [], int(400 * GB))
    assert size_gb(ours, small) == pytest.approx(0.5, rel=0.02), "what its launcher gives it"


def test_steps_and_sequences_follow_from_the_device() -> None:
    def limits(*settings: str) -> list[tuple[int, int]]:
        config: Config = load_config(None, list(settings))
        return [(one.chunk_tokens, one.max_sequences) for one in (config.prefill, config.decode)]

    assert limits() == [(256, 64), (256, 64)]
    assert limits("decode.device='cuda:1'") == [(256, 64), (2048, 256)]
    assert limits("prefill.device='cuda'", "prefill.chunk_tokens=512") == [(512, 256), (256, 64)]
    assert limits("prefill.device='cuda'", "prefill.chunk_tokens=0", "prefill.max_sequences=8")[0] == (0, 8)
    assert limits("prefill.device='cuda'", "prefill.chunk_tokens=-1", "prefill.max_sequences=0")[0] == (2048, 256)
    assert EngineSection(device="cuda").max_sequences == max(BUCKETS), "the largest batch that has a graph"


def test_no_page_is_counted_where_nothing_is_left() -> None:
    config = ModelConfig(**LLAMA_8B)
    form = resolve_precision("bfloat16", devices=("cuda",)).weights
    need = need_of(config, form, int(30 * GB), LargestStep(2048, 256))
    assert gpu_pages([OF_24_GB], 0.9, need, 8_388_608, 8_388_608, None) < 0
