"""Families that are Llama's but for settings, or for the order in which weights are stored: over ranks, in stages, with
int8 weights and with adapters, as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from greedy import greedy
from tiny_lora import write_adapter
from tiny_model import write_tiny_model
from transformers import AutoConfig

from mooncake.checkpoint import open_checkpoint
from mooncake.errors import ModelError
from mooncake.in_process.llm import LLM
from mooncake.kernels.reference import quantise_rows
from mooncake.model.load import load_model
from mooncake.precision import FLOAT32
from mooncake.sampling_params import SamplingParams

GROWING = {
    **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 16},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
}
MEMBERS: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "seed_oss": {},
    "ernie4_5": {},
    "helium": {"hidden_size": 64},
    "ministral3": {"rope_parameters": GROWING},
}
SHAPE = {"num_hidden_layers": 3, "head_dim": 16, "initializer_range": 0.2}
NEW = 12
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
PROMPT = np.random.default_rng(5).integers(3, 320, 40).tolist()


@pytest.fixture(params=MEMBERS)
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return write_tiny_model(tmp_path, request.param, **SHAPE, **MEMBERS[request.param])


def answer(folder: Path, adapter: str = "", **settings: Any) -> list[int]:
    with LLM(str(folder), kv_gb=0.01, block_tokens=8, chunk_tokens=16, threads=1, **settings) as llm:
        [found] = llm.generate([PROMPT], GREEDY, adapter=adapter, use_tqdm=False)
    return list(found.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"])
def test_two_processes_give_the_tokens_of_transformers(theirs: Any, setting: str, tmp_path: Path) -> None:
    found = answer(tmp_path, **{setting: 2})
    assert found == greedy(theirs, PROMPT, NEW, found)


def test_int8_weights_are_those_of_the_model(theirs: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        for matrix in (parameter for parameter in theirs.parameters() if parameter.ndim == 2):
            codes, scales = quantise_rows(matrix)
            matrix.copy_(codes * scales[:, None])
    found = answer(tmp_path, weights="int8")
    assert found == greedy(theirs, PROMPT, NEW, found)


def test_an_adapter_answers_as_if_it_were_merged(theirs: Any, tmp_path: Path) -> None:
    merged = write_adapter(tmp_path / "adapter", theirs)
    found = answer(tmp_path, "own", adapters={"own": str(tmp_path / "adapter")})
    assert found == greedy(merged, PROMPT, NEW, found) != greedy(theirs, PROMPT, NEW)


@pytest.mark.parametrize("family", ["helium", "internlm3", "smollm3", "ernie4_5"])
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, family, **SHAPE, **MEMBERS.get(family, {}))
    file = tmp_path / "config.json"
    tree = json.loads(file.read_text())
    file.write_text(json.dumps({key: tree[key] for key in tree.keys() - {"rms_norm_eps", "rope_parameters"}}))
    left_out, ours = AutoConfig.for_model(family), open_checkpoint(str(tmp_path)).config
    assert (ours.rms_eps, ours.rope_theta) == (left_out.rms_norm_eps, left_out.rope_parameters["rope_theta"])


def test_layers_without_rotation_are_not_blended(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "smollm3", **SHAPE)
    assert open_checkpoint(str(tmp_path)).config.still_layers == ()
    write_tiny_model(tmp_path, "smollm3", **(SHAPE | {"num_hidden_layers": 4}))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config.still_layers == (3,)
    with pytest.raises(ModelError, match="chunks are blended for"):
        load_model(checkpoint, FLOAT32, can_blend=True)
