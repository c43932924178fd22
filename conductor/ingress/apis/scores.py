"""vLLM's scores of pairs of texts, and Jina's and Cohere's ranking of documents: how near their embeddings are.

The score is the cosine of two embeddings, since models here have no heads for scores. Here are the fields and the
wording; texts are embedded as those of ``embeddings``.
"""

from __future__ import annotations

import asyncio
import time
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conductor.ingress.apis.embeddings import MAX_INPUTS, Embedder, EmbeddingUsage, TextsRequest, usage_of
from conductor.ingress.apis.intake import Intake, warning
from conductor.ingress.apis.openapi import Post
from conductor.ingress.embedding import Embedded, Vectors
from conductor.ingress.http.errors import guarded, json_response
from mooncake.errors import InvalidRequest
from mooncake.pooling import cosine, paired

SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
FORMS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
"""Names that clients use for the two sides of pairs."""

Texts = str | list[str]


class ScoreRequest(TextsRequest, frozen=True, kw_only=True):
    """The two sides under the names of one of ``FORMS``: as many texts on each, or one on the first."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None


class Score(msgspec.Struct, frozen=True):
    index: int
    score: float  # from -1 to 1
    object: str = "score"


class Scores(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: str = "list"


class Document(msgspec.Struct, frozen=True):
    text: str


class RerankRequest(TextsRequest, frozen=True, kw_only=True):
    query: str
    documents: list[str | Document]
    top_n: int | None = None  # of the nearest; None or 0: all
    return_documents: bool | None = None  # None: true


class Ranked(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int  # of the document in the request
    relevance_score: float  # from -1 to 1
    document: Document | None = None


class Ranking(msgspec.Struct, frozen=True):
    """``results`` begin with the nearest."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class ScoresApi:
    """Each handler returns a response, whatever the input."""

    def __init__(self, intake: Intake, embedder: Embedder) -> None:
        self._intake = intake
        self._pipeline = intake.pipeline
        self._embedder = embedder

    def routes(self) -> list[Route]:
        return [
            *(Post(path, guarded(self.score), ScoreRequest) for path in SCORE_PATHS),
            *(Post(path, guarded(self.rerank), RerankRequest) for path in RERANK_PATHS),
        ]

    async def score(self, request: Request) -> Response:
        arrived_at = self._pipeline.now()
        body, ignored = await self._intake.take(request, ScoreRequest)
        (first, firsts), (second, seconds) = _sides(body)
        paired(firsts, seconds, first)
        named = [(text, _place(first, number, body)) for number, text in enumerate(firsts)]
        named += [(text, _place(second, number, body)) for number, text in enumerate(seconds)]
        answer_id = f"score-{body.request_id or uuid.uuid4().hex}"
        embedded = await self._embed(request, body, answer_id, arrived_at, named)
        scores = await asyncio.to_thread(_scores, embedded[: len(firsts)], embedded[len(firsts) :])
        data = [Score(number, score) for number, score in enumerate(scores)]
        answer = Scores(answer_id, int(time.time()), self._model_of(body), data, usage_of(embedded))
        return json_response(answer, headers=warning(ignored))

    async def rerank(self, request: Request) -> Response:
        arrived_at = self._pipeline.now()
        body, ignored = await self._intake.take(request, RerankRequest)
        if not body.documents:
            raise InvalidRequest("there are no documents to rank", "documents")
        if body.top_n is not None and body.top_n < 0:
            raise InvalidRequest(f"top_n is the number of documents to tell, got {body.top_n}", "top_n")
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        named = [(body.query, "query"), *((text, f"documents[{number}]") for number, text in enumerate(texts))]
        answer_id = f"rerank-{body.request_id or uuid.uuid4().hex}"
        embedded = await self._embed(request, body, answer_id, arrived_at, named)
        scores = await asyncio.to_thread(_scores, embedded[:1], embedded[1:])
        nearest = sorted(range(len(texts)), key=lambda number: -scores[number])[: body.top_n or None]
        told = texts if body.return_documents is not False else []
        results = [Ranked(number, scores[number], Document(told[number]) if told else None) for number in nearest]
        answer = Ranking(answer_id, self._model_of(body), results, usage_of(embedded))
        return json_response(answer, headers=warning(ignored))

    async def _embed(
        self, request: Request, body: TextsRequest, answer_id: str, arrived_at: float, named: list[tuple[str, str]]
    ) -> list[Embedded]:
        """Of texts, each with its place in the request."""
        vectors = Vectors(self._embedder.settings(body))
        if len(named) > MAX_INPUTS:
            raise InvalidRequest(f"at most {MAX_INPUTS} texts are allowed, got {len(named)}", named[-1][1])
        inputs = [await self._embedder.encode(text, param, body) for text, param in named]
        return await self._embedder.embed(request, body, answer_id, arrived_at, inputs, vectors)

    def _model_of(self, body: TextsRequest) -> str:
        return body.model or self._pipeline.model.name


def _sides(body: ScoreRequest) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
    """Both sides by their names. Raises InvalidRequest."""
    given = {name for form in FORMS for name in form if getattr(body, name) is not None}
    form = next((form for form in FORMS if given == set(form)), None)
    if form is None:
        ways = ", ".join(f"{first} and {second}" for first, second in FORMS)
        raise InvalidRequest(f"texts are compared as one of: {ways}", min(given, default="text_1"))
    first, second = ((name, _as_list(getattr(body, name))) for name in form)
    for name, texts in (first, second):
        if not texts:
            raise InvalidRequest("there is no text to compare", name)
    return first, second


def _as_list(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _place(name: str, number: int, body: ScoreRequest) -> str:
    """Of a text in the request."""
    return name if isinstance(getattr(body, name), str) else f"{name}[{number}]"


def _scores(firsts: list[Embedded], seconds: list[Embedded]) -> list[float]:
    return [cosine(first.vector, second.vector) for first, second in paired(firsts, seconds, "")]
