"""Quantised models over tensor parallel ranks: codes are cut like the weights they stand for, and the tokens are those
of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from greedy import NEW_TOKENS
from published import Published
from quantised import Format, awq, int8, packed

from mooncake import LLM, SamplingParams
from mooncake.errors import ModelError
from mooncake.kernels.grouped import GroupedCodes
from mooncake.kernels.reference import Codes, quantise_rows
from mooncake.model.layers import WeightsOnDemand
from mooncake.model.parallel.shards import shard_weights
from mooncake.model.reading.weights import load_weights

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPT = [5, 9, 200, 31, 77, 8, 150, 12]


def tokens_of(folder: Path, num_ranks: int, weights: str) -> tuple[int, ...]:
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(str(folder), kv_gb=0.01, block_tokens=16, weights=weights, tensor_parallel_size=num_ranks) as llm:
        return tuple(llm.generate([PROMPT], sampling, use_tqdm=False)[0].token_ids)


FORMS = {"4 bits in groups of 16": lambda: packed(4, 16), "AWQ": lambda: awq(32), "int8": int8}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_ranks_of_a_quantised_model_give_the_tokens_of_one_process(form: Callable[[], Format], tmp_path: Path) -> None:
    published = Published(tmp_path, form())
    found = tokens_of(tmp_path, 1, "auto")
    assert found == published.greedy(PROMPT, found)
    assert len(set(found)) >= 4, "a model that repeats itself proves nothing"
    assert tokens_of(tmp_path, 2, "auto") == found


@pytest.mark.slow
@pytest.mark.parametrize("form", [int8, lambda: packed(4, 16)], ids=["int8", "to int8"])
def test_int8_weights_over_ranks_are_those_of_one_process(form: Callable[[], Format], tmp_path: Path) -> None:
    Published(tmp_path, form())
    assert tokens_of(tmp_path, 2, "int8") == tokens_of(tmp_path, 1, "int8")


@pytest.mark.parametrize("group", [16, 32])
def test_groups_stay_codes_unless_a_cut_goes_through_one(group: int, tmp_path: Path) -> None:
    """Of 96 inputs of a down projection each of two ranks has 48: one and a half groups of 32."""
    checkpoint = Published(tmp_path, packed(4, group)).checkpoint
    weights = load_weights(checkpoint, "float32", keeps_groups="exact")
    parts = [shard_weights(weights, checkpoint.config, rank, 2) for rank in range(2)]
    for name in (name for name in weights if name.endswith("_proj.weight")):
        for part in parts:
            assert isinstance(part, WeightsOnDemand)
            codes = part.codes(name)
            if group == 32 and "down_proj" in name:
                assert codes is None
            else:
                assert isinstance(codes, GroupedCodes) and torch.equal(codes.weights(), part[name])


def test_int8_codes_cut_by_columns_have_the_scales_of_whole_rows(tmp_path: Path) -> None:
    checkpoint = Published(tmp_path, packed(4, 16)).checkpoint
    weights = load_weights(checkpoint, "float32")
    parts = [shard_weights(weights, checkpoint.config, rank, 2, "int8") for rank in range(2)]
    for kind in ("self_attn.o_proj", "mlp.down_proj"):
        name = f"model.layers.0.{kind}.weight"
        values, scales = quantise_rows(weights[name])
        codes = [part.codes(name) for part in parts if isinstance(part, WeightsOnDemand)]
        assert all(isinstance(each, Codes) and torch.equal(each.scales, scales) for each in codes)
        assert torch.equal(torch.cat([each.values for each in codes if isinstance(each, Codes)], 1), values)


def test_w8a8_is_for_one_process(tmp_path: Path) -> None:
    Published(tmp_path, int8())
    with pytest.raises(ModelError, match="no W8A8: each rank would quantise its part of the activations alone"):
        LLM(str(tmp_path), weights="w8a8", tensor_parallel_size=2)
