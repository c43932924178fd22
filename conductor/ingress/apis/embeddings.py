"""OpenAI's embeddings: texts or token ids in, a vector for each out.

Each is a request of its own to the core, up to ``AT_ONCE`` together. Here are the fields and the wording.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conductor.ingress.apis.intake import Intake, warning
from conductor.ingress.apis.openai_answers import PromptTokensDetails
from conductor.ingress.apis.openapi import Post
from conductor.ingress.embedding import NO_ANSWER, Embedded, Vectors, pooling_of
from conductor.ingress.http.errors import guarded, json_response
from conductor.ingress.http.request import unless_gone
from mooncake.errors import InvalidRequest, shown
from mooncake.pooling import PoolingSettings, Vector
from mooncake.types import TokenIds

MAX_INPUTS = 2048  # of one request, as in OpenAI's API
AT_ONCE = 32  # of these; the others wait, so that one request does not fill every queue
FORMATS = ("float", "base64")


class TextsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What requests to embed texts have in common. None means "not given"."""

    model: str | None = None
    user: str | None = None
    add_special_tokens: bool | None = None  # what the model expects around a text; None: true. These are vLLM's
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None  # lower runs first


class EmbeddingRequest(TextsRequest, frozen=True, kw_only=True):
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None  # of vectors: float (None) or base64, of little-endian float32
    dimensions: int | None = None  # of each; None: all


class Embedding(msgspec.Struct, frozen=True):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embeddings(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: str = "list"


class Embedder:
    """Texts as a client's request names them, to vectors."""

    def __init__(self, intake: Intake, max_requests: int) -> None:
        """``max_requests`` run at once in the whole cluster."""
        self._intake = intake
        self._pipeline = intake.pipeline
        self._at_once = min(AT_ONCE, max_requests)

    def settings(self, body: TextsRequest, dimensions: int | None = None) -> PoolingSettings:
        """How the model embeds, before any text is encoded. Raises InvalidRequest or NotFound."""
        self._pipeline.model.adapter_of(body.model or "")
        if body.cache_salt == "":
            raise InvalidRequest("cache_salt is empty, and separates nothing: leave it out", "cache_salt")
        return pooling_of(self._pipeline.model, dimensions)

    async def encode(self, text: str, param: str, body: TextsRequest) -> TokenIds:
        """Raises InvalidRequest, ContextTooLong."""
        return await self._intake.prompts.encode_whole(text, param, body.add_special_tokens is not False)

    async def embed(
        self,
        request: Request,
        body: TextsRequest,
        answer_id: str,
        arrived_at: float,
        inputs: Sequence[TokenIds],
        vectors: Vectors,
    ) -> list[Embedded]:
        """In the order of ``inputs``. Raises MooncakeError, or ClientGone."""
        trace = self._intake.trace(request, answer_id, body.model, arrived_at)
        headers = request.headers
        jobs = [
            self._pipeline.job(
                tokens,
                NO_ANSWER,
                request_id=f"{answer_id}-{number}",
                deadline=self._intake.deadline(arrived_at),
                arrived_at=arrived_at,
                salt=body.cache_salt or "",
                session=headers.get("x-session-affinity") or headers.get("x-correlation-id") or body.user or "",
                priority=body.priority or 0,
                model=body.model or "",
                trace=trace,
                pooling=vectors.settings.kind,
            )
            for number, tokens in enumerate(inputs)
        ]
        await unless_gone(request.receive, self._pipeline.run(jobs, vectors.take, self._at_once))
        return vectors.of(len(jobs))


class EmbeddingsApi:
    """The handler returns a response, whatever the input."""

    def __init__(self, intake: Intake, embedder: Embedder) -> None:
        self._intake = intake
        self._pipeline = intake.pipeline
        self._prompts = intake.prompts
        self._embedder = embedder

    def routes(self) -> list[Route]:
        return [Post("/v1/embeddings", guarded(self.embed), EmbeddingRequest)]

    async def embed(self, request: Request) -> Response:
        arrived_at = self._pipeline.now()
        body, ignored = await self._intake.take(request, EmbeddingRequest)
        vectors = Vectors(self._embedder.settings(body, body.dimensions), body.dimensions)
        if body.encoding_format not in (None, *FORMATS):
            what = f"encoding_format is float or base64, got {shown(body.encoding_format)}"
            raise InvalidRequest(what, "encoding_format")
        inputs = await self._inputs_of(body)
        answer_id = f"embd-{body.request_id or uuid.uuid4().hex}"
        embedded = await self._embedder.embed(request, body, answer_id, arrived_at, inputs, vectors)
        return await asyncio.to_thread(self._answer, body, answer_id, embedded, warning(ignored))

    async def _inputs_of(self, body: EmbeddingRequest) -> list[TokenIds]:
        """The four forms OpenAI allows: a text, texts, token ids, or lists of those. Raises InvalidRequest,
        ContextTooLong."""
        given = body.input
        if isinstance(given, str):
            return [await self._embedder.encode(given, "input", body)]
        if not given:
            raise InvalidRequest("the input is empty", "input")
        if ids := [item for item in given if isinstance(item, int)]:
            if len(ids) < len(given):
                raise InvalidRequest("an input mixes token ids with something else", "input")
            return [self._prompts.check_tokens(ids, "input", num_answer=0)]
        if len(given) > MAX_INPUTS:
            raise InvalidRequest(f"at most {MAX_INPUTS} inputs are allowed, got {len(given)}", "input")
        inputs = []
        for number, item in enumerate(given):
            param = f"input[{number}]"
            if isinstance(item, str):
                inputs.append(await self._embedder.encode(item, param, body))
            elif isinstance(item, list):
                inputs.append(self._prompts.check_tokens(item, param, num_answer=0))
        return inputs

    def _answer(
        self, body: EmbeddingRequest, answer_id: str, embedded: Sequence[Embedded], headers: dict[str, str]
    ) -> Response:
        """In a thread: thousands of vectors are many numbers."""
        worded = _as_base64 if body.encoding_format == "base64" else _as_numbers
        data = [Embedding(number, worded(each.vector)) for number, each in enumerate(embedded)]
        model = body.model or self._pipeline.model.name
        answer = Embeddings(answer_id, int(time.time()), model, data, usage_of(embedded))
        return json_response(answer, headers=headers)


def _as_numbers(vector: Vector) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers


def _as_base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def usage_of(embedded: Sequence[Embedded]) -> EmbeddingUsage:
    num_tokens = sum(each.usage.prompt_tokens for each in embedded)
    num_cached = sum(each.usage.cached_tokens for each in embedded)
    return EmbeddingUsage(num_tokens, num_tokens, PromptTokensDetails(num_cached))
