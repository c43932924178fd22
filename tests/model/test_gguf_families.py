"""GGUF files of every family, as llama.cpp's converter writes them: the same models as their folders, token for token
those of transformers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from converted import CHANGES, Converted, Kind, plain
from greedy import NEW_TOKENS
from tiny_families import VOCAB
from tiny_mixtures import answers_of

from mooncake import LLM
from mooncake.checkpoint import Checkpoint, open_checkpoint, weight_shapes
from mooncake.gguf.file import GGUFFile
from mooncake.gguf.parts import open_gguf
from mooncake.kernels.grouped import GroupedCodes
from mooncake.model.layers import Weights, WeightsOnDemand
from mooncake.model.reading.weights import load_weights
from mooncake.precision import KeptGroups, WeightFormat
from mooncake.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("own_weights_cache")

PROMPTS = [np.random.default_rng(4).integers(2, VOCAB, length).tolist() for length in (75, 1, 30, 12, 5, 50, 3)]


@pytest.fixture(params=CHANGES, scope="module")
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(request.param, tmp_path_factory.mktemp(request.param))


def greedy(checkpoint: Checkpoint, keeps_groups: KeptGroups = "") -> list[list[int]]:
    return answers_of(checkpoint, PROMPTS, WeightFormat("float32", keeps_groups=keeps_groups))


WRITTEN_AS = {
    "glm4_moe_lite": "deepseek_v3",
    "granitemoehybrid": "granite",
    "gemma4_unified_text": "gemma4_text",
}
"""Families whose files are called, and read, by the name of one that computes alike."""


def test_a_file_says_of_a_model_what_its_folder_says(converted: Converted) -> None:
    expected = plain(converted.published.checkpoint.config)
    name = str(expected["architecture"])
    assert plain(converted.checkpoint.config) == expected | {"architecture": WRITTEN_AS.get(name, name)}


def test_a_file_holds_the_weights_of_the_folder(converted: Converted) -> None:
    ours = load_weights(converted.checkpoint, "float32")
    published = unfused(load_weights(converted.published.checkpoint, "float32"))
    assert ours.keys() == published.keys()
    for name in ours:
        if converted.family.startswith(("gemma", "nemotron")) and name.endswith(
            "norm.weight"
        ):  # 1 was added, and taken away
            torch.testing.assert_close(ours[name], published[name], rtol=0, atol=2**-23)
        else:
            assert torch.equal(ours[name], published[name]), name


def unfused(weights: Weights) -> Weights:
    """Granite 4's gates and ups are one matrix in its folders, and two in its files."""
    found = {name.replace("shared_mlp.output_linear", "mlp.down_proj"): tensor for name, tensor in weights.items()}
    for name in [name for name in found if ".shared_mlp.input_linear." in name]:
        both = found.pop(name).chunk(2)
        names = (name.replace("shared_mlp.input_linear", f"mlp.{part}_proj") for part in ("gate", "up"))
        found |= dict(zip(names, both, strict=True))
    return found


WITH_TOKENS = (
    *("gpt-oss", "mixtral", "qwen2-moe", "gemma3", "gemma4-unified", "deepseek-v3", "glm-4.7-flash"),
    *("phi4-mini", "granite-moe", "granite-4", "gpt2", "bloom", "falcon-40b", "olmo2"),
)
"""Of the other families the two tests above say it: the same model, whose tokens are compared as a folder's."""


@pytest.mark.parametrize(
    "converted",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in WITH_TOKENS)) for name in CHANGES],
    indirect=True,
    scope="module",
)
def test_its_tokens_are_those_of_transformers(converted: Converted) -> None:
    found = greedy(converted.checkpoint)
    assert found == converted.greedy_all(PROMPTS, found)
    assert len({token for tokens in found for token in tokens}) >= 6, "a model that repeats itself proves nothing"


def test_mixtures_of_qwen3_vl_are_those_of_qwen3(tmp_path: Path) -> None:
    converted = Converted("qwen3-vl-moe", tmp_path)
    assert converted.checkpoint.config.architecture == "qwen3_moe"
    found = greedy(converted.checkpoint)
    assert found == converted.greedy_all(PROMPTS, found)
    assert len({token for tokens in found for token in tokens}) >= 6, "a model that repeats itself proves nothing"


# Quantised files: the reference has the values that the codes stand for

QUANTISED = (
    *("gemma3", "phi3", "phi4-mini", "mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"),
    *("apertus", "granite-moe", "glm4", "falcon-40b", "gpt2", "deepseek-v2-in-groups"),
    *("gemma4-small", "gemma4-mixture"),
)


@pytest.mark.sweep(1)
@pytest.mark.slow
@pytest.mark.parametrize("keeps_groups", ["exact", ""], ids=["codes", "values"])
@pytest.mark.parametrize("family", QUANTISED)
def test_a_quantised_file_gives_the_tokens_of_its_values(family: str, keeps_groups: KeptGroups, tmp_path: Path) -> None:
    expert_kind = Kind.MXFP4 if family == "gpt-oss" else None
    converted = Converted(family, tmp_path, Kind.Q8_0, expert_kind)
    kinds = {tensor.kind.name for tensor in GGUFFile(converted.path).tensors.values()}
    assert {"F32", "Q8_0", *(["MXFP4"] if expert_kind else [])} <= kinds
    found = greedy(converted.checkpoint, keeps_groups)
    assert found == converted.greedy_all(PROMPTS, found)


@pytest.mark.parametrize("keeps_groups", ["exact", ""], ids=["codes", "values"])
def test_latent_attention_is_quantised_too(keeps_groups: KeptGroups, tmp_path: Path) -> None:
    """As `llama-quantize` mixes kinds: experts in Q4_K where their rows allow it. In parts, cut between the halves of
    keys and values."""
    converted = Converted("deepseek-v3-wide", tmp_path, Kind.Q8_0, Kind.Q4_K, tensors_a_file=1)
    kinds = {name: tensor.kind.name for name, tensor in open_gguf(converted.path).tensors.items()}
    half, half_of_values, gate = (kinds[f"blk.1.{name}.weight"] for name in ("attn_k_b", "attn_v_b", "ffn_gate_exps"))
    assert (half, half_of_values, gate) == ("Q8_0", "Q8_0", "Q4_K")
    found = greedy(converted.checkpoint, keeps_groups)
    assert found == converted.greedy_all(PROMPTS, found)


@pytest.mark.parametrize(
    ("family", "kind", "tensors_a_file"),
    [
        ("gemma3", Kind.F32, 1),
        pytest.param("qwen3-moe", Kind.Q8_0, 7, marks=pytest.mark.slow),
        pytest.param("granite-moe", Kind.F16, 11, marks=pytest.mark.slow),
        ("phi3", Kind.Q8_0, 2),
    ],
)
def test_a_model_in_parts_gives_the_tokens_of_the_whole(
    family: str, kind: Kind, tensors_a_file: int, tmp_path: Path
) -> None:
    """Also where a weight is made of tensors in two of them."""
    converted = Converted(family, tmp_path, kind, tensors_a_file=tensors_a_file)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2 and converted.path == parts[0]
    for part, keeps_groups in ((parts[-1], "exact"), (parts[1], "")):
        found = greedy(open_checkpoint(str(part)), keeps_groups)
        assert found == converted.greedy_all(PROMPTS, found)


def test_weights_too_large_to_cache_are_values_unless_codes_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As codes they took no int8: what was asked for was not done."""
    monkeypatch.setattr("mooncake.model.reading.weights.MAX_CACHED_BYTES", 0)
    checkpoint, name = Converted("gemma3", tmp_path, Kind.Q8_0).checkpoint, "model.layers.1.mlp.up_proj.weight"
    for keeps_groups, kind in (("", type(None)), ("exact", GroupedCodes)):
        weights = load_weights(checkpoint, "float32", keeps_groups=keeps_groups)
        assert isinstance(weights, WeightsOnDemand) and isinstance(weights.codes(name), kind)


def test_cached_weights_are_those_of_all_parts(tmp_path: Path) -> None:
    Converted("gemma3", tmp_path, Kind.Q8_0, tensors_a_file=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    before = dict(load_weights(open_checkpoint(str(parts[0])), "float32"))
    content = bytearray(parts[-1].read_bytes())
    content[-5] ^= 64
    parts[-1].write_bytes(content)
    after = load_weights(open_checkpoint(str(parts[0])), "float32")
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["model.norm.weight"]


@pytest.mark.parametrize("family", ["gemma2", "phi3", "mixtral", "gpt-oss", "cohere"])
def test_files_of_half_precision_are_the_same_model_too(family: str, tmp_path: Path) -> None:
    converted = Converted(family, tmp_path, Kind.F16)
    found = greedy(converted.checkpoint)
    assert found == converted.greedy_all(PROMPTS, found)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("phi3", "model.layers.1.self_attn.k_proj.weight"),
        ("phi3", "model.layers.1.mlp.up_proj.weight"),
        ("phi4-mini", "model.layers.1.self_attn.q_proj.weight"),
        ("mixtral", "model.layers.1.self_attn.q_proj.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w1.weight"),
        ("falcon-40b", "transformer.h.1.self_attention.query_key_value.weight"),
    ],
)
def test_codes_stay_codes_where_rows_are_whole(family: str, name: str, tmp_path: Path) -> None:
    weights = load_weights(Converted(family, tmp_path, Kind.Q8_0).checkpoint, "float32", keeps_groups="exact")
    assert isinstance(weights, WeightsOnDemand)
    codes = weights.codes(name)
    assert isinstance(codes, GroupedCodes) and torch.equal(codes.weights(), weights[name])


def test_the_experts_of_gpt_oss_stay_codes(tmp_path: Path) -> None:
    checkpoint = Converted("gpt-oss", tmp_path, Kind.Q8_0, Kind.MXFP4).checkpoint
    weights = load_weights(checkpoint, "float32", keeps_groups="exact")
    assert isinstance(weights, WeightsOnDemand)
    for name in ("gate_up_proj", "down_proj"):
        experts = weights.experts(f"model.layers.1.mlp.experts.{name}")
        assert experts is not None
        values = weights[f"model.layers.1.mlp.experts.{name}"].mT
        assert torch.equal(torch.stack([each.weights() for each in experts]), values)
    num_codes, num_bytes = checkpoint.groups
    assert num_codes == sum(
        math.prod(shape) for name, shape in weight_shapes(checkpoint.config).items() if is_coded(name)
    )
    assert num_bytes < num_codes


def is_coded(name: str) -> bool:
    return name.endswith(("proj.weight", "embed_tokens.weight", "lm_head.weight", "gate_up_proj", "down_proj"))


def test_weights_that_become_values_are_not_counted_as_codes(tmp_path: Path) -> None:
    """GPT-2's matrices are transposed, and the rows of latent attention's are put in another order; Granite's experts
    are put together from two tensors, and stay codes."""
    mixture = Converted("granite-moe", tmp_path / "a", Kind.Q8_0).checkpoint
    sizes = {name: math.prod(shape) for name, shape in weight_shapes(mixture.config).items()}
    assert mixture.groups[0] == sum(size for name, size in sizes.items() if is_coded(name) or "_linear." in name)
    latent = Converted("deepseek-v3-wide", tmp_path / "c", Kind.Q8_0).checkpoint
    sizes = {name: math.prod(shape) for name, shape in weight_shapes(latent.config).items()}
    coded = [name for name in sizes if is_coded(name) and (".self_attn." not in name or ".o_proj." in name)]
    assert latent.groups[0] == sum(sizes[name] for name in coded)
    assert Converted("gpt2", tmp_path / "b", Kind.Q8_0).checkpoint.groups[0] == VOCAB * 96  # the table of tokens


# What a file leaves to its reader


def test_gemma3_scales_positions_in_its_global_layers_only(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    converted = Converted("gemma3", tmp_path, rope_parameters=rope)
    config = converted.checkpoint.config
    assert config.rope_scaling == {"rope_type": "linear", "factor": 8.0}
    assert (config.rope_theta, config.local_rope_theta, config.max_model_len) == (1e6, 1e4, 512)
    found = greedy(converted.checkpoint)
    assert found == converted.greedy_all(PROMPTS, found)


def test_phi4_mini_has_its_long_factors_where_a_long_context_is_asked_for(tmp_path: Path) -> None:
    converted = Converted("phi4-mini", tmp_path)
    short, long = (open_checkpoint(str(converted.path), asked).config for asked in (0, 512))
    assert (short.max_model_len, long.max_model_len) == (128, 512)
    published = open_checkpoint(str(converted.published.folder), 512).config
    assert plain(long) == plain(published)
    assert short.rope_scaling != long.rope_scaling


def test_biases_of_the_choice_of_experts_are_float32_in_any_type(tmp_path: Path) -> None:
    weights = load_weights(Converted("glm-4.5", tmp_path).checkpoint, "bfloat16")
    types = {name.rpartition(".")[2]: tensor.dtype for name, tensor in weights.items() if ".2.mlp.gate." in name}
    assert types == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    converted = Converted("glm-4.5", tmp_path)
    expected = converted.checkpoint.config
    converted.add_guessing_layer()
    assert converted.checkpoint.config == expected
    found = greedy(converted.checkpoint)
    assert found == converted.greedy_all(PROMPTS, found)


@pytest.mark.parametrize(
    ("family", "halves_too"), [("deepseek-v2", False), ("deepseek-v3-wide", True), ("moonlight", False)]
)
def test_older_files_have_keys_and_values_of_latent_attention_in_one_matrix(
    family: str, halves_too: bool, tmp_path: Path
) -> None:
    converted = Converted(family, tmp_path)
    expected = converted.checkpoint.config
    converted.write_as_older_converters_did(halves_too)
    tensors = GGUFFile(converted.path).tensors
    assert "blk.0.attn_kv_b.weight" in tensors and ("blk.0.attn_k_b.weight" in tensors) == halves_too
    assert converted.checkpoint.config == expected
    found = greedy(converted.checkpoint)
    assert found == converted.greedy_all(PROMPTS, found)


@pytest.mark.parametrize(("family", "kind"), [("glm", Kind.F32), ("glm", Kind.Q8_0), ("phi", Kind.F16)])
def test_queries_keys_and_values_may_be_one_tensor(family: str, kind: Kind, tmp_path: Path) -> None:
    converted = Converted(family, tmp_path, kind)
    expected = converted.checkpoint.config
    converted.fuse()
    checkpoint = converted.checkpoint
    assert "blk.0.attn_qkv.weight" in GGUFFile(converted.path).tensors
    assert checkpoint.config == expected
    for keeps_groups in ("exact", ""):
        found = greedy(checkpoint, keeps_groups)
        assert found == converted.greedy_all(PROMPTS, found)


TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + m.content + '<end_of_turn>\n' }}"
    "{% endfor %}{{ '<start_of_turn>model\n' }}"
)


def test_a_chat_with_a_file_is_one_with_its_model(tmp_path: Path) -> None:
    """From words by way of its SentencePiece tokenizer and its template to words."""
    control = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    parts = ["user", "model", "hello", "us", "er", "mo", "de", "del", "he", "llo", "ll", "\n", "▁"]
    tokens = ["<unk>", *control, *parts, *map(chr, range(ord("A"), ord("A") + VOCAB - 5 - len(parts)))]
    assert len(tokens) == VOCAB
    kinds = [2, 3, 3, 3, 3, *[1] * (VOCAB - 5)]
    tokenizer = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [-float(number) for number in range(VOCAB)],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": TURNS,
    }
    converted = Converted("mixtral", tmp_path, tokenizer=tokenizer, bos_token_id=1, eos_token_id=2)
    words = ["hello", "▁", "user", "W", "model", "x", "llo"]
    names = ["<bos>", "<start_of_turn>", "user", "\n", *words, "<end_of_turn>", "\n", "<start_of_turn>", "model", "\n"]
    prompt = [tokens.index(name) for name in names]
    expected = converted.greedy(prompt)
    assert len(set(expected)) >= 3, "a model that repeats itself proves nothing"
    ends = converted.checkpoint.config.eos_ids
    assert [tokens[i] for i in ends] == ["<eos>", "<end_of_turn>"]
    with LLM(str(converted.path), kv_gb=0.02, block_tokens=8, threads=1, max_model_len=128) as llm:
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        [answer] = llm.chat([{"role": "user", "content": "hello userWmodelxllo"}], sampling)
        assert (answer.prompt_tokens, answer.token_ids) == (len(prompt), expected)
        assert answer.text == "".join(tokens[i] for i in expected if kinds[i] == 1).replace("▁", " ")
