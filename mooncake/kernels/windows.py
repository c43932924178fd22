"""What a token sees of those before it, where that is not all of them. Numbers and tensors alike; no devices."""

from __future__ import annotations

from typing import TypeVar

import torch

Position = TypeVar("Position", int, torch.Tensor)


def first_seen(position: Position, window: int) -> Position:
    """The first token that one at ``position`` sees with this ``window`` other than 0, as in
    ``reference.paged_attention``. Negative where a sliding window begins before the first token."""
    return position // -window * -window if window < 0 else position - window + 1
