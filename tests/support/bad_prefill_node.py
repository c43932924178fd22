"""A prefill node with bad memory: one bit of everything it sends is wrong. The rest is the real node.

python bad_prefill_node.py --config FILE --set node.id=NAME
"""

from __future__ import annotations

from collections.abc import Sequence

import mooncake.engine_node
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.requests import Request, Transfer, WriteRange
from mooncake.app.cluster.role_main import run_role
from prefill_node.node import PrefillNode


class BadMemory(TransferEngine):
    def submit(self, requests: Sequence[Request]) -> list[Transfer]:
        return super().submit([_one_bit_wrong(request) for request in requests])


def _one_bit_wrong(request: Request) -> Request:
    ranges = [_spoilt(one) if isinstance(one, WriteRange) else one for one in request.ranges]
    return request._replace(ranges=ranges)


def _spoilt(one: WriteRange) -> WriteRange:
    data = bytearray(memoryview(one.data).cast("B"))
    data[len(data) // 2] ^= 1
    return one._replace(data=data)


if __name__ == "__main__":
    mooncake.engine_node.TransferEngine = BadMemory  # type: ignore[misc]
    run_role("prefill", PrefillNode)
