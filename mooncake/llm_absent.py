"""What only vLLM's ``LLM`` and parameters have, and what there is in its place: the sentence that each name is refused
with."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _by_name(sentences: Mapping[tuple[str, ...], str]) -> dict[str, str]:
    return {name: sentence for names, sentence in sentences.items() for name in names}


_POOLED = "embed gives embeddings, and LLM.score compares them; models have no heads for classes and rewards"
_WEIGHTS = "weights stay as they were opened; close() frees them, and another LLM opens others"
_QUEUE = "generate and chat take any number of prompts at once; AsyncLLM takes one after the other, while it answers"
_WORKERS = "there are no workers to call into; llm.engine is the engine itself"
_TEXT_ALONE = "models take text alone"
_METRICS = "a cluster has metrics (mooncake serve); a result has metrics, an LLM its draft_tokens"

_ABSENT = _by_name(
    {
        ("encode", "classify", "reward"): _POOLED,
        ("sleep", "wake_up", "release_kv_cache_memory"): (
            "an LLM does not sleep: close() frees its memory, reset_prefix_cache() forgets cached blocks"
        ),
        ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"): _WEIGHTS,
        ("shutdown_weight_transfer_engine", "start_draft_weight_update"): _WEIGHTS,
        ("get_weight_version", "update_weight_version"): _WEIGHTS,
        ("enqueue", "enqueue_chat", "wait_for_completion"): _QUEUE,
        ("collective_rpc", "apply_model", "llm_engine", "get_world_size"): _WORKERS,
        ("start_profile", "stop_profile", "get_metrics"): _METRICS,
        ("reset_mm_cache", "clear_mm_cache"): _TEXT_ALONE,
        ("model_config", "vllm_config", "get_model_config", "get_vllm_config"): (
            "max_model_len is the longest context, get_tokenizer() knows the vocabulary"
        ),
        ("add_lora", "remove_lora", "list_loras", "pin_lora"): (
            "generate's lora_request names adapters, and loads one with a folder when it is first named"
        ),
        ("pause_generation", "resume_generation", "is_paused", "is_sleeping"): (
            "it does not pause: abort ends requests, shutdown() all of them"
        ),
        ("do_log_stats", "is_tracing_enabled", "stop_remote_worker_execution_loop"): _METRICS,
        ("add_request", "engine", "engine_core"): "generate adds a request, and gives its outputs",
        ("from_engine_args",): "LLM(…) takes its settings by their names",
        ("set_tokenizer",): "the model's own tokenizer is used",
    }
)


def absent_because(name: str) -> str:
    """Why an ``LLM`` has no ``name``; "" for one that vLLM's has not either."""
    return _ABSENT.get(name, "")


_FOLDER = "the model's own is used, from its folder"
_NO_CHOICE = "there is nothing to choose, leave it out"
_BEAMS = "LLM.beam_search(prompts, BeamSearchParams(…)) searches beams"
_PART = "get_tokenizer().encode(text) is a prompt, and so is a part of it"
_DRAWN = "logit_bias, allowed_token_ids, bad_words and structured_outputs say what may be drawn"
_QUANTISED = 'it is found in the model\'s folder; weights="int8" quantises other models'
_SPECULATION = "speculative_tokens, and draft_model for one that guesses"
_CLUSTER = "an LLM is one engine; a cluster (mooncake serve) has several, around one pool of KV"


OF_LLM = _by_name(
    {
        ("kv_cache_memory_bytes", "num_gpu_blocks_override"): "kv_gb is the size of the KV cache",
        ("max_num_seqs",): "it is max_sequences here",
        ("max_num_batched_tokens",): "it is chunk_tokens here",
        ("block_size",): "it is block_tokens here",
        ("kv_cache_dtype",): "it is kv_dtype here",
        ("swap_space",): "it is swap_gb here",
        ("quantization", "quantization_config"): _QUANTISED,
        (
            "enable_lora",
            "max_loras",
            "max_lora_rank",
            "max_cpu_loras",
        ): "adapters={NAME: FOLDER}, of any number and rank",
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"): _SPECULATION,
        ("prefill_context_parallel_size",): "it is context_parallel_size here",
        ("enable_expert_parallel",): "tensor_parallel_size cuts experts like all layers",
        ("data_parallel_size", "kv_transfer_config", "kv_offloading_size"): _CLUSTER,
        ("logits_processors",): f"SamplingParams: {_DRAWN}",
        ("override_generation_config",): "change what get_default_sampling_params() returns, and give that",
        ("reasoning_parser",): "reasoning is part of the text, and parsed over HTTP alone",
        ("skip_tokenizer_init",): "SamplingParams(detokenize=False) asks for no text",
        ("scheduling_policy",): "generate and chat take a priority",
        ("enable_sleep_mode",): _ABSENT["sleep"],
        ("seed",): "SamplingParams(seed=…) has it",
        ("tokenizer", "tokenizer_mode", "hf_config_path", "hf_overrides"): _FOLDER,
        ("revision",): "it is part of the model's name: OWNER/NAME@REVISION",
        ("tokenizer_revision",): _FOLDER,
        ("download_dir", "hf_token"): "the environment variables HF_HUB_CACHE and HF_TOKEN have them",
        ("enable_prefix_caching", "enable_chunked_prefill"): "it is always so, leave it out",
        ("trust_remote_code", "enforce_eager", "load_format", "disable_log_stats", "cpu_offload_gb"): _NO_CHOICE,
        ("compilation_config", "distributed_executor_backend", "runner", "convert", "task"): _NO_CHOICE,
        ("structured_outputs_config", "attention_config", "disable_custom_all_reduce"): _NO_CHOICE,
        ("async_scheduling", "served_model_name"): _NO_CHOICE,
        ("limit_mm_per_prompt", "mm_processor_kwargs", "allowed_local_media_path"): _TEXT_ALONE,
    }
)
OF_CALLS = _by_name(
    {
        ("prompt_token_ids",): "prompts may be lists of token ids",
        ("tokenization_kwargs", "truncate_prompt_tokens"): _PART,
        ("guided_options_request",): "SamplingParams(structured_outputs=StructuredOutputsParams(…)) has it",
        ("chat_template_content_format",): "templates take text, leave it out",
        ("enable_thinking", "reasoning_effort", "documents"): "chat_template_kwargs={…} has the template's variables",
        ("mm_processor_kwargs", "multi_modal_data"): _TEXT_ALONE,
        ("prompt_adapter_request",): "lora_request and adapter name LoRA adapters; there are no others",
        ("concurrency_limit",): _NO_CHOICE,
    }
)
OF_ASYNC_CALLS = _by_name(
    {
        ("start_engine_loop", "usage_context", "stat_loggers", "trace_headers", "data_parallel_rank"): _NO_CHOICE,
        ("prompt_text", "tokenization_kwargs", "truncate_prompt_tokens"): _PART,
        ("session_id", "reasoning_ended", "reasoning_parser_kwargs"): _NO_CHOICE,
    }
)
OF_SAMPLING = _by_name(
    {
        ("max_new_tokens", "max_completion_tokens"): "it is max_tokens here",
        ("guided_decoding", "response_format"): "structured_outputs=StructuredOutputsParams(…)",
        ("logits_processors",): _DRAWN,
        ("use_beam_search", "length_penalty", "early_stopping", "beam_width"): _BEAMS,
        ("thinking_token_budget",): "it is thinking_budget here, with the tokens that begin and end the thoughts",
        ("truncate_prompt_tokens",): _PART,
        ("skip_reading_prefix_cache",): "reset_prefix_cache() of the LLM forgets cached blocks",
        ("logprob_token_ids",): "logprobs=20 tells of the most likely tokens, and of the one that was drawn",
        ("prompt_logprob_token_ids", "prompt_logprob_start"): "prompt_logprobs tells of all tokens of the prompt",
        ("trace_decode_token_ids",): "prompt_logprobs tells how likely given tokens are",
        ("stream_interval",): "AsyncLLM gives each reader what there is; over HTTP it is a field of requests",
        ("structured_outputs",): "beam search ranks unmodified probabilities; LLM.generate takes them",  # of beams
        ("watermarking", "routed_experts_prompt_start"): _NO_CHOICE,
        ("flat_logprobs", "skip_clone", "extra_args", "output_text_buffer_length"): _NO_CHOICE,
    }
)
OF_PROMPTS = _by_name(
    {
        ("role", "content"): "LLM.chat answers messages",
        ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds"): _TEXT_ALONE,
        ("encoder_prompt", "decoder_prompt"): "models here only decode",
    }
)
OF_POOLING = _by_name(
    {
        ("use_activation", "activation", "softmax"): "it is normalize here",
        ("task", "step_tag_id", "returned_token_ids", "extra_kwargs", "requires_token_ids"): _NO_CHOICE,
        ("truncate_prompt_tokens", "tok_params"): _PART,
    }
)
OF_LORA = _by_name(
    {
        ("lora_local_path",): "it is lora_path here",
        ("base_model_name", "long_lora_max_len", "tensorizer_config_dict", "is_3d_lora_weight"): _NO_CHOICE,
        ("load_inplace",): "other weights are another adapter: give it a name of its own",
    }
)
OF_IMPORTS = _by_name(
    {
        ("GuidedDecodingParams",): "it is StructuredOutputsParams, as SamplingParams(structured_outputs=…)",
        ("LLMEngine",): "LLM answers lists of prompts, AsyncLLM one after the other",
        ("PromptType", "TextTokensPrompt"): "TextPrompt and TokensPrompt are the types of prompts with names",
        ("PoolingRequestOutput", "ClassificationRequestOutput"): _POOLED,
        ("ModelRegistry",): "families of models are part of this project",
    }
)
OF_FORMS = _by_name(
    {
        ("structural_tag",): "grammar, in Lark's form, can say the same",
        ("disable_fallback", "disable_additional_properties", "whitespace_pattern"): _NO_CHOICE,
    }
)


def says_counterparts(counterparts: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: an argument with a name that the function does not take raises a TypeError that says what stands for
    it here."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        known, where = signature(function).parameters, function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: P.args, **named: P.kwargs) -> R:
            for name in named:
                if name not in known:
                    raise TypeError(f"{where} takes no {name}{_hint(name, known, counterparts)}")
            return function(*args, **named)

        return checked

    return decorated


def form_says_counterparts(counterparts: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Likewise for a class, whose ``__init__`` may be one that nobody wrote."""

    def decorated(form: type[T]) -> type[T]:
        form.__init__ = says_counterparts(counterparts)(form.__init__)  # type: ignore[method-assign]
        return form

    return decorated


def _hint(name: str, known: Iterable[str], counterparts: Mapping[str, str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    hint = counterparts.get(name) or (f"is {nearest[0]} meant?" if nearest else "")
    return f": {hint}" if hint else ""
