"""A log of records adds up to the table that its events describe, read once or with its end twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conductor.prefixes.index import PrefixIndex
from conductor.prefixes.table import INDEX_KEY_BYTES
from kvstore.metadata.records import RECORD_BYTES, Cursor, pack_blocks, pack_events, unpack_log
from mooncake.directory import RECORD_KEY_BYTES
from mooncake.types import BlockEvent, BlockKey, Tier

KEYS = [BlockKey(bytes([0, number]) * 16) for number in range(6)]  # with zero bytes in the middle and at the end
events = st.lists(
    st.builds(BlockEvent, st.booleans(), st.sampled_from(KEYS), st.just(b""), st.sampled_from(list(Tier))), max_size=40
)


def table_of(changes: list[BlockEvent]) -> dict[Tier, set[bytes]]:
    table: dict[bytes, Tier] = {}
    for event in changes:
        if event.stored:
            table[event.key[:RECORD_KEY_BYTES]] = event.tier
        else:
            table.pop(event.key[:RECORD_KEY_BYTES], None)
    return {tier: {key for key, held in table.items() if held is tier} for tier in Tier if tier in table.values()}


@given(events, st.integers(0, 40))
def test_a_log_gives_the_table_of_its_events(changes: list[BlockEvent], repeated: int) -> None:
    log = pack_events(changes)
    assert len(log) == RECORD_BYTES * len(changes)
    for each in (log, log + pack_events(changes[-repeated:]), log + b"half a record"):
        assert {tier: set(keys) for tier, keys in unpack_log(each).items()} == table_of(changes)


@given(events)
def test_a_table_survives_the_way_through_an_index_and_back(changes: list[BlockEvent]) -> None:
    table = unpack_log(pack_events(changes))
    index = PrefixIndex()
    index.join("node", is_tiered=True)
    for tier, keys in table.items():
        index.load("node", keys, tier)
    assert index.num_blocks("node") == sum(map(len, map(set, table.values())))
    back = unpack_log(b"".join(map(pack_blocks, index.blocks_of("node"))))
    assert {tier: set(keys) for tier, keys in back.items()} == {tier: set(keys) for tier, keys in table.items()}


def test_cursors_come_back_and_strangers_are_none() -> None:
    cursor = Cursor(1 << 63, 48, 2**64 - 1, 7)
    assert Cursor.unpack(cursor.pack()) == cursor
    assert Cursor.unpack(b"") is None is Cursor.unpack(cursor.pack() + b"x")


def test_the_directory_keeps_as_much_of_a_key_as_the_index() -> None:
    assert RECORD_KEY_BYTES == INDEX_KEY_BYTES
