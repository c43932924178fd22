"""int8 weights of the families outside Llama's: the tokens of transformers, whose matrices are rounded alike."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_alibi import ALIBI
from tiny_families import FAMILIES, VOCAB, Published
from tiny_gemma4 import GEMMA3N, GEMMA4
from tiny_members import MEMBERS
from tiny_mixtures import answers
from tiny_model import write_tokenizer

from mooncake import LLM
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ModelError
from mooncake.kernels import reference
from mooncake.kernels.reference import quantise_rows
from mooncake.model.batch import ForwardBatch, NoHook
from mooncake.model.decoder import Decoder
from mooncake.model.llama import CausalLM
from mooncake.model.load import load_model
from mooncake.precision import WeightFormat

PROMPTS = [np.random.default_rng(4).integers(2, VOCAB, length).tolist() for length in (40, 1, 12)]
ALL = FAMILIES | MEMBERS | ALIBI | GEMMA4 | GEMMA3N
QUICK = "gpt2", "gpt-neox", "falcon-40b", "mixtral", "gpt-oss", "deepseek-v3", "gemma3", "llama-4", "mixture", "3n"
STAYS = re.compile(
    r"_norm|router|\bgate\.weight|shared_expert_gate|wpe|embed_positions|kv_b_proj|_coefs|embed_tokens_per_layer"
)
"""Names of matrices that int8 weights leave as they are."""


def rounded(folder: Published) -> None:
    turned = tuple(name for name, module in folder.theirs.named_modules() if type(module).__name__ == "Conv1D")
    with torch.no_grad():
        for name, weight in folder.theirs.named_parameters():
            if weight.ndim < 2 or STAYS.search(name) or name.endswith("_bias"):
                continue
            has_inputs_first = name.startswith(turned) or is_of_experts_by_inputs(folder, name)
            rows = weight.mT if has_inputs_first else weight
            codes, scales = quantise_rows(rows)
            rows.copy_(codes * scales[..., None])


def is_of_experts_by_inputs(folder: Published, name: str) -> bool:
    return folder.theirs.config.model_type in ("gpt_oss", "llama4_text") and ".experts." in name


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
)
def test_int8_weights_give_the_tokens_of_rounded_matrices(family: str, tmp_path: Path) -> None:
    folder = Published(family, tmp_path, ALL)
    model, plain = (load_model(folder.checkpoint, WeightFormat("float32", coding=coding)) for coding in ("int8", ""))
    if isinstance(model, CausalLM):
        pytest.skip("of the Llama family, which has tests of its own")
    assert not torch.equal(logits(model, folder), logits(plain, folder))
    rounded(folder)
    found = answers(model, KVCache(folder.checkpoint.kv_layout(16, "float32"), 60), PROMPTS)
    assert found == folder.greedy_all(PROMPTS, found)


@pytest.mark.parametrize("family", ["gpt-neox", "deepseek-v3", "gpt-oss", "gemma3", "mixture", "llama-4"])
def test_activations_of_w8a8_meet_codes_as_defined(family: str, tmp_path: Path) -> None:
    folder = Published(family, tmp_path, ALL)
    plain, found, defined = (
        logits(load_model(folder.checkpoint, WeightFormat("float32", coding=coding), kernels=kernels), folder)
        for coding, kernels in (("", None), ("w8a8", None), ("w8a8", reference))
    )
    assert 0 < (found - plain).abs().mean() < plain.std() / 2
    assert (found - defined).abs().mean() < (found - plain).abs().mean() / 2


def logits(model: Decoder, folder: Published) -> torch.Tensor:
    """Of all tokens of a prompt."""
    tokens = torch.tensor(PROMPTS[0])
    cache = KVCache(folder.checkpoint.kv_layout(16, "float32"), 8)
    return model.forward(ForwardBatch.of_prompt(tokens, 16, torch.arange(len(tokens))), cache.tensor, NoHook())


def test_tensor_parallel_ranks_of_other_families_refuse_them(tmp_path: Path) -> None:
    Published("mixtral", tmp_path, ALL)
    write_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="tensor parallel ranks with int8 weights are for the Llama family"):
        LLM(str(tmp_path), weights="int8", tensor_parallel_size=2, kv_gb=0.01)
