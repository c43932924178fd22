"""The memory of a paged cache: one tensor ``[blocks, layers, K|V, kv_heads, block_tokens, head_dim]`` over one buffer.

With int8 codes the last axis has 4 more elements, the bytes of the row's scale.

The buffer may be a registered segment that other processes write into. Blocks of preempted sequences are kept in
separate places. It does not know which block is whose.

Nodes move blocks through a ``Mirror``: host memory that stands for the cache. On a CPU that is the cache itself; on a
GPU (``device_cache``) bytes are copied between the two.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mooncake.errors import ConfigError
from mooncake.host_memory import check_free
from mooncake.model.pages import pages_over
from mooncake.types import KVLayout


class Arrival(Protocol):
    """A copy of blocks, finished or in progress."""

    def wait(self) -> None:
        """Block until the bytes are there."""

    def order(self) -> None:
        """Order what this thread starts on the device from now on after the copy; the thread itself does not wait."""


class Mirror(Protocol):
    """A cache's blocks as other nodes see them: ``memory`` is ``[num_blocks, block_bytes]`` uint8 in host memory.

    The two methods synchronise its blocks with the cache's, in all layers or one. They may be called from any thread.
    """

    memory: npt.NDArray[np.uint8]

    def to_host(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        """Copy what this thread has computed so far of these blocks to ``memory``."""
        ...

    def to_device(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        """Copy these blocks from ``memory`` to the cache. Nobody else may touch them there meanwhile."""
        ...


class _Here:
    def wait(self) -> None:
        pass

    def order(self) -> None:
        pass


HERE: Arrival = _Here()
"""The arrival of bytes that need no copy."""


class KVCache:
    """``tensor`` for the model and ``memory`` (``[num_blocks, block_bytes]`` uint8) for transfers: the same bytes,
    so it is its own ``Mirror``."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, buffer: memoryview | None = None, num_places: int = 0
    ) -> None:
        """Places the cache in ``buffer``, or in zeroed memory of its own. Raises ConfigError when it does not fit.

        ``num_places`` more blocks are in separate, ordinary memory: ``copy_block`` knows them by the numbers that
        follow.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_places = num_places
        places = np.frombuffer(own_memory(num_places * layout.block_bytes), np.uint8)
        self._places = places[: num_places * layout.block_bytes].reshape(num_places, layout.block_bytes)
        num_bytes = num_blocks * layout.block_bytes
        if buffer is None:
            buffer = own_memory(num_bytes)
        if buffer.nbytes < num_bytes or buffer.readonly:
            raise ConfigError(f"{num_blocks} blocks need {num_bytes} writable bytes, the buffer has {buffer.nbytes}")
        flat = np.frombuffer(buffer, np.uint8, num_bytes)
        self.memory: npt.NDArray[np.uint8] = flat.reshape(num_blocks, layout.block_bytes)
        self.tensor = pages_over(flat, layout, num_blocks)

    def to_host(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        return HERE

    def to_device(self, block_ids: Sequence[int], layer: int | None = None) -> Arrival:
        return HERE

    def copy_block(self, source: int, target: int) -> None:
        self._row(target)[:] = self._row(source)

    def _row(self, number: int) -> npt.NDArray[np.uint8]:
        row: npt.NDArray[np.uint8]
        row = self.memory[number] if number < self.num_blocks else self._places[number - self.num_blocks]
        return row


def own_memory(num_bytes: int) -> memoryview:
    """Zeroed, page-aligned, and committed only when touched. Raises ConfigError."""
    try:  # private: most systems have no huge pages for shared memory
        check_free(num_bytes)
        area = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        why = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise ConfigError(f"the system does not give {num_bytes / 1e9:.1f} GB: lower kv_gb or swap_gb{why}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)
