"""Streamed completions over HTTP, from any server of OpenAI's API, with the times of their tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from mooncake.app.bench.load.traffic import TIMEOUT_S, Answer, OnToken, whole
from mooncake.app.load.http_server import OK, HttpServer
from mooncake.errors import InternalError


class Usage(msgspec.Struct):
    completion_tokens: int


class Chunk(msgspec.Struct):
    """What counts of an event. Servers tell the tokens so far when they are asked for running usage."""

    usage: Usage | None = None


class ServedByHttp:
    """An OpenAI server on this machine, asked with token ids. Not encrypted."""

    def __init__(self, name: str, port: int, model: str) -> None:
        self.name = name
        self._server = HttpServer(f"http://127.0.0.1:{port}", name)
        self._model = model

    async def ask(self, prompt: Sequence[int], max_tokens: int, on_token: OnToken | None = None) -> Answer:
        """Raises NodeUnavailable when the server cannot be reached or hangs up, InternalError for another answer."""
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )
        times_s: list[float] = []

        def take(data: bytes) -> None:
            usage = msgspec.json.decode(data, type=Chunk).usage if data.startswith(b"{") else None
            if usage is None or usage.completion_tokens <= len(times_s):
                return
            times_s.extend([time.monotonic()] * (usage.completion_tokens - len(times_s)))
            if on_token is not None:
                on_token(len(times_s))

        sent_s = time.monotonic()
        reply = await self._server.post("/v1/completions", body, take, TIMEOUT_S)
        if reply.status != OK:
            raise InternalError(f"{self.name} answered {reply.status}: {reply.body[:200].decode(errors='replace')}")
        return whole(Answer(sent_s, tuple(times_s), time.monotonic()), max_tokens)
