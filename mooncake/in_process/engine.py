"""A model that is opened in this process, with its engine: what ``LLM`` and ``AsyncLLM`` share.

It makes drafts of answers out of what users give. Who runs the engine's steps, and when, is theirs.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from mooncake.adapters import Adapter, open_adapter, open_adapters
from mooncake.block_size import block_size_advice
from mooncake.checkpoint import Checkpoint, open_checkpoint
from mooncake.config import GENERATION_CONFIGS
from mooncake.engine import sequence as engine_sequence
from mooncake.engine.backends.backend import (
    BackendSpec,
    CacheSize,
    Processes,
    draft_on,
    open_backend,
    plan_pages,
    prepare_adapter,
)
from mooncake.engine.backends.fitting import Asked, choose_pages, largest_step
from mooncake.engine.contract import EngineConfig, check_least
from mooncake.engine.engine import Engine
from mooncake.errors import InvalidRequest
from mooncake.guides import Guides
from mooncake.hashing import Chain, kv_fingerprint
from mooncake.in_process.answers import Draft
from mooncake.in_process.embeddings import EmbeddingDraft, PoolingParams
from mooncake.in_process.engine_args import EngineArgs
from mooncake.in_process.inputs import Adapters, LoRARequests, adapter_places, check_counts, new_adapters
from mooncake.in_process.tokenizer import RenderedChat
from mooncake.pooling import Pooling
from mooncake.precision import Coding, Precision, check_device, resolve_precision
from mooncake.sampling import SamplingParams as EngineSampling
from mooncake.sampling_params import SamplingParams
from mooncake.sizing import GB
from mooncake.text.detokenizer import TextAssembler, bad_word_tokens
from mooncake.text.template_source import template_source
from mooncake.types import TokenIds

log = logging.getLogger(__name__)


_NO_ANSWER = EngineSampling(max_tokens=1, temperature=0.0)


class InProcessEngine:
    """``backend`` and ``engine`` compute; ``tokenizer``, ``guides`` and ``draft`` may be used while they do."""

    def __init__(self, args: EngineArgs, max_waiting: int = 1024) -> None:
        """The engine refuses sequences while ``max_waiting`` wait. Raises ModelError or ConfigError when the model
        cannot be loaded, the cache is too small for it, or a number is impossible, and InvalidRequest."""
        _check(args)
        processes = Processes(
            args.tensor_parallel_size, args.pipeline_parallel_size, args.context_parallel_size, args.threads
        )
        checkpoint = open_checkpoint(args.model, args.max_model_len)
        self.defaults = checkpoint.sampling_defaults(args.generation_config)
        limits = EngineConfig(
            args.block_tokens,
            args.step_tokens,
            args.most_sequences,
            checkpoint.config.context(args.max_model_len),
            max_waiting,
            tbt_limit_ms=args.tbt_limit_ms,
            speculative_tokens=args.speculative_tokens,
            keep_events=False,
        )
        if args.threads:  # torch cannot handle absurd numbers
            torch.set_num_threads(min(args.threads, os.cpu_count() or args.threads))
        own = checkpoint.coding
        stored: Coding = own if args.tensor_parallel_size == 1 or own == "int8" else ""  # W8A8 is for one process
        dtype = str(args.dtype).removeprefix("torch.")  # one of torch's own has a name, too
        precision = resolve_precision(dtype, args.kv_dtype, args.weights, (args.device,), args.key_scales, stored)
        config, size = _fit(args, checkpoint, precision, limits, processes)
        if size.why:
            log.info("a KV cache of %.2f GB: %s", size.num_bytes / GB, size.why)
        self.max_model_len = size.max_model_len
        self.vocab_size = checkpoint.config.vocab_size
        self._max_logprobs = self.vocab_size if args.max_logprobs == -1 else args.max_logprobs
        self.tokenizer = checkpoint.load_tokenizer(template_source(args.chat_template, "chat_template"))
        self.guides = Guides(lambda: self.tokenizer, self.vocab_size)
        self.adapters = open_adapters(args.adapters or {})
        self._config = checkpoint.config
        self._pooling = checkpoint.pooling  # a model that cannot embed texts may generate them
        self._fingerprint = kv_fingerprint(precision.identity(checkpoint.digest), size.layout)
        spec = BackendSpec(checkpoint, precision, size, args.device, processes, self.adapters, args.max_model_len)
        with _told_meanwhile(f"loading {args.model}; the first time kernels are compiled, which takes a minute"):
            self.backend = open_backend(spec)
        drafter = None
        if args.draft_model:
            most, chunk = args.speculative_tokens, args.step_tokens
            drafter = draft_on(args.device, args.draft_model, dtype, size, self.vocab_size, most, chunk)
        self.engine = Engine(self.backend.model, self.backend.cache, config, self.guides, drafter)
        self._numbers = itertools.count()

    def close(self) -> None:
        """Once nobody runs steps. Idempotent."""
        self.engine.drop_cached()
        self.backend.close()

    def load_new(self, requests: LoRARequests, between_steps: Callable[[Callable[[], None]], None]) -> None:
        """Load the adapters that are named for the first time, with a folder, by one caller at a time. The model gets
        each in a call that is given to ``between_steps``; reading, which takes long, may be beside steps. Raises
        ModelError, and what ``between_steps`` raises."""
        for name, path in new_adapters(requests, self.adapters).items():
            adapter = open_adapter(name, path)
            prepared = prepare_adapter(self.backend, adapter, self._config)
            between_steps(partial(self._put_adapter, adapter, prepared))

    def _put_adapter(self, adapter: Adapter, prepared: object) -> None:
        assert self.backend.adapters is not None
        self.backend.adapters.put(len(self.adapters), prepared)
        self.adapters += (adapter,)

    def places(self, adapter: Adapters, lora_request: LoRARequests, count: int) -> list[int]:
        """Which adapter acts on each of ``count`` prompts, -1 for none. Raises InvalidRequest."""
        return adapter_places(adapter, lora_request, count, self.adapters)

    def encode(self, prompt: object, *, is_whole: bool = False) -> TokenIds:
        """``is_whole``: nothing follows the text. Raises InvalidRequest."""
        given = prompt.token_ids if isinstance(prompt, RenderedChat) else prompt
        try:
            ids = self.tokenizer.encode(given) if isinstance(given, str) else np.asarray(given)
            if is_whole and isinstance(given, str) and given:
                ids = self.tokenizer.ended(ids)
        except InvalidRequest:
            raise
        except ValueError:  # lists of different lengths
            ids = np.empty((0, 0))
        if ids.shape == (0,):
            raise InvalidRequest("a prompt is empty", "prompts")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidRequest("a prompt is text or token ids", "prompts")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise InvalidRequest(f"token ids must be between 0 and {self.vocab_size - 1}", "prompts")
        return ids.astype(np.uint32)

    def draft(
        self, prompt: TokenIds, wanted: SamplingParams, adapter: int = -1, priority: int = 0, salt: str = ""
    ) -> Draft:
        """Its sequence has a name of its own. Raises InvalidRequest, ContextTooLong."""
        longest = max(self.max_model_len - len(prompt), 1)
        bad_words = bad_word_tokens(self.tokenizer, wanted.forbidden)
        sampling = wanted.for_engine(longest, bad_words, self._max_logprobs, self.vocab_size)
        sequence = self._sequence(prompt, _ranking(sampling), adapter, salt)
        sequence.priority = priority
        return Draft(
            sequence,
            sampling,
            [self._assembler(wanted) for _ in range(sampling.num_answers)],
            frozenset(sampling.stop_token_ids) - (set() if sampling.ignore_eos else set(self._config.eos_ids)),
            wanted.include_stop_str_in_output,
            self._text_of,
        )

    def embedding_draft(
        self, text: TokenIds, params: PoolingParams, adapter: int = -1, priority: int = 0, salt: str = ""
    ) -> EmbeddingDraft:
        """Raises InvalidRequest, ContextTooLong, ModelError for a model that cannot embed texts here."""
        settings = params.settings(self._pooling())
        sequence = self._sequence(text, _NO_ANSWER, adapter, salt, settings.kind)
        sequence.priority = priority
        return EmbeddingDraft(sequence, settings, params.dimensions, self._config.hidden_size)

    def _text_of(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id, skip_special=False).decode(errors="replace")

    def _assembler(self, wanted: SamplingParams) -> TextAssembler | None:
        if not wanted.detokenize:
            return None
        return TextAssembler(
            self.tokenizer,
            wanted.stop_strings,
            wanted.include_stop_str_in_output,
            wanted.skip_special_tokens,
            min_tokens=wanted.min_tokens,
        )

    def _sequence(
        self, prompt: TokenIds, sampling: EngineSampling, adapter: int, salt: str, pooling: Pooling | None = None
    ) -> engine_sequence.Sequence:
        start = self.adapters[adapter].start_in(prompt) if adapter >= 0 else None
        if start is None:
            adapter = -1
        digest = self.adapters[adapter].digest if adapter >= 0 else ""
        return engine_sequence.Sequence(
            f"llm-{next(self._numbers)}",
            prompt,
            len(prompt),
            sampling,
            Chain.of(self._fingerprint, salt, digest, start or 0),
            eos_ids=self._config.eos_ids,
            max_model_len=self.max_model_len,
            adapter=adapter,
            pooling=pooling,
        )


def _check(args: EngineArgs) -> None:
    counts = {
        "tensor_parallel_size": args.tensor_parallel_size,
        "pipeline_parallel_size": args.pipeline_parallel_size,
        "context_parallel_size": args.context_parallel_size,
    }
    check_least({"kv_gb": (args.kv_gb, 0), "swap_gb": (args.swap_gb, 0), "threads": (args.threads, 0)})
    check_least({"gpu_memory_utilization": (args.gpu_memory_utilization, 0.01)})
    if args.gpu_memory_utilization > 1:
        raise InvalidRequest("gpu_memory_utilization is a fraction, at most 1", "gpu_memory_utilization")
    check_least({name: (count, 1) for name, count in counts.items()} | {"max_logprobs": (args.max_logprobs, -1)})
    check_counts(counts, args.device, has_adapters=bool(args.adapters))
    if args.generation_config not in GENERATION_CONFIGS:
        raise InvalidRequest(f"generation_config is one of {', '.join(GENERATION_CONFIGS)}", "generation_config")
    check_device("device", args.device)


def _fit(
    args: EngineArgs, checkpoint: Checkpoint, precision: Precision, limits: EngineConfig, processes: Processes
) -> tuple[EngineConfig, CacheSize]:
    """The engine's configuration, with no longer sequences than the cache has room for, and the size of that. Raises
    InvalidRequest when ``kv_gb`` holds not one block, ConfigError when the model leaves no room."""
    block = checkpoint.kv_layout(limits.block_tokens, precision.kv_dtype)
    groups, page = plan_pages(checkpoint, block, limits.max_model_len, processes.count)
    num_blocks, num_places = (int(gb * GB) // page.block_bytes for gb in (args.kv_gb, args.swap_gb))
    why = ""
    if not args.kv_gb:
        drafts, context = limits.speculative_tokens, limits.max_model_len
        chosen = choose_pages(
            Asked(
                checkpoint,
                precision,
                args.device,
                page,
                groups,
                largest_step(args.device, limits.chunk_tokens, limits.max_sequences, drafts, context),
                num_ranks=processes.tensor,
                num_copies=processes.context,
                draft_model=args.draft_model,
                utilization=args.gpu_memory_utilization,
                swap_bytes=int(args.swap_gb * GB),
                has_mirror=False,
            )
        )
        num_blocks, why = chosen.num_pages, chosen.why
    longest = groups.max_model_len(num_blocks, limits.max_step_tokens, limits.block_tokens, limits.max_model_len)
    if advice := block_size_advice(checkpoint.config, limits.block_tokens, precision.kv_dtype):
        log.warning("%s", advice.replace("block.tokens", "block_tokens"))
    if longest < 1:
        holder = f"the KV cache ({why})" if why else f"kv_gb={args.kv_gb:g}"
        raise InvalidRequest(f"{holder} does not hold one block of {block.block_bytes / 1e6:.1f} MB", "kv_gb")
    size = CacheSize(page, num_blocks, longest, num_places, limits.max_sequences, groups, limits.chunk_tokens, why)
    return replace(limits, max_model_len=longest, groups=groups), size


def _ranking(sampling: EngineSampling) -> EngineSampling:
    """Answers are ranked by their log-probabilities, requested or not."""
    if sampling.num_answers == sampling.n or sampling.logprobs is not None:
        return sampling
    return replace(sampling, logprobs=0)


def _told_meanwhile(sentence: str) -> AbstractContextManager[object]:
    """On a terminal."""
    return Console(stderr=True).status(escape(sentence)) if sys.stderr.isatty() else nullcontext()
