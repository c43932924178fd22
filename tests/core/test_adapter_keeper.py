"""A node keeps the adapters that its conductor wants, however often and in whatever order it is told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_lora import write_adapter
from tiny_model import tiny_model

from mooncake.adapter_keeper import AdapterKeeper
from mooncake.adapter_loads import AdapterLoad
from mooncake.adapters import Adapter, AdapterTable, open_adapter, read_weights
from mooncake.errors import ModelError, NotFound


class Host:
    """Loads when it is told that it may."""

    def __init__(self) -> None:
        self.has = {"configured"}
        self.asked: list[str] = []
        self.error: Exception | None = None
        self.may_load = asyncio.Event()
        self.may_load.set()

    def has_adapter(self, digest: str) -> bool:
        return digest in self.has

    async def load_adapter(self, adapter: Adapter) -> None:
        self.asked.append(adapter.name)
        await self.may_load.wait()
        if self.error is not None:
            raise self.error
        self.has.add(adapter.digest)

    def drop_adapter(self, digest: str) -> None:
        self.has.remove(digest)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        write_adapter(folder / name, tiny_model("llama"), seed=seed)
    return folder


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def told(keeper: AdapterKeeper) -> list[tuple[int, str]]:
    return sorted((load.number, load.error) for load in keeper.report())


async def test_it_loads_what_is_wanted_once_and_drops_what_is_not(folder: Path) -> None:
    host, changes = Host(), []
    keeper = AdapterKeeper(host, lambda: changes.append(told(keeper)))
    a, b = (AdapterLoad(open_adapter(name, str(folder / name)), number) for number, name in enumerate("ab", 1))
    for _ in range(3):
        keeper.want([a, b])
        await asyncio.sleep(0)
    await until(lambda: len(keeper.report()) == 2)
    keeper.want([replace(a, is_served=True), b])
    assert [load.is_served for load in keeper.report()] == [True, False], "the next conductor is told"
    assert host.asked == ["a", "b"] and changes == [[(1, "")], [(1, ""), (2, "")]]
    again = AdapterLoad(a.adapter, 3)  # under another number: its weights are here
    keeper.want([b, again])
    await until(lambda: told(keeper) == [(2, ""), (3, "")])
    assert host.asked == ["a", "b"] and host.has_adapter(a.adapter.digest)
    keeper.want([])
    assert host.has == {"configured"} and not keeper.report()


async def test_what_was_given_up_while_it_was_loaded_is_dropped(folder: Path) -> None:
    host = Host()
    keeper = AdapterKeeper(host, lambda: None)
    host.may_load.clear()
    a = AdapterLoad(open_adapter("a", str(folder / "a")), 1)
    keeper.want([a])
    await until(lambda: host.asked)
    keeper.want([])
    host.may_load.set()
    await until(lambda: keeper._task is not None and keeper._task.done())
    assert host.has == {"configured"} and not keeper.report()


async def test_a_failure_is_told_and_tried_again_only_for_another_load(folder: Path, tmp_path: Path) -> None:
    host = Host()
    keeper = AdapterKeeper(host, lambda: None)
    there = open_adapter("a", str(folder / "a"))
    elsewhere = Adapter("gone", tmp_path / "gone", "digest", 8.0, False)
    changed = Adapter("a", folder / "a", "digest of what was there", 8.0, False)
    host.error = MemoryError("too large\nin many words")
    keeper.want([AdapterLoad(elsewhere, 1), AdapterLoad(changed, 2), AdapterLoad(there, 3)])
    await until(lambda: len(keeper.report()) == 3)
    (_, gone), (_, other), (_, large) = told(keeper)
    assert "cannot read" in gone and "other weights on this node" in other
    assert large == "the adapter a: MemoryError: too large"
    host.error = None
    keeper.want([AdapterLoad(there, 3)])
    await asyncio.sleep(0.05)
    assert told(keeper) == [(3, large)] and host.asked == ["a"]
    keeper.want([AdapterLoad(there, 4)])
    await until(lambda: told(keeper) == [(4, "")])


async def test_those_of_the_configuration_stay() -> None:
    host = Host()
    keeper = AdapterKeeper(host, lambda: None)
    keeper.want([AdapterLoad(Adapter("c", Path("/nowhere"), "configured", 8.0, False), 1)])
    await until(lambda: told(keeper) == [(1, "")])
    keeper.want([])
    assert host.has == {"configured"}
    await keeper.stop()


def test_a_place_is_free_once_nobody_refers_to_the_adapter_there() -> None:
    freed: list[int] = []
    a, same, b = (
        Adapter(name, Path(name), digest, 8.0, False) for name, digest in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    table = AdapterTable([a, same, b])
    assert table.adapters == (a, b), "equal weights are in the model once"
    first, second = table.get("1"), table.get("2")
    assert first is not None and second is not None and (first.place, second.place) == (0, 1)
    assert table.get("") is None
    table.remove("1", freed.append)
    with pytest.raises(NotFound, match="not loaded here"):
        table.get("1")
    assert not freed and table.take_place() == 2, "somebody computes with it"
    del first
    assert freed == [0] and table.take_place() == 3, "the model has it still"
    table.freed(0)
    assert table.take_place() == 0
    table.remove("2", freed.append)
    assert freed == [0]
    del second
    assert freed == [0, 1]


def test_weights_that_are_not_those_of_the_digest_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, tiny_model("llama"))
    adapter = open_adapter("a", str(tmp_path))
    weights = tmp_path / "adapter_model.safetensors"
    assert read_weights(adapter) == weights.read_bytes()
    write_adapter(tmp_path, tiny_model("llama"), seed=1)
    with pytest.raises(ModelError, match="is changing while it is loaded"):
        read_weights(adapter)
    weights.unlink()
    with pytest.raises(ModelError, match="cannot read"):
        read_weights(adapter)


@pytest.mark.timeout(30)
def test_what_may_have_no_end_is_not_read(tmp_path: Path) -> None:
    write_adapter(tmp_path, tiny_model("llama"))
    (tmp_path / "adapter_config.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ModelError, match=r"adapter_config.json is larger than 1 MiB"):
        open_adapter("a", str(tmp_path))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        write_adapter(tmp_path, tiny_model("llama"))
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(ModelError, match=f"{name} is not a file"):
            open_adapter("a", str(tmp_path))
        (tmp_path / name).unlink()


def test_a_configuration_that_nests_too_deeply_is_not_peft_s(tmp_path: Path) -> None:
    write_adapter(tmp_path, tiny_model("llama"))
    (tmp_path / "adapter_config.json").write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(ModelError, match=r"adapter_config.json is not PEFT's"):
        open_adapter("a", str(tmp_path))
