"""A cache of more than 2^31 numbers, as one GPU holds: its last pages are read, written and copied like its first."""

from __future__ import annotations

import mmap

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from paged_batch import DEVICE

from mooncake.kernels import reference
from mooncake.kernels.gpu.kernels import GpuKernels, copy_pages
from mooncake.kernels.gpu.triton_launch import INTERPRETED
from mooncake.kernels.recurrent import NO_PAGE, Runs
from mooncake.kernels.recurrent_chunks import CHUNK_TOKENS, in_chunks

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="triton was imported without a GPU and without its interpreter",
)

BLOCK_TOKENS, HEADS = 16, 2
UNBACKED = 0x4000  # Linux's MAP_NORESERVE, which Python 3.11 has no name for
APART = (1 << 30) + 1024  # numbers from block to block: the third begins behind 2^31


def spread(num_kinds: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Three blocks of one layer, ``[3, K|V, heads, BLOCK_TOKENS, width]``, far apart in memory that is mostly never
    touched."""
    num_bytes = 3 * APART * dtype.itemsize
    if INTERPRETED:
        area = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | UNBACKED)
        memory = torch.frombuffer(area, dtype=dtype)
    else:
        memory = torch.empty(3 * APART, dtype=dtype, device=DEVICE)
    heads = HEADS if num_kinds == 2 else 1
    strides = (APART, heads * BLOCK_TOKENS * width, BLOCK_TOKENS * width, width, 1)
    cache = memory.as_strided((3, num_kinds, heads, BLOCK_TOKENS, width), strides)
    cache.zero_()
    return cache


@pytest.mark.parametrize(("num_kinds", "dtype"), [(2, torch.bfloat16), (2, torch.int8), (1, torch.bfloat16)])
def test_a_token_written_and_read_far_into_a_cache(num_kinds: int, dtype: torch.dtype) -> None:
    kernels, head_dim, tokens = GpuKernels(DEVICE), 32, 5
    generator = torch.Generator().manual_seed(2)
    width = head_dim + (reference.SCALE_BYTES if dtype is torch.int8 else 0)
    far, near = spread(num_kinds, width, dtype), spread(num_kinds, width, dtype).clone()
    kv_heads = far.shape[2]
    rows = torch.randn(tokens, (2 * kv_heads + num_kinds * kv_heads) * head_dim, generator=generator).to(DEVICE)
    angles = torch.rand(48, head_dim // 2, generator=generator).to(DEVICE)
    slots = torch.arange(2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + tokens, device=DEVICE)
    rest = (angles.cos(), angles.sin(), torch.arange(tokens, device=DEVICE))
    query = kernels.rope_write_kv(rows.clone(), *rest, far, slots)
    kernels.rope_write_kv(rows.clone(), *rest, near, slots)
    assert torch.equal(far, near) and far[2].any() and not far[:2].any()

    starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[2]], dtype=torch.int32, device=DEVICE)
    arguments = (table, starts, starts[1:].clone(), head_dim**-0.5)
    for rows_per_tile in (query, query[:1]):  # tiles of many tokens and of one
        given = arguments if len(rows_per_tile) == tokens else (table, starts // tokens, starts[1:] // tokens, 0.2)
        actual, expected = (kernels.paged_attention(rows_per_tile, cache, *given) for cache in (far, near))
        assert torch.equal(actual, expected) and actual.any()


@pytest.mark.parametrize("tokens", [2, CHUNK_TOKENS + 1])
def test_a_state_written_and_read_far_into_a_cache(tokens: int) -> None:
    kernels, generator = GpuKernels(DEVICE), torch.Generator().manual_seed(2)
    key_dim, value_dim, num_taps = 8, 8, 3
    channels = 2 * key_dim + value_dim
    width = (num_taps - 1) * channels + key_dim * value_dim
    far = spread(1, width, torch.float32).as_strided((3, width), (APART, 1))
    near = far.clone()
    sizes = ((tokens, channels), (num_taps, channels), (tokens, 1))
    inputs, taps, shares = (torch.rand(size, generator=generator) for size in sizes)
    given = [part.to(DEVICE) for part in (inputs, -shares, shares, taps)]
    for source, target in ((NO_PAGE, 2), (2, 1)):
        runs = Runs(*(torch.tensor(each) for each in ([0, tokens], [source], [target])))
        runs = in_chunks(runs, lambda part: part.to(DEVICE))
        actual, expected = (kernels.gated_delta(*given, states, runs, 1, key_dim) for states in (far, near))
        assert torch.equal(actual, expected) and actual.any()
    assert torch.equal(far, near) and far[1:].any(dim=1).all() and not far[0].any()


def test_a_page_is_copied_far_into_a_cache() -> None:
    far = spread(2, 32, torch.bfloat16)
    source = torch.randn(far[:1].shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).to(DEVICE)
    first, last = (torch.tensor([page], device=DEVICE) for page in (0, 2))
    copy_pages(source, far, first, last)
    assert torch.equal(far[2], source[0]) and not far[:2].any()
    back = torch.zeros_like(source)
    copy_pages(far, back, last, first)
    assert torch.equal(back, source)
