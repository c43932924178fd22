"""How long requests wait for a role that has lost its last node."""

import asyncio
import math

from conductor.absence import Absence


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_the_wait_counts_from_the_loss_not_from_the_request() -> None:
    clock = Clock()
    absence = Absence(30.0, clock)
    absence.changed(is_anyone_missing=False)
    assert absence.until() == 130.0, "a loss that was noticed before anybody else"
    clock.now = 150.0
    absence.changed(is_anyone_missing=True)
    clock.now = 170.0
    absence.changed(is_anyone_missing=True)  # something else about the nodes
    assert absence.until() == 180.0
    clock.now = 190.0
    assert not await absence.change(absence.until()), "later requests are refused at once"
    absence.changed(is_anyone_missing=False)
    assert absence.until() == 220.0


async def test_a_node_that_is_leaving_is_not_missed_yet() -> None:
    clock = Clock()
    absence = Absence(30.0, clock)
    absence.changed(is_anyone_missing=False, is_anyone_leaving=True)
    assert absence.until() == math.inf
    clock.now = 150.0
    absence.changed(is_anyone_missing=True, is_anyone_leaving=True)
    assert absence.until() == 180.0, "another one is"
    absence.changed(is_anyone_missing=False)
    assert absence.until() == 180.0


async def test_nodes_are_waited_for_when_a_conductor_starts() -> None:
    clock = Clock()
    absence = Absence(30.0, clock)
    clock.now = 110.0
    assert absence.until() == 130.0
    waiting = [asyncio.create_task(absence.change(absence.until())) for _ in range(3)]
    await asyncio.sleep(0)
    absence.changed(is_anyone_missing=True)
    assert await asyncio.gather(*waiting) == [True] * 3, "whoever waits looks again on any change"
