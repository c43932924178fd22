"""One run of requests against one OpenAI server, and when their tokens came."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mooncake.api_keys import API_KEY_ENV
from mooncake.app.latency import Outcome, RequestResult
from mooncake.app.load.http_server import OK, HttpServer
from mooncake.app.load.open_loop import OpenLoop
from mooncake.app.load.requests import LoadRequest, Wishes, whole
from mooncake.errors import ConfigError, InternalError, MooncakeError, NodeUnavailable, Unauthenticated

FULL = 429  # the status of what is refused for lack of room
UNKNOWN_KEY = (401, 403)
MOST_TOLD = 300  # characters of an error


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[object] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_token(self) -> bool:
        delta = self.delta or _Delta()
        return any((self.text, delta.content, delta.reasoning, delta.reasoning_content, delta.tool_calls))


class _Chunk(msgspec.Struct):
    """What counts of an event."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


async def served_model(server: HttpServer, wanted: str) -> str:
    """``wanted``, or for "" the first one that the server tells of. Raises NodeUnavailable when it cannot be asked at
    all, Unauthenticated when it wants another API key, ConfigError where it does not say."""
    try:
        reply = await server.get("/v1/models")
    except NodeUnavailable as error:
        hint = "`mooncake serve` starts a server, --address names another"
        raise NodeUnavailable(f"{error.message}; {hint}") from None
    except InternalError as error:
        raise InternalError(f"{error.message}; is this the port for gRPC, or a server with TLS (https://)?") from None
    if reply.status in UNKNOWN_KEY:
        raise Unauthenticated(f"{server.name} wants an API key, or another one; it is read from {API_KEY_ENV}")
    if wanted:
        return wanted
    try:
        models = msgspec.json.decode(reply.body, type=_Models).data if reply.status == OK else []
    except msgspec.DecodeError:
        models = []
    if not models:
        raise ConfigError(f"{server.name} does not tell which models it serves: name one with --model")
    return models[0].id


class LoadRun(OpenLoop[LoadRequest]):
    """Against one OpenAI server."""

    def __init__(
        self,
        server: HttpServer,
        wishes: Wishes,
        concurrency: int,
        timeout_s: float,
        on_result: Callable[[RequestResult], None],
    ) -> None:
        super().__init__(concurrency, on_result)
        self._server = server
        self._wishes = wishes
        self._timeout_s = timeout_s

    async def _measure(self, request: LoadRequest) -> RequestResult:
        self.sent += 1
        sent_s = self.now_s
        try:
            return await self._stream(request, sent_s)
        except MooncakeError as error:
            return RequestResult(request.index, request.at_s, sent_s, Outcome.FAILED, error=error.message)

    async def _stream(self, request: LoadRequest, sent_s: float) -> RequestResult:
        stream = TokenStream(lambda: self.now_s)
        body = msgspec.json.encode(whole(request.body, self._wishes))
        reply = await self._server.post(request.path, body, stream.take, self._timeout_s)
        if reply.status != OK:
            outcome = Outcome.REJECTED if reply.status == FULL else Outcome.FAILED
            error = f"{reply.status}: {_told(reply.body)}"
            return RequestResult(request.index, request.at_s, sent_s, outcome, error=error)
        times_s = stream.all_times()
        details = stream.usage.prompt_tokens_details or _Details()
        return self._answered(request, sent_s, times_s, stream.usage.prompt_tokens, details.cached_tokens or 0)


class TokenStream:
    """The events of one answer, and when their tokens came."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.usage = _Usage()
        self._times_s: list[float] = []
        self._last_s = 0.0
        self._error = ""
        self._now_s = now_s

    def take(self, data: bytes) -> None:
        if not data.startswith(b"{"):  # [DONE]
            return
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except msgspec.DecodeError as error:
            self._error = self._error or f"an event is not one of OpenAI's: {error}"
            return
        if chunk.error is not None:
            self._error = self._error or _told(data)
        self.usage = chunk.usage or self.usage
        if not chunk.choices:  # the usage of the whole answer
            return
        self._last_s, count = self._now_s(), len(self._times_s)
        if chunk.usage is None:
            count += any(choice.has_token for choice in chunk.choices)
        else:
            count = chunk.usage.completion_tokens
        self._times_s += [self._last_s] * (count - len(self._times_s))

    def all_times(self) -> list[float]:
        """Of each token. Where a server sends several in an event and does not say so until the end, those that were
        not seen are taken to have come with the last. Raises NodeUnavailable for an error that ended the answer, or
        for one without tokens."""
        times_s = self._times_s + [self._last_s] * (self.usage.completion_tokens - len(self._times_s))
        if self._error or not times_s:
            raise NodeUnavailable(self._error or "an answer had no tokens")
        return times_s


def _told(body: bytes) -> str:
    """The sentence of an error, or what there is in its place."""
    try:
        text = msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.DecodeError:
        text = body.decode(errors="replace")
    return text[:MOST_TOLD].strip() or "it said no more"
