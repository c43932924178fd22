"""The fused pass equals the pass step by step in every format; the choice of formats, and their sizes."""

from __future__ import annotations

import pytest
import torch

from mooncake.checkpoint import open_checkpoint
from mooncake.engine.cache.kv_cache import KVCache
from mooncake.errors import ConfigError
from mooncake.kernels.cpu import CpuKernels
from mooncake.kernels.cpu_build import load_library
from mooncake.model import CausalLM, ForwardBatch, NoHook
from mooncake.model.reading.weights import load_weights
from mooncake.precision import Coding, resolve_precision

BLOCK = 16
FORMATS = pytest.mark.parametrize(
    ("dtype", "kv_dtype", "coding"),
    [
        ("float32", "float32", ""),
        ("float32", "int8", ""),
        ("float32", "bfloat16", "int8"),
        ("float32", "float32", "w8a8"),
    ],
)


class Recorder:
    """Which layers a pass told about, and in which order; fails at one when asked to."""

    def __init__(self, fail_at: int = -1, wants_layers: bool = True) -> None:
        self.calls: list[tuple[str, int]] = []
        self.wants_layers = wants_layers
        self._fail_at = fail_at

    def before_layer(self, layer: int) -> None:
        if layer == self._fail_at:
            raise TimeoutError("the KV of this layer did not come")
        self.calls.append(("before", layer))

    def after_layer(self, layer: int) -> None:
        self.calls.append(("after", layer))


def batch_of(tokens: int) -> ForwardBatch:
    """One prompt of so many tokens, whose last two have logits."""
    positions = torch.arange(tokens)
    return ForwardBatch(
        tokens=positions * 37 % 40_000,
        positions=positions,
        query_starts=torch.tensor([0, tokens], dtype=torch.int32),
        context_lens=torch.tensor([tokens], dtype=torch.int32),
        block_tables=torch.arange(4, dtype=torch.int32)[None],
        slots=positions,
        logit_rows=torch.tensor([tokens - 1, tokens - 2]),
    )


@pytest.mark.slow
@FORMATS
def test_one_call_gives_the_bits_of_the_pass_step_by_step(dtype: str, kv_dtype: str, coding: Coding) -> None:
    checkpoint, kernels = open_checkpoint("smollm2"), CpuKernels(load_library())
    weights = load_weights(checkpoint, dtype)
    batch, results = batch_of(40), []
    for is_fused in (True, False):
        model = CausalLM(checkpoint.config, weights, 64, kernels, coding, is_fused)
        cache, told = KVCache(checkpoint.kv_layout(BLOCK, kv_dtype), 4), Recorder()
        results.append((model.forward(batch, cache.tensor, told), cache.memory.copy(), told.calls))
    (one_call, memory, calls), (steps, expected_memory, expected_calls) = results
    assert torch.equal(one_call, steps)
    assert (memory == expected_memory).all() and memory.any()
    layers = range(checkpoint.config.num_layers)
    assert calls == expected_calls == [(when, layer) for layer in layers for when in ("before", "after")]


def test_logits_stay_while_anyone_holds_a_row_and_their_memory_is_used_again_after() -> None:
    checkpoint = open_checkpoint("smollm2")
    model = CausalLM(checkpoint.config, load_weights(checkpoint, "bfloat16"), 64, CpuKernels(load_library()))
    cache = KVCache(checkpoint.kv_layout(BLOCK, "bfloat16"), 4).tensor
    row = model.forward(batch_of(5), cache, NoHook())[1].numpy()
    before = row.copy()
    other = model.forward(batch_of(6), cache, NoHook())
    assert (row == before).all() and not (other[1].numpy() == before).all()
    del other
    place = model.forward(batch_of(7), cache, NoHook()).data_ptr()
    assert model.forward(batch_of(8), cache, NoHook()).data_ptr() == place


def test_a_pass_comes_back_for_no_hook_that_wants_no_layers() -> None:
    checkpoint = open_checkpoint("smollm2")
    model = CausalLM(checkpoint.config, load_weights(checkpoint, "bfloat16"), 64, CpuKernels(load_library()))
    cache, told = KVCache(checkpoint.kv_layout(BLOCK, "bfloat16"), 4), Recorder(fail_at=3, wants_layers=False)
    logits = model.forward(batch_of(8), cache.tensor, told)
    assert not told.calls and torch.equal(logits, model.forward(batch_of(8), cache.tensor, NoHook()))


def test_what_a_hook_raises_ends_the_pass() -> None:
    checkpoint = open_checkpoint("smollm2")
    model = CausalLM(checkpoint.config, load_weights(checkpoint, "bfloat16"), 64, CpuKernels(load_library()))
    cache, told = KVCache(checkpoint.kv_layout(BLOCK, "bfloat16"), 4), Recorder(fail_at=3)
    with pytest.raises(TimeoutError, match="did not come"):
        model.forward(batch_of(8), cache.tensor, told)
    assert told.calls[-1] == ("after", 2)
    assert cache.tensor[:, 2].any() and not cache.tensor[:, 3:].any()
    assert model.forward(batch_of(8), cache.tensor, NoHook()).isfinite().all()


def test_sizes_are_the_formulas() -> None:
    checkpoint = open_checkpoint("smollm2")
    layers, heads, head_dim = 30, 3, 64
    for kv_dtype, row_bytes in (("float32", 4 * head_dim), ("bfloat16", 2 * head_dim), ("int8", head_dim + 4)):
        layout = checkpoint.kv_layout(BLOCK, kv_dtype)
        assert layout.block_bytes == layers * 2 * heads * BLOCK * row_bytes
        assert KVCache(layout, 2).tensor.nbytes == 2 * layout.block_bytes


def test_formats_resolve_or_say_what_is_known() -> None:
    plain = resolve_precision("float32")
    assert (plain.weights.dtype, plain.kv_dtype, plain.weights.coding) == ("float32", "float32", "")
    assert resolve_precision("bfloat16").kv_dtype == "bfloat16"
    assert resolve_precision("auto").weights.dtype in ("float32", "bfloat16")
    assert resolve_precision("auto", devices=("cuda:0", "cuda:1")).weights.dtype == "bfloat16", (
        "whatever the processor is"
    )
    assert resolve_precision("auto", devices=("cuda", "cpu")).weights.dtype == resolve_precision("auto").weights.dtype
    coded = resolve_precision("float32", "int8", "w8a8")
    assert (coded.kv_dtype, coded.weights.coding) == ("int8", "w8a8")
    assert coded.identity("weights") != plain.identity("weights") == "weights"
    with pytest.raises(ConfigError, match=r"model.kv_dtype must be one of .*int8, got 'fp4'"):
        resolve_precision("float32", "fp4")
    for devices in (("cuda",), ("cpu", "cuda:1")):
        assert resolve_precision("bfloat16", weights="w8a8", devices=devices).weights.coding == "w8a8"
        assert resolve_precision("bfloat16", weights="int8", devices=devices).weights.coding == "int8"
