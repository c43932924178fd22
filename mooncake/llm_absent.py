"""What only vLLM's ``LLM`` has, and what there is in its place: the sentence that each name is refused with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_EMBEDDINGS = "models generate text here: there are no embeddings, classes, rewards or scores"
_WEIGHTS = "weights stay as they were opened; close() frees them, and another LLM opens others"
_QUEUE = "generate and chat take any number of prompts at once, and return when all are answered"
_WORKERS = "there are no workers to call into; llm.engine is the engine itself"
_METRICS = "a cluster has metrics and traces (mooncake serve); a result has its cached_tokens"

_SENTENCES = {
    ("encode", "embed", "classify", "reward", "score"): _EMBEDDINGS,
    ("sleep", "wake_up", "release_kv_cache_memory"): (
        "an LLM does not sleep: close() frees its memory, reset_prefix_cache() forgets cached blocks"
    ),
    ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"): _WEIGHTS,
    ("enqueue", "enqueue_chat", "wait_for_completion"): _QUEUE,
    ("collective_rpc", "apply_model", "llm_engine", "get_world_size"): _WORKERS,
    ("start_profile", "stop_profile", "get_metrics"): _METRICS,
    ("reset_mm_cache",): "models take text alone",
    ("from_engine_args",): "LLM(…) takes its settings by their names",
    ("set_tokenizer",): "the model's own tokenizer is used",
}
_BY_NAME = {name: sentence for names, sentence in _SENTENCES.items() for name in names}


def absent_because(name: str) -> str:
    """Why an ``LLM`` has no ``name``; "" for one that vLLM's has not either."""
    return _BY_NAME.get(name, "")


_FOLDER = "the model's own is used, from its folder"
_NO_DOWNLOAD = "nothing is fetched: give the folder that `hf download NAME` prints as the model"
_NO_CHOICE = "there is nothing to choose, leave it out"

_ARGUMENTS = {
    ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"): "kv_gb is the size of the KV cache",
    ("max_num_seqs",): "it is max_sequences here",
    ("max_num_batched_tokens",): "it is chunk_tokens here",
    ("block_size",): "it is block_tokens here",
    ("kv_cache_dtype",): "it is kv_dtype here",
    ("swap_space",): "it is swap_gb here",
    ("quantization",): 'it is found in the model\'s folder; weights="int8" quantises other models',
    ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"): "adapters={NAME: FOLDER}, of any number and rank",
    ("speculative_config",): "speculative_tokens, and draft_model for one that guesses",
    ("seed",): "SamplingParams(seed=…) has it",
    ("tokenizer", "tokenizer_mode", "chat_template", "hf_config_path", "hf_overrides"): _FOLDER,
    ("revision", "tokenizer_revision", "download_dir", "hf_token"): _NO_DOWNLOAD,
    ("enable_prefix_caching", "enable_chunked_prefill"): "it is always so, leave it out",
    ("trust_remote_code", "enforce_eager", "load_format", "disable_log_stats", "cpu_offload_gb"): _NO_CHOICE,
    ("compilation_config", "distributed_executor_backend", "limit_mm_per_prompt", "runner", "task"): _NO_CHOICE,
}
_BY_ARGUMENT = {name: sentence for names, sentence in _ARGUMENTS.items() for name in names}


def unknown_argument(name: str, known: Iterable[str]) -> str:
    """What is wrong with an argument of this name, which an ``LLM`` does not take."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    hint = _BY_ARGUMENT.get(name) or (f"is {nearest[0]} meant?" if nearest else "")
    return f"LLM takes no {name}" + (f": {hint}" if hint else "")
