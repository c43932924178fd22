"""A cache on a GPU and its mirror in host memory, here in Triton's interpreter: blocks go where they are asked to."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tiny_model import write_tiny_model

from mooncake import LLM, SamplingParams
from mooncake.engine.cache import device_cache
from mooncake.engine.cache.device_cache import DeviceCache, HostMirror, SettledModel, Share
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.engine.contract import NO_HOOK
from mooncake.errors import ConfigError
from mooncake.kernels.gpu.kernels import GpuKernels
from mooncake.kernels.gpu.triton_launch import INTERPRETED
from mooncake.model.pages import SharedMemory
from mooncake.types import KVLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, block_tokens=4, head_dim=8, dtype="float32")


@pytest.fixture
def cache() -> DeviceCache:
    return DeviceCache(LAYOUT, 6, GpuKernels().device, num_places=2)


def test_a_layer_or_all_of_some_blocks_go_out_and_in_and_the_others_stay(cache: DeviceCache) -> None:
    buffer = memoryview(bytearray(6 * LAYOUT.block_bytes))
    mirror = HostMirror(cache, buffer)
    cache.tensor.copy_(torch.arange(cache.tensor.numel()).view(cache.tensor.shape))
    seen = KVCache(LAYOUT, 6, buffer).tensor  # as another node sees it

    mirror.to_host([4, 1], layer=2).wait()
    expected = torch.zeros_like(seen)
    expected[[4, 1], 2] = cache.tensor[[4, 1], 2].cpu()
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)
    mirror.to_host([0]).wait()
    mirror.to_host([]).wait()
    expected[0] = cache.tensor[0].cpu()
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)

    before = cache.tensor.cpu().clone()
    mirror.memory[3] = np.arange(LAYOUT.block_bytes) % 7  # a peer's write
    mirror.to_device([3], layer=1).order()
    mirror.to_device([5]).wait()
    mirror.settle()
    before[3, 1], before[5] = seen[3, 1], 0
    torch.testing.assert_close(cache.tensor.cpu(), before, rtol=0, atol=0)
    mirror.close()


def test_copies_are_compiled_before_anyone_waits_for_one(cache: DeviceCache, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[tuple[int, int]] = []
    copy = device_cache.copy_pages

    def copy_pages(source: torch.Tensor, target: torch.Tensor, *places: torch.Tensor) -> None:
        pairs.append((source.data_ptr(), target.data_ptr()))
        copy(source, target, *places)

    monkeypatch.setattr(device_cache, "copy_pages", copy_pages)
    buffer = memoryview(bytearray(b"\1" * 6 * LAYOUT.block_bytes))
    mirror = HostMirror(cache, buffer)
    here, there = mirror.memory.ctypes.data, cache.tensor.data_ptr()
    assert pairs == [(here, there), (there, here)]
    assert bytes(buffer) == b"\1" * 6 * LAYOUT.block_bytes, "what others have written stays"
    mirror.close()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_node_hears_of_a_gpu_that_has_failed_and_not_of_a_step_that_has(cache: DeviceCache, is_lost: bool) -> None:
    class Failing:
        def forward(self, *_: object) -> torch.Tensor:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    class Lost(HostMirror):
        def settle(self) -> None:
            if is_lost:
                raise RuntimeError("CUDA error: unspecified launch failure\nand more")

    mirror = Lost(cache)
    model, told = SettledModel(Failing(), mirror), list[str]()  # type: ignore[arg-type]
    model.watch(lambda error: told.append(f"{type(error).__name__}: {error.message}"))
    with pytest.raises(RuntimeError, match="illegal"):
        model.forward(None, cache.tensor, NO_HOOK)  # type: ignore[arg-type]
    expected = ["NodeUnavailable: the GPU has failed: CUDA error: unspecified launch failure"]
    assert told == (expected if is_lost else [])
    mirror.close()


def test_two_caches_with_a_head_each_share_a_mirror_of_whole_blocks() -> None:
    halves = [DeviceCache(replace(LAYOUT, num_kv_heads=1), 6, GpuKernels().device) for _ in range(2)]
    num_bytes = 6 * LAYOUT.block_bytes
    memory = SharedMemory.create(num_bytes)
    # Each maps it, as ranks do: CUDA pins a range of addresses once.
    views = [SharedMemory(os.dup(memory.fd), num_bytes) for _ in halves]
    mirrors = [
        HostMirror(half, view.buffer, Share(LAYOUT, slice(head, head + 1)))
        for head, (half, view) in enumerate(zip(halves, views, strict=True))
    ]
    seen = KVCache(LAYOUT, 6, memory.buffer).tensor
    seen[:] = -torch.arange(seen.numel()).view(seen.shape)
    expected = seen.clone()
    for head, half in enumerate(halves):
        half.tensor.copy_(torch.arange(half.tensor.numel()).view(half.tensor.shape) + 1000 * head)
        expected[[4, 1], 2, :, head] = half.tensor[[4, 1], 2, :, 0].cpu()
        expected[3, :, :, head] = half.tensor[3, :, :, 0].cpu()
    for mirror in mirrors:
        mirror.to_host([4, 1], layer=2).wait()
        mirror.to_host([3]).wait()
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)

    wanted = [half.tensor.cpu().clone() for half in halves]
    seen[[5, 0]] = torch.rand(seen[[5, 0]].shape)
    for head, (mirror, half) in enumerate(zip(mirrors, wanted, strict=True)):
        mirror.to_device([5], layer=1).wait()
        mirror.to_device([0]).wait()
        half[5, 1, :, 0], half[0, :, :, 0] = seen[5, 1, :, head], seen[0, :, :, head]
        mirror.close()
    for half, found in zip(wanted, halves, strict=True):
        torch.testing.assert_close(found.tensor.cpu(), half, rtol=0, atol=0)
    for view in (memory, *views):
        view.close()


def test_who_has_the_same_heads_as_another_copies_in_and_not_out() -> None:
    layout = replace(LAYOUT, num_kv_heads=1)
    cache = DeviceCache(layout, 2, GpuKernels().device)
    mirror = HostMirror(cache, share=Share(layout, slice(0, 1), goes_out=False))
    mirror.memory[1] = np.arange(layout.block_bytes) % 7
    cache.tensor[0] = 5
    mirror.to_host([0]).wait()
    mirror.to_device([1]).wait()
    assert not mirror.memory[0].any(), "it has copied out"
    torch.testing.assert_close(cache.tensor[1].cpu(), KVCache(layout, 2, mirror.memory.data.cast("B")).tensor[1])
    mirror.close()


def test_heads_that_are_no_runs_of_words_are_refused_in_a_sentence() -> None:
    layout = replace(LAYOUT, block_tokens=3, dtype="int8")
    cache = DeviceCache(replace(layout, num_kv_heads=1), 2, GpuKernels().device)
    with pytest.raises(ConfigError, match=r"make block\.tokens even"):
        HostMirror(cache, share=Share(layout, slice(0, 1)))


def test_a_block_copied_to_a_place_outside_of_the_cache_comes_back_as_it_was(cache: DeviceCache) -> None:
    cache.tensor[2] = 5
    cache.copy_block(2, 7)  # the second place
    cache.tensor[2] = 0
    cache.copy_block(7, 4)
    cache.copy_block(4, 0)
    assert [int(cache.tensor[block].min()) for block in (0, 2, 4)] == [5, 0, 5]


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="compares with a CPU, token by token")
def test_who_gives_way_comes_back_from_host_memory_with_the_same_tokens(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, head_dim=16, hidden_size=64)
    prompts = [np.random.default_rng(seed).integers(3, 320, 14).tolist() for seed in range(2)]
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = {}
    for device in ("cpu", "cuda"):
        with LLM(str(tmp_path), kv_gb=3.2 * 8192e-9, block_tokens=16, device=device, threads=1) as llm:
            answers = llm.generate(prompts, sampling, use_tqdm=False)
            assert llm.engine.load().swapped_blocks > 0, "nobody had to give way"
        found[device] = [answer.token_ids for answer in answers]
    assert found["cuda"] == found["cpu"]


@pytest.mark.skipif(not INTERPRETED, reason="compares with a CPU, token by token")
def test_pages_of_int8_codes_give_the_tokens_of_a_cpu(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, head_dim=16, hidden_size=64)
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    found = {}
    for device in ("cpu", "cuda"):
        with LLM(str(tmp_path), kv_gb=0.002, block_tokens=16, device=device, kv_dtype="int8", threads=1) as llm:
            [answer] = llm.generate([list(range(3, 22))], sampling, use_tqdm=False)
        found[device] = answer.token_ids
    assert found["cuda"] == found["cpu"]
