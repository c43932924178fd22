"""Paths that other servers of OpenAI's API have and this one does not: the sentence with which each is refused.

Without it a client would only learn that a path is unknown, and look for a spelling mistake.
"""

from __future__ import annotations

_EMBEDDINGS = "embeddings, pooling, scores and rerankings are not computed here: models generate text"
_MEDIA = "neither audio nor images are read or made here: models take and generate text"
_STORED = "nothing is stored here; send a file of requests with `mooncake run-batch`"
_LORA = "adapters are loaded when the cluster starts: mooncake serve --lora NAME=FOLDER"
_WEIGHTS = "a cluster keeps the weights that it starts with, and does not sleep or pause; restart it with others"
_CACHE = "cached KV is named by what it was computed from, so it is never stale; a new cache_salt finds none of it"
_TOKENS = "POST /v1/completions takes token ids as its prompt, and tells those of the answer with return_token_ids"
_RENDER = "POST /tokenize renders a chat and tells its tokens; return_prompt_text of a chat adds the text to its answer"

_SENTENCES = {
    ("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/v1/classify"): _EMBEDDINGS,
    ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"): _EMBEDDINGS,
    ("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"): _MEDIA,
    ("/v1/files", "/v1/batches", "/v1/uploads", "/v1/messages/batches"): _STORED,
    ("/v1/assistants", "/v1/threads", "/v1/vector_stores", "/v1/conversations"): _STORED,
    ("/v1/moderations",): "texts are not moderated here",
    ("/v1/fine_tuning",): "models are not trained here",
    ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"): _LORA,
    ("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused", "/update_weights"): _WEIGHTS,
    ("/init_weight_transfer_engine", "/update_weights_from_disk", "/release_memory_occupation"): _WEIGHTS,
    ("/reset_prefix_cache", "/flush_cache", "/reset_mm_cache"): _CACHE,
    ("/inference/v1/generate", "/generate"): _TOKENS,
    ("/abort_requests", "/abort_request"): "a request is aborted by closing its connection",
    ("/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render"): _RENDER,
}
_BY_PATH = sorted(((path, sentence) for paths, sentence in _SENTENCES.items() for path in paths), reverse=True)
"""Longer paths before those that they are below."""


def refused_because(path: str) -> str:
    """Why ``path``, or what is below it, is not here; "" for a path that nobody has."""
    return next((sentence for known, sentence in _BY_PATH if f"{path}/".startswith(f"{known}/")), "")
