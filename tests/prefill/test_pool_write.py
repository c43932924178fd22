"""Storing a prompt's blocks is best effort, and what goes wrong with it costs the store nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.client.store_client import StoreClient
from kvstore.client.types import Reservation
from mooncake.page_groups import UNIFORM
from mooncake.rpc.prefill_pb2 import PrefillRequest
from mooncake.types import BlockKey, KVLayout, SegmentAddress
from prefill_node.deadline import Deadline
from prefill_node.handoff import HandoffSender
from prefill_node.pool_write import PoolWrite
from prefill_node.prompt_writes import PromptWrites
from prefill_node.resources import NodeResources

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, block_tokens=16, head_dim=8, dtype="float16")
KEYS = [BlockKey(bytes([number]) * 32) for number in range(3)]
STORE = SegmentAddress("store", 1, "", "", "127.0.0.1:9", LAYOUT.block_bytes, len(KEYS))


class Ranges:
    """Of a store that has room for all, and notes what is given back."""

    def __init__(self) -> None:
        self.aborted: list[int] = []

    async def reserve(self, names: list[Any], *given: object, **more: object) -> list[Reservation]:
        return [Reservation(STORE, index, 1) for index in range(len(names))]

    async def abort(self, reservations: Iterable[Reservation]) -> None:
        self.aborted += [slot.index for slot in reservations]


@pytest.mark.parametrize("lacking", ["page_number", "Destination"])
async def test_a_writer_that_finds_no_memory_gives_the_store_its_slots_back(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were held until the store's patience ended, and then until the writer's life did."""

    def no_memory(*given: object) -> None:
        raise MemoryError

    ranges = Ranges()
    resources = SimpleNamespace(
        host=SimpleNamespace(
            cache_size=SimpleNamespace(layout=LAYOUT, groups=UNIFORM), thread=SimpleNamespace(call=lambda work: None)
        ),
        pool_writer=SimpleNamespace(kick=lambda stream: None),
    )
    store = cast(StoreClient, SimpleNamespace(ranges=ranges))
    write = PoolWrite(cast(NodeResources, resources), store, "r", KEYS, Deadline(time.monotonic() + 30))
    monkeypatch.setattr(f"prefill_node.pool_write.{lacking}", no_memory)
    await write.open(0, len(KEYS), (0,), into_dram=False)
    await asyncio.wait_for(write.seal(), 5)
    await write.close()
    assert ranges.aborted == [0, 1, 2]


async def test_a_store_has_its_slots_back_before_a_decode_node_that_hangs_is_told() -> None:
    resources = cast(NodeResources, SimpleNamespace())
    writes = PromptWrites(resources, PrefillRequest(), KEYS, Deadline(time.monotonic() + 30))
    may_end, is_aborted = asyncio.Event(), asyncio.Event()

    async def abort() -> None:
        is_aborted.set()

    writes.handoff = cast(HandoffSender, SimpleNamespace(close=may_end.wait))
    writes.pool = cast(PoolWrite, SimpleNamespace(close=abort))
    closing = asyncio.create_task(writes.close())
    await asyncio.wait_for(is_aborted.wait(), 5)
    assert not closing.done()
    may_end.set()
    await closing
