"""One timer for many waits: it ends the one that it meets, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from waiting import until

from conductor.ingress.repeated_wait import RepeatedWait

LONG_S = 600.0


async def counting(upto: int) -> AsyncGenerator[int, None]:
    """And then for ever nothing."""
    for number in range(upto):
        yield number
    await asyncio.Event().wait()


async def test_what_comes_in_time_is_passed_on_and_the_rest_is_not_waited_for() -> None:
    wait, items = RepeatedWait(0.05), counting(2)
    assert [await wait.next(items), await wait.next(items)] == [0, 1]
    with pytest.raises(TimeoutError):
        await wait.next(items)
    with pytest.raises(TimeoutError):
        await wait.next(counting(1))
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_there_is_no_time_from_the_start() -> None:
    with pytest.raises(TimeoutError):
        await RepeatedWait(0.0).next(counting(1))


async def test_it_may_be_stopped_during_a_wait_and_between_two() -> None:
    wait, items = RepeatedWait(LONG_S), counting(1)
    assert await wait.next(items) == 0
    waiting = asyncio.create_task(wait.next(items))
    await asyncio.sleep(0)
    wait.stop()
    wait.stop()
    with pytest.raises(TimeoutError):
        await waiting

    between = RepeatedWait(LONG_S)
    between.stop()
    with pytest.raises(TimeoutError):
        await between.next(counting(1))
    wait.close()
    between.close()


async def test_whoever_is_cancelled_by_others_stays_cancelled() -> None:
    wait = RepeatedWait(LONG_S)
    waiting = asyncio.create_task(wait.next(counting(0)))
    await asyncio.sleep(0)
    waiting.cancel()
    wait.stop()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    wait.close()


async def test_its_end_between_two_waits_interrupts_nothing_else() -> None:
    wait, items = RepeatedWait(0.01), counting(2)
    assert await wait.next(items) == 0
    await until(wait.is_over)
    with pytest.raises(TimeoutError):
        await wait.next(items)


async def test_after_its_end_no_timer_is_left() -> None:
    wait = RepeatedWait(0.01)
    wait.close()
    await asyncio.sleep(0.03)  # the loop calls an earlier timer first
    assert await wait.next(counting(1)) == 0
