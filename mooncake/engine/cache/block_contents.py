"""Which tokens the cached blocks hold, for sequences that part from what is cached in the middle of a block.

A key names a whole block, so by keys alone a sequence reuses whole blocks only. Here a block is found by its parent and
the tokens it begins with. Blocks with one parent are sorted by their tokens, so that the one which agrees longest with
given tokens is a neighbour of the place where these would stand. It knows neither the pool nor bytes of KV.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from mooncake.types import BlockKey, TokenIds

_TOKEN_BYTES = 4


class BlockContents:
    """Tokens of blocks, by their parents' keys."""

    def __init__(self) -> None:
        self._children: dict[bytes, list[tuple[bytes, BlockKey]]] = {}
        self._places: dict[BlockKey, tuple[bytes, bytes]] = {}  # parent, tokens

    def __len__(self) -> int:
        return len(self._places)

    def add(self, parent: bytes, tokens: TokenIds, key: BlockKey) -> None:
        """The block ``key`` follows ``parent`` and begins with ``tokens``. Idempotent."""
        if key not in self._places:
            data = _bytes_of(tokens)
            self._places[key] = parent, data
            insort(self._children.setdefault(parent, []), (data, key))

    def remove(self, key: BlockKey) -> None:
        """Idempotent."""
        place = self._places.pop(key, None)
        if place is not None:
            parent, data = place
            children = self._children[parent]
            del children[bisect_left(children, (data, key))]
            if not children:
                del self._children[parent]

    def longest(self, parent: bytes, tokens: TokenIds) -> tuple[BlockKey | None, int]:
        """The block after ``parent`` that agrees with most leading ``tokens``, and with how many."""
        best, most = None, 0
        if children := self._children.get(parent):
            data = _bytes_of(tokens)
            place = bisect_left(children, (data,))
            for held, key in children[max(place - 1, 0) : place + 1]:
                count = _num_equal(held, data) // _TOKEN_BYTES
                if count > most:
                    best, most = key, count
        return best, most


def _bytes_of(tokens: TokenIds) -> bytes:
    return np.ascontiguousarray(tokens, "<u4").tobytes()


def _num_equal(one: bytes, other: bytes) -> int:
    """Leading bytes that agree."""
    size = min(len(one), len(other))
    differ = np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size)
    return int(differ.argmax()) if differ.any() else size
