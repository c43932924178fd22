"""The fair queue: bands before fair shares before deadlines, and no request is lost."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from conductor.admission.fair_queue import Band, Entry, FairQueue


def entry(
    item: str, tenant: str = "a", band: Band = Band.NORMAL, cost: float = 1.0, deadline: float = 10.0
) -> Entry[str]:
    return Entry(item, tenant, band, cost, deadline)


def order(queue: FairQueue[str], is_idle: bool = True) -> list[str]:
    taken = []
    while (found := queue.pop(is_idle)) is not None:
        taken.append(found.item)
    return taken


def test_bands_then_fairness_then_deadlines() -> None:
    queue = FairQueue[str](10)
    queue.push(entry("batch", band=Band.BATCH, deadline=1.0))
    for number in range(3):
        queue.push(entry(f"a{number}", deadline=5.0 - number))
    queue.push(entry("b0", tenant="b", deadline=9.0))
    queue.push(entry("urgent", band=Band.URGENT))
    assert order(queue) == ["urgent", "a2", "b0", "a1", "a0", "batch"]


def test_batch_work_takes_idle_capacity_only() -> None:
    queue = FairQueue[str](10)
    queue.push(entry("batch", band=Band.BATCH))
    assert queue.pop(is_idle=False) is None
    assert order(queue) == ["batch"]


def test_a_heavy_tenant_gets_its_share_and_no_more() -> None:
    queue = FairQueue[str](1000, weights={"big": 3.0})
    for number in range(200):
        queue.push(entry(f"{number}", "big", cost=10.0))
        queue.push(entry(f"{number}", "small", cost=10.0))
        queue.push(entry(f"{number}", "costly", cost=100.0))
    served: Counter[str] = Counter()
    for _ in range(150):
        found = queue.pop(is_idle=False)
        assert found is not None
        served[found.tenant] += int(found.cost)
    assert 2.5 < served["big"] / served["small"] < 3.5
    assert 0.7 < served["costly"] / served["small"] < 1.4


def test_an_absent_tenant_saves_up_no_credit() -> None:
    queue = FairQueue[str](100)
    for number in range(20):
        queue.push(entry(f"a{number}", "a"))
        assert queue.pop(is_idle=False)
    for number in range(10):
        queue.push(entry(f"a{number}", "a"))
        queue.push(entry(f"b{number}", "b"))
    first = [found.tenant for _ in range(6) if (found := queue.pop(is_idle=False))]
    assert Counter(first) == {"a": 3, "b": 3}


def test_a_full_queue_refuses_or_drops_batch_work() -> None:
    queue = FairQueue[str](2)
    assert queue.push(entry("batch", band=Band.BATCH)) is None
    assert queue.push(entry("a")) is None
    displaced = queue.push(entry("b"))
    assert displaced is not None
    assert displaced.item == "batch"
    refused = queue.push(entry("c"))
    assert refused is not None
    assert refused.item == "c"
    assert order(queue) == ["a", "b"]


entries = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(Band), st.integers(1, 20), st.integers(0, 30)), max_size=40
)


@given(entries, st.lists(st.sampled_from(["pop", "idle", "remove"]), max_size=40))
def test_every_request_leaves_exactly_once(pushed: list[tuple[str, Band, int, int]], steps: list[str]) -> None:
    queue = FairQueue[str](20)
    inside: set[str] = set()
    for number, (tenant, band, cost, deadline) in enumerate(pushed):
        item = f"{number}"
        displaced = queue.push(entry(item, tenant, band, cost, deadline))
        inside.add(item)
        if displaced is not None:
            inside.remove(displaced.item)
        assert len(queue) == len(inside) <= 20
        for step in steps[number : number + 1]:
            if step == "remove":
                target = next(iter(inside), "nobody")
                left = [item for item in [target] if queue.remove(item)]
            else:
                found = queue.pop(is_idle=step == "idle")
                left = [found.item] if found else []
            inside -= set(left)
            assert len(queue) == len(inside)
    assert set(order(queue)) == inside
    assert len(queue) == 0
