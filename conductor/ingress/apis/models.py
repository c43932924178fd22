"""The models that are served, in the form of the API whose client asks: OpenAI's and Anthropic's have the same paths.

It knows names, limits and roots (``ServedModel``), and nothing of requests.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conductor.ingress.apis.anthropic import VERSION_HEADER, refusal
from conductor.ingress.apis.anthropic_types import ModelInfo, ModelPage
from conductor.ingress.apis.openai_answers import ModelCard, ModelList, ModelPermission
from conductor.ingress.http.errors import Handler, guarded, json_response
from conductor.ingress.prompts import Prompts
from mooncake.errors import InvalidRequest, shown

MAX_PAGE = 1000  # as in Anthropic's API


class ModelsApi:
    """Both forms."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._model = prompts.model

    def routes(self) -> list[Route]:
        listed = _by_client(self.list_models, self.page)
        return [
            Route("/v1/models", listed, methods=["GET"]),
            Route("/v1/models/", listed, methods=["GET"]),  # otherwise: the model with an empty name
            Route("/v1/models/{model:path}", _by_client(self.get_model, self.get_info), methods=["GET"]),
        ]

    async def list_models(self, request: Request) -> Response:
        return json_response(ModelList([self._card(name) for name in self._model.names]))

    async def get_model(self, request: Request) -> Response:
        return json_response(self._card(self._name(request)))

    async def page(self, request: Request) -> Response:
        """Anthropic's: at most ``limit`` models (here all, if it is not given) after one, or before one."""
        asked = request.query_params
        names = list(self._model.names)
        if after := asked.get("after_id"):
            names = names[self._at(after, "after_id") + 1 :]
        if before := asked.get("before_id"):
            names = names[: self._at(before, "before_id")]
        limit = _limit(asked.get("limit"))
        page = names[-limit:] if before else names[:limit]
        first, last = (page[0], page[-1]) if page else (None, None)
        return json_response(ModelPage([self._info(name) for name in page], len(page) < len(names), first, last))

    async def get_info(self, request: Request) -> Response:
        return json_response(self._info(self._name(request)))

    def _name(self, request: Request) -> str:
        """Raises NotFound."""
        name: str = request.path_params["model"]
        self._model.adapter_of(name)
        return name

    def _at(self, name: str, param: str) -> int:
        """Its place in the list. Raises InvalidRequest."""
        try:
            return self._model.names.index(name)
        except ValueError:
            raise InvalidRequest(f"the model {shown(name)} is not served here", param) from None

    def _card(self, name: str) -> ModelCard:
        """An adapter's entry names its base model, as vLLM's does."""
        model = self._model
        parent = None if name == model.name else model.name
        permission = [ModelPermission(f"modelperm-{name}", model.created)]
        return ModelCard(name, model.created, self._prompts.context_len, model.root_of(name), permission, parent=parent)

    def _info(self, name: str) -> ModelInfo:
        created = datetime.fromtimestamp(self._model.created, UTC)
        context_len = self._prompts.context_len
        return ModelInfo(name, name, f"{created:%Y-%m-%dT%H:%M:%SZ}", context_len, context_len)


def _by_client(openai: Handler, anthropic: Handler) -> Handler:
    """Anthropic's clients name the version of its API in every request."""
    ours, theirs = guarded(openai), guarded(anthropic, refusal)

    async def endpoint(request: Request) -> Response:
        return await (theirs if VERSION_HEADER in request.headers else ours)(request)

    return endpoint


def _limit(given: str | None) -> int:
    """Raises InvalidRequest."""
    try:
        limit = MAX_PAGE if given is None else msgspec.convert(given, int, strict=False)
    except msgspec.ValidationError:
        limit = 0
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit must be between 1 and {MAX_PAGE}, got {shown(given)}", "limit")
    return limit
