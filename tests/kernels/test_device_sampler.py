"""The sampler on the device chooses what the definition chooses, here on the CPU: it is torch's operations alone."""

from __future__ import annotations

import secrets
from dataclasses import replace

import numpy as np
import pytest
import torch

from mooncake.engine.decoding.sampler import Sampler
from mooncake.engine.decoding.sampling_inputs import SamplingInputs
from mooncake.engine.sequence import Sequence
from mooncake.hashing import Chain
from mooncake.kernels import reference
from mooncake.model.gpu.device_sampler import ROWS_AT_ONCE, choose
from mooncake.sampling import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sequence_with(sampling: SamplingParams, num_tokens: int = 3) -> Sequence:
    return Sequence("r", np.zeros(num_tokens, np.uint32), 3, sampling, Chain(b""), eos_ids=(), max_model_len=10_000)


def on_device(logits: np.ndarray, sequences: list[Sequence]) -> list[int]:
    draws = SamplingInputs().build(sequences, [sequence.num_tokens for sequence in sequences])
    rows = torch.from_numpy(logits).to(DEVICE)
    if draws is None:
        return choose(rows).tolist()
    cut_rows = torch.from_numpy(draws.cut_rows).to(DEVICE) if len(draws.cut_rows) else None
    return choose(rows, torch.from_numpy(draws.values).to(DEVICE), cut_rows).tolist()


def by_definition(logits: np.ndarray, sequences: list[Sequence]) -> list[int]:
    return [token for token, _ in Sampler(kernels=reference).sample(torch.from_numpy(logits), sequences)]


def random_sampling(random: np.random.Generator, vocab: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=500,
        temperature=float(random.choice([0.0, 0.02, 0.7, 1.0, 2.5, 100.0])),
        top_k=int(random.choice([0, 0, 1, 2, 40, vocab - 1, vocab, vocab + 5])),
        top_p=float(random.choice([1.0, 1.0, 0.999, 0.9, 0.3, 1e-6, 0.0])),
        min_p=float(random.choice([0.0, 0.0, 0.05, 0.7, 1.0])),
        seed=int(random.integers(0, 1 << 63)),
    )


def random_rows(random: np.random.Generator, num_rows: int, vocab: int) -> np.ndarray:
    """Peaked, flat, with ties, with most tokens forbidden, and with one that has all the weight."""
    rows = random.standard_normal((num_rows, vocab)) * random.choice([0.01, 1.0, 3.0, 30.0], (num_rows, 1))
    for row in rows:
        kind = random.integers(5)
        if kind == 0:
            row[:] = np.round(row)
        elif kind == 1:
            row[random.random(vocab) < 0.9] = -np.inf
            row[random.integers(vocab)] = 1.0
        elif kind == 2:
            row[random.integers(vocab)] = 1e30
        elif kind == 3:
            row[:] = row[0]
    return rows.astype(np.float32)


@pytest.mark.parametrize("vocab", [2, 97, 256, 1000, 5000])
def test_it_chooses_what_the_definition_chooses(vocab: int) -> None:
    seed = secrets.randbits(48)
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    for num_rows in (1, 3, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 2 * ROWS_AT_ONCE + 7):
        for _ in range(6):
            logits = random_rows(random, num_rows, vocab)
            samplings = [random_sampling(random, vocab) for _ in range(num_rows)]
            sequences = [sequence_with(sampling, int(random.integers(3, 400))) for sampling in samplings]
            assert on_device(logits, sequences) == by_definition(logits, sequences)


def test_a_large_flat_vocabulary_is_cut_as_the_definition_cuts_it() -> None:
    logits = np.random.default_rng(3).standard_normal(50_000).astype(np.float32) * 0.01
    samplings = [SamplingParams(temperature=1.0, top_p=0.7, seed=seed) for seed in range(1, 12)]
    samplings += [SamplingParams(temperature=1.0, seed=seed) for seed in range(1, 12)]
    sequences = [sequence_with(sampling) for sampling in samplings]
    rows = np.broadcast_to(logits, (len(sequences), 50_000)).copy()
    assert on_device(rows, sequences) == by_definition(rows, sequences)


def test_of_equals_the_first_is_the_most_likely() -> None:
    logits = np.zeros((3, 700), np.float32)
    logits[0, 300:] = logits[2, [699, 5]] = 2.0
    greedy = sequence_with(SamplingParams(temperature=0.0))
    assert on_device(logits, [greedy] * 3) == by_definition(logits, [greedy] * 3) == [300, 0, 5]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_no_numbers_are_told_and_the_others_are_drawn(value: float, temperature: float) -> None:
    logits = np.random.default_rng(1).standard_normal((4, 300)).astype(np.float32)
    logits[1, 299] = value
    logits[3] = -np.inf
    sampling = SamplingParams(temperature=temperature, top_p=0.9)
    sequences = [sequence_with(replace(sampling, seed=seed)) for seed in range(4)]
    tokens = on_device(logits, sequences)
    assert tokens[1] == tokens[3] == -1
    assert tokens[::2] == by_definition(logits[::2].copy(), sequences[::2])


def test_the_same_sequences_draw_anew_at_each_position() -> None:
    builder, sampling = SamplingInputs(), SamplingParams(temperature=1.0, max_tokens=100, seed=4)
    sequences = [sequence_with(sampling), sequence_with(replace(sampling, temperature=0.0))]
    logits = torch.zeros(2, 300)
    found = []
    for position in range(3, 40):
        draws = builder.build(sequences, [position, position])
        assert draws is not None and not len(draws.cut_rows)
        found.append(choose(logits, torch.from_numpy(draws.values)).tolist())
    assert len({token for token, _ in found}) > 10 and {token for _, token in found} == {0}
    assert builder.build(sequences[1:], [3]) is None
