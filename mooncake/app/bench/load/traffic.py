"""The same traffic for every server: a cluster over gRPC, or one engine in this process.

Token ids in, token times out, as a client sees them. It sends requests and records times; it does not interpret them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import grpc

from mooncake.api_keys import bearer, own_api_key
from mooncake.app.bench.peers.own import OwnEngine
from mooncake.app.bench.shared.prompts import random_prompt
from mooncake.engine.contract import StepOutput
from mooncake.engine.loop import EngineThread
from mooncake.errors import InternalError, MooncakeError
from mooncake.rpc import common_pb2, inference_pb2
from mooncake.rpc.convert import report_from_wire
from mooncake.rpc.errors import error_from_rpc
from mooncake.rpc.inference_pb2_grpc import InferenceStub
from mooncake.rpc.server import Channels
from mooncake.tls import own_tls
from mooncake.types import PrefillReport

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The times of one request, in seconds of this process's monotonic clock."""

    sent_s: float
    token_times_s: tuple[float, ...]
    end_s: float
    report: PrefillReport | None = None  # only from a cluster

    @property
    def ttft_ms(self) -> float:
        return (self.token_times_s[0] - self.sent_s) * 1e3

    @property
    def total_ms(self) -> float:
        return (self.end_s - self.sent_s) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in pairwise(self.token_times_s)]


OnToken = Callable[[int], None]
"""Called with the number of tokens of one answer so far."""


class Served(Protocol):
    """A server. ``ask`` raises MooncakeError."""

    @property
    def name(self) -> str: ...

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer: ...


class Watched(Served, Protocol):
    """One whose answers may be watched while they come."""

    async def ask(self, prompt: Sequence[int], max_tokens: int, on_token: OnToken | None = None) -> Answer: ...


class ServedByCluster:
    """A running cluster, over its public gRPC service."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self._address = address
        self._channels = Channels(tls=own_tls())

    async def ask(self, prompt: Sequence[int], max_tokens: int, on_token: OnToken | None = None) -> Answer:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        times: list[float] = []
        last = inference_pb2.GenerateResponse()
        sent_s = time.monotonic()
        try:
            stub = InferenceStub(self._channels.get(self._address))
            async for last in stub.Generate(request, timeout=TIMEOUT_S, metadata=bearer(own_api_key())):
                times += [time.monotonic()] * len(last.tokens)
                if on_token is not None and last.tokens:
                    on_token(len(times))
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._address) from None
        return whole(Answer(sent_s, tuple(times), time.monotonic(), report_from_wire(last.timings.prefill)), max_tokens)

    async def close(self) -> None:
        await self._channels.close()


class ServedByEngine:
    """One engine that does prefill and decode in the same steps: the baseline of a cluster."""

    name = "one engine"

    def __init__(self, own: OwnEngine) -> None:
        self._own = own
        self._thread = EngineThread(own.core)
        self._thread.start()

    async def ask(self, prompt: Sequence[int], max_tokens: int, on_token: OnToken | None = None) -> Answer:
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[StepOutput | MooncakeError] = asyncio.Queue()
        times: list[float] = []

        def on_output(output: StepOutput | MooncakeError) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, output)

        sent_s = time.monotonic()
        self._thread.add(self._own.sequence(prompt, max_tokens), on_output)
        while True:
            output = await asyncio.wait_for(outputs.get(), TIMEOUT_S)
            if isinstance(output, MooncakeError):
                raise output
            times.append(time.monotonic())
            if on_token is not None:
                on_token(len(times))
            if output.finish_reason is not None:
                return whole(Answer(sent_s, tuple(times), times[-1]), max_tokens)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.stop)


def whole(answer: Answer, max_tokens: int) -> Answer:
    """Raises InternalError when not exactly so many tokens came."""
    if len(answer.token_times_s) != max_tokens:
        raise InternalError(f"{len(answer.token_times_s)} tokens came, {max_tokens} were requested")
    return answer


@dataclass(frozen=True, slots=True)
class Run:
    """Answers of several clients, and the total time."""

    answers: list[Answer]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_times_s) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.wall_s

    @property
    def gaps_ms(self) -> list[float]:
        return [gap for answer in self.answers for gap in answer.gaps_ms]


class Traffic:
    """Random prompts from one seed, none repeated."""

    def __init__(self, vocab_size: int, seed: int | str) -> None:
        self._vocab_size = vocab_size
        self._draw = random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        return random_prompt(self._draw, self._vocab_size, length)

    async def closed_loop(
        self, served: Served, clients: int, requests: int, prompt_tokens: int, new: int, spread: float = 0.0
    ) -> Run:
        """``clients`` in parallel, each sending ``requests`` one after the other without a pause. Prompts and answers
        are up to ``spread`` of their length longer or shorter: with equal ones all clients begin and end together."""

        async def client(requests: list[tuple[list[int], int]]) -> list[Answer]:
            return [await served.ask(prompt, new) for prompt, new in requests]

        def request() -> tuple[list[int], int]:
            length, answer = (self._about(tokens, spread) for tokens in (prompt_tokens, new))
            return self.prompt(length), answer

        work = [[request() for _ in range(requests)] for _ in range(clients)]
        begin = time.monotonic()
        answers = await asyncio.gather(*map(client, work))
        return Run([answer for some in answers for answer in some], time.monotonic() - begin)

    def _about(self, tokens: int, spread: float) -> int:
        most = int(spread * tokens)
        return tokens + (self._draw.randint(-most, most) if most else 0)

    async def disturbed(
        self, served: Watched, clients: int, prompt_tokens: int, new: int, long_tokens: int
    ) -> tuple[Run, int]:
        """What clients with running answers see from the arrival of a long prompt until its first token, and how many
        answers run when it arrives: fewer than ``clients`` if answers of ``new`` tokens end before all have begun."""
        everybody_runs = asyncio.Event()
        running: set[int] = set()

        def note(client: int) -> OnToken:
            def on_token(count: int) -> None:
                if count >= 2:
                    running.add(client)
                if len(running) == clients:
                    everybody_runs.set()

            return on_token

        tasks = [
            asyncio.create_task(served.ask(self.prompt(prompt_tokens), new, note(client))) for client in range(clients)
        ]
        ended = asyncio.gather(*tasks)
        waiting = asyncio.create_task(everybody_runs.wait())
        await asyncio.wait((ended, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        num_running = sum(not task.done() for task in tasks)
        long = await served.ask(self.prompt(long_tokens), 1)
        answers = [_between(answer, long.sent_s, long.token_times_s[0]) for answer in await ended]
        return Run([answer for answer in answers if answer.token_times_s], long.total_ms / 1e3), num_running


def _between(answer: Answer, begin_s: float, end_s: float) -> Answer:
    """The tokens in an interval, with the last one before it and the first one after it."""
    times = answer.token_times_s
    first = max((i for i, at in enumerate(times) if at <= begin_s), default=0)
    last = min((i for i, at in enumerate(times) if at >= end_s), default=len(times) - 1)
    return Answer(answer.sent_s, times[first : last + 1], answer.end_s)
