"""A prefill node with bad memory: one bit of everything that it sends is wrong. Everything else is the real node.

python bad_prefill_node.py --config FILE --set node.id=NAME
"""

from __future__ import annotations

from collections.abc import Sequence

import prefill_node.node
from kvstore.transfer.engine import Priority, TransferEngine, WriteRange
from kvstore.transfer.requests import TransferReport
from mooncake.app.role_main import run_role
from mooncake.types import SegmentAddress


class BadMemory(TransferEngine):
    def write(
        self,
        address: SegmentAddress,
        ranges: Sequence[WriteRange],
        deadline: float,
        priority: Priority = Priority.NORMAL,
    ) -> TransferReport:
        return super().write(address, [_one_bit_wrong(one) for one in ranges], deadline, priority)


def _one_bit_wrong(one: WriteRange) -> WriteRange:
    data = bytearray(memoryview(one.data).cast("B"))
    data[len(data) // 2] ^= 1
    return one._replace(data=data)


if __name__ == "__main__":
    prefill_node.node.TransferEngine = BadMemory  # type: ignore[misc]
    run_role("prefill", prefill_node.node.PrefillNode)
