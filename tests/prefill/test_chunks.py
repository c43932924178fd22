"""Prompts cut into chunks, and blended by a real prefill node for a real decode node, without a conductor or a pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import write_tiny_model

from decode_node.node import DecodeNode
from mooncake.config import Config, load_config
from mooncake.errors import ModelError
from mooncake.hashing import extend_chain
from mooncake.rpc import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from mooncake.rpc.convert import report_from_wire, sampling_to_wire, tokens_to_wire
from mooncake.rpc.server import Channels
from mooncake.types import PrefillReport, SamplingParams
from prefill_node.chunks import chunk_spans
from prefill_node.node import PrefillNode

BLOCK, NEW_TOKENS = 8, 20
RNG = np.random.default_rng(4)
BLOCK_GB = 4 * 2 * 2 * BLOCK * 16 * 4 / 1e9  # layers, K and V, heads, tokens, head size, bytes


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


def config_of(node_id: str, model: Path, num_blocks: int, *settings: str) -> Config:
    return load_config(
        None,
        [
            f"node.id={node_id}",
            f"model.path={model}",
            "node.conductor='127.0.0.1:9'",  # nobody there
            f"block.tokens={BLOCK}",
            "prefill.blend_share=0.2",
            "prefill.threads=1",
            "decode.threads=1",
            f"prefill.kv_gb={num_blocks * BLOCK_GB * 1.001}",
            "decode.kv_gb=0.01",
            *settings,
        ],
    )


@dataclass
class Pair:
    """Asks both nodes, as a conductor does."""

    prefill: PrefillNode
    decode: DecodeNode
    channels: Channels
    asked: int = 0

    async def ask(self, tokens: Sequence[int], salt: str = "", **sampling: Any) -> tuple[list[int], PrefillReport]:
        self.asked += 1
        common: dict[str, Any] = {
            "request_id": f"r{self.asked}",
            "handoff_id": f"h{self.asked}",
            "epoch": self.asked,
            "tokens": tokens_to_wire(np.array(tokens, np.uint32)),
            "num_prompt_tokens": len(tokens),
            "sampling": sampling_to_wire(
                SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, **sampling)
            ),
            "cache_salt": salt,
        }
        decode_stub = decode_pb2_grpc.DecodeStub(self.channels.get(self.decode.control_address))
        prefill_stub = prefill_pb2_grpc.PrefillStub(self.channels.get(self.prefill.control_address))

        async def decoded() -> list[int]:
            call = decode_stub.Generate(decode_pb2.DecodeRequest(**common), timeout=60)
            return [token.token_id async for response in call for token in response.tokens]

        async def reported() -> PrefillReport:
            request = prefill_pb2.PrefillRequest(decode_address=self.decode.control_address, **common)
            reports = [r.report async for r in prefill_stub.Run(request, timeout=60) if r.HasField("report")]
            return report_from_wire(reports[0])

        return await asyncio.gather(decoded(), reported())

    def num_known(self, node: PrefillNode | DecodeNode, tokens: Sequence[int]) -> int:
        """Blocks of a prompt that are found in a node by these tokens, at any place of it."""
        keys = node.host.chain().keys(np.array(tokens, np.uint32), BLOCK)
        return sum(node.host.engine.block_pool.match([key]) for key in keys)

    def has_chunk(self, tokens: Sequence[int]) -> bool:
        keys = extend_chain(self.prefill.host.chunk_seed(""), np.array(tokens, np.uint32), BLOCK)
        return self.prefill.host.engine.block_pool.match(keys) == len(keys)

    def separator(self) -> list[int]:
        return self.prefill.host.encode(" # #").tolist()


@contextlib.asynccontextmanager
async def pair(model: Path, num_blocks: int = 100) -> AsyncIterator[Pair]:
    write_tiny_model(model, num_hidden_layers=4, head_dim=16, max_position_embeddings=512)
    prefill = PrefillNode(config_of("prefill-t", model, num_blocks))
    decode = DecodeNode(config_of("decode-t", model, num_blocks))
    await decode.start()
    await prefill.start()
    channels = Channels()
    try:
        yield Pair(prefill, decode, channels)
        await prefill.drained()
        for node in (prefill, decode):
            await until(lambda pool=node.host.engine.block_pool: pool.num_in_use == 0)  # type: ignore[misc]
            checked = node.host.thread.call(lambda engine: engine.block_pool.check())
            await asyncio.wrap_future(checked)
    finally:
        await channels.close()
        await prefill.stop()
        await decode.stop()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def some_tokens(count: int) -> list[int]:
    return [int(token) for token in RNG.integers(3, 300, count)]


@pytest.mark.timeout(120)
async def test_what_is_blended_is_told_and_kept_from_others(tmp_path: Path) -> None:
    """In both nodes only the prefix is found by its tokens, and neither the answer that builds on the rest."""
    async with pair(tmp_path / "model") as nodes:
        first, second = (nodes.separator() + some_tokens(3 * BLOCK) for _ in range(2))
        question = nodes.separator() + some_tokens(5)
        shown = some_tokens(10) + first + second + question
        answer, report = await nodes.ask(shown)
        assert report.blended_tokens == 0
        assert nodes.num_known(nodes.decode, shown + answer) == (len(shown) + NEW_TOKENS - 1) // BLOCK
        await until(lambda: nodes.has_chunk(first[: 3 * BLOCK]) and nodes.has_chunk(second[: 3 * BLOCK]))

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
        chunk, question = nodes.separator() + some_tokens(3 * BLOCK), nodes.separator() + some_tokens(5)
        await nodes.ask(some_tokens(10) + chunk + question)
        await until(lambda: nodes.has_chunk(chunk[: 3 * BLOCK]))
        _, report = await nodes.ask(some_tokens(10) + chunk + question, salt="another")
        assert report.blended_tokens == 0
        _, report = await nodes.ask(some_tokens(10) + chunk + question, prompt_logprobs=1)
        assert report.blended_tokens == 0
        _, report = await nodes.ask(some_tokens(10) + chunk + question)
        assert report.blended_tokens >= 3 * BLOCK


@pytest.mark.timeout(120)
async def test_many_prompts_in_a_small_cache_do_not_hold_each_other_up(tmp_path: Path) -> None:
    """A prompt that waits holds no chunk, and one whose chunks have left computes them."""
    async with pair(tmp_path / "model", num_blocks=30) as nodes:
        chunks = [nodes.separator() + some_tokens(4 * BLOCK) for _ in range(3)]
        question = nodes.separator() + some_tokens(5)
        await nodes.ask([*some_tokens(10), *chain(*chunks), *question])
        await until(lambda: nodes.has_chunk(chunks[0][: 4 * BLOCK]))
        prompts = [[*some_tokens(10), *chain(*RNG.permutation(chunks).tolist()), *question] for _ in range(8)]
        answers = await asyncio.gather(*map(nodes.ask, prompts))
        assert [len(answer) for answer, _ in answers] == [NEW_TOKENS] * len(prompts)


async def test_a_node_whose_model_cannot_blend_says_so_at_its_start(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "mistral", sliding_window=32)
    node = PrefillNode(config_of("prefill-t", tmp_path, 100))
    with pytest.raises(ModelError, match="full attention"):
        await node.start()
