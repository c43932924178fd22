"""``mooncake.LLM``: one engine inside this process, without a cluster.

    from mooncake import LLM, SamplingParams

    llm = LLM("smollm2")
    for answer in llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(max_tokens=16)):
        print(answer.text)

It keeps its paged cache between calls, so a second call reuses the blocks of the first. Ctrl-C ends a call after the
step in progress, pressed again at once. Not safe for several threads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mooncake.errors import InternalError, InvalidRequest
from mooncake.in_process.answers import BeamSearchOutput, Completion, Draft, DraftTokens, beams_of
from mooncake.in_process.embeddings import (
    EmbeddingDraft,
    EmbeddingRequestOutput,
    PoolingParams,
    ScoringRequestOutput,
    scores_of,
)
from mooncake.in_process.engine import InProcessEngine
from mooncake.in_process.engine_args import EngineArgs
from mooncake.in_process.inputs import (
    Adapters,
    LoRARequests,
    Message,
    Priorities,
    Prompts,
    conversation_list,
    one_each,
    priority_list,
    prompt_list,
    template_variables,
    warn_of_spelled_control,
    with_template,
)
from mooncake.in_process.interrupts import HeldInterrupts
from mooncake.in_process.tokenizer import LLMTokenizer, RenderedChat
from mooncake.llm_absent import OF_CALLS, OF_LLM, absent_because, says_counterparts
from mooncake.sampling import MAX_TOP_LOGPROBS, check_type
from mooncake.sampling_params import BeamSearchParams, SamplingParams
from mooncake.sizing import GPU_MEMORY_UTILIZATION
from mooncake.types import TokenIds

if TYPE_CHECKING:
    import torch


class LLM:
    """Raises ModelError or ConfigError when the model cannot be loaded, the cache is too small for it, or a number
    is impossible."""

    @says_counterparts(OF_LLM)
    def __init__(
        self,
        model: str = "smollm2",
        dtype: str | torch.dtype = "float32",
        *,
        kv_gb: float = 0.0,
        gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
        block_tokens: int = 64,
        chunk_tokens: int = -1,
        max_sequences: int = 0,
        max_model_len: int = 0,
        threads: int = 0,
        kv_dtype: str = "auto",
        weights: str = "auto",
        key_scales: str = "",
        speculative_tokens: int = 0,
        tbt_limit_ms: float = 0.0,
        swap_gb: float = 0.25,
        draft_model: str = "",
        adapters: Mapping[str, str] | None = None,
        device: str = "cpu",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        generation_config: str = "auto",
        max_logprobs: int = MAX_TOP_LOGPROBS,
        chat_template: str | Path | None = None,
    ) -> None:
        """``model`` is an HF folder, a .gguf file, a model's name on Hugging Face or "smollm2". ``chunk_tokens`` bounds
        the prompt tokens of one step (0: whole prompts), ``max_sequences`` how many run at once; -1 and 0 mean 1,024
        and 64, on a GPU 8,192 and 256. ``threads`` and ``max_model_len`` 0 mean what torch and the model say.

        The KV cache takes ``kv_gb``. 0 is on a GPU what the model leaves of its ``gpu_memory_utilization``, a fraction;
        on a CPU 1 GB, or more where the longest sequence needs it and memory is free.

        ``dtype``, ``kv_dtype`` ("int8" too), ``key_scales`` and ``weights`` ("stored", "stored_a8", "int8", "w8a8",
        "plain") are those of the configuration's [model].
        Up to ``speculative_tokens`` are drafted from what came before and verified in one step: the same answers (on
        GPUs up to rounding), and sooner where they repeat; a ``draft_model`` with the same vocabulary drafts in their
        place. With ``tbt_limit_ms`` prompts are cut so that answers under way get a token as often as that. ``swap_gb``
        keeps blocks of sequences that had to give way, where copying beats computing them again. ``adapters`` are
        folders of LoRA adapters as PEFT saves them, by the names that ``generate`` and ``chat`` take.

        ``device`` "cuda" (or "cuda:1") computes on a GPU; ``tensor_parallel_size`` cuts the model over so many
        processes, each with a part of every layer, on CPUs with ``threads`` each or on a GPU each, from ``device`` on.
        On CPUs ``pipeline_parallel_size`` cuts it into so many with a run of layers and ``threads`` each;
        ``context_parallel_size`` cuts the tokens of each prompt step over so many, which share ``threads``. The last
        two pay for prompts, in large steps (``chunk_tokens``). ``generation_config`` "none" leaves out what the model's
        file of that name says of sampling. ``chat_template``, a file or Jinja, replaces the model's own.
        ``max_logprobs`` is how many ``logprobs`` and ``prompt_logprobs`` may ask for; -1: the whole vocabulary, which
        takes some MB for each token. Raises TypeError for other names; of vLLM's, it says what stands for them.
        """
        args = EngineArgs(**{name: value for name, value in locals().items() if name != "self"})  # by the same names
        self._opened = InProcessEngine(args)
        self.engine = self._opened.engine
        self.tokenizer = self._opened.tokenizer
        self.max_model_len = self._opened.max_model_len
        self._is_closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees its cache and ends the processes it has started, like leaving a ``with``. Idempotent."""
        self._is_closed = True
        self._opened.close()

    if not TYPE_CHECKING:  # type checkers know what there is

        def __getattr__(self, name: str) -> object:
            """Names that only vLLM's class has say what there is in their place."""
            reason = absent_because(name)
            raise AttributeError(f"LLM.{name}: {reason}" if reason else f"an LLM has no {name!r}", name=name, obj=self)

    @property
    def draft_tokens(self) -> DraftTokens:
        """Of all calls so far: how often ``speculative_tokens`` were right."""
        load = self.engine.load()
        return DraftTokens(load.drafted_tokens, load.accepted_tokens)

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks, so that the next prompt is computed as a whole."""
        self.engine.drop_cached()

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's, by the names of transformers: ``encode``, ``apply_chat_template``, ``decode``, …"""
        return LLMTokenizer(self.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Used where no ``sampling_params`` are given, including what the model's generation_config.json says. Change
        it at will: each call makes one."""
        return self._opened.defaults.params()

    @says_counterparts(OF_CALLS)
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapters = None,
        lora_request: LoRARequests = None,
        priority: Priorities = None,
        use_tqdm: bool | None = None,
    ) -> list[Completion]:
        """Answer every prompt; answers are in the order of the prompts.

        One of ``sampling_params``, ``adapter`` and ``priority`` for all prompts, or one each; the default is
        ``get_default_sampling_params()``. With ``n`` each prompt is computed once and answered that many times.
        ``lora_request`` names adapters in vLLM's form; one with a folder is loaded when it is first named. Prompts with
        a lower ``priority`` are computed first. ``use_tqdm`` shows a progress bar on stderr; by default where that is a
        terminal. Raises InvalidRequest, ContextTooLong, and ModelError for an adapter that cannot be loaded.
        """
        self._check_open()
        given = prompt_list(prompts)
        plain = [each.content for each in given if not isinstance(each.content, RenderedChat)]
        warn_of_spelled_control(plain, self.tokenizer, stacklevel=4)
        token_ids = [self._opened.encode(each.content) for each in given]
        self._opened.load_new(lora_request, lambda put: put())
        places = self._opened.places(adapter, lora_request, len(given))
        salts = [each.cache_salt for each in given]
        completions = self._answer(token_ids, sampling_params, places, priority, use_tqdm, salts)
        texts = [each.content if isinstance(each.content, str) else None for each in given]
        return [replace(each, prompt=text) for each, text in zip(completions, texts, strict=True)]

    @says_counterparts(OF_CALLS)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | Path | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        adapter: Adapters = None,
        lora_request: LoRARequests = None,
        priority: Priorities = None,
        use_tqdm: bool | None = None,
    ) -> list[Completion]:
        """Answer one conversation, or each of several, using the model's own chat template, or that of
        ``chat_template`` (a file, or Jinja), which gets ``tools`` (in OpenAI's form) and the variables in
        ``chat_template_kwargs``. With ``continue_final_message`` the answer is more of the last message. The other
        arguments are those of ``generate``.

        Reasoning and calls are part of the text, and parsed over HTTP alone. Raises like ``generate``, and
        InvalidRequest where the template has no place for tools.
        """
        self._check_open()
        tokenizer = with_template(self.tokenizer, chat_template)
        variables = template_variables(tokenizer, tools, chat_template_kwargs, add_generation_prompt)
        conversations = conversation_list(messages)
        token_ids = [tokenizer.encode_chat(each, variables, continue_final_message) for each in conversations]
        self._opened.load_new(lora_request, lambda put: put())
        places = self._opened.places(adapter, lora_request, len(token_ids))
        completions = self._answer(token_ids, sampling_params, places, priority, use_tqdm)
        texts = [self.tokenizer.decode(ids, skip_special=False) for ids in token_ids]
        return [replace(each, prompt=text) for each, text in zip(completions, texts, strict=True)]

    @says_counterparts(OF_CALLS)
    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        *,
        lora_request: LoRARequests = None,
        use_tqdm: bool | None = None,
    ) -> list[BeamSearchOutput]:
        """The ``params.beam_width`` answers to each prompt found by beam search, best first, by the rules of
        transformers. Raises like ``generate``."""
        check_type("params", params, BeamSearchParams)
        found = self.generate(prompts, params.sampling(), lora_request=lora_request, use_tqdm=use_tqdm)
        return [beams_of(each, self.tokenizer, params.skip_special_tokens) for each in found]

    @says_counterparts(OF_CALLS)
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequests = None,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of every text, in order: its last hidden states, pooled as the model's folder says (files of
        sentence-transformers), or else that of the last token, with length 1. Raises like ``generate``, and ModelError
        for a model that is not embedded with here."""
        self._check_open()
        wanted = PoolingParams() if pooling_params is None else pooling_params
        check_type("pooling_params", wanted, PoolingParams)
        given = prompt_list(prompts)
        texts = [self._opened.encode(each.content, is_whole=True) for each in given]
        self._opened.load_new(lora_request, lambda put: put())
        places = self._opened.places(None, lora_request, len(given))
        each_of = zip(texts, places, given, strict=True)
        drafts = [self._opened.embedding_draft(text, wanted, place, 0, one.cache_salt) for text, place, one in each_of]
        self._finish(drafts, use_tqdm)
        return [draft.result() for draft in drafts]

    @says_counterparts(OF_CALLS)
    def score(
        self,
        data_1: Prompts,
        data_2: Prompts,
        *,
        lora_request: LoRARequests = None,
        use_tqdm: bool | None = None,
    ) -> list[ScoringRequestOutput]:
        """How near each of ``data_1``, or the only one, is to that of ``data_2``: the cosine of their embeddings.
        Raises like ``embed``."""
        firsts, seconds = (
            self.embed(texts, lora_request=lora_request, use_tqdm=use_tqdm) for texts in (data_1, data_2)
        )
        return scores_of(firsts, seconds)

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidRequest("this LLM is closed")

    def _answer(
        self,
        prompts: list[TokenIds],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        adapters: list[int],
        priority: Priorities,
        use_tqdm: bool | None,
        salts: list[str] | None = None,
    ) -> list[Completion]:
        samplings = one_each(self.get_default_sampling_params() if sampling is None else sampling, len(prompts))
        priorities = priority_list(priority, len(prompts))
        each_of = zip(prompts, samplings, adapters, priorities, salts or [""] * len(prompts), strict=True)
        drafts = [self._opened.draft(*each) for each in each_of]
        self._finish(drafts, use_tqdm)
        return [draft.completion() for draft in drafts]

    def _finish(self, drafts: Sequence[Draft | EmbeddingDraft], use_tqdm: bool | None) -> None:
        """Return once they are complete, or raise."""
        with HeldInterrupts() as interrupts:  # in the middle of a step one would leave blocks that are nobody's
            try:
                self._run(drafts, sys.stderr.isatty() if use_tqdm is None else use_tqdm, interrupts)
            finally:
                for draft in drafts:
                    self.engine.abort(draft.sequence.request_id)
                self.engine.take_ended()

    def _run(self, drafts: Sequence[Draft | EmbeddingDraft], shows_progress: bool, interrupts: HeldInterrupts) -> None:
        by_id = {draft.sequence.request_id: draft for draft in drafts}
        to_add = sorted(drafts, key=lambda draft: draft.sequence.priority)[::-1]  # the next one is the last
        most_waiting = min(self.engine.config.max_sequences, self.engine.config.max_waiting)
        with _progress(shows_progress) as progress:
            bar = progress.add_task("answers", total=len(drafts))
            while to_add or self.engine.has_work:
                while to_add and self.engine.load().waiting < most_waiting:
                    self.engine.add(to_add.pop().sequence)
                for output in self.engine.step():
                    draft = by_id[output.request_id]
                    if draft.take(output):
                        # also after a stop string, which the engine does not know
                        self.engine.end_choice(output.request_id, output.choice)
                        progress.advance(bar, draft.is_complete)
                self._check_progress(by_id)
                interrupts.let_through()

    def _check_progress(self, by_id: Mapping[str, Draft | EmbeddingDraft]) -> None:
        for request_id, error in self.engine.take_ended():
            if not by_id[request_id].is_complete:
                raise error
        if self.engine.is_stalled:
            raise InternalError("the engine stands still: its blocks are held by someone else")


def _progress(shows: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)  # what a script prints may go into a file
    return Progress(*columns, console=console, disable=not shows, transient=console.is_terminal)
