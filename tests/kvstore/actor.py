"""A process for tests to talk to, freeze and kill: ``actor.py owner|store|writer {json}``, or ``main`` of a fork.

It prints one line of JSON when it is ready and then one for each line of JSON that it reads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
import time
from typing import Any

import numpy as np

from kvstore.checksum import checksum
from kvstore.node import StoreNode
from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.requests import WriteRange
from mooncake.config import load_config
from mooncake.types import SegmentAddress


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def own(block_bytes: int, num_blocks: int, host: str, transports: list[str]) -> None:
    """A segment and its server."""
    segment = Segment.create("owner", block_bytes, num_blocks)
    gone: list[str] = []
    server = SegmentServer(segment, "owner", tuple(transports), host, on_peer_gone=gone.append)
    server.start()
    say(dataclasses.asdict(server.address))
    for line in sys.stdin:
        match json.loads(line):
            case ["grant", blocks, epoch]:
                server.grant(blocks, epoch)
                say(True)
            case ["revoke", blocks]:
                server.revoke(blocks)
                say(True)
            case ["checksum", block]:
                say(checksum(segment.block(block)))
            case ["maps_memory", peer]:
                say(server.maps_memory(peer))
            case ["gone"]:
                say(gone)
            case ["stats"]:
                say(dataclasses.asdict(server.stats()))
    server.stop()
    segment.close()


def keep_store(block_bytes: int, settings: list[str]) -> None:
    """A store node without a conductor."""

    async def main() -> None:
        node = StoreNode(load_config(None, ["node.id=store", *settings]), block_bytes, join_cluster=False)
        await node.start()
        lines: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        awake = threading.Event()

        def read() -> None:
            for line in sys.stdin:
                if json.loads(line) == ["wake"]:
                    awake.set()
                    continue
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, '["stop"]')

        threading.Thread(target=read, daemon=True).start()
        say({"control": node.control_address, "segment": dataclasses.asdict(node.segment_address)})
        while True:
            match json.loads(await lines.get()):
                case ["counts"]:
                    node.store.check()
                    say(dataclasses.asdict(node.store.counts))
                case ["flip", slot, offset]:
                    node._segment.block(slot)[offset] ^= 1
                    say(True)
                case ["hang"]:  # the event loop, until it is woken
                    say(True)
                    awake.wait()
                    awake.clear()
                case ["stop"]:
                    break
        await node.stop()

    asyncio.run(main())


def write_for_ever(address: dict[str, Any], transports: list[str], mb_per_s: float, blocks: list[int]) -> None:
    """A writer that fills blocks slowly, over and over, once it is told the epoch."""
    engine = TransferEngine("writer", tuple(transports), max_mb_per_s=mb_per_s)
    target = SegmentAddress(**address)
    data = np.full(target.block_bytes, 0xAB, dtype=np.uint8)
    say(engine.writer_id)
    [epoch] = json.loads(sys.stdin.readline())
    engine.write(target, [WriteRange(blocks[0], 0, data[:1], epoch)], time.monotonic() + 10)
    say("writing")
    while True:
        engine.write(target, [WriteRange(block, 0, data, epoch) for block in blocks], time.monotonic() + 60)


def main() -> None:
    {"owner": own, "store": keep_store, "writer": write_for_ever}[sys.argv[1]](**json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
