"""What the streamer streams when a step is computed in pieces: every block once a layer, and none too early."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tiny_hybrid import BLOCK, hybrid_engine, prompt_of, sequence, write_hybrid

from kvstore.checksum import range_checksums
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.cache.sequence_blocks import SequenceBlocks
from mooncake.engine.sequence import Sequence
from mooncake.engine.step_plan import BlockToLoad, StepEntry, StepPlan
from mooncake.errors import KVLoadFailed
from mooncake.hashing import Chain
from mooncake.page_groups import one_group
from mooncake.sampling import SamplingParams
from mooncake.types import BlockKey, KVLayout, SegmentAddress
from prefill_node.kv_writer import LayerBlocks
from prefill_node.loader import LeasedPrefix, PrefixLoad
from prefill_node.streamer import LayerStreamer, StreamedPrompt

BLOCK_TOKENS = 4


@dataclass
class Pile:
    """A stream and its writer: what was pushed, in order."""

    runs: list[LayerBlocks] = field(default_factory=list)
    has_ended: bool = False

    @property
    def writer(self) -> Pile:
        return self

    def push(self, run: LayerBlocks) -> None:
        self.runs.append(run)

    def end(self) -> None:
        self.has_ended = True

    def kick(self, stream: object) -> None:
        pass

    def blocks(self, layer: int) -> list[int]:
        return [block for run in self.runs if run.layer == layer for block in run.block_ids]


def cache_of(num_layers: int) -> KVCache:
    return KVCache(KVLayout(num_layers, 1, BLOCK_TOKENS, 16, "float32"), 16)


def sequence_of(name: str, num_tokens: int, blocks: list[int]) -> Sequence:
    tokens = np.arange(num_tokens, dtype=np.uint32)
    made = Sequence(
        name, tokens, num_tokens, SamplingParams(max_tokens=1), Chain(bytes(32)), eos_ids=(), max_model_len=99
    )
    made.blocks = SequenceBlocks([blocks], [0])
    return made


@pytest.mark.parametrize("is_in_pieces", [False, True])
def test_blocks_leave_as_pieces_complete_them(is_in_pieces: bool) -> None:
    """A chunk in the middle of one prompt, and another prompt from its fourth token to its end."""
    streamer, piles = LayerStreamer(BLOCK_TOKENS, cache_of(2)), {name: Pile() for name in ("a", "b")}
    for name, pile in piles.items():
        streamer.prompts[name] = StreamedPrompt(lambda _: None, [pile], lambda *_: None, lambda: None)  # type: ignore
    a, b = sequence_of("a", 30, [7, 3, 9, 1, 4, 5, 6, 2]), sequence_of("b", 10, [8, 11, 10])
    plan = StepPlan()
    plan.entries += [StepEntry(a, 0, 16, 0), StepEntry(b, 4, 6, 0)]
    streamer.begin_step(plan)
    assert streamer.wants_layers
    if is_in_pieces:
        for layer in (0, 1):
            told = []
            for num_tokens in (3, 4, 14, 19, 21):
                streamer.after_piece(layer, num_tokens)
                told.append((piles["a"].blocks(layer), piles["b"].blocks(layer)))
            assert told == [
                ([], []),
                ([7], []),
                ([7, 3, 9], []),
                ([7, 3, 9, 1], [8]),  # of b, the block before its first token here goes with the first that is full
                ([7, 3, 9, 1], [8, 11]),
            ]
    for layer in (0, 1):
        streamer.after_layer(layer)
        assert piles["a"].blocks(layer) == [7, 3, 9, 1]
        assert piles["b"].blocks(layer) == [8, 11, 10]
        for name in piles:  # a run says where in the prompt its blocks stand
            runs = [run for run in piles[name].runs if run.layer == layer]
            assert [run.first for run in runs] == [sum(len(r.block_ids) for r in runs[:i]) for i in range(len(runs))]
    streamer.end_step(plan)
    assert (piles["a"].has_ended, piles["b"].has_ended) == (False, True)


def test_a_step_that_was_abandoned_is_streamed_anew() -> None:
    streamer, pile = LayerStreamer(BLOCK_TOKENS, cache_of(2)), Pile()
    streamer.prompts["a"] = StreamedPrompt(lambda _: None, [pile], lambda *_: None, lambda: None)  # type: ignore
    plan = StepPlan()
    plan.entries.append(StepEntry(sequence_of("a", 30, [7, 3, 9, 1, 4, 5, 6, 2]), 0, 8, 0))
    streamer.begin_step(plan)
    streamer.after_piece(0, 4)
    streamer.begin_step(plan)
    streamer.after_layer(0)
    assert pile.blocks(0) == [7, 7, 3]


class SlowTransfer:
    """Reads that take as long as the test wants."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.num_begun = self.num_ended = 0

    def read(self, *_: object) -> None:
        self.num_begun += 1
        self.has_begun.set()
        assert self.may_end.wait(20)
        self.num_ended += 1


def test_blocks_are_given_up_when_none_of_their_sequences_loads_reads_into_them() -> None:
    """A prefix that is gone from the pool, while a variant's KV of the tokens behind it is still being read: the engine
    gives both their blocks to others once it is told."""
    layout, transfer = KVLayout(3, 1, BLOCK_TOKENS, 16, "float32"), SlowTransfer()
    cache = KVCache(layout, 16)
    sums = range_checksums(cache.memory[0].data, layout.num_layers)
    deadline = time.monotonic() + 20

    def gone() -> LeasedPrefix:
        raise KVLoadFailed("it is gone")

    def lease() -> LeasedPrefix:
        return LeasedPrefix(SegmentAddress("s", 1, "h", "", "", 0, 0), [1], deadline, [5], [sums])

    prefix, variant = (
        PrefixLoad("a", [BlockToLoad(0, block, BlockKey(b"k"))], how, lambda *_: None, layout, deadline)
        for block, how in ((7, gone), (3, lease))
    )
    streamer = LayerStreamer(BLOCK_TOKENS, cache)
    streamer.prompts["a"] = StreamedPrompt(
        lambda _: prefix, [], lambda *_: None, lambda: None, load=prefix, variant_load=variant
    )
    plan = StepPlan(variant_entries=[StepEntry(sequence_of("a", 10, [7, 3, 9]), 4, 4)])
    loader = threading.Thread(target=lambda: [load.run(transfer, None, cache) for load in (prefix, variant)])  # type: ignore
    loader.start()
    assert transfer.has_begun.wait(20)
    streamer.begin_step(plan)
    threading.Timer(0.1, transfer.may_end.set).start()
    with pytest.raises(KVLoadFailed, match="it is gone"):
        streamer.before_layer(0)
    assert transfer.num_ended == transfer.num_begun == 1, "another sequence has these blocks now"
    loader.join(20)
    assert transfer.num_begun == 1


def test_all_rows_of_a_layer_leave_with_it() -> None:
    streamer, pile = LayerStreamer(BLOCK_TOKENS, cache_of(3), one_group([2, 1])), Pile()
    streamer.prompts["a"] = StreamedPrompt(lambda _: None, [pile], lambda *_: None, lambda: None)  # type: ignore
    plan = StepPlan()
    plan.entries.append(StepEntry(sequence_of("a", 30, [7, 3, 9, 1, 4, 5, 6, 2]), 0, 8, 0))
    streamer.begin_step(plan)
    streamer.after_layer(0)
    assert [pile.blocks(row) for row in range(3)] == [[7, 3], [7, 3], []]
    streamer.after_layer(1)
    assert [pile.blocks(row) for row in range(3)] == [[7, 3]] * 3


def test_an_answer_that_continues_here_keeps_only_its_own_window(tmp_path: Path) -> None:
    """What its prompt stores is retained on its own; otherwise it would keep the states of all its blocks."""
    write_hybrid("qwen3.5", tmp_path)
    engine, pile = hybrid_engine(tmp_path), Pile()
    groups, pool = engine.config.groups, engine.block_pool
    streamer, retained = LayerStreamer(BLOCK, engine.cache, groups), list[int]()  # type: ignore[arg-type]
    asked = sequence("r", prompt_of(3 * BLOCK), 4 * BLOCK)
    asked.keep_window_of = 3 * BLOCK - 1

    def retain(pages: list[int]) -> None:
        pool.retain(pages)
        retained.extend(pages)

    first_pages = tuple(groups.first_page(group, asked.keep_window_of, BLOCK) for group in range(groups.num_groups))
    streamer.prompts["r"] = StreamedPrompt(lambda _: None, [pile], lambda *_: None, lambda: None, retain, first_pages)  # type: ignore
    engine.add(asked)
    engine.step(streamer)
    assert len(retained) == 3 + 3  # its three blocks of KV, and the last one's state in three groups
    while asked.num_generated < 4 * BLOCK - 1:
        engine.step(streamer)
    held = [len(table) - first for table, first in zip(asked.blocks.tables, asked.blocks.first_held, strict=True)]
    assert held == [7, 1, 1, 1]
    engine.abort("r")
    pool.release(retained)
    assert pool.num_in_use == 0
