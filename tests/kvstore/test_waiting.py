"""Waiting for a thread that uses the caller's memory."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from kvstore.waiting import to_its_end


async def test_nobody_gets_the_memory_back_before_the_thread_has_ended() -> None:
    may_end, stops = threading.Event(), 0

    def stop() -> None:
        nonlocal stops
        stops += 1

    running = asyncio.get_running_loop().run_in_executor(None, may_end.wait, 30)
    task = asyncio.create_task(to_its_end(running, stop))
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done() and stops == 1
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running.done()


async def test_what_the_thread_gives_or_raises_comes_through() -> None:
    loop = asyncio.get_running_loop()
    assert await to_its_end(loop.run_in_executor(None, int, "7")) == 7
    with pytest.raises(ValueError, match="seven"):
        await to_its_end(loop.run_in_executor(None, int, "seven"))


async def test_an_error_after_a_cancellation_is_nobodys_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    stopped = threading.Event()

    def work() -> None:
        stopped.wait(30)
        raise BrokenPipeError

    running = asyncio.get_running_loop().run_in_executor(None, work)
    task = asyncio.create_task(to_its_end(running, stopped.set))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del running, task
    gc.collect()
    await asyncio.sleep(0.01)
    assert "never retrieved" not in caplog.text
