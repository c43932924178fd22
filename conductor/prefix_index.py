"""Which node holds which block: one bitmask of nodes a key, so that a prompt is matched against all nodes at once.

Pure soft state, built from the events of caches, which are the truth; a wrong entry costs time and never correctness.
Keys are cut to 16 bytes (``index_keys``): nobody makes two chains meet by accident, and the owner compares all 32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mooncake.types import BlockEvent, BlockKey

INDEX_KEY_BYTES = 16
MAX_SHARED = 1 << 16  # masks kept for sharing
FEW_BITS = 8
MAX_ENTRIES = 4_000_000  # (node, block) pairs; about 140 bytes each, 75 for a further holder of a block


def index_keys(keys: Iterable[BlockKey]) -> list[bytes]:
    return [key[:INDEX_KEY_BYTES] for key in keys]


class PrefixIndex:
    """One owner. Bit ``i`` of a mask stands for the node in slot ``i``; a node keeps its slot until ``forget``."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._masks: dict[bytes, int] = {}
        self._shared: dict[int, int] = {}  # one object a mask: saves memory, and equal neighbours are seen by identity
        self._held: dict[str, set[bytes]] = {}  # of each node: what clear() has to take out
        self._slots: dict[str, int] = {}
        self._names: list[str | None] = []  # node in each slot
        self._num_entries = 0
        self.dropped = 0  # stored events that found the index full

    def __len__(self) -> int:
        """How many blocks some node holds."""
        return len(self._masks)

    def num_blocks(self, node_id: str) -> int:
        return len(self._held.get(node_id, ()))

    def slot(self, node_id: str) -> int:
        """Where the node stands in the arrays that ``runs`` returns."""
        if node_id not in self._slots:
            if None in self._names:
                slot = self._names.index(None)
            else:
                slot = len(self._names)
                self._names.append(None)
            self._names[slot] = node_id
            self._slots[node_id] = slot
            self._held[node_id] = set()
        return self._slots[node_id]

    def apply(self, node_id: str, events: Iterable[BlockEvent]) -> None:
        """Take over what became readable in a node's cache and what left it, in order. Repeats change nothing."""
        bit, held = 1 << self.slot(node_id), self._held[node_id]
        for event in events:
            key = event.key[:INDEX_KEY_BYTES]
            if not event.stored:
                if key in held:
                    held.remove(key)
                    self._num_entries -= 1
                    self._put(key, self._masks[key] & ~bit)
            elif key not in held:
                if self._num_entries >= self._max_entries:
                    self.dropped += 1
                    continue
                held.add(key)
                self._num_entries += 1
                self._put(key, self._masks.get(key, 0) | bit)

    def clear(self, node_id: str) -> None:
        """Forget what a node holds: it is about to tell everything anew."""
        held = self._held.get(node_id)
        if not held:
            return
        bit = 1 << self._slots[node_id]
        for key in held:
            self._put(key, self._masks[key] & ~bit)
        self._num_entries -= len(held)
        held.clear()

    def forget(self, node_id: str) -> None:
        """The node is gone; its slot may be given to another."""
        self.clear(node_id)
        self._held.pop(node_id, None)
        slot = self._slots.pop(node_id, None)
        if slot is not None:
            self._names[slot] = None

    def runs(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """How many leading blocks of ``keys`` (16 bytes each) every node holds, by slot."""
        runs = np.zeros(len(self._names), dtype=np.int64)
        alive = -1  # nodes that hold all blocks so far: at first every node
        previous: int | None = -1
        for position, mask in enumerate(map(self._masks.get, keys)):
            if mask is previous:
                continue  # a chain is mostly held by the same nodes from end to end
            previous = mask
            remaining = alive & (mask or 0)
            if remaining != alive:
                if position:
                    _assign(alive ^ remaining, position, runs)
                alive = remaining
                if not alive:
                    return runs
        if keys:
            _assign(alive, len(keys), runs)
        return runs

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """As ``runs``, by node; nodes that hold none are left out."""
        runs = self.runs(keys)
        return {name: int(run) for name, run in zip(self._names, runs, strict=True) if name is not None and run}

    def _put(self, key: bytes, mask: int) -> None:
        if not mask:
            del self._masks[key]
            return
        if len(self._shared) >= MAX_SHARED:
            self._shared.clear()
        self._masks[key] = self._shared.setdefault(mask, mask)


def _assign(mask: int, run: int, runs: npt.NDArray[np.int64]) -> None:
    """Set ``run`` for every node of ``mask``: bit by bit when there are few."""
    if mask.bit_count() > FEW_BITS:
        packed = np.frombuffer(mask.to_bytes((len(runs) + 7) // 8, "little"), dtype=np.uint8)
        runs[np.unpackbits(packed, count=len(runs), bitorder="little").view(np.bool_)] = run
        return
    while mask:
        low = mask & -mask
        runs[low.bit_length() - 1] = run
        mask ^= low
