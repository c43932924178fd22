"""The paged cache as models see it, over memory that several processes may map.

It does not know who owns a block.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mooncake.errors import ConfigError
from mooncake.host_memory import check_free
from mooncake.kernels.reference import SCALE_BYTES
from mooncake.model_config import ModelConfig
from mooncake.page_groups import one_group
from mooncake.types import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def pages_over(memory: npt.NDArray[np.uint8], layout: KVLayout, num_blocks: int) -> torch.Tensor:
    """``memory``, of exactly ``num_blocks`` blocks, as ``[N, layers, K|V, Hkv, block_tokens, D]`` of the layout's
    type."""
    flat = torch.from_numpy(memory).view(TORCH_DTYPES[layout.dtype])
    return flat.view(num_blocks, layout.num_layers, layout.num_kinds, layout.num_kv_heads, layout.block_tokens, -1)


def layer_pages(cache: torch.Tensor, row: int, num_heads: int, head_dim: int) -> torch.Tensor:
    """``[N, K|V, Hkv, block_tokens, D]`` of a layer whose heads are not those of the cache's rows: it takes as many
    rows from ``row`` on as it needs, the last perhaps in part (``ModelConfig.kv_rows``)."""
    block_tokens = cache.shape[4]
    width = head_dim + (SCALE_BYTES if cache.dtype == torch.int8 else 0)
    head = block_tokens * width
    shape = cache.shape[0], cache.shape[2], num_heads, block_tokens, width
    strides = cache.stride(0), num_heads * head, head, width, 1
    return cache.as_strided(shape, strides, cache.storage_offset() + row * cache.stride(1))


def first_rows(config: ModelConfig, cache: torch.Tensor) -> list[int]:
    """Of each layer in ``cache``, if all layers are one group and some keep states."""
    rows = config.rows_for(cache.stride(1) * cache.element_size())
    return [row for _, row in one_group(rows).places] or list(range(config.num_layers))


class Mappable(Protocol):
    """Memory that other processes may map: a memfd, and where it is in this process."""

    @property
    def fd(self) -> int: ...

    @property
    def buffer(self) -> memoryview: ...


class SharedMemory:
    """A zeroed memfd. It has no name and disappears with the last process that maps it. The system allocates its pages
    when they are touched."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Takes ownership of ``fd``. Raises OSError or ValueError if it cannot be mapped."""
        self.fd = fd
        self._area = mmap.mmap(fd, num_bytes)
        with contextlib.suppress(OSError):  # most systems have no huge pages for shared memory
            self._area.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._area, np.uint8)
        self.buffer = memoryview(self._area)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """Raises ConfigError if the system has no such memory."""
        fd = os.memfd_create("mooncake", os.MFD_CLOEXEC)
        try:
            check_free(num_bytes)
            os.ftruncate(fd, num_bytes)
            return cls(fd, num_bytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ConfigError(f"cannot get {num_bytes / 1e9:.2f} GB of shared memory: {error}") from None

    def close(self) -> None:
        """Close the descriptor. Mapped memory stays until nothing references it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
