"""A language model made of hashes, for tests: small, fast, and sensitive to every paging error.

Layer 0 stores each token and its position; layer 1 stores a running checksum over everything that layer 0 holds up to
there, read through the block table. The next token depends on the whole of layer 1. So one wrong block, slot, position
or stale byte anywhere in a sequence's KV changes its answer.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field

import numpy as np
import torch

from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import NO_HOOK, EngineConfig, Reservation, StepHook, StepOutput
from mooncake.engine.decoding.randomness import splitmix64
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.hashing import Chain
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.sampling import BeamSearch, SamplingParams
from mooncake.types import KVLayout

VOCAB = 97
BLOCK = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, block_tokens=BLOCK, head_dim=1, dtype="float32")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def logits_after(checksums: list[int]) -> np.ndarray:
    state = np.uint64(zlib.crc32(np.array(checksums, "<i8").tobytes()))
    bits = splitmix64(np.full(VOCAB, state), np.arange(VOCAB, dtype=np.uint64))
    return ((bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)) * np.float32(8)


def running_checksums(tokens: list[int]) -> list[int]:
    """What layer 1 holds: 24 bits each, which float32 represents exactly."""
    sums, checksum = [], 0
    for position, token in enumerate(tokens):
        checksum = zlib.crc32(np.array([token, position], "<i8").tobytes(), checksum)
        sums.append(checksum & 0xFFFFFF)
    return sums


def true_answer(prompt: list[int], count: int) -> list[int]:
    """Greedy, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(running_checksums(tokens)).argmax()))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class HashConfig:
    vocab_size: int = VOCAB


class HashModel:
    def __init__(self) -> None:
        self.config = HashConfig()
        self.batches: list[tuple[int, int]] = []  # (sequences, tokens) of each forward pass

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        block_tokens = cache.shape[4]
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        self.batches.append((len(contexts), len(batch.tokens)))
        blocks, offsets = batch.slots // block_tokens, batch.slots % block_tokens

        hook.before_layer(0)
        cache[blocks, 0, 0, 0, offsets, 0] = batch.tokens.float()
        cache[blocks, 0, 1, 0, offsets, 0] = batch.positions.float()
        hook.after_layer(0)

        hook.before_layer(1)
        checksums = []
        for b, context in enumerate(contexts):
            read = cache[batch.block_tables[b].long(), 0, :, 0, :, 0]  # [M, K|V, block_tokens]
            tokens, positions = read[:, 0].reshape(-1)[:context], read[:, 1].reshape(-1)[:context]
            assert positions.tolist() == list(range(context)), "KV of another place was read"
            checksums += running_checksums([int(t) for t in tokens])[context - (starts[b + 1] - starts[b]) :]
        cache[blocks, 1, 0, 0, offsets, 0] = torch.tensor(checksums).float()
        hook.after_layer(1)

        rows = []
        for t in batch.logit_rows.tolist():
            b = next(b for b in range(len(contexts)) if starts[b] <= t < starts[b + 1])
            read = cache[batch.block_tables[b].long(), 1, 0, 0, :, 0].reshape(-1)[: int(batch.positions[t]) + 1]
            rows.append(logits_after([int(c) for c in read]))
        return torch.from_numpy(np.array(rows, np.float32).reshape(-1, VOCAB))


def hash_engine(num_blocks: int = 64, model: HashModel | None = None, num_places: int = 0, **settings: int) -> Engine:
    defaults = {"block_tokens": BLOCK, "chunk_tokens": 8, "max_sequences": 8, "max_model_len": 200}
    config = EngineConfig(**{**defaults, **settings})  # type: ignore[arg-type]
    cache = KVCache(LAYOUT, num_blocks, num_places=num_places)
    cache.memory[:] = 0xA5  # what was never written must never be read
    return Engine(model or HashModel(), cache, config)


def hash_sequence(name: str, prompt: list[int], sampling: SamplingParams = GREEDY, **settings: object) -> Sequence:
    defaults: dict[str, object] = {"eos_ids": (), "max_model_len": 200}
    tokens = np.array(prompt, np.uint32)
    num_prompt = settings.pop("num_prompt", len(prompt))
    return Sequence(name, tokens, num_prompt, sampling, Chain(b"seed"), **{**defaults, **settings})  # type: ignore[arg-type]


def random_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def run_all(engine: Engine, hook: StepHook = NO_HOOK, most_steps: int = 5000) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    for _ in range(most_steps):
        if not engine.has_work:
            engine.block_pool.check()
            return outputs
        outputs += engine.step(hook)
        assert not engine.is_stalled, "nothing can run any more"
    raise AssertionError("the engine does not come to an end")


def reserve_filled(target: Engine, here: Sequence, source: Engine, there: Sequence) -> Reservation:
    """Reserve room for ``here``, and put into it the KV of ``there``, which holds its blocks."""
    reservation = target.reserve(here)
    for index, block_id in enumerate(reservation.block_ids, reservation.first_block):
        target.cache.memory[block_id] = source.cache.memory[there.blocks.block_table[index]]
    return reservation


def answers(outputs: list[StepOutput]) -> dict[str, list[int]]:
    """Tokens of each request, "r" or "r#2" for its third answer; indices must have no gap and no repeat."""
    by_request: dict[str, list[int]] = {}
    first: dict[str, int] = {}
    for output in outputs:
        name = f"{output.request_id}#{output.choice}" if output.choice else output.request_id
        tokens = by_request.setdefault(name, [])
        assert output.token.index == first.setdefault(name, output.token.index) + len(tokens)
        tokens.append(output.token.token_id)
    return by_request


@dataclass
class Life:
    """What has become of the requests of ``random_life``."""

    answers: dict[str, list[int]]
    aborted: set[str] = field(default_factory=set)
    searches: set[str] = field(default_factory=set)  # answered by beams

    @property
    def greedy(self) -> list[tuple[str, list[int]]]:
        """Each whole greedy answer, with the name of its request; a request may have several."""
        named = [(name.partition("#")[0], tokens) for name, tokens in self.answers.items()]
        return [(name, tokens) for name, tokens in named if name not in self.aborted | self.searches]


def random_life(engine: Engine, prompts: dict[str, list[int]], rng: random.Random) -> Life:
    """Requests with one answer (24 tokens), with several (10) and with beams come one by one, with priorities, and
    some are aborted, until nothing is left to do. No step may find the blocks miscounted, or nothing to run."""
    life, names = Life({}), list(prompts)
    outputs: list[StepOutput] = []
    while names or engine.has_work:
        if names and rng.random() < 0.5:
            name = names.pop()
            sampling = SamplingParams(max_tokens=24, temperature=0.0)
            if rng.random() < 0.3:
                sampling = SamplingParams(max_tokens=10, temperature=0.0, n=3)
            elif rng.random() < 0.2:
                sampling = SamplingParams(max_tokens=6, temperature=0.0, n=2, beam_search=BeamSearch())
                life.searches.add(name)
            engine.add(hash_sequence(name, prompts[name], sampling, priority=rng.randint(0, 2)))
        if rng.random() < 0.05:
            victim = rng.choice(list(prompts))
            engine.abort(victim)
            life.aborted.add(victim)
        outputs += engine.step()
        assert not (engine.is_stalled and engine.has_work)
        engine.block_pool.check()
    life.answers = answers(outputs)
    return life
