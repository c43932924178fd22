"""What a storm's clients ask, and what they must be told: requests over HTTP whose answers one calm engine knows.

A question is asked in several ways (streamed or not, with any salt or priority), none of which may change its answer.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

CONTEXT_TOKENS = 1024
MODEL: dict[str, Any] = {  # for tiny_model.write_tiny_model: a block of 16 tokens has 64 KiB
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "initializer_range": 0.3,  # what stands far ahead matters for an answer
    "max_position_embeddings": CONTEXT_TOKENS,
}
WITHIN_AN_ANSWER = 0  # in place of the HTTP status of an error that ends a stream
FIRST_ID, LAST_ID = 3, 319  # of tokens that are text


@dataclass(frozen=True, slots=True)
class Question:
    name: str
    path: str
    body: dict[str, Any]


Talk = tuple[Question, ...]  # in this order: later ones contain the answers to the earlier ones


@dataclass(slots=True)
class Choice:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str = ""


Answer = dict[int, Choice]  # by index


class Refused(Exception):
    """An error that the cluster tells, before an answer or within one."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.code = body["error"]["code"]


class Cut(Exception):
    """A stream ended before its end."""


async def ask(client: httpx.AsyncClient, question: Question, leave_after: int = 0, **options: Any) -> Answer:
    """The whole answer; or what came of it until the client left, after this many events of a stream (0: it stays).

    Raises Refused, Cut or httpx's TransportError.
    """
    body = question.body | options
    if not body.get("stream"):
        response = await client.post(question.path, json=body)
        if response.status_code != 200:
            raise Refused(response.status_code, response.json())
        answer: Answer = {}
        for choice in response.json()["choices"]:
            _add(answer, choice)
        return answer
    async with client.stream("POST", question.path, json=body) as response:
        if response.status_code != 200:
            raise Refused(response.status_code, json.loads(await response.aread()))
        return await _listen(response, leave_after)


async def _listen(response: httpx.Response, leave_after: int) -> Answer:
    answer: Answer = {}
    num_events = 0
    async for event in _events(response):
        if "error" in event:
            raise Refused(WITHIN_AN_ANSWER, event)
        for choice in event["choices"]:
            _add(answer, choice)
        num_events += 1
        if num_events == leave_after:
            return answer
    return answer


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            yield event
            if "error" in event:
                return
    raise Cut("the stream ended without its end")


def _add(answer: Answer, said: dict[str, Any]) -> None:
    choice = answer.setdefault(said["index"], Choice())
    message = said.get("message") or said.get("delta") or said
    choice.text += message.get("text") or message.get("content") or ""
    choice.tokens += said.get("token_ids") or []
    choice.finish_reason = said.get("finish_reason") or choice.finish_reason
    if logprobs := said.get("logprobs"):
        choice.logprobs += logprobs.get("content") or logprobs.get("token_logprobs") or []


async def known_answers(client: httpx.AsyncClient, talks: Sequence[Talk]) -> dict[str, Answer]:
    """By the questions' names."""
    gate = asyncio.Semaphore(8)

    async def one(question: Question) -> tuple[str, Answer]:
        async with gate:
            return question.name, await ask(client, question)

    return dict(await asyncio.gather(*(one(question) for talk in talks for question in talk)))


async def make_talks(client: httpx.AsyncClient, seed: int) -> list[Talk]:
    """A mixture of all that a request may ask for. ``client``: of a calm engine, which answers the conversations."""
    rng = random.Random(seed)
    talks = [(question,) for question in _completions(rng)]
    return [*talks, *[await _conversation(client, rng, number) for number in range(4)]]


def _completions(rng: random.Random) -> list[Question]:
    documents = [_tokens(rng, length) for length in (180, 420, 700)]  # that prompts begin with
    sampled = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True}
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"max_tokens": 48, "ignore_eos": True},
        "long": {"max_tokens": 250, "ignore_eos": True},
        "seeded": {"max_tokens": 60, **sampled, "seed": 11},
        "several": {"max_tokens": 40, **sampled, "seed": 5, "n": 3},
        "guided": {"max_tokens": 40, "temperature": 0.7, "seed": 3, "guided_regex": "(yes|no|[a-z]{3,20}) [0-9]{2,6}"},
        "chosen": {"max_tokens": 20, "guided_choice": ["the quick brown fox", "the lazy dog", "over the other"]},
        "stopped": {"max_tokens": 200, **sampled, "seed": 8, "stop": ["e", "th"]},
        "scored": {"max_tokens": 30, "logprobs": 3, "ignore_eos": True},
        "punished": {"max_tokens": 60, **sampled, "seed": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
        "bounded": {"max_tokens": 80, **sampled, "seed": 9, "min_tokens": 20, "ignore_eos": False},
        "beams": {"max_tokens": 24, "n": 2, "use_beam_search": True},
        "short": {"max_tokens": 1},
        "tuned": {"max_tokens": 40, "model": "tuned", "ignore_eos": True},
    }
    questions = []
    for name, options in kinds.items():
        for number, document in enumerate([[], *documents]):
            if name in ("beams", "guided", "chosen") and number > 1:
                continue
            prompt = [*document, *_tokens(rng, rng.randint(5, 60))]
            body = {"prompt": prompt, "temperature": 0.0, "return_token_ids": True, **options}
            questions.append(Question(f"{name}-{number}", "/v1/completions", body))
    return questions


async def _conversation(client: httpx.AsyncClient, rng: random.Random, number: int) -> Talk:
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "other", "dogs"]
    messages: list[dict[str, str]] = []
    turns = []
    for turn in range(3):
        messages = [*messages, {"role": "user", "content": " ".join(rng.choices(words, k=rng.randint(10, 50)))}]
        body = {"messages": messages, "max_tokens": 30, "temperature": 0.8, "seed": number, "return_token_ids": True}
        question = Question(f"talk-{number}-{turn}", "/v1/chat/completions", body | {"logprobs": number % 2 == 0})
        turns.append(question)
        messages = [*messages, {"role": "assistant", "content": (await ask(client, question))[0].text}]
    return tuple(turns)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]
