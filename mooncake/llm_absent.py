"""What only vLLM's ``LLM`` has, and what there is in its place: the sentence that each name is refused with."""

from __future__ import annotations

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
