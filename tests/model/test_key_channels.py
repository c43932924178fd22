"""Keys scaled by channel: the same model, with keys that fit one int8 scale per token and head better."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import write_tiny_model

from mooncake.app.key_scales import ScaleOptions, measure
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.config import load_config
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError, ModelError
from mooncake.in_process.llm import LLM
from mooncake.kernels import choose_kernels, reference
from mooncake.key_scales import KeyScales, load_key_scales, save_key_scales
from mooncake.model import CausalLM, ForwardBatch, NoHook, load_model
from mooncake.model.layers import Weights
from mooncake.model.reading.key_channels import with_scaled_keys
from mooncake.model.reading.weights import load_weights
from mooncake.precision import FLOAT32, resolve_precision
from mooncake.sampling_params import SamplingParams

TOKENS, UNEVEN = 60, 3
# Plain, with biases, with norms, and with heads that rotate in part.
FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])


def checkpoint_of(family: str, folder: Path) -> Checkpoint:
    part = {"partial_rotary_factor": 0.75} if family == "phi3" else {}
    write_tiny_model(folder, family, head_dim=32, hidden_size=128, **part)
    return open_checkpoint(str(folder))


def scales_of(checkpoint: Checkpoint, exponent: int) -> KeyScales:
    """Scales for one channel of each head that is larger by this power of two."""
    config = checkpoint.config
    exponents = np.zeros((config.num_layers, config.num_kv_heads, config.head_dim // 2), np.int8)
    exponents[..., UNEVEN] = exponent
    return KeyScales(exponents)


def logits_of(checkpoint: Checkpoint, weights: Weights, kv_dtype: str, compiled: bool = True) -> torch.Tensor:
    model = CausalLM(checkpoint.config, weights, 64, choose_kernels() if compiled else reference)
    rows = torch.arange(TOKENS)
    batch = ForwardBatch.of_prompt(rows * 37 % 300, 16, rows)
    return model.forward(batch, KVCache(checkpoint.kv_layout(16, kv_dtype), 4).tensor, NoHook())


@FAMILIES
@pytest.mark.parametrize("compiled", [True, False])
def test_over_float_pages_the_answers_are_the_same_bits(family: str, compiled: bool, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(family, tmp_path / "model")
    weights = load_weights(checkpoint, "float32")
    scaled = with_scaled_keys(weights, checkpoint.config, scales_of(checkpoint, 5))
    assert any(not torch.equal(scaled[name], values) for name, values in weights.items())
    expected = logits_of(checkpoint, weights, "float32", compiled)
    assert torch.equal(logits_of(checkpoint, scaled, "float32", compiled), expected)


@FAMILIES
def test_uneven_channels_no_longer_cost_the_others_their_codes(family: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(family, tmp_path / "model")
    even = load_weights(checkpoint, "float32")
    exact = logits_of(checkpoint, even, "float32")
    uneven = with_scaled_keys(even, checkpoint.config, scales_of(checkpoint, -7))
    mended = with_scaled_keys(uneven, checkpoint.config, scales_of(checkpoint, 7))
    errors = [(logits_of(checkpoint, each, "int8") - exact).square().mean() for each in (uneven, mended)]
    assert errors[0] > 1.5 * errors[1]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_measured_on_a_text_they_find_the_uneven_channel(family: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", family, max_position_embeddings=512)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.split(".")[-2] == ("k_norm" if family == "qwen3" else "k_proj"):
                values.view(-1, 8, *values.shape[1:])[:, 1] *= 256.0
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "keys.json"
    measure(ScaleOptions(str(tmp_path / "model"), file, tokens=128))
    exponents = load_key_scales(str(file)).exponents
    assert exponents.shape == (2, 2, 4)
    assert (exponents[..., 1] >= 3).all() and (exponents[..., 1] <= 5).all()
    assert np.abs(exponents[..., [0, 2, 3]]).max() <= 1

    llm = LLM(str(tmp_path / "model"), kv_gb=0.01, kv_dtype="int8", key_scales=str(file))
    [answer] = llm.generate(["the quick brown fox"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(answer.token_ids) == 4


def test_an_empty_text_is_not_measured_on_another_one(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", "llama", max_position_embeddings=512)
    text = tmp_path / "empty.txt"
    text.touch()
    with pytest.raises(ConfigError, match="0 tokens of text are too few"):
        measure(ScaleOptions(str(tmp_path / "model"), tmp_path / "keys.json", text, tokens=128))
    assert not (tmp_path / "keys.json").exists()


def test_its_kv_is_never_taken_for_that_of_plain_int8(tmp_path: Path) -> None:
    files = []
    for exponent in (1, 2):
        files.append(tmp_path / f"{exponent}.json")
        files[-1].write_text(f'{{"model": "m", "tokens": 64, "exponents": [[[{exponent}]]]}}')
    plain = resolve_precision("float32", "int8")
    scaled = [resolve_precision("float32", "int8", weights, key_scales=str(f)) for f in files for weights in WEIGHTS]
    assert plain.identity("digest") == "digest"
    assert len({precision.identity("digest") for precision in (plain, *scaled)}) == 5
    config = load_config(None, ["model.kv_dtype=int8", f"model.key_scales={files[0]}"])
    assert config.precision().identity("digest") == scaled[0].identity("digest")


WEIGHTS = ("auto", "w8a8")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    with pytest.raises(ConfigError, match="cannot read"):
        resolve_precision("float32", "int8", key_scales=str(file))
    for text in ("no", '{"model": "m", "tokens": 1, "exponents": [[[99]]]}', '{"exponents": 1}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="is not what `mooncake key-scales` writes"):
            resolve_precision("float32", "int8", key_scales=str(file))
    with pytest.raises(ConfigError, match="is for model"):
        resolve_precision("float32", key_scales=str(file))
    checkpoint = checkpoint_of("llama", tmp_path / "model")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot write"):
        save_key_scales(tmp_path / "folder", scales_of(checkpoint, 1), "m", 64)
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(ModelError, match="this model needs"):
        load_model(checkpoint, FLOAT32, key_scales=KeyScales(np.zeros((1, 1, 1), np.int8)))
    write_tiny_model(tmp_path / "other", "gpt_neox", num_key_value_heads=4)
    with pytest.raises(ModelError, match=r"model\.key_scales are for the Llama family"):
        load_model(open_checkpoint(str(tmp_path / "other")), FLOAT32, key_scales=scales_of(checkpoint, 1))
