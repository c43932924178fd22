"""Which adapters nodes should have and requests may name: decided without nodes, files or time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_lora import write_adapter
from tiny_model import tiny_model

from conductor.control.adapter_loader import AdapterLoader
from conductor.control.adapters import AdapterCatalogue, missing_nodes
from conductor.registry import Node, NodeInfo, NodeState, Registry
from mooncake.adapter_loads import AdapterLoad, load_from_wire, load_to_wire
from mooncake.adapters import Adapter, open_adapter
from mooncake.errors import DeadlineExceeded, InvalidRequest, NotFound
from mooncake.types import Role


def adapter(name: str, digest: str = "") -> Adapter:
    return Adapter(name, Path(f"/adapters/{name}"), digest or f"digest of {name}", 8.0, False)


def loaded(catalogue: AdapterCatalogue, what: Adapter, in_place: bool = False) -> AdapterLoad:
    load = catalogue.begin(what, in_place, 100)
    catalogue.serve(load)
    return load


def register(registry: Registry, role: Role, incarnation: int) -> None:
    info = NodeInfo(f"{role}-0", role, incarnation, f"here:{incarnation}", kv_fingerprint="kv", block_tokens=64)
    registry.register(info, 0.0)


async def no_change(until: float) -> bool:
    return False


def digests(catalogue: AdapterCatalogue) -> list[str]:
    return [load.adapter.digest for load in catalogue.wanted()]


def test_requests_may_name_an_adapter_once_it_is_served_and_until_it_is_unloaded() -> None:
    catalogue = AdapterCatalogue(["model"], 2)
    served = catalogue.served
    load = catalogue.begin(adapter("a"), False, 100)
    assert not served and digests(catalogue) == ["digest of a"]
    assert not catalogue.may_be_used("digest of a"), "a configured one of these weights is on nodes that do not load it"
    with pytest.raises(InvalidRequest, match="being loaded"):
        catalogue.begin(adapter("a"), True, 100)
    with pytest.raises(NotFound):
        catalogue.unload("a")
    catalogue.serve(load)
    catalogue.give_up(load)  # too late
    assert catalogue.may_be_used("digest of a")
    assert served == {"a": adapter("a")} and catalogue.loaded() == [load]
    catalogue.unload("a")
    assert not served and not catalogue.loaded()
    catalogue.drop_unused(lambda digest: True)
    assert catalogue.may_be_used("digest of a"), "a request needs it"
    catalogue.drop_unused(lambda digest: False)
    assert not catalogue.wanted()


def test_a_load_that_is_given_up_leaves_what_was_before() -> None:
    catalogue = AdapterCatalogue([], 1)
    loaded(catalogue, adapter("a"))
    with pytest.raises(InvalidRequest, match="already been loaded"):
        catalogue.begin(adapter("a", "other"), False, 100)
    load = catalogue.begin(adapter("a", "other"), True, 100)
    assert catalogue.served["a"].digest == "digest of a"
    catalogue.give_up(load)
    assert digests(catalogue) == ["digest of a"]


def test_one_that_is_replaced_stays_on_nodes_while_it_is_used() -> None:
    catalogue = AdapterCatalogue([], 1)
    loaded(catalogue, adapter("a", "old"))
    loaded(catalogue, adapter("a", "new"), in_place=True)
    assert catalogue.served["a"].digest == "new" and digests(catalogue) == ["old", "new"]
    catalogue.drop_unused(lambda digest: digest == "old")
    assert digests(catalogue) == ["old", "new"]
    catalogue.drop_unused(lambda digest: False)
    assert digests(catalogue) == ["new"], "what is served is not dropped for want of requests"


def test_one_that_is_replaced_by_equal_weights_ends_at_once() -> None:
    """The same requests use both, so under steady traffic none would ever end."""
    catalogue = AdapterCatalogue([], 1)
    loaded(catalogue, adapter("a"))
    again = loaded(catalogue, adapter("a"), in_place=True)
    catalogue.drop_unused(lambda digest: True)
    assert catalogue.wanted() == [again]
    catalogue.unload("a")
    catalogue.drop_unused(lambda digest: True)
    assert catalogue.wanted() == [again], "a request needs it"


def test_names_and_room_are_checked() -> None:
    with pytest.raises(InvalidRequest, match="max_loaded_adapters is 0"):
        AdapterCatalogue([]).check("a", False)
    catalogue = AdapterCatalogue(["model", "configured"], 2)
    for name in ("model", "configured"):
        with pytest.raises(InvalidRequest, match="is taken"):
            catalogue.check(name, True)
        with pytest.raises(InvalidRequest, match="stays"):
            catalogue.unload(name)
    first = loaded(catalogue, adapter("a"))
    second = catalogue.begin(adapter("b"), False, 100)
    assert second.number > first.number
    with pytest.raises(InvalidRequest, match="2 adapters are loaded, the most"):
        catalogue.check("c", False)
    catalogue.check("a", True)
    catalogue.unload("a")
    catalogue.check("c", False)


def served(what: Adapter, number: int, error: str = "") -> AdapterLoad:
    return AdapterLoad(what, number, error, is_served=True)


def test_a_later_conductor_adopts_the_latest_of_each_name_and_nothing_that_it_ended() -> None:
    catalogue = AdapterCatalogue(["model"], 1)
    old, new = served(adapter("a", "old"), 5), served(adapter("a", "new"), 7)
    failed = served(adapter("f"), 8, "no disk")
    catalogue.adopt([new, failed, served(adapter("model"), 9)])
    catalogue.adopt([old])
    catalogue.adopt([new])  # of another node
    assert catalogue.served == {"a": adapter("a", "new")} and catalogue.wanted() == [new]
    newest = served(adapter("a", "newest"), 11)
    catalogue.adopt([newest, served(adapter("b"), 6)])
    assert set(catalogue.served) == {"a", "b"}, "more than may be loaded, but loaded"
    assert catalogue.served["a"].digest == "newest"
    catalogue.unload("b")
    catalogue.drop_unused(lambda digest: False)
    catalogue.adopt([served(adapter("b"), 6), new])  # a node that was away comes back
    assert set(catalogue.served) == {"a"} and catalogue.wanted() == [newest]
    assert catalogue.begin(adapter("a"), True, 0).number > newest.number, "whatever the clock says"
    forbidding = AdapterCatalogue([], 0)
    forbidding.adopt([new])
    assert not forbidding.wanted()


@pytest.mark.parametrize("the_end_is_told_first", [True, False])
def test_what_an_earlier_conductor_unloaded_is_not_served_again(the_end_is_told_first: bool) -> None:
    earlier, catalogue = AdapterCatalogue([], 2), AdapterCatalogue([], 2)
    loaded(earlier, adapter("a"))
    before = earlier.wanted()
    earlier.unload("a")
    after = earlier.wanted()  # a request still uses it
    for told in (after, before) if the_end_is_told_first else (before, after):
        catalogue.adopt([load_from_wire(load_to_wire(load)) for load in told])
    assert not catalogue.served and not catalogue.unfinished()
    catalogue.drop_unused(lambda digest: False)
    assert not catalogue.wanted()


@pytest.mark.parametrize("is_served", [True, False])
def test_what_callers_loaded_here_stays_though_an_earlier_conductor_had_larger_numbers(is_served: bool) -> None:
    """Its clock was ahead of this one's."""
    before = replace(served(adapter("a", "before"), 1 << 50), is_served=is_served)
    catalogue = AdapterCatalogue([], 2)
    catalogue.serve(catalogue.begin(adapter("a", "now"), False, 100))
    catalogue.adopt([before])  # of a node that was away
    assert catalogue.served["a"].digest == "now" and not catalogue.unfinished()
    assert digests(catalogue) == ["now"]


def test_what_callers_unloaded_here_stays_away_though_a_node_has_an_older_load_of_it() -> None:
    catalogue = AdapterCatalogue([], 2)
    catalogue.adopt([served(adapter("a", "new"), 7)])
    catalogue.unload("a")
    catalogue.adopt([served(adapter("a", "old"), 5), AdapterLoad(adapter("a", "newer"), 9)])  # of one that was away
    assert not catalogue.served and not catalogue.unfinished()
    catalogue.serve(catalogue.begin(adapter("a", "again"), False, 100))
    assert catalogue.served["a"].digest == "again"


def test_nodes_are_told_which_loads_are_served() -> None:
    catalogue = AdapterCatalogue([], 1)
    loaded(catalogue, adapter("a", "old"))
    catalogue.begin(adapter("a", "new"), True, 100)
    assert [(load.adapter.digest, load.is_served) for load in catalogue.wanted()] == [("old", True), ("new", False)]


@pytest.mark.parametrize("new_is_told_first", [True, False])
def test_a_load_that_an_earlier_conductor_began_leaves_what_was_served_until_it_is_finished(
    new_is_told_first: bool,
) -> None:
    old, new = served(adapter("a", "old"), 5), AdapterLoad(adapter("a", "new"), 7)
    for is_finished in (True, False):
        catalogue = AdapterCatalogue([], 1)
        catalogue.adopt([new, old] if new_is_told_first else [old, new])
        catalogue.adopt([old])  # of the node that does not have it yet
        assert catalogue.served["a"].digest == "old" and catalogue.unfinished() == [new]
        assert {load.number for load in catalogue.wanted()} == {5, 7}, "nodes are to load it"
        if is_finished:
            catalogue.serve(new)
        else:
            catalogue.give_up(new)
        assert catalogue.served["a"].digest == ("new" if is_finished else "old")
        catalogue.drop_unused(lambda digest: False)
        assert [load.number for load in catalogue.wanted()] == [7 if is_finished else 5]
        assert not catalogue.unfinished()


def test_a_load_is_finished_if_one_node_knows_that_it_was_served_and_given_up_for_a_later_one() -> None:
    unfinished = AdapterLoad(adapter("a", "new"), 7)
    catalogue = AdapterCatalogue([], 1)
    catalogue.adopt([unfinished])  # told by a node that died before it heard more
    catalogue.adopt([served(adapter("a", "new"), 7)])
    assert catalogue.served["a"].digest == "new" and not catalogue.unfinished()
    catalogue = AdapterCatalogue([], 1)
    catalogue.adopt([unfinished])
    catalogue.give_up(unfinished)  # some node could not load it, as before
    assert not catalogue.wanted()
    catalogue.adopt([served(adapter("a", "new"), 7)])
    assert catalogue.served["a"].digest == "new"
    catalogue = AdapterCatalogue([], 1)
    catalogue.adopt([unfinished])
    latest = loaded(catalogue, adapter("a", "latest"))  # someone loads it again, without waiting
    assert catalogue.wanted() == [latest]


def test_a_load_is_done_when_no_node_that_stays_is_without_it() -> None:
    load = AdapterLoad(adapter("a"), 5)

    def node(name: str, role: Role, *adapters: AdapterLoad, state: NodeState = NodeState.LIVE) -> Node:
        return Node(NodeInfo(name, role, 1, "here"), state, 0.0, adapters=adapters)

    before = AdapterLoad(load.adapter, 4)
    nodes = [
        node("p0", Role.PREFILL, load),
        node("p1", Role.PREFILL, before),
        node("d0", Role.DECODE, state=NodeState.SUSPECT),
        node("d1", Role.DECODE, state=NodeState.DRAINING),
        node("s0", Role.STORE),
    ]
    assert missing_nodes(load, nodes) == ["p1", "d0"]
    assert missing_nodes(load, nodes[:1]) == []
    with pytest.raises(InvalidRequest, match="decode node d2: no disk"):
        missing_nodes(load, [*nodes, node("d2", Role.DECODE, replace(load, error="no disk"))])


def test_loads_travel_whole() -> None:
    for is_served in (True, False):
        load = AdapterLoad(Adapter("a", Path("/a b"), "d", 8.5, True, (3, 4)), 1 << 62, "why", is_served, not is_served)
        again = load_from_wire(load_to_wire(load))
        assert again == load and (again.is_served, again.is_ended) == (is_served, not is_served)


async def test_a_load_ends_in_time_and_changes_nothing_then(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", tiny_model("llama"))
    registry, catalogue = Registry("kv", 64, 1.0, 5.0), AdapterCatalogue([], 1)
    for incarnation, role in enumerate((Role.PREFILL, Role.DECODE), 1):
        register(registry, role, incarnation)
    asked_until: list[float] = []

    async def nodes_change(until: float) -> bool:
        """The prefill node has it at once, the decode node never."""
        [load] = catalogue.wanted()
        registry.set_adapters("prefill-0", 1, [load])
        asked_until.append(until)
        return len(asked_until) < 3

    loader = AdapterLoader(catalogue, registry, lambda: (), nodes_change, 30.0, lambda: 100.0)
    with pytest.raises(DeadlineExceeded, match=r"within 30 s: it is missing on decode-0$"):
        await loader.load("a", str(tmp_path / "a"))
    assert asked_until == [130.0] * 3 and not catalogue.wanted() and not catalogue.served
    with pytest.raises(NotFound, match=r"there is no adapter_config\.json"):
        await loader.load("a", str(tmp_path))
    with pytest.raises(InvalidRequest, match="256 printable"):
        await loader.load("a\n", str(tmp_path / "a"))
    assert registry.lacking("other") == {1, 2}
    digest = open_adapter("a", str(tmp_path / "a")).digest
    assert registry.lacking(digest) == {2}


async def test_what_an_earlier_conductor_began_is_served_when_every_node_has_it_or_given_up_when_one_cannot() -> None:
    old, new = served(adapter("a", "old"), 5), AdapterLoad(adapter("a", "new"), 7)
    for error in ("", "no disk"):
        registry, catalogue = Registry("kv", 64, 1.0, 5.0), AdapterCatalogue([], 1)
        missing = [Role.DECODE]
        loader = AdapterLoader(catalogue, registry, lambda: missing, no_change, 30.0, lambda: 100.0)  # noqa: B023
        register(registry, Role.PREFILL, 1)
        registry.set_adapters("prefill-0", 1, [old, new])
        catalogue.adopt([old, new])
        loader.finish()
        assert catalogue.unfinished() == [new], "no decode node is there to say whether it has it"
        missing.clear()
        register(registry, Role.DECODE, 2)
        registry.set_adapters("decode-0", 2, [old])
        catalogue.adopt([old])
        loader.finish()
        assert catalogue.unfinished() == [new] and catalogue.served["a"].digest == "old"
        registry.set_adapters("decode-0", 2, [old, replace(new, error=error)])
        loader.finish()
        assert not catalogue.unfinished() and catalogue.served["a"].digest == ("old" if error else "new")
