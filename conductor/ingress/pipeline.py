"""What all APIs share: a request is checked, tokenized and made a job, and its answers come back in pieces.

It owns deadlines, the limit on running requests and the ranking of several answers; ``prompts`` tokenizes. It knows
neither HTTP, gRPC nor any wire format, nor where a request runs: below it there is only ``conductor.api.Generator``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from conductor.api import TOO_LATE, Delta, Generator, InferenceRequest
from conductor.ingress.answers import Answer, Job, Observer, Piece, joined, mean_logprob
from conductor.ingress.prompts import Prompts
from conductor.ingress.repeated_wait import RepeatedWait
from conductor.ingress.served_model import ServedModel
from conductor.ingress.trace import CallTrace, Tracer
from mooncake.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MooncakeError,
    NodeUnavailable,
    Overloaded,
)
from mooncake.hashing import check_salt
from mooncake.pooling import Pooling
from mooncake.sampling import SamplingParams
from mooncake.text.detokenizer import check_stop
from mooncake.text.tokenizer import Tokenizer
from mooncake.types import TokenIds

MAX_CHOICES = 128  # sequences of one request: prompts times n, or times best_of
MAX_SCORES = 1 << 20  # of prompts, told at once: they are put into words in microseconds each
MAX_PRIORITY = (1 << 31) - 1
COMPLETION_MAX_TOKENS = 16  # for completions, as in OpenAI's API; a chat may use what is left of the context

DEADLINE_GRACE_S = 0.5  # the core reports its own deadline first; this only guards against a stuck request

NOT_TRACED = contextlib.nullcontext()  # to be entered in place of a trace

_REQUEST_ID = re.compile(r"[\w.:\-]{1,144}", re.ASCII)  # a client's 128, and what HTTP puts before and behind them

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
        capacity_tokens: Callable[[], int] = lambda: 0,
        tracer: Tracer | None = None,
    ) -> None:
        """``capacity_tokens`` is passed to ``Prompts``. Without a ``tracer`` nothing is traced."""
        self.model = model
        self.prompts = Prompts(model, tokenizer, capacity_tokens, self.check_open)
        self._generator = generator
        self._observer = observer
        self._max_running = max_running
        self._clock = clock
        self._tracer = tracer
        self._running: dict[str, RepeatedWait] = {}  # for the next tokens of each request
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._aborted: set[str] = set()
        self._is_open = True
        self._is_closing = False

    def now(self) -> float:
        return self._clock()

    @property
    def is_open(self) -> bool:
        """Whether it still accepts requests."""
        return self._is_open

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""
        return len(self._running)

    def check_open(self) -> None:
        """Raises NodeUnavailable while shutting down, Overloaded when far more requests run than the core admits."""
        if not self._is_open:
            raise NodeUnavailable("the server is shutting down")
        if len(self._running) >= self._max_running:
            raise Overloaded(f"{len(self._running)} requests are running already")

    def check_room(self) -> None:
        """Raises Overloaded like ``Generator.check_room``."""
        try:
            self._generator.check_room()
        except Overloaded as error:
            self._observer.failed(error.code)
            raise

    def begin_trace(
        self, headers: Callable[[], Mapping[str, str]], call_id: str, model: str, arrived_at: float
    ) -> CallTrace | None:
        """For a call that has been decoded: pass it to its jobs."""
        if self._tracer is None:
            return None
        return self._tracer.begin(headers(), call_id, model or self.model.name, arrived_at)

    def check_scores(self, jobs: Sequence[Job]) -> None:
        """Raises InvalidRequest when the log-probabilities of the prompts, which each choice tells, are too many."""
        requests = [job.request for job in jobs if job.request.sampling.prompt_logprobs is not None]
        tokens = sum(request.sampling.n * len(request.tokens) for request in requests)
        scores = tokens * (1 + max((request.sampling.prompt_logprobs or 0 for request in requests), default=0))
        if scores > MAX_SCORES:
            what = f"the log-probabilities of prompts, told for each choice and with alternatives, are {scores}"
            raise InvalidRequest(f"{what}: at most {MAX_SCORES} can be returned at once", "prompt_logprobs")

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
        trace: CallTrace | None = None,
        pooling: Pooling | None = None,
    ) -> Job:
        """The remaining checks; ``model`` is the client's name for it. Raises InvalidRequest, naming the field."""
        if not _REQUEST_ID.fullmatch(request_id):
            raise InvalidRequest("request_id takes 1 to 128 letters, digits and . : _ -", "request_id")
        check_salt(salt)
        check_stop(stop)
        self.prompts.as_tokens(sampling.stop_token_ids, "stop_token_ids")
        for name, token_ids in sampling.named_tokens():
            self.prompts.as_tokens(token_ids, name)
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidRequest(f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}", "priority")
        if pooling is None and not self.model.has_head:
            raise InvalidRequest(f"{self.model.name} has no output head: it embeds texts, and generates none", "model")
        request = InferenceRequest(
            request_id, tokens, sampling, deadline, salt, session[:256], priority, pooling=pooling
        )
        if trace is not None:
            request = replace(request, attempts=trace.attempts)
            trace.requests.append(request)
        return Job(request, tuple(stop), arrived_at, include_stop, skip_special, model, trace=trace)

    def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The answers to one job. Close it to cancel; whoever calls it has entered the job's trace. Raises what
        ``Generator.generate`` raises, NotFound for a model that is not served (any more), and InternalError."""
        sampling = job.request.sampling
        return self._best(job) if sampling.num_answers > sampling.n else self._all(job)

    async def _all(self, job: Job) -> AsyncGenerator[Piece, None]:
        request = job.request
        answers = [
            Answer(job, choice, self.prompts.tokenizer, self._observer)
            for choice in range(request.sampling.num_answers)
        ]
        unfinished = set(range(len(answers)))
        with self._register(request) as wait, self._count_failure(answers):
            deltas = self._generator.generate(self._with_adapter(job))
            async with contextlib.aclosing(deltas):
                while unfinished:
                    delta = await self._next(deltas, request.request_id, wait)
                    if delta.summary is not None:  # of all answers: it comes when there is news, and at their ends
                        for answer in answers:
                            answer.summary = delta.summary
                    if delta.choice not in unfinished:
                        continue
                    if delta.prompt_logprobs is not None:  # the prompt is shared by all answers
                        for choice in range(1, len(answers)):
                            yield Piece((), "", None, choice, delta.prompt_logprobs)
                    piece = answers[delta.choice].take(delta, self._clock())
                    if piece.outcome is not None:
                        unfinished.discard(delta.choice)
                        if job.trace is not None:
                            job.trace.answered(delta.choice, piece.outcome.finish_reason, piece.outcome.usage)
                        if delta.finish_reason is None:  # a stop string: only found here
                            self._generator.end_choice(request.request_id, delta.choice)
                    if not unfinished and request.pooling is None:
                        self._observer.answered(request.sampling, max(answer.num_tokens for answer in answers))
                    yield piece

    def _with_adapter(self, job: Job) -> InferenceRequest:
        """Its request, of what its name means at the moment at which it reaches the core: before, nothing would keep an
        adapter that is unloaded or replaced. Raises NotFound."""
        request, adapter = job.request, self.model.adapter_of(job.model)
        start = None if adapter is None else adapter.start_in(request.tokens)
        if adapter is None or start is None:
            return request
        return replace(request, adapter=adapter.digest, adapter_start=start)

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
            yield msgspec.structs.replace(whole, tokens=tokens, choice=rank)

    async def run(self, jobs: Sequence[Job], emit: Emit, at_once: int = MAX_CHOICES) -> None:
        """Answer several jobs, ``at_once`` of them together; ``emit(number, piece)`` gets pieces, with answers numbered
        across all jobs.

        The first failure cancels all others and is raised. Raises like ``check_scores``.
        """
        with jobs[0].trace or NOT_TRACED:
            self.check_scores(jobs)
            deadline = max(job.request.deadline for job in jobs)
            try:
                # each answer ends at its deadline by itself; this ends those whose client has stopped reading
                async with asyncio.timeout(deadline + 2 * DEADLINE_GRACE_S - self._clock()):
                    if len(jobs) == 1:  # it needs no task of its own
                        await self._run_one(0, jobs[0], emit)
                    else:
                        await self._run_together(jobs, emit, asyncio.Semaphore(at_once))
            except TimeoutError:
                raise DeadlineExceeded("the answer was not taken within the request's time") from None

    async def _run_together(self, jobs: Sequence[Job], emit: Emit, places: asyncio.Semaphore) -> None:
        async def run_one(first: int, job: Job) -> None:
            async with places:
                await self._run_one(first, job, emit)

        first = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                for job in jobs:
                    tasks.create_task(run_one(first, job))
                    first += job.request.sampling.n
        except BaseExceptionGroup as failures:
            raise _first_leaf(failures) from None

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
        for wait in self._running.values():
            wait.stop()
        self.prompts.close()

    def abort(self, request_id: str) -> None:
        """End a running request with Cancelled. Without effect if none has this id."""
        if request_id in self._running:
            self._aborted.add(request_id)
            self._running[request_id].stop()

    async def _next(self, deltas: AsyncGenerator[Delta, None], request_id: str, wait: RepeatedWait) -> Delta:
        try:
            return await wait.next(deltas)
        except TimeoutError:
            if self._is_closing:
                raise NodeUnavailable("the server is shutting down") from None
            if request_id in self._aborted:
                raise Cancelled("the request was aborted") from None
            raise DeadlineExceeded(TOO_LATE) from None
        except StopAsyncIteration:
            raise InternalError("the answer ended without a reason") from None

    @contextlib.contextmanager
    def _register(self, request: InferenceRequest) -> Iterator[RepeatedWait]:
        self.check_open()
        request_id = request.request_id
        if request_id in self._running:
            raise InvalidRequest("a request with this id is running already", "request_id")
        wait = self._running[request_id] = RepeatedWait(request.deadline + DEADLINE_GRACE_S - self._clock())
        self._is_idle.clear()
        try:
            yield wait
        finally:
            wait.close()
            del self._running[request_id]
            self._aborted.discard(request_id)
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


def _code_of(error: BaseException) -> str:
    if isinstance(error, MooncakeError):
        return error.code
    return Cancelled.code if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else InternalError.code


def _first_leaf(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
