"""What the metadata of a GGUF file say of a model of each architecture, and what is said when they are wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_gguf import add_metadata, finish

from mooncake.errors import ModelError
from mooncake.gguf.config import read_gguf_config
from mooncake.gguf.file import GGUFFile
from mooncake.gguf.forms import Source
from mooncake.gguf.sources import listed_number
from mooncake.model_config import LatentAttention, ModelConfig

RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
BASE: dict[str, Any] = {
    "block_count": 8,
    "context_length": 4096,
    "embedding_length": 96,
    "feed_forward_length": 160,
    "attention.head_count": 6,
    "attention.head_count_kv": 2,
}
EXPERTS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 48}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 512}
METADATA: dict[str, dict[str, Any]] = {
    "llama": {RMS: 1e-5},
    "mistral3": {RMS: 1e-5},
    "phi3": {RMS: 1e-5, "attention.sliding_window": 2047, "rope.scaling.original_context_length": 4096},
    "gemma2": {RMS: 1e-6, "attention.key_length": 32, "attention.sliding_window": 512},
    "gemma3": {RMS: 1e-6, "attention.key_length": 32, "attention.sliding_window": 512},
    "gemma4": {
        **{RMS: 1e-6, "attention.key_length": 64, "attention.key_length_swa": 32, "attention.sliding_window": 512},
        **{"attention.shared_kv_layers": 2, "feed_forward_length": [160] * 6 + [320] * 2},
    },
    "qwen2moe": {RMS: 1e-6, **EXPERTS, "expert_shared_feed_forward_length": 112},
    "qwen3moe": {RMS: 1e-6, **EXPERTS},
    "qwen3vlmoe": {RMS: 1e-6, **EXPERTS},
    "qwen2vl": {RMS: 1e-6},
    "gpt-oss": {RMS: 1e-5, **EXPERTS, **YARN, "attention.sliding_window": 128},
    "deepseek2": {
        **{RMS: 1e-6, **EXPERTS, "attention.head_count": 6, "attention.head_count_kv": 1, "rope.dimension_count": 8},
        **{"attention.kv_lora_rank": 24, "attention.key_length": 32, "attention.value_length": 24},
        **{"attention.key_length_mla": 20, "attention.value_length_mla": 10, "leading_dense_block_count": 1},
    },
    "apertus": {RMS: 1e-5},
    "granite": {RMS: 1e-5, "logit_scale": 8.0},
    "olmo2": {RMS: 1e-6},
    "command-r": {LAYER: 1e-5, "logit_scale": 0.0625},
    "cohere2": {LAYER: 1e-5, "logit_scale": 0.25, "attention.sliding_window": 512},
    "glm4": {RMS: 1e-5, "rope.dimension_count": 8},
    "starcoder2": {LAYER: 1e-5},
    "falcon": {LAYER: 1e-5},
    "gpt2": {LAYER: 1e-5},
    "bloom": {LAYER: 1e-5},
    "mpt": {LAYER: 1e-5, "attention.max_alibi_bias": 16.0, "attention.clamp_kqv": 6.0},
}


def write(
    path: Path, architecture: str, changes: Mapping[str, Any] = {}, tensors: Mapping[str, np.ndarray] = {}
) -> GGUFFile:
    """A file of metadata, a table of 97 tokens and these ``tensors``; None omits a key."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (BASE | METADATA[architecture] | dict(changes)).items():
        name = key if key.startswith(("tokenizer.", "split.", "xielu.")) else f"{architecture}.{key}"
        add_metadata(writer, name, value)
    for name, values in ({"token_embd.weight": np.zeros((97, 96), np.float32)} | dict(tensors)).items():
        writer.add_tensor(name, values)
    finish(writer)
    return GGUFFile(path)


def config(path: Path, architecture: str, **changes: Any) -> ModelConfig:
    return read_gguf_config(write(path / "a.gguf", architecture, changes))


FAMILIES = {
    **{"mistral3": "ministral3", "apertus": "apertus", "qwen3vlmoe": "qwen3_moe", "qwen2vl": "qwen2"},
    **{"llama": "llama", "phi3": "phi3", "gemma2": "gemma2", "gemma3": "gemma3_text", "qwen2moe": "qwen2_moe"},
    "gemma4": "gemma4_text",
    **{"qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "granite": "granite", "olmo2": "olmo2", "glm4": "glm4"},
    **{"command-r": "cohere", "cohere2": "cohere2", "starcoder2": "starcoder2", "falcon": "falcon", "gpt2": "gpt2"},
    **{"bloom": "bloom", "mpt": "mpt"},
}


@pytest.mark.parametrize(("architecture", "family"), FAMILIES.items())
def test_every_architecture_has_its_family(tmp_path: Path, architecture: str, family: str) -> None:
    found = config(tmp_path, architecture)
    assert found.architecture == family
    assert (found.num_layers, found.hidden_size, found.vocab_size, found.tie_embeddings) == (8, 96, 97, True)


def test_architectures_with_experts_are_other_families(tmp_path: Path) -> None:
    assert config(tmp_path, "llama", **EXPERTS).architecture == "mixtral"
    assert config(tmp_path, "granite", **EXPERTS).architecture == "granitemoe"


LATE = {
    ("gemma2", 2): [512, 0, 512, 0, 512, 0, 512, 0],
    ("gemma3", 6): [512, 512, 512, 512, 512, 0, 512, 512],
    ("gemma4", 6): [512, 512, 512, 512, 512, 0, 512, 512],
    ("gpt-oss", 2): [128, 0, 128, 0, 128, 0, 128, 0],
    ("cohere2", 4): [512, 512, 512, 0, 512, 512, 512, 0],
}


@pytest.mark.parametrize(("architecture", "every"), LATE)
def test_windows_come_in_the_turn_of_the_architecture_or_of_the_file(
    tmp_path: Path, architecture: str, every: int
) -> None:
    usual = LATE[architecture, every]
    key = "attention.sliding_window_pattern"
    assert list(config(tmp_path, architecture).layer_windows) == usual
    assert list(config(tmp_path, architecture, **{key: every}).layer_windows) == usual
    window = max(usual)
    flags = [True, True, False, True, False, False, True, True]
    assert config(tmp_path, architecture, **{key: flags}).layer_windows == tuple(window * flag for flag in flags)


@pytest.mark.parametrize("table", [[1.0, 2.0], [1e30, 1.0], [1.0, 1.0, 5.0]], ids=["scaled", "slow", "unlike"])
def test_gemma4_turns_the_first_pairs_or_none_of_its_global_layers(tmp_path: Path, table: list[float]) -> None:
    divisors = {"rope_freqs.weight": np.array([1.0] * 8 + [1e30] * 24, np.float32)}
    found = read_gguf_config(write(tmp_path / "a.gguf", "gemma4", tensors=divisors))
    assert found.rope_scaling == {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 1.0}
    assert config(tmp_path, "gemma4").rope_scaling is None
    divisors = {"rope_freqs.weight": np.array(table, np.float32)}
    with pytest.raises(ModelError, match="a table that is not Gemma 4's"):
        read_gguf_config(write(tmp_path / "a.gguf", "gemma4", tensors=divisors))


def test_command_r7b_rotates_where_it_has_windows(tmp_path: Path) -> None:
    assert config(tmp_path, "cohere2").still_layers == (3, 7)


def test_olmo3_is_an_olmo2_with_windows(tmp_path: Path) -> None:
    assert config(tmp_path, "olmo2").architecture == "olmo2"
    found = config(tmp_path, "olmo2", **YARN, **{"attention.sliding_window": 64})
    assert (found.architecture, found.layer_windows[:4]) == ("olmo3", (64, 64, 64, 0))
    assert found.local_rope_theta == 10_000.0
    sharp = config(tmp_path, "olmo2", **YARN, **{"attention.sliding_window": 64, "rope.scaling.yarn_attn_factor": 1.5})
    assert sharp.rope_scaling is not None and sharp.rope_scaling["attention_factor"] == 1.5


def test_phi3_has_a_window_only_within_its_context(tmp_path: Path) -> None:
    assert config(tmp_path, "phi3").sliding_window == 2047
    assert config(tmp_path, "phi3", **{"attention.sliding_window": 262144}).sliding_window is None
    assert config(tmp_path, "phi3", **{"attention.sliding_window": 0}).sliding_window is None


@pytest.mark.parametrize(
    ("architecture", "layers", "per_query"), [("gemma2", 26, 32), ("gemma2", 46, 16), ("gemma3", 62, 16)]
)
def test_gemma_scales_scores_by_the_size_of_the_model(
    tmp_path: Path, architecture: str, layers: int, per_query: int
) -> None:
    """Files do not say it: in the 27b models a head counts as hidden size / heads, in the others as wide as it is."""
    assert config(tmp_path, architecture, block_count=layers).attention_scale == pytest.approx(per_query**-0.5)
    assert config(tmp_path, architecture, **{"attention.scale": 0.25}).attention_scale == 0.25


def test_gemma2_has_its_caps_unless_the_file_has_others(tmp_path: Path) -> None:
    assert (config(tmp_path, "gemma2").score_cap, config(tmp_path, "gemma2").logit_cap) == (50.0, 30.0)
    found = config(tmp_path, "gemma2", attn_logit_softcapping=0.0, final_logit_softcapping=2.0)
    assert (found.score_cap, found.logit_cap) == (0.0, 2.0)


def test_gpt_oss_does_not_round_the_borders_of_yarn(tmp_path: Path) -> None:
    scaling = config(tmp_path, "gpt-oss").rope_scaling
    assert scaling is not None and scaling["truncate"] is False and scaling["factor"] == 8.0
    assert config(tmp_path, "gpt-oss").max_model_len == 4096


def test_counts_may_be_given_for_each_layer(tmp_path: Path) -> None:
    key = "attention.head_count_kv"
    assert config(tmp_path, "granite", **{key: [2] * 8}).num_kv_heads == 2
    for wrong in ([2, 2, 2, 1], [True], ["2"]):
        with pytest.raises(ModelError, match="head_count_kv must be the same integer for all layers"):
            config(tmp_path, "granite", **{key: wrong})


@pytest.mark.parametrize("numbers", [None, 0.5, [0.5], [1, 2], ["0.5", "0.5"]])
def test_an_activation_that_is_missing_is_named_with_its_layer(tmp_path: Path, numbers: Any) -> None:
    file = write(tmp_path / "a.gguf", "apertus", {"xielu.beta": numbers} if numbers else {})
    with pytest.raises(ModelError, match=r"xielu\.beta must have a number for each layer, and lacks that of 1$"):
        listed_number(file, Source(("xielu.beta",), "listed", layer=1))


def test_queries_of_ministral3_grow_where_its_file_says_so(tmp_path: Path) -> None:
    """Newer converters call older models of Mistral's by its name, too."""
    growing = YARN | {"attention.temperature_scale": 0.25, "rope.scaling.yarn_log_multiplier": 0.5}
    found = config(tmp_path, "mistral3", **growing)
    assert (found.architecture, found.query_growth, found.query_span) == ("ministral3", 0.25, 512)
    assert found.rope_scaling is not None and found.max_model_len == 4096
    expected = (0.1 * math.log(8) + 1) / (0.05 * math.log(8) + 1)
    assert found.rope_scaling["attention_factor"] == pytest.approx(expected, rel=1e-12)
    plain = config(tmp_path, "mistral3")
    assert (plain.rope_scaling, plain.query_growth, plain.query_span) == (None, 0.0, 0)


def test_deepseek_scores_experts_as_its_file_says_or_by_their_bias(tmp_path: Path) -> None:
    """The oldest files say nothing. In V3 and what is built like it, a bias takes part in the choice of experts."""
    assert config(tmp_path, "deepseek2").architecture == "deepseek_v2"
    assert config(tmp_path, "deepseek2", expert_gating_func=1).architecture == "deepseek_v2"
    assert config(tmp_path, "deepseek2", expert_gating_func=2).architecture == "deepseek_v3"
    biased = write(tmp_path / "b.gguf", "deepseek2", tensors={"blk.1.exp_probs_b.bias": np.zeros(6, np.float32)})
    assert read_gguf_config(biased).architecture == "deepseek_v3"


@pytest.mark.parametrize(
    ("experts", "said", "expected"),
    [(256, (), (8, 4)), (160, (), (8, 3)), (256, (4, 2), (4, 2)), (256, (1, 1), (1, 1)), (64, (), (1, 1))],
)
def test_groups_of_experts_are_those_of_the_published_model_unless_the_file_says_others(
    tmp_path: Path, experts: int, said: tuple[int, ...], expected: tuple[int, int]
) -> None:
    groups = dict(zip(("expert_group_count", "expert_group_used_count"), said, strict=False))
    routing = config(tmp_path, "deepseek2", expert_count=experts, expert_gating_func=2, **groups).routing
    assert routing is not None and (routing.num_groups, routing.top_groups) == expected


def test_latent_attention_has_its_own_head_sizes_in_files_of_either_age(tmp_path: Path) -> None:
    newer = config(tmp_path, "deepseek2", **{"attention.q_lora_rank": 12})
    older = {
        **{"attention.key_length": 20, "attention.value_length": 10, "attention.head_count_kv": 6},
        **{"attention.key_length_mla": None, "attention.value_length_mla": None, "attention.q_lora_rank": 12},
    }
    assert newer.latent == LatentAttention(rank=24, rope_dim=8, nope_dim=12, value_dim=10, query_rank=12)
    assert config(tmp_path, "deepseek2", **older) == newer
    assert (newer.head_dim, newer.num_kv_heads) == (32, 1)


def test_yarn_of_deepseek_sharpens_all_of_a_head(tmp_path: Path) -> None:
    """A file has a tenth of mscale_all_dim."""
    found = config(tmp_path, "deepseek2", **YARN, **{"rope.scaling.yarn_log_multiplier": 0.0707})
    assert found.rope_scaling is not None and found.rope_scaling["attention_factor"] == 1.0
    assert found.attention_scale == pytest.approx(20**-0.5 * (0.1 * 0.707 * math.log(8) + 1) ** 2, rel=1e-12)
    plain = config(tmp_path, "deepseek2", **YARN)
    assert plain.rope_scaling is not None and plain.attention_scale == 20**-0.5
    assert plain.rope_scaling["attention_factor"] == pytest.approx(0.1 * math.log(8) + 1)
    assert config(tmp_path, "deepseek2", **{"rope.scaling.yarn_log_multiplier": 0.1}).attention_scale == 20**-0.5


def test_layers_of_deepseek_that_guess_further_tokens_are_not_counted(tmp_path: Path) -> None:
    assert config(tmp_path, "deepseek2", nextn_predict_layers=1).num_layers == 7


def test_experts_of_older_files_are_as_wide_as_the_others_together(tmp_path: Path) -> None:
    older = {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None}
    found = config(tmp_path, "qwen2moe", **older)
    assert (found.intermediate_size, found.shared_expert_size) == (80, 160)
    assert not found.norm_expert_weights and config(tmp_path, "qwen3moe").norm_expert_weights


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "key missing": ("gemma2", {"block_count": None}, "lacks the metadata gemma2.block_count"),
    "no slopes": (
        "mpt",
        {"attention.max_alibi_bias": None},
        "no slopes of ALiBi for 6 heads and a largest bias of 0.0",
    ),
    "clamped to nothing": ("mpt", {"attention.clamp_kqv": -1.0}, "mpt.attention.clamp_kqv must be positive or 0"),
    "no epsilon": ("falcon", {LAYER: None}, f"lacks the metadata falcon.{LAYER}"),
    "another epsilon": ("cohere2", {LAYER: None, RMS: 1e-5}, f"lacks the metadata cohere2.{LAYER}"),
    "no window": ("gemma3", {"attention.sliding_window": None}, "lacks the metadata gemma3.attention.sliding_window"),
    "window a word": ("gpt-oss", {"attention.sliding_window": "a"}, "gpt-oss.attention.sliding_window must be one int"),
    "empty window": ("gpt-oss", {"attention.sliding_window": 0}, "gpt-oss.attention.sliding_window must be positive"),
    "no turn": (
        "gemma3",
        {"attention.sliding_window_pattern": 0},
        "gemma3.attention.sliding_window_pattern must be positive, got 0",
    ),
    "few flags": (
        "cohere2",
        {"attention.sliding_window_pattern": [True, False]},
        "cohere2.attention.sliding_window_pattern must say of each of the 8 layers",
    ),
    "layers without end": ("gemma2", {"block_count": 1 << 30}, "num_layers of the model must be between 1 and 1024"),
    "caps": ("gemma2", {"attn_logit_softcapping": -1.0}, "the soft caps of gemma2 must be positive or 0"),
    "theta": ("gemma3", {"rope.freq_base_swa": 0.0}, "gemma3.rope.freq_base_swa must be a positive number"),
    "no own kv": ("gemma4", {"attention.shared_kv_layers": 8}, "num_kv_shared_layers must leave layers that have KV"),
    "widths": ("gemma4", {"feed_forward_length": [160] * 7 + [320]}, "gemma4.feed_forward_length must be alike in all"),
    "few widths": ("gemma4", {"feed_forward_length": [160]}, "must be a positive integer for each of 8 layers"),
    "no heads": ("gemma4", {"attention.head_count_kv": 0}, "must be a positive integer for each of 8 layers"),
    "no table": ("gemma4", {"embedding_length_per_layer_input": 8}, "(per_layer_token_embd.weight) for 0 of 97 tokens"),
    "one head size": (
        "gemma4",
        {"attention.key_length_swa": None},
        "lacks the metadata gemma4.attention.key_length_swa",
    ),
    "cap": ("gemma4", {"final_logit_softcapping": -1.0}, "gemma4.final_logit_softcapping must be positive or 0"),
    "softmax": ("granite", {"attention.scale": float("nan")}, "granite.attention.scale must be a positive number"),
    "divisor": ("command-r", {"logit_scale": 0.0}, "command-r.logit_scale must be a positive number"),
    "scaled": ("gemma2", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, "which is not supported"),
    "values": ("gemma2", {"attention.value_length": 64}, "has values of 64 elements and keys of 32"),
    "part of a head": ("qwen3moe", {"rope.dimension_count": 8}, "rotates only a part of each head"),
    "odd rotation": ("glm4", {"rope.dimension_count": 7}, "glm4.rope.dimension_count must be even and at most 16"),
    "wide rotation": ("phi3", {"rope.dimension_count": 64}, "phi3.rope.dimension_count must be even and at most 16"),
    "sections": ("glm4", {"rope.dimension_sections": [1, 2, 3, 0]}, "rotates by rope.dimension_sections"),
    "other scaling": ("phi3", YARN, "differently from longrope"),
    "unscaled": ("gpt-oss", {"rope.scaling.type": None}, "does not say how positions are scaled (gpt-oss.rope.scaling"),
    "no factor": ("gpt-oss", {"rope.scaling.factor": None}, "lacks the metadata gpt-oss.rope.scaling.factor"),
    "extrapolation": ("gpt-oss", {"rope.scaling.yarn_ext_factor": 0.5}, "asks for rope.scaling.yarn_ext_factor"),
    "experts uncounted": ("qwen3moe", {"expert_count": None}, "lacks the metadata qwen3moe.expert_count"),
    "too many used": ("qwen3moe", {"expert_used_count": 7}, "a token cannot use 7 of 6 experts"),
    "norm a word": ("qwen3moe", {"expert_weights_norm": "yes"}, "qwen3moe.expert_weights_norm must be true or false"),
    "scored": ("deepseek2", {"expert_gating_func": 3}, "deepseek2.expert_gating_func must be 1 or 2"),
    "softmax normed": ("deepseek2", {"expert_weights_norm": True}, "asks for expert_weights_norm"),
    "odd rank": (
        "deepseek2",
        {"attention.kv_lora_rank": 23},
        "attention.kv_lora_rank must be even and positive, got 23",
    ),
    "no rank": ("deepseek2", {"attention.kv_lora_rank": None}, "lacks the metadata deepseek2.attention.kv_lora_rank"),
    "all rotates": (
        "deepseek2",
        {"attention.key_length_mla": 8},
        "key_length_mla must be above rope.dimension_count, 8",
    ),
    "temperature": ("deepseek2", {"attention.temperature_scale": 0.1}, "asks for attention.temperature_scale"),
    "shrinking": (
        "mistral3",
        YARN | {"attention.temperature_scale": -0.1},
        "mistral3.attention.temperature_scale must be positive or 0, got -0.1",
    ),
    "growing without end": (
        "mistral3",
        {"attention.temperature_scale": 0.1},
        "lacks the metadata mistral3.rope.scaling.original_context_length",
    ),
    "growing at once": (
        "mistral3",
        YARN | {"attention.temperature_scale": 0.1, "rope.scaling.original_context_length": 0},
        "mistral3.rope.scaling.original_context_length must be between 1 and",
    ),
    "sharpness": (
        "deepseek2",
        YARN | {"rope.scaling.yarn_log_multiplier": -1.0},
        "deepseek2.rope.scaling.yarn_log_multiplier must be positive or 0",
    ),
    "sharpness elsewhere": (
        "gpt-oss",
        {"rope.scaling.yarn_log_multiplier": 0.1},
        "asks for rope.scaling.yarn_log_multiplier, which is not supported",
    ),
    "groups": ("deepseek2", {"expert_group_count": 4}, "6 experts cannot be chosen from 1 of 4 groups"),
    "shared": ("granite", EXPERTS | {"expert_shared_feed_forward_length": 8}, "experts that all tokens use"),
    "end": ("gemma2", {"tokenizer.ggml.eot_token_id": 97}, "the token id 97 is outside the vocabulary of 97"),
}


@pytest.mark.parametrize(("architecture", "changes", "sentence"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_told_in_a_sentence(
    tmp_path: Path, architecture: str, changes: dict[str, Any], sentence: str
) -> None:
    file = write(tmp_path / "a.gguf", architecture, changes)
    with pytest.raises(ModelError) as error:
        read_gguf_config(file)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (
            {"rope_factors_long.weight": np.ones(8, np.float32)},
            "rope_factors_short.weight must hold 8 positive numbers",
        ),
        (
            dict.fromkeys(("rope_factors_long.weight", "rope_factors_short.weight"), np.ones(7, np.float32)),
            "rope_factors_short.weight must hold 8 positive numbers",
        ),
        (
            {
                "rope_factors_short.weight": np.ones(8, np.float32),
                "rope_factors_long.weight": np.zeros(8, np.float32),
            },
            "rope_factors_long.weight must hold 8 positive numbers",
        ),
    ],
)
def test_factors_that_cannot_be_used_are_named(tmp_path: Path, tensors: dict[str, np.ndarray], sentence: str) -> None:
    file = write(tmp_path / "a.gguf", "phi3", tensors=tensors)
    with pytest.raises(ModelError) as error:
        read_gguf_config(file)
    assert sentence in str(error.value) and str(file.path) in str(error.value)
