"""Flags of ``vllm serve`` that ``mooncake serve`` does not have, and what stands for each of them here.

The same table, for readers, is in deploy/docs/configuration.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.errors import ConfigError

_KV_GB = "--set prefill.kv_gb=GB --set decode.kv_gb=GB, the KV cache of each node"
_ALWAYS = "it is always so, leave it out"
_POOL = "every cluster has a pool: --set store.dram_gb=GB, --set store.ssd_path=FOLDER"
_LORA = "--lora NAME=FOLDER"

COUNTERPARTS = {
    "--gpu-memory-utilization": _KV_GB,
    "--kv-cache-memory-bytes": _KV_GB,
    "--kv-cache-dtype": "--set model.kv_dtype=TYPE",
    "--block-size": "--set block.tokens=N",
    "--max-num-seqs": "--set prefill.max_sequences=N --set decode.max_sequences=N",
    "--max-num-batched-tokens": "--set prefill.chunk_tokens=N",
    "--enable-prefix-caching": _ALWAYS,
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-auto-tool-choice": _ALWAYS,
    "--quantization": "it is found in the model's folder; --set model.weights=int8 quantises other models",
    "--speculative-config": "--set decode.speculative_tokens=N, --set decode.draft_model=FOLDER",
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--pipeline-parallel-size": "--set prefill.pipeline_stages=N",
    "--tensor-parallel-size": "--set prefill.tensor_parallel=N --set decode.tensor_parallel=N",
    "--data-parallel-size": "more nodes, --prefill N --decode M",
    "--kv-transfer-config": _POOL,
    "--kv-offloading-size": _POOL,
    "--chat-template": "the model's own is used, alone",
    "--seed": "it is a field of each request",
}


def refuse_flags_of_vllm(arguments: Sequence[str]) -> None:
    """Raises ConfigError, with its counterpart, for a flag of ``serve`` that is vLLM's alone."""
    for flag in (argument.partition("=")[0] for argument in arguments):
        if flag in COUNTERPARTS:
            raise ConfigError(f"{flag} is a flag of vLLM's; here: {COUNTERPARTS[flag]}")
