"""``kvstore.Client`` as external users use it: over one store, over three, with numpy, with torch, with faults."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvstore
from kvstore.checksum import range_checksums
from mooncake.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, OutOfBlocks

BLOCK = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def keep(start_actor: Callable[..., Any]) -> Callable[..., Any]:
    def start(num_blocks: int = 8, *settings: str) -> Any:
        size = f"store.dram_gb={num_blocks * BLOCK / 1e9 + 1e-6}"
        return start_actor("store", block_bytes=BLOCK, settings=[size, *settings])

    return start


def data(seed: int, size: int = BLOCK) -> bytes:
    return np.random.default_rng(seed).bytes(size)


async def test_bytes_arrays_and_tensors_go_in_and_come_back(keep):
    async with await kvstore.Client.connect(keep().greeting["control"], namespace="model A") as pool:
        array = np.random.default_rng(0).normal(size=(4, 64, 128)).astype(np.float32)
        tensor = torch.randn(8, 256, dtype=torch.bfloat16)
        assert await pool.put("array", array)
        assert await pool.put("tensor", tensor)
        assert await pool.put(b"bytes", data(1))
        assert await pool.put("array", array)  # once more is no error
        into_array, into_tensor = np.empty_like(array), torch.empty_like(tensor)
        assert await pool.get_into("array", into_array) == array.nbytes
        assert await pool.get_into("tensor", into_tensor) == tensor.nbytes
        assert np.array_equal(into_array, array) and torch.equal(into_tensor, tensor)
        assert await pool.get("bytes") == data(1) and await pool.get("nothing") is None
        assert await pool.get_into("nothing", bytearray(1)) is None
        assert await pool.exists(["array", "nothing"]) == [True, False]
        assert await pool.remove(["array", "nothing"]) == 1
        assert await pool.get("array") is None
        for wrong in (array[:, ::2], "text"):
            with pytest.raises(InvalidRequest):
                await pool.put("wrong", wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await pool.get_into("tensor", b"read-only memory" * 256)
        with pytest.raises(InvalidRequest, match="there is room for 1"):
            await pool.get_into("tensor", bytearray(1))
        with pytest.raises(InvalidRequest):
            await pool.put("", b"x")


async def test_a_store_that_was_restarted_is_used_as_before(keep):
    """Once, every read of a short block raised an error from then on, and a local client could not use the board."""
    store = keep()
    address = store.greeting["control"]
    async with await kvstore.Client.connect(address) as pool:
        assert await pool.put("k", data(1)) and await pool.get_into("k", bytearray(BLOCK)) == BLOCK
        store.kill()
        for call in (pool.get_into("k", bytearray(BLOCK)), pool.put("k", data(1))):
            with pytest.raises(NodeUnavailable):
                await call
        keep(8, f"node.port={address.rpartition(':')[2]}")
        into = bytearray(BLOCK)
        async with asyncio.timeout(30):
            while not await _answers(pool.get_into("k", into)) or not num_boards():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for number in range(4):
            assert await pool.put(f"k{number}", data(number))
            assert await pool.get_into(f"k{number}", into) == BLOCK and into == data(number)
        assert num_boards() == 1


async def _answers(call: Coroutine[Any, Any, int | None]) -> bool:
    try:
        assert await call is None
    except NodeUnavailable:
        return False
    return True


def num_boards() -> int:
    """Number of boards of stores on this host that this process has mapped."""
    gc.collect()  # a store of ours keeps its board for as long as anybody might use it
    return Path("/proc/self/maps").read_text().count("memfd:mooncake-board")


async def test_parts_are_read_and_verified_alone(keep):
    store = keep()
    async with await kvstore.Client.connect(store.greeting["control"]) as pool:
        block = data(2)
        assert await pool.put("k", block, ranges=8)
        size = BLOCK // 8
        for offset, length in (
            (0, size),
            (3 * size, 2 * size),
            (size + 5, 10),
            (size - 1, 2),
            (0, BLOCK),
            (BLOCK - 1, 1),
        ):
            assert await pool.get_range("k", offset, length) == block[offset : offset + length]
        tensor = torch.empty(size, dtype=torch.uint8)
        assert await pool.get_range_into("k", 2 * size, tensor)
        assert tensor.numpy().tobytes() == block[2 * size : 3 * size]
        assert await pool.get_range("other", 0, 1) is None
        with pytest.raises(InvalidRequest, match="beyond"):
            await pool.get_range("k", BLOCK - 1, 2)
        store.ask("flip", 0, 5 * size + 3)
        assert await pool.get_range("k", 0, size) == block[:size]  # this part is whole
        assert await pool.get_range("k", 5 * size + 100, 8) is None  # that one is not
        assert await pool.exists(["k"]) == [False]


async def test_namespaces_and_salts_keep_apart_what_has_one_name(keep):
    address = keep().greeting["control"]
    clients = [
        await kvstore.Client.connect(address, namespace=namespace, salt=salt)
        for namespace, salt in (("fp32", ""), ("bf16", ""), ("fp32", "tenant"), ("fp32tenant", ""))
    ]
    for i, client in enumerate(clients):
        assert await client.get("k") is None
        assert await client.put("k", data(i, 100))
    for i, client in enumerate(clients):
        assert await client.get("k") == data(i, 100)
        await client.close()


async def test_batches_take_what_is_there(keep):
    async with await kvstore.Client.connect(keep(16).greeting["control"]) as pool:
        items = [(f"k{i}", data(i, 1000 + i % 2)) for i in range(10)]
        assert await pool.put_batch(items) == [True] * 10
        keys = ["k3", "missing", "k0", "k3"]
        assert await pool.get_batch(keys) == [data(3, 1001), None, data(0, 1000), data(3, 1001)]
        into = [bytearray(2000) for _ in keys]
        assert await pool.get_batch_into(keys, into) == [1001, None, 1000, 1001]
        assert into[2][:1000] == data(0, 1000)
        assert await pool.exists([f"k{i}" for i in range(12)]) == [True] * 10 + [False] * 2
        assert await pool.get_batch([]) == [] and await pool.put_batch([]) == [] and await pool.exists([]) == []


async def test_a_batch_may_name_a_block_twice_and_not_hide_a_wrong_one(keep):
    async with await kvstore.Client.connect(keep().greeting["control"]) as pool:
        assert await pool.put_batch([("a", data(1)), ("b", data(2)), ("a", data(3, 50))]) == [True] * 3
        assert await pool.get_batch(["a", "b"]) == [data(1), data(2)]
        with pytest.raises(InvalidRequest, match="do not fit"):
            await pool.put_batch([("too long", data(4, BLOCK + 1)), ("c", data(5))])
        assert await pool.exists(["too long", "c"]) == [False, True]


async def test_what_a_caller_gets_wrong_is_said_at_once(keep):
    pool = await kvstore.Client.connect(keep().greeting["control"])
    block, key = data(0), "key"
    for wrong in (
        lambda: pool.put(3, block),
        lambda: pool.get("\ud800"),
        lambda: pool.exists([key, None]),
        lambda: pool.put_batch([(key, block), ("other", block)], parents=["parent"]),
        lambda: pool.put_batch([(key, np.empty(1 << 32, np.uint8))]),
        lambda: pool.get_range(key, 0, -1),
        lambda: pool.get_range(key, 0, 1 << 40),
        lambda: pool.put_batch([(key, block)], timeout_s=float("inf")),
        lambda: pool.get(key, timeout_s=float("nan")),
        lambda: pool.remove([key], timeout_s=1e8),
        lambda: pool.stats(timeout_s=float("-inf")),
    ):
        with pytest.raises(InvalidRequest):
            await wrong()
    assert await pool.exists([key, "other"]) == [False, False]
    with pytest.raises(DeadlineExceeded):
        await pool.put_batch([(key, block)], timeout_s=-1.0)
    await pool.close()
    await pool.close()
    for late in (
        lambda: pool.put(key, block),
        lambda: pool.put_batch([]),
        lambda: pool.get(key),
        lambda: pool.get_into(key, bytearray(1)),
        lambda: pool.get_range(key, 0, 1),
        lambda: pool.exists([key]),
        lambda: pool.remove([key]),
        lambda: pool.pin([key]),
        lambda: pool.unpin([key]),
        lambda: pool.stats(),
    ):
        with pytest.raises(NodeUnavailable, match="closed"):
            await late()


@pytest.mark.parametrize(
    "wrong",
    [{name: "\ud800"} for name in ("namespace", "salt", "tenant", "secret", "name")]
    + [{"name": name} for name in ("", "\0mine", "n" * 200)],
    ids=repr,
)
async def test_what_no_store_could_be_told_is_refused_before_anything_is_opened(wrong):
    with pytest.raises(InvalidRequest) as refused:
        await kvstore.Client.connect("127.0.0.1:9", **wrong)
    assert refused.value.param == next(iter(wrong))


@pytest.mark.parametrize("transports", [("shm", "tcp"), ("tcp",)], ids=["near", "far"])
async def test_a_batch_may_be_longer_than_a_message(keep, transports):
    async with await kvstore.Client.connect(keep(16).greeting["control"], transports=transports) as pool:
        stored = [f"{i}".rjust(240, "_") for i in range(0, 70_000, 10_000)]
        assert await pool.put_batch([(key, data(i, 500)) for i, key in enumerate(stored)]) == [True] * 7
        keys = [f"{i}".rjust(240, "_") for i in range(70_000)]
        here = [i % 10_000 == 0 for i in range(70_000)]
        assert await pool.exists(keys, timeout_s=60) == here
        found = await pool.get_batch(keys, timeout_s=60)
        assert [block is not None for block in found] == here
        assert [block for block in found if block is not None] == [data(i, 500) for i in range(7)]
        assert await pool.pin(keys, timeout_s=60) == await pool.unpin(keys, timeout_s=60) == 7
        assert await pool.remove(keys, timeout_s=60) == 7


async def test_keys_spread_over_stores_and_replicas_outlive_one(keep):
    stores = [keep(64) for _ in range(3)]
    addresses = [store.greeting["control"] for store in stores]
    async with await kvstore.Client.connect(addresses, replicas=2) as pool:
        items = [(f"k{i}", data(i, 5000)) for i in range(60)]
        assert all(await pool.put_batch(items))
        shares = [stats.sealed for stats in (await pool.stats()).values()]
        assert sum(shares) == 120 and min(shares) > 20
        stores[1].kill()
        assert await pool.get_batch([key for key, _ in items]) == [value for _, value in items]
        assert await pool.exists([key for key, _ in items]) == [True] * 60
        assert await pool.put("after", data(99, 5000))
        with pytest.raises(NodeUnavailable):
            await pool.remove(["k1"])  # who knows what the dead one still holds


async def test_a_key_that_nobody_answers_for_is_an_error_and_no_miss(keep):
    stores = [keep(64) for _ in range(2)]
    async with await kvstore.Client.connect([store.greeting["control"] for store in stores]) as pool:
        items = [(f"k{i}", data(i, 5000)) for i in range(32)]
        old, new = items[:16], items[16:]
        assert all(await pool.put_batch(old))
        stores[0].kill()
        left = stores[1].greeting["control"]
        for call in (
            lambda: pool.exists([key for key, _ in old]),
            lambda: pool.get_batch([key for key, _ in old]),
            lambda: pool.get_batch_into([key for key, _ in old], [bytearray(5000) for _ in old]),
            lambda: pool.put_batch(new),
        ):
            with pytest.raises(NodeUnavailable):
                await call()
        here = [(key, value) for key, value in items if homes(pool, key) == [left]]
        assert len(here) > 4
        assert await pool.exists([key for key, _ in here]) == [True] * len(here)  # also what has just been put
        assert await pool.get_batch([key for key, _ in here]) == [value for _, value in here]


async def test_a_store_that_hangs_is_outlived_by_its_replicas(keep):
    stores = [keep(64) for _ in range(2)]
    addresses = [store.greeting["control"] for store in stores]
    async with await kvstore.Client.connect(addresses, replicas=2, transports=("tcp",)) as pool:
        items = {f"k{i}": data(i, 5000) for i in range(16)}
        assert all(await pool.put_batch(items.items()))
        first, second = (next(key for key in items if homes(pool, key)[0] == address) for address in addresses)
        stores[0].freeze()
        assert await pool.get_batch([*items, "nothing"], timeout_s=1.0) == [*items.values(), None]
        assert await pool.get_batch_into(list(items), [bytearray(5000) for _ in items], timeout_s=1.0) == [5000] * 16
        for key in (first, second):
            assert await pool.get(key, timeout_s=1.0) == items[key]
            assert await pool.get_range(key, 10, 20, timeout_s=1.0) == items[key][10:30]
        assert await pool.get_range("nothing", 10, 20, timeout_s=1.0) is None


async def test_a_store_that_is_away_at_first_is_used_once_it_is_there(keep):
    stores = [keep(64) for _ in range(2)]
    addresses = [store.greeting["control"] for store in stores]
    stores[0].kill()
    with pytest.raises(NodeUnavailable):
        await kvstore.Client.connect(addresses)  # without replicas somebody's blocks would be away
    async with asyncio.timeout(10):
        while num_boards():  # noqa: ASYNC110 (what was mapped may just be being touched in the background)
            await asyncio.sleep(0.01)
    async with await kvstore.Client.connect(addresses, replicas=2) as pool:
        assert await pool.put("k", data(1)) and await pool.get("k") == data(1) and num_boards() == 1
        stores[0] = keep(64, f"node.port={addresses[0].rpartition(':')[2]}")
        async with asyncio.timeout(30):
            while num_boards() < 2:
                assert await pool.put("k", data(1))
                await asyncio.sleep(0.05)
        stores[1].kill()
        assert await pool.get("k") == data(1)
    stores[0].kill()
    with pytest.raises(NodeUnavailable):
        await kvstore.Client.connect(addresses, replicas=2)


async def test_a_call_ends_in_its_time_however_many_replicas_are_asked(keep):
    slow, hanging = keep(), keep()
    addresses = [store.greeting["control"] for store in (slow, hanging)]
    async with await kvstore.Client.connect(addresses, replicas=2, transports=("tcp",)) as pool:
        key = next(f"k{i}" for i in range(100) if homes(pool, f"k{i}") == addresses)
        for read in (lambda: pool.get(key, timeout_s=1.6), lambda: pool.get_range(key, 0, 1, timeout_s=1.6)):
            slow.ask("hang")
            hanging.freeze()
            asyncio.get_running_loop().call_later(1.0, slow.tell, "wake")  # then it says that it has none
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await read()
            assert time.monotonic() - started < 2.4
            hanging.thaw()


def homes(pool: kvstore.Client, key: str) -> list[str]:
    """Which stores hold this block, in the order in which they are asked for it."""
    return pool._keys.homes(pool._keys.wire(key))


async def test_a_corrupt_replica_is_dropped_and_the_other_one_serves(keep):
    stores = [keep() for _ in range(2)]
    async with await kvstore.Client.connect([store.greeting["control"] for store in stores], replicas=2) as pool:
        assert await pool.put("k", data(0))
        for store in stores:
            store.ask("flip", 0, 77)
        assert await pool.get("k") is None  # both were wrong
        assert await pool.put("k", data(0))
        stores[0].ask("flip", 0, 77)
        assert await pool.get("k") == data(0)
        assert await pool.get("k") == data(0)
        counters = [stats.counters.get("checksum_mismatches", 0) for stats in (await pool.stats()).values()]
        assert counters[1] == 1 and counters[0] in (1, 2)


async def test_pins_and_quotas_through_the_client(keep):
    address = keep(8, f"store.tenant_dram_gb={4 * BLOCK / 1e9}").greeting["control"]
    async with await kvstore.Client.connect(address, tenant="t") as pool:
        for i in range(4):
            await pool.put(f"k{i}", data(i))
        assert await pool.pin([f"k{i}" for i in range(4)], hard=True) == 4
        with pytest.raises(OutOfBlocks, match="'t'"):
            await pool.put("more", data(9))
        assert await pool.unpin(["k0", "k9"]) == 1
        assert await pool.put("more", data(9))
        assert await pool.exists(["k0", "k1", "more"]) == [False, True, True]


async def test_stores_with_a_secret_take_clients_that_know_it(keep, tmp_path, caplog):
    (tmp_path / "secret").write_text("open sesame\n")
    address = keep(8, f'transfer.secret_file="{tmp_path / "secret"}"').greeting["control"]
    async with await kvstore.Client.connect(address, transports=("tcp",), secret="open sesame") as pool:
        assert await pool.put("k", data(1)) and await pool.get("k") == data(1)
    for wrong in ("", "please"):
        with pytest.raises(InvalidRequest, match=r"another transfer\.secret_file") as caught:
            await kvstore.Client.connect(address, transports=("tcp",), secret=wrong)
        assert caught.value.param == "secret"
    caplog.clear()
    async with await kvstore.Client.connect(address) as near:  # the same user on the same host needs none
        for number in range(4):
            assert await near.put(f"{number}", data(number)) and await near.get(f"{number}") == data(number)
    assert len(caplog.records) <= 1


async def test_a_missing_store_is_one_clear_error():
    with pytest.raises(NodeUnavailable):
        await kvstore.Client.connect("127.0.0.1:1", timeout_s=2.0)
    with pytest.raises(InvalidRequest, match="replicas"):
        await kvstore.Client.connect("127.0.0.1:1", replicas=2)


def test_checksums_name_the_part_that_differs():
    assert len(set(range_checksums(data(0), 8))) == 8


def test_the_example_runs():
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.example"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "second life: 24 of 24" in done.stdout
