"""``mooncake.AsyncLLM``: one engine inside this process, for programs on asyncio.

    from mooncake import AsyncEngineArgs, AsyncLLM, SamplingParams

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="smollm2"))
    async for output in engine.generate("The capital of France is", SamplingParams(max_tokens=16), "question-1"):
        print(output.outputs[0].text)
    engine.shutdown()

The names are vLLM's. Steps run on a thread of their own, as in a node, and requests join and leave between them. Here
is how outputs come from that thread to the event loop that waits for them; ``in_process`` makes requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING

from mooncake.engine.contract import StepOutput
from mooncake.engine.loop import EngineThread
from mooncake.errors import InvalidRequest, MooncakeError
from mooncake.in_process.answers import Completion, Draft
from mooncake.in_process.embeddings import EmbeddingDraft, EmbeddingRequestOutput, PoolingParams
from mooncake.in_process.engine import InProcessEngine
from mooncake.in_process.engine_args import EngineArgs
from mooncake.in_process.inputs import (
    GivenPrompt,
    LoRARequest,
    Prompt,
    new_adapters,
    priority_list,
    prompt_list,
    warn_of_spelled_control,
)
from mooncake.in_process.tokenizer import LLMTokenizer, RenderedChat
from mooncake.llm_absent import OF_ASYNC_CALLS, OF_LLM, absent_because, says_counterparts
from mooncake.sampling import check_type
from mooncake.sampling_params import RequestOutputKind, SamplingParams
from mooncake.threads import Threads

MAX_WAITING = 1 << 16  # requests; more are refused
_ARGS = "an AsyncEngineArgs(…), which has the settings by their names"


class AsyncLLM:
    """Usable from any event loop; ``generate`` and ``abort`` of one request from the same."""

    @says_counterparts(dict.fromkeys(signature(EngineArgs).parameters, f"give {_ARGS}") | OF_LLM)
    def __init__(self, engine_args: EngineArgs) -> None:
        """Loads the model, which takes a while. Raises ModelError or ConfigError when it cannot be loaded, the cache is
        too small for it, or a number is impossible, and InvalidRequest."""
        check_type("engine_args", engine_args, EngineArgs, _ARGS)
        self._opened = InProcessEngine(engine_args, MAX_WAITING)
        self.max_model_len = self._opened.max_model_len
        self._streams: dict[str, _Stream] = {}
        self._thread = EngineThread(self._opened.engine)
        self._adapter_reader = Threads(1, "adapters")  # one: of several requests with the same adapter, one loads it
        self._is_closed = False
        self._opened.backend.watch(lambda error: self._thread.give_up(error.message))
        self._thread.start()

    @classmethod
    @says_counterparts(OF_ASYNC_CALLS)
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        return cls(engine_args)

    if not TYPE_CHECKING:  # type checkers know what there is

        def __getattr__(self, name: str) -> object:
            """Names that only vLLM's class has say what there is in their place."""
            reason = absent_because(name)
            what = f"AsyncLLM.{name}: {reason}" if reason else f"an AsyncLLM has no {name!r}"
            raise AttributeError(what, name=name, obj=self)

    @says_counterparts(OF_ASYNC_CALLS)
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Completion, None]:
        """The answers to one prompt as they grow, until they are ``finished``; ``sampling_params.output_kind`` says
        whether each result has all so far (CUMULATIVE), only what is new (DELTA), or whether there is only the last
        one (FINAL_ONLY). Who reads slowly gets fewer, larger ones; ``best_of`` and beams come at the end.

        When the generator is closed, or the task that reads it cancelled, the request ends, and its blocks are freed.
        ``get_tokenizer().apply_chat_template(…)`` makes a prompt of a conversation. ``lora_request`` names an adapter
        that the engine was opened with, or one with its folder, which is read while the engine goes on.

        Raises InvalidRequest (also for a ``request_id`` that is in use), ContextTooLong, ModelError for an adapter that
        cannot be loaded, and NodeUnavailable when the engine ends.
        """
        check_type("request_id", request_id, str, "a text")
        check_type("sampling_params", sampling_params, SamplingParams, "one mooncake.SamplingParams")
        self._check_open()
        if request_id in self._streams:
            raise InvalidRequest(f"the request {request_id!r} is being answered already", "request_id")
        given = _one(prompt)
        if not isinstance(given.content, RenderedChat):
            warn_of_spelled_control([given.content], self._opened.tokenizer, stacklevel=3)
        [rank] = priority_list(priority, 1)
        stream = self._streams[request_id] = _Stream(self._thread)
        try:
            if new_adapters(lora_request, self._opened.adapters):
                await asyncio.get_running_loop().run_in_executor(self._adapter_reader, self._load_new, lora_request)
            [adapter] = self._opened.places(None, lora_request, 1)
            stream.begin(await asyncio.to_thread(self._draft, given, sampling_params, adapter, rank))
            text = given.content if isinstance(given.content, str) else None
            is_finished = False
            while not is_finished:
                output = await stream.next(sampling_params.output_kind)
                is_finished = output.finished
                yield replace(output, request_id=request_id, prompt=text)
        finally:
            del self._streams[request_id]
            stream.end()

    @says_counterparts(OF_ASYNC_CALLS)
    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> EmbeddingRequestOutput:
        """The embedding of one text, as ``LLM.embed``; many at once are computed together. When the task that awaits it
        is cancelled, the request ends. Raises like ``generate``."""
        self._check_open()
        wanted = PoolingParams() if pooling_params is None else pooling_params
        check_type("pooling_params", wanted, PoolingParams)
        given = _one(prompt)
        [rank] = priority_list(priority, 1)
        if new_adapters(lora_request, self._opened.adapters):
            await asyncio.get_running_loop().run_in_executor(self._adapter_reader, self._load_new, lora_request)
        [adapter] = self._opened.places(None, lora_request, 1)

        def draft_of() -> EmbeddingDraft:
            text = self._opened.encode(given.content, is_whole=True)
            return self._opened.embedding_draft(text, wanted, adapter, rank, given.cache_salt)

        draft = await asyncio.to_thread(draft_of)
        loop = asyncio.get_running_loop()
        told: asyncio.Future[None] = loop.create_future()

        def take(output: StepOutput | MooncakeError) -> None:
            if told.done():
                return
            if isinstance(output, MooncakeError):
                told.set_exception(output)
            elif draft.take(output):
                told.set_result(None)

        def tell(output: StepOutput | MooncakeError) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(take, output)

        self._thread.add(draft.sequence, tell)
        try:
            await told
        finally:
            if not draft.is_complete:
                self._thread.drop(draft.sequence.request_id)
        return draft.result()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End one request or several now. Who reads them gets what there is, with the ``finish_reason`` "abort". Their
        blocks are free when this returns. Unknown ones are ignored."""
        wanted = [request_id] if isinstance(request_id, str) else list(request_id)
        ends = [stream.abort() for each in wanted if (stream := self._streams.get(each)) is not None]
        await asyncio.gather(*ends)

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's, by the names of transformers: ``encode``, ``apply_chat_template``, ``decode``, …"""
        return LLMTokenizer(self._opened.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Those that the model's generation_config.json asks for. Change it at will: each call makes one."""
        return self._opened.defaults.params()

    async def reset_prefix_cache(self) -> None:
        """Forget all cached blocks that no request holds."""
        await asyncio.wrap_future(self._thread.call(lambda engine: engine.drop_cached()))

    async def check_health(self) -> None:
        """Raises NodeUnavailable when the engine cannot go on."""
        if self.errored:
            raise self.dead_error

    @property
    def is_running(self) -> bool:
        """Whether it can answer."""
        return not self._is_closed and not self.errored

    @property
    def errored(self) -> bool:
        return self._thread.broken.done()

    @property
    def dead_error(self) -> MooncakeError:
        """Why it is ``errored``."""
        return self._thread.broken.result(0)

    def shutdown(self) -> None:
        """Ends all requests with NodeUnavailable after the step in progress, frees the cache, and ends the processes
        that were started. Idempotent."""
        self._is_closed = True
        self._thread.stop()
        self._adapter_reader.shutdown()
        self._opened.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidRequest("this AsyncLLM is shut down")

    def _load_new(self, lora_request: LoRARequest | None) -> None:
        self._check_open()
        self._opened.load_new(lora_request, lambda put: self._thread.call(lambda _: put()).result())

    def _draft(self, prompt: GivenPrompt, wanted: SamplingParams, adapter: int, priority: int) -> Draft:
        """What takes time before a request can join the engine; in a thread, so that neither it nor the event loop
        waits."""
        token_ids = self._opened.encode(prompt.content)
        draft = self._opened.draft(token_ids, wanted, adapter, priority, prompt.cache_salt)
        if guide := draft.sequence.sampling.guide:
            self._opened.guides.compile(guide)
        return draft


def _one(prompt: Prompt) -> GivenPrompt:
    given = prompt_list(prompt)
    if len(given) != 1:
        raise InvalidRequest("generate takes one prompt: call it once for each, they are computed together", "prompt")
    return given[0]


class _Stream:
    """One request's outputs on the event loop that made this. Only ``_tell`` is called on the engine's thread."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._draft: Draft | None = None
        self._error: MooncakeError | None = None
        self._is_aborted = False
        self._news = asyncio.Event()

    def begin(self, draft: Draft) -> None:
        """Join the engine, if it was not aborted before."""
        self._draft = draft
        if self._is_aborted:
            draft.abort()
            self._news.set()
        else:
            self._thread.add(draft.sequence, self._tell)

    def end(self) -> None:
        """Nobody reads it any more. Idempotent."""
        if self._draft is not None and not self._draft.is_complete:
            self._thread.drop(self._draft.sequence.request_id)

    async def abort(self) -> None:
        self._is_aborted = True
        if self._draft is None or self._draft.is_complete:
            return
        dropped = self._thread.drop(self._draft.sequence.request_id)
        self._draft.abort()
        self._news.set()
        await asyncio.wrap_future(dropped)

    async def next(self, kind: RequestOutputKind) -> Completion:
        """Waits for something new. Raises the error that ended the request."""
        draft = self._draft
        assert draft is not None
        while True:
            await self._news.wait()
            self._news.clear()
            if self._error is not None:
                raise self._error
            if draft.is_complete or not (draft.is_ranked or kind is RequestOutputKind.FINAL_ONLY):
                completion = draft.completion()
                if kind is RequestOutputKind.DELTA:
                    draft.forget()
                return completion

    def _tell(self, output: StepOutput | MooncakeError) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._take, output)

    def _take(self, output: StepOutput | MooncakeError) -> None:
        draft = self._draft
        assert draft is not None
        if draft.is_complete:  # an end that comes after a stop string, or after abort
            return
        if isinstance(output, MooncakeError):
            self._error = output
        elif draft.take(output):
            # also after a stop string, which the engine does not know
            self._thread.call(lambda engine: engine.end_choice(output.request_id, output.choice))
        self._news.set()


AsyncLLMEngine = AsyncLLM  # by its older name in vLLM
