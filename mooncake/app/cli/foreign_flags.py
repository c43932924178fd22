"""Flags of vLLM's and SGLang's servers that ``mooncake serve`` does not have, and of vLLM's ``bench serve`` that
``mooncake load`` does not have; what stands for each of them here.

Those of servers are also in deploy/docs/configuration.md, for readers.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.errors import ConfigError

_UTILIZATION = "--set prefill.gpu_memory_utilization=F --set decode.gpu_memory_utilization=F, of the GPU of each node"
_KV_GB = "--set prefill.kv_gb=GB --set decode.kv_gb=GB, the KV cache of each node"
_ALWAYS = "it is always so, leave it out"
_SPECULATION = "--set decode.speculative_tokens=N, --set decode.draft_model=FOLDER"
_POOL = "every cluster has a pool: --set store.dram_gb=GB, --set store.ssd_path=FOLDER"
_LORA = "--lora NAME=FOLDER"
_ANY_LORA = "adapters of any number and rank are loaded, leave it out"
_TEXT_ALONE = "models generate text, leave it out"
_WITH_MODEL = "the model's own is used, from its folder"
_REVISION = "it is part of the model's name: OWNER/NAME@REVISION"

_SEQUENCES = "--set prefill.max_sequences=N --set decode.max_sequences=N"
_TENSOR_PARALLEL = "--set prefill.tensor_parallel=N --set decode.tensor_parallel=N"
_MORE_NODES = "more nodes, --prefill N --decode M"
_CACHES = "it cannot be turned off; a new cache_salt in each request finds nothing cached"
_NOTHING = "there is nothing to choose, leave it out"
_HOSTS = "each role is started on its own machine: python -m prefill_node --config FILE, and likewise the others"

OF_VLLM = {
    "--gpu-memory-utilization": _UTILIZATION,
    "--kv-cache-memory-bytes": _KV_GB,
    "--num-gpu-blocks-override": _KV_GB,
    "--kv-cache-dtype": "--set model.kv_dtype=TYPE",
    "--block-size": "--set block.tokens=N",
    "--max-num-seqs": _SEQUENCES,
    "--max-num-batched-tokens": "--set prefill.chunk_tokens=N",
    "--enable-prefix-caching": _ALWAYS,
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-auto-tool-choice": _ALWAYS,
    "--quantization": "it is found in the model's folder; --set model.weights=int8 quantises other models",
    "--speculative-config": _SPECULATION,
    "--spec-method": _SPECULATION,
    "--spec-model": _SPECULATION,
    "--spec-tokens": _SPECULATION,
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--pipeline-parallel-size": "--set prefill.pipeline_stages=N",
    "--tensor-parallel-size": _TENSOR_PARALLEL,
    "--data-parallel-size": _MORE_NODES,
    "--kv-transfer-config": _POOL,
    "--kv-offloading-size": _POOL,
    "--chat-template-content-format": "templates take text, leave it out",
    "--trust-request-chat-template": "requests bring none: --chat-template has one for all",
    "--seed": "it is a field of each request",
    "--stream-interval": "it is a field of each request",
    "--prefill-context-parallel-size": "--set prefill.context_parallel=N",
    "--enable-expert-parallel": "experts are cut like all layers: --set decode.tensor_parallel=N",
    "--distributed-executor-backend": "--ray starts the nodes as Ray actors",
    "--tokenizer": _WITH_MODEL,
    "--tokenizer-mode": _WITH_MODEL,
    "--hf-config-path": _WITH_MODEL,
    "--hf-overrides": "the model's own configuration counts: change it in its folder",
    "--trust-remote-code": "no code of a model's is ever run, leave it out",
    "--revision": _REVISION,
    "--tokenizer-revision": _WITH_MODEL,
    "--code-revision": "no code of a model's is ever run, leave it out",
    "--download-dir": "the environment variable HF_HUB_CACHE",
    "--hf-token": "the environment variable HF_TOKEN",
    "--load-format": "safetensors and GGUF files are told apart by themselves, leave it out",
    "--attention-backend": "kernels fit the device, leave it out",
    "--disable-custom-all-reduce": "there is none, leave it out",
    "--enforce-eager": "GPUs replay graphs where steps repeat, leave it out",
    "--cpu-offload-gb": "weights stay where they are used, on CPUs or GPUs, leave it out",
    "--swap-space": "--set prefill.swap_gb=GB --set decode.swap_gb=GB",
    "--max-logprobs": "it is 20, as with vLLM",
    "--max-loras": _ANY_LORA,
    "--max-lora-rank": _ANY_LORA,
    "--max-cpu-loras": _ANY_LORA,
    "--max-num-queued-reqs": "--set conductor.max_waiting=N",
    "--scheduling-policy": "requests with a priority are served by it, leave it out",
    "--enable-prompt-tokens-details": _ALWAYS,
    "--enable-force-include-usage": "usage comes where a request's stream_options ask for it",
    "--enable-request-id-headers": _ALWAYS,
    "--enable-server-load-tracking": _ALWAYS,
    "--enable-tokenizer-info-endpoint": _ALWAYS,
    "--disable-uvicorn-access-log": _ALWAYS,
    "--enable-log-requests": "--log-level INFO",
    "--disable-log-requests": _ALWAYS,
    "--disable-log-stats": "metrics cost nothing until /metrics is read, leave it out",
    "--uvicorn-log-level": "--log-level LEVEL",
    "--allowed-origins": "--allowed-origin ORIGIN, once for each",
    "--no-enable-prefix-caching": _CACHES,
    "--no-enable-chunked-prefill": "--set prefill.chunk_tokens=0 computes each prompt in one step",
    "--device": "--set prefill.device=DEVICE --set decode.device=DEVICE",
    "--task": _TEXT_ALONE,
    "--runner": _TEXT_ALONE,
    "--structured-outputs-config": "llguidance makes sure of structured outputs, leave it out",
    "--compilation-config": "kernels are compiled where they are needed, leave it out",
    "--async-scheduling": _NOTHING,
    "--moe-backend": _NOTHING,
    "--disable-hybrid-kv-cache-manager": _NOTHING,
    "--nnodes": _HOSTS,
    "--master-addr": _HOSTS,
    "--collect-detailed-traces": "with --otlp-traces-endpoint it is always so, leave it out",
    "--logits-processors": "requests have logit_bias, allowed_token_ids, bad_words and structured outputs",
    "--enable-sleep-mode": "nodes do not sleep: stop them",
    "--enable-prompt-embeds": _TEXT_ALONE,
    "--convert": _TEXT_ALONE,
    "--kv-events-config": "the conductor follows its nodes' caches by itself",
    "--limit-mm-per-prompt": "models take text alone, leave it out",
}


OF_SGLANG = {
    "--model-path": "mooncake serve MODEL",
    "--tp": _TENSOR_PARALLEL,
    "--tp-size": _TENSOR_PARALLEL,
    "--dp": _MORE_NODES,
    "--dp-size": _MORE_NODES,
    "--mem-fraction-static": _UTILIZATION,
    "--context-length": "--max-model-len N",
    "--max-running-requests": _SEQUENCES,
    "--chunked-prefill-size": "--set prefill.chunk_tokens=N",
    "--page-size": "--set block.tokens=N",
    "--disable-radix-cache": _CACHES,
    "--disaggregation-mode": "--prefill N --decode M, nodes of either kind; --set cluster.coupled=1, one for both",
    "--disaggregation-transfer-backend": "--set transfer.transports=[…]",
    "--enable-hierarchical-cache": _POOL,
    "--lora-paths": _LORA,
    "--speculative-algorithm": _SPECULATION,
    "--enable-metrics": _ALWAYS,
    "--enable-trace": "--otlp-traces-endpoint URL",
    "--grammar-backend": _NOTHING,
}


_SENT = "prompts are random, or of a file: --prompts FILE, or --trace FILE"
_PATH = "completions are asked for; --chat asks for chats, and so do lines of --prompts with messages"
_LIMITS = "--ttft-slo-ms, --tbt-slo-ms and --total-slo-ms"
_RESULT = "--requests FILE has every request, --json prints the summary, --plots DIR draws it"
_PERCENTILES = "p50, p90 and p99 of all are told; --requests FILE has every request"

OF_VLLM_BENCH = {
    "--backend": _PATH,
    "--endpoint": _PATH,
    "--endpoint-type": _PATH,
    "--dataset-name": _SENT,
    "--dataset-path": _SENT,
    "--custom-output-len": "--answer-tokens N",
    "--random-prefix-len": "--prefix-tokens N, which are part of --prompt-tokens",
    "--host": "--address HOST:PORT",
    "--port": "--address HOST:PORT",
    "--served-model-name": "--model NAME",
    "--tokenizer": "prompts are token ids below --vocabulary, no tokenizer is needed",
    "--goodput": _LIMITS,
    "--percentile-metrics": _PERCENTILES,
    "--metric-percentiles": _PERCENTILES,
    "--save-result": _RESULT,
    "--save-detailed": _RESULT,
    "--result-dir": _RESULT,
    "--result-filename": _RESULT,
    "--plot-timeline": _RESULT,
    "--ignore-eos": "random prompts and traces get answers of the length that is asked for; --plain leaves it out",
    "--num-warmups": "requests are counted from the first one; another run before it warms up",
    "--disable-tqdm": "progress is shown on terminals alone, leave it out",
    "--trust-remote-code": _NOTHING,
    "--label": _NOTHING,
    "--header": "the API key is read from MOONCAKE_API_KEY; there are no other headers",
}

_OF_COMMANDS = {"serve": {"vLLM": OF_VLLM, "SGLang": OF_SGLANG}, "load": {"vllm bench serve": OF_VLLM_BENCH}}
_SHORT = {
    **{f"-O{level}": "--compilation-config" for level in ("", 0, 1, 2, 3)},
    "-cc": "--compilation-config",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
}


def refuse_foreign_flags(command: str, arguments: Sequence[str]) -> None:
    """Raises ConfigError, with its counterpart, for a flag of this command that only another project has."""
    for flag in (argument.partition("=")[0] for argument in arguments):
        long = _SHORT.get(flag, flag.replace("_", "-"))  # vLLM takes either spelling
        for whose, counterparts in _OF_COMMANDS.get(command, {}).items():
            if long in counterparts:
                raise ConfigError(f"{flag} is a flag of {whose}'s; here: {counterparts[long]}")
