"""What three tensor-parallel ranks computed serves one that has the whole model: the same tokens come out."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvstore.checksum import range_checksums
from kvstore.layout.layout import ShardedLayout, numbers, rows
from kvstore.layout.plan import plan
from kvstore.layout.reader import LayoutReader, Shard
from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.hashing import Chain
from mooncake.model import CausalLM, load_model
from mooncake.precision import FLOAT32
from mooncake.sampling import SamplingParams
from tests.engine.hash_model import answers, run_all

PROMPT = np.random.default_rng(0).integers(100, 49_000, 200).astype(np.uint32)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
DEGREE = 3


def sequence(**settings: int | bool) -> Sequence:
    return Sequence("r", PROMPT, len(PROMPT), GREEDY, Chain(b"s"), eos_ids=(2,), max_model_len=512, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Iterator[CausalLM]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(checkpoint, FLOAT32, 512)
    torch.set_num_threads(threads)


def engine_of(model: CausalLM, checkpoint: Checkpoint, block_tokens: int) -> Engine:
    cache = KVCache(checkpoint.kv_layout(block_tokens, "float32"), 512 // block_tokens)
    return Engine(model, cache, EngineConfig(block_tokens, chunk_tokens=256, max_sequences=2, max_model_len=512))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_tensor_parallel_three_to_one_decodes_the_same_tokens(model: CausalLM, checkpoint: Checkpoint, transport: str):
    prefill, decode = engine_of(model, checkpoint, 64), engine_of(model, checkpoint, 32)
    alone = sequence()
    prefill.add(alone)
    wanted = answers(run_all(prefill))
    source = sequence(num_to_sample=1, hold_blocks=True)
    prefill.add(source)
    [first] = run_all(prefill)

    whole = prefill.cache.layout
    sharded = ShardedLayout.of(whole, tensor_parallel=DEGREE)
    target = ShardedLayout.of(decode.cache.layout)
    # [layers, 2, heads, tokens, dim] each
    computed = [prefill.cache.tensor[block].numpy() for block in source.blocks.block_table]
    transfer = TransferEngine("decode", (transport,))
    shards: dict[int, Shard] = {}
    segments: list[tuple[Segment, SegmentServer]] = []
    for rank in range(DEGREE):
        form, heads = sharded.block(rank), sharded.heads(rank)
        segment = Segment.create(f"rank{rank}", form.block_bytes, len(computed))
        server = SegmentServer(segment, f"rank{rank}", (transport,))
        server.start()
        segments.append((segment, server))
        for slot, block in enumerate(computed):
            own = segment.array.reshape(len(computed), -1)[slot]
            numbers(rows(form, own), form.dtype)[:] = block[:, :, heads.start : heads.stop]
        sums = [range_checksums(segment.block(slot), form.num_layers) for slot in range(len(computed))]
        shards[rank] = Shard(server.address, range(len(computed)), sums)
    prefill.abort("r")

    reservation = decode.reserve(sequence())
    assert reservation.first_block == 0
    reader = LayoutReader(transfer)
    done = reader.read_blocks(
        plan(sharded, target, 0),
        shards,
        [decode.cache.memory[block] for block in reservation.block_ids],
        time.monotonic() + 30,
    )
    assert done.nbytes >= len(PROMPT) // 32 * decode.cache.layout.block_bytes
    decode.start_reserved("r", [first.token])
    assert answers(run_all(decode)) == wanted

    reader.close()
    transfer.close()
    for segment, server in segments:
        server.stop()
        segment.close()
