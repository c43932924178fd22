"""Prompts cut into chunks, and blended by a real prefill node for a real decode node, without a conductor or a pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from node_pair import BLOCK, NEW_TOKENS, NodePair, node_pair, pair_config
from tiny_model import write_tiny_model
from waiting import until

from mooncake.errors import ModelError
from mooncake.hashing import extend_chain
from prefill_node.blend_chunks import chunk_spans
from prefill_node.node import PrefillNode

RNG = np.random.default_rng(4)


@pytest.mark.parametrize(
    ("tokens", "spans"),
    [
        ([1, 2, 9, 9, 3, 4, 5, 9, 9, 6, 9, 9, 7], [(2, 7), (7, 10)]),  # a prefix, two chunks, a question
        ([9, 9, 3, 4, 9, 9, 5, 9, 9, 6], [(4, 7)]),  # what begins a prompt is its prefix
        ([1, 9, 9, 3, 4], []),  # a question alone
        ([1, 9, 9, 9, 3, 9, 9, 4], [(1, 5)]),  # not two
        ([1, 9, 9, 9, 9, 3, 9, 9, 4], [(1, 3), (3, 6)]),
        ([1, 2, 3], []),
        ([9], []),
        ([], []),
    ],
)
def test_chunks_lie_between_separators(tokens: list[int], spans: list[tuple[int, int]]) -> None:
    assert chunk_spans(np.array(tokens, np.uint32), np.array([9, 9], np.uint32)) == spans


def has_chunk(nodes: NodePair, tokens: Sequence[int]) -> bool:
    keys = extend_chain(nodes.prefill.host.chunk_seed(""), np.array(tokens, np.uint32), BLOCK)
    return nodes.prefill.host.engine.block_pool.match(keys) == len(keys)


def separator(nodes: NodePair) -> list[int]:
    return nodes.prefill.host.encode(" # #").tolist()


@contextlib.asynccontextmanager
async def pair(model: Path, num_blocks: int = 100) -> AsyncIterator[NodePair]:
    write_tiny_model(model, num_hidden_layers=4, head_dim=16, max_position_embeddings=512)
    async with node_pair(model, "prefill.blend_share=0.2", num_blocks=num_blocks) as nodes:
        yield nodes


def some_tokens(count: int) -> list[int]:
    return [int(token) for token in RNG.integers(3, 300, count)]


@pytest.mark.timeout(120)
async def test_what_is_blended_is_told_and_kept_from_others(tmp_path: Path) -> None:
    """In both nodes only the prefix is found by its tokens; neither the rest nor the answer after it is."""
    async with pair(tmp_path / "model") as nodes:
        first, second = (separator(nodes) + some_tokens(3 * BLOCK) for _ in range(2))
        question = separator(nodes) + some_tokens(5)
        shown = some_tokens(10) + first + second + question
        answer, report = await nodes.ask(shown)
        assert report.blended_tokens == 0
        assert nodes.num_known(nodes.decode, shown + answer) == (len(shown) + NEW_TOKENS - 1) // BLOCK
        await until(lambda: has_chunk(nodes, first[: 3 * BLOCK]) and has_chunk(nodes, second[: 3 * BLOCK]), 30)

        mixed = some_tokens(10) + second + first + question
        answer, report = await nodes.ask(mixed)
        assert len(answer) == NEW_TOKENS
        assert report.blended_tokens >= 6 * BLOCK
        for node in (nodes.prefill, nodes.decode):
            assert nodes.num_known(node, mixed + answer) == 1

        _, report = await nodes.ask(shown)  # cached as a whole: nothing to blend
        assert report.blended_tokens == 0 and report.local_cached_tokens > len(shown) - 2 * BLOCK


@pytest.mark.timeout(120)
async def test_other_tenants_and_who_measures_the_prompt_get_none(tmp_path: Path) -> None:
    async with pair(tmp_path / "model") as nodes:
        chunk, question = separator(nodes) + some_tokens(3 * BLOCK), separator(nodes) + some_tokens(5)
        await nodes.ask(some_tokens(10) + chunk + question)
        await until(lambda: has_chunk(nodes, chunk[: 3 * BLOCK]), 30)
        _, report = await nodes.ask(some_tokens(10) + chunk + question, salt="another")
        assert report.blended_tokens == 0
        _, report = await nodes.ask(some_tokens(10) + chunk + question, prompt_logprobs=1)
        assert report.blended_tokens == 0
        _, report = await nodes.ask(some_tokens(10) + chunk + question)
        assert report.blended_tokens >= 3 * BLOCK


@pytest.mark.timeout(120)
async def test_many_prompts_in_a_small_cache_do_not_hold_each_other_up(tmp_path: Path) -> None:
    """A waiting prompt holds no chunk, and a prompt whose chunks were evicted computes them."""
    async with pair(tmp_path / "model", num_blocks=30) as nodes:
        chunks = [separator(nodes) + some_tokens(4 * BLOCK) for _ in range(3)]
        question = separator(nodes) + some_tokens(5)
        await nodes.ask([*some_tokens(10), *chain(*chunks), *question])
        await until(lambda: has_chunk(nodes, chunks[0][: 4 * BLOCK]), 30)
        prompts = [[*some_tokens(10), *chain(*RNG.permutation(chunks).tolist()), *question] for _ in range(8)]
        answers = await asyncio.gather(*map(nodes.ask, prompts))
        assert [len(answer) for answer, _ in answers] == [NEW_TOKENS] * len(prompts)


async def test_a_node_whose_model_cannot_blend_says_so_at_its_start(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "mistral", sliding_window=32)
    node = PrefillNode(pair_config("prefill-t", tmp_path, 100, "prefill.blend_share=0.2"))
    with pytest.raises(ModelError, match="full attention"):
        await node.start()
