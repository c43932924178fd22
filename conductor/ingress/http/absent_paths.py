"""Paths that other servers of OpenAI's API have and this one does not: the sentence with which each is refused.

Without it a client would only learn that a path is unknown, and look for a spelling mistake.
"""

from __future__ import annotations

_CLASSES = "models generate texts and embed them (POST /v1/embeddings); they have no heads for classes"
_MEDIA = "neither audio nor images are read or made here: models take and generate text"
_CONVERSATIONS = (
    "conversations are not stored here: they come with each request, or, where conductor.stored_responses_mb keeps "
    "responses, as the previous_response_id of POST /v1/responses"
)
_STORED = "nothing is stored here; send a file of requests with `mooncake run-batch`"
_LORA = (
    "adapters are loaded when the cluster starts (mooncake serve --lora NAME=FOLDER), or while it serves "
    "(POST /v1/load_lora_adapter) where conductor.max_loaded_adapters allows some"
)
_WEIGHTS = "a cluster keeps the weights that it starts with, and does not sleep or pause; restart it with others"
_CACHE = "cached KV is named by what it was computed from, so it is never stale; a new cache_salt finds none of it"
_TOKENS = "POST /v1/completions takes token ids as its prompt, and tells those of the answer with return_token_ids"
_SCORES = "POST /v1/completions with max_tokens 1 and logprobs tells how likely the next tokens are"
_SCALE = "nodes join and leave a cluster as they start and stop; GET /status.json lists them"
_RENDER = "POST /tokenize renders a chat and tells its tokens; return_prompt_text of a chat adds the text to its answer"

_SENTENCES = {
    ("/pooling", "/classify", "/v1/classify"): _CLASSES,
    ("/v2/embed", "/embed", "/embeddings"): "POST /v1/embeddings embeds texts, in OpenAI's form",
    ("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"): _MEDIA,
    ("/v1/files", "/v1/batches", "/v1/uploads", "/v1/messages/batches"): _STORED,
    ("/v1/assistants", "/v1/threads", "/v1/conversations"): _CONVERSATIONS,
    ("/v1/vector_stores",): "texts are neither stored nor searched here: send what the model should read",
    ("/v1/moderations",): "texts are not moderated here",
    ("/v1/fine_tuning",): "models are not trained here",
    ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"): _LORA,
    ("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/update_weights"): _WEIGHTS,
    ("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"): _WEIGHTS,
    ("/finish_weight_update", "/update_weight_version", "/weight_info", "/weight_checker"): _WEIGHTS,
    ("/update_weights_from_disk", "/release_memory_occupation", "/release_kv_cache_memory"): _WEIGHTS,
    ("/reset_prefix_cache", "/flush_cache", "/reset_mm_cache", "/reset_encoder_cache"): _CACHE,
    ("/scale_elastic_ep", "/is_scaling_elastic_ep", "/get_world_size", "/server_info", "/fault_tolerance"): _SCALE,
    ("/get_server_info", "/slots", "/v1/loads"): _SCALE,
    ("/get_model_info", "/model_info", "/props"): "GET /v1/models tells of the model, GET /tokenizer_info of its texts",
    ("/completion", "/completions", "/infill"): "POST /v1/completions continues a text, or token ids",
    ("/docs", "/redoc"): "GET /openapi.json tells what requests are made of, deploy/docs/requests.md what they mean",
    ("/collective_rpc",): "nodes have no workers to call into",
    ("/start_profile", "/stop_profile"): "GET /metrics has the times of all steps; `mooncake bench` measures",
    ("/kv_event_sources",): "the conductor follows its nodes' caches by itself",
    ("/generative_scoring", "/v1/systemone"): _SCORES,
    ("/cohere",): "POST /v1/chat/completions answers chats",
    ("/inference/v1/generate", "/generate"): _TOKENS,
    ("/abort_requests", "/abort_request"): "a request is aborted by closing its connection",
    ("/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render"): _RENDER,
    ("/v1/chat/completions/derender", "/v1/completions/derender"): "POST /detokenize makes a text of tokens",
}
_BY_PATH = sorted(((path, sentence) for paths, sentence in _SENTENCES.items() for path in paths), reverse=True)
"""Longer paths before those that they are below."""


def refused_because(path: str) -> str:
    """Why ``path``, or what is below it, is not here; "" for a path that nobody has."""
    return next((sentence for known, sentence in _BY_PATH if f"{path}/".startswith(f"{known}/")), "")
