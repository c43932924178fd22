"""RDMA without a device: the bytes of the greeting, joining runs, and the error that says what is missing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.pointers import address_of
from kvstore.segment import Segment
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.owner.server import SegmentServer
from kvstore.transfer.rdma.find import VerbsUnavailable
from kvstore.transfer.rdma.memory import RegisteredMemory, merge
from kvstore.transfer.rdma.verbs import Device, Endpoint
from kvstore.transfer.requests import ReadRange
from mooncake.errors import ConfigError, NodeUnavailable

ENDPOINT = Endpoint(queue_pair=77, packet_number=(1 << 24) - 1, gid=bytes(range(16)), lid=3, mtu=5)


def test_an_endpoint_travels():
    assert Endpoint.unpack(ENDPOINT.pack()) == ENDPOINT


@given(st.binary(max_size=2 * Endpoint.SIZE))
def test_no_other_bytes_are_an_endpoint(data: bytes):
    if not data.startswith(b"RDMA"):
        with pytest.raises(ValueError, match="endpoint"):
            Endpoint.unpack(data)


@pytest.mark.parametrize(("start", "value"), [(4, 9), (5, 0), (5, 6), (15, 1)])
def test_a_spoilt_endpoint_is_refused(start: int, value: int):
    data = bytearray(ENDPOINT.pack())
    data[start] = value
    with pytest.raises(ValueError, match="endpoint"):
        Endpoint.unpack(bytes(data))


def test_runs_are_joined_where_both_sides_touch_under_the_same_keys():
    assert merge([(100, 1, 900, 2, 10), (110, 1, 910, 2, 5)]) == [(100, 1, 900, 2, 15)]
    for other in ((111, 1, 910, 2, 5), (110, 1, 911, 2, 5), (110, 9, 910, 2, 5), (110, 1, 910, 9, 5)):
        runs = [(100, 1, 900, 2, 10), other]
        assert merge(runs) == runs


@dataclass
class RegisteredPiece:
    address: int
    nbytes: int
    lkey: int = 7

    def close(self) -> None:
        pass


class AnyDevice:
    def register(self, address: int, nbytes: int, access: int) -> RegisteredPiece:
        return RegisteredPiece(address, nbytes)


def test_memory_that_no_thread_is_left_to_register_is_copied(
    caplog: pytest.LogCaptureFixture, eventually: Callable[..., None]
):
    """The node that wanted it did not start, and then could not close it."""
    memory, later = bytearray(100), bytearray(50)
    registered = RegisteredMemory(cast(Device, AnyDevice()))
    before = threading.stack_size(1 << 46)  # more than there is address space: no thread can be started
    try:
        registered.add(memoryview(memory))
    finally:
        threading.stack_size(before)
    assert "100 bytes that should be registered are copied" in caplog.text
    registered.add(memoryview(later))
    assert registered.find(address_of(memoryview(memory)), 100) is None
    eventually(lambda: registered.find(address_of(memoryview(later)), 50) is not None)
    registered.close()


def test_a_machine_without_verbs_says_so_in_one_line_and_goes_on(caplog: pytest.LogCaptureFixture):
    try:
        Device().close()
        pytest.skip("this machine has verbs")
    except VerbsUnavailable as error:
        why = str(error)
    assert why and "\n" not in why
    segment = Segment.create("owner", 4096, 2)
    with caplog.at_level(logging.WARNING):
        server = SegmentServer(segment, "owner", ("rdma", "tcp"))
        server.start()
        engine = TransferEngine("reader", ("rdma", "tcp"))
    assert [record.getMessage() for record in caplog.records] == [
        f"segment of owner: rdma is configured but not offered: {why}",
        f"reader: transport rdma cannot be used: {why}",
    ]
    assert not server.address.rdma
    assert engine.unavailable() == {"rdma": why}
    segment.array[:] = np.arange(2 * 4096, dtype=np.uint64).view(np.uint8)[: 2 * 4096]
    into = bytearray(4096)
    report = engine.read(server.address, [ReadRange(1, 0, into)], time.monotonic() + 10)
    assert report.transport == "tcp" and into == segment.block(1)
    engine.check_usable()
    only = TransferEngine("only", ("rdma",))
    with pytest.raises(ConfigError, match=r'none of transfer.transports can be used here \(rdma: .*: add "tcp"'):
        only.check_usable()
    with pytest.raises(NodeUnavailable):
        only.read(server.address, [ReadRange(1, 0, into)], time.monotonic() + 10)
    engine.close()
    only.close()
    server.stop()
    segment.close()
