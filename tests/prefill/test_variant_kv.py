"""KV of a variant of the model: stored in a pool by its own nodes, read by those of another, and recomputed in part.

Real nodes of two tiny models, a real store between them, without a conductor; fp32, greedy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from node_pair import BLOCK, NEW_TOKENS, NodePair, node_pair, pair_config
from tiny_model import write_tiny_model
from waiting import until

from kvstore.node import StoreNode
from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError
from mooncake.model import CausalLM, ForwardBatch, NoHook, load_model
from mooncake.model.kept_inputs import input_rows
from mooncake.precision import FLOAT32
from mooncake.variants import Profile, write_profile
from prefill_node.node import PrefillNode

LAYERS, KEPT = 5, (1, 3)
RNG = np.random.default_rng(8)


def some_tokens(count: int) -> list[int]:
    return [int(token) for token in RNG.integers(3, 300, count)]


def write_pair(folder: Path, *, same: bool = False) -> tuple[Path, Path]:
    sender, receiver = folder / "sender", folder / "receiver"
    for path, seed in ((sender, 0), (receiver, 0 if same else 1)):
        write_tiny_model(path, seed=seed, num_hidden_layers=LAYERS, head_dim=16, max_position_embeddings=512)
    return sender, receiver


def profile(sender: Path, receiver: Path, layers: range, **changes: Any) -> Path:
    """Write a profile beside the receiver. In float32 the identity of KV depends only on the weights."""
    names = (open_checkpoint(str(path)).digest for path in (sender, receiver))
    path = receiver / "profile.json"
    fields = {"first": layers[0], "last": layers[-1], "sender_keeps": KEPT, **changes}
    write_profile(path, Profile(*names, **fields))
    return path


@dataclass
class Family:
    """Nodes of both models around one store."""

    sender: NodePair
    receiver: NodePair
    store: StoreNode

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.receiver.prefill.host.load().counters)

    async def stored(self, num_blocks: int) -> None:
        await until(lambda: self.store.store.counts.sealed >= num_blocks, 30)


@contextlib.asynccontextmanager
async def family(
    folder: Path, layers: range, *settings: str, same: bool = False, inputs_first: bool = True
) -> AsyncIterator[Family]:
    sender, receiver = write_pair(folder, same=same)
    kept = f"model.keep_hidden={list(KEPT)}"
    layout = open_checkpoint(str(sender)).kv_layout(BLOCK, "float32", KEPT)
    store = StoreNode(
        pair_config("store-t", sender, 100, "store.dram_gb=0.05", kept), layout.block_bytes, join_cluster=False
    )
    await store.start()
    try:
        pool = store.control_address
        variant = f"prefill.variant={profile(sender, receiver, layers, inputs_first=inputs_first)}"
        async with (
            node_pair(sender, kept, name="s", pool=pool) as theirs,
            node_pair(receiver, variant, *settings, name="r", pool=pool) as ours,
        ):
            yield Family(theirs, ours, store)
    finally:
        await store.stop()


def full_prefill(model: Path, tokens: Sequence[int]) -> list[int]:
    return by_hand(model, model, range(LAYERS), tokens, 0)


def by_hand(sender: Path, receiver: Path, layers: range, tokens: Sequence[int], num_inherited: int) -> list[int]:
    """The receiver's answer when ``num_inherited`` tokens have the sender's KV, computed in one process."""
    models, caches = [], []
    for path in (sender, receiver):
        checkpoint = open_checkpoint(str(path))
        model = load_model(checkpoint, FLOAT32, keep_hidden=KEPT)
        assert isinstance(model, CausalLM)
        models.append(model)
        caches.append(KVCache(checkpoint.kv_layout(BLOCK, "float32", KEPT), 40).tensor)
    ids = torch.tensor(tokens)
    theirs, ours = models

    def batch(first: int, end: int, num_logits: int) -> ForwardBatch:
        whole = ForwardBatch.of_prompt(ids[:end], BLOCK, torch.arange(end - first - num_logits, end - first))
        starts = torch.tensor([0, end - first], dtype=torch.int32)
        return replace(
            whole,
            tokens=ids[first:end],
            positions=whole.positions[first:],
            query_starts=starts,
            slots=whole.slots[first:],
        )

    if num_inherited:
        prompt = batch(0, num_inherited, 0)
        theirs.forward(prompt, caches[0], NoHook())
        caches[1].copy_(caches[0])
        hidden = None
        if layers[0]:
            rows = input_rows(caches[0], LAYERS, KEPT.index(layers[0]), theirs.config.hidden_size)
            hidden = rows.flatten(0, 1)[:num_inherited]
        ours.recompute(layers, prompt, caches[1], NoHook(), hidden)
    answer: list[int] = []
    first = num_inherited
    while len(answer) < NEW_TOKENS:
        logits = ours.forward(batch(first, len(ids), 1), caches[1], NoHook())
        answer.append(int(logits.argmax()))
        first, ids = len(ids), torch.cat([ids, torch.tensor(answer[-1:])])
    return answer


@pytest.mark.timeout(120)
@pytest.mark.parametrize("settings", [(), ("prefill.chunk_tokens=16",)])
async def test_all_layers_computed_anew_are_the_receivers_own_answer(tmp_path: Path, settings: tuple[str, ...]) -> None:
    prompt = some_tokens(8 * BLOCK + 3)
    async with family(tmp_path, range(LAYERS), *settings) as nodes:
        theirs, _ = await nodes.sender.ask(prompt)
        await nodes.stored(8)
        answer, report = await nodes.receiver.ask(prompt)
        assert report.inherited_tokens == 8 * BLOCK
        assert answer == full_prefill(tmp_path / "receiver", prompt) != theirs
        assert nodes.counters["tokens_inherited"] == 8 * BLOCK
        for node in (nodes.receiver.prefill, nodes.receiver.decode):
            assert nodes.receiver.num_known(node, prompt + answer) == 0, "shared what is not its own"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("layers", "inputs_first"), [(range(1, 3), True), (range(1, 3), False), (range(3, 5), True), (range(1), True)]
)
async def test_a_group_is_computed_from_what_the_sender_kept(tmp_path: Path, layers: range, inputs_first: bool) -> None:
    prompt = some_tokens(8 * BLOCK + 3)
    async with family(tmp_path, layers, "prefill.chunk_tokens=24", inputs_first=inputs_first) as nodes:
        await nodes.sender.ask(prompt)
        await nodes.stored(8)
        answer, report = await nodes.receiver.ask(prompt)
        assert report.inherited_tokens == 8 * BLOCK
        sender, receiver = tmp_path / "sender", tmp_path / "receiver"
        assert answer == by_hand(sender, receiver, layers, prompt, 8 * BLOCK) != full_prefill(receiver, prompt)


@pytest.mark.timeout(120)
async def test_of_equal_weights_nothing_is_lost_and_many_prompts_share_steps(tmp_path: Path) -> None:
    """Including answers written back by the sender's decode node, which also keeps hidden states."""
    prompts = [some_tokens(count) for count in (5 * BLOCK + 2, 3 * BLOCK, 7 * BLOCK + 1)]
    async with family(tmp_path, range(1, 4), "prefill.chunk_tokens=32", same=True) as nodes:
        turns = [prompt + (await nodes.sender.ask(prompt))[0] + some_tokens(9) for prompt in prompts]
        await nodes.stored(sum((len(prompt) + NEW_TOKENS - 1) // BLOCK for prompt in prompts))
        turns.append(some_tokens(4 * BLOCK))  # nobody has that
        found = await asyncio.gather(*map(nodes.receiver.ask, turns))
        for turn, (answer, report) in zip(turns, found, strict=True):
            assert answer == full_prefill(tmp_path / "receiver", turn)
            assert report.inherited_tokens == (len(turn) - 9 - 1) // BLOCK * BLOCK * (turn is not turns[-1])
        assert nodes.counters["prompts_not_inherited"] == 1


@pytest.mark.timeout(120)
async def test_what_the_receiver_has_itself_comes_first(tmp_path: Path) -> None:
    beginning = some_tokens(3 * BLOCK)
    prompt = beginning + some_tokens(4 * BLOCK + 5)
    async with family(tmp_path, range(1, 3), same=True) as nodes:
        await nodes.receiver.ask([*beginning, 5])
        await nodes.sender.ask(prompt)
        await nodes.stored(3 + 7)
        answer, report = await nodes.receiver.ask(prompt)
        assert (report.local_cached_tokens, report.inherited_tokens) == (3 * BLOCK, 4 * BLOCK)
        assert answer == full_prefill(tmp_path / "receiver", prompt)
        assert nodes.receiver.num_known(nodes.receiver.decode, prompt + answer) == 3

        _, report = await nodes.receiver.ask(prompt, salt="another")
        assert report.inherited_tokens == 0, "another tenant's"
        _, report = await nodes.receiver.ask(prompt, prompt_logprobs=1)
        assert report.inherited_tokens == 0, "measured, and so computed"
        _, report = await nodes.receiver.ask(prompt + some_tokens(3))  # measured: known by now
        assert report.inherited_tokens == 0 and report.local_cached_tokens >= 7 * BLOCK


@pytest.mark.timeout(120)
async def test_wrong_bytes_cost_the_inheritance_and_not_the_answer(tmp_path: Path) -> None:
    prompt = some_tokens(6 * BLOCK + 3)
    async with family(tmp_path, range(1, 3), "prefill.chunk_tokens=16") as nodes:
        await nodes.sender.ask(prompt)
        await nodes.stored(6)
        slots = nodes.store.segment.array.reshape(-1, nodes.store.segment.block_bytes)
        layout = open_checkpoint(str(tmp_path / "sender")).kv_layout(BLOCK, "float32", KEPT)
        used = [slot for slot in slots if slot.any()]
        used[3][4 * layout.layer_bytes + 5] ^= 1  # in the last layer, which is waited for behind own layers
        answer, report = await nodes.receiver.ask(prompt)
        assert report.inherited_tokens == 0
        assert answer == full_prefill(tmp_path / "receiver", prompt)
        assert nodes.counters["prompts_not_inherited"] == 1


async def test_a_node_refuses_a_profile_that_is_not_its_own(tmp_path: Path) -> None:
    sender, receiver = write_pair(tmp_path)
    mine = profile(sender, receiver, range(1, 3))

    async def start(path: Path, model: Path = receiver, *settings: str) -> None:
        await PrefillNode(pair_config("prefill-t", model, 100, f"prefill.variant={path}", *settings)).start()

    with pytest.raises(ConfigError, match="profile is for KV"):
        await start(mine, sender)
    with pytest.raises(ConfigError, match="profile is for KV"):
        await start(mine, receiver, "model.dtype=bfloat16", "model.weights=int8")
    with pytest.raises(ConfigError, match="must keep"):
        await start(profile(sender, receiver, range(2, 3)))
    with pytest.raises(ConfigError, match="not in a model of 5"):
        await start(profile(sender, receiver, range(3, 6)))
    with pytest.raises(ConfigError, match="cannot read"):
        await start(tmp_path / "nothing")
    (tmp_path / "wrong").write_text("{}")
    with pytest.raises(ConfigError, match="no profile"):
        await start(tmp_path / "wrong")
    gpt = tmp_path / "gpt"
    write_tiny_model(gpt, "gpt2")
    with pytest.raises(ConfigError, match="Llama family on CPUs"):
        await start(profile(gpt, gpt, range(1, 2)), gpt)
