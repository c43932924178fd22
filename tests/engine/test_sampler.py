"""Every sampling parameter works as documented, and a token depends only on its own row, seed and position."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooncake.engine.decoding.logits_processors import bias_and_penalise
from mooncake.engine.decoding.randomness import splitmix64, uniforms
from mooncake.engine.decoding.sampler import Sampler, distribution, token_logprob
from mooncake.engine.sequence import Sequence
from mooncake.errors import NotFinite
from mooncake.hashing import Chain
from mooncake.kernels import reference
from mooncake.kernels.cpu import CpuKernels
from mooncake.kernels.cpu_build import load_library
from mooncake.sampling import SamplingParams

VOCAB = 1000


def random_logits(seed: int, size: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def sequence_with(
    sampling: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3), answer: tuple[int, ...] = (), eos: int | None = None
) -> Sequence:
    tokens = np.array(prompt + answer, np.uint32)
    eos_ids = () if eos is None else (eos,)
    return Sequence("r", tokens, len(prompt), sampling, Chain(b""), eos_ids=eos_ids, max_model_len=10_000)


def sample(logits: np.ndarray, *sequences: Sequence) -> list[int]:
    rows = np.broadcast_to(logits, (len(sequences), logits.shape[-1])).copy()
    return [token for token, _ in Sampler().sample(torch.from_numpy(rows), list(sequences))]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


# Randomness


def test_the_generator_is_splitmix64() -> None:
    """First numbers for the seed 1234567, as its reference implementation gives them."""
    got = splitmix64(np.full(5, 1234567, np.uint64), np.arange(5, dtype=np.uint64))
    assert got.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_draws_are_uniform_along_positions_and_along_seeds() -> None:
    count = 200_000
    for seeds, positions in (
        (np.full(count, 42), np.arange(count)),
        (np.arange(count), np.full(count, 42)),
        (np.arange(count), np.arange(count)),
    ):
        draws = uniforms(seeds.astype(np.uint64), positions.astype(np.uint64))
        assert draws.min() >= 0.0 and draws.max() < 1.0
        counts = np.bincount((draws * 100).astype(int), minlength=100)
        assert ((counts - count / 100) ** 2 / (count / 100)).sum() < 99 + 5 * math.sqrt(2 * 99)
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.012


# The distribution that is drawn from


def brute_force(logits: np.ndarray, sampling: SamplingParams) -> set[int]:
    """The tokens that are kept, by fully sorting them."""
    probabilities = softmax(logits / sampling.temperature)
    kept = {i for i, p in enumerate(probabilities) if p >= sampling.min_p * probabilities.max() * (1 - 1e-9)}
    order = sorted(kept, key=lambda i: -logits[i])
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        total, reached = sum(probabilities[i] for i in order), 0.0
        for count, i in enumerate(order, 1):
            reached += probabilities[i] / total
            if reached >= sampling.top_p:
                order = order[:count]
                break
    return set(order)


@settings(max_examples=150)
@example(seed=0, temperature=0.5, top_k=0, top_p=0.9999999999999999, min_p=0.0)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.1, 5.0),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 999, 1000, 5000]),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.1, 1.0]),
)
def test_truncation_keeps_what_full_sorts_would_keep(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(seed)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    token_ids, weights = distribution(logits, sampling)
    assert np.all(np.diff(token_ids) > 0) and np.all(weights > 0)
    probabilities = softmax(logits / temperature)
    differing = sorted(probabilities[list(set(token_ids.tolist()) ^ brute_force(logits, sampling))])
    assert sum(differing[:-1]) < 1e-12  # sums may round to either side of top_p: by one token, or by what rounding is
    ratios = weights / probabilities[token_ids]
    assert np.allclose(ratios, ratios[0], rtol=1e-4)


def test_ties_are_all_kept() -> None:
    logits = np.array([1, 5, 5, 5, 0, 5], np.float32)
    for sampling in (SamplingParams(top_k=2), SamplingParams(top_p=0.3), SamplingParams(min_p=1.0)):
        assert distribution(logits, sampling)[0].tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=1, temperature=1.0),
        SamplingParams(max_tokens=1, temperature=0.5, top_k=10),
        SamplingParams(max_tokens=1, temperature=1.5, top_p=0.8),
        SamplingParams(max_tokens=1, temperature=1.0, min_p=0.05, repetition_penalty=1.5),
    ],
)
def test_tokens_come_as_often_as_the_distribution_says(sampling: SamplingParams) -> None:
    """A chi-square test over seeds: draws are a function of (seed, position)."""
    start = secrets.randbits(48)
    print(f"first seed {start}")
    logits = random_logits(0, 40) / 2
    sequences = [sequence_with(_with_seed(sampling, start + i)) for i in range(20_000)]
    counts = np.bincount(sample(logits, *sequences), minlength=40)
    token_ids, weights = distribution(bias_and_penalise(logits, sequences[0]), sampling)
    expected = weights / weights.sum() * len(sequences)
    assert counts.sum() == counts[token_ids].sum(), "a token was drawn that should have been cut off"
    large = expected >= 5
    chi_square = ((counts[token_ids] - expected) ** 2 / expected)[large].sum()
    freedom = max(int(large.sum()) - 1, 1)
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom)


def _with_seed(sampling: SamplingParams, seed: int) -> SamplingParams:
    return replace(sampling, seed=seed)


def test_a_token_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    samplings = [
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=9, temperature=1.0, seed=1),
        SamplingParams(max_tokens=9, temperature=1.0, seed=2, top_p=0.7),
        SamplingParams(max_tokens=9, temperature=2.0, seed=3, top_k=30, logprobs=3),
        SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=2.0),
    ]
    rows = np.stack([random_logits(i) for i in range(len(samplings))])
    sequences = [sequence_with(sampling, answer=(5, 5, 6)) for sampling in samplings]
    together = Sampler().sample(torch.from_numpy(rows), sequences)
    order = np.random.default_rng(0).permutation(len(samplings))
    shuffled = Sampler().sample(torch.from_numpy(rows[order]), [sequences[i] for i in order])
    assert [together[i] for i in order] == shuffled
    for i, sequence in enumerate(sequences):
        [alone] = Sampler().sample(torch.from_numpy(rows[i : i + 1]), [sequence])
        assert alone == together[i]


def test_seed_and_position_decide_the_draw() -> None:
    logits = random_logits(0) * 0
    same = SamplingParams(max_tokens=50, temperature=1.0, seed=5)
    other = SamplingParams(max_tokens=50, temperature=1.0, seed=6)
    a, b, c, d = sample(
        logits, sequence_with(same), sequence_with(same), sequence_with(other), sequence_with(same, answer=(1,))
    )
    assert a == b and len({a, c, d}) == 3


def test_logits_are_left_as_they_are() -> None:
    rows = torch.from_numpy(random_logits(0)[None].copy())
    before = rows.clone()
    sampling = SamplingParams(max_tokens=9, repetition_penalty=2.0, logit_bias=((3, 9.0),), top_p=0.5, logprobs=5)
    Sampler().sample(rows, [sequence_with(sampling)])
    assert torch.equal(rows, before)


# Edits


def test_repetition_counts_prompt_and_answer_the_other_penalties_the_answer_alone() -> None:
    logits = np.array([2.0, -2.0, 2.0, 2.0, 1.0], np.float32)
    sampling = SamplingParams(max_tokens=9, repetition_penalty=2.0)
    edited = bias_and_penalise(logits, sequence_with(sampling, prompt=(0, 1), answer=(2, 2)))
    assert edited.tolist() == [1.0, -4.0, 1.0, 2.0, 1.0]
    sampling = SamplingParams(max_tokens=9, presence_penalty=0.5, frequency_penalty=0.25)
    edited = bias_and_penalise(logits, sequence_with(sampling, prompt=(0, 1), answer=(2, 2, 4)))
    assert edited.tolist() == [2.0, -2.0, 1.0, 2.0, 0.25]


def test_penalties_keep_up_with_the_answer() -> None:
    sequence = sequence_with(SamplingParams(max_tokens=9, frequency_penalty=1.0))
    logits = np.zeros(8, np.float32)
    for token in (4, 4, 5):
        bias_and_penalise(logits, sequence)
        sequence.append(token)
    assert bias_and_penalise(logits, sequence).tolist() == [0, 0, 0, 0, -2, -1, 0, 0]


def test_a_bias_can_force_and_forbid() -> None:
    logits = random_logits(0)
    best = int(logits.argmax())
    forced = SamplingParams(max_tokens=9, temperature=0.0, logit_bias=((17, 100.0),))
    forbidden = SamplingParams(max_tokens=9, temperature=0.0, logit_bias=((best, -100.0),))
    plain = SamplingParams(max_tokens=9, temperature=0.0)
    got = sample(logits, sequence_with(forced), sequence_with(forbidden), sequence_with(plain))
    assert got[0] == 17 and got[1] != best and got[2] == best


def test_the_end_cannot_be_drawn_before_min_tokens() -> None:
    logits = np.zeros(6, np.float32)
    logits[4] = logits[5] = 50.0
    sampling = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2, stop_token_ids=(5,))
    assert sample(logits, sequence_with(sampling, answer=(1,), eos=4))[0] not in (4, 5)
    assert sample(logits, sequence_with(sampling, answer=(1, 1), eos=4))[0] in (4, 5)
    ignoring = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2, ignore_eos=True)
    assert sample(logits, sequence_with(ignoring, eos=4))[0] == 4


def test_only_what_is_allowed_is_drawn() -> None:
    logits = random_logits(1)
    allowed = (3, 5, 8)
    for seed in range(50):
        drawn = SamplingParams(max_tokens=9, allowed_token_ids=allowed, seed=seed, presence_penalty=2.0)
        assert sample(logits, sequence_with(drawn))[0] in allowed
    greedy = SamplingParams(max_tokens=9, temperature=0.0, allowed_token_ids=allowed)
    assert sample(logits, sequence_with(greedy))[0] == max(allowed, key=lambda token_id: logits[token_id])


def test_a_bad_word_is_not_finished_and_its_beginning_counts_in_the_answer_alone() -> None:
    logits = np.array([0, 1, 2, 3, 4, 5], np.float32)
    sampling = SamplingParams(max_tokens=9, temperature=0.0, bad_words=((1, 2, 5), (4,)))

    def next_token(prompt: tuple[int, ...], answer: tuple[int, ...]) -> int:
        return sample(logits, sequence_with(sampling, prompt=prompt, answer=answer))[0]

    assert next_token((0,), ()) == 5
    assert next_token((0,), (1, 2)) == 3  # 5 would finish the word, and 4 is one by itself
    assert next_token((0,), (0, 1, 2)) == 3
    assert next_token((0,), (2, 1)) == 5
    assert next_token((1,), (2,)) == 5 == next_token((1, 2), ())  # what the user wrote is no part of the answer
    sequence = sequence_with(sampling, prompt=(0,))
    told = []
    for _ in range(3):
        logits[:] = 0
        logits[[1, 2, 5][len(told)]] = 1
        told += sample(logits, sequence)
        sequence.append(told[-1])
    assert told == [1, 2, 0]


def test_what_forbids_everything_forbids_nothing() -> None:
    logits = np.array([0, 1, 2, 3], np.float32)

    def next_token(eos: int = 3, **wishes: Any) -> int:
        return sample(logits, sequence_with(SamplingParams(max_tokens=9, temperature=0.0, **wishes), eos=eos))[0]

    assert next_token(allowed_token_ids=(2,), bad_words=((2,),)) == 2
    assert next_token(bad_words=((0,), (1,), (2,), (3,))) == 3
    assert next_token(allowed_token_ids=(3,), min_tokens=2) == 3
    assert next_token(allowed_token_ids=(3, 1), min_tokens=2) == 1


# Log-probabilities


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(3)
    wanted = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    sampling = SamplingParams(max_tokens=9, temperature=0.3, top_k=5, repetition_penalty=2.0, logprobs=4, seed=1)
    rows = torch.from_numpy(logits[None].copy())
    [(token, logprob)] = Sampler().sample(rows, [sequence_with(sampling)])
    assert logprob is not None and logprob.logprob == pytest.approx(wanted[token], abs=1e-9)
    best = np.argsort(-logits)[:4]
    assert [i for i, _ in logprob.top] == best.tolist()
    assert [value for _, value in logprob.top] == pytest.approx(wanted[best].tolist(), abs=1e-9)


@pytest.mark.parametrize("size", [1, 7, 63, 64, 1000, 50_001])
def test_the_library_tells_how_likely_tokens_are_as_the_definition_does(size: int) -> None:
    logits = np.stack([random_logits(row, size) for row in range(5)])
    logits[1] = np.round(logits[1])  # ties
    logits[2, size // 2 + 1 :] = -np.inf
    logits[3] = np.sort(logits[3])
    rows, num_tops = [4, 0, 1, 1, 2, 3], [min(count, size) for count in (0, 5, 20, 1, 3, 20)]
    token_ids = [(37 * row) % size for row in range(len(rows))]
    library, definition = (
        way.score(torch.from_numpy(logits), rows, token_ids, num_tops) for way in (LIBRARY, DEFINITION)
    )
    for fast, exact in zip(library, definition, strict=True):
        assert [token_id for token_id, _ in fast.top] == [token_id for token_id, _ in exact.top]
        assert fast.rank == exact.rank and 1 <= exact.rank <= size
        values = [(score.logprob, *(logprob for _, logprob in score.top)) for score in (fast, exact)]
        assert values[0] == pytest.approx(values[1], abs=1e-12)


@pytest.mark.parametrize("library", [False, True])
def test_a_token_is_ranked_as_the_alternatives_are(library: bool) -> None:
    """Also where none are asked for; of equal ones the first comes first."""
    way = LIBRARY if library else DEFINITION
    logits = torch.tensor([[0.5, 2.0, -1.0, 2.0, 0.5]] * 5)
    ranks = [score.rank for score in way.score(logits, list(range(5)), list(range(5)), [0] * 5)]
    assert ranks == [3, 1, 5, 2, 4]
    assert [token_id for token_id, _ in way.score(logits, [0], [0], [5])[0].top] == [1, 3, 0, 4, 2]


def test_no_alternatives_are_listed_when_none_are_asked_for() -> None:
    assert token_logprob(random_logits(0), 5, 0).top == ()


@settings(max_examples=50)
@given(seed=st.integers(0, 1000), temperature=st.floats(1e-4, 100.0), draw_seed=st.integers(0, 2**64 - 1))
def test_any_temperature_gives_a_token(seed: int, temperature: float, draw_seed: int) -> None:
    sampling = SamplingParams(max_tokens=9, temperature=temperature, seed=draw_seed)
    [token] = sample(random_logits(seed), sequence_with(sampling))
    assert 0 <= token < VOCAB


# The library

DEFINITION, LIBRARY = Sampler(kernels=reference), Sampler(kernels=CpuKernels(load_library()))

SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 7, 300, VOCAB, VOCAB + 5]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.7]),
    seed=st.integers(1, 2**40),
)


@given(
    samplings=st.lists(SAMPLINGS, min_size=1, max_size=4),
    size=st.sampled_from([1, 30, VOCAB, 5003]),
    seed=st.integers(0, 2**32),
    is_masked=st.booleans(),
)
def test_the_library_draws_what_the_definition_draws(
    samplings: list[SamplingParams], size: int, seed: int, is_masked: bool
) -> None:
    logits = np.stack([random_logits(seed + row, size) for row in range(len(samplings))])
    if is_masked:
        logits[:, 20:] = -np.inf
    logits[:, 5:9] = logits[:, 4:5]  # ties
    sequences = [sequence_with(sampling) for sampling in samplings]
    ways = [LIBRARY, DEFINITION]
    library, definition = (way.sample(torch.from_numpy(logits), sequences) for way in ways)
    assert library == definition


@pytest.mark.parametrize("way", ["library", "definition"])
def test_rows_are_sampled_where_they_are(way: str) -> None:
    """As those of several answers to one prompt, or of drafts, whose rows are not one for each sequence in order."""
    sampler = LIBRARY if way == "library" else DEFINITION
    logits, rows = torch.from_numpy(np.stack([random_logits(row) for row in range(5)])), [3, 3, 0, 4]
    samplings = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=0.7, top_p=0.9, seed=3, logprobs=0),
        SamplingParams(temperature=0.0, logit_bias=((7, 100.0),)),
    ]
    there = sampler.sample(logits, [sequence_with(sampling) for sampling in samplings], rows)
    assert there == sampler.sample(logits[rows], [sequence_with(sampling) for sampling in samplings])
    assert there[1][0] == int(logits[3].argmax()) and there[3][0] == 7


def test_the_library_cuts_a_flat_distribution_of_a_large_vocabulary() -> None:
    """More candidates than top-p looks at first."""
    logits = np.random.default_rng(3).standard_normal(50_000).astype(np.float32) * 0.01
    samplings = [SamplingParams(temperature=1.0, top_p=0.7, seed=seed) for seed in range(1, 60)]
    sequences = [sequence_with(sampling) for sampling in samplings]
    rows = torch.from_numpy(np.broadcast_to(logits, (len(sequences), 50_000)).copy())
    assert LIBRARY.sample(rows, sequences) == DEFINITION.sample(rows, sequences)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=1.0, seed=1),
    ],
    ids=["greedy", "told how likely", "drawn"],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 999])
def test_logits_that_are_not_finite_cost_their_own_sequence_alone_in_both_ways(
    place: int, value: float, sampling: SamplingParams
) -> None:
    logits = np.stack([random_logits(row) for row in range(2)])
    logits[1, place] = value
    for way in (LIBRARY, DEFINITION):
        well, ill = sequences = [sequence_with(sampling) for _ in logits]
        drawn = way.sample(torch.from_numpy(logits), sequences)
        assert drawn[0] == way.sample(torch.from_numpy(logits[:1]), [sequence_with(sampling)])[0]
        assert well.failure is None and isinstance(ill.failure, NotFinite)
        scores = way.score(torch.from_numpy(logits), [0, 1], [5, 5], [0, 1])
        assert [np.isfinite(score.logprob) for score in scores] == [True, False]
