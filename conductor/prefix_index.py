"""Which node holds which block: one bitmask of nodes a key, so that a prompt is matched against all nodes at once.

Pure soft state, built from the events of caches, which are the truth; a wrong entry costs time and never correctness.
Keys are cut to 16 bytes (``index_keys``): nobody makes two chains meet by accident, and the owner compares all 32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mooncake.types import BlockEvent, BlockKey

INDEX_KEY_BYTES = 16
MAX_ENTRIES = 4_000_000  # (node, block) pairs; at about 220 bytes each under 1 GB


def index_keys(keys: Iterable[BlockKey]) -> list[bytes]:
    return [key[:INDEX_KEY_BYTES] for key in keys]


class PrefixIndex:
    """One owner. Bit ``i`` of a mask stands for the node in slot ``i``; a slot is used again after ``clear``."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._masks: dict[bytes, int] = {}
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

    def apply(self, node_id: str, events: Iterable[BlockEvent]) -> None:
        """Take over what became readable in a node's cache and what left it, in order. Repeats change nothing."""
        bit, held = 1 << self._slot(node_id), self._held[node_id]
        masks = self._masks
        for event in events:
            key = event.key[:INDEX_KEY_BYTES]
            if not event.stored:
                if key in held:
                    held.remove(key)
                    self._num_entries -= 1
                    self._take_out(key, bit)
            elif key not in held:
                if self._num_entries >= self._max_entries:
                    self.dropped += 1
                    continue
                held.add(key)
                self._num_entries += 1
                masks[key] = masks.get(key, 0) | bit

    def clear(self, node_id: str) -> None:
        """Forget a node: it is gone, or about to tell everything anew."""
        held = self._held.pop(node_id, None)
        if held is None:
            return
        slot = self._slots.pop(node_id)
        self._names[slot] = None
        self._num_entries -= len(held)
        for key in held:
            self._take_out(key, 1 << slot)

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of ``keys`` (16 bytes each) every node holds; nodes that hold none are left out."""
        runs: dict[str, int] = {}
        alive = previous = -1  # all nodes
        get = self._masks.get
        for position, key in enumerate(keys):
            mask = get(key, 0)
            if mask == previous:
                continue  # a chain is mostly held by the same nodes from end to end
            previous = mask
            remaining = alive & mask
            if remaining != alive:
                if position:
                    self._assign(alive & ~mask, position, runs)
                alive = remaining
                if not alive:
                    return runs
        if keys:
            self._assign(alive, len(keys), runs)
        return runs

    def _assign(self, mask: int, run: int, runs: dict[str, int]) -> None:
        while mask:
            low = mask & -mask
            name = self._names[low.bit_length() - 1]
            if name is not None:
                runs[name] = run
            mask ^= low

    def _take_out(self, key: bytes, bit: int) -> None:
        mask = self._masks[key] & ~bit
        if mask:
            self._masks[key] = mask
        else:
            del self._masks[key]

    def _slot(self, node_id: str) -> int:
        if node_id not in self._slots:
            try:
                slot = self._names.index(None)
            except ValueError:
                slot = len(self._names)
                self._names.append(None)
            self._names[slot] = node_id
            self._slots[node_id] = slot
            self._held[node_id] = set()
        return self._slots[node_id]
