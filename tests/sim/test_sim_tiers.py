"""Hosts with an SSD under their memory: what goes there, what comes back and when, and what the conductor knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooncake.app.sim.cluster import Cluster, Model, Ssd, load_cluster, load_preset, preset_text
from mooncake.app.sim.events import Agenda
from mooncake.app.sim.machines.disk import Disk
from mooncake.app.sim.machines.tiered import TieredCache
from mooncake.app.sim.output.summary import summarize, to_json
from mooncake.app.sim.simulation import Run, Simulation
from mooncake.app.traces.shapes import generate
from mooncake.errors import ConfigError
from mooncake.types import BlockEvent, BlockKey, Tier

MODEL = Model(num_layers=2, token_bytes=1000, block_tokens=1000)  # a block is a megabyte
SSD = Ssd(tokens=1_000_000, read_gb_per_s=1.0, write_gb_per_s=1000.0)  # room is made in no time
DRAM_TOKENS = 64_000  # 64 blocks


def chain(name: int, length: int) -> list[BlockKey]:
    return [BlockKey(bytes([name, at]) * 16) for at in range(length)]


def make_cache(agenda: Agenda, disk: Disk | None = None, ssd: Ssd = SSD) -> TieredCache:
    disk = disk or Disk(ssd, MODEL, agenda)
    return TieredCache(DRAM_TOKENS, ssd, MODEL, agenda, disk, lambda: None)


def fill(cache: TieredCache, agenda: Agenda, names: range) -> None:
    for name in names:
        cache.add(chain(name, 20), [])
        agenda.run()


def test_what_leaves_memory_goes_to_the_ssd_and_comes_back_in_the_time_that_reading_takes() -> None:
    agenda = Agenda()
    cache = make_cache(agenda)
    fill(cache, agenda, range(1))
    assert cache.match(chain(0, 20)) == 20 and cache.disk.bytes_written == 0
    fill(cache, agenda, range(1, 5))  # 100 blocks where 64 fit
    assert cache.match(chain(0, 20)) == 0 and cache.stored(chain(0, 20)) == 20
    moved = [event for event in cache.take_events() if event.tier is Tier.SSD]
    assert {event.key for event in moved} >= set(chain(0, 20)) and all(event.stored for event in moved)

    came: list[tuple[float, int]] = []
    began_s = agenda.now
    cache.load(chain(0, 20), lambda blocks: came.append((agenda.now - began_s, blocks)))
    agenda.run()
    assert came == [(pytest.approx(20 / 1000, rel=0.1), 20)]  # 20 MB at 1 GB/s
    assert cache.match(chain(0, 20)) == 20
    assert cache.load(chain(0, 20), lambda blocks: None) is None
    cache.check()
    assert cache.num_in_use == 0


@pytest.mark.parametrize("into_dram", [False, True])
def test_what_was_computed_though_the_ssd_has_it_comes_to_memory_only_when_that_was_meant(into_dram: bool) -> None:
    agenda = Agenda()
    cache = make_cache(agenda)
    fill(cache, agenda, range(5))
    assert cache.match(chain(0, 20)) == 0 and cache.stored(chain(0, 20)) == 20
    written = cache.disk.bytes_written
    cache.add(chain(0, 20), [], into_dram)
    agenda.run()
    assert cache.match(chain(0, 20)) == (20 if into_dram else 0)
    fill(cache, agenda, range(6, 9))
    assert cache.stored(chain(0, 20)) == 20
    assert cache.disk.bytes_written - written <= 60 * 1.01e6, "what the SSD had was not written again"
    cache.check()


def test_two_who_want_the_same_blocks_share_one_read() -> None:
    agenda = Agenda()
    cache = make_cache(agenda)
    fill(cache, agenda, range(6))
    ends: list[tuple[float, int]] = []
    began_s, read = agenda.now, cache.disk.bytes_read
    for keys in (chain(0, 10), chain(0, 20), chain(1, 10)):
        assert cache.match(keys) == 0
        cache.load(keys, lambda blocks: ends.append((agenda.now - began_s, blocks)))
    agenda.run()
    assert sorted(blocks for _, blocks in ends) == [10, 10, 20]
    assert cache.disk.bytes_read - read == 30 * 10**6
    assert ends[-1][0] == pytest.approx(0.030, rel=0.1)
    cache.check()


@pytest.mark.parametrize(("sights", "is_written"), [(0, False), (2, True), (3, False)])
def test_a_block_is_copied_at_once_when_it_was_seen_often_enough(sights: int, is_written: bool) -> None:
    agenda = Agenda()
    cache = make_cache(agenda, ssd=Ssd(tokens=1_000_000, write_through_sights=sights))
    for _ in range(2):
        cache.add(chain(0, 20), [])
        agenda.run()
    assert (cache.disk.bytes_written > 0) == is_written == (chain(0, 20)[0] in cache.disk)


def test_blocks_that_were_not_seen_often_enough_are_gone_when_they_leave() -> None:
    agenda = Agenda()
    cache = make_cache(agenda, ssd=Ssd(tokens=1_000_000, demote_sights=2, write_through_sights=0))
    fill(cache, agenda, range(5))
    assert cache.stored(chain(0, 20)) == 0 and cache.disk.bytes_written == 0
    assert BlockEvent(False, chain(0, 20)[0]) in cache.take_events()


def test_a_full_ssd_gives_up_its_oldest_blocks_and_says_so() -> None:
    agenda = Agenda()
    cache = make_cache(agenda, ssd=Ssd(tokens=128_000))
    known: dict[BlockKey, Tier] = {}
    for name in range(20):
        fill(cache, agenda, range(name, name + 1))
        for event in cache.take_events():
            if event.stored:
                known[event.key] = event.tier
            else:
                known.pop(event.key, None)
    cache.check()
    assert cache.stored(chain(0, 20)) == 0 and cache.stored(chain(16, 20)) == 20
    assert cache.disk.index.live_bytes < 128 * 10**6 < cache.disk.bytes_written
    assert sum(tier is Tier.SSD for tier in known.values()) > 20
    for name in range(20):
        for key in chain(name, 20):
            assert known.get(key) == (Tier.DRAM if cache.match([key]) else Tier.SSD if key in cache.disk else None), (
                "what was told is not what is there"
            )


def test_a_dead_host_finds_its_ssd_as_it_was_and_its_memory_empty() -> None:
    agenda = Agenda()
    cache = make_cache(agenda)
    fill(cache, agenda, range(5))
    cache.add(chain(9, 60), [])  # whose room is still being made
    cache.die()
    agenda.run()
    assert cache.stored(chain(9, 60)) < 60
    reborn = make_cache(agenda, cache.disk)
    assert reborn.match(chain(0, 20)) == 0 and reborn.stored(chain(0, 20)) == 20
    assert {event.key for event in reborn.take_events()} >= set(chain(0, 20))
    reborn.load(chain(0, 20), lambda blocks: None)
    agenda.run()
    assert reborn.match(chain(0, 20)) == 20
    reborn.check()


asked = st.tuples(st.sampled_from([0.0, 0.3, 1.0]), st.booleans(), st.integers(0, 2), st.integers(1, 40))


@given(asked=st.lists(asked, min_size=8, max_size=12), dram_tokens=st.sampled_from([6000, 12_000]))
@example(  # the end of one chain is loaded where the end of another waits to be stored
    asked=[
        (0.0, False, 2, 32),
        (1.0, True, 2, 12),
        (1.0, True, 0, 26),
        (0.0, False, 0, 13),
        (0.3, True, 2, 39),
        (0.3, False, 1, 5),
    ],
    dram_tokens=12_000,
)
@settings(max_examples=30)
def test_no_time_passes_without_end_where_neither_tier_has_room(
    asked: list[tuple[float, bool, int, int]], dram_tokens: int
) -> None:
    ssd, agenda = Ssd(tokens=20_000, read_gb_per_s=1.0, write_gb_per_s=0.01), Agenda()
    cache = TieredCache(dram_tokens, ssd, MODEL, agenda, Disk(ssd, MODEL, agenda), lambda: None)
    at_s, ends = 0.0, 0

    def ended(blocks: int) -> None:
        nonlocal ends
        ends += 1

    def load(keys: list[BlockKey]) -> None:
        if cache.load(keys, ended) is None:
            ended(0)

    for pause_s, loads, name, length in asked:
        at_s += pause_s
        agenda.at(at_s, load if loads else lambda keys: cache.add(keys, []), chain(name, length))
    assert agenda.run(50_000) < 50_000
    cache.check()
    assert cache.num_in_use == 0 and ends == sum(loads for _, loads, _, _ in asked)


def tiered(ssd_tokens: int = 24_400_000, dram_blocks: int = 200, **ssd: float) -> Cluster:
    cluster = load_preset("paper-16").with_counts(prefill=3, decode=2)
    tier = Ssd(tokens=ssd_tokens, **ssd) if ssd_tokens else None  # type: ignore[arg-type]
    return cluster.with_machines("prefill", store_tokens=dram_blocks * 512, ssd=tier)


def play(cluster: Cluster) -> Simulation:
    simulation = Simulation(cluster, generate("conversation", 300, 1), Run(seed=1))
    simulation.run()
    return simulation


@pytest.fixture(scope="module")
def under() -> Simulation:
    """Played once for all who look at it."""
    return play(tiered())


def test_an_ssd_finds_what_memory_had_to_give_up(under: Simulation) -> None:
    without, found = summarize(play(tiered(0)), ""), summarize(under, "")
    assert without.hit_ssd == 0.0 and without.hit_tokens == without.hit_dram
    assert found.hit_ssd > 0.01 and found.hit_tokens > without.hit_tokens + 0.01
    assert found.hit_tokens == pytest.approx(found.hit_dram + found.hit_ssd)
    assert found.ssd_read_gb > 0 and found.ssd_written_gb > 0


def test_an_ssd_that_is_slower_than_computing_is_not_read() -> None:
    slow = play(tiered(read_gb_per_s=0.05))
    assert summarize(slow, "").hit_ssd == 0.0
    assert sum(disk.bytes_written for disk in slow.machines.disks.values()) > 0


def test_an_ssd_that_nothing_goes_to_changes_nothing() -> None:
    idle, without = play(tiered(demote_sights=0, write_through_sights=0)), play(tiered(0))
    assert idle.results.cached_tokens.sum() == pytest.approx(without.results.cached_tokens.sum(), rel=0.02)
    assert idle.results.ttft_s.mean() == pytest.approx(without.results.ttft_s.mean(), rel=0.02)


def test_the_conductor_knows_the_tier_of_each_block(under: Simulation) -> None:
    index = under.conductor.index
    for name, machine in under.machines.prefill.items():
        assert isinstance(machine.cache, TieredCache)
        told = {key: tier for shard in index.blocks_of(f"store-{name}") for key, tier in shard}
        on_ssd = {key for key, tier in told.items() if tier is Tier.SSD}
        here = {key[:15]: machine.cache.match([key]) for key in machine.cache.index.stored_keys()}
        assert here.keys() == told.keys() - on_ssd and on_ssd
        assert {block.header.key[:15] for block in machine.cache.disk.index.blocks()} >= on_ssd


def test_the_same_seed_gives_the_same_bytes(under: Simulation) -> None:
    lines = [json.dumps(to_json(summarize(one, ""), one.cluster, one.options)) for one in (under, play(under.cluster))]
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("tokens = 24_400_000", "tokens = 1000"), "too small"),
        (("[machines.ssd]", '[machines.ssd]\neviction = "mru"'), "mru"),
        (("store_tokens = 3_000_000", "store_tokens = 0"), "store_tokens"),
    ],
)
def test_an_ssd_that_makes_no_sense_is_refused_with_its_reason(
    change: tuple[str, str], complaint: str, tmp_path: Path
) -> None:
    text, mine = preset_text("paper-16-ssd"), tmp_path / "mine.toml"
    assert change[0] in text
    mine.write_text(text.replace(*change))
    with pytest.raises(ConfigError, match=complaint):
        Simulation(load_cluster(mine), generate("conversation", 5, 1))
