"""Blended prompts in an engine: where their chunks are, which blocks others may find, and running beside others."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_model import write_tiny_model

from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.engine.blend import Blend
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.hashing import Chain, chain_seed, chunk_seed, extend_chain
from mooncake.model import load_model
from mooncake.precision import FLOAT32
from mooncake.sampling import SamplingParams
from tests.engine.hash_model import answers, run_all

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK = 8
PROMPT, CHUNK = b"s" * 32, b"c" * 32  # what names begin with
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
RNG = np.random.default_rng(5)
PREFIX, FIRST, SECOND, QUESTION = (RNG.integers(3, 300, count, dtype=np.uint32) for count in (11, 24, 16, 9))
TOKENS = np.concatenate([PREFIX, FIRST, SECOND, QUESTION])
STARTS = (len(PREFIX), len(PREFIX) + len(FIRST))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "llama", num_hidden_layers=10)
    return open_checkpoint(str(folder))


def engine_of(checkpoint: Checkpoint, num_blocks: int = 40, chunk_tokens: int = 0) -> Engine:
    cache = KVCache(checkpoint.kv_layout(BLOCK, "float32"), num_blocks)
    config = EngineConfig(block_tokens=BLOCK, chunk_tokens=chunk_tokens, max_sequences=8, max_model_len=200)
    return Engine(load_model(checkpoint, FLOAT32, 200, can_blend=True), cache, config)


def sequence(name: str, tokens: np.ndarray, sampling: SamplingParams = GREEDY, seed: bytes = PROMPT) -> Sequence:
    return Sequence(name, tokens, len(tokens), sampling, Chain(seed), eos_ids=(2,), max_model_len=200)


def with_chunks(engine: Engine, share: float) -> Blend:
    """Compute both chunks alone, and hold their blocks."""
    places = []
    for start, tokens in zip(STARTS, (FIRST, SECOND), strict=True):
        engine.add(sequence(f"chunk {start}", tokens, SamplingParams(max_tokens=1, ignore_eos=True), CHUNK))
        run_all(engine)
        keys = extend_chain(CHUNK, tokens, BLOCK)
        assert engine.block_pool.match(keys) == len(keys)
        places.append((start, engine.block_pool.take_prefix(keys, len(keys))))
    blend = Blend.of_chunks(places, 0, BLOCK, share)
    assert blend is not None
    return blend


def blended(blend: Blend, name: str = "blended", sampling: SamplingParams = GREEDY) -> Sequence:
    made = sequence(name, TOKENS, sampling)
    made.reused.blend, made.reused.num_exact = blend, blend.first
    return made


def test_every_reused_token_knows_its_slot_and_how_far_it_moved() -> None:
    blend = Blend.of_chunks([(3, [7, 2]), (20, [5])], 0, 4, 0.5)
    assert blend is not None
    assert blend.sources.tolist() == [-1] * 3 + [28, 29, 30, 31, 8, 9, 10, 11] + [-1] * 9 + [20, 21, 22, 23]
    assert set(blend.shifts[3:11]) == {3} and set(blend.shifts[20:]) == {20}
    assert (blend.first, blend.num_tokens) == (3, 12)


def test_what_the_prefix_has_is_not_reused() -> None:
    blend = Blend.of_chunks([(3, [7, 2]), (20, [5])], 8, 4, 0.5)
    assert blend is not None
    assert (blend.first, blend.num_tokens) == (8, 7)
    assert Blend.of_chunks([(3, [7, 2])], 11, 4, 0.5) is None


@pytest.mark.parametrize("chunk_tokens", [0, 16])
def test_share_one_gives_the_tokens_of_a_full_prefill(checkpoint: Checkpoint, chunk_tokens: int) -> None:
    engine = engine_of(checkpoint, chunk_tokens=chunk_tokens)
    engine.add(sequence("exact", TOKENS))
    exact = answers(run_all(engine))["exact"]
    engine = engine_of(checkpoint, chunk_tokens=chunk_tokens)
    engine.add(blended(with_chunks(engine, 1.0)))
    assert answers(run_all(engine))["blended"] == exact
    assert engine.load().blended_tokens == len(FIRST) + len(SECOND)


@pytest.mark.parametrize("num_answers", [1, 3])
def test_only_blocks_before_the_first_chunk_are_found_by_their_tokens(checkpoint: Checkpoint, num_answers: int) -> None:
    """Neither blended ones, nor those of the answers that build on them."""
    engine = engine_of(checkpoint)
    sampling = SamplingParams(max_tokens=20, temperature=0.9, seed=1, n=num_answers, ignore_eos=True)
    request = blended(with_chunks(engine, 0.2), sampling=sampling)
    engine.add(request)
    run_all(engine)
    keys = extend_chain(PROMPT, request.tokens, BLOCK)
    assert len(keys) > len(TOKENS) // BLOCK
    assert engine.block_pool.match(keys) == len(PREFIX) // BLOCK == 1
    assert not any(engine.block_pool.match([key]) for key in keys[1:])
    engine.block_pool.check()


def test_a_cached_prefix_longer_than_the_first_chunk_stays_what_it_is(checkpoint: Checkpoint) -> None:
    engine = engine_of(checkpoint)
    engine.add(sequence("exact", TOKENS))
    exact = answers(run_all(engine))["exact"]
    keys = extend_chain(PROMPT, TOKENS, BLOCK)
    assert engine.block_pool.match(keys) == len(keys)
    engine.add(blended(with_chunks(engine, 0.2)))
    assert answers(run_all(engine))["blended"] == exact  # all of it was cached
    assert engine.block_pool.match(keys) == len(keys)
    engine.block_pool.check()


def test_who_runs_beside_a_blended_prompt_gets_what_it_gets_alone(checkpoint: Checkpoint) -> None:
    others = {f"{length} tokens": RNG.integers(3, 300, length, dtype=np.uint32) for length in (5, 40, 90)}
    alone = {}
    for name, tokens in others.items():
        engine = engine_of(checkpoint)
        engine.add(sequence(name, tokens))
        alone |= answers(run_all(engine))
    engine = engine_of(checkpoint, num_blocks=80)
    blend = with_chunks(engine, 0.2)
    engine.add(blended(blend, "one"))
    for name, tokens in others.items():
        engine.add(sequence(name, tokens))
    engine.add(blended(blend, "two"))
    together = answers(run_all(engine))
    assert {name: together[name] for name in others} == alone
    assert together["one"] == together["two"]


def test_chunks_have_names_of_their_own() -> None:
    seeds = [seed("model", salt) for seed in (chain_seed, chunk_seed) for salt in ("", "tenant")]
    assert len(set(seeds)) == 4
