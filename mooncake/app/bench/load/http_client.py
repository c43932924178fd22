"""Streamed completions over HTTP, from any server of OpenAI's API, with the times of their tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import httptools
import msgspec

from mooncake.api_keys import bearer, own_api_key
from mooncake.app.bench.load.traffic import TIMEOUT_S, Answer, OnToken, whole
from mooncake.errors import InternalError, NodeUnavailable

READ_BYTES = 1 << 16
HTTP_OK = 200


class Usage(msgspec.Struct):
    completion_tokens: int


class Chunk(msgspec.Struct):
    """What counts of an event. Servers tell the tokens so far when they are asked for running usage."""

    usage: Usage | None = None


class ServedByHttp:
    """An OpenAI server, asked with token ids. Each request has a connection of its own. Not encrypted."""

    def __init__(self, name: str, port: int, model: str) -> None:
        self.name = name
        self._port = port
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
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n"
        )
        head += "".join(f"{name}: {value}\r\n" for name, value in bearer(own_api_key()))
        response = _Response(on_token)
        sent_s = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    writer.write(head.encode() + b"\r\n" + body)
                    await response.read(reader)
                finally:
                    writer.close()
        except TimeoutError:
            raise NodeUnavailable(f"{self.name} did not answer within {TIMEOUT_S:g} s") from None
        except OSError as error:
            raise NodeUnavailable(f"{self.name} cannot be asked: {error}") from None
        except httptools.HttpParserError as error:
            raise InternalError(f"{self.name} does not speak HTTP: {error}") from None
        if response.status != HTTP_OK:
            raise InternalError(f"{self.name} answered {response.status}: {response.text(200)}")
        return whole(Answer(sent_s, tuple(response.times_s), time.monotonic()), max_tokens)


class _Response:
    """Takes a response apart as it comes; a protocol of httptools."""

    def __init__(self, on_token: OnToken | None) -> None:
        self.times_s: list[float] = []
        self.status = 0
        self._on_token = on_token
        self._parser = httptools.HttpResponseParser(self)
        self._unread = b""
        self._is_complete = False

    async def read(self, reader: asyncio.StreamReader) -> None:
        while not self._is_complete:
            data = await reader.read(READ_BYTES)
            if not data:
                raise ConnectionResetError("it hung up before the end of its answer")
            self._parser.feed_data(data)

    def text(self, most: int) -> str:
        return self._unread[:most].decode(errors="replace")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._unread += body
        if self.status == HTTP_OK:
            *events, self._unread = self._unread.split(b"\n\n")
            for event in events:
                self._take(event.removeprefix(b"data: "))

    def on_message_complete(self) -> None:
        self._is_complete = True

    def _take(self, data: bytes) -> None:
        usage = msgspec.json.decode(data, type=Chunk).usage if data.startswith(b"{") else None
        if usage is None or usage.completion_tokens <= len(self.times_s):
            return
        self.times_s += [time.monotonic()] * (usage.completion_tokens - len(self.times_s))
        if self._on_token is not None:
            self._on_token(len(self.times_s))
