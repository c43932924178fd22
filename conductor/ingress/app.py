"""Ingress as one object: the conductor builds it, adds its gRPC service, starts its HTTP port, and stops it."""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from conductor.api import AdapterLoading, Generator
from conductor.ingress.access import KeyMiddleware
from conductor.ingress.apis.adapters import AdaptersApi
from conductor.ingress.apis.anthropic import MESSAGES, MessagesApi, refusal
from conductor.ingress.apis.embeddings import Embedder, EmbeddingsApi
from conductor.ingress.apis.grpc import SERVICE, InferenceService
from conductor.ingress.apis.intake import Intake
from conductor.ingress.apis.models import ModelsApi
from conductor.ingress.apis.openai import OpenAIApi
from conductor.ingress.apis.openapi import openapi_route
from conductor.ingress.apis.responses import ResponsesApi
from conductor.ingress.apis.scores import ScoresApi
from conductor.ingress.apis.stored_responses import StoredResponses
from conductor.ingress.apis.tokenizer import TokenizerApi
from conductor.ingress.cluster_load import ClusterLoad
from conductor.ingress.http.absent_paths import refused_because
from conductor.ingress.http.edge import TRACE_RESPONSE, EdgeMiddleware
from conductor.ingress.http.errors import NoSuchRoute, WrongMethod, error_response, guarded, json_response
from conductor.ingress.http.event_stream import KEEP_ALIVE_S
from conductor.ingress.http.server import HttpServer
from conductor.ingress.metrics import Metrics
from conductor.ingress.parsers.output_format import output_format
from conductor.ingress.pipeline import Pipeline
from conductor.ingress.served_model import ServedModel
from conductor.ingress.trace import Tracer
from conductor.stats import DispatchStats
from mooncake.adapters import Adapter, open_adapters, parse_adapters
from mooncake.api_keys import ApiKeys
from mooncake.checkpoint import Checkpoint
from mooncake.config import Config
from mooncake.errors import ModelError, MooncakeError
from mooncake.json_file import json_object
from mooncake.pooling import PoolingSettings
from mooncake.rpc import inference_pb2_grpc
from mooncake.rpc.cluster_pb2 import StatusResponse
from mooncake.rpc.json_form import json_form
from mooncake.rpc.server import RpcServer
from mooncake.sampling_defaults import overridden
from mooncake.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_MAX_SHOWN_PATH = 200
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


class Ingress:
    """The HTTP and gRPC APIs of a cluster. Health probes call ``waiting_for``, so it must be cheap; ``status`` returns
    what lists every node, for the status page and the metrics, in a thread."""

    def __init__(
        self,
        config: Config,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        dispatcher: Generator,
        status: Callable[[], Callable[[], StatusResponse]],
        waiting_for: Callable[[], Sequence[str]],
        stats: DispatchStats,
        keep_alive_s: float = KEEP_ALIVE_S,
        capacity_tokens: Callable[[], int] = lambda: 0,
        adapters: AdapterLoading | None = None,
    ) -> None:
        """``waiting_for`` names what serving needs and lacks; ``capacity_tokens`` is passed to ``Pipeline``;
        ``adapters`` are those that come and go. Raises ConfigError for an unknown parser."""
        limits = config.conductor
        self._address = (limits.host, limits.http_port)
        self._timeout_s = limits.request_timeout_s
        self._max_requests = limits.max_requests
        self._model_config = checkpoint.config
        self._status = status
        self._waiting_for = waiting_for
        self._telling = asyncio.Lock()  # of all nodes: one thread at a time
        model = served_model(config, checkpoint, {} if adapters is None else adapters.served)
        self._adapters = adapters if limits.max_loaded_adapters else None
        self._metrics = Metrics(model.name, status, stats)
        self._tracer = _tracer(limits.otlp_traces_endpoint)
        # the core refuses with a better retry time; this only bounds what waits before it
        self._pipeline = Pipeline(
            model,
            tokenizer,
            dispatcher,
            self._metrics,
            2 * limits.max_requests,
            capacity_tokens=capacity_tokens,
            tracer=self._tracer,
        )
        answers = output_format(
            limits.reasoning_parser, limits.tool_call_parser, tokenizer.template_source, tokenizer.takes_tools
        )
        intake = Intake(self._pipeline, answers, self._timeout_s)
        self._stored = StoredResponses(int(limits.stored_responses_mb * 1e6))
        app: ASGIApp = KeyMiddleware(self._app(intake, keep_alive_s), ApiKeys(limits.api_keys), {MESSAGES: refusal})
        if limits.allowed_origins:  # outside the key check: a browser's preflight request carries no key
            exposed = (
                *("x-request-id", "x-mooncake-warning", "retry-after", "retry-after-ms", "x-should-retry"),
                TRACE_RESPONSE,
            )
            app = CORSMiddleware(app, limits.allowed_origins, ["*"], ["*"], expose_headers=exposed)
        edge = EdgeMiddleware(app, self._metrics.http_response, 2 * limits.max_requests)
        self._server = HttpServer(edge, limits)

    def add_grpc(self, server: RpcServer) -> None:
        """Call before the server starts."""
        service = InferenceService(self._pipeline, self._timeout_s)
        server.add(inference_pb2_grpc.add_InferenceServicer_to_server, service, SERVICE)
        if find_spec("smg_grpc_proto") is not None:
            self._add_gateway_service(server)

    def _add_gateway_service(self, server: RpcServer) -> None:
        try:
            from conductor.ingress.apis import vllm_engine
        except Exception as error:  # generated code refuses other versions of its libraries, in many ways
            log.warning("gateways cannot use this conductor: smg-grpc-proto does not work here (%s)", error)
            return
        service = vllm_engine.VllmEngineService(
            self._pipeline,
            self._model_config,
            self._timeout_s,
            self._max_requests,
            self._cluster_load,
            self._waiting_for,
        )
        server.add(vllm_engine.add_to_server, service, vllm_engine.SERVICE)
        log.info("gateways may use this conductor as an engine: %s is on the gRPC port", vllm_engine.SERVICE)

    async def start_http(self) -> int:
        """Returns the port. Raises ConfigError when it cannot be opened."""
        return await self._server.start(*self._address)

    async def drain(self, within_s: float) -> None:
        """Refuse new requests; return when the running ones have ended, or after ``within_s``."""
        await self._pipeline.drain(within_s)

    async def stop(self) -> None:
        """End running requests with a typed error, close the port, and tell their traces. The gRPC server's owner stops
        that server."""
        await self._pipeline.close()
        await self._server.stop()
        if self._tracer is not None:
            await self._tracer.close()

    def _app(self, intake: Intake, keep_alive_s: float) -> ASGIApp:
        embedder = Embedder(intake, self._max_requests)
        routes: list[Route] = [
            *ModelsApi(intake.prompts).routes(),
            *OpenAIApi(intake, keep_alive_s).routes(),
            *EmbeddingsApi(intake, embedder).routes(),
            *ScoresApi(intake, embedder).routes(),
            *ResponsesApi(intake, keep_alive_s, self._stored).routes(),
            *MessagesApi(intake, keep_alive_s).routes(),
            *TokenizerApi(intake).routes(),
            *([] if self._adapters is None else AdaptersApi(intake, self._adapters).routes()),
            Route("/version", guarded(self._version), methods=["GET"]),
            Route("/load", guarded(self._load), methods=["GET"]),
            Route("/health", guarded(self._ready), methods=["GET"]),
            Route("/ping", guarded(self._ready), methods=["GET", "POST"]),
            Route("/health/live", guarded(self._live), methods=["GET"]),
            Route("/health/ready", guarded(self._ready), methods=["GET"]),
            Route("/metrics", guarded(self._metrics_page), methods=["GET"]),
            Route("/status.json", guarded(self._status_json), methods=["GET"]),
            Route("/", guarded(self._page), methods=["GET"]),
        ]
        routes.append(openapi_route(routes, project_version()))
        app = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _wrong_method})
        app.router.redirect_slashes = False  # otherwise methods that no route accepts would get an empty 307
        return app

    async def _version(self, request: Request) -> Response:
        return json_response({"version": project_version()})

    async def _load(self, request: Request) -> Response:
        """vLLM's: what some load balancers ask for."""
        return json_response({"server_load": self._pipeline.num_running})

    async def _live(self, request: Request) -> Response:
        return json_response({"status": "live"})

    async def _ready(self, request: Request) -> Response:
        if not self._pipeline.is_open:
            return json_response({"status": "stopping"}, 503)
        waiting_for = self._waiting_for()
        if not waiting_for:
            return json_response({"status": "ready"})
        return json_response({"status": "waiting", "waiting_for": waiting_for}, 503, {"retry-after": "1"})

    async def _metrics_page(self, request: Request) -> Response:
        async with self._telling:
            page, content_type = await asyncio.to_thread(self._metrics.page(request.headers.get("accept", "")))
        return Response(page, headers={"content-type": content_type, "vary": "accept"})

    async def _cluster_load(self) -> ClusterLoad:
        async with self._telling:
            status = self._status()
            return await asyncio.to_thread(lambda: ClusterLoad.of(status()))

    async def _status_json(self, request: Request) -> Response:
        async with self._telling:
            return await asyncio.to_thread(_status_answer, self._status())

    async def _page(self, request: Request) -> Response:
        page = resources.files("conductor.ingress").joinpath("status.html").read_bytes()
        return Response(page, headers=_PAGE_HEADERS, media_type="text/html")


def _tracer(endpoint: str) -> Tracer | None:
    if not endpoint:
        return None
    from conductor.ingress.otlp import OtlpTracer  # which may not be installed

    return OtlpTracer(endpoint)


def _status_answer(status: Callable[[], StatusResponse]) -> Response:
    return json_response(json_form(status()), headers={"cache-control": "no-store"})


def served_model(config: Config, checkpoint: Checkpoint, loaded: Mapping[str, Adapter]) -> ServedModel:
    """Raises ConfigError when more is asked of the model than it can do, instead of silently doing less."""
    folders = parse_adapters(config.model.adapters)
    return ServedModel(
        name=config.model.name or checkpoint.name,
        max_model_len=checkpoint.config.context(config.model.max_model_len),
        vocab_size=checkpoint.config.vocab_size,
        block_tokens=config.block.tokens,
        dtype=config.precision().weights.dtype,
        fingerprint=f"fp_{checkpoint.digest[:12]}",
        created=int(time.time()),
        adapters={adapter.name: adapter for adapter in open_adapters(folders)},
        sampling=overridden(
            checkpoint.sampling_defaults(config.model.generation_config), config.model.generation_overrides
        ),
        chat_variables=json_object(config.model.chat_template_kwargs, "model.chat_template_kwargs"),
        takes_rendered=config.conductor.rendered_prompts,
        root=config.model.path,
        adapter_roots=folders,
        loaded=loaded,
        hidden_size=checkpoint.config.hidden_size,
        pooling=_pooling_of(checkpoint),
        has_head=checkpoint.config.has_head,
    )


def _pooling_of(checkpoint: Checkpoint) -> PoolingSettings | str:
    """A model that cannot embed texts may generate them."""
    try:
        return checkpoint.pooling()
    except ModelError as error:
        return error.message


def project_version() -> str:
    try:
        return version("mooncake-cluster")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


async def _not_found(request: Request, error: Exception) -> Response:
    path = request.url.path[:_MAX_SHOWN_PATH]
    refused = _refusal_at(path)
    if reason := refused_because(path.rstrip("/")):
        return refused(NoSuchRoute(f"{path}: {reason}"))
    routes = [route.path for route in request.app.routes if "{" not in route.path]
    nearest = difflib.get_close_matches(path, routes, n=1, cutoff=0.7)  # such as without /v1, or with it twice
    meant = f"; is {nearest[0]} meant?" if nearest else ""
    return refused(NoSuchRoute(f"no such path: {request.method} {path}{meant}"))


async def _wrong_method(request: Request, error: Exception) -> Response:
    response = _refusal_at(request.url.path)(_wrong(request))
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


def _refusal_at(path: str) -> Callable[[MooncakeError], Response]:
    """Who answers with an error there, in the form of the path's API."""
    return refusal if path == MESSAGES or path.startswith(f"{MESSAGES}/") else error_response


def _wrong(request: Request) -> MooncakeError:
    return WrongMethod(f"{request.url.path[:_MAX_SHOWN_PATH]} does not take {request.method}")
