"""A process whose event loop stands still ends; one that is slow, or was stopped itself, does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

TIMEOUT_S = 2.0
LOOP = textwrap.dedent(
    f"""
    import asyncio, sys, time
    from mooncake.app.cluster.last_resort import LoopWatch

    async def main():
        LoopWatch(asyncio.get_running_loop(), {TIMEOUT_S})
        await asyncio.sleep(0.1)
        print("on", flush=True)
        for seconds in map(float, sys.argv[1:]):
            time.sleep(seconds)
            await asyncio.sleep(0.1)

    asyncio.run(main())
    print("off", flush=True)
    """
)


def run(*passes: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOOP, *map(str, passes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_loop_that_stands_still_ends_the_process_and_passes_that_end_may_take_long_together() -> None:
    with run(30) as still, run(*[0.4 * TIMEOUT_S] * 5) as slow:
        out, err = still.communicate(timeout=20)
        assert (still.returncode, out) == (1, "on\n")
        assert " in main\n" in err, "where it stands"
        assert err.endswith(f"\nthe event loop has not made a pass for {TIMEOUT_S:g} s; ending the process\n")
        assert slow.communicate(timeout=20)[0] == "on\noff\n"


def test_the_time_in_which_the_process_was_stopped_does_not_count() -> None:
    with run(0.4 * TIMEOUT_S) as process:
        assert process.stdout is not None and process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * TIMEOUT_S)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=20)[0] == "off\n"
