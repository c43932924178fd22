"""Codes in groups that stay codes in memory (GGUF's blocks, GPTQ, AWQ): results are bitwise those of their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from published import Published, logits_of
from quantised import Format, awq, fp8, gptq, packed

from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError, ModelError
from mooncake.gguf.config import GROUPED_KINDS
from mooncake.kernels.grouped import GroupedCodes
from mooncake.key_scales import KeyScales
from mooncake.model import CausalLM, ForwardBatch, NoHook
from mooncake.model.cpu_decoder import CpuDecoder
from mooncake.model.layers import WeightsOnDemand
from mooncake.model.load import load_model
from mooncake.model.reading.gguf_codes import grouped_codes
from mooncake.model.reading.key_channels import with_scaled_keys
from mooncake.model.reading.weights import load_weights
from mooncake.precision import WeightFormat, resolve_precision

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
"""Where blocks of a kind have float16 numbers, if not at their beginning alone."""

TAKEN: dict[str, Callable[[], Format]] = {
    "GPTQ 4 bits": lambda: gptq(4, 32),
    "GPTQ 4 bits, symmetric": lambda: gptq(4, 32, symmetric=True),
    "GPTQ 8 bits": lambda: gptq(8, 32),
    "AWQ": lambda: awq(32),
    "packed 4 bits": lambda: packed(4, 16),
    "packed 4 bits with zeros": lambda: packed(4, 32, symmetric=False),
    "packed 8 bits with zeros": lambda: packed(8, symmetric=False),
}
NOT_TAKEN: dict[str, Callable[[], Format]] = {
    "scattered groups": lambda: gptq(4, 16, order=True),
    "float8": lambda: fp8((32, 32)),
}
PROJECTION = "model.layers.1.self_attn.v_proj.weight"


@pytest.mark.parametrize("kind", sorted(GROUPED_KINDS))
def test_blocks_of_gguf_are_read_as_what_they_stand_for(kind: str) -> None:
    """From random bytes: every code and every scale occurs."""
    quantisation = GGMLQuantizationType[kind]
    block, block_bytes = GGML_QUANT_SIZES[quantisation]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (24, block_bytes), dtype=np.uint8)
    for place in HALVES.get(kind, (0,)):
        raw[:, place : place + 2] = rng.normal(0, 0.05, 24).astype(np.float16).view(np.uint8).reshape(24, 2)
    if kind == "MXFP4":  # larger powers of two would overflow
        raw[:, 0] = np.minimum(raw[:, 0], 252)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, quantisation).reshape(8, 3 * block))
    codes = grouped_codes(kind, raw.flatten(), (8, 3 * block), torch.float32)
    assert codes is not None and torch.equal(codes.weights(), expected)


def test_a_scale_that_is_no_number_is_refused() -> None:
    raw = np.full(17, 255, np.uint8)
    with pytest.raises(ModelError, match="mxfp4 scale of 255"):
        grouped_codes("MXFP4", raw, (1, 32), torch.float32)


def weight_bytes(model: object) -> int:
    assert isinstance(model, CausalLM) and isinstance(model.decoder, CpuDecoder)
    return model.decoder.weight_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model_of_codes_gives_the_bits_of_its_values(dtype: str) -> None:
    """SmolLM2-135M is stored as Q4_1 with a Q8_0 table: codes take a fifth of float32's memory, with equal logits."""
    checkpoint = open_checkpoint("smollm2")
    coded, plain = (load_model(checkpoint, WeightFormat(dtype, keeps_groups=keeps), 64) for keeps in ("exact", ""))
    rows = torch.arange(40)
    batch = ForwardBatch.of_prompt(rows * 997 % checkpoint.config.vocab_size, 16, rows)
    logits = [
        model.forward(batch, KVCache(checkpoint.kv_layout(16, dtype), 4).tensor, NoHook()) for model in (coded, plain)
    ]
    assert torch.equal(*logits)
    assert weight_bytes(coded) < (0.21 if dtype == "float32" else 0.42) * weight_bytes(plain)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_real_model_whose_codes_meet_codes_is_nearly_as_good_and_the_same_in_every_batch(dtype: str) -> None:
    checkpoint = open_checkpoint("smollm2")
    text = "The capital of France is Paris, and the capital of Italy is Rome. " * 3
    tokens = torch.from_numpy(checkpoint.load_tokenizer().encode(text).astype(np.int64))

    def logits(model: CausalLM, length: int) -> torch.Tensor:
        batch = ForwardBatch.of_prompt(tokens[:length], 16, torch.arange(length))
        # float32: over bfloat16 a matrix unit attends to chunks, and rounds otherwise than vectors do for a few tokens
        return model.forward(batch, KVCache(checkpoint.kv_layout(16, "float32"), 4).tensor, NoHook())

    exact = load_model(checkpoint, WeightFormat(dtype), 64)
    coded = load_model(checkpoint, WeightFormat(dtype, keeps_groups="a8"), 64)
    weights = load_weights(checkpoint, dtype, keeps_groups="a8")
    in_steps = CausalLM(checkpoint.config, weights, 64, None, "", False)
    whole = logits(coded, 40)
    assert torch.equal(logits(in_steps, 40), whole)
    for length in (1, 7, 16):
        assert torch.equal(logits(coded, length), whole[:length])
    wanted = logits(exact, 40).log_softmax(-1)
    divergence = (wanted.exp() * (wanted - whole.log_softmax(-1))).sum(-1).mean()
    assert 0 < divergence < 0.02, divergence
    assert weight_bytes(coded) < (0.21 if dtype == "float32" else 0.42) * weight_bytes(exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", TAKEN.values(), ids=TAKEN)
def test_quantised_folders_keep_their_codes(form: Callable[[], Format], dtype: str, tmp_path: Path) -> None:
    checkpoint = Published(tmp_path / "tiny", form()).checkpoint
    weights = load_weights(checkpoint, dtype, keeps_groups="exact")
    assert isinstance(weights, WeightsOnDemand)
    codes = weights.codes(PROJECTION)
    assert isinstance(codes, GroupedCodes) and torch.equal(codes.weights(), weights[PROJECTION])
    coded, plain = (load_model(checkpoint, WeightFormat(dtype, keeps_groups=keeps)) for keeps in ("exact", ""))
    assert isinstance(coded, CausalLM) and isinstance(plain, CausalLM)
    assert torch.equal(logits_of(coded, checkpoint, dtype), logits_of(plain, checkpoint, dtype))


@pytest.mark.parametrize("form", NOT_TAKEN.values(), ids=NOT_TAKEN)
def test_what_is_cut_otherwise_becomes_values(form: Callable[[], Format], tmp_path: Path) -> None:
    checkpoint = Published(tmp_path / "tiny", form()).checkpoint
    weights = load_weights(checkpoint, "float32", keeps_groups="exact")
    assert isinstance(weights, WeightsOnDemand) and weights.codes(PROJECTION) is None


def test_families_of_a_pass_of_their_own_keep_codes_too(tmp_path: Path) -> None:
    checkpoint = Published(tmp_path / "tiny", gptq(4, 32, bias=None), "gemma3_text").checkpoint
    coded, plain = (load_model(checkpoint, WeightFormat("float32", keeps_groups=keeps)) for keeps in ("exact", ""))
    assert torch.equal(logits_of(coded, checkpoint), logits_of(plain, checkpoint))


def test_factors_of_key_channels_go_into_scales_and_offsets(tmp_path: Path) -> None:
    checkpoint = Published(tmp_path / "tiny", awq(32)).checkpoint
    config = checkpoint.config
    shape = len(config.kv_owners), config.num_kv_heads, config.head_dim // 2
    scales = KeyScales(np.random.default_rng(0).integers(-2, 3, shape).astype(np.int8))
    weights = with_scaled_keys(load_weights(checkpoint, "float32", keeps_groups="exact"), config, scales)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert isinstance(weights, WeightsOnDemand)
    codes = weights.codes(name)
    assert isinstance(codes, GroupedCodes) and torch.equal(codes.weights(), weights[name])


def test_codes_are_kept_in_float32_on_cpus_unless_told_otherwise() -> None:
    def keeps(weights: str, *devices: str, dtype: str = "float32") -> bool:
        return resolve_precision(dtype, weights=weights, devices=devices or ("cpu",)).weights.keeps_groups

    assert keeps("auto") and keeps("stored") and keeps("stored", dtype="bfloat16")
    assert not keeps("plain") and not keeps("int8") and not keeps("auto", "cpu", "cuda")
    assert not keeps("auto", dtype="bfloat16")
    with pytest.raises(ConfigError, match="for CPUs"):
        keeps("stored", "cpu", "cuda")
    with pytest.raises(ConfigError, match=r"stored_a8.*for CPUs"):
        keeps("stored_a8", "cuda")
    coded = resolve_precision("float32", weights="stored_a8")
    assert coded.weights.keeps_groups == "a8" and coded.identity("d") != "d", "its KV is another"
    auto, plain = (resolve_precision("float32", weights=weights) for weights in ("auto", "plain"))
    assert auto.identity("d") == plain.identity("d"), "their KV is the same to the bit"
