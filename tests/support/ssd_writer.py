"""A process that writes to an SSD tier until it is killed, and reports what is durable: ``ssd_writer.py DIRECTORY``.

For each seed that it reads it forks a writer and prints its process id. A writer reports what it is about to do (``?``)
and what has become durable (``!``): lines of ``sign key version``, version 0 for a drop.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np

from kvstore.checksum import range_checksums
from kvstore.eviction import make_policy
from kvstore.ssd.record import BlockHeader
from kvstore.ssd.tier import SsdTier
from mooncake.types import BlockKey

CAPACITY, SEGMENT, LARGEST, KEYS = 24 << 20, 2 << 20, 256 << 10, 40


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def content(number: int, version: int) -> memoryview:
    rng = np.random.default_rng((number, version))
    return memoryview(rng.bytes(int(rng.integers(1, LARGEST // 64)) * 64))


async def open_tier(directory: Path) -> SsdTier:
    policy = make_policy("lru", 1024)
    return await SsdTier.open(directory, CAPACITY, policy, LARGEST, segment_bytes=SEGMENT)


async def write_for_ever(directory: Path, seed: int) -> None:
    tier = await open_tier(directory)
    rng = np.random.default_rng(seed)
    version = seed * 1_000_000
    tell(f"seed {seed}")

    async def one(number: int, version: int) -> None:
        if key(number) in tier:
            tell(f"? {number} 0")
            tier.drop([key(number)])
            await tier.committed()
            tell(f"! {number} 0")
        else:
            tell(f"? {number} {version}")
            data = content(number, version)
            header = BlockHeader(key(number), b"", "", data.nbytes, range_checksums(data, 4))
            assert await tier.save(header, data)
            tell(f"! {number} {version}")

    while True:
        picks = rng.choice(KEYS, size=int(rng.integers(1, 9)), replace=False)
        version += 1
        await asyncio.gather(*(one(int(number), version) for number in picks))


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main(directory: Path) -> None:
    for line in sys.stdin:
        child = os.fork()  # safe: no threads have been started
        if child == 0:
            asyncio.run(write_for_ever(directory, int(line)))
        tell(f"pid {child}")
        os.waitpid(child, 0)
        tell("dead")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
