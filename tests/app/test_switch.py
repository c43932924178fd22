"""Following a node that changes its role: every outcome is reported, and no wait is in vain."""

from __future__ import annotations

import pytest

from mooncake.app.switch import MISSING_S, UNTOLD_S, Switch
from mooncake.errors import NodeUnavailable
from mooncake.rpc import cluster_pb2 as pb


def node(state: str = "live", role: str = "prefill", incarnation: int = 1) -> pb.NodeStatus:
    return pb.NodeStatus(info=pb.NodeInfo(node_id="p0", role=role, incarnation=incarnation), state=state)


def switch() -> Switch:
    return Switch(node(), "decode")


def test_a_node_drains_and_comes_back_in_its_new_role() -> None:
    followed = switch()
    assert not followed.is_done(node(), 0)
    assert not followed.is_done(node("draining"), 1)
    assert not followed.is_done(node("draining"), 1 + 10 * UNTOLD_S)  # long answers may take long
    assert followed.is_done(node(role="decode", incarnation=2), 1000)


def test_a_node_that_does_not_come_back_is_gone() -> None:
    followed = switch()
    assert not followed.is_done(node("draining"), 0)
    assert not followed.is_done(None, 1)
    assert not followed.is_done(None, 0.9 + MISSING_S)
    with pytest.raises(NodeUnavailable, match="p0 ended before it could become a decode node"):
        followed.is_done(None, 1 + MISSING_S)


def test_a_node_that_a_conductor_had_forgotten_for_a_moment_is_followed_on() -> None:
    followed = switch()
    assert not followed.is_done(None, 0)
    assert not followed.is_done(node("draining"), 1)
    assert not followed.is_done(None, MISSING_S + 1)
    assert followed.is_done(node(role="decode", incarnation=2), MISSING_S + 2)


def test_a_restarted_node_is_no_longer_asked() -> None:
    followed = switch()
    assert not followed.is_done(node("draining"), 0)
    with pytest.raises(NodeUnavailable, match="was restarted as a prefill node; try again"):
        followed.is_done(node(incarnation=2), 1)


def test_a_node_that_gives_up_draining_keeps_its_role() -> None:
    followed = switch()
    assert not followed.is_done(node("draining"), 0)
    with pytest.raises(NodeUnavailable, match="did not drain in time and stays a prefill node"):
        followed.is_done(node(), 120)


def test_a_node_that_does_not_hear_is_not_waited_for() -> None:
    followed = switch()
    assert not followed.is_done(node("suspect"), 0)
    assert not followed.is_done(node(), UNTOLD_S - 1)
    with pytest.raises(NodeUnavailable, match="has not begun to drain"):
        followed.is_done(node(), UNTOLD_S)
