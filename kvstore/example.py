"""The pool alone, without a model: ``python -m kvstore.example`` starts a store with an SSD tier and uses it.

A pretend prefill puts the KV blocks of a prompt; a pretend decode finds how many of them are stored, reads one layer of
one of them, then all of them; the store is stopped and started again, and what reached its SSD is still there.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np

import kvstore
from kvstore.node import StoreNode
from mooncake.config import load_config
from mooncake.hashing import chain_seed, extend_chain, kv_fingerprint
from mooncake.types import KVLayout

LAYOUT = KVLayout(num_layers=8, num_kv_heads=2, block_tokens=64, head_dim=64, dtype="float32")
BLOCKS = 24


async def main(directory: Path) -> None:
    fingerprint = kv_fingerprint("digest of the weights", LAYOUT)
    prompt = np.arange(BLOCKS * LAYOUT.block_tokens, dtype=np.uint32)
    keys = extend_chain(chain_seed(fingerprint), prompt, LAYOUT.block_tokens)
    blocks = np.random.default_rng(0).normal(size=(BLOCKS, LAYOUT.block_bytes // 4)).astype(np.float32)

    settings = ["store.dram_gb=0.008", f'store.ssd_path="{directory}"', "store.ssd_gb=0.2"]  # DRAM for 15 blocks
    for life in ("first", "second"):
        node = StoreNode(load_config(None, settings), LAYOUT.block_bytes, join_cluster=False)
        await node.start()
        async with await kvstore.Client.connect(node.control_address, namespace=fingerprint) as pool:
            stored = (await pool.exists(keys)).index(False) if not all(await pool.exists(keys)) else BLOCKS
            print(f"{life} life: {stored} of {BLOCKS} blocks are stored")
            for i in range(stored, BLOCKS):
                await pool.put(keys[i], blocks[i], ranges=LAYOUT.num_layers, parent=keys[i - 1] if i else b"")

            layer = np.empty(LAYOUT.layer_bytes // 4, dtype=np.float32)
            await pool.get_range_into(keys[3], 5 * LAYOUT.layer_bytes, layer)
            assert np.array_equal(layer, blocks[3].reshape(LAYOUT.num_layers, -1)[5])

            into = np.empty_like(blocks)
            lengths = [await pool.get_into(key, into[i]) for i, key in enumerate(keys)]
            assert lengths == [LAYOUT.block_bytes] * BLOCKS and np.array_equal(into, blocks)
            [stats] = (await pool.stats()).values()
            print(f"  all {BLOCKS} read back; {stats.sealed} are in DRAM, {stats.ssd_blocks} on the SSD")
        await node.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="kvstore-example-") as place:
        asyncio.run(main(Path(place)))
