"""What is kept open to peers, and for how long."""

from mooncake.recent import Recent


def test_what_nobody_has_asked_for_lately_goes_when_something_new_comes() -> None:
    now, made, busy = 0.0, [], {"c"}

    def make(address: str) -> str:
        made.append(address)
        return address

    things = Recent(make, keep_s=10.0, may_go=lambda thing: thing not in busy, clock=lambda: now)
    for address in ("a", "b", "c", "a"):
        assert things.get(address) == address
    assert made == ["a", "b", "c"]

    now = 8.0
    things.get("a")
    now = 16.0
    assert len(things) == 3, "it is looked at when there is reason to"
    things.get("d")
    assert made == ["a", "b", "c", "d"]
    assert len(things) == 3
    things.get("a")
    things.get("c")
    assert made == ["a", "b", "c", "d"], "the one was asked for, the other is in use"
    things.get("b")
    assert made[-1] == "b"

    assert things.pop("b") == "b"
    assert things.pop("b") is None
    assert sorted(things.pop_all()) == ["a", "c", "d"]
    assert not things.pop_all()
