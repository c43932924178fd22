"""Latent attention and mixtures of experts over tensor-parallel ranks: transformers' tokens, and each rank holds only
its part."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from ranks import ranks_of
from ranks_in_threads import InThread, InThreads
from tiny_mixtures import BLOCK_TOKENS, MIXTURES, NUM_BLOCKS, PROMPTS, WIDE, Published, answers, answers_of
from tiny_model import write_tiny_model

from mooncake.checkpoint import Checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ModelError
from mooncake.kernels.cpu_panels import PanelExperts, PanelLinear
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.decoder import Decoder
from mooncake.model.families.gated import GatedDecoder
from mooncake.model.llama import CausalLM
from mooncake.model.load import load_model, load_part
from mooncake.model.parallel.shards import experts_of, shard_config, shard_weights
from mooncake.model.parallel.vocabulary import VocabularyPart
from mooncake.model.reading.weights import load_weights
from mooncake.precision import FLOAT32

pytestmark = pytest.mark.usefixtures("one_torch_thread")


FIRST, *OTHERS = MIXTURES


@pytest.fixture(params=[FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Published:
    return Published(request.param, tmp_path)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_give_the_tokens_of_one_process_and_of_transformers(published: Published, size: int) -> None:
    """With four ranks experts do not divide evenly, and KV heads are on two ranks each."""
    found = answers_of(published.checkpoint)
    assert found == published.greedy_all(PROMPTS, found)
    assert len({token for tokens in found for token in tokens}) >= 6, "a model that repeats itself proves nothing"
    with ranks_of(str(published.folder), size, NUM_BLOCKS, BLOCK_TOKENS) as ranks:
        assert answers(ranks.model, ranks.cache) == found


def test_every_rank_keeps_the_whole_latent_row_and_the_same(tmp_path: Path) -> None:
    """Two ranks as threads of this process: their sum is transformers' result, and both have the whole row."""
    checkpoint = Published("deepseek-v3", tmp_path).checkpoint
    layout = checkpoint.kv_layout(BLOCK_TOKENS, "float32")
    whole = KVCache(layout, NUM_BLOCKS)
    batch = ForwardBatch.of_prompt(torch.tensor(PROMPTS[0]), BLOCK_TOKENS, torch.tensor([69]))
    wanted = load_model(checkpoint, FLOAT32).forward(batch, whole.tensor, NoHook())
    ranks = InThreads(2)
    caches = [torch.zeros_like(whole.tensor) for _ in range(2)]

    def compute(rank: int) -> torch.Tensor:
        return part_of(checkpoint, rank, 2, ranks).forward(batch, caches[rank], NoHook())

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(compute, range(2))
    assert torch.allclose(first, wanted, atol=1e-4) and second.shape == (0, checkpoint.config.vocab_size)
    assert torch.equal(*caches) and torch.allclose(caches[0], whole.tensor, atol=1e-4)


def test_ranks_that_need_the_same_kv_head_keep_the_same_rows(published: Published) -> None:
    """Four ranks over two KV heads: both ranks of a head write it into the one cache, so they must write the same."""
    checkpoint = published.checkpoint
    layout = checkpoint.kv_layout(BLOCK_TOKENS, "float32")
    batch = ForwardBatch.of_prompt(torch.tensor(PROMPTS[0]), BLOCK_TOKENS, torch.tensor([69]))
    ranks = InThreads(4)
    caches = [
        torch.zeros((NUM_BLOCKS, layout.num_layers, layout.num_kinds, 1, BLOCK_TOKENS, layout.head_dim)) for _ in "1234"
    ]

    def compute(rank: int) -> torch.Tensor:
        return part_of(checkpoint, rank, 4, ranks).forward(batch, caches[rank], NoHook())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(compute, range(4)))
    first, second, third, fourth = caches
    assert first.any() and torch.equal(first, second) and torch.equal(third, fourth)
    assert torch.equal(first, third) == (layout.num_kinds == 1), "one latent row, or two heads"


def part_of(checkpoint: Checkpoint, rank: int, size: int, ranks: InThreads | None = None) -> CausalLM | Decoder:
    return load_part(checkpoint, FLOAT32, InThread(ranks or InThreads(size), rank, size))


def test_the_parts_of_a_mixture_are_the_mixture(published: Published) -> None:
    weights, config = load_weights(published.checkpoint, "float32"), published.checkpoint.config
    parts = [shard_weights(weights, config, rank, 4) for rank in range(4)]
    assert sorted(expert for rank in range(4) for expert in experts_of(config, rank, 4)) == [*range(config.num_experts)]
    for name, tensor in weights.items():
        pieces = [part[name] for part in parts if name in part]
        if ".experts." in name and name.split(".experts.")[1][0].isdigit():
            assert len(pieces) == 1 and torch.equal(pieces[0], tensor), "an expert lives on one rank"
        elif name.endswith("_norm.weight") and len(tensor) > config.head_dim:  # over all heads
            assert torch.equal(torch.cat(pieces[:: 4 * len(pieces[0]) // len(tensor)]), tensor)
        elif re.search(
            r"\.experts\.|_linear|q_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|sinks|embed_tokens|lm_head", name
        ):
            assert torch.equal(torch.cat(pieces), tensor)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(torch.cat(pieces, dim=1), tensor)
        elif name.endswith("o_proj.bias"):
            assert tensor.any() and torch.equal(sum(pieces, torch.zeros(())), tensor), "a sum has it once"
        elif re.search("[kv]_proj", name):
            assert torch.equal(torch.cat(pieces[::2]), tensor) and torch.equal(pieces[0], pieces[1])
        else:
            assert len(pieces) == 4 and all(torch.equal(piece, tensor) for piece in pieces)


def test_what_a_rank_holds_falls_with_the_number_of_ranks(published: Published) -> None:
    """Counted in weights packed for products, experts and vocabulary separately."""
    model, vocab_size = load_model(published.checkpoint, FLOAT32), published.checkpoint.config.vocab_size
    whole, width = packed_bytes(model), dict(linears_of(model, ""))[".head"]._width
    assert whole.experts > whole.rest / 4, "this model's experts weigh nothing"
    assert whole.vocabulary > whole.rest / 4, "this model's vocabulary weighs nothing"
    assert vocab_size % width == 0
    num_experts = published.checkpoint.config.num_experts
    for size in (2, 4):
        parts = [packed_bytes(part_of(published.checkpoint, rank, size)) for rank in range(size)]
        assert sum(part.experts for part in parts) == whole.experts
        assert max(part.experts for part in parts) == whole.experts * -(-num_experts // size) // num_experts
        assert all(part.rest < whole.rest for part in parts)
        panels = -(-vocab_size // size // width)
        assert {part.vocabulary for part in parts} == {whole.vocabulary * panels // (vocab_size // width)}


class Packed(NamedTuple):
    experts: int
    vocabulary: int
    rest: int


def packed_bytes(model: object) -> Packed:
    linears = list(linears_of(model, ""))
    experts = sum(linear.num_bytes for path, linear in linears if re.search(r"\.(experts|gate_up|down)\.\d+", path))
    vocabulary = sum(linear.num_bytes for path, linear in linears if path in (".embedding", ".head"))
    return Packed(experts, vocabulary, sum(linear.num_bytes for _, linear in linears) - experts - vocabulary)


def linears_of(thing: object, path: str) -> Iterator[tuple[str, PanelLinear]]:
    """Packed matrices within a model, by the way to them."""
    if isinstance(thing, PanelLinear):
        yield path, thing
    elif isinstance(thing, PanelExperts):
        yield from linears_of(dict(zip(("gate_up", "down"), thing._layers, strict=True)), path)
    elif isinstance(thing, VocabularyPart):
        yield from linears_of(thing.part, path)
    elif isinstance(thing, GatedDecoder):
        parts = {"layers": thing._layers, "embedding": thing._embedding, "head": thing._head}
        yield from linears_of(parts, path)
    elif is_dataclass(thing):
        yield from linears_of({field.name: getattr(thing, field.name) for field in fields(thing)}, path)
    elif isinstance(thing, dict | list):
        for key, value in thing.items() if isinstance(thing, dict) else enumerate(thing):
            yield from linears_of(value, f"{path}.{key}")


@pytest.mark.slow
def test_a_processs_memory_falls_with_the_number_of_ranks(tmp_path: Path) -> None:
    """Measured by the system: 151 MB of experts, half and then a quarter of them per rank."""
    wide = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 16, "num_hidden_layers": 3}
    write_tiny_model(tmp_path, "qwen3_moe", **(WIDE | wide))
    experts = 3 * 16 * 3 * 512 * 512 * 4
    held = []
    for size in (2, 4):
        with ranks_of(str(tmp_path), size, NUM_BLOCKS, BLOCK_TOKENS) as ranks:
            answers(ranks.model, ranks.cache)
            held.append(anonymous_bytes(ranks.model.pids[0]))
    assert held[0] - held[1] == pytest.approx(experts / 4, rel=0.25)


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of the process: mapped files are shared."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize(
    ("name", "size", "sentence"),
    [
        ("deepseek-v3", 3, "4 heads and an MLP of 48 and an MLP of 24 cannot be cut into 3 equal parts"),
        ("qwen3-moe", 3, "4 heads cannot be cut into 3 equal parts"),
        ("mixtral", 8, "4 heads cannot be cut into 8 equal parts"),
    ],
)
def test_a_mixture_that_cannot_be_cut_is_refused(name: str, size: int, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=sentence):
        shard_config(Published(name, tmp_path).checkpoint.config, size)


def test_each_rank_needs_an_expert(tmp_path: Path) -> None:
    config = replace(Published("qwen3-moe", tmp_path).checkpoint.config, num_heads=8)
    with pytest.raises(ModelError, match="6 experts are not enough for 8 ranks"):
        shard_config(config, 8)
