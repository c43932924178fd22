"""Real attention and all features together in one engine: the answers are those of each request alone."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_hybrid import write_hybrid
from tiny_lora import write_adapter
from tiny_model import write_tiny_model

from mooncake.adapters import open_adapters
from mooncake.checkpoint import open_checkpoint
from mooncake.engine.backends.backend import BackendSpec, CacheSize, on_cpu, plan_pages
from mooncake.engine.contract import EngineConfig, StepOutput
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.hashing import Chain
from mooncake.precision import resolve_precision
from mooncake.sampling import BeamSearch, SamplingParams
from tests.engine.hash_model import answers

pytestmark = pytest.mark.usefixtures("one_torch_thread")

CONTEXT, BLOCK = 160, 8
PLAIN = resolve_precision("float32")


class Deployment:
    """A tiny model with two adapters, with windows, or with states."""

    def __init__(self, folder: Path, family: str) -> None:
        if family == "qwen3_5_text":
            model = write_hybrid("qwen3.5", folder)
        else:
            window = {"sliding_window": 20} if family == "mistral" else {}
            model = write_tiny_model(folder, family, head_dim=16, initializer_range=0.2, **window)
        names = ("a", "b") if family in ("llama", "qwen3") else ()
        for seed, name in enumerate(names):
            write_adapter(folder / name, model, seed=seed)
        self.checkpoint = open_checkpoint(str(folder), CONTEXT)
        self.adapters = open_adapters({name: str(folder / name) for name in names})
        self.groups, self.layout = plan_pages(self.checkpoint, self.checkpoint.kv_layout(BLOCK, "float32"), CONTEXT)

    def engine(self, num_blocks: int, num_places: int = 0, **numbers: int) -> Engine:
        size = CacheSize(self.layout, num_blocks, CONTEXT, num_places)
        backend = on_cpu(BackendSpec(self.checkpoint, PLAIN, size, adapters=self.adapters))
        config = EngineConfig(BLOCK, max_model_len=CONTEXT, groups=self.groups, **numbers)
        return Engine(backend.model, backend.cache, config)

    def sequence(self, name: str, prompt: list[int], sampling: SamplingParams, adapter: int) -> Sequence:
        chain = Chain.of("kv", adapter=self.adapters[adapter].digest if adapter >= 0 else "")
        tokens = np.array(prompt, np.uint32)
        return Sequence(
            name, tokens, len(prompt), sampling, chain, eos_ids=(2,), max_model_len=CONTEXT, adapter=adapter
        )


def random_sampling(rng: random.Random) -> SamplingParams:
    base = SamplingParams(max_tokens=rng.choice([1, 8, 25]), temperature=0.0, ignore_eos=rng.random() < 0.5)
    drawn = replace(base, temperature=0.9, seed=rng.randrange(1, 1 << 40), n=rng.randint(1, 4))
    return rng.choice(
        [
            base,
            drawn,
            replace(drawn, repetition_penalty=1.3, bad_words=((5, 6), (7,)), logprobs=2),
            replace(base, prompt_logprobs=1, min_tokens=1),
            replace(base, beam_search=BeamSearch(), n=3),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen3_5_text"])
def test_whatever_meets_in_an_engine_changes_no_answer(family: str, tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, family)
    for seed in range(12):
        rng = random.Random(seed)
        shared = [rng.randrange(3, 320) for _ in range(60)]
        requests = {
            f"r{i}": (
                shared[: rng.randint(1, 60)] + [rng.randrange(3, 320) for _ in range(rng.choice([0, 3, 30]))],
                random_sampling(rng),
                rng.randrange(-1, len(deployment.adapters)),
            )
            for i in range(6)
        }
        expected: dict[str, list[int]] = {}
        for name, request in requests.items():
            alone = deployment.engine(100)
            alone.add(deployment.sequence(name, *request))
            expected |= answers(drained(alone))
        engine = deployment.engine(
            rng.randint(18, 30) * (3 if deployment.groups.has_states else 1),  # pages of 4 groups
            rng.choice([0, 6, 60]),
            chunk_tokens=rng.choice([0, 7, 32]),
            max_sequences=rng.choice([2, 8]),
            speculative_tokens=0 if deployment.groups.has_states else rng.choice([0, 4]),
        )
        for name, request in requests.items():
            engine.add(deployment.sequence(name, *request))
        assert answers(drained(engine)) == expected, f"seed {seed}"
        assert engine.block_pool.num_in_use == 0, f"seed {seed}"


def drained(engine: Engine) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
        engine.block_pool.check()
    assert not engine.take_ended()
    return outputs
