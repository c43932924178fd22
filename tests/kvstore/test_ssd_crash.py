"""kill -9 at random points: blocks reported durable are there with the right bytes, and dropped ones are not."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ssd_writer import content, key, open_tier

ROOT = Path(__file__).parents[2]
WRITER = ROOT / "tests" / "support" / "ssd_writer.py"


class Writer:
    """The process that forks writers, and its lines."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._heard = b""

    def live(self, seed: int, seconds: float) -> list[str]:
        """The output of one writer, killed ``seconds`` after its first line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n".encode())
        self.process.stdin.flush()
        lines, pid, kill_at = [], 0, float("inf")
        while True:
            wait_s = max(0.0, min(kill_at - time.monotonic(), 20.0))
            line = self._line(wait_s) if wait_s else None
            if line is None:
                assert pid and kill_at <= time.monotonic() + 1, "the writer said nothing"
                os.kill(pid, signal.SIGKILL)
                pid, kill_at = 0, time.monotonic() + 20.0
            elif line == "dead":
                return lines
            elif line.startswith("pid"):
                pid = int(line.split()[1])
            elif line.startswith("seed"):
                kill_at = time.monotonic() + seconds
            else:
                lines.append(line)

    def _line(self, wait_s: float) -> str | None:
        """None when there is no whole one in time."""
        assert self.process.stdout is not None
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self.process.stdout], [], [], wait_s)
            if not ready:
                return None
            self._heard += os.read(self.process.stdout.fileno(), 65536)
        line, self._heard = self._heard.split(b"\n", 1)
        return line.decode()

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


class Expected:
    """For each key, which versions may be found (0: none)."""

    def __init__(self) -> None:
        self.may_be: dict[int, set[int]] = {}

    def hear(self, lines: list[str]) -> None:
        for line in lines:
            sign, number, version = line.split()
            if sign == "!":
                self.may_be[int(number)] = {int(version)}
            else:
                self.may_be.setdefault(int(number), {0}).add(int(version))

    async def check(self, directory: Path) -> None:
        """What is there is what may be there. Settles what was open."""
        tier = await open_tier(directory)
        for number, versions in self.may_be.items():
            header = tier.get(key(number))
            if header is None:
                assert 0 in versions, f"block {number} was durable and is gone"
                self.may_be[number] = {0}
                continue
            data = bytearray(header.length)
            await tier.load(key(number), memoryview(data))
            found = [version for version in versions if version and data == content(number, version)]
            assert found, f"block {number} has bytes that it should not have"
            self.may_be[number] = set(found)
        tier.index.check()
        assert tier.counters["checksum_mismatches"] == tier.counters["ssd_evictions"] == 0
        await tier.close()


async def crash(directory: Path, lives: int) -> None:
    seed = random.SystemRandom().randrange(1 << 20)
    print(f"seed {seed}")
    rng = random.Random(seed)
    writer, expected = Writer(directory), Expected()
    said = 0
    try:
        for life in range(lives):
            lines = writer.live(seed + life, rng.choice([0.0, 0.01, 0.05, 0.15, 0.3]) * rng.random())
            said += len(lines)
            expected.hear(lines)
            await expected.check(directory)
    finally:
        writer.end()
    assert said > lives  # or nothing was tried


async def test_a_killed_writer_loses_nothing_that_was_durable(tmp_path: Path) -> None:
    await crash(tmp_path, 15)


@pytest.mark.slow
async def test_two_hundred_killed_writers_lose_nothing_that_was_durable(tmp_path: Path) -> None:
    await crash(tmp_path, 200)
