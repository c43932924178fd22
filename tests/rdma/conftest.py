"""Every test in this folder needs verbs, and skips with a reason where there are none.

On a machine without them ``tests/kvstore/test_rdma_machine.py`` runs this folder in a virtual machine that has some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.rdma.find import VerbsUnavailable
from kvstore.transfer.rdma.verbs import Device

BLOCK = 192 << 10
NUM = 16
EPOCH = 5


@pytest.fixture(scope="session", autouse=True)
def verbs() -> None:
    try:
        Device().close()
    except VerbsUnavailable as error:
        pytest.skip(f"no verbs here: {error}")


class Owner:
    """A segment, all of it granted to EPOCH, and its server in this process."""

    def __init__(self, transports: tuple[str, ...], block_bytes: int = BLOCK, num_blocks: int = NUM) -> None:
        self.segment = Segment.create("owner", block_bytes, num_blocks)
        self.gone: list[str] = []
        self.server = SegmentServer(self.segment, "owner", transports, on_peer_gone=self.gone.append)
        self.server.start()
        self.server.grant(range(num_blocks), EPOCH)
        self.address = self.server.address
        self.blocks = self.segment.array.reshape(num_blocks, block_bytes)

    def close(self) -> None:
        self.server.stop()
        del self.blocks
        self.segment.close()


@pytest.fixture
def own() -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def make(*transports: str, **size: int) -> Owner:
        owners.append(Owner(transports or ("rdma",), **size))
        return owners[-1]

    yield make
    for owner in owners:
        owner.close()


@pytest.fixture
def engine_over() -> Iterator[Callable[..., TransferEngine]]:
    engines: list[TransferEngine] = []

    def make(*transports: str, name: str = "tester") -> TransferEngine:
        engines.append(TransferEngine(name, transports or ("rdma",)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
