"""A prefix stored by three tensor-parallel ranks is used by a node with the whole model, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstore.checksum import range_checksums
from kvstore.client.ranges import StoreRanges
from kvstore.client.store_client import StoreClient
from kvstore.client.types import Lease
from kvstore.layout.layout import rows
from kvstore.node import StoreNode
from kvstore.transfer.engine import TransferEngine
from mooncake.checkpoint import open_checkpoint
from mooncake.config import PoolLayoutSection
from mooncake.errors import ConfigError, Overloaded
from mooncake.hashing import chain_seed, extend_chain, kv_fingerprint
from mooncake.rpc.server import Channels
from prefill_node.converted_prefix import ConvertedPrefix, SourceLayout
from tests.prefill.test_loads import PROMPT, STORED_BLOCKS, prefill_on_a_fresh_node, store_node, store_stats

CHECKPOINT = open_checkpoint("smollm2")
OURS = CHECKPOINT.kv_layout(64, "float32")
THREE = PoolLayoutSection(tensor_parallel=3)
OUR_KEYS = extend_chain(chain_seed(kv_fingerprint(CHECKPOINT.digest, OURS)), PROMPT, 64)


async def our_blocks(store: StoreNode) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The prompt's stored blocks in our layout."""
    transfer, channels = TransferEngine("test", ("shm",)), Channels()
    client = StoreClient(store.control_address, transfer, channels)
    lease = await client.ranges.acquire(OUR_KEYS)
    slots = store.segment.array.reshape(-1, store.segment.block_bytes)
    found = np.stack([slots[block.slot][: OURS.block_bytes] for block in lease.blocks])
    await client.ranges.release([lease])
    await channels.close()
    transfer.close()
    return found


async def leave_as_three_ranks(store: StoreNode, blocks: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    transfer, channels = TransferEngine("ranks", ("shm",)), Channels()
    client = StoreClient(store.control_address, transfer, channels)
    theirs = SourceLayout.configured(THREE, CHECKPOINT.digest, OURS)
    assert theirs is not None
    for rank in range(3):
        heads = theirs.plan.source.heads(rank)
        keys = theirs.keys(rank, PROMPT, "", "")
        parts = [
            np.ascontiguousarray(rows(OURS, block)[:, :, heads.start : heads.stop]).reshape(-1) for block in blocks
        ]
        names = list(zip(keys, [b"", *keys], strict=False))
        sums = [range_checksums(part, OURS.num_layers) for part in parts]
        assert await client.put_blocks(names, parts, sums) == len(blocks)
    await channels.close()
    transfer.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_what_three_ranks_stored_is_read_converted_and_verified() -> None:
    async with store_node() as store:
        token, _ = await prefill_on_a_fresh_node(store, "prefill-alone")
        wanted = await our_blocks(store)
    assert len(wanted) == STORED_BLOCKS

    async with store_node() as store:
        await leave_as_three_ranks(store, wanted)
        same, report = await prefill_on_a_fresh_node(store, "prefill-whole", "pool_layout.tensor_parallel=3")
        assert same == token
        assert report.pool_cached_tokens == STORED_BLOCKS * 64
        assert np.array_equal(await our_blocks(store), wanted)  # stored anew, in our layout

    async with store_node() as store:
        await leave_as_three_ranks(store, wanted)
        slots = store.segment.array.reshape(-1, store.segment.block_bytes)
        used = next(slot for slot in slots if slot.any())
        used[OURS.block_bytes // 3 - 100] ^= 1
        same, report = await prefill_on_a_fresh_node(store, "prefill-doubting", "pool_layout.tensor_parallel=3")
        assert same == token, "a wrong byte reached an answer"
        assert report.pool_cached_tokens == 0
        assert dict((await store_stats(store)).counters)["checksum_mismatches"] == 1


class RefusingAtLast(StoreRanges):
    """Of a store that refuses leases after two."""

    num_left = 2

    async def acquire(self, keys: Sequence[bytes], **options: Any) -> Lease:
        self.num_left -= 1
        if self.num_left < 0:
            raise Overloaded("too many read leases are open")
        return await super().acquire(keys, **options)


async def test_of_some_leases_without_the_others_none_stays() -> None:
    theirs = SourceLayout.configured(THREE, CHECKPOINT.digest, OURS)
    assert theirs is not None
    transfer, channels = TransferEngine("reader", ("shm",)), Channels()
    async with store_node() as store:
        await leave_as_three_ranks(store, np.zeros((STORED_BLOCKS, OURS.block_bytes), np.uint8))
        client = StoreClient(store.control_address, transfer, channels)
        client.ranges = RefusingAtLast(transfer, client._calls, client.shortcuts, "", False)
        prefix = ConvertedPrefix(theirs, client, PROMPT, "", "")
        with pytest.raises(Overloaded):
            await prefix.lease(STORED_BLOCKS, 5.0)
        assert (await store_stats(store)).leases == 0
        await channels.close()
    transfer.close()


def test_every_part_of_a_model_has_names_of_its_own_and_only_what_can_be_verified_is_read() -> None:
    theirs = SourceLayout.configured(THREE, CHECKPOINT.digest, OURS)
    assert theirs is not None and SourceLayout.configured(PoolLayoutSection(), CHECKPOINT.digest, OURS) is None
    names = {key for rank in range(3) for key in theirs.keys(rank, PROMPT, "", "")}
    assert len(names) == 3 * STORED_BLOCKS and names.isdisjoint(OUR_KEYS)
    assert names.isdisjoint(theirs.keys(0, PROMPT, "", "an adapter")) and names.isdisjoint(
        theirs.keys(0, PROMPT, "a tenant", "")
    )
    later = theirs.keys(0, PROMPT, "", "an adapter", 2 * theirs.plan.source.block_tokens + 1)
    assert later[:2] == theirs.keys(0, PROMPT)[:2] and names.isdisjoint(later[2:])
    whole = SourceLayout.configured(PoolLayoutSection(tensor_parallel=1), CHECKPOINT.digest, OURS)
    assert whole is not None and whole.keys(0, PROMPT, "", "") == OUR_KEYS  # the same layout is the same KV
    with pytest.raises(ConfigError, match="must divide"):
        SourceLayout.configured(PoolLayoutSection(tensor_parallel=1, block_tokens=128), CHECKPOINT.digest, OURS)
