"""The requests of a load test: bodies of OpenAI's API, and when each is sent. Pure, except for reading files.

Prompts are random ones of given lengths, those of a file, or a recorded trace's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from pathlib import Path

import msgspec

from mooncake.app.traces.replay import ReplayOptions, plan_arrivals
from mooncake.errors import ConfigError
from mooncake.json_file import filled_lines
from mooncake.trace import TraceRequest, trace_tokens

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MIN_TOKEN = 100  # ids below are often special
WORDS = "time year people way day man thing woman life child world school state family group part place case week work"

Body = dict[str, object]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """``at_s`` is when it is sent, in seconds after the start."""

    index: int
    at_s: float
    path: str
    body: Body


@dataclass(frozen=True, slots=True)
class Shape:
    """Of random requests. Lengths, in tokens, are up to ``spread`` of themselves shorter or longer; the first
    ``prefix_tokens`` of a prompt are those of all. In a chat a word stands for a token."""

    prompt_tokens: int = 512
    answer_tokens: int = 128
    prefix_tokens: int = 0
    spread: float = 0.0
    vocabulary: int = 10_000
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class Wishes:
    """What all requests of a run have in common. ``is_plain``: no fields but those of OpenAI's own API."""

    model: str
    is_plain: bool = False


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Of ``rate`` requests a second (infinite: all at once); the first is at 0. Gaps have a gamma distribution of the
    shape ``burstiness``: 1 is a Poisson process, infinity would be a clock."""
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(f"arrivals {seed}")
    gaps = (draw.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))


def random_bodies(shape: Shape, count: int, seed: int) -> Iterator[tuple[str, Body]]:
    """Made as they are needed: there may be millions of tokens."""
    draw = random.Random(f"prompts {seed}")
    prefix = _some(draw, shape, shape.prefix_tokens)
    return (_random_body(draw, shape, prefix) for _ in range(count))


def _random_body(draw: random.Random, shape: Shape, prefix: list[int]) -> tuple[str, Body]:
    prompt, answer = (_about(draw, tokens, shape.spread) for tokens in (shape.prompt_tokens, shape.answer_tokens))
    ids = prefix + _some(draw, shape, max(prompt - len(prefix), 1))
    if not shape.is_chat:
        return COMPLETIONS, _exactly({"prompt": ids}, answer)
    words = WORDS.split()
    text = " ".join(words[each % len(words)] for each in ids)
    return CHAT, _exactly({"messages": [{"role": "user", "content": text}]}, answer)


def _some(draw: random.Random, shape: Shape, count: int) -> list[int]:
    return draw.choices(range(min(MIN_TOKEN, shape.vocabulary - 1), shape.vocabulary), k=count)


def _about(draw: random.Random, tokens: int, spread: float) -> int:
    most = int(spread * tokens)
    return max(tokens + draw.randint(-most, most), 1)


def file_bodies(file: Path, count: int | None, answer_tokens: int) -> list[tuple[str, Body]]:
    """A request a line: an object with a ``prompt`` or with ``messages``, and any other fields of OpenAI's API, or a
    line of its batch format, which has that as ``body``. ``count`` of them, if there are fewer from the first one on
    again; None: each once. Raises ConfigError, naming the line."""
    bodies = [_file_body(line, where, answer_tokens) for where, line in filled_lines(file)]
    if not bodies:
        raise ConfigError(f"{file} has no requests")
    return list(islice(cycle(bodies), count or len(bodies)))


def _file_body(line: str, where: str, answer_tokens: int) -> tuple[str, Body]:
    try:
        given = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    body = given.get("body", given) if isinstance(given, dict) else None
    if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
        raise ConfigError(f'{where}: a request has a "prompt" or "messages"')
    most = body.pop("output_tokens", answer_tokens)  # vLLM's name in its data sets
    has_limit = body.keys() & {"max_tokens", "max_completion_tokens"}
    return (COMPLETIONS if "prompt" in body else CHAT), body if has_limit else {"max_tokens": most, **body}


def planned(bodies: Iterable[tuple[str, Body]], times: Iterable[float]) -> Iterator[LoadRequest]:
    """In the order in which they are sent."""
    return (LoadRequest(index, at_s, *each) for index, (at_s, each) in enumerate(zip(times, bodies, strict=True)))


def planned_trace(trace: Sequence[TraceRequest], options: ReplayOptions, vocabulary: int) -> Iterator[LoadRequest]:
    """Likewise, at the trace's times; prompts begin alike where its do. ``trace`` is scaled to the options' tokens per
    block."""
    for arrival in plan_arrivals(trace, options):
        tokens = trace_tokens(arrival.request, options.tokens_per_block, vocabulary).tolist()
        yield LoadRequest(
            arrival.index, arrival.at_s, COMPLETIONS, _exactly({"prompt": tokens}, arrival.request.output_length)
        )


def _exactly(prompt: Body, tokens: int) -> Body:
    """An answer of so many tokens."""
    return {**prompt, "max_tokens": max(tokens, 1), "temperature": 0, "ignore_eos": True}


def whole(body: Body, wishes: Wishes) -> Body:
    """As it is sent."""
    told: Body = {"include_usage": True}
    if wishes.is_plain:
        body = {name: value for name, value in body.items() if name != "ignore_eos"}
    else:
        told["continuous_usage_stats"] = True  # how many tokens an event has
    return {**body, "model": wishes.model, "stream": True, "stream_options": told}
