"""Layers that attend to an earlier layer's keys and values: the same logits as plain torch over the whole prompt, in
fewer bytes, and rows without requested logits are not computed after the last layer with KV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sharing_model import GLOBAL, GRAPHS, LOCAL, SHAPE, Graph, whole_prompt_logits, write_sharing_model
from tiny_lora import write_adapter
from tiny_model import tiny_model

from mooncake import LLM, SamplingParams
from mooncake.adapters import Adapter, open_adapters
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError, ModelError
from mooncake.kernels import choose_kernels, reference
from mooncake.key_scales import KeyScales
from mooncake.model import load_model
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.llama import CausalLM
from mooncake.model.lora import load_adapter
from mooncake.model.reading.weights import load_weights
from mooncake.precision import FLOAT32

BLOCK_TOKENS = 8
PROMPT = torch.from_numpy(np.random.default_rng(5).integers(3, 320, 45))
LIMIT = {"atol": 2e-4, "rtol": 1e-4}


class Written:
    def __init__(self, folder: Path, graph: Graph) -> None:
        self.folder, self.graph = folder, graph
        self.weights = write_sharing_model(folder, graph)
        self.checkpoint: Checkpoint = open_checkpoint(str(folder))
        self.wanted = whole_prompt_logits(self.weights, graph, PROMPT)

    def cache(self, dtype: str = "float32", num_blocks: int = 12) -> torch.Tensor:
        return KVCache(self.checkpoint.kv_layout(BLOCK_TOKENS, dtype), num_blocks).tensor


@pytest.fixture(params=GRAPHS, scope="module")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("sharing"), GRAPHS[request.param])


@pytest.fixture(scope="module")
def character(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("character"), GRAPHS["character"])


WAYS: dict[str, Callable[[Checkpoint], CausalLM]] = {
    "definition": lambda checkpoint: _model(checkpoint, reference),
    "product by product": lambda checkpoint: _model(checkpoint, choose_kernels()),
    "fused": lambda checkpoint: load_model(checkpoint, FLOAT32),  # type: ignore[dict-item, return-value]
}


def _model(checkpoint: Checkpoint, kernels: object) -> CausalLM:
    weights = load_weights(checkpoint, "float32")
    return CausalLM(checkpoint.config, weights, kernels=kernels, is_fused=False)  # type: ignore[arg-type]


@pytest.fixture(params=WAYS)
def model(request: pytest.FixtureRequest, written: Written) -> CausalLM:
    return WAYS[request.param](written.checkpoint)


class Told:
    """A hook that keeps what it was told."""

    wants_layers = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def before_layer(self, layer: int) -> None:
        self.calls.append(("before", layer))

    def after_layer(self, layer: int) -> None:
        self.calls.append(("after", layer))


def batch_of(prompts: list[torch.Tensor], firsts: list[int], logit_rows: list[int]) -> ForwardBatch:
    """The rest of each prompt after its first tokens; prompt i has the blocks from 6 i on."""
    positions = [torch.arange(first, len(prompt)) for prompt, first in zip(prompts, firsts, strict=True)]
    counts = torch.tensor([0, *map(len, positions)])
    return ForwardBatch(
        tokens=torch.cat([prompt[at] for prompt, at in zip(prompts, positions, strict=True)]),
        positions=torch.cat(positions),
        query_starts=counts.cumsum(0).int(),
        context_lens=torch.tensor([len(prompt) for prompt in prompts]).int(),
        block_tables=torch.arange(6 * len(prompts)).int().view(-1, 6),
        slots=torch.cat([at + 6 * BLOCK_TOKENS * index for index, at in enumerate(positions)]),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )


def test_every_logit_is_that_of_a_whole_prompt(model: CausalLM, written: Written) -> None:
    rows = list(range(len(PROMPT)))
    got = model.forward(batch_of([PROMPT], [0], rows), written.cache(), NoHook())
    torch.testing.assert_close(got, written.wanted, **LIMIT)


def test_rows_that_nobody_asks_for_make_no_difference(model: CausalLM, written: Written) -> None:
    """Two prompts at once, the second after a prefix, and rows in any order, some of them twice."""
    cache = written.cache()
    model.forward(batch_of([PROMPT[:1], PROMPT[:30]], [0, 0], []), cache, NoHook())
    rows = [40, 41, 30, 3, 4, 5, 4, 33]  # 31 tokens of the first prompt, then 15 of the second one
    batch = batch_of([PROMPT[:31], PROMPT], [0, 30], rows)
    got = model.forward(batch, cache, NoHook())
    wanted = [row if row < 31 else row - 31 + 30 for row in rows]
    torch.testing.assert_close(got, written.wanted[wanted], **LIMIT)


def test_chunks_and_steps_go_on_where_the_cache_ends(model: CausalLM, written: Written) -> None:
    cache, start = written.cache(), 0
    for end in (7, 24, 25, 41, 42, 43, 44, 45):
        got = model.forward(batch_of([PROMPT[:end]], [start], [end - start - 1]), cache, NoHook())
        torch.testing.assert_close(got, written.wanted[end - 1 : end], **LIMIT)
        start = end


@pytest.mark.parametrize("logit_rows", [[], [44], list(range(45))], ids=["none", "last", "all"])
def test_a_hook_hears_of_layers_that_are_kept(model: CausalLM, written: Written, logit_rows: list[int]) -> None:
    hook = Told()
    logits = model.forward(batch_of([PROMPT], [0], logit_rows), written.cache(), hook)
    owners = range(written.graph.num_owners)
    assert hook.calls == [(what, layer) for layer in owners for what in ("before", "after")]
    assert logits.shape == (len(logit_rows), 320) and logits.dtype is torch.float32


def test_a_chunk_without_logits_leaves_all_its_kv(model: CausalLM, written: Written) -> None:
    quiet, asked = written.cache(), written.cache()
    model.forward(batch_of([PROMPT], [0], []), quiet, NoHook())
    model.forward(batch_of([PROMPT], [0], list(range(45))), asked, NoHook())
    assert torch.equal(quiet, asked) and asked[:5].abs().amax(dim=(0, 2, 3, 4, 5)).min() > 0


def test_the_fused_pass_gives_the_same_bits(written: Written) -> None:
    fused, layered = (WAYS[way](written.checkpoint) for way in ("fused", "product by product"))
    for rows in ([], [44], [3, 4, 10, 44, 44], list(range(45))):
        logits = [model.forward(batch_of([PROMPT], [0], rows), written.cache(), NoHook()) for model in (fused, layered)]
        assert torch.equal(*logits)


def adapter_of(written: Written, folder: Path, *targets: str) -> tuple[Adapter, torch.Tensor]:
    """And what the model computes with it."""
    shape = SHAPE | {"num_hidden_layers": len(written.graph.sources)}
    merged = write_adapter(folder, tiny_model(written.graph.family, **shape), targets=targets).state_dict()
    [adapter] = open_adapters({"one": str(folder)})
    return adapter, whole_prompt_logits(merged, written.graph, PROMPT)


def test_narrowing_costs_no_token_its_adapter(character: Written, tmp_path: Path) -> None:
    """Two sequences, the second of which has an adapter; logits of some rows of both."""
    adapter, adapted = adapter_of(character, tmp_path, "q_proj", "o_proj", "up_proj", "down_proj")
    rows = [44, 60, 89]
    of_tokens = torch.tensor([-1, 0], dtype=torch.int32).repeat_interleave(len(PROMPT))
    batch = replace(batch_of([PROMPT, PROMPT], [0, 0], rows), adapters=of_tokens)
    adapters = [load_adapter(adapter, character.checkpoint.config)]
    weights = load_weights(character.checkpoint, "float32")
    for is_fused in (True, False):
        model = CausalLM(character.checkpoint.config, weights, is_fused=is_fused, adapters=adapters)
        got = model.forward(batch, character.cache(), NoHook())
        torch.testing.assert_close(got, torch.stack([character.wanted[44], adapted[15], adapted[44]]), **LIMIT)


def test_bytes_fall_by_exactly_what_is_shared(written: Written) -> None:
    """Bytes per token: 2 · kept layers · KV heads · head size · bytes per number (techniques of Character.AI)."""
    config = written.checkpoint.config
    for dtype, row_bytes in (("float32", 64), ("bfloat16", 32), ("int8", 16 + 4)):
        layout = written.checkpoint.kv_layout(BLOCK_TOKENS, dtype)
        assert layout.block_bytes == 2 * written.graph.num_owners * config.num_kv_heads * BLOCK_TOKENS * row_bytes
        assert layout.num_layers == written.graph.num_owners < config.num_layers


def answers(llm: LLM, prompts: list[list[int]]) -> Iterator[list[int]]:
    for one in llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)):
        yield list(one.token_ids)


def test_an_engine_answers_as_whole_prompts_do(written: Written) -> None:
    """Token for token: prompts in chunks, all at once, and again from a cached prefix."""
    prompts = [[int(token) for token in PROMPT[start:]] for start in (0, 7, 30)]
    with LLM(str(written.folder), kv_gb=0.001, block_tokens=BLOCK_TOKENS, chunk_tokens=16) as llm:
        got = list(answers(llm, prompts))
        again = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    assert [list(one.token_ids) for one in again] == got and again[0].cached_tokens == len(PROMPT) - 1
    for prompt, answer in zip(prompts, got, strict=True):
        tokens = torch.tensor(prompt + answer[:-1])
        choices = whole_prompt_logits(written.weights, written.graph, tokens)[len(prompt) - 1 :].argmax(-1)
        assert answer == choices.tolist()


def test_probabilities_of_a_prompt_are_those_of_all_its_rows(character: Written) -> None:
    """So that every row goes through the last layers, whose rows are otherwise skipped."""
    prompt = PROMPT.tolist()
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, logprobs=0)
    with LLM(str(character.folder), kv_gb=0.001, block_tokens=BLOCK_TOKENS, chunk_tokens=16) as llm:
        [answer] = llm.generate([prompt], sampling)
    wanted = character.wanted.log_softmax(-1)[:-1].gather(1, PROMPT[1:, None]).flatten()
    assert answer.prompt_logprobs is not None
    scored = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
    got = torch.tensor([place[int(token)].logprob for token, place in scored])
    torch.testing.assert_close(got, wanted, **LIMIT)


def test_int8_pages_are_close(character: Written) -> None:
    model = load_model(character.checkpoint, FLOAT32)
    got = model.forward(batch_of([PROMPT], [0], list(range(45))), character.cache("int8"), NoHook())
    error = (got - character.wanted).abs().mean() / character.wanted.abs().mean()
    assert 0 < error < 0.05


def test_key_scales_follow_the_layer_that_is_attended_to(character: Written) -> None:
    """Powers of two round nothing: over float32 pages the same bits come out."""
    shape = character.graph.num_owners, 1, 8
    scales = KeyScales(np.random.default_rng(1).integers(-3, 4, shape).astype(np.int8))
    plain, scaled = (load_model(character.checkpoint, FLOAT32, key_scales=given) for given in (None, scales))
    rows = batch_of([PROMPT], [0], list(range(45)))
    caches = character.cache(), character.cache()
    logits = [model.forward(rows, cache, NoHook()) for model, cache in zip((plain, scaled), caches, strict=True)]
    torch.testing.assert_close(*logits, **LIMIT)
    assert not torch.allclose(*caches)


def test_ranks_of_a_model_share_as_the_whole_does(tmp_path: Path) -> None:
    graph = GRAPHS["second half"]
    write_sharing_model(tmp_path, graph, num_key_value_heads=2)
    prompts = [[int(token) for token in PROMPT]]
    with LLM(str(tmp_path), kv_gb=0.001, block_tokens=BLOCK_TOKENS) as llm:
        wanted = list(answers(llm, prompts))
    with LLM(str(tmp_path), kv_gb=0.001, block_tokens=BLOCK_TOKENS, tensor_parallel_size=2) as llm:
        assert list(answers(llm, prompts)) == wanted


CLA = {"use_cla": True, "cla_share_factor": 2}
REFUSED = {
    "a later layer": ({"kv_source_layers": [0, 2, 2, 3]}, "layer 1 cannot share the KV of layer 2: it is not an earl"),
    "no layer": ({"kv_source_layers": [0, 0, -1, 3]}, "layer 2 cannot share the KV of layer -1"),
    "one that shares": ({"kv_source_layers": [0, 0, 1, 3]}, "layer 2 cannot share the KV of layer 1, which has none"),
    "of another kind": (
        {"kv_source_layers": [0, 0, 2, 2], "sliding_window": 8, "layer_types": [LOCAL, GLOBAL, LOCAL, LOCAL]},
        "layer 1 cannot share the KV of layer 0: their windows differ",
    ),
    "too few": ({"kv_source_layers": [0, 0]}, "kv_source_layers must be the number of a layer for each of 4"),
    "no numbers": ({"kv_source_layers": [0, "0", 2, 2]}, "kv_source_layers must be the number of a layer"),
    "a flag as a number": ({"kv_source_layers": [0, False, 2, 2]}, "kv_source_layers must be the number of a layer"),
    "two ways": (CLA | {"num_kv_shared_layers": 2}, "in two ways which layers share KV"),
    "nothing left": ({"num_kv_shared_layers": 4}, "must leave layers that have KV"),
    "fewer than none": ({"num_kv_shared_layers": -1}, "must leave layers that have KV"),
    "no such kind left": (
        {"num_kv_shared_layers": 2, "sliding_window": 8, "layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL]},
        "no layer with a window of all tokens has KV",
    ),
    "a factor of 0": ({"use_cla": True, "cla_share_factor": 0}, "cla_share_factor must be at least 1"),
    "a kind nobody knows": ({"layer_types": [LOCAL, "chunked_attention", LOCAL, LOCAL]}, "kind 'chunked_attention'"),
    "no window": ({"layer_types": [LOCAL] * 4}, "need a sliding_window"),
    "weights of all layers": ({}, "lacks the weight model.layers.1.self_attn.k_proj.weight"),
    "weights too many": ({"kv_source_layers": [0, 0, 0, 0]}, "the weight model.layers.2.self_attn.[kv]_proj.weight"),
    "lckv of later layers": (
        {"model_type": "lckv-llama", "layer_types": "0_3_3_3"},
        "layer 1 cannot share the KV of la",
    ),
    "lckv of nothing": ({"model_type": "lckv-llama", "layer_types": "0_0_x_2"}, "must be 4 numbers of layers"),
    "lckv without itself": (
        {"model_type": "lckv-llama", "layer_types": "0_0_2_2", "force_nodiag": True},
        "force_nodiag",
    ),
    "another family": (CLA | {"model_type": "granite"}, "use_cla, which is for the Llama family"),
}


@pytest.mark.parametrize(("settings", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_shared_is_refused_when_it_is_opened(
    settings: dict[str, object], why: str, tmp_path: Path
) -> None:
    pairs = GRAPHS["pairs"]
    write_sharing_model(tmp_path, Graph(pairs.sources, {}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(ModelError, match=why):
        open_checkpoint(str(tmp_path))


def test_what_does_not_go_together_is_refused(character: Written, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chunks are blended for"):
        load_model(character.checkpoint, FLOAT32, can_blend=True)
    adapter, _ = adapter_of(character, tmp_path, "q_proj", "k_proj")
    with pytest.raises(ModelError, match="adapts keys or values of a layer that has none of its own"):
        load_model(character.checkpoint, FLOAT32, adapters=[adapter])
    with pytest.raises(ConfigError, match="keep_hidden is for models with KV of each layer's own"):
        character.checkpoint.kv_layout(BLOCK_TOKENS, "float32", (2,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "why"),
    [
        ({"pipeline_parallel_size": 2}, "stages are for .* with KV of each layer's own"),
        ({"context_parallel_size": 2}, "shares KV between layers"),
    ],
    ids=["stages", "ranks"],
)
def test_layers_of_several_processes_do_not_share(character: Written, processes: dict[str, int], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        LLM(str(character.folder), kv_gb=0.001, block_tokens=BLOCK_TOKENS, **processes)  # type: ignore[arg-type]
