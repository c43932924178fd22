"""Weights as torch tensors: bit for bit those that transformers reads, and later mapped from the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from converted import cache_for_weights
from dirty_pages import dirty_kb
from packing import most_bytes_while_packing
from reference import smollm2
from safetensors.torch import load, load_file, save, save_file
from tiny_gguf import write_gguf
from tiny_model import write_tiny_model

from mooncake.checkpoint import open_checkpoint, weight_shapes
from mooncake.errors import ModelError
from mooncake.model.reading.weights import load_weights


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of weights of this test's own, gone with it: it may be large."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_for_weights(tmp_path)))
    yield tmp_path / "cache" / "mooncake" / "weights"
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def state_of(model: Any, tied: bool) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    return {name: tensor for name, tensor in state.items() if not (tied and name == "lm_head.weight")}


@pytest.mark.slow
def test_the_demo_model_is_dequantised_bit_for_bit_as_by_transformers(cache: Path) -> None:
    checkpoint = open_checkpoint("smollm2")
    theirs = state_of(smollm2(), tied=True)
    same(load_weights(checkpoint, "float32"), theirs)
    assert len(list(cache.iterdir())) == 1
    same(load_weights(checkpoint, "float32"), theirs)  # from the cache
    half = {name: tensor.bfloat16() for name, tensor in theirs.items()}
    same(load_weights(checkpoint, "bfloat16"), half)


def test_the_demo_model_is_mapped_in_moments_once_it_is_cached() -> None:
    checkpoint = open_checkpoint("smollm2")
    load_weights(checkpoint, "float32")
    started = time.process_time()
    load_weights(checkpoint, "float32")
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("shards_of", ["1GB", "40KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_gives_the_weights_that_were_saved(tmp_path: Path, family: str, shards_of: str, dtype: str) -> None:
    model = write_tiny_model(tmp_path / "tiny", family, shards_of)
    ours = load_weights(open_checkpoint(str(tmp_path / "tiny")), dtype)
    same(ours, {name: tensor.to(getattr(torch, dtype)) for name, tensor in model.state_dict().items()})


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_a_gguf_file_gives_what_transformers_makes_of_it(tmp_path: Path, family: str, kind: str) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    write_gguf(tmp_path / "a.gguf", family, pre="gpt-2", kind=gguf.GGMLQuantizationType[kind])
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="a.gguf",
        dtype=torch.float32,
        local_files_only=True,
        quantization_config=GgufConfig(dequantize=True),
    )
    checkpoint = open_checkpoint(str(tmp_path / "a.gguf"))
    ours = load_weights(checkpoint, "float32")
    same(ours, state_of(theirs, tied=True))
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == weight_shapes(checkpoint.config)


def test_half_precision_files_are_read_too(tmp_path: Path) -> None:
    write_gguf(tmp_path / "f.gguf", kind=gguf.GGMLQuantizationType.F32)
    full = load_weights(open_checkpoint(str(tmp_path / "f.gguf")), "float32")
    for kind, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        write_gguf(tmp_path / "h.gguf", kind=gguf.GGMLQuantizationType[kind])
        rounded = {n: t.to(dtype).float() if t.ndim == 2 else t for n, t in full.items()}
        same(load_weights(open_checkpoint(str(tmp_path / "h.gguf")), "float32"), rounded)


@pytest.mark.slow
def test_a_layer_is_packed_before_the_next_one_is_read(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}
    write_tiny_model(tmp_path / "wide", num_hidden_layers=8, **wide)
    packed_bytes = (tmp_path / "wide" / "model.safetensors").stat().st_size / 2  # the file is float32
    assert most_bytes_while_packing(tmp_path / "wide") < 1.7 * packed_bytes


# The cache


def check_made_again(spoil: Callable[[bytes], bytes], folder: Path, cache: Path, dtype: str = "float32") -> None:
    """What is made of cached bytes is seen, and they are as before once weights have been loaded again."""
    write_gguf(folder / "a.gguf")
    checkpoint = open_checkpoint(str(folder / "a.gguf"))
    usual = {name: tensor.clone() for name, tensor in load_weights(checkpoint, dtype).items()}
    (cached,) = cache.iterdir()
    whole = cached.read_bytes()
    cached.unlink()
    cached.write_bytes(spoil(whole))
    same(load_weights(checkpoint, dtype), usual)
    assert cached.read_bytes() == whole


@pytest.mark.parametrize(
    "damage", [lambda _: b"", lambda whole: whole[:100], lambda whole: whole[:-4], lambda _: b"\xff" * 200]
)
def test_a_cache_that_is_broken_is_made_again(damage: Callable[[bytes], bytes], tmp_path: Path, cache: Path) -> None:
    check_made_again(damage, tmp_path, cache)


def test_another_model_of_the_same_name_gets_weights_of_its_own(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    load_weights(open_checkpoint(str(tmp_path / "a.gguf")), "float32")
    write_gguf(tmp_path / "a.gguf", **{"rope.freq_base": 20000.0})
    load_weights(open_checkpoint(str(tmp_path / "a.gguf")), "float32")
    load_weights(open_checkpoint(str(tmp_path / "a.gguf")), "bfloat16")
    assert len(list(cache.iterdir())) == 3


def test_without_a_place_for_the_cache_the_weights_are_loaded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "a.gguf")
    checkpoint = open_checkpoint(str(tmp_path / "a.gguf"))
    usual = load_weights(checkpoint, "float32")
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    same(load_weights(checkpoint, "float32"), usual)


def test_a_disk_that_fills_up_leaves_no_part_behind(tmp_path: Path) -> None:
    """The limit on the size of a file stands for the full disk: writing stops in the middle."""
    write_gguf(tmp_path / "a.gguf")
    code = f"""
import resource
from mooncake.checkpoint import open_checkpoint
from mooncake.model.reading.weights import load_weights
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
print(len(load_weights(open_checkpoint({str(tmp_path / "a.gguf")!r}), "float32")))
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "full")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) == 20
    assert "weights are not cached" in done.stderr
    assert list((tmp_path / "full" / "mooncake" / "weights").iterdir()) == []


def test_two_processes_that_load_at_once_agree(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    code = f"""
import hashlib
from mooncake.checkpoint import open_checkpoint
from mooncake.model.reading.weights import load_weights
weights = load_weights(open_checkpoint({str(tmp_path / "a.gguf")!r}), "float32")
print(hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest())
"""
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    digests = {process.communicate(timeout=120)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(digests) == 1
    assert [file.suffix for file in cache.iterdir()] == [".safetensors"]


def test_a_file_that_another_process_has_just_removed_is_no_reason_not_to_cache(tmp_path: Path, cache: Path) -> None:
    """A link to nothing stands for it: it is listed, and not there when one looks."""
    write_gguf(tmp_path / "a.gguf")
    cache.mkdir(parents=True)
    for name in ("renamed.1.part", "evicted.safetensors"):
        (cache / name).symlink_to(cache / "gone")
    load_weights(open_checkpoint(str(tmp_path / "a.gguf")), "float32")
    assert sum(file.is_file() for file in cache.iterdir()) == 1


def test_weights_are_cached_under_their_name_once_they_are_on_the_disk(tmp_path: Path, cache: Path) -> None:
    """After a power cut the name would be there, and zeros in the file."""
    write_gguf(tmp_path / "a.gguf")
    load_weights(open_checkpoint(str(tmp_path / "a.gguf")), "float32")
    (cached,) = cache.iterdir()
    assert dirty_kb(cached) == 0


@pytest.mark.parametrize(
    "damage", [lambda _: b"", lambda whole: bytes(len(whole)), lambda whole: whole[: len(whole) // 2]]
)
def test_cached_weights_that_a_power_cut_has_spoilt_are_made_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, cache: Path
) -> None:
    check_made_again(damage, tmp_path, cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("damage", [lambda data: bytes(len(data)), lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_cached_weights_whose_header_is_whole_and_their_bytes_are_not_are_made_again(
    damage: Callable[[bytes], bytes], dtype: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoilt(whole: bytes) -> bytes:
        begin = 8 + int.from_bytes(whole[:8], "little")
        return whole[:begin] + damage(whole[begin:])

    check_made_again(spoilt, tmp_path, cache, dtype)
    assert "cannot be used: their checksum does not match" in caplog.text


def test_cached_weights_of_a_version_without_checksums_are_made_again(tmp_path: Path, cache: Path) -> None:
    def unsummed(whole: bytes) -> bytes:
        return save({name: torch.zeros_like(tensor) for name, tensor in load(whole).items()})

    check_made_again(unsummed, tmp_path, cache)


def test_weights_of_a_kind_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    path = tmp_path / "tiny" / "model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(ModelError, match=r"is of the type torch\.int8, which is not supported"):
        load_weights(open_checkpoint(str(tmp_path / "tiny")), "float32")
