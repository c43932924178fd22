"""What every front door shares: a request is checked, tokenized and made a job, and its answers come back in pieces.

It owns tokenizing, limits, deadlines and the ranking of several answers. It knows neither HTTP, gRPC nor any wire
format, nor where a request runs: below it there is only ``conductor.api.Generator``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec
import numpy as np

from conductor.api import Delta, Generator, InferenceRequest
from conductor.ingress.answers import Answer, Job, Observer, Piece, joined, mean_logprob
from mooncake.adapters import Adapter
from mooncake.errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MooncakeError,
    NodeUnavailable,
    NotFound,
    Overloaded,
    shown,
)
from mooncake.guides import Guides
from mooncake.sampling_defaults import NEUTRAL, SamplingDefaults
from mooncake.text import bad_word_tokens, check_stop
from mooncake.tokenizer import LONG_TEXT_CHARS, ROLES, ChatMessage, Tokenizer
from mooncake.types import Guide, SamplingParams, TokenIds

MAX_CHOICES = 128  # sequences of one request: prompts times n, or times best_of
MAX_MESSAGES = 4096
MAX_PRIORITY = (1 << 31) - 1
COMPLETION_MAX_TOKENS = 16  # for completions, as in OpenAI's API; a chat may use what is left of the context

DEADLINE_GRACE_S = 0.5  # the core reports its own deadline first; this only guards against a stuck request

T = TypeVar("T")

_REQUEST_ID = re.compile(r"[\w.:\-]{1,128}", re.ASCII)
_SALT = re.compile(r"[A-Za-z0-9_-]{0,64}")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it."""

    name: str
    max_model_len: int  # tokens of prompt plus answer
    vocab_size: int
    block_tokens: int
    dtype: str
    fingerprint: str  # changes with the weights
    created: int  # seconds since 1970
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # by the names that clients use
    sampling: SamplingDefaults = NEUTRAL  # defaults of requests


Emit = Callable[[int, Piece], Awaitable[None]]


class Pipeline:
    """Checks, tokenizes, generates. One event loop; call ``close`` when done."""

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        generator: Generator,
        observer: Observer,
        max_running: int,
        clock: Callable[[], float] = time.monotonic,
        most_tokens: Callable[[], int] = lambda: 0,
    ) -> None:
        """``most_tokens`` returns the longest sequence the nodes have memory for; 0: not known yet."""
        self.model = model
        self._most_tokens = most_tokens
        self.tokenizer = tokenizer
        self._generator = generator
        self._observer = observer
        self._max_running = max_running
        self._clock = clock
        self._guides = Guides(lambda: tokenizer, model.vocab_size)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._running: set[str] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._waits: set[asyncio.Timeout] = set()
        self._is_open = True
        self._is_closing = False

    def now(self) -> float:
        return self._clock()

    @property
    def context_len(self) -> int:
        """Tokens of prompt plus answer: the lesser of the model's limit and the nodes' memory."""
        return min(self.model.max_model_len, self._most_tokens() or self.model.max_model_len)

    @property
    def sampling(self) -> SamplingDefaults:
        """Defaults of requests."""
        return self.model.sampling

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.model.name, *self.model.adapters)

    def adapter_of(self, name: str) -> Adapter | None:
        """The adapter of that name; None for the base model or no name. Raises NotFound."""
        if not name or name == self.model.name:
            return None
        if name not in self.model.adapters:
            served = ", ".join(map(repr, self.model_names))
            raise UnknownModel(f"the model {shown(name)} is not served here; served: {served}")
        return self.model.adapters[name]

    @property
    def is_open(self) -> bool:
        """Whether it still accepts requests."""
        return self._is_open

    def check_open(self) -> None:
        """Raises NodeUnavailable while shutting down, Overloaded when far more requests run than the core admits."""
        if not self._is_open:
            raise NodeUnavailable("the server is shutting down")
        if len(self._running) >= self._max_running:
            raise Overloaded(f"{len(self._running)} requests are running already")

    async def encode(
        self, text: str, param: str = "prompt", keep: int | None = None, add_special: bool = True
    ) -> TokenIds:
        """Token ids of plain text, or its last ``keep``. Raises InvalidRequest (empty) or ContextTooLong."""
        if keep is None and await self._is_surely_too_long(text):
            raise self._too_long(f"a text of {len(text)} characters", param)
        tokens = await self._maybe_in_thread(len(text), lambda: self.tokenizer.encode(text, add_special))
        return self._fitting(tokens, param, keep)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        param: str = "messages",
        keep: int | None = None,
        variables: Mapping[str, object] | None = None,
        continue_final: bool = False,
        roles: Sequence[str] = ROLES,
    ) -> TokenIds:
        """Token ids of a conversation, ready for the assistant's turn, or with ``continue_final`` for more of the last
        message; or the last ``keep`` of them. ``variables`` are for the chat template, which supports ``roles``.

        Raises InvalidRequest or ContextTooLong.
        """
        if not messages:
            raise InvalidRequest("at least one message is needed", param)
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest(f"at most {MAX_MESSAGES} messages are allowed", param)
        for number, message in enumerate(messages):
            if message.role not in roles:
                known = ", ".join(roles)
                raise InvalidRequest(
                    f"the role {shown(message.role)} is not supported; known: {known}", f"{param}[{number}].role"
                )
        text = "".join(message.content + message.beside for message in messages) + _as_told(variables)
        if keep is None and await self._is_surely_too_long(text):
            raise self._too_long(f"a conversation of {len(text)} characters", param)
        tokens = await self._maybe_in_thread(
            len(text), lambda: self.tokenizer.encode_chat(messages, variables, continue_final)
        )
        return self._fitting(tokens, param, keep)

    async def decode(self, tokens: TokenIds, skip_special: bool) -> str:
        return await self._maybe_in_thread(4 * len(tokens), lambda: self.tokenizer.decode(tokens, skip_special))

    async def check_guide(self, guide: Guide | None) -> None:
        """Raises InvalidRequest for an invalid guide: better here than on a node. A schema can take a while."""
        if guide is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._guides.compile, guide)

    def check_tokens(self, ids: Sequence[int], param: str = "prompt", keep: int | None = None) -> TokenIds:
        """A client's own ids as an array, or the last ``keep``. Raises InvalidRequest (not in the vocabulary) or
        ContextTooLong."""
        return self._fitting(self.as_tokens(ids, param), param, keep)

    def num_to_keep(self, truncate_prompt_tokens: int | None, num_answer: int) -> int | None:
        """How many of a prompt's last tokens to keep; None: all. -1 means as many as leave room for an answer of
        ``num_answer`` tokens. Raises InvalidRequest."""
        if truncate_prompt_tokens is None:
            return None
        keep, limit = truncate_prompt_tokens, self.context_len
        if keep == -1:
            return max(1, limit - max(1, num_answer))
        if not 1 <= keep <= limit:
            what = f"truncate_prompt_tokens must be -1 or between 1 and {limit}, got {shown(keep)}"
            raise InvalidRequest(what, "truncate_prompt_tokens")
        return keep

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of these words. Raises InvalidRequest."""
        return bad_word_tokens(self.tokenizer, words)

    def as_tokens(self, ids: Sequence[int], param: str) -> TokenIds:
        """Raises InvalidRequest for an id that is not in the vocabulary."""
        vocab_size = self.model.vocab_size
        try:
            array = np.array(ids, dtype=np.int64)
        except OverflowError:
            raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}", param) from None
        if len(array) and not (array.min() >= 0 and array.max() < vocab_size):
            wrong = int(array[(array < 0) | (array >= vocab_size)][0])
            raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}, got {wrong}", param)
        return array.astype(np.uint32)

    def max_tokens(self, num_prompt: int, requested: int | None, default: int | None) -> int:
        """How many tokens an answer may have: the requested number, or the default, limited by the context.

        With ``default`` None: all that is left of the context.
        """
        room = self.model.max_model_len - num_prompt
        wanted = default if requested is None else requested
        return room if wanted is None else min(wanted, room)

    def check_room(self, num_prompt: int, requested: int | None, param: str) -> None:
        """Raises ContextTooLong when the context leaves fewer tokens than ``requested``: clients of OpenAI's API
        rely on getting them, and should not wait for a truncated answer."""
        room = self.model.max_model_len - num_prompt
        if requested is not None and requested > room:
            left = f"leaves {room} of the context of {self.model.max_model_len}"
            raise ContextTooLong(f"{param} is {shown(requested)}, and a prompt of {num_prompt} tokens {left}", param)

    def job(
        self,
        tokens: TokenIds,
        sampling: SamplingParams,
        *,
        request_id: str,
        deadline: float,
        arrived_at: float,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        salt: str = "",
        session: str = "",
        priority: int = 0,
        model: str = "",
    ) -> Job:
        """The remaining checks; ``model`` is the client's name for it.

        Raises InvalidRequest, naming the field, and NotFound.
        """
        if not _REQUEST_ID.fullmatch(request_id):
            raise InvalidRequest("request_id takes 1 to 128 letters, digits and . : _ -", "request_id")
        if not _SALT.fullmatch(salt):
            raise InvalidRequest("cache_salt takes at most 64 letters, digits, _ and -", "cache_salt")
        check_stop(stop)
        self.as_tokens(sampling.stop_token_ids, "stop_token_ids")
        for name, token_ids in sampling.named_tokens():
            self.as_tokens(token_ids, name)
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidRequest(f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}", "priority")
        adapter = self.adapter_of(model)
        start = None if adapter is None else adapter.start_in(tokens)
        request = InferenceRequest(
            request_id,
            tokens,
            sampling,
            deadline,
            salt,
            session[:256],
            priority,
            adapter="" if adapter is None or start is None else adapter.digest,
            adapter_start=start or 0,
        )
        return Job(request, tuple(stop), arrived_at, include_stop, skip_special)

    async def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The answers to one job. Close it to cancel. Raises what ``Generator.generate`` raises, and InternalError."""
        sampling = job.request.sampling
        pieces = self._best(job) if sampling.num_answers > sampling.n else self._all(job)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def _all(self, job: Job) -> AsyncGenerator[Piece, None]:
        request = job.request
        answers = [
            Answer(job, choice, self.tokenizer, self._observer) for choice in range(request.sampling.num_answers)
        ]
        unfinished = set(range(len(answers)))
        with self._register(request.request_id), self._count_failure(answers):
            deltas = self._generator.generate(request)
            async with contextlib.aclosing(deltas):
                while unfinished:
                    delta = await self._next(deltas, request.deadline)
                    if delta.choice not in unfinished:
                        continue
                    if delta.prompt_logprobs is not None:  # the prompt is shared by all answers
                        for choice in range(1, len(answers)):
                            yield Piece((), "", None, choice, delta.prompt_logprobs)
                    piece = answers[delta.choice].take(delta, self._clock())
                    if piece.outcome is not None:
                        unfinished.discard(delta.choice)
                        if delta.finish_reason is None:  # a stop string: only found here
                            self._generator.end_choice(request.request_id, delta.choice)
                    yield piece

    async def _best(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Generate more answers than requested, and return the ``n`` most likely per token, best first."""
        sampling = job.request.sampling
        ranking = replace(sampling, logprobs=sampling.logprobs or 0)
        answers: list[list[Piece]] = [[] for _ in range(sampling.num_answers)]
        async with contextlib.aclosing(self._all(replace(job, request=replace(job.request, sampling=ranking)))) as all_:
            async for piece in all_:
                answers[piece.choice].append(piece)
        wholes = sorted(map(joined, answers), key=mean_logprob, reverse=True)
        for rank, whole in enumerate(wholes[: sampling.n]):
            tokens = whole.tokens
            if sampling.logprobs is None:
                tokens = tuple(msgspec.structs.replace(token, logprob=None) for token in tokens)
            yield replace(whole, tokens=tokens, choice=rank)

    async def run(self, jobs: Sequence[Job], emit: Emit) -> None:
        """Answer several jobs at once; ``emit(number, piece)`` gets pieces, with answers numbered across all jobs.

        The first failure cancels all others and is raised.
        """
        deadline = max(job.request.deadline for job in jobs)
        first = 0
        try:
            # each answer ends at its deadline by itself; this ends those whose client has stopped reading
            async with asyncio.timeout(deadline + 2 * DEADLINE_GRACE_S - self._clock()), asyncio.TaskGroup() as tasks:
                for job in jobs:
                    tasks.create_task(self._run_one(first, job, emit))
                    first += job.request.sampling.n
        except BaseExceptionGroup as failures:
            raise _first_leaf(failures) from None
        except TimeoutError:
            raise DeadlineExceeded("the answer was not taken within the request's time") from None

    async def _run_one(self, first: int, job: Job, emit: Emit) -> None:
        async with contextlib.aclosing(self.stream(job)) as pieces:
            async for piece in pieces:
                await emit(first + piece.choice, piece)

    async def drain(self, within_s: float) -> None:
        """Refuse new requests, and wait up to ``within_s`` for the running ones to end."""
        self._is_open = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._is_idle.wait()

    async def close(self) -> None:
        """Refuse new requests, and end the running ones with NodeUnavailable."""
        self._is_open = False
        self._is_closing = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _next(self, deltas: AsyncGenerator[Delta, None], deadline: float) -> Delta:
        left_s = 0.0 if self._is_closing else deadline + DEADLINE_GRACE_S - self._clock()
        timeout = asyncio.timeout(left_s)
        try:
            if left_s <= 0:
                raise TimeoutError
            async with timeout:
                self._waits.add(timeout)
                return await anext(deltas)
        except TimeoutError:
            if self._is_closing:
                raise NodeUnavailable("the server is shutting down") from None
            raise DeadlineExceeded("the request did not finish within its time") from None
        except StopAsyncIteration:
            raise InternalError("the answer ended without a reason") from None
        finally:
            self._waits.discard(timeout)

    @contextlib.contextmanager
    def _register(self, request_id: str) -> Iterator[None]:
        self.check_open()
        if request_id in self._running:
            raise InvalidRequest("a request with this id is running already", "request_id")
        self._running.add(request_id)
        self._is_idle.clear()
        try:
            yield
        finally:
            self._running.discard(request_id)
            if not self._running:
                self._is_idle.set()

    @contextlib.contextmanager
    def _count_failure(self, answers: Sequence[Answer]) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not all(answer.is_complete for answer in answers):
                self._observer.failed(_code_of(error))
            raise

    async def _maybe_in_thread(self, num_chars: int, work: Callable[[], T]) -> T:
        if num_chars <= LONG_TEXT_CHARS:
            return work()
        self.check_open()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _is_surely_too_long(self, text: str) -> bool:
        """Whether a cheap check settles that a text cannot fit: its beginning alone makes twice the tokens allowed.

        So a client cannot make us tokenize megabytes to learn what kilobytes show.
        """
        probe = max(16 * self.model.max_model_len, LONG_TEXT_CHARS)
        if len(text) <= 2 * probe:
            return False
        head = await self._maybe_in_thread(probe, lambda: self.tokenizer.encode(text[:probe]))
        return len(head) > 2 * self.model.max_model_len

    def _fitting(self, tokens: TokenIds, param: str, keep: int | None = None) -> TokenIds:
        if not len(tokens):
            raise InvalidRequest("the prompt is empty", param)
        if keep is not None:
            tokens = tokens[-keep:]
        if len(tokens) >= self.model.max_model_len:
            raise self._too_long(f"a prompt of {len(tokens)} tokens", param)
        return tokens

    def _too_long(self, what: str, param: str) -> ContextTooLong:
        return ContextTooLong(f"{what} leaves no room for an answer: the context is {self.context_len} tokens", param)


def _as_told(variables: Mapping[str, object] | None) -> str:
    """Roughly what a chat template renders: tools and documents cost as much to render and tokenize as messages."""
    try:
        return json.dumps(variables, ensure_ascii=False) if variables else ""
    except (RecursionError, TypeError, ValueError):  # the template refuses them for the same reason
        return ""


class UnknownModel(NotFound):
    """The error code that clients of OpenAI's API expect."""

    code = "model_not_found"


def _code_of(error: BaseException) -> str:
    if isinstance(error, MooncakeError):
        return error.code
    return Cancelled.code if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else InternalError.code


def _first_leaf(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
