"""What a prefill node and a decode node take for their work, measured through a running cluster as clients see it.

``mooncake calibrate`` times the engine alone. A node does more: it streams layers, writes to the pool, answers calls,
and shares caches and memory with its neighbour. All of that is in what a client waits for, so it is measured there,
while the other node rests and while it works. It knows how to ask and what to make of the times, and starts nothing.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from conductor.cost import ALL_NODES, NEVER, CostModel, DecodeCost, PrefillCost
from mooncake.app.bench_traffic import Answer, Served, Traffic
from mooncake.app.latency import longest_tenth_mean
from mooncake.errors import InternalError

ROUNDS = 3  # each over all sizes, so that no size has only seconds in which the machine was slow
PROMPTS = ((640, 4), (32, 4), (1280, 2), (96, 4), (256, 4))  # tokens, how many at once
WITH_HANDOFF = 2  # new tokens: a single one would not reach the decode node
CONTEXTS = (96, 640)  # of those, decoded from: one a round
BATCHES = (1, 2, 4)
STEPS = 32
BESIDE_TOKENS = (96, 256)  # of the prompts that are computed beside decoding: those measured last before
BESIDE_PROMPTS, BESIDE_BATCH, DECODED_TOKENS = 4, 2, 32
STEPS_BESIDE = 240  # of each of the batch, while prompts are computed


@dataclass(frozen=True, slots=True)
class PairCosts:
    """Step curves of both nodes while the other one rests, how many times slower they are while it works, and what a
    request waits for beside: before its first token, and from there until it takes part in a decode step."""

    prefill: PrefillCost
    decode: DecodeCost
    request_ms: float
    handoff_ms: float
    decode_tail: float  # how many times their mean the longest tenth of equal steps take
    prefill_beside: float
    decode_beside: float


class PairSamples:
    """What was measured so far. Measured before and after what it is to predict, it holds for the time between, too:
    a shared machine is not equally fast from minute to minute."""

    def __init__(self) -> None:
        self._fitted = CostModel(forgetting=NEVER)  # what was measured first holds as much as what was last
        self._request_ms: list[float] = []
        self._handoff_ms: list[float] = []
        self._tails: list[float] = []
        self._prefill_slower: list[float] = []  # beside decoding
        self._decode_slower: list[float] = []  # beside prefill

    async def measure(self, served: Served, traffic: Traffic, longest: int, tell: Callable[[str], None]) -> None:
        """With prompts of up to ``longest`` tokens, and some more for their answers. Takes two minutes on a core a
        node. Raises MooncakeError when the cluster does not answer."""
        for turn in range(ROUNDS):

            def say(what: str, turn: int = turn) -> None:
                tell(f"round {turn + 1} of {ROUNDS}: {what}")

            await self._measure_once(served, traffic, longest, turn, say)

    async def _measure_once(
        self, served: Served, traffic: Traffic, longest: int, turn: int, tell: Callable[[str], None]
    ) -> None:
        context_tokens = CONTEXTS[turn % len(CONTEXTS)]
        asked: dict[int, list[list[int]]] = {}  # by their tokens, from here on cached
        alone_ms: dict[int, float] = {}  # of one of them
        for tokens, count in PROMPTS:
            if tokens <= max(longest, *BESIDE_TOKENS):
                tell(f"prefill of {tokens} tokens")
                asked[tokens] = [traffic.prompt(tokens) for _ in range(count)]
                alone_ms[tokens], more_ms = one_by_one(await _ask_all(served, asked[tokens], WITH_HANDOFF))
                self._fitted.observe_prefill(ALL_NODES, tokens, 0, alone_ms[tokens])
                self._request_ms.append(more_ms)
        alone = await self._measure_decode(served, asked[min(context_tokens, max(asked))], tell)
        tell("both at once")
        beside = await _measure_beside(served, traffic)
        more_ms = self._fitted.decode(ALL_NODES).context_ms * (beside.steps.context - alone.context)
        self._prefill_slower.append(beside.prefill_ms / sum(alone_ms[tokens] for tokens in BESIDE_TOKENS))
        self._decode_slower.append(beside.steps.ms / (alone.ms + more_ms))

    async def _measure_decode(self, served: Served, prompts: list[list[int]], tell: Callable[[str], None]) -> _Steps:
        """Behind these prompts, which are cached. Returns the steps of BESIDE_BATCH."""
        tokens, found = len(prompts[0]), dict[int, _Steps]()
        for batch in BATCHES:
            tell(f"decode of {batch} sequences of {tokens} tokens")
            answers = await _ask_all(served, prompts[:batch], STEPS)
            steps = found[batch] = together(answers, tokens)
            self._tails.append(steps.tail)
            self._fitted.observe_decode(ALL_NODES, batch, round(steps.context), steps.ms)
            if batch == 1:
                self._handoff_ms.append(answers[0].gaps_ms[0] - steps.ms)
        return found[BESIDE_BATCH]

    def costs(self) -> PairCosts:
        return PairCosts(
            self._fitted.prefill(ALL_NODES),
            self._fitted.decode(ALL_NODES),
            request_ms=max(statistics.median(self._request_ms), 0.0),
            handoff_ms=max(statistics.median(self._handoff_ms), 0.0),
            decode_tail=max(statistics.median(self._tails), 1.0),
            prefill_beside=max(statistics.mean(self._prefill_slower), 1.0),
            decode_beside=max(statistics.mean(self._decode_slower), 1.0),
        )


class _Steps(NamedTuple):
    """Of decoding: ms of one, over so much context of all sequences; their longest tenth over their mean."""

    ms: float
    context: float
    tail: float


class _Beside(NamedTuple):
    """While both nodes work: ms of a prompt of each size, together, and decode steps."""

    prefill_ms: float
    steps: _Steps


async def _ask_all(served: Served, prompts: list[list[int]], new: int) -> list[Answer]:
    return list(await asyncio.gather(*(served.ask(prompt, new) for prompt in prompts)))


def one_by_one(answers: list[Answer]) -> tuple[float, float]:
    """Prompts of one length, sent together and computed one after the other: (ms of each, ms that the first one waited
    for more than that)."""
    firsts = sorted(answer.token_times_s[0] for answer in answers)
    each_s = (firsts[-1] - firsts[0]) / (len(firsts) - 1)
    sent_s = min(answer.sent_s for answer in answers)
    return each_s * 1e3, (firsts[0] - sent_s - each_s) * 1e3


def together(answers: list[Answer], tokens: int) -> _Steps:
    """Steps while all of them got tokens."""
    begin = max(answer.token_times_s[1] for answer in answers)
    end = min(answer.token_times_s[-1] for answer in answers)
    return _steps_within(answers, tokens, begin, end)


def _steps_within(answers: list[Answer], tokens: int, begin_s: float, end_s: float) -> _Steps:
    step_ms, contexts, tails = [], [], []
    for answer in answers:
        inside = [at for at, time_s in enumerate(answer.token_times_s) if begin_s <= time_s <= end_s]
        if len(inside) > 1:
            gaps_ms = answer.gaps_ms[inside[0] : inside[-1]]
            step_ms.append(statistics.mean(gaps_ms))
            tails.append(longest_tenth_mean(gaps_ms) / step_ms[-1])
            contexts.append(tokens + (inside[0] + inside[-1]) / 2)
    if not step_ms:
        raise InternalError("no two tokens came while they were to be timed")
    return _Steps(statistics.mean(step_ms), sum(contexts), statistics.mean(tails))


async def _measure_beside(served: Served, traffic: Traffic) -> _Beside:
    """Prompts computed while others are decoded."""
    all_run, running = asyncio.Event(), set[int]()

    def note(client: int, count: int) -> None:
        if count > 2:
            running.add(client)
        if len(running) == BESIDE_BATCH:
            all_run.set()

    async def decode(client: int) -> Answer:
        return await served.ask(traffic.prompt(DECODED_TOKENS), STEPS_BESIDE, lambda count: note(client, count))

    decoding = [asyncio.create_task(decode(client)) for client in range(BESIDE_BATCH)]
    try:
        await all_run.wait()
        answers, each_ms = list[Answer](), 0.0
        for tokens in BESIDE_TOKENS:
            prompts = [traffic.prompt(tokens) for _ in range(BESIDE_PROMPTS)]
            answers += (found := await _ask_all(served, prompts, WITH_HANDOFF))
            each_ms += one_by_one(found)[0]
        begin = min(answer.sent_s for answer in answers)
        end = max(answer.token_times_s[0] for answer in answers)
        steps = _steps_within(await asyncio.gather(*decoding), DECODED_TOKENS, begin, end)
    finally:
        for task in decoding:
            task.cancel()
        await asyncio.gather(*decoding, return_exceptions=True)
    return _Beside(each_ms, steps)
