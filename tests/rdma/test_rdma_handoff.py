"""A hand-off over verbs: layers stream from the engine that computes them into the cache of the one that decodes.

``RDMA_TEST_MODEL=smollm2`` uses the real model, as ``tests/kvstore/test_rdma_machine.py`` does; the default is a tiny
one, because verbs may be available only in an emulated machine, a hundred times slower than this one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_gguf import write_gguf

from kvstore.checksum import range_checksums
from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.hashing import Chain
from mooncake.model import load_model
from mooncake.precision import FLOAT32
from mooncake.sampling import SamplingParams
from prefill_node.kv_writer import Destination, KVWriter, WriteStream
from prefill_node.streamer import LayerStreamer, StreamedPrompt
from tests.engine.hash_model import answers, run_all

pytestmark = [pytest.mark.rdma, pytest.mark.slow]  # minutes, for torch alone, in an emulated machine

PATIENCE_S = 300  # a real model takes an emulated machine that others share longer than two minutes
BLOCK_TOKENS = 16
EPOCH = 9
PROMPT = np.random.default_rng(0).integers(0, 256, 20).astype(np.uint32)
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


def sequence(**settings: int | bool) -> Sequence:
    return Sequence("r", PROMPT, len(PROMPT), GREEDY, Chain(b"s"), eos_ids=(2,), max_model_len=128, **settings)  # type: ignore[arg-type]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    name = os.environ.get("RDMA_TEST_MODEL", "")
    if not name:
        name = str(tmp_path / "tiny.gguf")
        write_gguf(Path(name))
    return open_checkpoint(name)


def test_layers_stream_over_verbs_and_the_tokens_are_the_same(checkpoint: Checkpoint):
    torch.set_num_threads(1)
    model = load_model(checkpoint, FLOAT32, 128)
    layout = checkpoint.kv_layout(BLOCK_TOKENS, "float32")
    config = EngineConfig(BLOCK_TOKENS, chunk_tokens=16, max_sequences=2, max_model_len=128)
    prefill = Engine(model, KVCache(layout, 8), config)
    segment = Segment.create("decode", layout.block_bytes, 8)
    decode = Engine(model, KVCache(layout, 8, segment.buffer), config)
    server = SegmentServer(segment, "decode", ("rdma",))
    server.start()
    transfer = TransferEngine("prefill", ("rdma",))
    transfer.register(prefill.cache.memory.data)

    reservation = decode.reserve(sequence())
    server.grant(reservation.block_ids, EPOCH)
    sent: list[tuple[str, int]] = []
    writer = KVWriter(
        "hand-offs", transfer, prefill.cache.memory, lambda stream, size, ms: sent.append((stream.transport, size))
    )
    stream = WriteStream("hand-off", layout, time.monotonic() + PATIENCE_S, writer)
    slots = {index: (block, EPOCH) for index, block in enumerate(reservation.block_ids)}
    stream.open(Destination(server.address, slots))
    streamer = LayerStreamer(BLOCK_TOKENS, prefill.cache)

    def no_load(blocks: Any) -> Any:
        raise AssertionError("nothing is stored")

    streamer.prompts["r"] = StreamedPrompt(no_load, [stream], lambda *_: None, lambda: None)
    source = sequence(num_to_sample=1, hold_blocks=True)
    prefill.add(source)
    [first] = run_all(prefill, streamer)
    stream.done.result(PATIENCE_S)

    assert {name for name, _ in sent} == {"rdma"}
    assert stream.sent_bytes == len(reservation.block_ids) * layout.block_bytes
    server.revoke(reservation.block_ids)
    for index, block in enumerate(reservation.block_ids):
        assert np.array_equal(
            range_checksums(decode.cache.memory[block].data, layout.num_layers), stream.checksums[index]
        )
    decode.start_reserved("r", [first.token])
    got = answers(run_all(decode))

    prefill.abort("r")
    writer.stop()
    transfer.close()
    server.stop()
    prefill.add(sequence())  # the reference: one engine alone, which finds its own blocks again
    assert got == answers(run_all(prefill))
    assert len(got["r"]) == GREEDY.max_tokens
    segment.close()
