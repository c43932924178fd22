"""Generated blocks on their way to a real store: what goes wrong costs a few of them, and never the rest."""

from __future__ import annotations

import asyncio

from decode_node.writeback import FilledBlock, WriteBack
from kvstore.client import StoreClient
from kvstore.node import StoreNode
from kvstore.transfer.engine import TransferEngine
from mooncake.config import load_config
from mooncake.engine.kv_cache import KVCache
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

    writeback = WriteBack(client, LAYOUT)
    writeback.start(KVCache(LAYOUT, NUM_BLOCKS))
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
