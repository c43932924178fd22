"""Write-back of generated blocks to a real store: a failure costs a few of them, never the rest."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from decode_node.writeback import BATCH_BLOCKS, WAITING_SHARE, FilledBlock, WriteBack
from kvstore.client.store_client import StoreClient
from kvstore.node import StoreNode
from kvstore.transfer.engine import TransferEngine
from mooncake.config import load_config
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import DeadlineExceeded
from mooncake.rpc.server import Channels
from mooncake.types import BlockKey, KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, block_tokens=4, head_dim=8, dtype="float32")
NUM_BLOCKS = 8


async def test_a_bug_on_the_way_to_one_pool_does_not_end_writing_back() -> None:
    store = StoreNode(load_config(overrides=["store.dram_gb=0.001"]), LAYOUT.block_bytes, join_cluster=False)
    await store.start()
    transfer, channels = TransferEngine("decode-t"), Channels()

    def client(address: str) -> StoreClient:
        if not address:
            raise ZeroDivisionError("a bug")
        return StoreClient(address, transfer, channels)

    writeback = WriteBack(client, LAYOUT, KVCache(LAYOUT, NUM_BLOCKS))
    writeback.start()
    held = set(range(NUM_BLOCKS))

    def offer(pool: str, block_id: int) -> None:
        key = BlockKey(bytes([block_id + 1]) * 32)
        writeback.offer(FilledBlock(pool, block_id, key, b"", lambda: held.discard(block_id)))

    offer("", 0)
    async with asyncio.timeout(20):
        while 0 in held:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        for block_id in range(1, NUM_BLOCKS):
            offer(store.control_address, block_id)
        while held:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert (writeback.stored, writeback.skipped) == (NUM_BLOCKS - 1, 1)
    await writeback.stop()
    await channels.close()
    transfer.close()
    await store.stop()


class Stores:
    """Two pools: "slow" never answers, like a stopped process; "quick" takes everything."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_well = False

    def client(self, address: str) -> StoreClient:
        async def put_blocks(keys: list[object], *rest: Any, timeout_s: float) -> int:
            self.asked.append(address)
            if address == "slow" and not self.is_well:
                await asyncio.sleep(timeout_s)
                raise DeadlineExceeded(f"no answer within {timeout_s:g} s")
            return len(keys)

        return cast(StoreClient, SimpleNamespace(put_blocks=put_blocks))


async def test_a_pool_that_stands_still_gives_the_cache_back_and_is_left_alone() -> None:
    num_blocks = 256
    stores, held = Stores(), set[int]()
    writeback = WriteBack(stores.client, LAYOUT, KVCache(LAYOUT, num_blocks), write_timeout_s=0.2, backoff_s=1.0)
    writeback.start()

    def offer(address: str, block_ids: range) -> None:
        for block_id in block_ids:
            held.add(block_id)
            done = lambda block_id=block_id: held.discard(block_id)  # noqa: E731
            writeback.offer(FilledBlock(address, block_id, BlockKey(bytes([block_id]) * 32), b"", done))

    async def until_free() -> None:
        async with asyncio.timeout(20):
            while held:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    offer("slow", range(num_blocks))
    assert len(held) <= num_blocks * WAITING_SHARE + BATCH_BLOCKS, "the rest of the cache is for requests"
    await until_free()
    assert stores.asked == ["slow"], "one batch found out; what waited behind it did not try again"
    assert writeback.skipped == num_blocks

    offer("slow", range(BATCH_BLOCKS))
    assert not held, "while it rests nothing waits for it"
    offer("quick", range(BATCH_BLOCKS))
    await until_free()
    assert writeback.stored == BATCH_BLOCKS, "another pool does not rest with it"

    stores.is_well = True
    await asyncio.sleep(1.1)
    offer("slow", range(BATCH_BLOCKS))
    await until_free()
    assert writeback.stored == 2 * BATCH_BLOCKS
    await writeback.stop()
