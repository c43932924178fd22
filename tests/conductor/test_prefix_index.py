"""The prefix index against the plainest possible one: a set of keys a node."""

from hypothesis import given
from hypothesis import strategies as st

from conductor.prefix_index import PrefixIndex, index_keys
from mooncake.types import BlockEvent, BlockKey

NODES = tuple(f"n{i}" for i in range(70))  # more than one machine word of bits
KEYS = tuple(BlockKey(bytes([i]) * 32) for i in range(6))

operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from(NODES), st.sampled_from(KEYS)),
        st.tuples(st.just("remove"), st.sampled_from(NODES), st.sampled_from(KEYS)),
        st.tuples(st.sampled_from(["clear", "forget"]), st.sampled_from(NODES), st.none()),
    ),
    max_size=120,
)


@given(operations, st.lists(st.sampled_from(KEYS), max_size=8))
def test_match_equals_brute_force(steps: list[tuple[str, str, BlockKey | None]], prompt: list[BlockKey]) -> None:
    index = PrefixIndex()
    truth: dict[str, set[BlockKey]] = {}
    for what, node, key in steps:
        if key is None:
            index.clear(node) if what == "clear" else index.forget(node)
            truth.pop(node, None)
            continue
        index.apply(node, [BlockEvent(what == "store", key)])
        held = truth.setdefault(node, set())
        held.add(key) if what == "store" else held.discard(key)
    runs = {}
    for node, held in truth.items():
        run = next((i for i, key in enumerate(prompt) if key not in held), len(prompt))
        if run:
            runs[node] = run
    assert index.match(index_keys(prompt)) == runs
    assert {node: index.num_blocks(node) for node in truth} == {node: len(held) for node, held in truth.items()}
    assert len(index) == len(set().union(*truth.values()) if truth else set())


def test_a_full_index_drops_new_entries_and_recovers() -> None:
    index = PrefixIndex(max_entries=2)
    index.apply("a", [BlockEvent(True, key) for key in KEYS])
    assert index.num_blocks("a") == 2
    assert index.dropped == len(KEYS) - 2
    index.clear("a")
    index.apply("b", [BlockEvent(True, KEYS[0])])
    assert index.match(index_keys(KEYS)) == {"b": 1}


def test_nothing_matches_an_empty_prompt() -> None:
    index = PrefixIndex()
    index.apply("a", [BlockEvent(True, KEYS[0])])
    assert index.match([]) == {}
