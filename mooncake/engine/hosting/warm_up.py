"""A few real steps before a node serves: they give the cost model its first samples, and get the libraries' one-time
work done. It leaves nothing in the cache."""

from __future__ import annotations

import secrets

import numpy as np

from mooncake.engine.contract import NO_HOOK
from mooncake.engine.engine import Engine
from mooncake.engine.hosting.node_hook import NodeHook, StepSamples
from mooncake.engine.sequence import Sequence
from mooncake.hashing import Chain
from mooncake.pooling import Pooling
from mooncake.sampling import SamplingParams

LENGTHS = (16, 64, 192)  # of prompts; the first one pays for lazy initialisation, and is no sample
NEW_TOKENS = 4


def warm_up(engine: Engine, vocab_size: int, samples: StepSamples) -> None:
    """Run random prompts, those that fit, and note the times of their steps in ``samples``."""
    longest = min(engine.config.max_model_len, engine.cache.num_blocks * engine.config.block_tokens) - 2 * NEW_TOKENS
    chain = Chain(secrets.token_bytes(32))  # no request has this seed, so none can hit what is cached meanwhile
    random = np.random.default_rng(0)
    hook = NodeHook(NO_HOOK, samples, lambda: None)
    for length in LENGTHS:
        if length > longest:
            continue
        sequence = Sequence(
            f"warm-up-{length}",
            random.integers(0, vocab_size, length, dtype=np.uint32),
            length,
            SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True),
            chain,
            eos_ids=(),
            max_model_len=engine.config.max_model_len,
            pooling=None if engine.generates else Pooling.LAST,
        )
        engine.add(sequence)
        while engine.has_work:
            engine.step(hook)
        if length == LENGTHS[0]:
            samples.take()
    engine.drop_cached()
    engine.block_pool.take_events()
