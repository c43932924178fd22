"""The language models of multimodal checkpoints: for text, the tokens of transformers' whole models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import VOCAB, Published
from tiny_mixtures import answers_of
from tiny_multimodal import KIMI, MULTIMODAL, QWEN3_VL_MOE
from transformers import AutoModelForImageTextToText

from mooncake.checkpoint import open_checkpoint
from mooncake.errors import ModelError
from mooncake.kernels.reference import quantise_rows

PROMPTS = [np.random.default_rng(4).integers(2, VOCAB, length).tolist() for length in (75, 1, 30, 12, 5, 50, 3, 7)]


def published(family: str, folder: Path) -> Published:
    return Published(family, folder, MULTIMODAL)


def greedy(folder: Published) -> list[list[int]]:
    return answers_of(folder.checkpoint, PROMPTS)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_text_gets_the_tokens_of_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = published(family, tmp_path)
    found = greedy(folder)
    assert len({token for tokens in found for token in tokens}) >= 6, "a model that repeats itself proves nothing"
    assert found == folder.greedy_all(PROMPTS, found)


def test_experts_in_one_tensor_have_their_inputs_as_rows(tmp_path: Path) -> None:
    """As Qwen3-VL's mixtures are published, which transformers reads and no longer writes."""
    folder = Published("qwen3-vl-moe", tmp_path, {"qwen3-vl-moe": QWEN3_VL_MOE})
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in [name for name in stored if ".mlp.experts." in name]:
        stored[name] = stored[name].mT.contiguous()
    save_file(stored, file, {"format": "pt"})
    folder.theirs = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    found = greedy(folder)
    assert len({token for tokens in found for token in tokens}) >= 6
    assert found == folder.greedy_all(PROMPTS, found)


def test_kimi_is_read_as_published(tmp_path: Path) -> None:
    """When transformers writes it, it calls the language model's layers by the image encoder's name for its own."""
    folder = Published("kimi", tmp_path, {"kimi": KIMI})
    file, start = tmp_path / "model.safetensors", "language_model.model."
    stored = {name.replace(f"{start}blocks.", f"{start}layers."): tensor for name, tensor in load_file(file).items()}
    save_file(stored, file)
    text = folder.tree["text_config"]
    assert isinstance(text, dict) and any(name.startswith(f"{start}layers.") for name in stored)
    folder.rewrite(text_config=text | {"model_type": "kimi_k2"})
    assert folder.checkpoint.config.architecture == "kimi_k2"
    found = greedy(folder)
    assert found == folder.greedy_all(PROMPTS, found)


def test_gemma3_is_the_same_in_the_keys_of_its_publisher(tmp_path: Path) -> None:
    folder = published("gemma3", tmp_path)
    expected = folder.checkpoint.config
    assert expected.rope_scaling == {"rope_type": "linear", "factor": 8.0} and expected.max_model_len == 512
    text = folder.tree["text_config"]
    assert isinstance(text, dict)
    for key in ("rope_parameters", "layer_types"):
        del text[key]
    text |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2}
    folder.rewrite(text_config=text)
    config = folder.checkpoint.config
    assert config.layer_windows == (20, 0, 20) == expected.layer_windows
    assert config == expected


def test_tokens_that_end_answers_are_those_beside_the_language_model(tmp_path: Path) -> None:
    """Gemma 4 says [1, 106] there, and 1 within, which is the end of a text and not of a turn."""
    folder = published("gemma3", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    text = folder.tree["text_config"]
    assert isinstance(text, dict)
    folder.rewrite(eos_token_id=[1, 50], text_config=text | {"eos_token_id": 1})
    assert folder.checkpoint.config.eos_ids == (1, 50)
    folder.rewrite(eos_token_id=None)
    assert folder.checkpoint.config.eos_ids == (1,)


def test_qwen_vl_is_the_same_in_the_older_form_of_its_settings(tmp_path: Path) -> None:
    """All in one, and positions called M-RoPE."""
    folder = published("qwen2.5-vl", tmp_path)
    expected, text = folder.checkpoint.config, folder.tree["text_config"]
    assert isinstance(text, dict)
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    own = {key: value for key, value in text.items() if key not in ("model_type", "rope_parameters")}
    folder.rewrite(text_config=None, **own, rope_theta=5000.0, rope_scaling=scaling)
    assert folder.checkpoint.config == expected
    assert expected.architecture == "qwen2" and expected.rope_theta == 5000.0


def test_codes_of_the_language_model_are_found_by_its_names(tmp_path: Path) -> None:
    """Kimi K2.5: int8 codes within, and settings of their format beside the language model's others."""
    folder = published("mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in [name for name in stored if name.endswith("_proj.weight") and name.startswith("language_model.")]:
        codes, scales = quantise_rows(stored.pop(name))
        stored |= {name: codes, name.replace("weight", "weight_scale"): scales[:, None]}
        parameter = folder.theirs.get_parameter(name.replace("language_model.model.", "model.language_model."))
        with torch.no_grad():
            parameter.copy_(codes * scales[:, None])
    save_file(stored, file)
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    text = folder.tree["text_config"]
    assert isinstance(text, dict)
    text["quantization_config"] = {
        **{"quant_method": "compressed-tensors", "format": "int-quantized"},
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }
    folder.rewrite(text_config=text)
    assert folder.checkpoint.num_codes > 0
    found = greedy(folder)
    assert found == folder.greedy_all(PROMPTS, found)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"text_config": None}, "does not describe the language model"),
        ({"text_config": {"model_type": "t5"}}, "model_type 't5'"),
        ({"model_type": "mllama"}, "model_type 'mllama'"),
        ({"text_config": {"model_type": "mistral"}}, "lacks num_attention_heads"),
    ],
)
def test_what_is_not_supported_is_one_sentence(change: dict[str, object], sentence: str, tmp_path: Path) -> None:
    published("mistral3", tmp_path).rewrite(**change)
    with pytest.raises(ModelError, match=sentence):
        open_checkpoint(str(tmp_path))


def test_a_weight_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    folder = published("mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"audio_tower.weight": torch.ones(1)}, file)
    with pytest.raises(ModelError, match=r"has the weight audio_tower\.weight, which its"):
        assert folder.checkpoint
