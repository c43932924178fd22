"""Models whose layers partly keep a state, with weights as codes: ours of 8 bits, or those of a quantised file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from converted import Kind
from converted_hybrid import SIZES, ConvertedHybrid
from greedy import NEW_TOKENS
from published import Published
from quantised import packed
from tiny_hybrid import STATES, answers, hybrid_engine, prompt_of, run, sequence, their_answers, write_hybrid

from mooncake import LLM
from mooncake.gguf.file import GGUFFile
from mooncake.kernels import choose_kernels, reference
from mooncake.kernels.grouped import GroupedCodes
from mooncake.kernels.reference import quantise_rows
from mooncake.model.families.registry import decoder_of
from mooncake.model.layers import WeightsOnDemand
from mooncake.model.reading.weights import load_weights
from mooncake.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("own_weights_cache")

EXACT = [name for name in SIZES if not name.startswith("falcon")]  # whose factors would be rounded a second time
ROUTERS = tuple(
    f"{name}.weight"
    for name in ("mlp.gate", "feed_forward.gate", "mixer.gate", "moe.router", "router.layer", "shared_expert_gate")
)


def logprobs(path: Path, **settings: Any) -> torch.Tensor:
    """Of the tokens of a prompt."""
    engine = hybrid_engine(path, **settings)
    engine.add(sequence("r", prompt_of(70), 1, prompt_logprobs=0))
    while engine.has_work:
        for output in engine.step():
            assert output.prompt_logprobs is not None
            return torch.tensor([token.logprob for token in output.prompt_logprobs])
    raise AssertionError("no answer came")


@pytest.mark.parametrize("name", SIZES)
def test_int8_weights_are_those_of_transformers_rounded_row_by_row(name: str, tmp_path: Path) -> None:
    """But routers, convolutions, and what is no matrix."""
    theirs = write_hybrid(name, tmp_path)
    plain = answers(tmp_path)
    with torch.no_grad():
        for key, weight in theirs.named_parameters():
            if weight.ndim > 1 and "conv1d." not in key and "conv.conv." not in key and not key.endswith(ROUTERS):
                codes, scales = quantise_rows(weight)
                weight.copy_(codes * scales[..., None])
    found = answers(tmp_path, coding="int8")
    assert found == their_answers(theirs, found) != plain


@pytest.mark.sweep(1)
@pytest.mark.parametrize("settings", [{"coding": "w8a8"}, {"keeps_groups": "a8"}], ids=["w8a8", "stored_a8"])
@pytest.mark.parametrize("name", SIZES)
def test_activations_meet_codes_as_defined(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    path = ConvertedHybrid(name, tmp_path, Kind.Q8_0).path
    found = logprobs(path, **settings)
    defined, plain = logprobs(path, kernels=reference, **settings), logprobs(path)
    assert 0 < (found - plain).abs().mean() < plain.std() / 2
    assert (found - defined).abs().mean() < (found - plain).abs().mean() / 2


# Codes of GGUF files


@pytest.mark.slow
@pytest.mark.parametrize("keeps_groups", ["exact", ""], ids=["codes", "values"])
@pytest.mark.parametrize("name", EXACT)
def test_a_quantised_file_gives_the_tokens_of_its_values(name: str, keeps_groups: Any, tmp_path: Path) -> None:
    converted = ConvertedHybrid(name, tmp_path, Kind.Q8_0)
    found = answers(converted.path, keeps_groups=keeps_groups)
    assert found == their_answers(converted.theirs, found)


def test_matrices_that_do_not_join_are_multiplied_side_by_side(tmp_path: Path) -> None:
    """As files have more bits for some: here all values are float16, and experts are in Q4_1."""
    converted = Mixed("qwen3.5-moe", tmp_path, Kind.Q8_0, Kind.Q4_1)
    kinds = {tensor.kind.name for tensor in GGUFFile(converted.path).tensors.values()}
    assert kinds == {"F32", "F16", "Q8_0", "Q4_1"}
    found = answers(converted.path, keeps_groups="exact")
    assert found == their_answers(converted.theirs, found)


class Mixed(ConvertedHybrid):
    def _kind(self, name: str, shape: tuple[int, ...]) -> Kind:
        return Kind.F16 if name.endswith(("v_proj.weight", "in_proj_z.weight")) else super()._kind(name, shape)


@pytest.mark.parametrize("name", SIZES)
def test_what_is_codes_in_the_file_stays_codes(name: str, tmp_path: Path) -> None:
    converted = ConvertedHybrid(name, tmp_path, Kind.Q8_0)
    checkpoint = converted.checkpoint
    stored = load_weights(checkpoint, "float32", keeps_groups="exact")
    assert isinstance(stored, WeightsOnDemand)
    read: list[str] = []

    def make(key: str) -> torch.Tensor:
        read.append(key)
        return stored[key]

    config = checkpoint.config
    family = decoder_of(config)
    assert family is not None
    family(config, WeightsOnDemand(stored, make, stored.codes, stored.experts), 64, choose_kernels())
    wide = [key for key in read if is_coded(stored, key)]
    assert [key for key in wide if not key.endswith(ROUTERS)] == [], "these became values"
    of_codes = sum(stored[key].numel() for key in stored if is_coded(stored, key))
    assert checkpoint.groups[0] == of_codes > sum(stored[key].numel() for key in stored) / 2


def is_coded(stored: WeightsOnDemand, key: str) -> bool:
    return isinstance(stored.codes(key), GroupedCodes) or stored.experts(key) is not None


def test_a_quantised_folder_gives_the_tokens_of_its_values(tmp_path: Path) -> None:
    sizes = STATES | {"hidden_size": 64, "linear_value_head_dim": 32}
    published = Published(tmp_path, packed(4), "qwen3_5_text", **sizes)
    prompt = prompt_of(40)
    expected = list(published.greedy(prompt))
    for weights in ("stored", "plain"):
        with LLM(str(tmp_path), dtype="float32", weights=weights, kv_gb=0.02, block_tokens=8, threads=1) as llm:
            sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
            [answer] = llm.generate([prompt], sampling)
            assert answer.token_ids == expected


@pytest.mark.parametrize("weights", ["int8", "w8a8"])
def test_an_llm_with_int8_weights_answers_as_the_engine_built_with_them(weights: str, tmp_path: Path) -> None:
    write_hybrid("lfm2", tmp_path)
    with LLM(str(tmp_path), dtype="float32", weights=weights, kv_gb=0.02, block_tokens=8, threads=1) as llm:
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        [answer] = llm.generate([prompt_of(40)], sampling)
    engine = hybrid_engine(tmp_path, coding=weights)
    engine.add(sequence("r", prompt_of(40)))
    assert answer.token_ids == run(engine)["r"]
