"""The gated delta rule and Mamba-2 over states in pages: against transformers' functions, the kernels in C++ and Triton
against their definition, and the same bits however a sequence is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from recurrent_layers import PAGES, RULES, Layer, OnDevice, StateSpace, runs_over
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from mooncake.kernels import reference
from mooncake.kernels.cpu import CpuKernels
from mooncake.kernels.cpu_build import load_library
from mooncake.kernels.recurrent import NO_PAGE, RecurrentKernels
from mooncake.precision import cpu_features


@pytest.fixture(
    scope="module",
    params=["reference", "C++", "C++ without AVX-512", pytest.param("Triton", marks=pytest.mark.slow)],
)
def kernels(request: pytest.FixtureRequest) -> RecurrentKernels:
    if request.param == "reference":
        return reference
    if request.param == "Triton":
        return OnDevice()
    if request.param == "C++":
        return CpuKernels(load_library())
    if "avx512f" not in cpu_features():
        pytest.skip("the processor has no avx512f: this is the library that is tested already")
    return CpuKernels(load_library(("-march=haswell",)))


@pytest.mark.parametrize("shape", [{}, {"heads": 2, "value_dim": 16, "key_dim": 16}, {"num_taps": 2, "value_dim": 64}])
@pytest.mark.parametrize("count", [1, 2, 70])
def test_it_is_the_published_rule(kernels: RecurrentKernels, shape: dict[str, int], count: int) -> None:
    layer = Layer(count, **shape)
    states = layer.pages()
    output = layer.run(kernels, states, runs_over((count, NO_PAGE, 3)), slice(count))
    padded = torch.nn.functional.pad(layer.inputs.T[None], (layer.num_taps - 1, 0))
    mixed = torch.nn.functional.conv1d(padded, layer.taps.T[:, None], groups=layer.channels)
    keys = layer.key_heads * layer.key_dim
    query, key, value = torch.nn.functional.silu(mixed)[0].T.tensor_split([keys, 2 * keys], dim=1)
    query, key = (heads.reshape(1, count, layer.key_heads, -1) for heads in (query, key))
    value = value.reshape(1, count, layer.heads, -1)
    expected, last = torch_chunk_gated_delta_rule(
        query,
        key,
        value,
        g=layer.decay[None],
        beta=layer.beta[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(output.view(1, count, layer.heads, -1), expected, atol=2e-5, rtol=1e-4)
    tail = (layer.num_taps - 1) * layer.channels
    torch.testing.assert_close(states[3, tail:].view_as(last[0]), last[0], atol=2e-5, rtol=1e-4)
    assert torch.equal(states[3, :tail], padded[0, :, count:].T.flatten())
    assert states[torch.arange(PAGES) != 3].isnan().all(), "it wrote a page that is not its own"


@pytest.mark.parametrize(
    "shape", [{}, {"heads": 2, "value_dim": 16, "key_dim": 8}, {"key_heads": 1, "num_taps": 2, "value_dim": 80}]
)
@pytest.mark.parametrize("count", [1, 2, 70])
def test_it_is_the_published_state_space(kernels: RecurrentKernels, shape: dict[str, int], count: int) -> None:
    layer = StateSpace(count, **shape)
    states = layer.pages()
    output = layer.run(kernels, states, runs_over((count, NO_PAGE, 3)), slice(count))
    padded = torch.nn.functional.pad(layer.inputs.T[None], (layer.num_taps - 1, 0))
    mixed = torch.nn.functional.conv1d(padded, layer.taps.T[:, None], layer.bias, groups=layer.channels)
    keys = layer.key_heads * layer.key_dim
    parts = torch.nn.functional.silu(mixed)[0].T.split([layer.heads * layer.value_dim, keys, keys], dim=1)
    value, key, query = (
        part.reshape(1, count, heads, -1)
        for part, heads in zip(parts, (layer.heads, *[layer.key_heads] * 2), strict=True)
    )
    expected, last = mamba2_chunk_scan(
        value, layer.beta[None], layer.rates, key, query, chunk_size=16, D=layer.skip, return_final_states=True
    )
    torch.testing.assert_close(output.view_as(expected), expected, atol=5e-5, rtol=1e-4)
    tail = (layer.num_taps - 1) * layer.channels
    matrices = states[3, tail:].view(layer.heads, layer.key_dim, layer.value_dim)
    torch.testing.assert_close(matrices, last[0].mT, atol=5e-5, rtol=1e-4)
    assert torch.equal(states[3, :tail], padded[0, :, count:].T.flatten())
    assert states[torch.arange(PAGES) != 3].isnan().all(), "it wrote a page that is not its own"


CUTS = [
    [[8, 8, 8, 6]],  # one step over four blocks
    [[8, 8], [8], [6]],
    [[8], [1], [1], [1], [5], [8, 1], [1], [1], [3]],  # in place within a block, for fewer tokens than the taps see
    [[2], [6, 2], [6], [8], [1], [5]],
]


@RULES
@pytest.mark.parametrize("steps", CUTS, ids=str)
def test_a_token_gets_the_same_bits_in_any_cut(
    kernels: RecurrentKernels, steps: list[list[int]], rule: type[Layer]
) -> None:
    """``steps``: numbers of tokens of each run. Blocks of 8 tokens; another sequence is in every step. On GPUs that is
    so of what goes token by token."""
    if isinstance(kernels, OnDevice):
        kernels = OnDevice(has_chunks=False)
    layer, block = rule(60), 8
    whole, beside = layer.pages(), layer.pages()
    expected = layer.run(kernels, whole, runs_over((8, NO_PAGE, 0), (8, 0, 1), (8, 1, 2), (6, 2, 3)), slice(30))
    alone = layer.run(kernels, beside, runs_over((30, NO_PAGE, 8)), slice(30, 60))
    states, found, others, first, other = layer.pages(), [], [], 0, 30
    for step in steps:
        runs, given = [], [*range(other, other + 1)]
        runs.append((1, NO_PAGE if other == 30 else 8, 8))
        for count in step:
            source = NO_PAGE if first == 0 else (first - 1) // block
            runs.append((count, source, first // block))
            given += range(first, first + count)
            first += count
        rows = torch.tensor(given)
        cut = replace(layer)
        cut.inputs, cut.decay, cut.beta = layer.inputs[rows], layer.decay[rows], layer.beta[rows]
        output = cut.run(kernels, states, runs_over(*runs), slice(None))
        others.append(output[:1])
        found.append(output[1:])
        other += 1
    assert first == 30
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(torch.cat(others), alone[: len(steps)])
    assert torch.equal(states[:4], whole[:4])


@RULES
@pytest.mark.parametrize("made", [lambda: CpuKernels(load_library()), OnDevice], ids=["C++", "Triton"])
def test_the_kernel_is_its_definition(rule: type[Layer], made: Callable[[], RecurrentKernels]) -> None:
    """Blocks that end behind fewer tokens than the taps see, states in place and in new pages, and odd sizes."""
    layer, kernels = rule(21, key_dim=24, value_dim=48), made()
    runs = runs_over((5, NO_PAGE, 2), (4, 2, 4), (1, 4, 6), (1, 0, 0), (1, 1, 7), (2, 3, 3), (7, 3, 5))
    before = torch.randn(PAGES, layer.state_size)
    theirs, ours = before.clone(), before.clone()
    expected = layer.run(reference, theirs, runs, slice(None))
    torch.testing.assert_close(layer.run(kernels, ours, runs, slice(None)), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    assert torch.equal(ours[[1, 8]], before[[1, 8]])


@RULES
def test_a_run_that_only_pads_a_graph_writes_nowhere(rule: type[Layer]) -> None:
    layer = rule(3, key_dim=8, value_dim=8)
    states = layer.pages()
    output = layer.run(
        OnDevice(), states, runs_over((1, NO_PAGE, NO_PAGE), (1, NO_PAGE, 2), (1, NO_PAGE, NO_PAGE)), slice(3)
    )
    assert not states[2].isnan().any() and states[[0, 1, *range(3, PAGES)]].isnan().all()
    assert not output.isnan().any()


@pytest.mark.parametrize("steps", CUTS, ids=str)
@pytest.mark.parametrize("channels", [32, 20])
def test_a_convolution_alone_is_the_same_in_any_cut(
    kernels: RecurrentKernels, channels: int, steps: list[list[int]]
) -> None:
    inputs, taps = torch.randn(30, channels), torch.randn(3, channels)
    padded = torch.nn.functional.pad(inputs.T[None], (2, 0))
    expected = torch.nn.functional.conv1d(padded, taps.T[:, None], groups=channels)[0].T
    states, found, first = torch.full((PAGES, 2 * channels), float("nan")), [], 0
    for step in steps:
        runs, begin = [], first
        for count in step:
            runs.append((count, (first - 1) // 8 if first else NO_PAGE, first // 8))
            first += count
        found.append(kernels.short_convolution(inputs[begin:first], taps, states, runs_over(*runs)))
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-6, rtol=1e-5)
    for page, end in enumerate([8, 16, 24, 30]):
        assert torch.equal(states[page].view(2, channels), inputs[end - 2 : end])
    assert states[4:].isnan().all()


@RULES
@pytest.mark.parametrize("run", [(1, 9, 0), (1, -2, 0), (1, 0, 9), (1, 0, -1)])
def test_a_wrong_page_raises_before_anything_is_written(run: tuple[int, int, int], rule: type[Layer]) -> None:
    layer, kernels = rule(2), CpuKernels(load_library())
    states = layer.pages()
    with pytest.raises(IndexError):
        layer.run(kernels, states, runs_over((1, NO_PAGE, 1), run), slice(None))
    assert states.isnan().all()


@RULES
def test_sizes_that_the_library_does_not_take_go_to_the_reference(rule: type[Layer]) -> None:
    layer, kernels = rule(6, key_dim=6, value_dim=10), CpuKernels(load_library())
    runs = runs_over((4, NO_PAGE, 1), (2, 1, 2))
    ours, theirs = layer.pages(), layer.pages()
    assert torch.equal(layer.run(kernels, ours, runs, slice(None)), layer.run(reference, theirs, runs, slice(None)))
    assert torch.equal(ours[1:3], theirs[1:3])
