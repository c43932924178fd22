"""``LLM`` on other devices: the GPU's kernels (in Triton's interpreter) and several processes give the CPU's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from greedy import greedy
from tiny_families import VOCAB, Published
from tiny_gemma4 import GEMMA3N, GEMMA4
from tiny_hybrid import write_hybrid
from tiny_lora import activated, write_adapter
from tiny_model import LATENT, write_tiny_model, write_tokenizer

from mooncake import LLM, LoRARequest, SamplingParams
from mooncake.errors import InvalidRequest, ModelError
from mooncake.kernels.gpu.triton_launch import INTERPRETED

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
PROMPTS = [np.random.default_rng(seed).integers(3, 320, length).tolist() for seed, length in ((0, 35), (1, 4), (2, 30))]
FEW = [np.random.default_rng(seed).integers(2, VOCAB, length).tolist() for seed, length in ((3, 45), (4, 1), (5, 18))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tiny")
    base = write_tiny_model(folder, head_dim=16, hidden_size=64)
    write_adapter(folder / "activated", base, seed=2, invocation=PROMPTS[2][20:22])
    return folder, {
        "": base,
        "adapted": write_adapter(folder / "adapter", base, seed=1),
        "activated": activated(base, folder / "activated", start=20),
    }


@pytest.mark.skipif(not INTERPRETED, reason="a GPU in bfloat16 has ties of its own; `make gpu` runs whole models there")
def test_an_engine_on_a_gpu_gives_the_tokens_of_transformers(models: tuple[Path, dict[str, Any]]) -> None:
    folder, by_name = models
    adapters = {"adapted": str(folder / "adapter"), "activated": str(folder / "activated")}
    with LLM(str(folder), kv_gb=0.005, block_tokens=16, chunk_tokens=32, device="cuda", adapters=adapters) as llm:
        names = ["", "adapted", "activated"]
        answers = llm.generate(PROMPTS, GREEDY, adapter=names)
        named_later = LoRARequest("again", 1, adapters["adapted"])
        answers += llm.generate(PROMPTS[:2], GREEDY, lora_request=[named_later, None])
    names, prompts = [*names, "adapted", ""], [*PROMPTS, *PROMPTS[:2]]
    for name, prompt, answer in zip(names, prompts, answers, strict=True):
        assert answer.token_ids == greedy(by_name[name], prompt, 3)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU in bfloat16 has ties of its own; `make gpu` runs whole models there")
def test_int8_weights_on_a_gpu_give_the_tokens_of_a_cpu(models: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = models
    found = []
    for device in ("cpu", "cuda"):
        with LLM(str(folder), kv_gb=0.005, block_tokens=16, device=device, weights="int8") as llm:
            found.append([answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)])
    assert found[0] == found[1]


@pytest.mark.skipif(not INTERPRETED, reason="a GPU in bfloat16 has ties of its own; `make gpu` runs whole models there")
@pytest.mark.parametrize("kv_dtype", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
def test_latent_attention_on_a_gpu_gives_the_tokens_of_a_cpu(kv_dtype: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "deepseek_v3", **LATENT)
    found = []
    for device in ("cpu", "cuda"):
        options = {"kv_gb": 0.005, "block_tokens": 16, "chunk_tokens": 32, "kv_dtype": kv_dtype}
        with LLM(str(tmp_path), device=device, **options) as llm:
            found.append([answer.token_ids for answer in llm.generate(PROMPTS[:2], GREEDY)])
    assert found[1] == found[0]


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="a GPU in bfloat16 has ties of its own; `make gpu` runs whole models there")
@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        ("small", "float32"),
        pytest.param("mixture", "int8", marks=pytest.mark.slow),
        pytest.param("unified", "float32", marks=pytest.mark.slow),
        pytest.param("3n", "float32", marks=pytest.mark.slow),
    ],
)
def test_layers_with_heads_of_two_sizes_on_a_gpu_give_the_tokens_of_a_cpu(
    family: str, kv_dtype: str, tmp_path: Path
) -> None:
    """Gemma 4, and 3n: on a CPU they give those of transformers (tests/model/test_gemma4.py)."""
    Published(family, tmp_path, GEMMA4 | GEMMA3N)
    write_tokenizer(tmp_path)
    found = []
    for device in ("cpu", "cuda"):
        options = {"kv_gb": 0.01, "block_tokens": 8, "chunk_tokens": 24, "kv_dtype": kv_dtype}
        with LLM(str(tmp_path), device=device, **options) as llm:
            found.append([answer.token_ids for answer in llm.generate(FEW, GREEDY)])
    assert found[1] == found[0]


def test_rows_wider_than_a_gpu_takes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "deepseek_v3", **(LATENT | {"kv_lora_rank": 640}))
    with pytest.raises(ModelError, match="keeps more of a token than the 576 numbers that GPUs take"):
        LLM(str(tmp_path), device="cuda")


def test_more_wide_heads_than_a_gpu_takes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama", hidden_size=66, num_attention_heads=66, num_key_value_heads=1, head_dim=192)
    with pytest.raises(ModelError, match="more than 64 query heads of more than 128 numbers for one KV head"):
        LLM(str(tmp_path), device="cuda")


def test_mixtures_whose_weights_would_be_codes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    write_hybrid("granite-4-moe", tmp_path)
    with pytest.raises(ModelError, match="is a mixture, and experts on GPUs are values"):
        LLM(str(tmp_path), device="cuda", weights="w8a8")


def test_an_engine_over_two_processes_gives_the_tokens_of_transformers(models: tuple[Path, dict[str, Any]]) -> None:
    folder, by_name = models
    with LLM(str(folder), kv_gb=0.005, block_tokens=16, tensor_parallel_size=2) as llm:
        answers = llm.generate(PROMPTS, GREEDY)
    assert [answer.token_ids for answer in answers] == [greedy(by_name[""], prompt, 3) for prompt in PROMPTS]
    for way in ("pipeline_parallel_size", "context_parallel_size"):
        with pytest.raises(InvalidRequest, match=f"{way} is for CPUs"):
            LLM(str(folder), device="cuda", **{way: 2})  # type: ignore[arg-type]
