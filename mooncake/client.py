"""``mooncake.Client``: a cluster from Python, over gRPC, blocking.

    from mooncake import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("The capital of France is").text)
        for chunk in client.stream(messages=[{"role": "user", "content": "Hello"}]):
            print(chunk.text, end="", flush=True)

Errors are those of ``mooncake.errors``. It knows the wire format and nothing of nodes; it must not import torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from mooncake.addresses import check_address
from mooncake.api_keys import bearer, own_api_key
from mooncake.errors import InternalError, InvalidRequest
from mooncake.rpc import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from mooncake.rpc import inference_pb2 as pb
from mooncake.rpc.convert import (
    prompt_logprobs_from_wire,
    report_from_wire,
    sampled_from_wire,
    sampling_to_wire,
)
from mooncake.rpc.errors import error_from_rpc
from mooncake.rpc.limits import pings
from mooncake.rpc.server import KEEPALIVE_S, MAX_MESSAGE_BYTES
from mooncake.sampling import check_type
from mooncake.sampling_params import SamplingParams
from mooncake.tls import Tls, own_tls
from mooncake.types import PrefillReport, SampledToken, Usage

Response = TypeVar("Response", bound=Message)
Messages = Sequence[Mapping[str, str]]
"""E.g. ``[{"role": "user", "content": "Hello"}]``."""

_SHORT_CALL_S = 30.0  # for all calls except generating
_LOAD_S = 3600.0  # the conductor ends a load sooner


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Times measured by the conductor (milliseconds), and where the request ran."""

    ttft_ms: float
    mean_tbt_ms: float  # plain mean of the token gaps
    tail_tbt_ms: float  # mean of the longest tenth of the gaps (FAST'25)
    total_ms: float
    prefill: PrefillReport
    prefill_node: str
    decode_node: str


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """What is new in an answer. Text may lag behind the tokens. The last chunk has the fields after ``text``."""

    request_id: str
    tokens: tuple[SampledToken, ...]
    text: str
    finish_reason: str = ""  # "stop", "length" or "repetition"
    usage: Usage | None = None
    timings: RequestTimings | None = None
    choice: int = 0  # which of several answers it belongs to
    prompt_logprobs: tuple[SampledToken, ...] | None = None  # once, if requested: for all prompt tokens but the first


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole answer."""

    request_id: str
    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: str
    usage: Usage
    timings: RequestTimings
    others: tuple[GenerateResult, ...] = ()  # the other answers, if ``sampling`` asked for several
    prompt_logprobs: tuple[SampledToken, ...] | None = None  # if requested: for all prompt tokens but the first

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    max_model_len: int  # tokens of prompt plus answer
    vocab_size: int
    block_tokens: int
    dtype: str


class Client:
    """One channel to a conductor; safe to use from several threads. Close it, or use it in a ``with``.

    A call raises InvalidRequest, NotFound or Unauthenticated (fix the request), Overloaded (with a retry time),
    NodeUnavailable (nobody there, or a node died and the retry failed too), DeadlineExceeded, or InternalError.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        api_key: str | None = None,
        tls: Tls | None = None,
        *,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        """Connects with the first call. ``api_key`` None means that of ``MOONCAKE_API_KEY``, if set; ``tls`` None means
        ``MOONCAKE_SSL_CA_CERTS`` (and ``…_CERTFILE``, ``…_KEYFILE``, ``…_SERVER_NAME``), or else plain gRPC. A
        conductor that has been silent for ``keepalive_s`` and does not answer for as long again fails the calls to it
        (NodeUnavailable): its host may be gone. From here that looks like one that stands still, as on a machine that
        is suspended, and would go on where it was; who rather waits for it raises ``keepalive_s``, and ``timeout_s`` of
        a request still ends it.

        Raises InvalidRequest when ``address`` is not ``host:port`` or the key cannot be sent, ConfigError for a file
        that cannot be used.
        """
        self.address = check_address(address)
        self._metadata = bearer(own_api_key() if api_key is None else api_key)
        tls = own_tls() if tls is None else tls
        options = (
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            *pings(keepalive_s, keepalive_s),
            *(tls.options if tls else ()),
        )
        self._channel = (
            grpc.secure_channel(address, tls.credentials(), options) if tls else grpc.insecure_channel(address, options)
        )
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterStub(self._channel)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        cache_salt: str = "",
        session: str = "",
        request_id: str = "",
        priority: int = 0,
        model: str = "",
        timeout_s: float | None = None,
    ) -> GenerateResult:
        """The whole answer to exactly one of ``prompt``, ``messages`` and ``token_ids``.

        ``sampling`` None leaves everything to the server; ``max_tokens`` None in it leaves that alone (16; for messages
        the rest of the context). Its ``stop`` strings count beside those of ``stop``. ``cache_salt`` restricts which
        cached blocks may be reused; ``session`` hints which requests belong together; a lower ``priority`` comes first;
        ``model`` names an adapter ("" is the model itself).
        """
        request = _request(prompt, messages, token_ids, sampling, stop, cache_salt, request_id, priority, model)
        by_choice: dict[int, list[GenerateChunk]] = {}
        for chunk in self._chunks(request, session, timeout_s):
            by_choice.setdefault(chunk.choice, []).append(chunk)
        first, *others = [_whole(by_choice[choice]) for choice in sorted(by_choice)] or [_whole([])]
        return replace(first, others=tuple(others))

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        cache_salt: str = "",
        session: str = "",
        request_id: str = "",
        priority: int = 0,
        model: str = "",
        timeout_s: float | None = None,
    ) -> Iterator[GenerateChunk]:
        """As ``generate``, chunk by chunk. Closing the iterator cancels the request."""
        request = _request(prompt, messages, token_ids, sampling, stop, cache_salt, request_id, priority, model)
        return self._chunks(request, session, timeout_s)

    def embed(
        self,
        text: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        dimensions: int | None = None,
        cache_salt: str = "",
        request_id: str = "",
        priority: int = 0,
        model: str = "",
        timeout_s: float | None = None,
    ) -> list[float]:
        """The embedding of exactly one of ``text`` and ``token_ids``: its first ``dimensions`` (None: all)."""
        if (text is None) == (token_ids is None):
            raise InvalidRequest("give exactly one of text and token_ids", "text")
        with _refusing_what_cannot_be_sent():
            request = pb.EmbedRequest(
                request_id=request_id, model=model, dimensions=dimensions, cache_salt=cache_salt, priority=priority
            )
            if text is not None:
                request.text = text
            else:
                request.token_ids.ids.extend(token_ids or ())
        return list(self._call(self._inference.Embed, request, timeout_s).embedding)

    def tokenize(self, text: str | None = None, *, messages: Messages | None = None, model: str = "") -> list[int]:
        if (text is None) == (messages is None):
            raise InvalidRequest("give exactly one of text and messages", "text")
        with _refusing_what_cannot_be_sent():
            if messages is not None:
                request = pb.TokenizeRequest(model=model, chat=_chat(messages))
            else:
                request = pb.TokenizeRequest(model=model, text=text or "")
        return list(self._call(self._inference.Tokenize, request).ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        with _refusing_what_cannot_be_sent():
            request = pb.DetokenizeRequest(model=model, ids=token_ids)
        return self._call(self._inference.Detokenize, request).text

    def models(self) -> list[Model]:
        return [
            Model(model.id, model.max_model_len, model.vocab_size, model.block_tokens, model.dtype)
            for model in self._call(self._inference.ListModels, pb.ListModelsRequest()).models
        ]

    def status(self) -> cluster_pb2.StatusResponse:
        """Nodes, their load and their links; requests and cache hits so far."""
        return self._call(self._cluster.Status, cluster_pb2.StatusRequest())

    def set_role(self, node_id: str, role: str) -> None:
        """Ask a node to become a "prefill" or a "decode" node; it drains first. Raises InvalidRequest if it cannot."""
        with _refusing_what_cannot_be_sent():
            request = cluster_pb2.SetRoleRequest(node_id=node_id, role=role)
        self._call(self._cluster.SetRole, request)

    def load_adapter(self, name: str, path: str | os.PathLike[str], in_place: bool = False) -> None:
        """Have every node load the LoRA adapter in the folder ``path``; returns once requests may name it. With
        ``in_place`` it replaces a loaded one of that name.

        Raises InvalidRequest when it may not be loaded or does not fit the model, NotFound when nothing is there.
        """
        with _refusing_what_cannot_be_sent():
            request = cluster_pb2.LoadAdapterRequest(name=name, path=os.fspath(path), in_place=in_place)
        self._call(self._cluster.LoadAdapter, request, _LOAD_S)

    def unload_adapter(self, name: str) -> None:
        """Requests that use it are finished, new ones are refused. Raises InvalidRequest, NotFound."""
        with _refusing_what_cannot_be_sent():
            request = cluster_pb2.UnloadAdapterRequest(name=name)
        self._call(self._cluster.UnloadAdapter, request)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self, method: Callable[..., Response], request: Message, timeout_s: float | None = _SHORT_CALL_S
    ) -> Response:
        try:
            with _refusing_what_cannot_be_sent():
                return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.address) from None

    def _chunks(self, request: pb.GenerateRequest, session: str, timeout_s: float | None) -> Iterator[GenerateChunk]:
        check_type("session", session, str)
        if not (session.isascii() and session.isprintable()):
            raise InvalidRequest("a session has printable ASCII characters alone", "session")
        metadata = (*self._metadata, *((("x-session-affinity", session),) if session else ()))
        with _refusing_what_cannot_be_sent():
            call = self._inference.Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            for response in call:
                yield _chunk(response)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.address) from None
        finally:
            call.cancel()


def _request(
    prompt: str | None,
    messages: Messages | None,
    token_ids: Sequence[int] | None,
    sampling: SamplingParams | None,
    stop: str | Sequence[str],
    cache_salt: str,
    request_id: str,
    priority: int,
    model: str,
) -> pb.GenerateRequest:
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise InvalidRequest("give exactly one of prompt, messages and token_ids", "prompt")
    with _refusing_what_cannot_be_sent():
        request = pb.GenerateRequest(
            request_id=request_id,
            model=model,
            stop=[stop] if isinstance(stop, str) else stop,
            cache_salt=cache_salt,
            priority=priority,
        )
        if prompt is not None:
            check_type("prompt", prompt, str, "a text (token ids are given as token_ids)")
            request.text = prompt
        elif messages is not None:
            request.chat.CopyFrom(_chat(messages))
        elif token_ids is not None:
            request.token_ids.CopyFrom(pb.TokenIds(ids=token_ids))
        if sampling is not None:
            check_type("sampling", sampling, SamplingParams, "a mooncake.SamplingParams")
            _add_sampling(request, sampling)
    return request


def _add_sampling(request: pb.GenerateRequest, sampling: SamplingParams) -> None:
    """Raises InvalidRequest for what only ``LLM`` and HTTP have."""
    if not (sampling.detokenize and sampling.skip_special_tokens):
        name = "skip_special_tokens" if sampling.detokenize else "detokenize"
        raise InvalidRequest(f"{name} is always true over gRPC; HTTP has it, and answers have their tokens", name)
    request.sampling.CopyFrom(sampling_to_wire(sampling.for_engine()))
    if sampling.max_tokens is None:
        request.sampling.ClearField("max_tokens")
    request.stop.extend(sampling.stop_strings)
    request.bad_words.extend(sampling.forbidden)
    request.include_stop_str_in_output = sampling.include_stop_str_in_output


def _chat(messages: Messages) -> pb.ChatMessages:
    try:
        turns = [pb.ChatMessage(role=message["role"], content=message["content"]) for message in messages]
    except (KeyError, TypeError):
        raise InvalidRequest('messages look like [{"role": "user", "content": "Hello"}]', "messages") from None
    return pb.ChatMessages(messages=turns)


@contextlib.contextmanager
def _refusing_what_cannot_be_sent() -> Iterator[None]:
    """Converts errors of protobuf and gRPC about values that cannot be sent, or a closed channel, into ours."""
    try:
        yield
    except InvalidRequest:
        raise
    except (TypeError, ValueError) as error:
        if str(error).startswith("Cannot invoke RPC"):  # gRPC's words for a channel that is closed
            raise InvalidRequest("this client is closed") from None
        raise InvalidRequest(f"a value of the request cannot be sent: {error}") from None


def _whole(chunks: Sequence[GenerateChunk]) -> GenerateResult:
    last = chunks[-1] if chunks else None
    if last is None or last.usage is None or last.timings is None:
        raise InternalError("the answer ended without a reason")
    return GenerateResult(
        request_id=last.request_id,
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        finish_reason=last.finish_reason,
        usage=last.usage,
        timings=last.timings,
        prompt_logprobs=next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None), None),
    )


def _chunk(response: pb.GenerateResponse) -> GenerateChunk:
    scores = response.prompt_logprobs if response.HasField("prompt_logprobs") else None
    chunk = GenerateChunk(
        response.request_id,
        tuple(sampled_from_wire(token) for token in response.tokens),
        response.text,
        choice=response.choice,
        prompt_logprobs=None if scores is None else prompt_logprobs_from_wire(scores),
    )
    if not response.finish_reason:
        return chunk
    usage, timings = response.usage, response.timings
    return replace(
        chunk,
        finish_reason=response.finish_reason,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        timings=RequestTimings(
            timings.ttft_ms,
            timings.mean_tbt_ms,
            timings.p90_tail_tbt_ms,
            timings.total_ms,
            report_from_wire(timings.prefill),
            timings.prefill_node,
            timings.decode_node,
        ),
    )
