"""A minimal cluster behind the real ingress: real sockets, a scripted generator, bytes as tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import httpx
import msgspec
import numpy as np
import pytest
import pytest_asyncio

from conductor.api import Delta, RequestSummary
from conductor.ingress.access import KeyInterceptor
from conductor.ingress.app import Ingress
from conductor.stats import DispatchStats
from mooncake.api_keys import ApiKeys
from mooncake.config import ConductorSection, Config, ModelSection
from mooncake.errors import InvalidRequest
from mooncake.guides import Guides
from mooncake.pooling import LAST_TOKEN
from mooncake.rpc import cluster_pb2
from mooncake.rpc.server import RpcServer
from mooncake.sampling_defaults import NEUTRAL
from mooncake.tls import server_credentials
from mooncake.types import FinishReason, PrefillReport, SampledToken, Timings, TokenLogprob

EOS = 256
MAX_MODEL_LEN = 4096
HIDDEN_SIZE = 8


class ByteTokenizer:
    """One token a byte of UTF-8; 256 ends an answer."""

    vocab_size = 257
    eos_ids = (EOS,)
    special_ids = (EOS,)
    template_source = ""
    opens = ""  # what the template begins an answer with

    def __init__(self):
        self.chats_in = []  # threads
        self.words_in = []  # likewise
        self.named_in = []  # likewise: where tokens are told by their bytes
        self.num_exported = 0
        self.named_tokens = {"eos_token": "<end>"}

    @property
    def takes_tools(self):
        return "tools" in self.template_source

    def control_id(self, name):
        return None

    def encode(self, text, add_special=True):
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)

    def ended(self, ids):
        return np.append(ids, np.uint32(EOS))

    def encode_more(self, text):
        self.words_in.append(threading.current_thread().name)
        return self.encode(text)

    def only_token(self, text):
        return text.encode()[0] if len(text.encode()) == 1 else None

    def token_name(self, token_id):
        return f"<{token_id}>"

    def encode_chat(self, messages, variables=None, continue_final=False):
        self.chats_in.append(threading.current_thread().name)
        told = "".join(f"[{name}={value}]" for name, value in (variables or {}).items())
        turns = "".join(f"<{message.role}>{self._turn(message)}" for message in messages)
        return self.encode(f"{told}{turns}{'' if continue_final else f'<assistant>{self.opens}'}")

    def _turn(self, message):
        beside = message.as_read()
        del beside["role"], beside["content"]
        return f"{message.content}{beside if beside else ''}"

    def encode_rendered(self, text, add_special=True):
        first, *others = (self.encode(part, add_special) for part in text.split("<end>"))
        return np.concatenate([first, *(np.array([EOS, *part], np.uint32) for part in others)])

    def exported(self):
        self.num_exported += 1
        return {"tokenizer.json": '{"model": "bytes"}'}

    def spelled_control(self, text):
        return "<end>" if "<end>" in text else ""

    def decode(self, ids, skip_special=True):
        return b"".join(self.token_bytes(int(token_id), skip_special) for token_id in ids).decode(errors="replace")

    def token_bytes(self, token_id, skip_special=True):
        if not skip_special:
            self.named_in.append(threading.current_thread().name)
        return bytes([token_id]) if token_id != EOS else b"" if skip_special else b"<end>"

    def stream(self, skip_special=True, kept=frozenset()):
        return ByteStream(b"" if skip_special else b"<end>")


def states_of(tokens):
    """Hidden states that tell prompts from each other."""
    return np.random.default_rng(tokens.tolist()).standard_normal(HIDDEN_SIZE).astype(np.float32)


class ByteStream:
    def __init__(self, end):
        self.held = b""
        self.end = end

    def push(self, token_id):
        self.held += bytes([token_id]) if token_id != EOS else self.end
        with contextlib.suppress(UnicodeDecodeError):
            text, self.held = self.held.decode(), b""
            return text
        return ""

    def flush(self):
        text, self.held = self.held.decode(errors="ignore"), b""
        return text


@dataclass
class Script:
    """A generator that answers every request with ``text``, byte by byte, and records the requests."""

    text: str = "Hello, wörld!"
    ends: bool = True  # with an end token; else it goes on until max_tokens
    delay_s: float = 0.0
    first_delay_s: float = 0.0
    error: Exception | None = None
    error_after: int = 0  # tokens
    refusal: Exception | None = None  # of any request, whatever it asks
    cached_tokens: int = 0
    blended_tokens: int = 0
    reported_to: int = 0  # the choice whose first token brings the report of the prompt, as the core passes it on once
    asked: list = field(default_factory=list)
    running: set = field(default_factory=set)
    closed: list = field(default_factory=list)  # before their end
    ended_choices: list = field(default_factory=list)  # (request id, choice) that nobody needed any more
    last_first: bool = False  # of several choices, the last one is ahead
    per_delta: int = 1  # tokens that come together, as from a node that catches up
    late_logprob: float = 0.0  # added to the log-probabilities of each further choice
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request):
        self.asked.append(request)
        self.running.add(request.request_id)
        self.changed.set()
        held = {}
        wanted = set(range(request.sampling.num_answers))
        try:
            if self.first_delay_s:
                await asyncio.sleep(self.first_delay_s)
            if request.pooling is not None:
                if self.error is not None:
                    raise self.error
                await asyncio.sleep(self.delay_s)
                report = PrefillReport(prompt_tokens=len(request.tokens), pool_cached_tokens=self.cached_tokens)
                wanted.clear()
                yield Delta(
                    finish_reason=FinishReason.STOP, summary=RequestSummary(report), pooled=states_of(request.tokens)
                )
                return
            if request.sampling.prompt_logprobs is not None:
                yield Delta(prompt_logprobs=self._scores(request))
            ids = [*self.text.encode(), EOS] if self.ends else list(self.text.encode()) * 1000
            for index, token_id in enumerate(ids):
                if self.error is not None and index == self.error_after:
                    raise self.error
                await asyncio.sleep(self.delay_s if index else 0)
                for choice in sorted(wanted, reverse=self.last_first):
                    if (request.request_id, choice) in self.ended_choices:
                        wanted.discard(choice)
                        continue
                    delta = self._delta(request, index, token_id, choice)
                    tokens = held.pop(choice, ()) + delta.tokens
                    if len(tokens) < self.per_delta and delta.finish_reason is None:
                        held[choice] = tokens
                        continue
                    delta = msgspec.structs.replace(delta, tokens=tokens)
                    if delta.finish_reason is not None:
                        wanted.discard(choice)
                    yield delta
                if not wanted:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            if wanted:
                self.closed.append(request.request_id)
            raise
        finally:
            self.running.discard(request.request_id)
            self.changed.set()

    def _scores(self, request):
        top = tuple((ord("a") + rank, -1.0 - rank) for rank in range(request.sampling.prompt_logprobs))
        tokens = enumerate(request.tokens.tolist()[1:], 1)
        return tuple(SampledToken(index, token_id, TokenLogprob(-0.25 * index, top, 7)) for index, token_id in tokens)

    def check_room(self):
        if self.refusal is not None:
            raise self.refusal

    def end_choice(self, request_id, choice):
        self.ended_choices.append((request_id, choice))

    def forget(self):
        """Reset for the next test."""
        for name, value in vars(Script()).items():
            setattr(self, name, value)

    async def until(self, holds, within_s=2.0):
        """Wait until ``holds()`` after a request began or ended."""
        async with asyncio.timeout(within_s):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    async def until_closed(self, count=1, within_s=1.0):
        """Wait until ``count`` generators were closed before their end, and none runs."""
        await self.until(lambda: len(self.closed) >= count and not self.running, within_s)

    def _delta(self, request, index, token_id, choice):
        sampling = request.sampling
        logprob = None
        if sampling.logprobs is not None:
            top = tuple((ord("a") + rank, -1.0 - rank) for rank in range(sampling.logprobs))
            logprob = TokenLogprob(-0.5 + choice * self.late_logprob, top)
        reason = None
        if token_id in sampling.stop_token_ids or (token_id == EOS and not sampling.ignore_eos):
            reason = FinishReason.STOP
        elif index + 1 >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        report = PrefillReport(
            prompt_tokens=len(request.tokens),
            pool_cached_tokens=self.cached_tokens,
            timings=Timings(1, 2, 3, 4, 5),
            blended_tokens=self.blended_tokens,
        )
        has_report = reason is not None or (index, choice) == (0, self.reported_to)
        summary = RequestSummary(report, "prefill-0", "decode-0") if has_report else None
        return Delta((SampledToken(index, token_id, logprob),), reason, summary, choice)


def cluster_status():
    def node(role):
        return cluster_pb2.NodeStatus(
            info=cluster_pb2.NodeInfo(node_id=f"{role}-0", role=role, block_tokens=64, kv_bytes=640, max_sequences=8),
            state="live",
            load=cluster_pb2.Load(
                running=1,
                blocks_total=10,
                blocks_free=5,
                blocks_cached=3,
                blocks_in_use=2,
                counters={"handoffs_taken": 7, "handoffs_open": 1},
            ),
            transports=[cluster_pb2.TransportStatus(peer="decode-0", transport="shm", bytes=10, gb_per_s=1.5)],
        )

    return cluster_pb2.StatusResponse(model="bytes", ready=True, nodes=[node("prefill"), node("decode")])


class ToldStatus:
    """A status, and the threads in which it is made and read."""

    def __init__(self, status):
        self.status = status
        self.read_in = {threading.current_thread().name}

    def __getattr__(self, name):
        self.read_in.add(threading.current_thread().name)
        return getattr(self.status, name)


@dataclass
class Front:
    """The ingress under test, and the script behind it."""

    script: Script
    tokenizer: ByteTokenizer
    ingress: Ingress
    status: cluster_pb2.StatusResponse
    statuses_told: list
    http_port: int
    grpc_address: str
    http: httpx.AsyncClient

    @property
    def url(self):
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def prompt(self):
        """The last request's, as text."""
        return self.prompts[-1]

    @property
    def prompts(self):
        return [bytes(asked.tokens.tolist()).decode() for asked in self.script.asked]

    def guide_lets(self, text):
        """Whether the guide of the last request lets ``text`` be the answer."""
        state = Guides(lambda: self.tokenizer, self.tokenizer.vocab_size).state(self.script.asked[-1].sampling.guide)
        state.follow(self.tokenizer.encode(text))
        try:
            return bool(state.allowed()[self.tokenizer.eos_ids[0]])
        except InvalidRequest:  # it has left the guide
            return False


@contextlib.asynccontextmanager
async def running_front(script=None, **limits):
    script = script or Script()
    limits = {"http_port": 0, "grpc_port": 0, "request_timeout_s": 30.0} | limits
    keep_alive_s = limits.pop("keep_alive_s", 5.0)
    tokenizer = ByteTokenizer()
    tokenizer.template_source = limits.pop("template", "")
    tokenizer.opens = limits.pop("opens", "")
    capacity_tokens = limits.pop("capacity_tokens", 0)
    defaults = limits.pop("defaults", NEUTRAL)
    loading = limits.pop("loading", None)
    has_head, pooling = limits.pop("has_head", True), limits.pop("pooling", lambda: LAST_TOKEN)
    model = ModelSection(
        adapters=limits.pop("adapters", ()),
        generation_overrides=limits.pop("overrides", ""),
        chat_template_kwargs=limits.pop("variables", ""),
    )
    config = Config(model=model, conductor=ConductorSection(**limits))
    checkpoint = SimpleNamespace(
        name="bytes",
        digest="0123456789abcdef",
        config=SimpleNamespace(
            context=lambda _: MAX_MODEL_LEN,
            vocab_size=257,
            architecture="bytes",
            bos_id=None,
            hidden_size=HIDDEN_SIZE,
            has_head=has_head,
        ),
        sampling_defaults={"auto": defaults, "none": NEUTRAL}.get,
        pooling=pooling,
    )
    status = cluster_status()
    statuses_told = []

    def tell_status():
        statuses_told.append(ToldStatus(status))
        return statuses_told[-1]

    ingress = Ingress(
        config,
        checkpoint,
        tokenizer,
        script,
        lambda: tell_status,
        lambda: list(status.waiting_for),
        DispatchStats(),
        keep_alive_s,
        lambda: capacity_tokens,
        loading,
    )
    server = RpcServer(KeyInterceptor(ApiKeys(config.conductor.api_keys)))
    ingress.add_grpc(server)
    grpc_port = await server.start("127.0.0.1", 0, server_credentials(config.conductor))
    http_port = await ingress.start_http()
    try:
        url = f"http://127.0.0.1:{http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False, verify=False) as http:
            yield Front(script, tokenizer, ingress, status, statuses_told, http_port, f"127.0.0.1:{grpc_port}", http)
    finally:
        await ingress.stop()
        await server.stop(0.2)


@pytest.fixture(scope="module")
def module_front_of():
    """For modules whose front doors have limits of their own."""
    return running_front


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_front():
    async with running_front() as front:
        yield front


@pytest_asyncio.fixture(loop_scope="module")
async def front(module_front):
    """The module's front doors, with a fresh script behind them."""
    module_front.script.forget()
    module_front.status.CopyFrom(cluster_status())
    yield module_front
    await module_front.script.until(lambda: not module_front.script.running)


@pytest_asyncio.fixture(loop_scope="module")
async def client(front):
    """OpenAI's own. Nobody shows it a certificate, so it reads none: it would take longer than most tests."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # half a second, which most modules need not wait

    http = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        yield client


@pytest.fixture
def open_front():
    """For tests that need limits of their own: ``async with open_front(request_timeout_s=1) as front``."""
    return running_front
