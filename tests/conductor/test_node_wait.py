"""How long requests wait for a role that has lost its last node."""

import asyncio
import math

from conductor.dispatch.node_wait import NodeWait


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_the_wait_counts_from_the_loss_of_the_node_not_from_the_request() -> None:
    clock = Clock()
    node_wait = NodeWait(30.0, clock)
    node_wait.nodes_changed(is_role_missing=False)
    assert node_wait.give_up_at() == 130.0, "a loss noticed only now"
    clock.now = 150.0
    node_wait.nodes_changed(is_role_missing=True)
    clock.now = 170.0
    node_wait.nodes_changed(is_role_missing=True)  # something else about the nodes
    assert node_wait.give_up_at() == 180.0
    clock.now = 190.0
    assert not await node_wait.change(node_wait.give_up_at()), "later requests are refused at once"
    node_wait.nodes_changed(is_role_missing=False)
    assert node_wait.give_up_at() == 220.0


async def test_while_the_last_node_drains_requests_keep_waiting() -> None:
    clock = Clock()
    node_wait = NodeWait(30.0, clock)
    node_wait.nodes_changed(is_role_missing=False, is_role_draining=True)
    assert node_wait.give_up_at() == math.inf
    clock.now = 150.0
    node_wait.nodes_changed(is_role_missing=True, is_role_draining=True)
    assert node_wait.give_up_at() == 180.0, "another role is"
    node_wait.nodes_changed(is_role_missing=False)
    assert node_wait.give_up_at() == 180.0


async def test_requests_wait_for_nodes_when_a_conductor_starts() -> None:
    clock = Clock()
    node_wait = NodeWait(30.0, clock)
    clock.now = 110.0
    assert node_wait.give_up_at() == 130.0
    waiting = [asyncio.create_task(node_wait.change(node_wait.give_up_at())) for _ in range(3)]
    await asyncio.sleep(0)
    node_wait.nodes_changed(is_role_missing=True)
    assert await asyncio.gather(*waiting) == [True] * 3, "whoever waits looks again on any change"
