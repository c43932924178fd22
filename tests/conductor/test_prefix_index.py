"""The prefix index compared with the simplest one, a set of keys per node; the assumption of bisection; and the C++
table compared with the Python one."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.prefixes.index import PrefixIndex
from conductor.prefixes.table import INDEX_KEY_BYTES, NUM_SHARDS, PrefixTable
from conductor.prefixes.table_native import new_table
from mooncake.types import BlockEvent, BlockKey, Tier

PrefixIndex()  # builds the library now: hypothesis has a time limit

NODES = tuple(f"n{i}" for i in range(70))  # more than one machine word of bits
KEYS = tuple(BlockKey(bytes([i]) * 32) for i in range(6))


def index_keys(keys: Iterable[BlockKey]) -> list[bytes]:
    """Truncated as the table stores them, and as a directory keeps them."""
    return [key[:INDEX_KEY_BYTES] for key in keys]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from(NODES), st.sampled_from(KEYS)),
        st.tuples(st.just("remove"), st.sampled_from(NODES), st.sampled_from(KEYS)),
        st.tuples(st.sampled_from(["clear", "forget"]), st.sampled_from(NODES), st.none()),
    ),
    max_size=120,
)


@given(operations, st.lists(st.sampled_from(KEYS), max_size=8), st.booleans())
def test_a_run_begins_and_ends_with_blocks_that_the_node_holds(
    steps: list[tuple[str, str, BlockKey | None]], prompt: list[BlockKey], native: bool
) -> None:
    """Against the plainest index there is, whatever the caches say, holes and all."""
    index, truth = PrefixIndex(native=native), dict[str, set[BlockKey]]()
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


def test_a_snapshot_replaces_everything_the_node_held() -> None:
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


@pytest.mark.parametrize("native", [True, False])
def test_a_full_index_drops_new_entries_and_recovers(native: bool) -> None:
    index = PrefixIndex(max_blocks=2, native=native)
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


def test_the_table_in_cpp_equals_its_python_reference() -> None:
    """Caches of two tiers store chains, drop what they like, leave and come back, in an index that is often full."""
    rng = np.random.default_rng(5)
    chains = [[BlockKey(rng.bytes(32)) for _ in range(30)] for _ in range(40)]
    shared = chains[0][:12]
    chains = [shared + chain[12:] if number % 3 else chain for number, chain in enumerate(chains)]
    indices = [PrefixIndex(600, native) for native in (True, False)]
    nodes = [f"n{at}" for at in range(150)]
    for index in indices:
        for at, node in enumerate(nodes):
            index.join(node, is_tiered=at % 3 == 0)
    for _ in range(1500):
        node, chain = nodes[rng.integers(len(nodes))], chains[rng.integers(len(chains))]
        what, tier = rng.random(), Tier.SSD if rng.random() < 0.3 else Tier.DRAM
        first, last = sorted(rng.integers(0, len(chain) + 1, 2)) if rng.random() < 0.3 else (0, len(chain))
        for index in indices:
            if what < 0.6:
                index.apply(node, [BlockEvent(True, key) for key in chain[first:last]], tier)
            elif what < 0.7:
                index.load(node, index_keys(chain[first:last]), tier)
            elif what < 0.95:
                index.apply(node, (BlockEvent(False, key) for key in reversed(chain[first:])), tier)
            else:
                index.clear(node) if what < 0.98 else index.forget(node)
        prompt = chains[rng.integers(len(chains))][: rng.integers(0, 31)]
        compiled, defined = (index.runs(prompt).tolist() for index in indices)
        assert compiled == defined
        assert indices[0].longest == indices[1].longest
        assert len(indices[0]) == len(indices[1])
        assert [indices[0].num_blocks(node) for node in nodes] == [indices[1].num_blocks(node) for node in nodes]
    compiled, defined = (
        [sorted(itertools.chain.from_iterable(index.blocks_of(node))) for node in nodes] for index in indices
    )
    assert compiled == defined
    assert indices[0].dropped == indices[1].dropped > 0


@pytest.mark.skipif(isinstance(new_table(1), PrefixTable), reason="needs a C++ compiler")
def test_an_invalid_key_is_refused_and_changes_nothing() -> None:
    index = PrefixIndex()
    index.apply("a", [BlockEvent(True, key) for key in CHAINS[0]])
    with pytest.raises(ValueError, match="15 bytes"):
        index.runs([b"short"])
    with pytest.raises(TypeError):
        index.runs(["text"])  # type: ignore[list-item]
    assert index.match(CHAINS[0]) == {"a": 40}
