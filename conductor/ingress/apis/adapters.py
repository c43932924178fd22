"""vLLM's routes to load and unload LoRA adapters while the cluster serves."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from conductor.api import AdapterLoading
from conductor.ingress.apis.intake import Intake, warning
from conductor.ingress.apis.openapi import Post
from conductor.ingress.http.errors import guarded


class LoadFields(msgspec.Struct, frozen=True):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class UnloadFields(msgspec.Struct, frozen=True):
    lora_name: str = ""
    lora_int_id: int | None = None  # no effect, as in vLLM


class AdaptersApi:
    """Every handler returns a response, whatever the input."""

    def __init__(self, intake: Intake, adapters: AdapterLoading) -> None:
        self._intake = intake
        self._adapters = adapters

    def routes(self) -> list[Route]:
        return [
            Post("/v1/load_lora_adapter", guarded(self.load), LoadFields),
            Post("/v1/unload_lora_adapter", guarded(self.unload), UnloadFields),
        ]

    async def load(self, request: Request) -> Response:
        """Answers once requests may name the adapter."""
        body, ignored = await self._intake.decode(request, LoadFields)
        await self._adapters.load(body.lora_name, body.lora_path, body.load_inplace)
        return PlainTextResponse(f"Success: the adapter {body.lora_name} is loaded.", headers=warning(ignored))

    async def unload(self, request: Request) -> Response:
        body, ignored = await self._intake.decode(request, UnloadFields)
        self._adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: the adapter {body.lora_name} is unloaded.", headers=warning(ignored))
