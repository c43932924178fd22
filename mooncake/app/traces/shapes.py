"""Synthetic traces with the lengths, arrivals and prefix reuse of published ones, for users without a trace file.

A shape is percentiles and shares measured on a published trace; generated traces have no line in common with it. It
must not know about clusters.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np

from mooncake.trace import TRACE_BLOCK_TOKENS, TraceRequest

MAX_INPUT = 131_072


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A distribution given by percentiles, interpolated linearly on a logarithmic scale."""

    shares: tuple[float, ...]
    values: tuple[float, ...]

    def draw(self, rng: np.random.Generator) -> float:
        return float(np.exp(np.interp(rng.random(), self.shares, np.log(self.values))))


_Q = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
_CHAT_FIRST = Percentiles(_Q, (891, 894, 897, 905, 1336, 5264, 13056, 25559, 38494, 80000, 126195))
_CHAT_ADDED = Percentiles(_Q, (1, 30, 163, 305, 534, 829, 3495, 9741, 14690, 26705, 60000))
_CHAT_GAP_S = Percentiles(_Q, (3, 12, 30, 42, 66, 123, 264, 483, 615, 1477, 3030))
_CHAT_OUTPUT = Percentiles(_Q, (1, 3, 9, 24, 156, 350, 472, 597, 698, 1119, 2000))


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations after one system prompt. A turn is followed by another with probability ``goes_on``, from the
    second turn on ``goes_on_later``. The next turn begins with the whole prompt before it, or, with probability
    ``is_cut``, with a part of it (the client shortened the history)."""

    system_tokens: int = 890
    first: Percentiles = _CHAT_FIRST
    added: Percentiles = _CHAT_ADDED
    gap_s: Percentiles = _CHAT_GAP_S
    output: Percentiles = _CHAT_OUTPUT
    goes_on: float = 0.23
    goes_on_later: float = 0.636
    is_cut: float = 0.15


@dataclass(frozen=True, slots=True)
class Tool:
    """Calls after one long system prompt, each with few tokens of its own."""

    system_blocks: int
    own_tokens: Percentiles
    output: Percentiles


@dataclass(frozen=True, slots=True)
class Shape:
    requests: int
    duration_s: float
    tick_s: float  # arrivals are recorded in ticks
    parts: tuple[tuple[float, Chat | Tool], ...]  # shares of new conversations and calls


_TOOL_12 = Tool(12, Percentiles((0, 0.5, 1), (300, 900, 1536)), Percentiles((0, 0.5, 1), (3, 15, 50)))
_TOOL_5 = Tool(5, Percentiles((0, 0.5, 1), (200, 600, 1024)), Percentiles((0, 0.5, 1), (10, 20, 40)))
_LONG_CHAT = Chat(
    first=Percentiles((0, 0.25, 0.5, 0.75, 0.9, 1), (900, 3000, 8000, 18000, 32000, 51200)),
    output=Percentiles((0, 0.1, 0.5, 0.9, 1), (30, 200, 400, 800, 2000)),
    goes_on=0.3,
    goes_on_later=0.65,
)
SHAPES: dict[str, Shape] = {
    "conversation": Shape(12_031, 3_537.0, 3.0, ((1.0, Chat()),)),
    "toolagent": Shape(23_608, 3_537.0, 3.05, ((0.43, _TOOL_12), (0.31, _TOOL_5), (0.26, _LONG_CHAT))),
}


@dataclass(frozen=True, slots=True)
class _Turn:
    ids: tuple[int, ...]
    tokens: int
    depth: int
    chat: Chat


def generate(shape: str, requests: int | None = None, seed: int = 0) -> list[TraceRequest]:
    """A trace of ``requests`` (None: as many as the published trace) at the published mean rate."""
    return _Generator(SHAPES[shape], seed).make(requests or SHAPES[shape].requests)


class _Generator:
    """New conversations and calls arrive as a Poisson process; later turns after the user's think time."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._rng = np.random.default_rng(seed)
        self._ids = count()
        self._system = [self._new_ids(_system_blocks(part)) for _, part in shape.parts]

    def make(self, requests: int) -> list[TraceRequest]:
        shape, rng = self._shape, self._rng
        shares = np.array([share for share, _ in shape.parts])
        turns_each = float(sum(share * _turns(part) for share, part in shape.parts) / shares.sum())
        rate = shape.requests / shape.duration_s / turns_each  # new conversations and calls per second
        made: list[TraceRequest] = []
        followers: list[tuple[float, int, _Turn]] = []
        order = count()
        rng.exponential(1 / rate)  # unused, but needed for a seed to give the same trace as before
        # Conversations that began before the trace: without them it would start with first turns only.
        next_new = -2 * 900.0
        while len(made) < requests:
            if followers and followers[0][0] <= next_new:
                now, _, parent = heapq.heappop(followers)
                turn: _Turn | None
                turn, request = self._follow(parent, now)
            else:
                now = next_new
                next_new += rng.exponential(1 / rate)
                which = int(rng.choice(len(shares), p=shares / shares.sum()))
                turn, request = self._begin(which, now)
            if turn is not None and rng.random() < (turn.chat.goes_on if turn.depth == 1 else turn.chat.goes_on_later):
                heapq.heappush(followers, (now + turn.chat.gap_s.draw(rng), next(order), turn))
            if now >= 0:
                made.append(request)
        return _in_ticks(made, shape.tick_s)

    def _begin(self, which: int, now: float) -> tuple[_Turn | None, TraceRequest]:
        part, rng = self._shape.parts[which][1], self._rng
        system = self._system[which]
        if isinstance(part, Tool):
            tokens = len(system) * TRACE_BLOCK_TOKENS + round(part.own_tokens.draw(rng))
            return None, self._request(now, tokens, part.output, system)
        tokens = min(round(part.first.draw(rng)), MAX_INPUT)
        request = self._request(now, tokens, part.output, system)
        return _Turn(request.hash_ids, tokens, 1, part), request

    def _follow(self, parent: _Turn, now: float) -> tuple[_Turn, TraceRequest]:
        rng, chat = self._rng, parent.chat
        kept = parent.tokens // TRACE_BLOCK_TOKENS
        if rng.random() < chat.is_cut:
            kept = max(1, round(kept * rng.uniform(0.05, 1.0)))
        tokens = min(kept * TRACE_BLOCK_TOKENS + round(chat.added.draw(rng)), MAX_INPUT)
        request = self._request(now, tokens, chat.output, parent.ids[: min(kept, tokens // TRACE_BLOCK_TOKENS)])
        return _Turn(request.hash_ids, tokens, parent.depth + 1, chat), request

    def _request(self, now: float, tokens: int, output: Percentiles, known: tuple[int, ...]) -> TraceRequest:
        blocks = -(-tokens // TRACE_BLOCK_TOKENS)
        ids = known[:blocks] + self._new_ids(blocks - len(known))
        return TraceRequest(now * 1e3, tokens, max(1, round(output.draw(self._rng))), ids)

    def _new_ids(self, number: int) -> tuple[int, ...]:
        return tuple(next(self._ids) for _ in range(number))


def _system_blocks(part: Chat | Tool) -> int:
    return part.system_blocks if isinstance(part, Tool) else part.system_tokens // TRACE_BLOCK_TOKENS


def _turns(part: Chat | Tool) -> float:
    """Mean number of turns of one conversation."""
    return 1.0 if isinstance(part, Tool) else 1.0 + part.goes_on / (1.0 - part.goes_on_later)


def _in_ticks(requests: list[TraceRequest], tick_s: float) -> list[TraceRequest]:
    tick_ms = tick_s * 1e3
    rounded: Callable[[float], float] = lambda at_ms: round(at_ms // tick_ms * tick_ms)  # noqa: E731
    return [
        TraceRequest(rounded(request.timestamp_ms), request.input_length, request.output_length, request.hash_ids)
        for request in requests
    ]
