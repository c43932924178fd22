"""Every Triton kernel compiles to machine code for A100 and H200 without a GPU, and stays inside stated limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).with_name("compile_for_gpu.py")
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # what one program may have, CUDA programming guide
REGISTERS = 64 * 1024  # of a multiprocessor
MOST_INSTRUCTIONS = {"16-bfloat16-bfloat16": 460, "16-bfloat16-int8": 600}
"""Of a warp for a trip of decode attention. A trip of 64 keys of int8 takes an H200 450 ns of memory at its limit, in
which each of a multiprocessor's four schedulers issues 800 instructions at most, and half of that as things go."""
SPILL_BYTES = {80: 128, 90: 64}  # a thread; of these at most one word is stored in the loop over unmasked keys


def compiled(*patterns: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, SCRIPT, *patterns], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def check_limits(builds: list[dict[str, Any]]) -> None:
    for build in builds:
        name, threads = str(build["case"]), int(build["threads"])
        assert int(build["stack_bytes"]) + int(build["local_bytes"]) <= SPILL_BYTES[int(build["sm"])], build
        programs = int(build["programs"])
        assert int(build["shared_bytes"]) * programs <= SHARED_BYTES[int(build["sm"])], build
        assert int(build["registers"]) * threads * programs <= REGISTERS, build
        if name.startswith("attend") and "float32" not in name:
            assert int(build["async_copies"]) >= 32, "pages must be on their way while others are computed with"
        if name.startswith(("experts-gate", "experts-down", "int8-product")) and "float32" not in name:
            least = 28 if name.startswith("int8") else 32  # codes are half as many bytes, or activations are codes too
            assert int(build["async_copies"]) >= least, "weights must be on their way while others are multiplied"
        for kind, most in MOST_INSTRUCTIONS.items():
            assert not name.endswith(kind) or 0 < build["loop_instructions"] <= most, build


def test_the_kernels_of_decode_steps_compile_within_limits() -> None:
    builds = compiled(
        "^attend-llama8b-16-bfloat16-bfloat16$",
        "^attend-llama8b-rows-16-bfloat16-int8",
        "^attend-gpt-oss-16-.*-window-sinks$",
        "^attend-mpt-7b-128-.*-slopes$",
        "^attend-latent-moonlight-page64-bfloat16-bfloat16-16$",
        "^merge-(64-sinks|576)$",
        "^rope-write-bfloat16(-latent)?$",
        "^norm-4096-add$",
        "^experts-sort$",
        "^experts-gate-qwen3-30b-16x64-bfloat16$",
        "^experts-down-gpt-oss-16x32-bfloat16$",
        "^int8-product-(int8|bfloat16)-32x32$",
        "^(convolve|recur|convolve-chunks|solve|walk)-qwen3-next$",
    )
    assert {build["sm"] for build in builds} == {80, 90}
    assert len(builds) == 40
    check_limits(builds)


def test_a_group_s_tables_and_slots_compile_nothing_again() -> None:
    """They begin anywhere in those of all groups; Triton compiles another kernel for addresses that are no multiples
    of 16, unless it is told that they vary."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", SPECIALISED], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines() == ["attend 1", "attend_codes 1", "attend_latent 1", "rope_write_kv 1"]


SPECIALISED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from mooncake.kernels.gpu.triton_attention import attend
from mooncake.kernels.gpu.triton_coded_attention import attend_codes
from mooncake.kernels.gpu.triton_elementwise import rope_write_kv
from mooncake.kernels.gpu.triton_latent_attention import attend_latent

backend, numbers = make_backend(GPUTarget("cuda", 90, 32)), torch.zeros(64, dtype=torch.int64)
for kernel in (attend, attend_codes, attend_latent, rope_write_kv):
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    kinds = set()
    for begin in (0, 1):
        varying = dict.fromkeys(("block_tables", "positions", "slots"), numbers[begin:])
        given = [1.0 if one.is_constexpr else varying.get(one.name, numbers) for one in kernel.params]
        kinds.add(str(bind(*given, debug=False, instrumentation_mode="")[1]))
    print(kernel.__name__, len(kinds))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_in_every_configuration_compiles_within_limits() -> None:
    builds = compiled()
    assert len({build["case"] for build in builds}) >= 55
    check_limits(builds)
    of_prefill = ("-128-bfloat16-bfloat16", "-64x64-bfloat16", "-128x128-bfloat16")
    wide_tiles = [b for b in builds if b["sm"] == 90 and any(kind in str(b["case"]) for kind in of_prefill)]
    assert wide_tiles and all(build["wgmma"] for build in wide_tiles), "prefill must use Hopper's warpgroup products"
