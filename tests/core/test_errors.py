"""Foreign errors as ours: a lack of memory is none of our bugs, whoever tells of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mooncake.client import Client
from mooncake.errors import HandoffFailed, InternalError, OutOfMemory, RetryElsewhere, as_ours, lacks_memory
from mooncake.sampling_params import SamplingParams

FAR_TOO_MUCH = 1 << 60


def map_without_memory() -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def allocate_on_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def allocate_an_error() -> None:
    raise SystemError("error return without exception set")


def allocate_within_torch() -> None:
    raise RuntimeError("std::bad_alloc")


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: bytes(FAR_TOO_MUCH),
        lambda: np.ones(FAR_TOO_MUCH, np.uint8),
        lambda: torch.ones(FAR_TOO_MUCH, dtype=torch.uint8),
        map_without_memory,
        allocate_on_a_gpu,
        allocate_an_error,
        allocate_within_torch,
    ],
)
def test_what_lacks_memory_may_be_tried_elsewhere(allocate: Callable[[], object]) -> None:
    with pytest.raises(Exception) as raised:  # each library has its own
        allocate()
    assert lacks_memory(raised.value)
    ours = as_ours(raised.value, "the engine")
    assert isinstance(ours, OutOfMemory) and isinstance(ours, RetryElsewhere)
    assert ours.message.startswith("the engine: no memory is left")


def test_other_foreign_errors_are_bugs_and_ours_stay_what_they_are() -> None:
    for error in (RuntimeError("out of luck"), OSError(errno.EIO, "I/O error"), KeyError("memory")):
        assert not lacks_memory(error)
        assert isinstance(as_ours(error, "the engine"), InternalError)
    ours = HandoffFailed("it was not announced")
    assert as_ours(ours, "the engine") is ours


def test_a_client_says_why_it_refuses_a_request_in_its_own_words() -> None:
    """It is a ValueError, as Python's callers expect, and no error of what gRPC cannot send."""
    with Client("127.0.0.1:1") as client, pytest.raises(ValueError, match=r"^detokenize is always true over gRPC"):
        client.generate("Hello", sampling=SamplingParams(detokenize=False))
