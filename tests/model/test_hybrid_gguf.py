"""GGUF files of models whose layers partly keep a state, as llama.cpp's converter writes them: the same models as their
folders, token for token those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from converted import plain
from converted_hybrid import SIZES, ConvertedHybrid
from tiny_gguf import write_gguf
from tiny_hybrid import answers, their_answers

from mooncake.checkpoint import open_checkpoint
from mooncake.errors import ModelError
from mooncake.gguf.file import GGUFFile
from mooncake.model.reading.weights import load_weights

pytestmark = pytest.mark.usefixtures("own_weights_cache")

WIDE = (".expert_bias", ".e_score_correction_bias", ".A_log", ".dt_bias", ".D")
FOLDED = ("attention_scale", "embedding_factor", "logit_divisor")  # Falcon-H1's, into weights


@pytest.fixture(params=SIZES, scope="module")
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ConvertedHybrid:
    return ConvertedHybrid(request.param, tmp_path_factory.mktemp(request.param))


def check_tokens(converted: ConvertedHybrid) -> None:
    found = answers(converted.path)
    assert found == their_answers(converted.theirs, found)
    assert len({token for tokens in found for token in tokens}) > 20, "a model that repeats itself proves nothing"


def test_a_file_says_of_a_model_what_its_folder_says(converted: ConvertedHybrid) -> None:
    expected, found = plain(converted.published.checkpoint.config), plain(converted.checkpoint.config)
    expected["stacked_experts"] = False  # each is taken alone
    if converted.family == "falcon_h1":
        for name in FOLDED:
            del expected[name], found[name]
        mamba = expected["mamba"]
        assert isinstance(mamba, dict)
        mamba["factors"] = {"inputs": (1.0,) * 5} | dict.fromkeys(("state_space", "attention", "gate", "mlp"), 1.0)
    assert found == expected


def test_a_file_holds_the_weights_of_the_folder(converted: ConvertedHybrid) -> None:
    ours = dict(load_weights(converted.checkpoint, "float32"))
    published = dict(load_weights(converted.published.checkpoint, "float32"))
    for name in [name for name in published if name.endswith("experts.gate_up_proj")]:
        downs = published.pop(name.replace("gate_up", "down"))
        for expert, (gate_up, down) in enumerate(zip(published.pop(name), downs, strict=True)):
            gate, up = gate_up.chunk(2)
            for part, tensor in (("gate", gate), ("up", up), ("down", down)):
                published[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = tensor
    assert ours.keys() == published.keys()
    for name, tensor in ours.items():
        is_near = name.endswith("A_log") or (name.endswith("norm.weight") and "qwen" in converted.family)
        if is_near:  # went through exp, and 1 was added, and back again
            torch.testing.assert_close(tensor, published[name], rtol=0, atol=2**-21)
        elif converted.family != "falcon_h1" or "conv1d" in name:
            assert torch.equal(tensor, published[name]), name


def test_what_chooses_experts_and_forgets_is_float32_in_any_type(converted: ConvertedHybrid) -> None:
    for checkpoint in (converted.checkpoint, converted.published.checkpoint):
        wide = [name for name, tensor in load_weights(checkpoint, "bfloat16").items() if tensor.dtype is torch.float32]
        expected = [name for name in load_weights(checkpoint, "float32") if name.endswith(WIDE)]
        assert sorted(wide) == sorted(expected)


def test_its_tokens_are_those_of_transformers(converted: ConvertedHybrid) -> None:
    check_tokens(converted)


def test_older_files_of_qwen3_next_have_what_states_are_computed_from_in_one(tmp_path: Path) -> None:
    converted = ConvertedHybrid("qwen3-next", tmp_path)
    before = answers(converted.path)
    converted.write_as_older_converters_did()
    tensors = GGUFFile(converted.path).tensors
    assert "blk.0.ssm_in.weight" in tensors and "blk.0.attn_qkv.weight" not in tensors
    assert answers(converted.path) == before


def test_gates_and_ups_of_all_experts_may_be_one_tensor(tmp_path: Path) -> None:
    converted = ConvertedHybrid("qwen3.5-moe", tmp_path)
    before = answers(converted.path)
    converted.fuse()
    assert "blk.0.ffn_gate_up_exps.weight" in GGUFFile(converted.path).tensors
    assert answers(converted.path) == before
    expected = plain(converted.published.checkpoint.config) | {"stacked_experts": True}
    assert plain(converted.checkpoint.config) == expected


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-3"])
def test_layers_that_guess_further_tokens_are_left_out(name: str, tmp_path: Path) -> None:
    converted = ConvertedHybrid(name, tmp_path)
    expected, before = converted.checkpoint.config, answers(converted.path)
    converted.add_guessing_layer()
    assert converted.checkpoint.config == expected
    assert answers(converted.path) == before


def test_a_model_in_parts_gives_the_tokens_of_the_whole(tmp_path: Path) -> None:
    """Also where a weight is made of tensors in two of them."""
    converted = ConvertedHybrid("granite-4-moe", tmp_path, tensors_a_file=1)
    check_tokens(converted)


STATES = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 1,
    "attention.key_length": 8,
}


@pytest.mark.parametrize(
    ("architecture", "changes", "what"),
    [
        ("granitehybrid", STATES | {"rope.dimension_count": 4}, "rotates only a part of each head"),  # Bamba
        ("granitehybrid", STATES, "has no layers of Mamba"),
        ("falcon-h1", STATES | {"ssm.inner_size": 66}, "must be a multiple of ssm.time_step_rank, 4, got 66"),
        ("falcon-h1", STATES | {"ssm.time_step_rank": 0}, "must be a multiple of ssm.time_step_rank, 0"),
        ("falcon-h1", {}, "lacks the metadata falcon-h1.ssm.time_step_rank"),
        ("falcon-h1", STATES, "lacks the weight model.layers.0.mamba.in_proj.weight"),
        ("lfm2", {}, "lacks the metadata lfm2.shortconv.l_cache"),
        ("nemotron_h", STATES | {"block_count": 3}, "does not say of which kind its layer 2 is"),
        ("qwen3next", STATES, "q_proj.weight has the shape"),
        ("qwen35", STATES | {"attention.head_count_kv": [2, 1]}, "must be the same integer for all layers"),
    ],
)
def test_what_no_model_can_be_is_refused_in_words(
    architecture: str, changes: dict[str, object], what: str, tmp_path: Path
) -> None:
    write_gguf(path := tmp_path / "model.gguf", architecture, **changes)
    with pytest.raises(ModelError, match=what):
        open_checkpoint(str(path))
