"""Streamed completions and chats over HTTP, from any server of OpenAI's API, with the times of their tokens."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import msgspec

from mooncake.app.bench.load.traffic import TIMEOUT_S, Answer, whole
from mooncake.app.bench.shared.prompts import python_reference
from mooncake.app.load.http_server import OK, HttpServer
from mooncake.app.load.run import TokenStream
from mooncake.errors import InternalError


class ServedByHttp:
    """An OpenAI server on this machine, asked with token ids. Not encrypted. ``pid``: of the process that clients speak
    to; 0: unknown. Without ``counts_tokens`` it is not asked to tell in each event how many tokens there are."""

    def __init__(self, name: str, port: int, model: str, pid: int = 0, counts_tokens: bool = True) -> None:
        self.name = name
        self.pid = pid
        self._counts_tokens = counts_tokens
        self._port = port
        self._server = HttpServer(f"http://127.0.0.1:{port}", name)
        self._model = model

    def without_counts(self) -> ServedByHttp:
        """The same server, asked as most clients do: events are only as large as their text."""
        return ServedByHttp(self.name, self._port, self._model, self.pid, counts_tokens=False)

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Raises NodeUnavailable when the server cannot be reached or hangs up, InternalError for another answer."""
        return await self._answer("/v1/completions", {"prompt": list(prompt)}, max_tokens)

    async def chat(self, text: str, max_tokens: int) -> Answer:
        """As ``ask``, with one message of a user."""
        return await self._answer("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, max_tokens)

    async def _answer(self, path: str, asked: dict[str, object], max_tokens: int) -> Answer:
        body = msgspec.json.encode(
            asked
            | {
                "model": self._model,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": self._counts_tokens},
            }
        )
        stream = TokenStream(time.monotonic)
        sent_s = time.monotonic()
        reply = await self._server.post(path, body, stream.take, TIMEOUT_S)
        if reply.status != OK:
            raise InternalError(f"{self.name} answered {reply.status}: {reply.body[:200].decode(errors='replace')}")
        return whole(Answer(sent_s, tuple(stream.all_times()), time.monotonic()), max_tokens)


class ChatsByHttp:
    """The same server, asked in chats: the message has a word for each of the ids."""

    def __init__(self, served: ServedByHttp) -> None:
        self.name = served.name
        self._served = served
        self._words = sorted(set(re.findall(r"\b[a-z]{2,5}\b", python_reference())))

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        text = " ".join(self._words[number % len(self._words)] for number in prompt)
        return await self._served.chat(text, max_tokens)
