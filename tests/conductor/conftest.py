"""Small nodes that speak the real protocols over real sockets and can be told to fail.

Their "model" is one line: the next token is a function of all tokens before it, so an answer continued from wrong
tokens differs visibly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from nonsense import Nonsense, add_outputs_servicer, nonsense
from waiting import until

from conductor.api import Delta, InferenceRequest
from conductor.core import Core
from conductor.model_facts import ModelFacts
from conductor.placement.view import Shape
from conductor.service import ClusterServicer
from kvstore.metadata.memory import MemoryDirectory
from mooncake.config import Config, load_config
from mooncake.errors import HandoffFailed, MooncakeError, NodeUnavailable
from mooncake.events import CacheEventsServicer, EventLog
from mooncake.membership import Membership
from mooncake.outbox import Outboxes, diverted
from mooncake.pooling import Vector
from mooncake.rpc import (
    cluster_pb2,
    cluster_pb2_grpc,
    common_pb2,
    common_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from mooncake.rpc.convert import tokens_from_wire, vector_to_wire
from mooncake.rpc.server import Channels, RpcServer
from mooncake.sampling import SamplingParams
from mooncake.types import TokenIds

EOS = 1
VOCAB_SIZE = 1000
FACTS = ModelFacts(
    kv_fingerprint="kv",
    shape=Shape(block_tokens=4, block_bytes=1024, num_layers=2),
    eos_ids=(EOS,),
    vocab_size=VOCAB_SIZE,
)


def next_token(tokens: list[int]) -> int:
    return (sum((i + 1) * token for i, token in enumerate(tokens)) * 31 + len(tokens)) % 997 + 2  # never EOS


def whole_answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def states_of(tokens: list[int]) -> Vector:
    """A prompt's hidden states, pooled."""
    return np.array([next_token(tokens), len(tokens)], np.float32)


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait for something that must become true; fail when it does not."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@dataclass
class Script:
    """What a fake node does differently; everything can be changed while it runs."""

    error: MooncakeError | None = None  # raised instead of working (prefill), or after ``tokens_first`` (decode)
    tokens_first: int = 0
    times: int = -1  # how often the error comes; -1: always
    hang: bool = False  # never answer
    loses: tuple[str, ...] = ()  # addresses of decode nodes that it does not reach (prefill)
    token_s: float = 0.0  # between tokens
    gate: asyncio.Event | None = None  # to wait for before working
    loses_message: int = -1  # number of one that arrives empty
    cut_finish: bool = False  # end the stream without a finish reason
    skip_index: bool = False
    is_endless: bool = False  # more tokens come than were asked for (decode)
    nonsense: Nonsense | None = None  # said after the first token (decode), or instead of it (prefill)
    report_error: MooncakeError | None = None  # after the commit
    silent_report: bool = False
    blended_tokens: int = 0  # reported
    pooled: bytes | None = None  # said in place of hidden states (prefill)
    knows_no_pooling: bool = False  # as an older node: it answers (prefill)
    answer_eos_at: int = -1  # index of a token that ends the answer early
    dies_at_call: int = 0  # as ``FakeNode.die``, before it says anything (decode)


@dataclass
class FakeNode:
    node_id: str
    role: str
    script: Script = field(default_factory=Script)
    calls: int = 0
    running: int = 0
    last_request: Any = None
    address: str = ""
    events: EventLog = field(default_factory=lambda: EventLog(7))
    outboxes: Outboxes = field(default_factory=Outboxes)
    server: RpcServer = field(default_factory=RpcServer)
    membership: Membership | None = None
    relay: Relay | None = None

    async def start(self, core_address: str, interval_s: float) -> None:
        self.server.add(
            common_pb2_grpc.add_CacheEventsServicer_to_server,
            CacheEventsServicer(self.events),
            "mooncake.v1.CacheEvents",
        )
        self.server.add(add_outputs_servicer, self.outboxes, "mooncake.v1.Outputs")
        port = await self.server.start("127.0.0.1", 0)
        self.relay = await Relay.start(port)
        self.address = f"127.0.0.1:{self.relay.port}"
        info = cluster_pb2.NodeInfo(
            node_id=self.node_id,
            role=self.role,
            incarnation=np.random.default_rng().integers(1, 1 << 62),
            control_address=self.address,
            kv_fingerprint="kv",
            block_tokens=4,
            max_sequences=64,
        )
        config = load_config(
            overrides=[f"node.conductor={core_address}", f"conductor.heartbeat_interval_s={interval_s}"]
        )
        membership = self.membership = Membership(config, info, cluster_pb2.HeartbeatRequest)
        await self.membership.start()
        await until(lambda: membership.is_registered)

    async def die(self) -> None:
        """Look like a process after kill -9: connections are reset, nothing listens, no heartbeats."""
        assert self.relay is not None and self.membership is not None
        task = self.membership._task
        assert task is not None
        task.cancel()
        await self.relay.kill()

    async def leave(self) -> None:
        """Announce the departure, cut running calls, and stop."""
        assert self.relay is not None and self.membership is not None
        await self.membership.stop()
        await self.server.stop(0.05)
        await self.relay.kill()

    async def stop(self) -> None:
        if self.membership is not None:
            await self.membership.stop()
        if self.relay is not None:
            await self.relay.kill()
        await self.server.stop(0)


class FakePrefill(FakeNode, prefill_pb2_grpc.PrefillServicer):
    def __init__(self, node_id: str, channels: Channels) -> None:
        super().__init__(node_id, "prefill")
        self.channels = channels
        self.server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, self, "mooncake.v1.Prefill")

    async def Run(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        outbox = await self.outboxes.of(request.output_stream)
        async for response in diverted(outbox, request.handoff_id, self._responses(request), context):
            yield response

    async def _responses(
        self, request: prefill_pb2.PrefillRequest
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        self.calls += 1
        self.running += 1
        self.last_request = request
        script = self.script
        try:
            if script.gate is not None:
                await script.gate.wait()
            if script.hang:
                await asyncio.Event().wait()
            if script.error is not None:
                raise script.error
            if request.decode_address in script.loses:
                raise NodeUnavailable("decode node: failed to connect to all addresses")
            tokens = tokens_from_wire(request.tokens).tolist()
            index = len(tokens) - request.num_prompt_tokens
            token_id = EOS if index == script.answer_eos_at else next_token(tokens)
            if script.nonsense is Nonsense.VOCABULARY:
                token_id = VOCAB_SIZE
            first = common_pb2.SampledToken(index=index, token_id=token_id)
            answers = range(request.sampling.n or 1)
            if request.sampling.HasField("prompt_logprobs") and not index:
                scores = [common_pb2.SampledToken(index=at, token_id=t) for at, t in enumerate(tokens[1:], 1)]
                yield prefill_pb2.PrefillResponse(prompt_logprobs=common_pb2.PromptLogprobs(tokens=scores))
            report = common_pb2.PrefillReport(
                prompt_tokens=len(tokens), local_cached_tokens=4, blended_tokens=script.blended_tokens
            )
            yield prefill_pb2.PrefillResponse(early_report=report)
            if request.pooling and not script.knows_no_pooling:
                pooled = vector_to_wire(states_of(tokens))
                yield prefill_pb2.PrefillResponse(pooled=script.pooled if script.pooled is not None else pooled)
                yield prefill_pb2.PrefillResponse(report=report)
                return
            for choice in answers:
                is_end = token_id == EOS and not request.sampling.ignore_eos
                reason = "" if request.decode_address else "stop" if is_end else "length"
                yield prefill_pb2.PrefillResponse(first_token=first, choice=choice, finish_reason=reason)
            if request.decode_address:
                stub = decode_pb2_grpc.DecodeStub(self.channels.get(request.decode_address))
                commit = decode_pb2.CommitHandoffRequest(
                    handoff_id=request.handoff_id, epoch=request.epoch, first_tokens=[first for _ in answers]
                )
                try:
                    await stub.CommitHandoff(commit, timeout=5)
                except Exception:
                    raise HandoffFailed("the decode node does not answer") from None
            if script.report_error is not None:
                raise script.report_error
            if script.silent_report:
                await asyncio.Event().wait()
            report.transport = "shm"
            yield prefill_pb2.PrefillResponse(report=report)
        finally:
            self.running -= 1


class FakeDecode(FakeNode, decode_pb2_grpc.DecodeServicer):
    def __init__(self, node_id: str) -> None:
        super().__init__(node_id, "decode")
        self.ended_choices: list[tuple[str, int]] = []
        self.commits: dict[str, asyncio.Future[common_pb2.SampledToken]] = {}
        self.server.add(decode_pb2_grpc.add_DecodeServicer_to_server, self, "mooncake.v1.Decode")

    async def EndChoice(  # noqa: N802
        self, request: decode_pb2.EndChoiceRequest, context: Any
    ) -> decode_pb2.EndChoiceResponse:
        self.ended_choices.append((request.handoff_id, request.choice))
        return decode_pb2.EndChoiceResponse()

    def commit_of(self, handoff_id: str) -> asyncio.Future[common_pb2.SampledToken]:
        return self.commits.setdefault(handoff_id, asyncio.get_running_loop().create_future())

    async def CommitHandoff(  # noqa: N802
        self, request: decode_pb2.CommitHandoffRequest, context: Any
    ) -> decode_pb2.CommitHandoffResponse:
        if self.script.hang:
            await asyncio.Event().wait()
        self.commit_of(request.handoff_id).set_result(request.first_tokens[0])
        return decode_pb2.CommitHandoffResponse()

    async def Generate(  # noqa: N802
        self, request: decode_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        outbox = await self.outboxes.of(request.output_stream)
        async for response in diverted(outbox, request.handoff_id, self._responses(request), context):
            yield response

    async def _responses(self, request: decode_pb2.DecodeRequest) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        self.calls += 1
        self.running += 1
        self.last_request = request
        script = self.script
        try:
            if script.hang:
                await asyncio.Event().wait()
            if self.calls == script.dies_at_call:
                await self.die()
            if script.error is not None and not script.tokens_first:
                raise script.error
            first = await self.commit_of(request.handoff_id)
            if script.gate is not None:
                await script.gate.wait()
            tokens = [*tokens_from_wire(request.tokens).tolist(), first.token_id]
            index = first.index
            wanted = range(request.sampling.n or 1)
            for choice in wanted:  # the client may have it from prefill already
                yield decode_pb2.DecodeResponse(tokens=[first], choice=choice)
            told = 0
            for message in nonsense(script.nonsense, index + 1, VOCAB_SIZE):
                yield message
            while tokens[-1] != EOS and (script.is_endless or index + 1 < request.sampling.max_tokens):
                if script.token_s:
                    await asyncio.sleep(script.token_s)
                index += 1 + script.skip_index
                tokens.append(EOS if index == script.answer_eos_at else next_token(tokens))
                token = common_pb2.SampledToken(index=index, token_id=tokens[-1])
                sent = [] if told == script.loses_message else [token]
                for choice in wanted:
                    if (request.handoff_id, choice) not in self.ended_choices:
                        yield decode_pb2.DecodeResponse(tokens=sent, choice=choice)
                told += 1
                if script.error is not None and script.times and told >= script.tokens_first:
                    script.times -= 1
                    raise script.error
            if not script.cut_finish:
                for choice in wanted:
                    reason = "stop" if tokens[-1] == EOS else "length"
                    yield decode_pb2.DecodeResponse(finish_reason=reason, choice=choice)
        finally:
            self.running -= 1


class Relay:
    """A TCP relay before a node's port, so that a test can kill the node as the network sees it."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._is_dead = False
        self.port = 0

    @classmethod
    async def start(cls, target: int) -> Relay:
        relay = cls(target)
        relay._server = await asyncio.start_server(relay._serve, "127.0.0.1", 0)
        relay.port = relay._server.sockets[0].getsockname()[1]
        return relay

    async def kill(self) -> None:
        self._is_dead = True
        if self._server is not None:
            self._server.close()
        await self.cut()

    async def lead_to(self, port: int) -> None:
        """Have whoever listens there answer in the node's place."""
        self._target = port
        await self.cut()

    async def cut(self) -> None:
        """Reset the connections that there are."""
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ends = {writer}
        try:
            if self._is_dead:  # taken from the queue of the closed port
                return
            self._writers.add(writer)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                target_reader, target_writer = await self._open()
                ends.add(target_writer)
                self._writers.add(target_writer)
                await asyncio.gather(self._copy(reader, target_writer), self._copy(target_reader, writer))
        finally:
            for end in ends:
                end.transport.abort()
            self._writers -= ends

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection whose opening is cancelled may be open by then, and nobody would close it."""
        opening = asyncio.create_task(asyncio.open_connection("127.0.0.1", self._target))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                (await opening)[1].transport.abort()
            raise

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


class FakeCluster:
    """A real core behind a real port, and fake nodes that register with it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.core = Core(config, FACTS, MemoryDirectory())
        self.server = RpcServer()
        self.servicer = ClusterServicer(self.core, "fake")
        self.server.add(cluster_pb2_grpc.add_ClusterServicer_to_server, self.servicer, "mooncake.v1.Cluster")
        self.channels = Channels()
        self.address = ""
        self._port = config.conductor.grpc_port
        self.prefill: list[FakePrefill] = []
        self.decode: list[FakeDecode] = []
        self._old: list[FakeNode] = []

    answer = staticmethod(whole_answer)
    eventually = staticmethod(eventually)

    @property
    def nodes(self) -> list[FakeNode]:
        return [*self.prefill, *self.decode]

    async def start(self, prefill: int, decode: int) -> None:
        await self.core.start()
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', self._port)}"
        self.prefill = [FakePrefill(f"p{i}", self.channels) for i in range(prefill)]
        self.decode = [FakeDecode(f"d{i}") for i in range(decode)]
        for node in self.nodes:
            await self.join(node)

    async def join(self, node: FakeNode) -> None:
        await node.start(self.address, self.config.conductor.heartbeat_interval_s)

    async def restart_decode(self, number: int) -> None:
        """A new process takes the id of the old one, which is dead or dies now."""
        self._old.append(old := self.decode[number])
        await old.die()
        await eventually(lambda: not self._is_connected(old.node_id))
        self.decode[number] = FakeDecode(self.decode[number].node_id)
        await self.join(self.decode[number])

    def _is_connected(self, node_id: str) -> bool:
        node = self.core.registry.get(node_id)
        return node is not None and self.core.subscriber.is_connected(node.info)

    async def stop(self) -> None:
        for node in (*self.nodes, *self._old):
            await node.stop()
        await self.server.stop(0)
        await self.core.stop()
        await self.channels.close()

    def request(
        self, prompt: list[int] | None = None, max_tokens: int = 8, timeout_s: float = 20.0, **sampling: Any
    ) -> InferenceRequest:
        tokens: TokenIds = np.array(prompt or [5, 6, 7, 8, 9], dtype=np.uint32)
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        return InferenceRequest("r", tokens, params, self.core.clock() + timeout_s)

    async def generate(self, request: InferenceRequest) -> tuple[list[int], list[Delta]]:
        """Run to the end: the token ids, and every delta."""
        deltas = [delta async for delta in self.core.dispatcher.generate(request)]
        tokens = [token for delta in deltas for token in delta.tokens]
        assert [token.index for token in tokens] == list(range(len(tokens))), "no gap and no repeat"
        return [token.token_id for token in tokens], deltas

    async def is_quiet(self) -> None:
        """Nothing runs on any node, and every counter of the conductor is back where it was."""
        await eventually(lambda: not any(node.running for node in self.nodes), within_s=1.0)
        assert self.core.dispatcher.is_idle
        assert self.core.fleet.open_work == {}


StartCluster = Callable[..., Awaitable[FakeCluster]]


@pytest.fixture
async def start_cluster() -> AsyncIterator[StartCluster]:
    """Start fake clusters: ``await start_cluster(prefill=2, decode=2, retries=1, …)``; settings of [conductor]."""
    clusters: list[FakeCluster] = []

    async def start(
        prefill: int = 2, decode: int = 2, handoff_timeout_s: float = 60.0, **settings: float
    ) -> FakeCluster:
        values = {"grpc_port": 0, "heartbeat_interval_s": 0.1, "node_timeout_s": 1.0, **settings}
        overrides = [f"conductor.{key}={value}" for key, value in values.items()]
        overrides.append(f"transfer.handoff_timeout_s={handoff_timeout_s}")
        cluster = FakeCluster(load_config(overrides=overrides))
        clusters.append(cluster)
        await cluster.start(prefill, decode)
        return cluster

    yield start
    for cluster in clusters:
        await cluster.stop()


@pytest.fixture
async def fake_cluster_of() -> AsyncIterator[StartCluster]:
    """One with a whole configuration: ``await fake_cluster_of(config, prefill=2, decode=2)``."""
    clusters: list[FakeCluster] = []

    async def start(config: Config, prefill: int, decode: int) -> FakeCluster:
        clusters.append(FakeCluster(config))
        await clusters[-1].start(prefill, decode)
        return clusters[-1]

    yield start
    for cluster in clusters:
        await cluster.stop()
