"""Our engine as the subject of a benchmark: one process, sequences in, tokens out, every step timed.

It uses only ``Engine``, as a node does: no text, no network, no hand-off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Prompts
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from mooncake.checkpoint import Checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import CausalModel, EngineConfig, HasVocabulary
from mooncake.engine.decoding.sampler import Sampler
from mooncake.engine.engine import Engine
from mooncake.engine.sequence import Sequence
from mooncake.hashing import Chain, kv_fingerprint
from mooncake.model import load_model
from mooncake.model.batch import ForwardBatch, LayerHook
from mooncake.page_groups import as_one_group
from mooncake.precision import Precision
from mooncake.prefault import prefault_in_background
from mooncake.sampling import SamplingParams

CHOICES = 20  # repetitions of ``choosing_s``


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step: its numbers of sequences and tokens, and its times."""

    num_sequences: int
    num_tokens: int
    step_s: float
    forward_s: float  # in the model; the rest is scheduling, batch building, sampling and bookkeeping

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_sequences


class TimedModel:
    """A model whose forward passes are timed."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.num_sequences = self.num_tokens = 0  # of the last batch
        self.forward_s = 0.0

    @property
    def config(self) -> HasVocabulary:
        return self._model.config

    def forward(self, batch: ForwardBatch, cache: torch.Tensor, hook: LayerHook) -> torch.Tensor:
        begin = time.perf_counter()
        logits = self._model.forward(batch, cache, hook)
        self.forward_s = time.perf_counter() - begin
        self.num_sequences, self.num_tokens = batch.num_sequences, batch.tokens.shape[0]
        return logits


class OwnEngine:
    """Our engine. Raises ModelError when the model cannot be loaded."""

    has_prefix_cache = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        precision: Precision,
        threads: int,
        config: EngineConfig,
        kv_gb: float,
        name: str = "mooncake",
    ) -> None:
        self.name = name
        torch.set_num_threads(threads)
        layout = checkpoint.kv_layout(config.block_tokens, precision.kv_dtype)
        self._chain = Chain.of(kv_fingerprint(checkpoint.digest, layout))
        self._model = TimedModel(load_model(checkpoint, precision.weights, config.max_model_len))
        self.cache = KVCache(layout, int(kv_gb * 1e9) // layout.block_bytes)
        prefault_in_background(self.cache.memory)
        self.core = Engine(self._model, self.cache, replace(config, groups=as_one_group(checkpoint.config, layout)))
        self._sampler = Sampler()
        self._num_requests = 0
        self.steps: list[StepTime] = []  # of the last run

    def run(self, prompts: Prompts[Prompts[int]], new: int) -> float:
        """Seconds to generate exactly ``new`` greedy tokens after each prompt, all submitted at once."""
        sequences = [self.sequence(prompt, new) for prompt in prompts]
        self.steps = []
        begin = time.perf_counter()
        for sequence in sequences:
            self.core.add(sequence)
        while self.core.has_work:
            self._step()
        return time.perf_counter() - begin

    def sequence(self, prompt: Prompts[int], new: int, temperature: float = 0.0, top_p: float = 1.0) -> Sequence:
        self._num_requests += 1
        return Sequence(
            f"bench-{self._num_requests}",
            np.array(prompt, np.uint32),
            len(prompt),
            SamplingParams(max_tokens=new, temperature=temperature, top_p=top_p, ignore_eos=True),
            self._chain,
            eos_ids=(),
            max_model_len=self.core.config.max_model_len,
        )

    def decode_in_turns(
        self, prompt: Prompts[int], rounds: int, other: Callable[[], float], pause_s: float
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """In each round, call ``other`` and, ``pause_s`` later, time the faster of two decode steps of one sequence.
        Returns the times of the steps, then the results of ``other``."""
        self.core.add(self.sequence(prompt, 2 + 2 * rounds))
        self.steps = []
        while not self.decode_steps(1):  # the prompt and a warm-up step
            self._step()
        steps, others = [], []
        for _ in range(rounds):
            others.append(other())
            time.sleep(pause_s)
            steps.append(min(self._step(), self._step()))
        return tuple(steps), tuple(others)

    def _step(self) -> float:
        begin = time.perf_counter()
        self.core.step()
        step_s = time.perf_counter() - begin
        model = self._model
        self.steps.append(StepTime(model.num_sequences, model.num_tokens, step_s, model.forward_s))
        return step_s

    def decode_steps(self, batch: int) -> list[StepTime]:
        """The steps of the last run in which ``batch`` sequences were decoded and nothing else was computed."""
        return [step for step in self.steps if step.is_decode and step.num_sequences == batch]

    def choosing_s(self, batch: int) -> float:
        """Seconds to find the most likely token of each of ``batch`` rows of logits: the only part of a greedy step
        outside the model that is not Python."""
        logits = torch.randn(batch, self._model.config.vocab_size)
        sequences = [self.sequence([1], 1) for _ in range(batch)]
        taken: list[float] = []
        for _ in range(CHOICES):
            begin = time.perf_counter()
            self._sampler.sample(logits, sequences)
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)

    def drawing(self, logits: torch.Tensor, temperature: float, top_p: float) -> Callable[[], object]:
        """What draws a token from each row of ``logits`` [B, V], as a step does behind the model."""
        sequences = [self.sequence([1], 1, temperature, top_p) for _ in logits]
        return partial(self._sampler.sample, logits, sequences)


def median_outside_s(steps: list[StepTime]) -> float:
    """Median time of a step outside the model's forward pass."""
    return statistics.median(step.step_s - step.forward_s for step in steps)
