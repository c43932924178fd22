"""What is kept open to peers, and for how long."""

from mooncake.connection_cache import ConnectionCache


def test_what_nobody_has_asked_for_lately_goes_when_something_new_comes() -> None:
    now, made, busy = 0.0, [], {"c"}

    def make(address: str) -> str:
        made.append(address)
        return address

    connections = ConnectionCache(
        make, keep_s=10.0, may_go=lambda connection: connection not in busy, clock=lambda: now
    )
    for address in ("a", "b", "c", "a"):
        assert connections.get(address) == address
    assert made == ["a", "b", "c"]

    now = 8.0
    connections.get("a")
    now = 16.0
    assert len(connections) == 3, "it is looked at when there is reason to"
    connections.get("d")
    assert made == ["a", "b", "c", "d"]
    assert len(connections) == 3
    connections.get("a")
    connections.get("c")
    assert made == ["a", "b", "c", "d"], "the one was asked for, the other is in use"
    connections.get("b")
    assert made[-1] == "b"

    assert connections.pop("b") == "b"
    assert connections.pop("b") is None
    assert sorted(connections.pop_all()) == ["a", "c", "d"]
    assert not connections.pop_all()
