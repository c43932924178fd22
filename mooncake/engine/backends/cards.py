"""What the GPUs of this machine have, as far as a node needs to know before it opens a model."""

from __future__ import annotations

import torch

from mooncake.errors import ConfigError
from mooncake.sizing import Card


def first_of(device: str) -> int:
    """The number of a device's first GPU."""
    return torch.device(device).index or 0


def check_gpus_here(device: str, count: int = 1) -> None:
    """Raises ConfigError where torch does not find ``count`` GPUs from ``device`` on."""
    found, first = torch.cuda.device_count(), first_of(device)
    if first >= found:
        raise ConfigError(f"device {device!r} is not here: torch finds {found} GPUs")
    if first + count > found:
        raise ConfigError(f"{count} tensor parallel ranks need a GPU each from {device!r} on: torch finds {found}")


def cards_at(device: str, count: int) -> list[Card]:
    """The ``count`` GPUs from ``device`` on; none in Triton's interpreter. Raises ConfigError where they are not.

    Only the first one is asked what is free: asking takes a context on a GPU, hundreds of megabytes for as long as this
    process lives, and those of other ranks are taken to be as free as they are large.
    """
    if is_interpreted(device):
        return []
    check_gpus_here(device, count)
    first = first_of(device)
    free, total = torch.cuda.mem_get_info(first)
    others = [torch.cuda.get_device_properties(first + rank).total_memory for rank in range(1, count)]
    sizes = [(total, free), *((size, size) for size in others)]
    return [Card(f"cuda:{first + rank}", *size) for rank, size in enumerate(sizes)]


def is_interpreted(device: str) -> bool:
    """Whether the kernels of a GPU run on the processor. Raises ConfigError without Triton."""
    try:
        from mooncake.kernels.gpu.triton_launch import INTERPRETED
    except ImportError as error:
        raise ConfigError(f"device {device!r} needs Triton: {error}") from None
    return INTERPRETED
