"""The thread that reads prefixes, with a real segment and a cache to which copies fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from kvstore.checksum import range_checksums
from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from mooncake.engine.cache.kv_cache import Arrival, KVCache
from mooncake.engine.step_plan import BlockToLoad
from mooncake.errors import KVLoadFailed
from mooncake.page_groups import one_group
from mooncake.types import BlockKey, KVLayout
from prefill_node.converted_prefix import ConvertedLease
from prefill_node.loader import LeasedPrefix, Loader, PrefixLoad

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, block_tokens=4, head_dim=8, dtype="float32")
NUM_BLOCKS = 4
WAIT_S = 20.0


class BrokenMirror:
    """Copies to the device whose errors show only when they are waited for; the first one fails."""

    def __init__(self) -> None:
        self.memory = KVCache(LAYOUT, NUM_BLOCKS).memory
        self.is_broken = True

    def to_host(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        raise NotImplementedError

    def to_device(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        return self

    def wait(self) -> None:
        if self.is_broken:
            self.is_broken = False
            raise RuntimeError("an unspecified launch failure")

    def order(self) -> None:
        pass


def test_a_copy_that_fails_keeps_neither_its_request_nor_the_next_one_waiting() -> None:
    segment = Segment.create("loads", LAYOUT.block_bytes, NUM_BLOCKS)
    segment.array[:] = np.random.default_rng(0).integers(0, 256, segment.array.shape, dtype=np.uint8)
    blocks = segment.array.reshape(NUM_BLOCKS, LAYOUT.block_bytes)
    server, transfer, mirror = SegmentServer(segment, "store-t", ("shm",)), TransferEngine("prefill-t"), BrokenMirror()
    server.start()
    loader = Loader(transfer, mirror)
    released = []

    def lease() -> LeasedPrefix:
        checksums = [range_checksums(block.data, LAYOUT.num_layers) for block in blocks]
        return LeasedPrefix(server.address, [1], time.monotonic() + WAIT_S, list(range(NUM_BLOCKS)), checksums)

    def release(given: LeasedPrefix | ConvertedLease, corrupt: list[BlockKey]) -> None:
        released.append(given.lease_ids)

    def load(name: str) -> PrefixLoad:
        to_load = [BlockToLoad(i, i, BlockKey(bytes([i]) * 32)) for i in range(NUM_BLOCKS)]
        return PrefixLoad(name, to_load, lease, release, LAYOUT, time.monotonic() + WAIT_S)

    try:
        loads = [load("first"), load("second")]
        for each in loads:
            loader.submit(each)
        cancelling = threading.Thread(target=loads[0].cancel, daemon=True)
        loads[1].wait(LAYOUT.num_layers - 1)
        cancelling.start()
        cancelling.join(WAIT_S)
        assert not cancelling.is_alive(), "the engine's thread would wait for it for ever"
        np.testing.assert_array_equal(mirror.memory, blocks)
    finally:
        loader.stop()
        transfer.close()
        server.stop()
    assert released == [[1], [1]]


def test_a_layer_of_several_rows_is_read_as_one_range_and_each_row_is_checked() -> None:
    groups = one_group([1, 3, 2])
    layout = KVLayout(num_layers=6, num_kv_heads=1, block_tokens=4, head_dim=8, dtype="float32")
    segment = Segment.create("rows", layout.block_bytes, NUM_BLOCKS)
    segment.array[:] = np.random.default_rng(0).integers(0, 256, segment.array.shape, dtype=np.uint8)
    blocks = segment.array.reshape(NUM_BLOCKS, layout.block_bytes)
    server, transfer = SegmentServer(segment, "store-r", ("shm",)), TransferEngine("prefill-r")
    server.start()
    cache = KVCache(layout, NUM_BLOCKS)
    loader = Loader(transfer, cache)
    spoilt: list[list[BlockKey]] = []
    checksums = [range_checksums(block.data, layout.num_layers) for block in blocks]

    def load(name: str) -> PrefixLoad:
        def lease() -> LeasedPrefix:
            return LeasedPrefix(server.address, [1], time.monotonic() + WAIT_S, list(range(NUM_BLOCKS)), checksums)

        to_load = [BlockToLoad(i, NUM_BLOCKS - 1 - i, BlockKey(bytes([i]) * 32)) for i in range(NUM_BLOCKS)]
        give_back = lambda _, corrupt: spoilt.append(corrupt)  # noqa: E731
        return PrefixLoad(name, to_load, lease, give_back, layout, time.monotonic() + WAIT_S, groups=groups)

    try:
        whole, broken = load("whole"), load("broken")
        loader.submit(whole)
        whole.wait(2)
        np.testing.assert_array_equal(cache.memory[::-1], blocks)
        checksums[2][3] += 1  # the last row of the second layer
        loader.submit(broken)
        broken.wait(0)
        with pytest.raises(KVLoadFailed, match="layer 1"):
            broken.wait(1)
    finally:
        loader.stop()
        transfer.close()
        server.stop()
    assert spoilt == [[], [bytes([2]) * 32]]
