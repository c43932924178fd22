"""Quantised folders: the values of their codes, token for token; int8 codes used directly; and clear errors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from greedy import NEW_TOKENS, greedy
from packing import most_bytes_while_packing
from published import SHAPE, Published, logits_of
from quantised import (
    INT8,
    Format,
    awq,
    compressed,
    float8,
    fp8,
    gptq,
    int8,
    less_one,
    packed,
    words,
    write_mxfp4,
)
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.checkpoint import open_checkpoint
from mooncake.config import load_config
from mooncake.errors import ModelError
from mooncake.kernels import choose_kernels, reference
from mooncake.key_scales import KeyScales
from mooncake.model import CausalLM
from mooncake.model.layers import Weights, WeightsOnDemand
from mooncake.model.load import load_model
from mooncake.model.reading.dequantise import dequantised
from mooncake.model.reading.key_channels import with_scaled_keys
from mooncake.model.reading.weights import load_weights
from mooncake.precision import FLOAT32, Coding, WeightFormat, resolve_precision
from mooncake.quantised import CodedWeight, Layout

TEXT = "the quick brown fox jumps over"

FORMATS: dict[str, Callable[[], Format]] = {
    "int8": int8,
    "int8 of whole weights": lambda: int8("tensor"),
    "packed 8 bits": lambda: packed(8),
    "packed 8 bits with zeros": lambda: packed(8, symmetric=False),
    "packed 4 bits": lambda: packed(4),
    "packed 4 bits in groups": lambda: packed(4, 16),
    "packed 4 bits in groups with zeros": lambda: packed(4, 32, symmetric=False),
    "packed 4 bits in groups with loose zeros": lambda: packed(4, 32, symmetric=False, loose_zeros=True),
    "packed 4 bits in scattered groups": lambda: packed(4, 16, order=True),
    "float8 of whole weights": lambda: float8("tensor"),
    "float8 by outputs": lambda: float8("channel"),
    "float8 in blocks": lambda: float8("block", (32, 32)),
    "fp8": fp8,
    "fp8 in blocks": lambda: fp8((32, 16)),
    "fp8 in blocks that do not fit": lambda: fp8((48, 40)),
    "GPTQ 4 bits": lambda: gptq(4, 32),
    "GPTQ 4 bits by outputs": lambda: gptq(4, 96),
    "GPTQ 4 bits, symmetric": lambda: gptq(4, 32, symmetric=True),
    "GPTQ 4 bits in order of activations": lambda: gptq(4, 16, order=True),
    "GPTQ 8 bits": lambda: gptq(8, 32),
    "GPTQ 4 bits, version 2": lambda: gptq(4, 32, version=2, bias=None),
    "GPTQ 8 bits in order of activations, version 2": lambda: gptq(8, 16, order=True, version=2),
    "AWQ": lambda: awq(32),
}


def answer(model: Path, **options: Any) -> tuple[list[int], tuple[int, ...]]:
    """Prompt and greedy answer of an engine in this process."""
    with LLM(str(model), kv_gb=0.01, block_tokens=16, chunk_tokens=16, **options) as llm:
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        return [int(i) for i in llm.tokenizer.encode(TEXT)], tuple(llm.generate([TEXT], sampling)[0].token_ids)


# What the codes stand for


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_codes_are_read_as_what_they_stand_for(form: Callable[[], Format], tmp_path: Path) -> None:
    published = Published(tmp_path / "tiny", form())
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_weights(published.checkpoint, str(dtype).removeprefix("torch."))
        expected = published.theirs.state_dict()
        assert weights.keys() == expected.keys()
        for name, values in weights.items():
            assert values.dtype is dtype and torch.equal(values, expected[name].to(dtype)), name
    prompt, tokens = answer(published.folder, weights="plain")
    assert tokens == published.greedy(prompt, tokens)
    assert len(set(tokens)) >= 4, "a model that repeats itself proves nothing"


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("form", [lambda: gptq(4, 32, bias=None), lambda: fp8((32, 32))], ids=["GPTQ", "fp8"])
def test_every_family_may_be_quantised(family: str, form: Callable[[], Format], tmp_path: Path) -> None:
    published = Published(tmp_path / "tiny", form(), family)
    prompt, tokens = answer(published.folder)
    assert tokens == published.greedy(prompt, tokens)


def test_biases_that_a_model_has_are_its_own(tmp_path: Path) -> None:
    shape = {"ffn_dim": 96, "word_embed_proj_dim": 64}
    published = Published(tmp_path / "tiny", gptq(4, 32, bias=None), "opt", **shape)
    prompt, tokens = answer(published.folder)
    assert tokens == published.greedy(prompt, tokens)


def test_transformers_reads_the_same_of_fp8_in_blocks(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    published = Published(tmp_path / "tiny", fp8((32, 32)))
    how = FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(published.folder, dtype=torch.float32, quantization_config=how)
    for name, values in load_weights(published.checkpoint, "float32").items():
        assert torch.equal(values, theirs.state_dict()[name]), name


def test_a_mixture_of_experts_may_be_quantised(tmp_path: Path) -> None:
    """transformers has experts in one tensor; published folders have them one by one, each with its scale."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    published = Published(tmp_path / "tiny", fp8((32, 32)), "qwen3_moe", **experts)
    stored = load_file(published.folder / "model.safetensors")
    pack = fp8((32, 32)).pack
    state = published.theirs.state_dict()
    with torch.no_grad():
        for name in [name for name in stored if ".experts." in name]:
            parts, values = pack(stored.pop(name).float())
            stored |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()}
            _put_expert(state, name, values)
    save_file(stored, published.folder / "model.safetensors")
    assert len(published.checkpoint.coded) == 2 * (4 + 3 * 4)
    prompt, tokens = answer(published.folder)
    assert tokens == published.greedy(prompt, tokens)


def _put_expert(state: Mapping[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    assert found is not None
    whole = state[f"{found[1]}.{'down_proj' if found[3] == 'down' else 'gate_up_proj'}"][int(found[2])]
    {"gate": whole[: len(whole) // 2], "up": whole[len(whole) // 2 :], "down": whole}[found[3]].copy_(values)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder whose experts are mxfp4, and transformers' own model with their values."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    shape = SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "initializer_range": 0.4}
    yarn = {"rope_type": "yarn", "factor": 8.0, "truncate": False, "original_max_position_embeddings": 32}
    theirs = write_tiny_model(folder, "gpt_oss", **shape, rope_parameters=yarn)
    write_mxfp4(folder, theirs)
    return folder, theirs


def test_the_experts_of_gpt_oss_are_mxfp4(gpt_oss: tuple[Path, Any]) -> None:
    folder, theirs = gpt_oss
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_weights(open_checkpoint(str(folder)), str(dtype).removeprefix("torch."))
        for name, values in theirs.state_dict().items():
            assert torch.equal(weights[name], values.to(dtype)), name
    prompt, tokens = answer(folder)
    assert list(tokens) == greedy(theirs, prompt, NEW_TOKENS, tokens)
    assert len(set(tokens)) >= 4, "a model that repeats itself proves nothing"
    assert answer(folder, tensor_parallel_size=2) == (prompt, tokens), "each rank has the values of its own experts"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_experts_of_gpt_oss_can_stay_mxfp4(gpt_oss: tuple[Path, Any], dtype: str) -> None:
    checkpoint = open_checkpoint(str(gpt_oss[0]))
    weights = load_weights(checkpoint, dtype, keeps_groups="exact")
    name = "model.layers.0.mlp.experts.down_proj"
    assert isinstance(weights, WeightsOnDemand) and (codes := weights.experts(name))
    assert torch.equal(torch.stack([each.weights() for each in codes]), weights[name].mT)
    coded, plain = (load_model(checkpoint, WeightFormat(dtype, keeps_groups=keeps)) for keeps in ("exact", ""))
    assert torch.equal(logits_of(coded, checkpoint, dtype), logits_of(plain, checkpoint, dtype))


def test_transformers_reads_the_same_of_mxfp4(gpt_oss: tuple[Path, Any]) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    folder, _ = gpt_oss
    how = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=how)
    for name, values in load_weights(open_checkpoint(str(folder)), "float32").items():
        assert torch.equal(values, theirs.state_dict()[name]), name


@pytest.mark.parametrize(
    ("part", "change", "sentence"),
    [
        ("scales", None, "the quantised weights lack model.layers.0.mlp.experts.down_proj_scales"),
        ("scales", torch.zeros(4, 64, 2, dtype=torch.uint8), "needs U8 [4, 64, 3]"),
        ("blocks", torch.zeros(4, 64, 3, 8, dtype=torch.uint8), "needs U8 [4, 64, 3, 16]"),
        ("blocks", torch.zeros(4, 64, 48, dtype=torch.uint8), "mxfp4 needs U8 of four dimensions"),
        ("blocks", torch.zeros(4, 64, 3, 16), "needs U8 [4, 64, 3, 16]"),
    ],
)
def test_mxfp4_that_does_not_fit_is_one_sentence(
    gpt_oss: tuple[Path, Any], part: str, change: torch.Tensor | None, sentence: str, tmp_path: Path
) -> None:
    shutil.copytree(gpt_oss[0], tmp_path / "bad")
    file = tmp_path / "bad" / "model.safetensors"
    tensors: dict[str, Any] = load_file(file) | {f"model.layers.0.mlp.experts.down_proj_{part}": change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(ModelError, match=re.escape(sentence)):
        open_checkpoint(str(tmp_path / "bad"))


@pytest.mark.slow
def test_a_layer_is_packed_before_the_next_one_is_dequantised(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
    published = Published(tmp_path / "wide", gptq(4, 128, order=True), num_hidden_layers=8, **wide)
    packed_bytes = 2 * sum(weight.numel() for weight in published.theirs.state_dict().values())
    assert most_bytes_while_packing(published.folder) < 1.3 * packed_bytes


# Known answers: words that the formats' own tools wrote (compressed-tensors 0.20, AutoGPTQ 0.7.1, AutoAWQ 0.2.9)


def known(shape: tuple[int, int], layout: Layout, bits: int, codes: int, zeros: int = 0) -> list[list[float]]:
    """The values of a weight whose codes are all the same word, with a scale of 1 and one zero per output."""
    outputs, inputs = shape

    def word(bits: int) -> torch.Tensor:
        return torch.tensor([[bits - (1 << 32) if bits >> 31 else bits]], dtype=torch.int32)

    stored = {
        "codes": word(codes).expand({"packed": (outputs, 1), "gptq": (1, outputs), "awq": (inputs, 1)}[layout]),
        "zeros": word(zeros),
        "scales": torch.ones((outputs, 1) if layout == "packed" else (1, outputs)),
    }
    weight = CodedWeight(
        shape,
        layout,
        bits,
        (1, shape[1]),
        "codes",
        "scales",
        "zeros" if zeros else "",
        zero_shift=int(layout == "gptq"),
    )
    values: list[list[float]] = dequantised(weight, stored, torch.float32).tolist()
    return values


def test_words_of_the_formats_own_tools() -> None:
    signed = [-8, -7, -3, -1, 0, 1, 4, 7]
    assert known((1, 8), "packed", 4, 0xFC987510) == [signed]
    assert known((1, 4), "packed", 8, 0xFF807F00) == [[-128, -1, 0, 127]]
    assert known((8, 8), "packed", 4, 0xFC987510, 0xFC987510) == [[code - zero for code in signed] for zero in signed]
    codes = [3, 6, 9, 12, 15, 2, 5, 8]
    assert known((8, 8), "gptq", 4, 0x852FC963, 0x76543210) == [[c - zero for c in codes] for zero in range(1, 9)]
    codes = [135, 138, 141, 144]
    assert known((4, 4), "gptq", 8, 0x908D8A87, 0x03020100) == [[c - zero for c in codes] for zero in range(1, 5)]
    assert known((8, 1), "awq", 4, 0x75316420, 0x86427531) == [[code - (code + 1)] for code in range(8)]
    bytes_of = torch.arange(16, dtype=torch.uint8) * 2 | (torch.arange(16, dtype=torch.uint8) * 2 + 1) << 4
    stored = {"codes": bytes_of.view(1, 1, 1, 16), "scales": torch.tensor([[[128]]], dtype=torch.uint8)}
    halves = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]  # OCP's table of E2M1, times two
    experts = CodedWeight((1, 32, 1), "mxfp4", 4, (1, 32), "codes", "scales")
    [[values]] = dequantised(experts, stored, torch.float32).mT
    assert values.tolist() == [*halves, *(-value for value in halves)] * 2
    for power, value in ((0, 2.0**-127), (254, 2.0**127)):
        stored["scales"] = torch.tensor([[[power]]], dtype=torch.uint8)
        [[first, _, one, *_]] = dequantised(experts, stored, torch.float32).mT.squeeze(0).tolist()
        assert (first, one) == (0.0, value)
    stored["scales"] = torch.tensor([[[255]]], dtype=torch.uint8)
    with pytest.raises(ModelError, match="scales has a scale of 255, which means NaN in mxfp4"):
        dequantised(experts, stored, torch.float32)
    assert known((8, 1), "awq", 4, 0xFDB9ECA8, 0x86427531) == [[code + 8 - (code + 1)] for code in range(8)]


# int8 codes taken as they are


def test_the_codes_reach_the_products_as_they_are(tmp_path: Path) -> None:
    checkpoint = Published(tmp_path / "tiny", int8()).checkpoint
    weights = load_weights(checkpoint, "bfloat16", "w8a8")
    assert isinstance(weights, WeightsOnDemand)
    stored = load_file(tmp_path / "tiny" / "model.safetensors")
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        codes = weights.codes(name)
        assert codes is not None and (codes.coding, codes.dtype) == ("w8a8", torch.bfloat16)
        assert torch.equal(codes.values, stored[name]) and codes.values.min() == -128
        assert torch.equal(codes.scales, stored[name + "_scale"].float().flatten())
    assert weights.codes("lm_head.weight") is None, "it is on the list of those to ignore"
    assert weights.codes("model.norm.weight") is None


@pytest.mark.parametrize(
    "form",
    [int8(activations=None), int8("tensor", None), packed(8), packed(4)],
    ids=["int8", "int8 of whole weights", "packed 8 bits", "packed 4 bits"],
)
def test_int8_weights_alone_give_the_tokens_of_their_values(form: Format, tmp_path: Path) -> None:
    published = Published(tmp_path / "tiny", form)
    checkpoint = published.checkpoint
    for kernels in (choose_kernels(), reference):
        coded = load_model(checkpoint, WeightFormat("float32", codes="int8"), kernels=kernels)
        plain = load_model(checkpoint, FLOAT32, kernels=kernels)
        assert isinstance(coded, CausalLM) and isinstance(plain, CausalLM)
        torch.testing.assert_close(logits_of(coded, checkpoint), logits_of(plain, checkpoint), atol=1e-3, rtol=1e-3)
    prompt, tokens = answer(published.folder)
    assert tokens == published.greedy(prompt, tokens)


def test_w8a8_is_the_arithmetic_of_its_scheme(tmp_path: Path) -> None:
    """transformers with activations quantised per token; one code in a hundred may be rounded differently."""
    published = Published(tmp_path / "tiny", int8())
    for name, module in published.theirs.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, given: (_coded_and_back(given[0]),))
    checkpoint = published.checkpoint
    with torch.no_grad():
        expected = published.theirs((torch.arange(40) * 37 % 300)[None]).logits[0]
    for kernels in (choose_kernels(), reference):
        model = load_model(checkpoint, WeightFormat("float32", codes="w8a8"), kernels=kernels)
        assert isinstance(model, CausalLM)
        error = (logits_of(model, checkpoint) - expected).square().mean() / expected.square().mean()
        assert error < 1e-4
    plain = load_model(checkpoint, FLOAT32)
    assert isinstance(plain, CausalLM)
    assert (logits_of(plain, checkpoint) - expected).square().mean() / expected.square().mean() > 1e-4


def _coded_and_back(hidden: torch.Tensor) -> torch.Tensor:
    scale = hidden.abs().amax(-1, keepdim=True) / 127
    return (hidden / scale).round() * scale


@pytest.mark.parametrize("codes", ["int8", "w8a8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_codes_one_call_gives_the_bits_of_the_pass_step_by_step(codes: Coding, dtype: str, tmp_path: Path) -> None:
    checkpoint, kernels = Published(tmp_path / "tiny", int8()).checkpoint, choose_kernels()
    weights = load_weights(checkpoint, dtype, codes)
    passes = [CausalLM(checkpoint.config, weights, 64, kernels, is_fused=fused) for fused in (True, False)]
    one_call, steps = (logits_of(model, checkpoint, dtype) for model in passes)
    assert torch.equal(one_call, steps) and one_call.isfinite().all()


def test_a_product_of_codes_and_of_values_is_one_of_values(tmp_path: Path) -> None:
    """q, k and v are one product: if v is not quantised in the checkpoint, all three are used as values."""
    published = Published(tmp_path / "tiny", int8())
    file = published.folder / "model.safetensors"
    stored, name = load_file(file), "model.layers.0.self_attn.v_proj.weight"
    save_file(
        {key: tensor for key, tensor in stored.items() if key != name + "_scale"}
        | {name: published.theirs.state_dict()[name].clone()},
        file,
    )
    checkpoint = published.checkpoint
    coded = load_model(checkpoint, WeightFormat("float32", codes="int8"))
    assert isinstance(coded, CausalLM)
    plain = load_model(checkpoint, FLOAT32)
    assert isinstance(plain, CausalLM)
    torch.testing.assert_close(logits_of(coded, checkpoint), logits_of(plain, checkpoint), atol=1e-3, rtol=1e-3)


def test_factors_of_key_channels_go_into_the_scales(tmp_path: Path) -> None:
    checkpoint = Published(tmp_path / "tiny", int8()).checkpoint
    exponents = np.random.default_rng(0).integers(-3, 4, (2, 2, 8)).astype(np.int8)
    weights = load_weights(checkpoint, "float32", "w8a8")
    scaled = with_scaled_keys(weights, checkpoint.config, KeyScales(exponents))
    for part in ("q_proj", "k_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        codes = scaled.codes(name) if isinstance(scaled, WeightsOnDemand) else None
        assert codes is not None
        assert torch.equal(codes.values * codes.scales[:, None], scaled[name])
        assert not torch.equal(scaled[name], weights[name])

    def logits(given: Weights) -> torch.Tensor:
        return logits_of(CausalLM(checkpoint.config, given, 64), checkpoint)

    assert torch.equal(logits(scaled), logits(weights))


# Which weights are used


def test_the_setting_and_the_scheme_decide_together() -> None:
    def codes(weights: str, stored: Coding, *devices: str) -> tuple[Coding, Coding]:
        precision = resolve_precision("float32", weights=weights, devices=devices or ("cpu",), stored=stored)
        return precision.weights.coding, precision.weights.codes

    assert str(resolve_precision("float32", weights="auto", stored="w8a8").weights) == "w8a8 as stored, others float32"
    assert codes("auto", "w8a8") == codes("auto", "w8a8", "cuda", "cpu") == ("", "w8a8")
    assert codes("auto", "int8") == ("", "int8")
    assert codes("auto", "int8", "cuda", "cpu") == ("", ""), "there are no kernels for it on a GPU"
    assert codes("plain", "w8a8") == codes("plain", "int8") == codes("auto", "") == ("", "")
    assert codes("int8", "w8a8") == codes("int8", "int8") == ("int8", "int8")
    assert codes("w8a8", "w8a8") == ("w8a8", "w8a8")
    assert codes("w8a8", "int8") == ("w8a8", ""), "made for activations as they are: coded anew, with the transform"
    kinds = {
        resolve_precision("float32", weights=w, stored="w8a8").identity("d") for w in ("auto", "plain", "int8", "w8a8")
    }
    assert len(kinds) == 4, "KV of one is never taken for another's"


@pytest.mark.parametrize(
    ("form", "coding"),
    [
        (int8(), "w8a8"),
        (int8(activations=None), "int8"),
        (int8(activations=INT8 | {"strategy": "tensor"}), "int8"),
        (packed(8), "int8"),
        (packed(4), "int8"),
        (packed(4, 16), ""),
        (packed(8, symmetric=False), ""),
        (float8("channel"), ""),
        (fp8(), ""),
        (gptq(8, 32, symmetric=True), ""),
        (awq(32), ""),
    ],
)
def test_a_checkpoint_says_what_its_codes_are_for(form: Format, coding: Coding, tmp_path: Path) -> None:
    checkpoint = Published(tmp_path / "tiny", form).checkpoint
    assert checkpoint.coding == coding
    per_layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64
    assert checkpoint.num_codes == (2 * per_layer if coding else 0)
    assert load_config().precision(checkpoint.coding).weights.codes == coding


def test_the_codes_are_what_an_engine_takes_unless_told_otherwise(tmp_path: Path) -> None:
    """By default a Llama of W8A8 codes keeps them, in a quarter of the memory of its projections' values."""
    published = Published(tmp_path / "tiny", int8())
    with (
        LLM(str(published.folder), kv_gb=0.01) as auto,
        LLM(str(published.folder), kv_gb=0.01, weights="plain") as plain,
    ):
        bytes_of = [model.engine._model.decoder.weight_bytes for model in (auto, plain)]
    assert bytes_of[0] < 0.65 * bytes_of[1]


@pytest.mark.slow
def test_other_families_and_several_processes_take_the_values(tmp_path: Path) -> None:
    published = Published(tmp_path / "gemma", int8(), "gemma3_text")
    assert published.checkpoint.coding == ""
    prompt, tokens = answer(published.folder)
    assert tokens == published.greedy(prompt, tokens)
    published = Published(tmp_path / "llama", int8())
    assert published.checkpoint.coding == "w8a8"
    prompt, tokens = answer(published.folder, tensor_parallel_size=2)
    assert tokens == published.greedy(prompt, tokens)


# Digests


def test_the_same_bytes_read_in_another_way_are_another_model(tmp_path: Path) -> None:
    published = Published(tmp_path / "tiny", gptq(4, 32))
    first = published.checkpoint.digest
    published.edit(checkpoint_format="gptq_v2")
    second = published.checkpoint.digest
    published.edit(checkpoint_format="gptq", damp_percent=0.1, meta={"quantizer": "another"})
    assert published.checkpoint.digest == first != second, "what changes no weight is no other model"
    other = Published(tmp_path / "awq", awq(32)).checkpoint.digest
    plain = tmp_path / "plain"
    write_tiny_model(plain, **SHAPE)
    assert len({first, second, other, open_checkpoint(str(plain)).digest}) == 4


# What is not opened


def problem(published: Published) -> str:
    with pytest.raises(ModelError) as refused:
        dict(load_weights(published.checkpoint, "float32"))
    assert "\n" not in refused.value.message
    return refused.value.message


@pytest.mark.parametrize(
    ("form", "change", "sentence"),
    [
        (
            fp8,
            {"quant_method": "bitsandbytes"},
            "is quantised by 'bitsandbytes', which is not supported; supported: comp",
        ),
        (fp8, {"quant_method": "mxfp4"}, "scale, which its configuration does not need"),
        (fp8, {"quant_method": None}, "is quantised by None, which is not supported"),
        (fp8, {"weight_block_size": [128]}, "weight_block_size must be two sizes, got [128]"),
        (fp8, {"weight_block_size": [0, 128]}, "weight_block_size must be two sizes"),
        (lambda: gptq(4, 32), {"bits": 3}, "asks for GPTQ of 3 bits; supported: 4 and 8"),
        (lambda: gptq(4, 32), {"bits": None}, "lacks bits"),
        (lambda: gptq(4, 32), {"bits": 8}, "its quantisation needs"),
        (lambda: gptq(4, 32), {"group_size": 16}, "its quantisation needs F32 or F16 or BF16 [6, 64]"),
        (lambda: gptq(4, 32), {"checkpoint_format": "marlin"}, "has the checkpoint_format 'marlin'; supported: gptq,"),
        (lambda: gptq(4, 32), {"dynamic": {"+:.*down.*": {"bits": 8}}}, "quantises some modules in their own way"),
        (lambda: awq(32), {"bits": 8}, "asks for AWQ of 8 bits; supported: 4"),
        (lambda: awq(32), {"version": "gemv"}, "asks for AWQ packed for 'gemv'; supported: gemm"),
        (int8, {"format": "marlin-24"}, "has the format 'marlin-24'; supported: int-quantized, "),
        (int8, {"format": "nvfp4-pack-quantized"}, "has the format 'nvfp4-pack-quantized'"),
        (int8, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "has sparse weights (sparse-24-bitmask)"),
        (int8, {"transform_config": {"config_groups": {"R1": {}}}}, "asks for a transform_config"),
        (int8, {"config_groups": {}}, "has no config_groups with weights"),
        (int8, {"config_groups": [1]}, "config_groups must be an object of objects"),
        (int8, {"config_groups": {"a": {"weights": 1}}}, "must have weights and a list of targets"),
        (int8, {"config_groups": {"a": {"weights": INT8, "targets": ["re:(("]}}}, "has a target that is no pattern"),
        (int8, {"config_groups": {"a": {"weights": {"num_bits": 64}, "targets": []}}}, "weights of 64 bits"),
        (
            lambda: packed(4),
            {"config_groups": {"a": {"weights": {"num_bits": 3}, "targets": []}}},
            "packed with 3 bits",
        ),
    ],
)
def test_what_is_not_supported_is_one_sentence(
    form: Callable[[], Format], change: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    published = Published(tmp_path / "tiny", form())
    published.edit(**change)
    assert sentence in problem(published)


@pytest.mark.parametrize(
    ("form", "change", "sentence"),
    [
        (int8, {"weight_scale": None}, "the quantised weights lack model.layers.0.self_attn.q_proj.weight_scale"),
        (
            int8,
            {"weight_scale": torch.ones(63, 1)},
            "weight_scale is F32 [63, 1], which does not fit a weight of [64, 64]",
        ),
        (int8, {"weight_scale": torch.ones(64, 0)}, "does not fit a weight"),
        (
            int8,
            {"weight_scale": torch.ones(64, 1, dtype=torch.int32)},
            "weight_scale is I32 [64, 1], which does not fit",
        ),
        (int8, {"weight": torch.ones(64, dtype=torch.int8)}, "its quantisation needs a matrix of I8"),
        (int8, {"weight": torch.ones(64, 32, dtype=torch.int8)}, "the configuration says (64, 64)"),
        (lambda: packed(4, 16, False), {"weight_zero_point": None}, "lack model.layers.0.self_attn.q_proj.weight_zero"),
        (fp8, {"weight_scale": None}, "the quantised weights lack model.layers.0.self_attn.q_proj.weight_scale"),
        (lambda: fp8((32, 32)), {"weight_scale_inv": torch.ones(1)}, "weight_scale_inv is F32 [1], which does not fit"),
        (
            lambda: gptq(4, 32, order=True),
            {"g_idx": None},
            "the quantised weights lack model.layers.0.self_attn.q_proj.g",
        ),
        (lambda: gptq(4, 32), {"qzeros": None}, "the quantised weights lack model.layers.0.self_attn.q_proj.qzeros"),
        (
            lambda: gptq(4, 32),
            {"g_idx": torch.ones(3, dtype=torch.int32)},
            "g_idx is I32 [3]; its quantisation needs I32 [64]",
        ),
        (lambda: gptq(4, 32), {"g_idx": torch.full((64,), 2).int()}, "g_idx names a group that"),
        (lambda: gptq(4, 32), {"g_idx": torch.arange(-1, 63).int()}, "g_idx names a group that"),
        (lambda: gptq(4, 32), {"bias": torch.ones(64)}, "q_proj.bias, which its configuration does not need"),
        (lambda: awq(32), {"scales": torch.ones(2, 63).half()}, "scales is F16 [2, 63]; its quantisation needs"),
    ],
)
def test_tensors_that_do_not_fit_are_one_sentence(
    form: Callable[[], Format], change: dict[str, torch.Tensor | None], sentence: str, tmp_path: Path
) -> None:
    published = Published(tmp_path / "tiny", form())
    published.edit_tensors(**change)
    assert sentence in problem(published)


def test_a_method_is_refused_before_its_files_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}')
    with pytest.raises(ModelError, match="is quantised by 'hqq'"):
        open_checkpoint(str(tmp_path))


def test_groups_of_several_kinds_are_told_apart_by_name(tmp_path: Path) -> None:
    """8 bits where a pattern says so, 4 elsewhere; names come before classes."""
    eight, four = packed(8), packed(4, 16)

    published = Published(tmp_path / "tiny", packed(4, 16))
    theirs = write_tiny_model(published.folder, **SHAPE)
    mixed = Format(four.settings, four.pack)
    file = published.folder / "model.safetensors"
    state = theirs.state_dict()
    stored = load_file(file)
    for name in list(stored):
        if name.endswith("_proj.weight"):
            parts, values = (eight if "down_proj" in name else mixed).pack(stored.pop(name))
            stored |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()}
            state[name].copy_(values)
    save_file(stored, file)
    groups = {
        "group_0": four.settings["config_groups"]["group_0"],
        "group_1": eight.settings["config_groups"]["group_0"] | {"targets": ["re:.*down_proj$"]},
    }
    config = published.folder / "config.json"
    settings = compressed("mixed-precision", INT8, None, four.pack).settings | {"config_groups": groups}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": settings}))
    for name, values in load_weights(open_checkpoint(str(published.folder)), "float32").items():
        assert torch.equal(values, state[name]), name


def test_words_of_a_zero_that_is_zero_borrow_from_the_next(tmp_path: Path) -> None:
    """GPTQ's first version stores zeros minus one, subtracted from whole words, here from 0, 5, 0, 3."""
    zeros = torch.tensor([[0, 5, 0, 3, 15, 0, 0, 1]])
    weight = CodedWeight((8, 8), "gptq", 4, (1, 8), "codes", "scales", "zeros", zero_shift=1)
    stored = {
        "codes": words(torch.zeros(8, 8), 4).T.contiguous(),
        "scales": torch.ones(1, 8),
        "zeros": less_one(words(zeros, 4), 4),
    }
    assert torch.equal(dequantised(weight, stored, torch.float32)[:, 0], -zeros[0].float())
