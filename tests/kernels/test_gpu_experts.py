"""Grouped products for experts against the definition: compiled on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from asked import Asked

pytest.importorskip("triton", reason="triton is not installed")

from mooncake.kernels import Kernels, reference
from mooncake.kernels.gpu.experts import FEW_ROWS, MANY_ROWS, MOST_ROWS, GroupedExperts, tiles_of
from mooncake.kernels.gpu.kernels import GpuKernels
from mooncake.kernels.gpu.triton_experts import sort_pairs
from mooncake.kernels.gpu.triton_launch import INTERPRETED

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="triton was imported without a GPU and without its interpreter",
)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NUM_EXPERTS, PER_TOKEN = 6, 2
BOUNDS = reference.Bounds(alpha=1.7, limit=0.8)
GATES: tuple[reference.Gate, reference.Gate] = ("gelu_tanh", "silu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def made_by(
    kernels: Kernels,
    dtype: torch.dtype,
    hidden: int,
    inner: int,
    bounds: reference.Bounds | None,
    here: slice = slice(None),
    gate: reference.Gate = "silu",
) -> Callable[..., torch.Tensor]:
    """Random experts, those of them that are ``here``; those with bounds have biases, too."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(NUM_EXPERTS, *shape, generator=generator)

    gate_up, down = random(2 * inner, hidden) * hidden**-0.5, random(hidden, inner) * inner**-0.5
    biases = [random(2 * inner), random(hidden)]
    weights = [part.to(dtype).to(DEVICE) for part in (gate_up, down, *(biases if bounds else []))]
    return kernels.experts(*(part[here] for part in weights), bounds=bounds, first=here.start or 0, gate=gate)


def tokens(dtype: torch.dtype, count: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens that never choose the second expert, and nearly all choose the last one."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(count, NUM_EXPERTS, generator=generator)
    scores[:, 1] = -100
    scores[:, -1] += 3
    shares, chosen = scores.softmax(-1).topk(PER_TOKEN)
    rows = torch.randn(count, hidden, generator=generator).to(dtype)
    return rows.to(DEVICE), chosen.to(DEVICE), shares.to(DEVICE)


@pytest.mark.sweep
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["SwiGLU", "with biases and bounds"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("count", "hidden", "inner"), [(1, 64, 96), (20, 200, 33), (70, 64, 96)])
def test_a_mixture_is_the_reference(
    dtype: torch.dtype, count: int, hidden: int, inner: int, bounds: reference.Bounds | None
) -> None:
    given = tokens(dtype, count, hidden)
    expected = made_by(reference, dtype, hidden, inner, bounds)(*given)
    actual = made_by(GpuKernels(DEVICE), dtype, hidden, inner, bounds)(*given)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_gates_go_through_gelu_where_that_is_asked_for() -> None:
    given = tokens(torch.float32, 20, 64)
    expected, silu = (made_by(reference, torch.float32, 64, 96, None, gate=gate)(*given) for gate in GATES)
    actual = made_by(GpuKernels(DEVICE), torch.float32, 64, 96, None, gate="gelu_tanh")(*given)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    assert not torch.allclose(expected, silu, atol=0.01)


def test_ups_without_gates_are_squared_where_they_are_positive() -> None:
    given, generator = tokens(torch.float32, 20, 64), torch.Generator().manual_seed(3)
    ups, downs = (
        torch.randn(NUM_EXPERTS, *shape, generator=generator).to(DEVICE) / 8 for shape in ((33, 64), (64, 33))
    )
    expected, actual = (made.experts(ups, downs, gate="relu2")(*given) for made in (reference, GpuKernels(DEVICE)))
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS, pytest.param(MOST_ROWS, marks=pytest.mark.slow)])
def test_tiles_of_any_height_give_the_same(rows: int) -> None:
    pairs = {FEW_ROWS: 40, MANY_ROWS: 20 * NUM_EXPERTS, MOST_ROWS: 200 * NUM_EXPERTS}[rows]
    assert tiles_of(pairs, NUM_EXPERTS, wide=False, is_gated=True).rows == rows
    kernels, given = GpuKernels(DEVICE), tokens(torch.bfloat16, pairs // PER_TOKEN, 64)
    experts = made_by(kernels, torch.bfloat16, 64, 96, None)
    expected = made_by(reference, torch.bfloat16, 64, 96, None)(*given)
    torch.testing.assert_close(experts(*given), expected, rtol=2e-2, atol=2e-2)


def test_ranks_with_some_of_the_experts_each_make_up_the_whole() -> None:
    kernels, given = GpuKernels(DEVICE), tokens(torch.float32, 20, 64)
    parts = [made_by(kernels, torch.float32, 64, 96, BOUNDS, here)(*given) for here in (slice(0, 4), slice(4, None))]
    whole = made_by(reference, torch.float32, 64, 96, BOUNDS)(*given)
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("pairs", [1, 16, 77])  # of which a program reads 16 at once
def test_pairs_are_sorted_by_expert_and_then_by_number(pairs: int) -> None:
    chosen = torch.randint(0, NUM_EXPERTS, (pairs,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    order, ends = torch.empty_like(chosen, dtype=torch.int32), torch.empty(NUM_EXPERTS, dtype=torch.int32).to(DEVICE)
    sort_pairs[(NUM_EXPERTS,)](chosen, order, ends, pairs, 0, BLOCK=16)
    assert order.tolist() == chosen.argsort(stable=True).tolist()
    assert ends.tolist() == chosen.bincount(minlength=NUM_EXPERTS).cumsum(0).tolist()


def test_the_host_is_not_asked_which_experts_there_are() -> None:
    given = tokens(torch.float32, 5, 64)
    for kernels, asks in ((GpuKernels(DEVICE), False), (reference, True)):
        experts = made_by(kernels, torch.float32, 64, 96, None)
        with Asked() as asked:
            experts(*given)
        assert bool(asked.found) == asks, asked.found


def test_no_tokens_are_none() -> None:
    experts = made_by(GpuKernels(DEVICE), torch.float32, 64, 96, None)
    assert isinstance(experts, GroupedExperts)
    assert experts(*tokens(torch.float32, 0, 64)).shape == (0, 64)
