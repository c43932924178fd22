"""The waiting room: bands before fairness before deadlines, and nobody is lost in it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from conductor.fairness import Band, Waiting, WaitingRoom


def waiting(
    item: str, tenant: str = "a", band: Band = Band.NORMAL, cost: float = 1.0, deadline: float = 10.0
) -> Waiting[str]:
    return Waiting(item, tenant, band, cost, deadline, since=0.0)


def order(room: WaitingRoom[str], is_idle: bool = True) -> list[str]:
    taken = []
    while (found := room.pop(is_idle)) is not None:
        taken.append(found.item)
    return taken


def test_bands_then_fairness_then_deadlines() -> None:
    room = WaitingRoom[str](10)
    room.push(waiting("batch", band=Band.BATCH, deadline=1.0))
    for number in range(3):
        room.push(waiting(f"a{number}", deadline=5.0 - number))
    room.push(waiting("b0", tenant="b", deadline=9.0))
    room.push(waiting("urgent", band=Band.URGENT))
    assert order(room) == ["urgent", "a2", "b0", "a1", "a0", "batch"]


def test_batch_work_takes_idle_capacity_only() -> None:
    room = WaitingRoom[str](10)
    room.push(waiting("batch", band=Band.BATCH))
    assert room.pop(is_idle=False) is None
    assert order(room) == ["batch"]


def test_a_heavy_tenant_gets_its_share_and_no_more() -> None:
    room = WaitingRoom[str](1000, weights={"big": 3.0})
    for number in range(200):
        room.push(waiting(f"{number}", "big", cost=10.0))
        room.push(waiting(f"{number}", "small", cost=10.0))
        room.push(waiting(f"{number}", "costly", cost=100.0))
    served: Counter[str] = Counter()
    for _ in range(150):
        found = room.pop(is_idle=False)
        assert found is not None
        served[found.tenant] += int(found.cost)
    assert 2.5 < served["big"] / served["small"] < 3.5
    assert 0.7 < served["costly"] / served["small"] < 1.4


def test_who_was_away_has_saved_up_no_turns() -> None:
    room = WaitingRoom[str](100)
    for number in range(20):
        room.push(waiting(f"a{number}", "a"))
        assert room.pop(is_idle=False)
    for number in range(10):
        room.push(waiting(f"a{number}", "a"))
        room.push(waiting(f"b{number}", "b"))
    first = [found.tenant for _ in range(6) if (found := room.pop(is_idle=False))]
    assert Counter(first) == {"a": 3, "b": 3}


def test_a_full_room_refuses_or_drops_batch_work() -> None:
    room = WaitingRoom[str](2)
    assert room.push(waiting("batch", band=Band.BATCH)) is None
    assert room.push(waiting("a")) is None
    displaced = room.push(waiting("b"))
    assert displaced is not None
    assert displaced.item == "batch"
    refused = room.push(waiting("c"))
    assert refused is not None
    assert refused.item == "c"
    assert order(room) == ["a", "b"]


entries = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(Band), st.integers(1, 20), st.integers(0, 30)), max_size=40
)


@given(entries, st.lists(st.sampled_from(["pop", "idle", "expire", "remove"]), max_size=40))
def test_everybody_leaves_exactly_once(pushed: list[tuple[str, Band, int, int]], steps: list[str]) -> None:
    room = WaitingRoom[str](20)
    inside: set[str] = set()
    for number, (tenant, band, cost, deadline) in enumerate(pushed):
        item = f"{number}"
        displaced = room.push(waiting(item, tenant, band, cost, deadline))
        inside.add(item)
        if displaced is not None:
            inside.remove(displaced.item)
        assert len(room) == len(inside) <= 20
        for step in steps[number : number + 1]:
            if step == "expire":
                left = [found.item for found in room.expire(now=number)]
            elif step == "remove":
                target = next(iter(inside), "nobody")
                left = [item for item in [target] if room.remove(item)]
            else:
                found = room.pop(is_idle=step == "idle")
                left = [found.item] if found else []
            inside -= set(left)
            assert len(room) == len(inside)
    assert set(order(room)) == inside
    assert len(room) == 0
