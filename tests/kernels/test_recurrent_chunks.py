"""Prompts through recurrent layers on GPUs, in chunks of tokens as matrix products: against the definition, in batches
of any lengths. On a GPU, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from recurrent_layers import RULES, Layer, OnDevice, runs_over

from mooncake.kernels import reference
from mooncake.kernels.gpu.triton_launch import INTERPRETED
from mooncake.kernels.recurrent import NO_PAGE, Runs
from mooncake.kernels.recurrent_chunks import CHUNK_TOKENS, FEW_TOKENS, in_chunks

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="triton was imported without a GPU and without its interpreter",
)
SMALL: dict[str, Any] = {"key_heads": 1, "heads": 2, "key_dim": 16, "value_dim": 16}
RAGGED = (
    *((CHUNK_TOKENS - 1, NO_PAGE, 0), (1, 8, 8), (CHUNK_TOKENS, 1, 2), (3 * CHUNK_TOKENS + 5, 2, 3)),
    *((1, NO_PAGE, 5), (CHUNK_TOKENS + 1, 4, 4), (FEW_TOKENS, 6, 7)),
)
"""A prompt that begins, an answer, a prompt in two blocks, another answer, a prompt that goes on in its block, and a
few tokens."""


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, products lose the bits that tensor cores do not multiply."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def cut(operand: Any) -> Any:
        bits = np.ascontiguousarray(operand.data).view(np.int32) & np.int32(-1 << 13)
        return interpreter.TensorHandle(bits.view(np.float32), operand.dtype)

    def create_dot(self: Any, left: Any, right: Any, *others: Any) -> Any:
        return plain(self, cut(left), cut(right), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def compare(layer: Layer, *steps: Runs) -> None:
    """Random tokens of each step, over states that go on from step to step, beside the definition."""
    kernels = OnDevice()
    theirs = torch.randn(9, layer.state_size, generator=torch.Generator().manual_seed(1))
    ours, first = theirs.clone(), 0
    for runs in steps:
        tokens = slice(first, first := first + int(runs.starts[-1]))
        expected = layer.run(reference, theirs, runs, tokens)
        actual = layer.run(kernels, ours, runs, tokens)
        torch.testing.assert_close(actual, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)
        torch.testing.assert_close(ours, theirs, atol=1e-5 * theirs.abs().max().item(), rtol=1e-5)


@RULES
def test_prompts_of_any_lengths_beside_answers(rule: type[Layer]) -> None:
    runs = runs_over(*RAGGED)
    compare(rule(int(runs.starts[-1]), **SMALL), runs)


@pytest.mark.slow
@RULES
@pytest.mark.parametrize(
    "shape", [{"key_dim": 40, "value_dim": 80, "num_taps": 2}, {"key_dim": 6, "value_dim": 10, "key_heads": 1}]
)
def test_heads_of_any_sizes_give_the_states_of_the_reference(shape: dict[str, int], rule: type[Layer]) -> None:
    runs = runs_over((1, NO_PAGE, 0), (CHUNK_TOKENS + 9, 1, 1), (9, NO_PAGE, 2))
    compare(rule(int(runs.starts[-1]), **shape), runs)


@RULES
def test_a_state_goes_on_from_step_to_step(rule: type[Layer]) -> None:
    """In place and over block borders; the last step is an answer's."""
    steps = [
        runs_over((CHUNK_TOKENS + 3, NO_PAGE, 0)),
        runs_over((9, 0, 0), (CHUNK_TOKENS, 0, 1), (2, 1, 2)),
        runs_over((FEW_TOKENS, 2, 2)),
        runs_over((1, 2, 2)),
    ]
    compare(rule(sum(int(runs.starts[-1]) for runs in steps), **SMALL), *steps)


@pytest.mark.parametrize("decay", [0.0, -1e-4, -80.0, -5000.0, "mixed", "none left"])
@RULES
def test_weak_and_strong_decays_neither_overflow_nor_lose_what_is_left(rule: type[Layer], decay: float | str) -> None:
    """Behind a token that forgets nearly all, differences of sums of logarithms have few digits left."""
    runs = runs_over((CHUNK_TOKENS + 7, 1, 2))
    layer = rule(int(runs.starts[-1]), **SMALL)
    if isinstance(decay, float):
        layer.decay = torch.full_like(layer.decay, decay)
    else:
        layer.decay[::5] = -2e4 if decay == "mixed" else float("-inf")
        layer.decay[1::5] = 0.0
    compare(layer, runs)


def test_keys_that_are_all_alike_lose_no_digits() -> None:
    """Each token overwrites all that the one before it wrote. Powers of their matrix would have numbers of 1e8."""
    runs = runs_over((2 * CHUNK_TOKENS, 1, 2))
    layer = Layer(2 * CHUNK_TOKENS, **SMALL)
    keys = layer.key_heads * layer.key_dim
    layer.inputs[:, keys : 2 * keys] = layer.inputs[:1, keys : 2 * keys]
    layer.taps[:-1, keys : 2 * keys] = 0.0
    layer.beta, layer.decay = torch.ones_like(layer.beta), torch.zeros_like(layer.decay)
    compare(layer, runs)


def test_short_convolutions_equal_the_reference() -> None:
    runs, kernels = runs_over(*RAGGED), OnDevice()
    inputs, taps = torch.randn(int(runs.starts[-1]), 80), torch.randn(3, 80)
    theirs = torch.randn(9, 2 * 80)
    ours = theirs.clone()
    expected = reference.short_convolution(inputs, taps, theirs, runs)
    torch.testing.assert_close(kernels.short_convolution(inputs, taps, ours, runs), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(ours, theirs)


@RULES
def test_answers_get_the_bits_that_they_get_without_prompts(rule: type[Layer]) -> None:
    runs = runs_over((1, 3, 3), (CHUNK_TOKENS + 1, NO_PAGE, 4), (1, 5, 6))
    layer, kernels = rule(int(runs.starts[-1]), **SMALL), OnDevice()
    states = torch.randn(9, layer.state_size)
    beside, alone = states.clone(), states.clone()
    rows = torch.tensor([0, len(layer.inputs) - 1])
    output = layer.run(kernels, beside, runs, slice(None))[rows]
    answers = replace(layer)
    answers.inputs, answers.decay, answers.beta = layer.inputs[rows], layer.decay[rows], layer.beta[rows]
    assert torch.equal(output, answers.run(kernels, alone, runs_over((1, 3, 3), (1, 5, 6)), slice(None)))
    assert torch.equal(beside[[3, 6]], alone[[3, 6]])


def test_a_step_has_chunks_if_it_has_a_prompt() -> None:
    def moved(*runs: tuple[int, int, int]) -> Runs:
        return in_chunks(runs_over(*runs), lambda part: part)

    assert moved((1, 0, 0), (1, NO_PAGE, 1)).chunks is None
    few = moved((1, 0, 0), (FEW_TOKENS, NO_PAGE, 1)).chunks
    assert few is not None and few.num_few == 2 and not len(few.spans)
    found = moved((1, 0, 0), (5, 2, 3), (40, 3, 4), (1, 5, 5), (33, NO_PAGE, 6)).chunks
    assert found is not None and CHUNK_TOKENS == 32
    assert (found.chains.tolist(), found.num_few) == ([0, 3, 1, 4], 2)
    assert found.spans.tolist() == [
        *([1, 6, 1, 2], [6, 38, 1, 2], [38, 46, 1, 2]),  # of a chain whose runs are in two blocks
        *([47, 79, 47, NO_PAGE], [79, 80, 47, NO_PAGE]),
    ]
    warming = moved((40, NO_PAGE, NO_PAGE), (40, 0, NO_PAGE)).chunks  # nothing is kept of a step that only compiles
    assert warming is not None and warming.chains.tolist() == [0, 1]
