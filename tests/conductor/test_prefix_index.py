"""The prefix index against the plainest possible one, a set of keys a node; and what bisection rests on."""

from hypothesis import given
from hypothesis import strategies as st

from conductor.prefix_index import NUM_SHARDS, PrefixIndex, index_keys
from mooncake.types import BlockEvent, BlockKey, Tier

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
def test_a_run_begins_and_ends_with_blocks_that_the_node_holds(
    steps: list[tuple[str, str, BlockKey | None]], prompt: list[BlockKey]
) -> None:
    """Against the plainest index there is, whatever the caches say, holes and all."""
    index, truth = PrefixIndex(), dict[str, set[BlockKey]]()
    for what, node, key in steps:
        if key is None:
            index.clear(node) if what == "clear" else index.forget(node)
            truth.pop(node, None)
            continue
        index.apply(node, [BlockEvent(what == "store", key)])
        held = truth.setdefault(node, set())
        held.add(key) if what == "store" else held.discard(key)
    found = index.match(index_keys(prompt))
    for node, held in truth.items():
        run = found.get(node, 0)
        if prompt and prompt[0] in held:
            assert run >= 1
            assert prompt[run - 1] in held
            assert run == len(prompt) or prompt[run] not in held
        else:
            assert run == 0
    assert {node: index.num_blocks(node) for node in truth} == {node: len(held) for node, held in truth.items()}
    index.sweep(3 * NUM_SHARDS)
    assert len(index) == len(set().union(*truth.values()) if truth else set())


CHAINS = [[BlockKey(bytes([chain, block]) * 16) for block in range(40)] for chain in range(3)]
holdings = st.dictionaries(st.sampled_from(NODES), st.lists(st.integers(0, 40), min_size=3, max_size=3))


@given(holdings, st.integers(0, 2), st.integers(0, 40))
def test_runs_of_caches_that_drop_leaves_first_are_exact(held: dict[str, list[int]], chain: int, length: int) -> None:
    index = PrefixIndex()
    for node, runs in held.items():
        for keys, run in zip(CHAINS, runs, strict=True):
            index.apply(node, [BlockEvent(True, key) for key in keys])
            index.apply(node, [BlockEvent(False, key) for key in reversed(keys[run:])])
    found = index.match(CHAINS[chain][:length])
    assert found == {node: min(runs[chain], length) for node, runs in held.items() if min(runs[chain], length)}
    assert index.longest == max(found.values(), default=0)


def test_a_node_that_tells_all_anew_leaves_nothing_of_before() -> None:
    index = PrefixIndex()
    for round_number in range(30):
        keys = CHAINS[round_number % 3]
        index.apply("a", [BlockEvent(True, key) for key in keys])
        index.apply("b", [BlockEvent(True, CHAINS[0][0])])
        index.clear("a")
        assert index.match(keys).get("a") is None
        index.apply("a", [BlockEvent(True, keys[0])])
        assert index.match(keys)["a"] == 1
        index.clear("a")
        index.sweep(NUM_SHARDS)
    index.sweep(3 * NUM_SHARDS)
    assert len(index) == 1, "only b's block is left"
    assert len(index.runs(CHAINS[0])) < 20, "slots are used again"


def test_a_block_that_is_demoted_is_still_there_and_no_longer_in_dram() -> None:
    index = PrefixIndex()
    index.join("s", is_tiered=True)
    keys = CHAINS[0][:4]
    index.apply("s", [BlockEvent(True, key) for key in keys])
    index.apply("s", [BlockEvent(True, key) for key in keys[2:]], Tier.SSD)
    runs = index.runs(keys)
    assert (runs[index.slot("s")], runs[index.dram_slot("s")]) == (4, 2)
    index.apply("s", [BlockEvent(True, keys[2])])
    assert index.runs(keys)[index.dram_slot("s")] == 3, "promoted again"
    index.apply("s", [BlockEvent(False, key) for key in keys], Tier.SSD)
    assert not index.runs(keys).any()
    assert (index.num_blocks("s"), len(index)) == (0, 0)


def test_a_full_index_drops_new_entries_and_recovers() -> None:
    index = PrefixIndex(max_blocks=2)
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
